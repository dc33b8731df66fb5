"""The critic's loss: squared error of values against returns, clipped as in PPO.

Papers: PPO, https://arxiv.org/abs/1707.06347; the clipped value loss is the one of its code.

Symbols: `B` rows, `T` tokens a row, `V_t` value of the state before token t, `R_t` its return, `m`
token mask times sample weight.
"""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from grpo_jax.core import masks, reductions
from grpo_jax.core.batch import Batch, Counts


@dataclasses.dataclass(frozen=True)
class ValueLossConfig:
    """The critic's loss; names and defaults are the torch reference's."""

    scale: float = 1.0  # factor on the loss, and so on its gradient
    # how far a value may move from the one of the rollout before its gradient is cut off, in units
    # of reward; null and 0 are off
    cliprange: float | None = None

    def __post_init__(self):
        for name in ("scale", "cliprange"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} = {value} must be finite and not negative")


def value_loss(
    values: Float[Array, "B T"], batch: Batch, counts: Counts, config: ValueLossConfig
) -> tuple[Array, dict[str, Array]]:
    """Error of the critic on a part of the batch; parts add up, metrics too.

        L = scale/2 · Σ m max((V − R)², (V_c − R)²) / N_tok
        V_c = clip(V, V_old − ε, V_old + ε)              ε = cliprange; off: V_c = V

    The clip can only make the loss larger: it takes the gradient from values that have moved far
    enough, and that are not farther from their return than the clipped value is.

    Args:
      values: f32[B, T] of the state before each token.
      batch: with `returns`, and with the `values` of the rollout where the clip is on.
      counts: of the whole optimizer batch; `tokens` is read.

    Returns:
      The loss, and {"vf_clipfrac": share of tokens whose gradient the clip took}.

    Raises:
      ValueError: the batch lacks returns or values.
    """
    reach = config.cliprange or 0.0
    if batch.returns is None or (reach > 0 and batch.values is None):
        raise ValueError(
            "the value loss needs batch.returns, and batch.values for its clip; make them with the "
            "estimator 'gae'"
        )
    weights = masks.loss_weights(batch.token_mask, batch.sample_weights, values.dtype)
    trained = weights != 0

    def select(x: Array) -> Array:
        return jnp.where(trained, x, 0).astype(values.dtype)

    v, r = select(values), select(batch.returns)
    error = jnp.square(v - r)
    over = jnp.zeros_like(trained)
    if reach > 0 and batch.values is not None:
        old = select(batch.values)
        clipped_error = jnp.square(jnp.clip(v, old - reach, old + reach) - r)
        over = clipped_error > error
        error = jnp.where(over, clipped_error, error)

    def mean(x: Array) -> Array:
        return reductions.masked_mean(x, weights, denominator=counts.tokens)

    loss = 0.5 * config.scale * mean(error)
    return loss, {"vf_clipfrac": mean(over.astype(values.dtype))}
