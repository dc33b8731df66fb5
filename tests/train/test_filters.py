"""Row filters and dynamic sampling: what goes, what stays, and what the reports say of it."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_jax.train import filters
from grpo_jax.train.filters import FiltersConfig

CORRECT = np.array([True, False, True, False])
ONES = np.ones(4)
GROUPS = np.array([0, 0, 1, 1])


def errors(prev, gen=None, mask=None, weights=None, threshold=2.0, filtering_on=False):
    prev = np.asarray(prev, float)
    n = len(prev)
    return filters.sequence_error(
        token_mask=np.ones(prev.shape) if mask is None else np.asarray(mask),
        sample_weights=np.ones(n) if weights is None else np.asarray(weights),
        prev_logprobs=prev,
        generation_logprobs=np.zeros(prev.shape) if gen is None else np.asarray(gen, float),
        correct=np.zeros(n, bool),
        threshold=threshold,
        filtering_on=filtering_on,
    )


# --- simple row filters ----------------------------------------------------------------------


def test_a_report_says_whom_it_hits_and_what_it_costs():
    weights, report = filters.overlong(ONES, np.array([1, 1, 0, 0]), CORRECT)
    np.testing.assert_array_equal(weights, [0, 0, 1, 1])
    assert report.metrics() == {
        "filters/overlong/before": 4,
        "filters/overlong/after": 2,
        "filters/overlong/removed": 2,
        "filters/overlong/correct_removed_share": 0.5,
        "filters/overlong/removed_correct_share": 0.5,
    }


def test_filters_chain_and_each_row_keeps_its_first_reason():
    weights, first = filters.unscored(ONES, np.array([1, 1, 1, 0]), CORRECT)
    weights, second = filters.mask_sample(weights, np.array([1, 0, 0, 1]), CORRECT)
    np.testing.assert_array_equal(weights, [0, 1, 1, 0])
    assert (second.before, second.after, second.correct_before) == (3, 2, 2)
    reasons = filters.dropped_reasons([first, second], 4)
    assert reasons == ["mask_sample", None, None, "unscored"]


def test_fractional_weights_survive_and_nothing_removed_divides_by_nothing():
    weights, report = filters.overlong(np.array([0.25, 0, 1, 1]), np.zeros(4), ~CORRECT)
    np.testing.assert_array_equal(weights, [0.25, 0, 1, 1])
    assert report.metrics()["filters/overlong/removed_correct_share"] == 0
    assert (report.before, report.removed_weight) == (3, 0)


def test_correct_means_a_reward_from_the_threshold_up():
    rewards = np.array([1, 0.5, 2, np.nan])
    np.testing.assert_array_equal(filters.is_correct(rewards, 1.0), [True, False, True, False])


def test_constant_groups_leave_the_denominators():
    rewards = np.array([0.3, 0.3, 1, 0])
    weights, report = filters.constant_groups(ONES, rewards, GROUPS, CORRECT)
    np.testing.assert_array_equal(weights, [0, 0, 1, 1])
    assert report.name == "constant_group"


def test_informative_looks_at_whole_groups():
    # The unique success keeps its failing siblings, and they keep it.
    np.testing.assert_array_equal(filters.informative([1, 0, 0, 0], np.zeros(4)), [True] * 4)
    noise = np.float32([0.3, 0.3 + 3e-8, 5e6, 5e6 + 0.5])
    np.testing.assert_array_equal(filters.informative(noise, GROUPS), [False] * 4)
    exact = filters.informative(noise, GROUPS, tolerance=0.0)
    np.testing.assert_array_equal(exact, [True] * 4)


def test_rows_without_a_vote_do_not_make_a_group_informative():
    valid = np.array([True, False, True, True])
    out = filters.informative([1, np.nan, 1, 0], GROUPS, valid=valid)
    np.testing.assert_array_equal(out, [False, False, True, True])
    nobody = filters.informative([1, 0, 1, 0], GROUPS, valid=np.zeros(4, bool))
    assert not nobody.any()


@pytest.mark.parametrize("filtered_rows_vote, expected", [(True, [1, 1, 0]), (False, [1, 0, 0])])
def test_votes(filtered_rows_vote, expected):
    out = filters.votes(
        np.array([1, 1, 0]), np.array([0.5, 0, 1]), filtered_rows_vote=filtered_rows_vote
    )
    np.testing.assert_array_equal(out, np.array(expected, bool))


# --- sequence log-probability error ----------------------------------------------------------


@pytest.mark.parametrize(
    "bad, filtering_on, kept",
    [
        (-np.inf, True, True),
        (-np.inf, False, False),
        (np.inf, True, False),
        (np.inf, False, False),
        (np.nan, True, False),
        (np.nan, False, False),
    ],
)
def test_truth_table_of_one_bad_value(bad, filtering_on, kept):
    weights, report = errors([[7.0, 0.1, 0, bad, 0]], filtering_on=filtering_on)
    assert weights == [float(kept)]
    if kept:
        expected = (np.exp(0.1) + 1 + 1) / 3
        assert report.extra["mean_seq_mult_prob_error"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e4])
def test_garbage_outside_the_mask_rejects_nobody(poison):
    mask = np.array([[0, 1, 1, 0], [1, 1, 1, 1]])
    clean = np.array([[0, 0.1, 0.2, 0], [0, 0.3, 0, 0.1]])
    bad = np.where(mask != 0, clean, poison)
    bad[:, 0] = poison  # the first column has no predecessor
    out, report = errors(bad, mask=mask)
    expected, expected_report = errors(clean, mask=mask)
    np.testing.assert_array_equal(out, expected)
    assert report.extra == expected_report.extra


def test_a_small_weight_does_not_make_a_row_look_exact():
    _, one = errors([[0, 0.3, 0.0]])
    weights, quarter = errors([[0, 0.3, 0.0]], weights=[0.25], threshold=1.1)
    assert one.extra["max_seq_mult_prob_error"] == quarter.extra["max_seq_mult_prob_error"]
    assert weights == [0] and quarter.removed_weight == 0.25


def test_threshold_is_inclusive_and_none_only_measures():
    weights, report = errors([[0, 0, 0], [0, 1, 1]], threshold=1.0)
    np.testing.assert_array_equal(weights, [1, 0])
    assert report.extra["max_seq_mult_prob_error"] == pytest.approx(np.e)
    assert report.extra["max_seq_mult_prob_error_after_mask"] == 1
    weights, _ = errors([[0, np.nan, 0]], threshold=None)
    np.testing.assert_array_equal(weights, [1])


def test_rows_without_comparable_tokens_stay():
    weights, report = errors([[0, -np.inf, -np.inf]], filtering_on=True, threshold=1.0)
    np.testing.assert_array_equal(weights, [1])
    assert set(report.extra.values()) == {0.0}
    weights, _ = errors([[0, 5.0]], weights=[0.0], threshold=1.0)
    np.testing.assert_array_equal(weights, [0])


def test_a_huge_gap_is_rejected_without_a_warning():
    weights, report = errors([[0, 1000.0]])
    assert weights == [0] and np.isinf(report.extra["max_seq_mult_prob_error"])


# --- dynamic sampling ------------------------------------------------------------------------

CONFIG = FiltersConfig(use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=2)


def test_groups_are_kept_whole_in_the_order_they_came():
    groups = np.repeat([7, 3, 9, 1], 2)
    rewards = np.array([1, 0, 1, 1, 0, 1, 0, 2])
    out = filters.choose_groups(rewards, groups, wanted=2, config=CONFIG)
    assert out.missing == 0
    np.testing.assert_array_equal(out.rows, [0, 1, 4, 5])
    assert out.metrics["dynamic_sampling/num_discarded_valid_samples"] == 2
    assert out.metrics["dynamic_sampling/groups_informative"] == 3


def test_too_few_groups_ask_for_another_batch_until_the_limit():
    rewards, groups = np.array([1, 0, 1, 1]), GROUPS
    short = filters.choose_groups(rewards, groups, wanted=2, config=CONFIG)
    assert short.missing == short.metrics["dynamic_sampling/groups_missing"] == 1
    np.testing.assert_array_equal(short.rows, [0, 1])
    assert not filters.enough(1, wanted=2, batches=1, config=CONFIG)
    assert filters.enough(1, wanted=2, batches=2, config=CONFIG)
    strict = dataclasses.replace(CONFIG, on_shortage="error")
    with pytest.raises(ValueError, match="1 of 2 groups have unequal rewards after 2 batches"):
        filters.enough(1, wanted=2, batches=2, config=strict)
    assert filters.enough(0, wanted=2, batches=2, config=strict)


def test_nothing_informative_leaves_nothing():
    out = filters.choose_groups(np.ones(4), GROUPS, wanted=1, config=CONFIG)
    assert out.missing == 1 and out.rows.size == 0


def test_ids_of_two_batches_never_meet():
    joined = filters.unique_groups([np.array([5, 5, 9]), np.array([5, 5]), np.array([], int)])
    np.testing.assert_array_equal(joined, [0, 0, 1, 2, 2])
    assert filters.unique_groups([]).shape == (0,)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 1.0])), min_size=1, max_size=12),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_chosen_groups_are_whole_unequal_and_row_order_is_no_vote(rows, wanted, random):
    groups, rewards = (np.array(column) for column in zip(*rows, strict=True))
    chosen = filters.choose_groups(rewards, groups, wanted, CONFIG).rows
    for group in np.unique(groups[chosen]):
        assert set(np.flatnonzero(groups == group)) <= set(chosen)
        assert np.ptp(rewards[groups == group]) > 0
    assert len(np.unique(groups[chosen])) <= wanted
    order = np.array(random.sample(range(len(rows)), len(rows)))
    np.testing.assert_array_equal(
        filters.informative(rewards[order], groups[order]),
        filters.informative(rewards, groups)[order],
    )


@pytest.mark.parametrize(
    "config, message",
    [
        (dict(seq_logprob_error_threshold=0.5), "threshold=0.5 is below 1, which a perfect match"),
        (dict(seq_logprob_error_threshold=float("nan")), "threshold=nan"),
        (dict(constant_tolerance=-1.0), "constant_tolerance=-1.0 is negative"),
        (dict(batch_multiplier=0.0), "batch_multiplier=0.0 must be above 0"),
        (dict(batch_multiplier=1.5), "set use_dynamic_sampling=true"),
        (dict(dynamic_sampling_max_gen_batches=0), "must be at least 1"),
        (dict(on_shortage="stop"), "use 'train' or 'error'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_configurations_that_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        FiltersConfig(**config)
