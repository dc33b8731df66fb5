"""The clipped policy-gradient loss: masks, exclusion, surrogate, correction, KL, reduction.

    L = L_actor + β L_kl + μ L_nll − η L_entropy

Each part is a *partial sum* over `counts`, which belong to the whole global batch: the losses, the
gradients and the raw metrics of micro-batches, data shards and packed rows add up to exactly those
of the full batch. Nothing is ever averaged.

For the author of a train step:

1. Per micro-batch: `loss, metrics = clipped_pg_loss(scores, batch, counts, config, ...)`, and the
   gradient of `loss`. Add the gradients up.
2. Merge the metrics with `diagnostics.merge_metrics` (or `sum_metrics` over a stacked axis).
   Do not use a plain sum: extrema do not add.
3. Once per optimizer step: `scale = diagnostics.gradient_scale(metrics, counts, config)`. Multiply
   the accumulated gradient by it *before* clipping. 0 means that nothing is left to train on:
   skip the update and count it. It is 1 unless a denominator is known only after the forward pass.
4. `diagnostics.finalize_metrics(metrics, counts, config)` divides, once.

Only `truncated_is_normalization="survivors"` together with another term (`config.survivors_first`)
needs more, because then two parts of the loss have different denominators: add up
`survivor_counts` over the micro-batches first and pass `counts._replace(survivors=...)`.
`clipped_pg_loss` says so when it is missing.

Order inside: decide which tokens count, then sanitise, then plain arithmetic. A value outside the
masks (NaN, inf, 1e30) reaches neither the loss nor its gradient.

Symbols: c current log-probability, p previous one, g sampler's, r frozen reference's, A advantage,
m token weight, m_t token mask, m_s sequence weight, N counts, `B` rows, `T` tokens, `S` slots.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from grpo_jax.core import (
    arithmetic,
    corrections,
    diagnostics,
    exclusion,
    input_checks,
    kl,
    masks,
    measures,
    reductions,
    row_blocks,
    surrogates,
)
from grpo_jax.core.batch import Batch, Counts, TokenScores
from grpo_jax.core.diagnostics import Metrics
from grpo_jax.core.loss_config import LossConfig

__all__ = ["LossConfig", "Survivors", "clipped_pg_loss", "survivor_counts"]


class Survivors(NamedTuple):
    """Denominators known only after filtering, in the unit of the loss: tokens or sequences."""

    actor: Array
    """What the truncation left; the actor term divides by it."""
    rest: Array
    """What the in-loss check left, else the whole batch; KL and entropy divide by it."""


def clipped_pg_loss(
    scores: TokenScores,
    batch: Batch,
    counts: Counts,
    config: LossConfig,
    *,
    filtering_on: bool = False,
    max_segments: int = 1,
    row_block: int | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Loss of one micro-batch as a partial sum over the counts of the global batch, and metrics.

    Args:
      scores: log-probabilities of this forward pass, token-aligned, nats. `unfiltered` is needed
        where filters are on and there is a KL term, `entropy` for the entropy bonus.
      batch: token-aligned arrays; values outside the masks do not matter.
      counts: of the whole global batch, taken before the loss drops anything (`masks.count`).
      config: which loss.
      filtering_on: top-k, top-p or min-p was active, so −inf means "outside the support" and the
        token leaves the actor loss. False: −inf is a fault and stays visible.
      max_segments: most sequences packed in one row; 1 when rows are not packed.
      row_block: walk the rows in blocks of at most this many; see `row_blocks`. None: all at once.

    Returns:
      The loss, and raw metrics for `diagnostics.finalize_metrics`. Loss and gradient are NaN where
      a row holds more than `max_segments` sequences and that cannot be read (under `jit`).

    Raises:
      ValueError: an array that the config needs is missing, has another shape than `batch.tokens`,
        or no float type; a mask or weight is negative or above 1; a row has too many sequences.
    """
    _check_inputs(scores, batch, counts, config, filtering_on)
    input_checks.check_arrays(scores, batch, counts)
    reductions.check_slots(batch.segment_ids, max_segments)
    of_rows = functools.partial(
        _contributions, filtering_on=filtering_on, max_segments=max_segments
    )
    if row_block is None or config.positive_nll_local_count:
        return _total(of_rows(scores, batch, counts, config), counts, config)
    return row_blocks.in_blocks(of_rows, _total, scores, batch, counts, config, row_block)


