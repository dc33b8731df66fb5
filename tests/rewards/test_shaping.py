"""Reward scaling and penalties: the torch reference's values, and settings that are refused."""

import logging

import numpy as np
import pytest

from grpo_jax.rewards import shaping
from grpo_jax.rewards.shaping import ScalingConfig, ShapingConfig, shape_rewards


def overlong(buffer=20, limit=100, penalty=1.0, **more):
    return ShapingConfig(
        enabled=True, overlong_buffer_length=buffer, max_response_length=limit,
        overlong_buffer_penalty=penalty, **more,
    )  # fmt: skip


def test_scaling_follows_the_reference():
    config = ScalingConfig(enabled=True, target_min=-1.0, target_max=1.0)
    rewards = np.array([-0.5, 0, 0.25, 1, 3, np.nan])
    np.testing.assert_array_equal(shaping.scale(rewards, config), [-1, -1, -0.5, 1, 1, np.nan])


def test_scaling_says_what_it_clipped(caplog):
    shaping.scale(np.array([-0.5, 0, 3]), ScalingConfig(enabled=True))
    assert "2 of 3 rewards are outside [0, 1]" in caplog.text


def test_a27_the_overlong_penalty_is_linear_and_has_an_optional_floor():
    lengths = np.array([50, 80, 85, 90, 100, 101, 130])
    out = shape_rewards(np.ones(7), overlong(), lengths=lengths)
    np.testing.assert_allclose(out.total, [1, 1, 0.75, 0.5, 0, -0.05, -1.5], atol=1e-12)
    floored = shape_rewards(np.ones(7), overlong(overlong_penalty_floor=-1.0), lengths=lengths)
    np.testing.assert_allclose(floored.total, [1, 1, 0.75, 0.5, 0, 0, 0], atol=1e-12)


def test_a27_a_buffer_of_zero_is_refused():
    with pytest.raises(ValueError, match="overlong_buffer_length = 0 must be between 1 and"):
        overlong(buffer=0)


def test_p26_truncation_never_improves_a_reward_unless_parity_is_asked_for():
    rewards, cut = np.array([1.0, 1.0, -1.0, -1.0]), np.array([True, False, True, False])
    ours = ShapingConfig(enabled=True, stop_properly_penalty_coef=0.25)
    theirs = ShapingConfig(
        enabled=True, stop_properly_penalty_coef=0.25, stop_properly_scales_negative=True
    )
    assert shape_rewards(rewards, ours, truncated=cut).total.tolist() == [0.25, 1, -1, -1]
    assert shape_rewards(rewards, theirs, truncated=cut).total.tolist() == [0.25, 1, -0.25, -1]


def test_scaling_comes_before_the_penalty_and_reaches_the_components():
    config = overlong(scaling=ScalingConfig(enabled=True, target_max=10.0))
    out = shape_rewards(
        np.array([0.5]), config, lengths=np.array([90]), components={"a": np.array([np.nan])}
    )
    assert out.unshaped.tolist() == [5.0] and out.total.tolist() == [4.5]
    assert np.isnan(out.components["a"]).all()


def test_stop_properly_takes_precedence_and_says_so():
    config = overlong(stop_properly_penalty_coef=0.0)
    assert "takes its place" in config.unread()["max_response_length"]
    assert shape_rewards(np.ones(1), config, truncated=np.ones(1, bool)).total.tolist() == [0]


def test_nothing_happens_when_disabled():
    out = shape_rewards(np.array([2.0]), ShapingConfig())
    assert out.total.tolist() == out.unshaped.tolist() == [2.0]


def test_precision_is_kept():
    out = shape_rewards(np.ones(2, np.float32), overlong(), lengths=np.array([90, 10]))
    assert out.total.dtype == np.float32


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: ScalingConfig(enabled=True, source_max=0.0), "0.0 is not below source_max = 0.0"),
        (lambda: ScalingConfig(target_max=float("inf")), "all four must be finite"),
        (lambda: ShapingConfig(enabled=True), "enabled but overlong_buffer_length, .* not set"),
        (lambda: overlong(limit=None), "but max_response_length is not set"),
        (lambda: overlong(penalty=None), "but overlong_buffer_penalty is not set"),
        (lambda: overlong(penalty=-1.0), "overlong_buffer_penalty = -1.0 must be 0 or more"),
        (lambda: overlong(buffer=101), "= 101 must be between 1 and max_response_length = 100"),
        (lambda: overlong(overlong_penalty_floor=1.0), "overlong_penalty_floor = 1.0 must be 0 or"),
        (lambda: overlong(stop_properly_penalty_coef=1.5), r"= 1.5 is outside \[0, 1\]"),
        (lambda: shape_rewards(np.ones(2), overlong()), "needs lengths of every row"),
        (
            lambda: shape_rewards(np.ones(2), overlong(), lengths=np.ones(3)),
            r"lengths has shape \(3,\), the rewards have \(2,\)",
        ),
    ],
)
def test_bad_settings_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.fixture(autouse=True)
def _capture(caplog):
    caplog.set_level(logging.WARNING)
