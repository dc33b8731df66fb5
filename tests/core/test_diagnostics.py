"""The metric table: merging, dividing once, quantiles, and the scale of the gradient."""

import jax.numpy as jnp
import numpy as np
import pytest
from loss_cases import evaluate_small as evaluate
from loss_cases import random_case

from grpo_jax.core import diagnostics, losses, masks
from grpo_jax.core.loss_config import LossConfig

pytestmark = pytest.mark.usefixtures("x64")

IS = {"use_importance_sampling_correction": True}


def test_numbers_from_numpy():
    scores, batch = random_case(1, support=False)
    found = evaluate(scores, batch, LossConfig(ratio_clip_min=0.1, ratio_clip_max=0.1, **IS))[2]
    m = np.asarray(batch.token_mask) * np.asarray(batch.sample_weights)
    c, p, g = (
        np.asarray(x) for x in (scores.logprobs, batch.prev_logprobs, batch.generation_logprobs)
    )
    a, on, v, ratio = np.asarray(batch.advantages), m != 0, np.exp(p - g), np.exp(c - p)
    mean = lambda x: (x * m).sum() / m.sum()  # noqa: E731
    wanted = {
        "probs_ratio": mean(ratio),
        "probs_ratio_clamped": mean(np.clip(ratio, 0.9, 1.1)),
        "probs_ratio_max": ratio[on].max(),
        "clip_fraction_low": mean(ratio < 0.9),
        "clip_fraction_high": mean(ratio > 1.1),
        "clip_fraction": mean(((ratio < 0.9) & (a < 0)) | ((ratio > 1.1) & (a > 0))),
        "is_weight_raw": mean(v),
        "is_weight_raw_min": v[on].min(),
        "is_weight_raw_max": v[on].max(),
        "is_weight_ess": (v * m).sum() ** 2 / (m.sum() * (v**2 * m).sum()),
        "kept_mass": mean(np.asarray(scores.kept_mass)),
        "kept_mass_min": np.asarray(scores.kept_mass)[on].min(),
        "approx_entropy": -mean(np.exp(c - g) * c),
        "gen_kl_error": mean(np.exp(p - g) - 1 - (p - g)),
        "policy_kl_error": mean(np.exp(g - p) - 1 - (g - p)),
        "token_mult_prob_error": mean(np.exp(np.abs(g - p))),
    }
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-7, err_msg=name)
        if diagnostics.TABLE.get(name, diagnostics.Entry("none")).retained:
            np.testing.assert_allclose(found[f"{name}_retained"], value, rtol=1e-7)


def test_js_divergence_survives_probabilities_that_underflow():
    scores, batch = random_case(1, support=False)
    low = batch.replace(
        prev_logprobs=batch.prev_logprobs - 800, generation_logprobs=batch.generation_logprobs - 800
    )
    found = evaluate(scores._replace(logprobs=scores.logprobs - 800), low, LossConfig())[2]
    wanted = evaluate(scores, batch, LossConfig())[2]
    np.testing.assert_allclose(
        found["js_divergence_error"], wanted["js_divergence_error"], rtol=1e-7
    )


def test_parts_computed_with_different_options_do_not_merge():
    scores, batch = random_case(1, support=False)
    raw = [
        losses.clipped_pg_loss(scores, batch, masks.count(batch), LossConfig(metrics_level=level))[
            1
        ]
        for level in ("full", "minimal")
    ]
    with pytest.raises(ValueError, match=r"metrics differ: \['approx_entropy'"):
        diagnostics.merge_metrics(*raw)


def test_merging_adds_sums_and_keeps_extrema():
    one = {"probs_ratio": jnp.asarray(1.0), "probs_ratio_min": jnp.asarray(0.5)}
    two = {"probs_ratio": jnp.asarray(2.0), "probs_ratio_min": jnp.asarray(jnp.inf)}
    merged = diagnostics.merge_metrics(one, two)
    assert merged == {"probs_ratio": 3.0, "probs_ratio_min": 0.5}
    stacked = {name: jnp.stack([one[name], two[name]]) for name in one}
    assert diagnostics.sum_metrics(stacked) == merged


def test_quantiles_lie_within_a_bin_of_the_truth():
    """Bins are 16 a decade in |log ratio|, so a quantile is right to 15 % of its log-ratio."""
    rng = np.random.default_rng(0)
    logs = np.concatenate([rng.normal(0, 3e-3, 2000), rng.normal(0.5, 0.2, 2000)])
    bins = diagnostics.histogram(jnp.asarray(logs)[:, None], jnp.ones((4000, 1)))
    assert bins.sum() == 4000 and (bins >= 0).all()
    found = diagnostics._quantiles(bins)
    for level in diagnostics.QUANTILES:
        wanted = np.quantile(logs, level)
        got = np.log(float(found[f"is_geometric_ratio_q{level * 100:02.0f}"]))
        assert abs(got - wanted) <= 0.16 * abs(wanted) + 2e-5, level