def survivor_counts(
    scores: TokenScores | None,
    batch: Batch,
    config: LossConfig,
    *,
    filtering_on: bool = False,
    max_segments: int = 1,
) -> Survivors:
    """Count what the filters leave of one micro-batch; add the parts up with `jax.tree.map`.

    `scores` may be None where the gates only read the batch: not with `force_on_policy_ratio`,
    and not with filters, where a token that the current policy cannot draw leaves the mean, the
    product and the veto of its sequence.

    Raises:
      ValueError: `scores` is missing and needed, or a row that can be read holds more than
        `max_segments` sequences (where it cannot be read, the counts are NaN).
    """
    reductions.check_slots(batch.segment_ids, max_segments)
    factor = reductions.slots_factor(batch.segment_ids, max_segments)
    if scores is None:
        if config.gates_read_policy(filtering_on):
            name = "filtering_on" if filtering_on else "force_on_policy_ratio"
            raise ValueError(
                f"{name}=True makes the gates depend on the current policy; "
                "pass the scores of a forward pass to survivor_counts"
            )
        assert batch.prev_logprobs is not None
        scores = TokenScores(logprobs=batch.prev_logprobs)
    view = exclusion.view_batch(scores, batch, config, filtering_on, max_segments)
    weights = _importance_weights(view, config)
    tokens, sequences = measures.survivors(view, weights, config)
    if config.token_level_loss:
        left, kept = tokens, view.counters["kept_tokens"]
    else:
        left, kept = sequences, view.counters["kept_sequences"]
    return Survivors(jnp.sum(left) * factor, jnp.sum(kept) * factor)


def _check_inputs(
    scores: TokenScores, batch: Batch, counts: Counts, config: LossConfig, filtering_on: bool
) -> None:
    """Say what is missing before anything is computed from it."""
    _check_batch(batch, config)
    nll, local = config.positive_nll_on, config.positive_nll_local_count
    _refuse_missing(
        (
            config.kl_on and filtering_on and scores.unfiltered is None,
            "scores.unfiltered: the KL term compares unfiltered log-probabilities; ask "
            "token_scores for them",
        ),
        (
            config.entropy_bonus_on and scores.entropy is None,
            "scores.entropy: entropy_bonus reads it; ask token_scores for it",
        ),
        (
            nll and counts.positives is None and not local,
            "counts.positives: count them over the global batch with masks.count",
        ),
        (
            config.survivors_first and counts.survivors is None,
            "counts.survivors: with a KL, positive-example or entropy term, "
            "truncated_is_normalization='survivors' needs the survivors before the loss; add "
            "survivor_counts over the micro-batches",
        ),
    )


def _check_batch(batch: Batch, config: LossConfig) -> None:
    _refuse_missing(
        (
            batch.prev_logprobs is None and not config.force_on_policy_ratio,
            "batch.prev_logprobs: run a score pass, or set force_on_policy_ratio=True",
        ),
        (
            batch.generation_logprobs is None,
            "batch.generation_logprobs: have the sampler return them; they are never guessed",
        ),
        (
            batch.reference_logprobs is None and config.kl_on,
            "batch.reference_logprobs: run a reference pass, or set reference_policy_kl_penalty=0",
        ),
        (
            batch.rewards is None and config.positive_nll_on,
            "batch.rewards: positive_example_nll_weight reads them; set it to 0",
        ),
    )


def _refuse_missing(*cases: tuple[bool, str]) -> None:
    for missing, message in cases:
        if missing:
            raise ValueError(f"the loss needs {message}")


