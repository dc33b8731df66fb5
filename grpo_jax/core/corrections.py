"""Importance weights that undo the difference between the sampler's policy and the trainer's.

The weight of a token is v = e^(p − g): trainer over sampler, both without gradient. A truncation
says what happens to weights outside [l, u]; a new one is a function here and a line in
`TRUNCATIONS`. All bounds are inclusive: a weight on a bound is inside.

Symbols: p trainer log-probability, g sampler log-probability, `B` rows, `T` tokens, `S` slots.
Sources: tis: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
training"; icepop: Ling team 2025, "Every step evolves"; sequence gates and token veto: Liu et al.
2025, "When speed kills stability".
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_jax.core import arithmetic, masks, reductions
from grpo_jax.core.loss_config import LossConfig


class Weights(NamedTuple):
    """Importance weights and what the truncation did to them."""

    weights: Float[Array, "B T"]  # after truncation; what multiplies the objective
    raw: Float[Array, "B T"]  # before truncation
    touched: Bool[Array, "B T"]  # clipped or dropped tokens
    keep_tokens: Bool[Array, "B T"]  # False where the truncation dropped the token
    keep_sequences: Bool[Array, "B S"]  # False where it dropped the whole sequence
    log_geometric: Float[Array, "B S"]  # mean of p − g over the response, nats
    overflow: Bool[Array, "B T"]  # weights that the number type could not hold
    vetoed: Bool[Array, "B S"]  # sequences dropped because of a single token


class _Raw(NamedTuple):
    value: Array  # f32[B, T] token weights (product over the response under GSPO)
    geometric: Array  # f32[B, S] geometric mean over the response
    product: Array  # f32[B, S] product over the response


class _Decision(NamedTuple):
    weights: Array
    keep_tokens: Array | None
    keep_sequences: Array | None
    touched: Array | None  # None: what was dropped


def _bounds(config: LossConfig) -> tuple[Array | float, Array | float]:
    low = config.truncated_importance_sampling_ratio_min
    high = config.truncated_importance_sampling_ratio
    assert high is not None  # LossConfig has checked it
    return (0.0 if low is None else low), high


def _tis(raw: _Raw, config: LossConfig) -> _Decision:
    """Clip:  v ← clip(v, l, u)."""
    low, high = _bounds(config)
    touched = (raw.value > high) | (raw.value < low)
    return _Decision(jnp.clip(raw.value, low, high), None, None, touched)


def _icepop(raw: _Raw, config: LossConfig) -> _Decision:
    """Drop tokens:  v ← v · 1[l ≤ v ≤ u]."""
    low, high = _bounds(config)
    keep = (raw.value >= low) & (raw.value <= high)
    return _Decision(jnp.where(keep, raw.value, _visible_zero(raw.value)), keep, None, None)


def _seq_mask_tis(raw: _Raw, config: LossConfig) -> _Decision:
    """Drop sequences by their geometric mean; the others keep their token weights untruncated."""
    low, high = _bounds(config)
    keep = (raw.geometric >= low) & (raw.geometric <= high)
    return _Decision(raw.value, None, keep, None)


def _geo_rs(raw: _Raw, config: LossConfig) -> _Decision:
    """Rejection by the geometric mean; the others have weight 1."""
    decision = _seq_mask_tis(raw, config)
    return decision._replace(weights=jnp.ones_like(raw.value) + _visible_zero(raw.value))


def _product_rs(raw: _Raw, config: LossConfig) -> _Decision:
    """Rejection by the product of the token ratios; the others have weight 1."""
    low, high = _bounds(config)
    keep = (raw.product >= low) & (raw.product <= high)
    ones = jnp.ones_like(raw.value) + _visible_zero(raw.value)
    return _Decision(ones, None, keep, None)


def _untouched(raw: _Raw, config: LossConfig) -> _Decision:
    del config  # nothing is bounded
    return _Decision(raw.value, None, None, None)


TRUNCATIONS: dict[str | None, Callable[[_Raw, LossConfig], _Decision]] = {
    None: _untouched,
    "tis": _tis,
    "icepop": _icepop,
    "seq-mask-tis": _seq_mask_tis,
    "geo-rs": _geo_rs,
    "product-rs": _product_rs,
}


def _visible_zero(values: Array) -> Array:
    """0, and NaN where `values` is NaN: a fault must not vanish behind a gate."""
    return jnp.where(jnp.isnan(values), values, 0)


def _weight(log_weight: Array, config: LossConfig) -> tuple[Array, Array]:
    """exp of a log-weight, and where the number type could not hold it.

    As in the torch reference such a weight becomes 0, so the token drops out of the actor term;
    with `importance_weight_overflow="truncate"` it stays large, so that `tis` can bound it. Either
    way a weight is at most `root³`, see `arithmetic`.
    """
    if config.importance_weight_overflow == "truncate":
        limit = arithmetic.largest_exponent(log_weight.dtype)
        return arithmetic.capped_exp(log_weight), log_weight > limit
    value = jnp.exp(log_weight)
    overflow = jnp.isposinf(value)
    largest = arithmetic.root(value.dtype) ** 3
    return jnp.where(overflow, 0, jnp.minimum(value, largest)), overflow


def importance_weights(
    previous: Float[Array, "B T"],
    generation: Float[Array, "B T"],
    actor: masks.ActorMasks,
    sequences: reductions.Sequences,
    config: LossConfig,
) -> Weights:
    """Importance weights of the actor's tokens, truncated as the config says.

        token:  v_t = e^(p_t − g_t)        GSPO:  v = e^(Σ_t (p_t − g_t) m_t)

    Inputs are nats, sanitised outside the actor mask; nothing here carries a gradient.
    """
    log_weight = arithmetic.bound(previous - generation)
    # The gates ignore what is not finite, as the torch reference does; v itself does not.
    finite = jnp.where(jnp.isfinite(log_weight), log_weight * actor.tokens, 0)
    log_product = sequences.sum(finite)
    log_geometric = log_product / (sequences.sum(actor.tokens) + reductions.EPSILON)
    product, _ = _weight(log_product, config)
    if config.sequence_level_importance_ratios:
        log_weight = sequences.spread(sequences.sum(log_weight * actor.weights))
    value, overflow = _weight(log_weight, config)
    raw = _Raw(value, jnp.exp(log_geometric), product)
    decision = TRUNCATIONS[config.truncated_importance_sampling_type](raw, config)
    keep_tokens = decision.keep_tokens
    if keep_tokens is None:
        keep_tokens = jnp.ones(value.shape, bool)
    keep, vetoed = _sequence_gate(decision, value, actor, sequences, config)
    weights = decision.weights
    if gates_sequences(config):
        gate = sequences.spread(keep.astype(value.dtype)) > 0
        keep_tokens = keep_tokens & gate
        weights = jnp.where(gate, weights, _visible_zero(value))
    return Weights(
        weights=weights,
        raw=value,
        touched=~keep_tokens if decision.touched is None else decision.touched,
        keep_tokens=keep_tokens,
        keep_sequences=keep,
        log_geometric=log_geometric,
        overflow=overflow,
        vetoed=vetoed,
    )


def gates_sequences(config: LossConfig) -> bool:
    """Whether whole sequences can be dropped: where they cannot, no work is spent on it."""
    return config.sequence_truncation or config.token_veto_threshold is not None


def _sequence_gate(
    decision: _Decision,
    value: Array,
    actor: masks.ActorMasks,
    sequences: reductions.Sequences,
    config: LossConfig,
) -> tuple[Array, Array]:
    """Which sequences stay, and which of the dropped ones fell to a single token."""
    keep = decision.keep_sequences
    if keep is None:
        keep = jnp.ones(actor.sequences.shape, bool)
    if config.token_veto_threshold is None:
        return keep, jnp.zeros_like(keep)
    broken = (value < config.token_veto_threshold) & (actor.weights != 0)
    vetoed = sequences.max(broken.astype(value.dtype)) > 0
    return keep & ~vetoed, vetoed
