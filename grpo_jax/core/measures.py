"""What each token or sequence contributes to the metrics of the loss.

How contributions are combined, and what the result is divided by, stands in `diagnostics.TABLE`.
Nothing here carries a gradient.

Symbols: c/p/g current/previous/sampler log-probability, m token weight, m_s sequence weight, v
importance weight, ρ ratio.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from grpo_jax.core import arithmetic, diagnostics, surrogates
from grpo_jax.core.batch import TokenScores
from grpo_jax.core.corrections import Weights
from grpo_jax.core.diagnostics import Metrics
from grpo_jax.core.exclusion import View
from grpo_jax.core.loss_config import LossConfig
from grpo_jax.core.surrogates import Terms


def measure(
    scores: TokenScores, view: View, terms: Terms, weights: Weights, config: LossConfig
) -> Metrics:
    """Contributions to every metric but the losses themselves and the counters of the view."""
    weighted = weights.weights * view.actor.weights
    metrics = _correction(view, weights, weighted, config) | _agreement(view)
    if config.metrics_level == "full":
        metrics |= _mismatch(view, config) | _ratios(view, terms, config)
        metrics |= _weights(view, weights, weighted) | _policy(scores, view)
    return metrics


def bounded_extrema(metrics: Metrics, config: LossConfig) -> Metrics:
    """Extrema of the ratio after its clip: the clip is monotone, it maps extrema to extrema."""
    if config.surrogate not in surrogates.CLIPPED or "probs_ratio_min" not in metrics:
        return {}
    low, high = surrogates.interval(config)
    return {
        f"probs_ratio_clamped_{which}": jnp.where(jnp.isinf(x), x, jnp.clip(x, low, high))
        for which in ("min", "max")
        for x in (metrics[f"probs_ratio_{which}"],)
    }


def survivors(
    view: View, weights: Weights, config: LossConfig
) -> tuple[Float[Array, "B T"], Float[Array, "B S"]]:
    """Weight of what the truncation left, with tokens outside the support still in.

    A dropped sequence takes all its tokens with it; a sequence of which every token was dropped is
    gone too.
    """
    sequences, whole, actor = view.sequences, view.whole, view.actor
    drops = config.truncated_importance_sampling_type not in (None, "tis")
    if not drops and config.token_veto_threshold is None:
        return whole.weights, whole.sequences
    dropped = (actor.weights != 0) & ~weights.keep_tokens
    gate = sequences.spread(weights.keep_sequences.astype(whole.weights.dtype))
    tokens = jnp.where(dropped, 0, whole.weights) * gate
    any_dropped = sequences.max(dropped.astype(whole.weights.dtype)) > 0
    any_kept = sequences.sum(jnp.where(dropped, 0, actor.tokens)) > 0
    left = weights.keep_sequences & (any_kept | ~any_dropped)
    return tokens, jnp.where(left, whole.sequences, 0)


def _extrema(values: Array, view: View) -> tuple[Array, Array]:
    """The values at trained tokens; +inf and −inf elsewhere, for the smallest and the largest."""
    on = view.actor.weights != 0
    return jnp.where(on, values, jnp.inf), jnp.where(on, values, -jnp.inf)


def _correction(view: View, weights: Weights, weighted: Array, config: LossConfig) -> Metrics:
    """What the importance correction used and what it dropped."""
    m, m_s = view.actor.weights, view.actor.sequences
    tokens, sequences = survivors(view, weights, config)
    metrics = {
        "survivor_tokens": tokens,
        "survivor_sequences": sequences,
        "is_weight_overflow_tokens": (weights.overflow & (m != 0)).astype(m.dtype),
        "is_vetoed_sequences": jnp.zeros((), m.dtype),
        "sampling_importance_ratio": weighted,
    }
    if config.token_veto_threshold is not None:
        metrics["is_vetoed_sequences"] = jnp.where(weights.vetoed, m_s, 0)
    if config.sequence_level_importance_ratios:
        # One value a response, the same at each of its tokens.
        metrics["sampling_importance_ratio"] = view.sequences.max(weights.weights) * m_s
    if config.truncated_importance_sampling_type is not None:
        touched = weights.touched * m
        metrics["is_oob_token_ratio"] = metrics["is_oob_ratio"] = touched
        if config.sequence_truncation:
            metrics["is_oob_ratio"] = jnp.where(weights.keep_sequences, 0, m_s)
    return metrics


def _agreement(view: View) -> Metrics:
    """token_mult_prob_error = Σ e^|p − g| m: the weight stands outside the exponential."""
    # The same expression as below, so that the exponentials are shared.
    gap = arithmetic.both_ways(arithmetic.bound(view.previous - view.generation))
    error = jnp.where(gap.up < gap.down, gap.down, gap.up)
    return {"token_mult_prob_error": error * view.actor.weights}


def _mismatch(view: View, config: LossConfig) -> Metrics:
    """Sampler-to-trainer divergences at the sampled tokens, without clamps.

        js = ½ k3(p − M) + ½ k3(g − M),   M = log(½ e^p + ½ e^g),   k3(d) = e^d − 1 − d
           = log cosh(δ/2) = ½ log(1 + ½ (cosh δ − 1)),              δ = p − g

    The last form neither cancels at small δ nor needs an exponential of its own.
    """
    gap, m = arithmetic.bound(view.previous - view.generation), view.actor.weights
    _, _, forth, back, apart = arithmetic.both_ways(gap)
    size = jnp.abs(gap)
    js = jnp.where(size > 30, size / 2 - math.log(2), 0.5 * arithmetic.log1p(0.5 * apart))
    kind = config.reference_policy_kl_type
    if kind == "k1":
        forth, back = -gap, gap
    elif kind == "k2":
        forth = back = 0.5 * jnp.square(gap)
    return {
        "gen_kl_error": forth * m,
        "policy_kl_error": back * m,
        "js_divergence_error": js * m,
    }


def _ratios(view: View, terms: Terms, config: LossConfig) -> Metrics:
    """Current against previous policy, before and after the clip."""
    m = view.actor.weights
    low, high = terms.ratio < terms.clipped, terms.ratio > terms.clipped
    cut = (low & (view.advantages < 0)) | (high & (view.advantages > 0))
    smallest, largest = _extrema(terms.ratio, view)
    metrics = {
        "probs_ratio": terms.ratio * m,
        "probs_ratio_clamped": terms.clipped * m,
        "probs_ratio_min": smallest,
        "probs_ratio_max": largest,
        "clip_fraction_low": low * m,
        "clip_fraction_high": high * m,
        "clip_fraction": cut * m,
    }
    if config.surrogate not in surrogates.CLIPPED:  # else they follow: see `bounded_extrema`
        smallest, largest = _extrema(terms.clipped, view)
        metrics |= {"probs_ratio_clamped_min": smallest, "probs_ratio_clamped_max": largest}
    return metrics


def _weights(view: View, weights: Weights, weighted: Array) -> Metrics:
    """Importance weights before truncation, and how unequal they are after it."""
    m = view.actor.weights
    smallest, largest = _extrema(weights.raw, view)
    used = jnp.minimum(weights.weights, arithmetic.root(m.dtype))  # its square is summed
    return {
        "is_weight_raw": weighted if weights.raw is weights.weights else weights.raw * m,
        "is_weight_raw_min": smallest,
        "is_weight_raw_max": largest,
        "is_weight_sum": used * m,
        "is_weight_square_sum": jnp.square(used) * m,
        "is_geometric_ratio_histogram": diagnostics.histogram(
            weights.log_geometric, view.actor.sequences
        ),
    }


def _policy(scores: TokenScores, view: View) -> Metrics:
    """Entropy and kept mass. approx_entropy = −Σ e^(c − g) c m, from the sampled tokens alone."""
    m = view.actor.weights
    cap = math.log(arithmetic.root(m.dtype) ** 2)
    weight = arithmetic.capped_exp(view.current - view.generation, cap)
    metrics = {"approx_entropy": -weight * arithmetic.bound(view.current) * m}
    if scores.entropy is not None:
        metrics["entropy"] = jnp.where(m != 0, scores.entropy, 0).astype(m.dtype) * m
    if scores.kept_mass is not None:
        mass = jnp.where(m != 0, scores.kept_mass, 0).astype(m.dtype)
        metrics["kept_mass"] = mass * m
        metrics["kept_mass_min"] = _extrema(mass, view)[0]
    return metrics
