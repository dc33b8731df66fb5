"""What an optimizer update turns into its successor: parameters, moments, counters.

Parameters are float32 masters; a model that computes in bfloat16 casts inside its forward pass.
A state is born sharded: the shapes come first, rules give every array its place, and one compiled
program makes each array where it will live.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from grpo_jax.core.policy import Params
from grpo_jax.scale import rules
from grpo_jax.scale.rules import Rules, Say


@flax.struct.dataclass
class TrainState:
    """One point of a training run."""

    step: jax.Array  # i32[] calls of the train step: updates applied and updates skipped
    skipped: jax.Array  # i32[] of those, the calls that changed nothing but the two counters
    params: Params  # float32 masters
    opt_state: optax.OptState
    critic: "TrainState | None" = None  # beside the policy, where an estimator needs one

    @property
    def updates(self) -> jax.Array:
        """Optimizer updates applied, i32[]: what the learning-rate schedule counts."""
        return self.step - self.skipped


class Placement(NamedTuple):
    """Where every array of a run lives."""

    mesh: Mesh
    state: TrainState  # of `NamedSharding`, in the place of arrays


def init(params: Params, transform: optax.GradientTransformation) -> TrainState:
    """Make the state that training starts from; a pure function, for `jit` and `eval_shape`."""
    params = jax.tree.map(_master, params)
    zero = jnp.zeros((), jnp.int32)
    return TrainState(step=zero, skipped=zero, params=params, opt_state=transform.init(params))


def _master(x: Any) -> jax.Array:
    """Copy to float32 or better; the copy is what the train step may give away."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.copy(x)
    return jnp.array(x, dtype=jnp.promote_types(x.dtype, jnp.float32), copy=True)


def abstract(params: Params, transform: optax.GradientTransformation) -> TrainState:
    """Shapes and dtypes of the state that belongs to `params` (arrays, or shapes of arrays)."""
    return jax.eval_shape(lambda p: init(p, transform), params)


def placement(
    shapes: TrainState,
    transform: optax.GradientTransformation,
    mesh: Mesh,
    partition_rules: Rules = rules.LLAMA_RULES,
    *,
    say: Say | None = None,
) -> Placement:
    """Give every array of a state its place.

    Args:
      shapes: what `abstract` returned.
      transform: the optimizer whose state it holds.
      mesh: the devices.
      partition_rules: rules on parameter paths; moments follow their parameters.
      say: told, once, which dimensions do not divide and stay whole.
    """
    whole = rules.replicated(mesh)
    params = rules.partition(shapes.params, mesh, partition_rules, say=say)

    def follow(moment: Any, place: Any, param: Any) -> Any:
        return place if moment.shape == param.shape else whole  # factored moments have other shapes

    opt_state = optax.tree.map_params(
        transform,
        follow,
        shapes.opt_state,
        params,
        shapes.params,
        transform_non_params=lambda _: whole,
    )
    places = dataclasses.replace(
        shapes, step=whole, skipped=whole, params=params, opt_state=opt_state
    )
    return Placement(mesh, places)


def create(
    params: Params, transform: optax.GradientTransformation, places: Placement | None = None
) -> TrainState:
    """Make the state from parameters that exist; the caller's arrays stay the caller's.

    Args:
      params: arrays on the host or on devices, in any float dtype.
      transform: the optimizer.
      places: what `placement` returned; None leaves everything on the default device.
    """
    if places is None:
        return jax.jit(lambda p: init(p, transform))(params)
    params = jax.device_put(params, places.state.params)
    return jax.jit(lambda p: init(p, transform), out_shardings=places.state)(params)


def born_sharded(
    make_params: Callable[..., Params],
    *arguments: Any,
    transform: optax.GradientTransformation,
    mesh: Mesh,
    partition_rules: Rules = rules.LLAMA_RULES,
) -> tuple[TrainState, Placement]:
    """Make a state whose parameters never exist whole on one device.

    Args:
      make_params: `(*arguments) -> params`, traceable, such as a random initialiser.
      arguments: its arguments, such as a key.
      transform: the optimizer.
      mesh: the devices.
      partition_rules: rules on parameter paths.

    Returns:
      The state, and where it lives.
    """

    def make(*arguments: Any) -> TrainState:
        return init(make_params(*arguments), transform)

    shapes = jax.eval_shape(make, *arguments)
    places = placement(shapes, transform, mesh, partition_rules)
    return jax.jit(make, out_shardings=places.state)(*arguments), places


def targets(shapes: TrainState, places: Placement) -> TrainState:
    """Join shapes and places into what a checkpoint is restored onto."""
    return jax.tree.map(
        lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place),
        shapes,
        places.state,
    )
