"""Estimators of the KL divergence from single samples, with the clamps of the torch reference.

For a token drawn from the policy, with d = log p_ref − log p:

    k1 = −d          unbiased, high variance, may be negative
    k2 = d² / 2      biased, low variance
    k3 = e^d − 1 − d unbiased, never negative

Source: J. Schulman, "Approximating KL divergence", 2020, http://joschu.net/blog/kl-approx.html.
"""

import math
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

KLType = Literal["k1", "k2", "k3"]


def clip_through(values: Array, low: Array | float, high: Array | float) -> Array:
    """Clip with torch's derivative: 1 inside and on the bounds, 0 strictly outside.

    `jnp.clip` gives 1/2 on a bound, which shows wherever a ratio sits exactly on 1 ± ε.
    """
    inside = (values >= low) & (values <= high)
    return jnp.where(inside, values, jax.lax.stop_gradient(jnp.clip(values, low, high)))


def largest_exponent(dtype: jnp.dtype) -> float:
    """The exponent above which we do not follow `exp`: e^8 below the largest number of the type."""
    return math.log(float(jnp.finfo(dtype).max)) - 8.0


def capped_exp(exponent: Array, cap: Array | float | None = None) -> Array:
    """`exp(min(x, cap))` for finite x: finite in value and gradient (0 beyond the cap).

    Infinite and NaN exponents are faults of the input and pass through, so that they stay visible.
    """
    cap = largest_exponent(exponent.dtype) if cap is None else cap
    over = (exponent > cap) & jnp.isfinite(exponent)
    return jnp.exp(jnp.where(over, jnp.asarray(cap, exponent.dtype), exponent))


def _k1(difference: Array) -> Array:
    return -difference


def _k2(difference: Array) -> Array:
    return 0.5 * jnp.square(difference)


def _k3(difference: Array) -> Array:
    # e^d − 1 − d, written with expm1: the plain form cancels near d = 0 and goes negative.
    # Without an input clamp the exponent stops where the number type does.
    cap = largest_exponent(difference.dtype)
    over = (difference > cap) & jnp.isfinite(difference)
    return jnp.expm1(jnp.where(over, cap, difference)) - difference


ESTIMATORS: dict[str, Callable[[Array], Array]] = {"k1": _k1, "k2": _k2, "k3": _k3}


def check_kl_type(kl_type: str, key: str = "kl_type") -> None:
    """Refuse the name of an estimator that does not exist.

    Raises:
      ValueError: `kl_type` is not one of k1, k2, k3.
    """
    if kl_type not in ESTIMATORS:
        raise ValueError(f"{key}={kl_type!r} is unknown; use one of {', '.join(get_args(KLType))}")


def calculate_kl(
    logprobs: Float[Array, "*shape"],
    reference: Float[Array, "*shape"],
    kl_type: str = "k3",
    *,
    input_clamp: float | Array | None = 20.0,
    output_clamp: float | Array | None = 10.0,
    weights: Float[Array, "*shape"] | None = None,
) -> Float[Array, "*shape"]:
    """Estimate KL(policy ‖ reference) at each token, in nats.

        d = clip(reference − logprobs, −a, a)
        k = clip(w · estimator(d), −b, b)

    Where the input clamp `a` is active the weight `w` carries no gradient; the output clamp `b`
    stands after the weight, so it gates the weight's gradient too. Clips have derivative 1 on their
    bounds. A clamp of None is off. Inputs are nats.

    Raises:
      ValueError: unknown `kl_type`.
    """
    check_kl_type(kl_type)
    difference = reference - logprobs
    if input_clamp is not None:
        inside = (difference >= -input_clamp) & (difference <= input_clamp)
        if weights is not None:
            weights = jnp.where(inside, weights, jax.lax.stop_gradient(weights))
        difference = clip_through(difference, -input_clamp, input_clamp)
    kl = ESTIMATORS[kl_type](difference)
    if weights is not None:
        kl = weights * kl
    return kl if output_clamp is None else clip_through(kl, -output_clamp, output_clamp)
