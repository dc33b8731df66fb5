"""Doors for models of your own: Flax NNX and Flax Linen modules as `Policy`.

    policy, params = policy_from_nnx(my_module)
    policy = policy_from_linen(my_module)          # params = my_module.init(...)["params"]

For a plain function `apply_fn(params, tokens, positions, segment_ids) -> logits` there is
`grpo_jax.core.policy.policy_from_apply`. Each of them turns whole logits `[B, T, V]` into a policy;
a model whose head can be split off saves that memory by building a `Policy` of its own.

What the model has to promise: causal inside a segment, segments (and padding, segment 0) do not see
each other, and the same answer at every call (no dropout).

Symbols: `B` rows, `T` tokens a row, `V` vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from grpo_jax.core.policy import Params, Policy, policy_from_apply

ModuleCall = Callable[..., jax.Array]
"""(module, tokens, positions, segment_ids) -> logits [B, T, V]."""


def policy_from_nnx(module: nnx.Module, *, call: ModuleCall | None = None) -> tuple[Policy, Params]:
    """Split an NNX module into a policy and its trainable parameters.

    Args:
      module: called as `module(tokens, positions, segment_ids) -> logits`, all i32[B, T].
      call: how to call it instead, if its arguments differ: `call(module, tokens, positions,
        segment_ids) -> logits`.

    Returns:
      The policy, and every `nnx.Param` as a nested dict. Other variables (constants, random state)
      are held by the policy as they are now; what the call does to them is dropped.

    Raises:
      ValueError: the module has no `nnx.Param`.
    """
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    if not jax.tree.leaves(params):
        raise ValueError(f"{type(module).__name__} has no nnx.Param: there is nothing to train")

    def apply_fn(params: Params, tokens, positions, segment_ids) -> jax.Array:
        state = nnx.clone(rest)
        model = nnx.merge(graph, params, state)
        if call is not None:
            return call(model, tokens, positions, segment_ids)
        return model(tokens, positions, segment_ids)  # pyright: ignore[reportCallIssue]

    return policy_from_apply(apply_fn), nnx.to_pure_dict(params)


def policy_from_linen(
    module: Any,
    *,
    constants: Mapping[str, Any] | None = None,
    method: Any = None,
    call: ModuleCall | None = None,
) -> Policy:
    """Put a Linen module behind a policy of its `params` collection.

    Args:
      module: applied as `module(tokens, positions, segment_ids) -> logits`, all i32[B, T].
      constants: further collections that the module reads and nobody trains, e.g. batch_stats.
      method: the method to apply, as in `flax.linen.Module.apply`; `__call__` if None.
      call: how to call it instead, if its arguments differ; the first argument is the module bound
        to its variables.

    Returns:
      The policy; its parameters are `module.init(...)["params"]`.

    Raises:
      ValueError: `constants` holds "params", or both `method` and `call` are given.
    """
    constants = dict(constants or {})
    if "params" in constants:
        raise ValueError(
            'constants holds "params": parameters are the argument of the policy, not constants'
        )
    if method is not None and call is not None:
        raise ValueError("give either method or call, not both")

    def apply_fn(params: Params, tokens, positions, segment_ids) -> jax.Array:
        variables = {**constants, "params": params}
        if call is not None:
            return call(module.bind(variables), tokens, positions, segment_ids)
        return module.apply(variables, tokens, positions, segment_ids, method=method)

    return policy_from_apply(apply_fn)
