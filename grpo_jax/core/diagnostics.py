"""Every metric of the loss, and what each is divided by, in one table.

Each token or sequence makes a *contribution*; `total` adds them up to *raw* metrics, sums and
extrema over the rows that the loss saw. `merge_metrics` adds two sets, of contributions (row
blocks) or of raw metrics (micro-batches, devices), `finalize_metrics` divides once. So any cut of a
batch gives the same numbers as the whole.

Symbols: m weight of a token (token mask times sample weight, after exclusion), m_s weight of a
sequence, v importance weight, ρ ratio, A advantage, c/p/g current/previous/sampler log-probability.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from grpo_jax.core import reductions
from grpo_jax.core.batch import Counts
from grpo_jax.core.loss_config import LossConfig

Metrics = dict[str, Array]

Normaliser = Literal[
    "tokens",  # the batch's trained tokens
    "sequences",  # the batch's sequences
    "truncation",  # sequences where the truncation decides about sequences, else tokens
    "loss",  # divided already, by what the loss divides by
    "none",  # a raw count or sum
    "histogram",  # a raw count for each bin
    "min",
    "max",
]


class Entry(NamedTuple):
    """How one metric is combined, and whether it also appears per retained token or sequence."""

    normaliser: Normaliser
    retained: bool = False
    level: Literal["minimal", "full"] = "full"


TABLE: dict[str, Entry] = {
    # The loss and its parts.
    "loss": Entry("loss", level="minimal"),
    "actor_loss": Entry("loss", level="minimal"),
    "kl_penalty": Entry("loss", level="minimal"),
    "positive_nll_loss": Entry("loss", level="minimal"),
    "entropy_term": Entry("loss", level="minimal"),
    # Counts.
    "num_valid_samples": Entry("none", level="minimal"),
    "retained_tokens": Entry("none", level="minimal"),
    "policy_support_excluded_tokens": Entry("none", level="minimal"),
    "num_masked_seqs_by_logprob_error": Entry("none", level="minimal"),
    "seq_logprob_error_valid_tokens": Entry("none", level="minimal"),
    "seq_logprob_error_valid_seqs": Entry("none", level="minimal"),
    "batch_tokens": Entry("none", level="minimal"),
    "batch_sequences": Entry("none", level="minimal"),
    "kept_tokens": Entry("none", level="minimal"),
    "kept_sequences": Entry("none", level="minimal"),
    "survivor_tokens": Entry("none", level="minimal"),
    "survivor_sequences": Entry("none", level="minimal"),
    "is_weight_overflow_tokens": Entry("none", level="minimal"),
    "is_vetoed_sequences": Entry("none", level="minimal"),
    # Sampler against trainer.
    "token_mult_prob_error": Entry("tokens", retained=True, level="minimal"),
    "sampling_importance_ratio": Entry("truncation", retained=True, level="minimal"),
    "is_oob_ratio": Entry("truncation", retained=True, level="minimal"),
    "is_oob_token_ratio": Entry("tokens", retained=True, level="minimal"),
    "gen_kl_error": Entry("tokens", retained=True),
    "policy_kl_error": Entry("tokens", retained=True),
    "js_divergence_error": Entry("tokens", retained=True),
    "is_weight_raw": Entry("tokens", retained=True),
    "is_weight_raw_min": Entry("min"),
    "is_weight_raw_max": Entry("max"),
    "is_weight_sum": Entry("none"),
    "is_weight_square_sum": Entry("none"),
    "is_geometric_ratio_histogram": Entry("histogram"),
    # Current against previous policy.
    "probs_ratio": Entry("tokens", retained=True),
    "probs_ratio_clamped": Entry("tokens", retained=True),
    "probs_ratio_min": Entry("min"),
    "probs_ratio_max": Entry("max"),
    "probs_ratio_clamped_min": Entry("min"),
    "probs_ratio_clamped_max": Entry("max"),
    "clip_fraction_low": Entry("tokens", retained=True),
    "clip_fraction_high": Entry("tokens", retained=True),
    "clip_fraction": Entry("tokens", retained=True),
    # The policy itself.
    "approx_entropy": Entry("tokens", retained=True),
    "entropy": Entry("tokens", retained=True),
    "kept_mass": Entry("tokens", retained=True),
    "kept_mass_min": Entry("min"),
}

QUANTILES = (0.01, 0.05, 0.5, 0.95, 0.99)


def _histogram_edges() -> tuple[float, ...]:
    """Edges in log-ratio, symmetric about 0, 16 a decade from 1e-5 to 10 nats."""
    sizes = [10.0 ** (-5 + step / 16) for step in range(6 * 16 + 1)]
    return (*(-size for size in reversed(sizes)), *sizes)


EDGES = _histogram_edges()
"""Bin i of the histogram holds log-ratios in [EDGES[i − 1], EDGES[i])."""


def histogram(
    log_ratios: Float[Array, "B S"], weights: Float[Array, "B S"]
) -> Float[Array, " bins"]:
    """Weighted histogram of log-ratios over `EDGES`, with an open bin at each end.

    Fixed bins add up over any cut of a batch, which quantiles themselves do not.
    """
    edges = jnp.asarray(EDGES, log_ratios.dtype)
    at_least = log_ratios[..., None] >= edges[None, None, :]
    above = jnp.sum(jnp.where(at_least, weights[..., None], 0), axis=(0, 1))
    total = jnp.sum(weights)[None]
    return jnp.concatenate([total, above]) - jnp.concatenate([above, jnp.zeros_like(total)])


def _quantiles(bins: Array) -> Metrics:
    """The ratios below which given shares of the histogram lie, to the width of a bin.

    Interpolated inside the bin; the open bins at the ends answer with their only edge.
    """
    edges = jnp.asarray((EDGES[0], *EDGES, EDGES[-1]), bins.dtype)
    reached = jnp.cumsum(bins)
    wanted = jnp.asarray(QUANTILES, bins.dtype) * reached[-1]
    index = jnp.argmax(reached[None, :] >= wanted[:, None], axis=1)
    held = bins[index]
    share = (wanted - (reached[index] - held)) / jnp.where(held > 0, held, 1)
    log_ratio = edges[index] + share * (edges[index + 1] - edges[index])
    ratios = jnp.where(reached[-1] > 0, jnp.exp(log_ratio), 1.0)
    names = (f"is_geometric_ratio_q{level * 100:02.0f}" for level in QUANTILES)
    return dict(zip(names, ratios, strict=True))


def merge_metrics(first: Metrics, second: Metrics) -> Metrics:
    """Combine the metrics, or the contributions, of two parts of a batch: sums add, extrema meet.

    Raises:
      ValueError: the two parts were not computed with the same options.
    """
    if first.keys() != second.keys():
        raise ValueError(
            f"metrics differ: {sorted(first.keys() ^ second.keys())} are on one side only; "
            "merge parts of one batch, computed with one LossConfig"
        )
    combine = {"min": jnp.minimum, "max": jnp.maximum}
    return {
        name: combine.get(TABLE[name].normaliser, jnp.add)(value, second[name])
        for name, value in first.items()
    }


def neutral(name: str) -> float:
    """What a part of a batch without any token adds to a raw metric: nothing."""
    entry = TABLE.get(name)
    return {"min": jnp.inf, "max": -jnp.inf}.get(entry.normaliser if entry else "none", 0.0)


def total(contributions: Metrics) -> Metrics:
    """Raw metrics out of what each token or sequence contributes, arrays of any shape."""
    raw: Metrics = {}
    for name, values in contributions.items():
        match TABLE[name].normaliser:
            case "histogram":
                raw[name] = values
            case "min":
                raw[name] = jnp.min(values, initial=jnp.inf)
            case "max":
                raw[name] = jnp.max(values, initial=-jnp.inf)
            case _:
                raw[name] = jnp.sum(values)
    return raw


def sum_metrics(stacked: Metrics) -> Metrics:
    """Combine raw metrics that carry a leading axis of parts, as `lax.scan` and `vmap` return."""
    combine = {"min": jnp.min, "max": jnp.max}
    return {
        name: combine.get(TABLE[name].normaliser, jnp.sum)(value, axis=0)
        for name, value in stacked.items()
    }


def effective_counts(metrics: Metrics, counts: Counts, config: LossConfig) -> Counts:
    """What the batch's metrics are divided by.

    With the in-loss sequence check these are the counts that a filter before the loss would have
    left, so that both ways report the same numbers.
    """
    if not config.seq_logprob_error_in_loss:
        return counts
    return counts._replace(tokens=metrics["kept_tokens"], sequences=metrics["kept_sequences"])


def loss_count(counts: Counts, config: LossConfig) -> Array:
    """The count in the unit of the loss: tokens or sequences."""
    return counts.tokens if config.token_level_loss else counts.sequences


def gradient_scale(metrics: Metrics, counts: Counts, config: LossConfig) -> Array:
    """What to multiply the accumulated gradient by, once; 0 says that the update is to be skipped.

        survivors / in-loss check, unknown before the forward pass:  N / K
        counts.survivors was given, or nothing is rescaled:           1
        nothing left to train on (K = 0 or N = 0):                    0

    `metrics` are merged over the whole optimizer batch. K = N minus what the *named* filter
    dropped; tokens outside the policy support stay counted, as they do in N.
    """
    total = loss_count(counts, config)
    unit = "tokens" if config.token_level_loss else "sequences"
    left = metrics[f"survivor_{unit}"]
    nothing = total <= 0
    if _rescaled(config) or not config.other_terms_on:
        nothing |= (left <= 0) | (metrics["retained_tokens"] <= 0)
    scale = jnp.ones((), left.dtype)
    if counts.survivors is None and _rescaled(config):
        if config.truncated_is_normalization == "batch":
            left = metrics[f"kept_{unit}"]
        scale = total / jnp.where(left > 0, left, 1)
    return jnp.where(nothing, 0.0, scale)


def _rescaled(config: LossConfig) -> bool:
    return config.seq_logprob_error_in_loss or config.truncated_is_normalization == "survivors"


def finalize_metrics(
    metrics: Metrics, counts: Counts, config: LossConfig, *, rescale: bool = True
) -> Metrics:
    """Divide the raw metrics of a whole optimizer batch, once.

    Adds to them: `*_retained` (per token or sequence that the loss kept), `is_weight_ess` (fraction
    of the retained tokens), `is_geometric_ratio_q*` (quantiles of e^(mean of p − g) over
    sequences), `gradient_scale`, `effective_gradient_scale`. With `rescale`, losses are multiplied
    by `gradient_scale`'s factor and the in-loss check's survivors replace the counts; False gives
    the torch reference's numbers of one micro-batch. Extrema of an empty batch are +inf and −inf.
    """
    scale = gradient_scale(metrics, counts, config)
    used = effective_counts(metrics, counts, config) if rescale else counts
    divisors = {"tokens": used.tokens, "sequences": used.sequences}
    retained = {"tokens": metrics["retained_tokens"], "sequences": metrics["num_valid_samples"]}
    result: Metrics = {}
    for name, value in metrics.items():
        entry = TABLE[name]
        if entry.normaliser == "histogram":
            result |= _quantiles(value)
            continue
        if entry.normaliser == "loss":
            result[name] = value * scale if rescale else value
            continue
        unit = _unit(name, config)
        divisor = divisors.get(unit)
        result[name] = value if divisor is None else value / (divisor + reductions.EPSILON)
        if entry.retained:
            result[f"{name}_retained"] = value / (retained[unit] + reductions.EPSILON)
    if "is_weight_sum" in metrics:
        result["is_weight_ess"] = _effective_sample_size(metrics)
    effective = _effective_gradient_scale(metrics, counts, config)
    return result | {"gradient_scale": scale, "effective_gradient_scale": effective}


def _effective_gradient_scale(metrics: Metrics, counts: Counts, config: LossConfig) -> Array:
    """The actor's gradient over what a mean over the survivors would give; fraction.

        φ = K / D        K survivors, D what the actor term is divided by in the end: K with
                         `survivors`, what the in-loss check left, or the whole batch

    0 where nothing is left. Reported under either denominator, it says what the other would do.
    """
    left = metrics["survivor_tokens" if config.token_level_loss else "survivor_sequences"]
    if config.truncated_is_normalization == "survivors":
        divisor = left
    else:
        divisor = loss_count(effective_counts(metrics, counts, config), config)
    nothing = (left <= 0) | (divisor <= 0)
    return jnp.where(nothing, 0.0, left / jnp.where(nothing, 1, divisor))


def _unit(name: str, config: LossConfig) -> str:
    """The normaliser of a metric under this config."""
    normaliser = TABLE[name].normaliser
    if normaliser != "truncation":
        return normaliser
    if name == "sampling_importance_ratio":
        return "sequences" if config.sequence_level_importance_ratios else "tokens"
    return "sequences" if config.sequence_truncation else "tokens"


def _effective_sample_size(metrics: Metrics) -> Array:
    """(Σ v m)² / (Σ v² m · Σ m): 1 when all weights are equal, 1/n when one holds everything."""
    spread = metrics["is_weight_square_sum"] * metrics["retained_tokens"]
    return jnp.square(metrics["is_weight_sum"]) / jnp.where(spread > 0, spread, 1)


def select_level(metrics: Metrics, config: LossConfig) -> Metrics:
    """Keep what `metrics_level` asks for."""
    if config.metrics_level == "full":
        return metrics
    return {name: value for name, value in metrics.items() if TABLE[name].level == "minimal"}
