"""Which estimator reads which key: what the table says is what the numbers say."""

import dataclasses

import numpy as np
import pytest

from grpo_jax.core import advantages
from grpo_jax.core.advantages import READ_BY, AdvantageConfig, AdvantageInputs

RNG = np.random.default_rng(0)
ROWS, WIDTH = 12, 5
OTHER = dict(
    normalize_rewards=False,
    use_leave_one_out_baseline=False,
    normalize_by="batch",
    epsilon=0.5,
    constant_tolerance=1.5,
    reference_leave_one_out_std=True,
    reward_weights=(1.0, 3.0),
    minus_baseline=False,
    kl_in_reward=0.3,
    kl_in_reward_type="k1",
    normalize_advantages=False,
    gae_gamma=0.5,
    gae_lambda=0.5,
    gae_lambda_value=0.3,
    gae_lambda_policy=0.3,
    length_adaptive_alpha=0.5,
    proximal_teacher_alpha=0.5,
    subtract_global_baseline=True,
)
OUTSIDE = ("estimator", "filtered_rows_vote", "advantage_clip_low", "advantage_clip_high")
ESTIMATORS = sorted({name for names in READ_BY.values() for name in names})


def numbers(config: AdvantageConfig) -> list:
    """Everything that an estimator makes; one group has an odd one out, one is constant."""
    rewards = np.array([1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1.0])
    inputs = AdvantageInputs(
        rewards,
        np.repeat(np.arange(3), 4),
        mask=(RNG_MASK > 0.3) * 1.0,
        components={"a": rewards, "b": np.round(COLUMN, 1)},
        **TOKENS,
    )
    out = advantages.compute(config, inputs)
    returns = np.zeros(0) if out.returns is None else out.returns
    return [*out.advantages.ravel(), *returns.ravel(), *out.metrics.values()]


RNG_MASK, COLUMN = RNG.random((ROWS, WIDTH)), RNG.random(ROWS)
TOKENS = {
    name: -RNG.random((ROWS, WIDTH))
    for name in ("policy_logprobs", "reference_logprobs", "teacher_logprobs", "values")
}


def test_the_table_and_this_test_know_every_key():
    fields = {field.name for field in dataclasses.fields(AdvantageConfig)}
    assert fields == set(OTHER) | set(OUTSIDE)
    assert set(READ_BY) == (fields | {"filtered_rows_vote"}) - (
        set(OUTSIDE) - {"filtered_rows_vote"}
    )


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("key", OTHER)
def test_a_key_changes_the_numbers_of_those_that_read_it_and_of_no_other(estimator, key):
    base = AdvantageConfig(estimator=estimator)
    if key.startswith("kl_in_reward"):
        base = dataclasses.replace(base, kl_in_reward=0.1)
    changed = dataclasses.replace(base, **{key: OTHER[key]})
    reads = estimator in READ_BY[key]
    assert (numbers(base) != numbers(changed)) == reads
    assert (key in changed.unread()) == (not reads)
