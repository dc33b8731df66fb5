"""`clip` and `exp` with derivatives, ranges and roundings that we choose."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array


def clip_through(values: Array, low: Array | float, high: Array | float) -> Array:
    """Clip with torch's derivative: 1 inside and on the bounds, 0 strictly outside.

    `jnp.clip` gives 1/2 on a bound, which shows wherever a ratio sits exactly on 1 ± ε.
    """
    low, high = jnp.asarray(low, values.dtype), jnp.asarray(high, values.dtype)
    return jnp.where(values < low, low, jnp.where(values > high, high, values))


def root(dtype: jnp.dtype) -> float:
    """The fourth root of the type's largest number: 4.3e9 in float32.

    An advantage, or a log-probability that stands as a factor, enters the loss with at most this
    size, and one factor with its weight is at most `root³`. So no product overflows, and a factor
    of `root` is left for sums over tokens and for small denominators.
    """
    return math.exp(_QUARTER * math.log(float(jnp.finfo(dtype).max)))


_QUARTER = 0.25


def largest_exponent(dtype: jnp.dtype) -> float:
    """The exponent above which we do not follow `exp`: that of `root³`, 66.5 in float32."""
    return 3 * _QUARTER * math.log(float(jnp.finfo(dtype).max))


def bound(values: Array, limit: float | None = None) -> Array:
    """Finite values cut to ±limit, without a derivative beyond; None stands for `root`.

    Infinite and NaN values are faults of the input and pass through, so that they stay visible.
    """
    limit = root(values.dtype) if limit is None else limit
    size = jnp.abs(values)
    over = (size > limit) & (size < jnp.inf)
    return jnp.where(over, jax.lax.stop_gradient(jnp.clip(values, -limit, limit)), values)


def bound_weights(weights: Array, factor: Array) -> Array:
    """Positive weights such that `weights · factor` stays within ±root³:

    w ← min(w, root³ / max(|x|, 1))
    """
    limit = root(weights.dtype) ** 3
    return jnp.minimum(weights, limit / jnp.maximum(jnp.abs(factor), 1.0))


def cap_exponent(exponent: Array, cap: Array | float | None = None) -> Array:
    """min(x, cap) for finite x, with derivative 0 beyond; None stands for `largest_exponent`.

    Infinite and NaN exponents are faults of the input and pass through, so that they stay visible.
    """
    cap = largest_exponent(exponent.dtype) if cap is None else cap
    over = (exponent > cap) & (exponent < jnp.inf)
    return jnp.where(over, jnp.asarray(cap, exponent.dtype), exponent)


def capped_exp(exponent: Array, cap: Array | float | None = None) -> Array:
    """exp(min(x, cap)) for finite x: finite in value and in gradient."""
    return jnp.exp(cap_exponent(exponent, cap))


def _even_and_odd(x: Array) -> tuple[Array, Array, Array]:
    """Whether |x| ≤ 1/4, and there the even and odd part of e^x − 1 − x as series, to rounding.

    To x¹³, and to x⁷ in float32: what is left out is below 2e-17 and 1.2e-8 of the result.
    """
    near = jnp.abs(x) <= 0.25
    x = jnp.where(near, x, 0)  # first: powers of a large x would make ∞ − ∞
    square = x * x
    even, odd = jnp.zeros_like(x), jnp.zeros_like(x)
    for power in (6, 4, 2) if x.dtype == jnp.float32 else (12, 10, 8, 6, 4, 2):
        even = (even + 1 / math.factorial(power)) * square
        odd = (odd + 1 / math.factorial(power + 1)) * square
    return near, even, odd * x


@jax.custom_jvp
def exp_beyond_line(x: Array) -> Array:
    """e^x − 1 − x, to rounding: the plain form cancels near 0, where it turns negative.

    Finite for finite x: the exponent stops at `largest_exponent`.
    """
    near, even, odd = _even_and_odd(x)
    return jnp.where(near, even + odd, capped_exp(x) - 1 - x)


@exp_beyond_line.defjvp
def _exp_beyond_line_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    value = exp_beyond_line(x)
    # d/dx = e^x − 1, which is already there: no second exponential.
    over = (x > largest_exponent(x.dtype)) & jnp.isfinite(x)
    return value, jnp.where(over, -1, value + x) * dx


class BothWays(NamedTuple):
    """Exponentials of x and −x, and what is left of them beyond 1 and beyond a line."""

    up: Array  # e^x
    down: Array  # e^−x
    above: Array  # e^x − 1 − x
    below: Array  # e^−x − 1 + x
    apart: Array  # cosh x − 1


def both_ways(x: Array) -> BothWays:
    """All of `BothWays` from a single exponential, to rounding; no gradient.

    Finite for finite x; infinite and NaN arguments stay visible.
    """
    big = math.exp(largest_exponent(x.dtype))
    up = jnp.exp(x)
    up = jnp.where((up > big) & (x < jnp.inf), big, up)
    # `maximum` keeps 1/e^x finite, and keeps XLA from making a second exponential out of it.
    down = jnp.where(jnp.isneginf(x), jnp.inf, 1 / jnp.maximum(up, 1 / big))
    near, even, odd = _even_and_odd(x)
    return BothWays(
        up,
        down,
        above=jnp.where(near, even + odd, up - 1 - x),
        below=jnp.where(near, even - odd, down - 1 + x),
        apart=jnp.where(near, even, 0.5 * up + 0.5 * down - 1),
    )


def log1p(x: Array) -> Array:
    """log(1 + x) for x ≥ 0, to rounding, at half the price of `jnp.log1p`.

        log(1 + x) = log u + (x − (u − 1)) / u,   u = 1 + x as rounded

    The correction only counts where u is near 1, so it is taken undivided below u = 2: the
    difference is at most half a unit in the last place. Nothing here is differentiated.
    """
    # `abs` changes nothing; without it XLA takes u − 1 for x.
    rounded = jnp.abs(1 + x)
    return jnp.log(rounded) + jnp.where(rounded < 2, x - (rounded - 1), 0)