def _contributions(
    scores: TokenScores,
    batch: Batch,
    counts: Counts,
    config: LossConfig,
    *,
    filtering_on: bool,
    max_segments: int,
) -> Metrics:
    """What each token or sequence of some rows adds to the loss's parts and to the metrics.

    Everything between the door and the sum over rows: `_total` adds up and divides.
    """
    view = exclusion.view_batch(scores, batch, config, filtering_on, max_segments)
    terms = _surrogate_terms(view, config)
    weights = _importance_weights(view, config)
    corrected = terms.loss
    if config.use_importance_sampling_correction:
        # The derivative of a log-probability that is nearly 0 is larger than the loss: hence A.
        size = jax.lax.stop_gradient(jnp.maximum(jnp.abs(terms.loss), jnp.abs(view.advantages)))
        corrected = arithmetic.bound_weights(weights.weights, size) * terms.loss
    parts = {
        "actor_loss": _weigh(corrected, view.actor, view, config),
        "kl_penalty": _kl_term(scores, batch, view, config),
        "positive_nll_loss": _positive_nll(batch, counts, view, config),
        "entropy_term": _entropy_term(scores, view, config),
    }
    # In here, so that a gradient of all rows is never written a second time to be multiplied.
    factor = reductions.slots_factor(batch.segment_ids, max_segments)
    parts = {name: part * factor for name, part in parts.items()}
    still = jax.lax.stop_gradient
    view = view._replace(current=still(view.current))
    measured = measures.measure(
        scores, view, surrogates.Terms(*still(tuple(terms))), weights, config
    )
    return diagnostics.select_level(parts | view.counters | measured, config)


def _total(contributions: Metrics, counts: Counts, config: LossConfig) -> tuple[Array, Metrics]:
    """The loss and the raw metrics, once the contributions of all rows are there."""
    metrics = diagnostics.total(contributions)
    denominators = _denominators(counts, config)
    metrics["actor_loss"] = metrics["actor_loss"] / (denominators.actor + reductions.EPSILON)
    for name in ("kl_penalty", "entropy_term"):
        metrics[name] = metrics[name] / (denominators.rest + reductions.EPSILON)
    metrics |= measures.bounded_extrema(metrics, config)
    metrics["loss"] = (
        metrics["actor_loss"]
        + config.reference_policy_kl_penalty * metrics["kl_penalty"]
        + config.positive_example_nll_weight * metrics["positive_nll_loss"]
        - config.entropy_bonus * metrics["entropy_term"]
    )
    return metrics["loss"], jax.lax.stop_gradient(metrics)


def _surrogate_terms(view: exclusion.View, config: LossConfig) -> surrogates.Terms:
    """Ratio and objective of each token, before weights and reduction."""
    sequences = view.sequences

    def sequence_mean(values: Array) -> Array:
        return sequences.spread(sequences.mean(values, view.actor.tokens))

    log_ratio = view.current - view.previous
    if config.sequence_level_importance_ratios:
        log_ratio = sequence_mean(arithmetic.bound(log_ratio))
    looked_at = surrogates.View(log_ratio, view.current, view.advantages, sequence_mean)
    return surrogates.SURROGATES[config.surrogate](looked_at, config)


def _importance_weights(view: exclusion.View, config: LossConfig) -> corrections.Weights:
    return corrections.importance_weights(
        view.previous, view.generation, view.actor, view.sequences, config
    )


def _denominators(counts: Counts, config: LossConfig) -> Survivors:
    """What the actor term, and what KL and entropy divide by."""
    if counts.survivors is not None:
        return Survivors(*counts.survivors)
    total = diagnostics.loss_count(counts, config)
    return Survivors(total, total)


