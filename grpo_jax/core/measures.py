"""The raw numbers behind the metrics of the loss: sums and extrema over the rows at hand.

What each is divided by stands in `diagnostics.TABLE`. Nothing here carries a gradient.

Symbols: c/p/g current/previous/sampler log-probability, m token weight, m_s sequence weight, v
importance weight, ρ ratio.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from grpo_jax.core import arithmetic, diagnostics, kl
from grpo_jax.core.batch import TokenScores
from grpo_jax.core.corrections import Weights
from grpo_jax.core.diagnostics import Metrics
from grpo_jax.core.exclusion import View
from grpo_jax.core.loss_config import LossConfig
from grpo_jax.core.surrogates import Terms


def measure(
    scores: TokenScores, view: View, terms: Terms, weights: Weights, config: LossConfig
) -> Metrics:
    """Every raw metric but the losses themselves and the counters of the view."""
    metrics = _correction(view, weights, config) | _agreement(view)
    if config.metrics_level == "full":
        metrics |= _mismatch(view, config) | _ratios(view, terms)
        metrics |= _weights(view, weights) | _policy(scores, view)
    return metrics


def survivors(view: View, weights: Weights) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Tokens and sequences that the truncation left, with those outside the support still in.

    A dropped sequence takes all its tokens with it; a sequence of which every token was dropped is
    gone too.
    """
    sequences, whole, actor = view.sequences, view.whole, view.actor
    dropped = (actor.weights != 0) & ~weights.keep_tokens
    gate = sequences.spread(weights.keep_sequences.astype(whole.weights.dtype))
    tokens = jnp.where(dropped, 0, whole.weights) * gate
    any_dropped = sequences.max(dropped.astype(whole.weights.dtype)) > 0
    any_kept = sequences.sum(jnp.where(dropped, 0, actor.tokens)) > 0
    left = weights.keep_sequences & (any_kept | ~any_dropped)
    return jnp.sum(tokens), jnp.sum(jnp.where(left, whole.sequences, 0))


def _extrema(values: Array, view: View) -> tuple[Array, Array]:
    """Smallest and largest value at trained tokens; +inf and −inf where there are none."""
    on = view.actor.weights != 0
    return (
        jnp.min(jnp.where(on, values, jnp.inf), initial=jnp.inf),
        jnp.max(jnp.where(on, values, -jnp.inf), initial=-jnp.inf),
    )


def _correction(view: View, weights: Weights, config: LossConfig) -> Metrics:
    """What the importance correction used and what it dropped."""
    m, m_s = view.actor.weights, view.actor.sequences
    tokens, sequences = survivors(view, weights)
    metrics = {
        "survivor_tokens": tokens,
        "survivor_sequences": sequences,
        "is_weight_overflow_tokens": jnp.sum(weights.overflow & (m != 0), dtype=m.dtype),
        "is_vetoed_sequences": jnp.sum(jnp.where(weights.vetoed, m_s, 0)),
        "sampling_importance_ratio": jnp.sum(weights.weights * m),
    }
    if config.sequence_level_importance_ratios:
        # One value a response, the same at each of its tokens.
        rows = view.sequences.max(weights.weights)
        metrics["sampling_importance_ratio"] = jnp.sum(rows * m_s)
    if config.truncated_importance_sampling_type is not None:
        touched = jnp.sum(jnp.where(weights.touched, m, 0))
        metrics["is_oob_token_ratio"] = metrics["is_oob_ratio"] = touched
        if config.sequence_truncation:
            metrics["is_oob_ratio"] = jnp.sum(jnp.where(weights.keep_sequences, 0, m_s))
    return metrics


def _agreement(view: View) -> Metrics:
    """token_mult_prob_error = Σ e^(|g − p| m) m."""
    m = view.actor.weights
    gap = jnp.abs(view.generation - view.previous)
    return {"token_mult_prob_error": jnp.sum(arithmetic.capped_exp(gap * m) * m)}


def _mismatch(view: View, config: LossConfig) -> Metrics:
    """Sampler-to-trainer divergences at the sampled tokens, without clamps.

    js = ½ k3(p − M) + ½ k3(g − M),   M = log(½ e^p + ½ e^g),   k3(d) = e^d − 1 − d
    """
    p, g, m = view.previous, view.generation, view.actor.weights
    kind = config.reference_policy_kl_type
    free = {"input_clamp": None, "output_clamp": None}
    middle = jnp.logaddexp(p, g) - jnp.log(jnp.asarray(2, p.dtype))
    halves = kl.calculate_kl(middle, p, "k3", **free) + kl.calculate_kl(middle, g, "k3", **free)
    return {
        "gen_kl_error": jnp.sum(kl.calculate_kl(g, p, kind, **free) * m),
        "policy_kl_error": jnp.sum(kl.calculate_kl(p, g, kind, **free) * m),
        "js_divergence_error": jnp.sum(0.5 * halves * m),
    }


def _ratios(view: View, terms: Terms) -> Metrics:
    """Current against previous policy, before and after the clip."""
    m = view.actor.weights
    low, high = terms.ratio < terms.clipped, terms.ratio > terms.clipped
    cut = (low & (view.advantages < 0)) | (high & (view.advantages > 0))
    smallest, largest = _extrema(terms.ratio, view)
    clipped_smallest, clipped_largest = _extrema(terms.clipped, view)
    return {
        "probs_ratio": jnp.sum(terms.ratio * m),
        "probs_ratio_clamped": jnp.sum(terms.clipped * m),
        "probs_ratio_min": smallest,
        "probs_ratio_max": largest,
        "probs_ratio_clamped_min": clipped_smallest,
        "probs_ratio_clamped_max": clipped_largest,
        "clip_fraction_low": jnp.sum(jnp.where(low, m, 0)),
        "clip_fraction_high": jnp.sum(jnp.where(high, m, 0)),
        "clip_fraction": jnp.sum(jnp.where(cut, m, 0)),
    }


def _weights(view: View, weights: Weights) -> Metrics:
    """Importance weights before truncation, and how unequal they are after it."""
    m = view.actor.weights
    smallest, largest = _extrema(weights.raw, view)
    return {
        "is_weight_raw": jnp.sum(weights.raw * m),
        "is_weight_raw_min": smallest,
        "is_weight_raw_max": largest,
        "is_weight_sum": jnp.sum(weights.weights * m),
        "is_weight_square_sum": jnp.sum(jnp.square(weights.weights) * m),
        "is_geometric_ratio_histogram": diagnostics.histogram(
            weights.log_geometric, view.actor.sequences
        ),
    }


def _policy(scores: TokenScores, view: View) -> Metrics:
    """Entropy and kept mass. approx_entropy = −Σ e^(c − g) c m, from the sampled tokens alone."""
    m = view.actor.weights
    weight = arithmetic.capped_exp(view.current - view.generation)
    metrics = {"approx_entropy": -jnp.sum(weight * view.current * m)}
    if scores.entropy is not None:
        metrics["entropy"] = jnp.sum(jnp.where(m != 0, scores.entropy, 0).astype(m.dtype) * m)
    if scores.kept_mass is not None:
        mass = jnp.where(m != 0, scores.kept_mass, 0).astype(m.dtype)
        metrics["kept_mass"] = jnp.sum(mass * m)
        metrics["kept_mass_min"] = _extrema(mass, view)[0]
    return metrics
