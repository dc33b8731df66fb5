"""Doors for models of your own: Flax NNX and Flax Linen modules as `Policy`.

    policy, params = policy_from_nnx(my_module)
    policy = policy_from_linen(my_module)          # params = my_module.init(...)["params"]

For a plain function `apply_fn(params, tokens, positions, segment_ids) -> logits` there is
`grpo_jax.core.policy.policy_from_apply`. Each of them turns whole logits `[B, T, V]` into a policy;
a model whose head can be split off saves that memory by building a `Policy` of its own.

What the model has to promise: causal inside a segment, segments (and padding, segment 0) do not see
each other, and the same answer at every call (no dropout).

    decoder = decoder_from_policy(policy)

makes any of them something to sample from, without a key-value cache: slow, and right.

Symbols: `B` rows, `T` tokens a row, `V` vocabulary, `N` slots, `P` tokens of a padded prompt, `S`
positions of a slot.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from grpo_jax.core.policy import Decoder, Params, Policy, policy_from_apply

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


Tokens = jax.Array  # i32[N, 1, S, 1]: what stands in the slots, in the form of a cache


def decoder_from_policy(policy: Policy, *, say: Callable[[str], Any] | None = None) -> Decoder:
    """Sample from a model that has no cache: for every token it reads its whole row again.

    A completion of `n` tokens costs `n` forward passes over a slot. In place of keys and values the
    slots hold the tokens themselves.

    Args:
      policy: the model.
      say: told once, here, what this costs. Default: a warning of this module's logger.

    Returns:
      A decoder whose log-probabilities are the policy's own.
    """
    (say or logging.getLogger(__name__).warning)(
        "sampling from a model that has no key-value cache: it reads its whole row again for every "
        "token, which is slow; give the engine a Decoder of the model's own to change that"
    )
    bind = functools.partial
    return Decoder(
        init_cache=_no_tokens,
        prefill=bind(_read_prompts, policy),
        step=bind(_read_again, policy),
        prepare=lambda params: params,
    )


def _no_tokens(slots: int, length: int) -> Tokens:
    return jnp.zeros((slots, 1, length, 1), jnp.int32)


def _read_prompts(
    policy: Policy, params: Params, tokens: jax.Array, lengths: jax.Array, held: Tokens
) -> tuple[jax.Array, Tokens]:
    """Read right-padded prompts [N, P]; return the last tokens' logits f32[N, V], and the slots."""
    held = jax.lax.dynamic_update_slice(held, tokens[:, None, :, None], (0, 0, 0, 0))
    return _logits_at(policy, params, tokens, lengths - 1), held


def _read_again(
    policy: Policy, params: Params, tokens: jax.Array, positions: jax.Array, held: Tokens
) -> tuple[jax.Array, Tokens]:
    """Put one token a row, i32[N], at its own position; return logits f32[N, V], and the slots."""
    rows = jnp.arange(held.shape[0])
    held = held.at[rows, 0, positions, 0].set(tokens, mode="drop", unique_indices=True)
    return _logits_at(policy, params, held[:, 0, :, 0], positions), held


def _logits_at(policy: Policy, params: Params, tokens: jax.Array, last: jax.Array) -> jax.Array:
    """Logits f32[N, V] after the tokens up to and with `last`, i32[N], of rows [N, S]."""
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    segment_ids = (places <= last[:, None]).astype(jnp.int32)
    hidden = policy.hidden(params, tokens, places, segment_ids)
    at = jnp.take_along_axis(hidden, last[:, None, None], axis=1, mode="clip")[:, 0]
    return policy.unembed(policy.head(params), at)