def test_quantiles_of_nothing_are_one_and_outliers_fall_into_the_open_bins():
    empty = diagnostics.histogram(jnp.zeros((2, 1)), jnp.zeros((2, 1)))
    assert {float(value) for value in diagnostics._quantiles(empty).values()} == {1.0}
    far = diagnostics.histogram(jnp.asarray([[-1e3], [1e3]]), jnp.ones((2, 1)))
    assert far[0] == 1 and far[-1] == 1 and far.sum() == 2


def test_retained_means_are_per_token_that_the_loss_kept():
    scores, batch = random_case(3)
    found = evaluate(scores, batch, LossConfig(), filtering_on=True)[2]
    assert found["policy_support_excluded_tokens"] == 2
    share = found["retained_tokens"] / masks.count(batch).tokens
    np.testing.assert_allclose(
        found["gen_kl_error"], found["gen_kl_error_retained"] * share, rtol=1e-7
    )


GATE = IS | {
    "truncated_importance_sampling_type": "icepop",
    "truncated_importance_sampling_ratio_min": 0.95,
    "truncated_importance_sampling_ratio": 1.3,
}


@pytest.mark.parametrize("kind", ["icepop", "seq-mask-tis", "gspo"])
def test_weights_and_what_the_gate_caught_are_also_per_retained_token_or_sequence(kind):
    """From numpy. Row 0 loses a token to the support, row 3 all of them, row 2 has no weight."""
    scores, batch = random_case(3)
    scores = scores._replace(logprobs=scores.logprobs.at[3].set(-jnp.inf))
    gspo = {"sequence_level_importance_ratios": True, "token_level_loss": False}
    options = {
        "icepop": GATE,
        "seq-mask-tis": GATE | {"truncated_importance_sampling_type": "seq-mask-tis"},
        "gspo": GATE | gspo,
    }[kind]
    found = evaluate(scores, batch, LossConfig(**options), filtering_on=True)[2]
    c, p, g = (
        np.asarray(x) for x in (scores.logprobs, batch.prev_logprobs, batch.generation_logprobs)
    )
    weights = np.asarray(batch.sample_weights)
    m = np.where(np.isfinite(c) & np.isfinite(p) & np.asarray(batch.token_mask), weights, 0)
    rows, gap = m.max(1), np.where(m != 0, p - g, 0)
    if kind == "gspo":
        v = np.exp((gap * m).sum(1, keepdims=True)) + 0 * gap
    else:
        v = np.exp(gap)
    out = (v < 0.95) | (v > 1.3)
    if kind == "seq-mask-tis":
        gone = np.exp(gap.sum(1) / np.maximum((m != 0).sum(1), 1))
        gone = (gone < 0.95) | (gone > 1.3)
        oob, left = (gone * rows).sum() / rows.sum(), v * ~gone[:, None]
    else:
        oob, left = (out * m).sum() / m.sum(), v * ~out
    ratio = (left[:, 0] * rows).sum() / rows.sum() if kind == "gspo" else (left * m).sum() / m.sum()
    assert 0 < oob < 1 and found["num_valid_samples"] < masks.count(batch).sequences
    np.testing.assert_allclose(found["is_oob_ratio_retained"], oob, rtol=1e-7)
    np.testing.assert_allclose(found["sampling_importance_ratio_retained"], ratio, rtol=1e-7)
    assert found["is_oob_ratio"] < found["is_oob_ratio_retained"]


def test_contributions_of_two_parts_may_be_merged_before_or_after_they_are_added_up():
    rng = np.random.default_rng(0)
    names = ("loss", "probs_ratio_min", "probs_ratio_max", "is_geometric_ratio_histogram")
    parts = [{n: jnp.asarray(rng.standard_normal((2, 3))) for n in names} for _ in range(2)]
    before = diagnostics.total(diagnostics.merge_metrics(*parts))
    after = diagnostics.merge_metrics(*map(diagnostics.total, parts))
    both = {n: np.stack([p[n] for p in parts]) for n in names}
    for merged in (before, after):
        np.testing.assert_allclose(merged["loss"], both["loss"].sum(), rtol=1e-6)
        assert merged["probs_ratio_min"] == both["probs_ratio_min"].min()
        assert merged["probs_ratio_max"] == both["probs_ratio_max"].max()
        histogram = merged["is_geometric_ratio_histogram"]  # its entries are bins
        np.testing.assert_allclose(histogram, both["is_geometric_ratio_histogram"].sum(0))
