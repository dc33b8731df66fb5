"""Exclude, then sanitise: one batch as the loss sees it.

First decide which tokens count: token mask, sample weights, policy support under top-k/top-p, the
in-loss sequence check. Then put a zero wherever nothing counts. Everything below this door is plain
arithmetic, and a value outside the masks reaches neither the loss nor its gradient.

Symbols: c current log-probability, p previous one, g sampler's, m token weight, `B` rows, `T`
tokens, `S` sequence slots.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from grpo_jax.core import arithmetic, masks, reductions
from grpo_jax.core.batch import Batch, TokenScores
from grpo_jax.core.loss_config import LossConfig


class View(NamedTuple):
    """One batch with its masks decided and its values sanitised."""

    current: Array  # f32[B, T] nats, differentiable
    previous: Array  # f32[B, T] nats
    generation: Array  # f32[B, T] nats
    advantages: Array  # f32[B, T]
    actor: masks.ActorMasks  # after support exclusion and rejection
    whole: masks.ActorMasks  # after rejection only: the KL term, and the denominators
    sequences: reductions.Sequences
    counters: dict[str, Array]  # what exclusion and rejection did; contributions to metrics


def view_batch(
    scores: TokenScores,
    batch: Batch,
    config: LossConfig,
    filtering_on: bool,
    max_segments: int,
) -> View:
    """Decide which tokens count, then sanitise. Arithmetic is float32, or float64 where c is."""
    dtype = jnp.promote_types(scores.logprobs.dtype, jnp.float32)
    sequences = reductions.Sequences(batch.segment_ids, max_segments)
    current = scores.logprobs
    previous = jax.lax.stop_gradient(_previous(current, batch, config))
    generation = jax.lax.stop_gradient(batch.generation_logprobs)
    whole = masks.batch_masks(batch, sequences, dtype)
    counters = {"batch_tokens": whole.weights, "batch_sequences": whole.sequences}
    actor, valid = whole, None
    if filtering_on:
        valid = masks.policy_support(current, previous, generation)
        actor = masks.narrow(whole, valid, sequences)
    if config.seq_logprob_error_in_loss:
        keep = _agreement(actor, previous, generation, sequences, config)
        left = masks.keep_sequences(actor, keep, sequences)
        counters |= _rejection_counters(actor, left)
        actor, whole = left, masks.keep_sequences(whole, keep, sequences)
    # A rejected sequence counts as filtered before the loss: its tokens are not "excluded".
    excluded = jnp.zeros((), bool) if valid is None else (whole.weights != 0) & ~valid
    counters |= {
        "policy_support_excluded_tokens": excluded.astype(dtype),
        "kept_tokens": whole.weights,
        "kept_sequences": whole.sequences,
        "retained_tokens": actor.weights,
        "num_valid_samples": actor.sequences,
    }
    on = actor.weights != 0
    return View(
        current=jnp.where(on, current, 0).astype(dtype),
        previous=jnp.where(on, previous, 0).astype(dtype),
        generation=jnp.where(on, generation, 0).astype(dtype),
        advantages=arithmetic.bound(jnp.where(on, batch.advantages, 0).astype(dtype)),
        actor=actor,
        whole=whole,
        sequences=sequences,
        counters=counters,
    )


def _previous(current: Array, batch: Batch, config: LossConfig) -> Array:
    """p: the current policy itself where the ratio is forced to 1."""
    if config.force_on_policy_ratio:
        return current
    assert batch.prev_logprobs is not None  # the loss has checked it
    return batch.prev_logprobs


def _agreement(
    actor: masks.ActorMasks,
    previous: Array,
    generation: Array,
    sequences: reductions.Sequences,
    config: LossConfig,
) -> Array:
    """Sequences on which trainer and sampler agree.

        e_i = Σ_t e^|g − p| / n over the n tokens with weight,   keep_i = e_i ≤ τ

    bool[B, S]. NaN and inf are not kept; a sequence without a token has error 0 and is kept. The
    weights themselves stay outside: a down-weighted sequence is not made to look more exact.
    """
    on, dtype = actor.weights != 0, actor.weights.dtype
    gap = jnp.where(on, generation, 0).astype(dtype) - jnp.where(on, previous, 0).astype(dtype)
    error = arithmetic.capped_exp(jnp.abs(gap))
    total = sequences.sum(jnp.where(on, error, 0))
    mean = total / jnp.maximum(sequences.sum(on.astype(dtype)), 1)
    assert config.seq_logprob_error_threshold is not None  # LossConfig has checked it
    return mean <= config.seq_logprob_error_threshold


def _rejection_counters(before: masks.ActorMasks, left: masks.ActorMasks) -> dict[str, Array]:
    return {
        "num_masked_seqs_by_logprob_error": before.sequences - left.sequences,
        "seq_logprob_error_valid_tokens": left.weights,
        "seq_logprob_error_valid_seqs": left.sequences,
    }
