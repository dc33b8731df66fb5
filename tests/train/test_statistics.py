"""Evaluation statistics against brute force, and the public reports about their labels."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_jax.train import statistics

NAN = float("nan")


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))
)
def test_estimators_equal_the_count_of_all_draws(case):
    n, c, k = case
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert statistics.pass_at_k(n, c, k)[0] == pytest.approx(np.mean([any(d) for d in draws]))
    assert statistics.pass_hat_k(n, c, k)[0] == pytest.approx(np.mean([all(d) for d in draws]))


def test_large_n_does_not_overflow():
    exact = 1 - math.comb(9_000, 1_000) / math.comb(10_000, 1_000)
    assert statistics.pass_at_k(10_000, 1_000, 1_000)[0] == pytest.approx(exact)
    exact = math.comb(9_990, 500) / math.comb(10_000, 500)
    assert statistics.pass_hat_k(10_000, 9_990, 500)[0] == pytest.approx(exact, rel=1e-9)


def test_a52_pass_at_k():
    assert statistics.pass_at_k(10, 3, 2)[0] == pytest.approx(0.5333333, abs=5e-8)
    assert statistics.pass_at_k(10, 3, 4)[0] == pytest.approx(0.8333333, abs=5e-8)
    assert statistics.pass_at_k(10, 3, 8)[0] == 1
    assert statistics.pass_hat_k(10, 3, 2)[0] == pytest.approx(0.0666667, abs=5e-8)


@pytest.mark.parametrize("k", [0, 5])
def test_a52_k_above_n_is_refused(k):
    for estimator in (statistics.pass_at_k, statistics.pass_hat_k):
        with pytest.raises(ValueError, match=f"k={k} needs 1 <= k <= n, and there are n=4"):
            estimator(4, 2, k)
    with pytest.raises(ValueError, match=r"correct counts must lie in \[0, n=4\]"):
        statistics.pass_at_k(4, 5, 1)


def test_a52_a_failed_rollout_does_not_rename_the_label():
    metrics = statistics.evaluation(np.array([1, 0, NAN, 1]), 4)
    assert metrics["avg@4"] == metrics["mean_reward"] == pytest.approx(2 / 3)
    assert not any(name.startswith("avg@3") for name in metrics)
    assert metrics["unscored"] == 1
    # n stays 4 for the draws: the missing answer is not a right one.
    assert metrics["pass@1"] == 0.5 and metrics["pass@4"] == 1 and metrics["pass^4"] == 0


def test_a53_rewards_that_are_not_binary_are_a_mean_reward():
    metrics = statistics.evaluation(np.array([1, 0.5, -1, 2]), 1)
    assert metrics["mean_reward"] == 0.625
    assert not any(name.startswith(("avg@", "accuracy")) for name in metrics)


def test_binary_rewards_are_an_average_as_well():
    metrics = statistics.evaluation(np.array([1, 0, 1, 1.0]), 2)
    assert metrics["avg@2"] == 0.75
    assert {f"{name}{k}" for name in ("pass@", "pass^") for k in (1, 2)} <= set(metrics)
    # pass@1 and pass^1 are both the mean over completions.
    assert metrics["pass@1"] == metrics["pass^1"] == 0.75


def test_unscored_prompts_leave_the_mean():
    metrics = statistics.evaluation(np.array([1, 1, NAN, NAN]), 2)
    assert metrics["mean_reward"] == 1 and metrics["unscored"] == 2
    assert math.isnan(statistics.evaluation(np.array([NAN]), 1)["mean_reward"])


def test_rewards_must_divide_into_prompts():
    with pytest.raises(ValueError, match="3 rewards do not divide into groups of completions=2"):
        statistics.evaluation(np.zeros(3), 2)


def test_default_ks():
    assert [statistics.default_ks(n) for n in (1, 4, 6)] == [[1], [1, 2, 4], [1, 2, 4, 6]]


def test_bootstrap_interval():
    values = np.random.default_rng(0).normal(size=200)
    low, high = statistics.bootstrap_interval(values)
    assert low < values.mean() < high
    # The normal interval is 2 · 1.96 s / √n wide; 10 % is far above the noise of 1,000 draws.
    assert high - low == pytest.approx(2 * 1.96 * values.std(ddof=1) / np.sqrt(200), rel=0.1)
    assert statistics.bootstrap_interval(values[::-1]) == (low, high)
    assert statistics.bootstrap_interval(np.array([0.5, NAN])) == (0.5, 0.5)
    assert all(math.isnan(x) for x in statistics.bootstrap_interval(np.array([NAN])))


def test_prompts_are_the_independent_draws():
    # Every prompt is all right or all wrong: 4 copies of an answer say no more than one.
    once = np.tile([1.0, 0.0], 10)
    wide = statistics.evaluation(np.repeat(once, 4), 4)
    narrow = statistics.evaluation(once, 1)
    for end in ("low", "high"):
        assert wide[f"mean_reward/{end}"] == narrow[f"mean_reward/{end}"]


def test_lengths():
    out = statistics.lengths(np.arange(1, 12), np.arange(11) > 8)
    assert out == {
        "length/mean": 6,
        "length/min": 1,
        "length/p10": 2,
        "length/median": 6,
        "length/p90": 10,
        "length/max": 11,
        "length/truncated": pytest.approx(2 / 11),
    }
    assert statistics.lengths(np.zeros(0)) == {}
