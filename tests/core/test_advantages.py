"""Estimators that compare completions of one prompt: values, degenerate groups, invariances."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_jax.core import advantages, estimators_group
from grpo_jax.core.advantages import AdvantageConfig, AdvantageInputs, Span

LOO = dict(use_leave_one_out_baseline=True)
FULL = dict(use_leave_one_out_baseline=False)
# Expected values are printed with seven digits in the reports they come from.
SEVEN_DIGITS = dict(rtol=0, atol=2e-7)


def run(rewards, groups, **config):
    inputs = AdvantageInputs(np.asarray(rewards, float), np.asarray(groups))
    return advantages.compute(AdvantageConfig(**config), inputs)


def values(rewards, groups=None, **config):
    groups = np.zeros(len(rewards), int) if groups is None else groups
    return run(rewards, groups, **config).advantages


# --- numbered public reports -----------------------------------------------------------------


@pytest.mark.parametrize(
    "rewards, expected",
    [
        ([1, 0, 0, 0], [1, -0.5773493, -0.5773493, -0.5773493]),
        ([1, 1, 0, 0], [1.1546985, 1.1546985, -1.1546985, -1.1546985]),
        ([1, 0], [1, -1]),
    ],
)
def test_a17_leave_one_out_with_zero_spread(rewards, expected):
    out = values(rewards, **LOO, reference_leave_one_out_std=True)
    np.testing.assert_allclose(out, expected, **SEVEN_DIGITS)


def test_a17_by_default_one_scale_for_a_whole_group():
    # The unique success cannot be normalised, so its siblings are not either.
    np.testing.assert_allclose(values([1, 0, 0, 0], **LOO), [1, -1 / 3, -1 / 3, -1 / 3])
    np.testing.assert_allclose(
        values([1, 1, 0, 0], **LOO), [1.1546985, 1.1546985, -1.1546985, -1.1546985], **SEVEN_DIGITS
    )
    np.testing.assert_allclose(values([1, 0], **LOO), [1, -1])


def test_a18_group_and_batch_scaling_are_not_swapped():
    rewards, groups = [1, 0, 10, 0], [0, 0, 1, 1]
    by = dict(**FULL, epsilon=1e-4)
    np.testing.assert_allclose(
        values(rewards, groups, **by, normalize_by="group"),
        [0.7070068, -0.7070068, 0.7070968, -0.7070968],
        **SEVEN_DIGITS,
    )
    np.testing.assert_allclose(
        values(rewards, groups, **by, normalize_by="batch"),
        [0.1029576, -0.1029576, 1.0295761, -1.0295761],
        **SEVEN_DIGITS,
    )
    none = values(rewards, groups, **by, normalize_rewards=False)
    np.testing.assert_array_equal(none, [0.5, -0.5, 5, -5])


def test_a19_statistics_belong_to_rows_of_a_square_matrix():
    # Population std there, sample std here: a factor √2 for two values.
    out = values([1, 3, 10, 20], [0, 0, 1, 1], **FULL, epsilon=0.0)
    np.testing.assert_allclose(out * np.sqrt(2), [-1, 1, -1, 1], rtol=1e-14)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "gdpo", "reinforce_plus_plus"])
def test_a19_a_group_of_one_is_refused(estimator):
    config = AdvantageConfig(estimator=estimator)
    with pytest.raises(ValueError, match="1 leaves nothing to compare.*use 2 or more"):
        advantages.validate_group_size(config, 1)
    advantages.validate_group_size(config, 2)


@pytest.mark.parametrize(
    "config",
    [
        dict(estimator="reinforce_plus_plus", minus_baseline=False),
        *(dict(estimator=name) for name in ("gae", "opd", "raw")),
    ],
    ids=str,
)
def test_a_group_of_one_is_fine_without_a_group_baseline(config):
    advantages.validate_group_size(AdvantageConfig(**config), 1)
    with pytest.raises(ValueError, match="0 completions a prompt"):
        advantages.validate_group_size(AdvantageConfig(**config), 0)


def test_a21_groups_are_not_cut_by_a_micro_batch():
    whole = values([1, 0], **FULL)
    np.testing.assert_allclose(whole, [0.7071058, -0.7071058], **SEVEN_DIGITS)
    # Advantages exist before rows are cut, so a micro-batch of one row carries the same number.
    assert [float(row[0]) for row in np.split(whole, 2)] == list(whole)


# --- values of the specification -------------------------------------------------------------


def test_full_mean_values():
    np.testing.assert_allclose(
        values([1, 0, 0, 0], **FULL), [1.4999970] + [-0.4999990] * 3, **SEVEN_DIGITS
    )


def test_rloo_and_dr_grpo_are_two_settings_of_grpo():
    rewards, groups = np.random.default_rng(0).normal(size=12), np.repeat([3, 1, 2], 4)
    plain = dict(normalize_rewards=False)
    np.testing.assert_array_equal(
        values(rewards, groups, estimator="rloo"), values(rewards, groups, **LOO, **plain)
    )
    np.testing.assert_array_equal(
        values(rewards, groups, estimator="dr_grpo"), values(rewards, groups, **FULL, **plain)
    )
    others = (rewards[groups == 3].sum() - rewards[0]) / 3
    assert values(rewards, groups, estimator="rloo")[0] == pytest.approx(rewards[0] - others)


def test_gdpo_values_and_metrics():
    components = {"b": np.array([0, 1, 1, 0.0]), "a": np.array([1, 0, 0, 0.0])}
    inputs = AdvantageInputs(np.zeros(4), np.zeros(4, int), components=components)
    out = advantages.compute(AdvantageConfig(estimator="gdpo", **FULL), inputs)
    np.testing.assert_allclose(
        out.advantages, [0.689551, 0.398113, 0.398113, -1.485777], rtol=0, atol=2e-6
    )
    assert out.metrics == {f"advantages/constant_groups/{name}": 0.0 for name in "ab"}


def test_gdpo_weights_follow_the_alphabet():
    components = {"z": np.array([1, 0, 0, 1.0]), "a": np.array([1, 0, 1, 0.0])}
    inputs = AdvantageInputs(np.zeros(4), np.zeros(4, int), components=components)
    only_a = AdvantageConfig(estimator="gdpo", **FULL, reward_weights=(1.0, 0.0))
    out = advantages.compute(only_a, inputs).advantages
    assert (np.sign(out) == [1, -1, 1, -1]).all()


@pytest.mark.parametrize(
    "components, weights, message",
    [
        ({"a": np.zeros(2)}, None, "at least two reward components, got .'a'."),
        (None, None, "at least two reward components"),
        ({"a": np.zeros(2), "b": np.zeros(2)}, (1.0,), "1 entries for the 2 components"),
    ],
)
def test_gdpo_refuses(components, weights, message):
    inputs = AdvantageInputs(np.zeros(2), np.zeros(2, int), components=components)
    config = AdvantageConfig(estimator="gdpo", reward_weights=weights)
    with pytest.raises(ValueError, match=message):
        advantages.compute(config, inputs)


# --- degenerate groups have a stated result --------------------------------------------------


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("rewards", [[0.3] * 16, [0.7], [1 / 3] * 3, [-7.1] * 5], ids=len)
def test_equal_rewards_give_exactly_zero(rewards, leave_one_out, reference):
    out = values(
        np.float32(rewards),
        use_leave_one_out_baseline=leave_one_out,
        reference_leave_one_out_std=reference,
    )
    # The means differ from the rewards by rounding only, and nothing divides by that noise.
    np.testing.assert_allclose(out, 0, atol=1e-15)


def test_two_rows_with_leave_one_out_are_never_normalised():
    np.testing.assert_array_equal(values([5, 2], **LOO), [3, -3])
    np.testing.assert_array_equal(run([5, 2], [0, 0], **LOO).statistics.std, [0, 0])


def test_no_rows_at_all():
    out = run(np.zeros(0), np.zeros(0, int))
    assert out.advantages.shape == (0,)
    assert out.metrics["advantages/constant_groups"] == 0


def test_rows_without_a_vote():
    rewards, groups = np.array([1, 0, 0, 9.0]), np.zeros(4, int)
    valid = np.array([True, True, True, False])
    stats = estimators_group.group_statistics(rewards, groups, leave_one_out=True, valid=valid)
    np.testing.assert_allclose(stats.baseline, [0, 0.5, 0.5, 1 / 3])
    assert list(stats.voters) == [3] * 4
    # The reference divides a sum over three rows by two for the row without a vote.
    theirs = estimators_group.group_statistics(
        rewards, groups, leave_one_out=True, valid=valid, reference_std=True
    )
    np.testing.assert_allclose(theirs.baseline, [0, 0.5, 0.5, 0.5])


def test_a_group_with_one_vote_or_none_is_its_own_baseline():
    for valid in ([True, False], [False, False]):
        stats = estimators_group.group_statistics(
            np.array([4.0, 2.0]), np.zeros(2, int), leave_one_out=False, valid=np.array(valid)
        )
        np.testing.assert_array_equal(stats.baseline, [4, 2])
        np.testing.assert_array_equal(stats.std, [0, 0])


def test_std_of_other_rewards():
    stats = estimators_group.group_statistics(
        np.array([1.0, 1.0]), np.zeros(2, int), leave_one_out=False, std_rewards=np.array([0, 2.0])
    )
    np.testing.assert_allclose(stats.std, np.sqrt(2))
    assert stats.constant.all()


def test_a_small_spread_on_a_large_offset_is_measured():
    # One-pass variances lose all digits here.
    rewards = 1e6 + np.array([0, 2.0, 4.0])
    np.testing.assert_allclose(values(rewards, **FULL, epsilon=0.0), [-1, 0, 1], atol=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_rewards_are_named(bad):
    with pytest.raises(
        ValueError, match=r"rewards\[1\] = (nan|inf) is not finite in float32 \(1 such rows\)"
    ):
        values([0, bad, 1])


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus", "gae", "raw"])
def test_an_unscored_row_changes_nobody_else(estimator):
    mask = np.array([[0, 1, 1], [0, 1, 1], [0, 1, 0], [0, 0, 0]])
    inputs = AdvantageInputs(
        np.array([1.0, 0.0, 0.5, np.nan]),
        np.zeros(4, int),
        mask=mask,
        valid=np.array([True, True, True, False]),
        values=np.zeros((4, 3)),
    )
    config = AdvantageConfig(estimator=estimator, **FULL)
    out = advantages.compute(config, inputs).advantages
    three = AdvantageInputs(
        inputs.rewards[:3], np.zeros(3, int), mask=mask[:3], values=np.zeros((3, 3))
    )
    np.testing.assert_allclose(out[:3], advantages.compute(config, three).advantages, rtol=1e-12)
    assert np.isfinite(out).all()


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"rewards has shape \(3,\), the groups have \(2,\)"):
        run([0, 1, 2], [0, 0])


# --- invariances -----------------------------------------------------------------------------

rows = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([0.0, 1.0, 0.3, -2.5, 1 / 3])),
    min_size=1,
    max_size=14,
)


@settings(max_examples=25, deadline=None)
@given(rows, st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_row_order_and_group_names_change_no_bit(rows, random, leave_one_out, normalise):
    groups, rewards = (np.array(column) for column in zip(*rows, strict=True))
    config = dict(use_leave_one_out_baseline=leave_one_out, normalize_rewards=normalise)
    order = np.array(random.sample(range(len(rows)), len(rows)))
    names = np.array([70, -3, 12, 5])
    whole = values(rewards, groups, **config)
    np.testing.assert_array_equal(
        values(rewards[order], names[groups[order]], **config), whole[order]
    )
    # Groups are worlds of their own: the others may as well stand on another process.
    for group in np.unique(groups):
        own = groups == group
        np.testing.assert_array_equal(values(rewards[own], groups[own], **config), whole[own])


@settings(max_examples=20, deadline=None)
@given(rows, st.booleans())
def test_advantages_of_a_group_sum_to_zero(rows, leave_one_out):
    groups, rewards = (np.array(column) for column in zip(*rows, strict=True))
    out = values(rewards, groups, use_leave_one_out_baseline=leave_one_out, normalize_rewards=False)
    sums = [out[groups == group].sum() for group in np.unique(groups)]
    np.testing.assert_allclose(sums, 0, atol=1e-13)


# --- overrides, clipping, configuration ------------------------------------------------------


def test_overrides_come_before_the_clip():
    spans = [Span(0, 1, 3, -0.5), Span(0, 2, 4, -5.0)]  # least priority first
    out = advantages.override_spans(np.array([1.0, 2.0]), spans, 5)
    np.testing.assert_array_equal(out, [[1, -0.5, -5, -5, 1], [2] * 5])
    clipped = advantages.clip(out, -2.0, 1.5)
    np.testing.assert_array_equal(clipped, [[1, -0.5, -2, -2, 1], [1.5] * 5])
    assert advantages.clip(out, None, None) is out
    np.testing.assert_array_equal(advantages.clip(out, None, 0.0).max(), 0)


def test_overrides_leave_their_input_alone():
    shared = np.broadcast_to(np.ones((1, 1)), (2, 3))
    out = advantages.override_spans(shared, [Span(1, 0, 1, 7.0)], 3)
    assert shared.max() == 1 and out[1, 0] == 7
    with pytest.raises(ValueError, match="outside the advantages of shape"):
        advantages.override_spans(shared, [Span(0, 2, 4, 0.0)], 3)


def test_summary_looks_at_trained_tokens_only():
    mask = np.array([[0, 1, 1], [0, 0, 0]])
    out = advantages.summarise(np.array([[9, 1, 3], [7, 7, 7.0]]), mask)
    assert out == {
        "advantages/mean": 2,
        "advantages/std": pytest.approx(np.sqrt(2)),
        "advantages/min": 1,
        "advantages/max": 3,
    }
    assert set(advantages.summarise(np.ones(2), np.zeros((2, 3))).values()) == {0.0}


def test_baseline_shares():
    metrics = run([0, 0, 1, 1, 0, 1], [0, 0, 1, 1, 2, 2], **FULL).metrics
    assert metrics["advantages/constant_groups"] == pytest.approx(2 / 3)
    for name in ("pct_0", "pct_1", "pct_mixed"):
        assert metrics[f"baseline_reward/{name}"] == pytest.approx(100 / 3)


@pytest.mark.parametrize(
    "config, message",
    [
        (dict(estimator="grop"), "estimator='grop' is unknown; use one of grpo, dr_grpo"),
        (dict(normalize_by="row"), "normalize_by='row' is unknown"),
        (dict(kl_in_reward_type="k4"), "kl_in_reward_type='k4' is unknown"),
        (dict(kl_in_reward=-0.1), r"kl_in_reward=-0.1 must lie in \[0, inf\]"),
        (dict(epsilon=float("nan")), "epsilon=nan must lie in"),
        (dict(gae_lambda=1.5), r"gae_lambda=1.5 must lie in \[0, 1\]"),
        (dict(gae_lambda_policy=-1.0), "gae_lambda_policy=-1.0 must lie in"),
        (dict(proximal_teacher_alpha=0.0), "proximal_teacher_alpha=0.0 leaves no teacher"),
        (dict(advantage_clip_low=1.0, advantage_clip_high=0.0), "is above advantage_clip_high"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_configurations_that_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        AdvantageConfig(**config)


def test_gdpo_a_component_without_a_verdict_on_a_row_has_no_say_there():
    """NaN is "no verdict": the row keeps its other component, and the run does not end."""
    both = {"a": np.array([1.0, np.nan, 0.0, 1.0]), "b": np.array([0.0, 1.0, 1.0, 0.0])}
    config = AdvantageConfig(estimator="gdpo", use_leave_one_out_baseline=False)
    out = advantages.compute(
        config, AdvantageInputs(np.zeros(4), np.zeros(4, int), components=both)
    ).advantages
    std = np.array([1.0, 0.0, 1.0]).std(ddof=1)
    a = np.array([1 / 3, 0.0, -2 / 3, 1 / 3]) / (std + 1e-6)
    a_b = a + np.array([-0.5, 0.5, 0.5, -0.5]) / (both["b"].std(ddof=1) + 1e-6)
    np.testing.assert_allclose(out, (a_b - a_b.mean()) / a_b.std(ddof=1), rtol=1e-12)
