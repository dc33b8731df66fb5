"""`clip` and `exp` with derivatives that we choose."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array


def clip_through(values: Array, low: Array | float, high: Array | float) -> Array:
    """Clip with torch's derivative: 1 inside and on the bounds, 0 strictly outside.

    `jnp.clip` gives 1/2 on a bound, which shows wherever a ratio sits exactly on 1 ± ε.
    """
    inside = (values >= low) & (values <= high)
    return jnp.where(inside, values, jax.lax.stop_gradient(jnp.clip(values, low, high)))


def largest_exponent(dtype: jnp.dtype) -> float:
    """The exponent above which we do not follow `exp`: e^8 below the largest number of the type."""
    return math.log(float(jnp.finfo(dtype).max)) - 8.0


def cap_exponent(exponent: Array, cap: Array | float | None = None) -> Array:
    """min(x, cap) for finite x, with derivative 0 beyond; None stands for `largest_exponent`.

    Infinite and NaN exponents are faults of the input and pass through, so that they stay visible.
    """
    cap = largest_exponent(exponent.dtype) if cap is None else cap
    over = (exponent > cap) & jnp.isfinite(exponent)
    return jnp.where(over, jnp.asarray(cap, exponent.dtype), exponent)


def capped_exp(exponent: Array, cap: Array | float | None = None) -> Array:
    """exp(min(x, cap)) for finite x: finite in value and in gradient."""
    return jnp.exp(cap_exponent(exponent, cap))
