"""Which tokens count: trained tokens, policy support, and the counts that normalise the loss.

Symbols: `B` rows, `T` tokens a row, `S` sequence slots a row.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_jax.core import reductions
from grpo_jax.core.batch import Batch, Counts


def loss_weights(token_mask: Array, sample_weights: Array, dtype: jnp.dtype) -> Float[Array, "B T"]:
    """Weight of each token: mask times sample weight, and exactly 0 where either is 0."""
    weights = sample_weights.astype(dtype)
    if token_mask.dtype == bool:
        return jnp.where(token_mask, weights, 0)
    mask = token_mask.astype(dtype)
    return jnp.where((mask != 0) & (weights != 0), mask * weights, 0)


def policy_support(
    current: Float[Array, "B T"],
    previous: Float[Array, "B T"] | None,
    generation: Float[Array, "B T"],
) -> Bool[Array, "B T"]:
    """Tokens that every policy of the actor loss could have drawn under top-k/top-p filtering.

        valid = c ≠ −∞  and  p ≠ −∞  and  g ≠ −∞

    Only *negative* infinity means "outside the filter". NaN and +∞ are faults and stay in.
    """
    valid = ~jnp.isneginf(current) & ~jnp.isneginf(generation)
    return valid if previous is None else valid & ~jnp.isneginf(previous)


class ActorMasks(NamedTuple):
    """What is left of a batch for one part of the loss."""

    tokens: Array  # f32[B, T] token mask, without sample weights
    sequences: Array  # f32[B, S] sample weight of each sequence
    weights: Array  # f32[B, T] tokens times their sequence's weight


def batch_masks(batch: Batch, sequences: reductions.Sequences, dtype: jnp.dtype) -> ActorMasks:
    """The masks of a batch as it was collated, before the loss excludes anything."""
    inside = batch.segment_ids > 0
    weights = jnp.where(inside, batch.sample_weights, 0).astype(dtype)
    return ActorMasks(
        tokens=batch.token_mask.astype(dtype),
        sequences=sequences.max(weights),
        weights=loss_weights(batch.token_mask, weights, dtype),
    )


def narrow(
    masks: ActorMasks, valid: Bool[Array, "B T"], sequences: reductions.Sequences
) -> ActorMasks:
    """Take tokens out of the masks; a sequence that keeps none of its tokens leaves with them."""
    tokens = jnp.where(valid, masks.tokens, 0)
    left = sequences.sum(tokens) > 0
    return ActorMasks(
        tokens=tokens,
        sequences=jnp.where(left, masks.sequences, 0),
        weights=jnp.where(valid, masks.weights, 0),
    )


def keep_sequences(
    masks: ActorMasks, keep: Bool[Array, "B S"], sequences: reductions.Sequences
) -> ActorMasks:
    """Take whole sequences out, as if their sample weight had been 0 from the start."""
    kept = keep.astype(masks.tokens.dtype)
    return masks._replace(
        sequences=masks.sequences * kept, weights=masks.weights * sequences.spread(kept)
    )


def count(batch: Batch, *, max_segments: int = 1) -> Counts:
    """Count what the loss divides by, on one part of the global batch; add the parts up.

        tokens = Σ token_mask · sample_weight            (and of those with reward > 0: positives)
        sequences = Σ sample_weight over sequences with at least one trained token

    A sequence without a trained token contributes nothing to the loss, so it does not count. A row
    with more than `max_segments` sequences makes the counts NaN where its ids cannot be read.

    Raises:
      ValueError: a row that can be read holds more than `max_segments` sequences.
    """
    reductions.check_slots(batch.segment_ids, max_segments)
    factor = reductions.slots_factor(batch.segment_ids, max_segments)
    sequences = reductions.Sequences(batch.segment_ids, max_segments)
    masks = batch_masks(batch, sequences, jnp.dtype(jnp.float32))
    trained = sequences.sum(masks.weights) > 0
    positives = None
    if batch.rewards is not None:
        positives = _total(jnp.where(batch.rewards > 0, masks.weights, 0)) * factor
    return Counts(
        tokens=_total(masks.weights) * factor,
        sequences=_total(jnp.where(trained, masks.sequences, 0)) * factor,
        positives=positives,
    )


def _total(weights: Array) -> Float[Array, ""]:
    """Σ weights as f32, whole ones as integers: above 2²⁴ a float32 sum would stop counting."""
    whole = weights == 1
    return jnp.sum(whole, dtype=jnp.int32).astype(weights.dtype) + jnp.sum(
        jnp.where(whole, 0, weights)
    )
