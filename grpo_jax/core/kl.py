"""Estimators of the KL divergence from single samples, with the clamps of the torch reference.

For a token drawn from the policy, with d = log p_ref − log p:

    k1 = −d          unbiased, high variance, may be negative
    k2 = d² / 2      biased, low variance
    k3 = e^d − 1 − d unbiased, never negative

Source: J. Schulman, "Approximating KL divergence", 2020, http://joschu.net/blog/kl-approx.html.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from grpo_jax.core import arithmetic


def _k1(difference: Array) -> Array:
    return -difference


def _k2(difference: Array) -> Array:
    return 0.5 * jnp.square(difference)


def _k3(difference: Array) -> Array:
    return arithmetic.exp_beyond_line(difference)


ESTIMATORS: dict[str, Callable[[Array], Array]] = {"k1": _k1, "k2": _k2, "k3": _k3}


def check_kl_type(kl_type: str, key: str = "kl_type") -> None:
    """Refuse the name of an estimator that does not exist.

    Raises:
      ValueError: `kl_type` is not one of k1, k2, k3.
    """
    if kl_type not in ESTIMATORS:
        raise ValueError(f"{key}={kl_type!r} is unknown; use one of {', '.join(ESTIMATORS)}")


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
    bounds. A clamp of None is off. Inputs are nats. Finite inputs give a finite result: see
    `arithmetic.root`.

    Raises:
      ValueError: unknown `kl_type`.
    """
    check_kl_type(kl_type)
    difference = reference - logprobs
    if input_clamp is not None:
        input_clamp = _at_most(input_clamp, arithmetic.root(difference.dtype))
        inside = (difference >= -input_clamp) & (difference <= input_clamp)
        if weights is not None:
            weights = jnp.where(inside, weights, jax.lax.stop_gradient(weights))
        difference = arithmetic.clip_through(difference, -input_clamp, input_clamp)
    else:
        difference = arithmetic.bound(difference)
    kl = ESTIMATORS[kl_type](difference)
    if output_clamp is not None:
        output_clamp = _at_most(output_clamp, arithmetic.root(difference.dtype) ** 3)
    if weights is not None:
        # With an output clamp an infinite product is harmless: it is cut, and has no gradient.
        kl = weights * kl if output_clamp is not None else _weighted(weights, kl)
    return kl if output_clamp is None else arithmetic.clip_through(kl, -output_clamp, output_clamp)


def _at_most(clamp: float | Array, most: float) -> float | Array:
    """A clamp beyond what the number type can bear is no clamp: take the type's own bound."""
    return jnp.minimum(clamp, most) if isinstance(clamp, jax.Array) else min(clamp, most)


def _weighted(weights: Array, kl: Array) -> Array:
    """w · k; beyond `root³` the weight is that which reaches it, a constant."""
    most = jax.lax.stop_gradient(arithmetic.bound_weights(weights, kl))
    return jnp.where(weights > most, most, weights) * kl