def _weigh(
    values: Array, used: masks.ActorMasks, view: exclusion.View, config: LossConfig
) -> Array:
    """Turn a loss per token into contributions to the sum that this config divides by N.

        token:     Σ x m / N_tok
        sequence:  Σ_i m_s (Σ_t x m_t / Σ_t m_t) / N_seq
        Dr. GRPO:  Σ_i m_s (Σ_t x m_t / L) / N_seq       N_seq counts sequences, L is a constant

    Dr. GRPO: Liu et al. 2025, "Understanding R1-Zero-like training", arXiv:2503.20783.
    """
    if config.token_level_loss:
        return values * used.weights
    if config.loss_normalizer is None:
        rows = view.sequences.mean(values, used.tokens)
    else:
        rows = view.sequences.sum(values * used.tokens) / config.loss_normalizer
    return rows * used.sequences


def _kl_term(scores: TokenScores, batch: Batch, view: exclusion.View, config: LossConfig) -> Array:
    """KL to the frozen reference, without β, over every token but rejected sequences.

        w = e^(c − sg(c)), or e^(c − g) with the on-policy approximation
        k = clip(w · estimator(clip(r − c)))

    c is unfiltered, so tokens outside the actor's support keep their KL.
    """
    if not config.kl_on:
        return jnp.zeros((), view.current.dtype)
    dtype, on = view.current.dtype, view.whole.weights != 0
    unfiltered = scores.logprobs if scores.unfiltered is None else scores.unfiltered
    current = jnp.where(on, unfiltered, 0).astype(dtype)
    assert batch.reference_logprobs is not None  # checked at the door
    reference = jax.lax.stop_gradient(batch.reference_logprobs)
    reference = jnp.where(on, reference, 0).astype(dtype)
    # e^(c − sg(c)) is 1 with derivative 1: no exponential is needed for that.
    weight = 1 + (current - jax.lax.stop_gradient(current))
    if config.use_on_policy_kl_approximation:
        generation = jax.lax.stop_gradient(batch.generation_logprobs)
        weight = _kl_weight(current - jnp.where(on, generation, 0).astype(dtype))
    per_token = kl.calculate_kl(
        current,
        reference,
        config.reference_policy_kl_type,
        input_clamp=config.kl_input_clamp_value,
        output_clamp=config.kl_output_clamp_value,
        weights=weight,
    )
    return _weigh(per_token, view.whole, view, config)


def _kl_weight(log_weight: Array) -> Array:
    """exp, at most `root³`, and 0 where the number type cannot hold it; no gradient beyond."""
    info = jnp.finfo(log_weight.dtype)
    # e to the *rounded* logarithm of the largest number may be infinite: stay a little below.
    over = log_weight > math.log(float(info.max)) * (1 - 4 * float(info.eps))
    return jnp.where(over, 0, arithmetic.capped_exp(jnp.where(over, 0, log_weight)))


def _positive_nll(batch: Batch, counts: Counts, view: exclusion.View, config: LossConfig) -> Array:
    """Negative log-likelihood of the sequences that were right.

        L = −Σ c m 1[reward > 0] / n⁺      n⁺ from the whole global batch

    Source: VAPO, Yue et al. 2025, arXiv:2504.05118.
    """
    if not config.positive_nll_on:
        return jnp.zeros((), view.current.dtype)
    assert batch.rewards is not None  # checked at the door
    positive = jnp.where(batch.rewards > 0, view.actor.weights, 0)
    total = counts.positives
    if config.positive_nll_local_count or total is None:
        total = jnp.sum(positive)
    return -arithmetic.bound(view.current) * positive / (total + reductions.EPSILON)


def _entropy_term(scores: TokenScores, view: exclusion.View, config: LossConfig) -> Array:
    """Entropy of the policy at the actor's tokens, nats; the loss subtracts it.

    Source: Mnih et al. 2016, arXiv:1602.01783.
    """
    if not config.entropy_bonus_on:
        return jnp.zeros((), view.current.dtype)
    assert scores.entropy is not None  # checked at the door
    entropy = jnp.where(view.actor.weights != 0, scores.entropy, 0).astype(view.current.dtype)
    return _weigh(entropy, view.actor, view, config)
