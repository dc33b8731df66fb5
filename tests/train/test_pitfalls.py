"""Pitfalls of the torch reference between sampler and loss, one by one, by their number.

Each test shows the input on which the reference goes wrong, and what happens here; where somebody
may need the reference's number, the flag that gives it is in the same test.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.core import advantages, diagnostics, losses, masks
from grpo_jax.core.advantages import AdvantageConfig, AdvantageInputs
from grpo_jax.core.batch import Batch, TokenScores
from grpo_jax.core.losses import LossConfig
from grpo_jax.data import prompts as prompting
from grpo_jax.data.prompts import Example, PromptConfig
from grpo_jax.data.tokenizer import ByteTokenizer
from grpo_jax.rewards.scoring import RewardComponent, RewardConfig, Scorer
from grpo_jax.rewards.shaping import ShapingConfig, shape_rewards
from grpo_jax.sampling.engine import EngineConfig, NativeEngine
from grpo_jax.sampling.generate import SamplingConfig
from grpo_jax.train import evaluate, filters, prepare
from grpo_jax.train.evaluate import EvaluateConfig
from grpo_jax.train.filters import FiltersConfig
from grpo_jax.train.rollout import RolloutConfig
from tests.train.test_prepare import CONFIG, rollout, rules
from tests.train.test_public_reports_rollout import scripted, sentences

ONE = np.zeros(4, int)  # four completions of one prompt


def compute(rewards, groups=None, mask=None, **config):
    rewards = np.asarray(rewards, np.float64)
    groups = np.zeros(len(rewards), int) if groups is None else np.asarray(groups)
    inputs = AdvantageInputs(rewards, groups, mask=mask, values=mask)
    return advantages.compute(AdvantageConfig(**config), inputs)


def token_mult_prob_error(weight: float, outside: float) -> float:
    """Two tokens off by 0.4 and 0.1 nats; a third one is not trained."""
    row = lambda x: jnp.asarray([x], jnp.float32)  # noqa: E731
    batch = Batch(
        tokens=jnp.zeros((1, 4), jnp.int32),
        segment_ids=jnp.ones((1, 4), jnp.int32),
        positions=jnp.arange(4)[None],
        token_mask=jnp.asarray([[False, True, True, False]]),
        sample_weights=row([weight] * 4),
        advantages=row([0, 1, 1, 0]),
        generation_logprobs=row([0, -1, -1, outside]),
        prev_logprobs=row([0, -1.4, -1.1, 0]),
    )
    config, counts = LossConfig(reference_policy_kl_penalty=0.0), masks.count(batch)
    _, metrics = losses.clipped_pg_loss(TokenScores(batch.prev_logprobs), batch, counts, config)
    return float(diagnostics.finalize_metrics(metrics, counts, config)["token_mult_prob_error"])


def test_p10_a_sample_weight_stands_outside_the_exponential():
    wanted = (np.exp(0.4) + np.exp(0.1)) / 2
    for weight, outside in ((1.0, 0.0), (0.25, 0.0), (0.25, np.nan), (0.25, -np.inf)):
        assert token_mult_prob_error(weight, outside) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("garbage", [np.nan, -np.inf, 1e4])
def test_p11_only_trained_tokens_decide_on_a_row_and_a_small_weight_hides_nothing(garbage):
    """e = (e^0.4 + e^0.1 + 1) / 3 = 1.199, with a weight of 1/4 as well."""
    previous = np.array([[0, -1.4, -1.1, -1.0, garbage]])
    generation = np.array([[garbage, -1, -1, -1, 0.0]])
    for weight in (1.0, 0.25):
        weights, report = filters.sequence_error(
            token_mask=np.array([[0, 1, 1, 1, 0]]),
            sample_weights=np.array([weight]),
            prev_logprobs=previous,
            generation_logprobs=generation,
            correct=np.ones(1, bool),
            threshold=1.25,
            filtering_on=False,
        )
        assert weights == [weight]
        error = report.metrics()["filters/sequence_error/max_seq_mult_prob_error"]
        assert error == pytest.approx((np.exp(0.4) + np.exp(0.1) + 1) / 3)


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "raw", "gae", "opd"])
def test_p12_nothing_to_train_gives_finite_advantages_and_a_step_that_is_skipped(estimator):
    sampled = rollout(truncated=(1, 1, 1, 1))
    chosen = rules(FiltersConfig(overlong_filtering=True), AdvantageConfig(estimator=estimator))
    weighed = prepare.weigh(sampled, chosen)
    batch = prepare.collate(sampled, weighed, CONFIG)
    scored = np.asarray(batch.generation_logprobs)
    batch = batch.replace(prev_logprobs=scored, teacher_logprobs=scored, values=scored)
    prepared = prepare.finish(sampled, weighed, batch, chosen)
    assert np.isfinite(np.asarray(prepared.batch.advantages)).all()
    assert prepared.dropped == ["overlong"] * 4
    ((_, counts),) = prepare.split_updates(prepared.batch, 1)
    assert counts.tokens == 0  # `test_step` shows that such an update is skipped and counted


def test_p13_one_trained_token_is_not_divided_by_zero():
    mask = np.zeros((4, 3))
    mask[0, 1] = 1
    out = compute([1, 0, 0, 0], mask=mask, estimator="gae")
    assert np.isfinite(out.advantages).all() and out.advantages[0, 1] == 0


def test_p14_leave_one_out_keeps_one_scale_in_a_group():
    out = compute([1, 0, 0, 0]).advantages
    assert out.tolist() == [1, -1 / 3, -1 / 3, -1 / 3] and out.sum() == pytest.approx(0)
    reference = compute([1, 0, 0, 0], reference_leave_one_out_std=True).advantages
    np.testing.assert_allclose(reference, [1, -0.57734931, -0.57734931, -0.57734931], rtol=1e-7)


def test_p14_equal_rewards_have_no_spread_whatever_their_digits():
    for rewards in (np.full(16, 0.3), np.full(16, np.float32(0.3)), np.full(16, 1e6 + 0.1)):
        assert not compute(rewards).advantages.any()


def test_p15_dynamic_sampling_keeps_the_unique_success_with_its_siblings():
    """Two prompts with equal text are two groups, and a step is cut between groups."""
    rewards = np.array([1, 0, 0, 0, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 1.0])
    groups = np.repeat([0, 1, 2, 3], 4)
    config = FiltersConfig(use_dynamic_sampling=True)
    choice = filters.choose_groups(rewards, groups, 2, config)
    assert choice.rows.tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    # The row filter of the reference keeps the three failures of group 0 alone.
    stats = advantages.estimators_group.group_statistics(
        rewards, groups, leave_one_out=True, reference_std=True
    )
    assert np.flatnonzero(stats.std[:4]).tolist() == [1, 2, 3]


def test_p15_rewards_and_rows_stay_together():
    sampled = rollout(rewards=(1.0, 1.0, 0.0, 1.0))
    config = FiltersConfig(use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=1)
    whole, _ = prepare.sample(lambda key: sampled, jax.random.key(0), rules(config), CONFIG)
    assert whole.texts == ["c", "d"] and whole.scores.total.tolist() == [0.0, 1.0]
    assert [p.text for p in whole.prompts] == ["prompt 1"] * 2


@pytest.mark.parametrize("reward", [np.inf, -np.inf, np.nan, 1e200])
def test_p16_no_reward_turns_a_group_to_zero_in_silence(reward):
    """An infinite deviation would make every advantage 0; such a reward is named instead."""
    with pytest.raises(ValueError, match=r"rewards\[1\] = .* is not finite in float32"):
        compute([1, reward, 0, 0])
    valid = np.array([True, False, True, True])
    inputs = AdvantageInputs(np.array([1, reward, 0, 0]), ONE, valid=valid)
    out = advantages.compute(AdvantageConfig(use_leave_one_out_baseline=False), inputs).advantages
    assert np.isfinite(out).all() and out[0] > 0


def test_p16_two_rows_with_leave_one_out_have_no_deviation():
    stats = advantages.estimators_group.group_statistics(
        np.array([1.0, 0.0]), np.zeros(2, int), leave_one_out=True
    )
    assert stats.std.tolist() == [0, 0]


def test_p24_a_turn_of_the_assistant_in_the_prompt_is_not_trained():
    """Which tokens are trained is decided by who wrote them in this rollout, not by their role."""
    tokenizer = ByteTokenizer()
    history = (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "earlier"},
        {"role": "user", "content": "b"},
    )
    prompt = prompting.encode_prompt(Example(history), tokenizer, PromptConfig())
    assert "earlier" in tokenizer.decode(prompt.ids)
    sampled = rollout()
    rows, n = sampled.rows, len(prompt.ids)
    tokens = np.zeros((4, n + 4), np.int32)
    tokens[:, :n], tokens[:, n:] = prompt.ids, rows.tokens[:, 2:]
    rows = rows._replace(
        tokens=tokens,
        prompt_lengths=np.full(4, n, np.int32),
        logprobs=np.zeros(tokens.shape, np.float32),
    )
    sampled = sampled._replace(rows=rows)
    batch = prepare.collate(sampled, prepare.weigh(sampled, rules()), CONFIG)
    assert np.asarray(batch.token_mask)[:, :n].sum() == 0
    assert np.asarray(batch.token_mask).sum(axis=1).tolist() == [1, 2, 3, 1]


def test_p25_the_overlong_penalty_counts_all_tokens_and_may_have_a_floor():
    lengths = np.array([50, 80, 90, 100, 130])
    plain = ShapingConfig(True, 20, 1.0, 100)
    shaped = shape_rewards(np.ones(5), plain, lengths=lengths).total
    np.testing.assert_allclose(shaped, [1, 1, 0.5, 0, -1.5])
    floor = dataclasses.replace(plain, overlong_penalty_floor=-1.0)
    np.testing.assert_allclose(
        shape_rewards(np.ones(5), floor, lengths=lengths).total, [1, 1, 0.5, 0, 0]
    )
    with pytest.raises(ValueError, match="overlong_buffer_length = 0 must be between 1"):
        ShapingConfig(True, 0, 1.0, 100)


@pytest.mark.parametrize("rows", [None, 2, 100])
def test_p30_every_held_out_prompt_counts_once_whatever_a_call_holds(rows):
    """Five prompts in calls of 2 rows, or of more than there are: the last call is not full."""
    answers = [[97, 2], [97, 97, 2], [98, 2], [97, 97, 97, 97], [97, 2]]
    engine = NativeEngine(
        scripted(sentences(answers)),
        SamplingConfig(4),
        stop_ids=[2],
        config=EngineConfig(prompt_bucket=1, rows=rows),
    )
    held_out = [
        prompting.Prompt(Example("p", answer), np.array([i]), "p")
        for i, answer in enumerate(["a\x02", "aa\x02", "a\x02", "aaaa", "b\x02"])
    ]
    with Scorer(RewardConfig(components=(RewardComponent(kind="exact_match"),))) as scorer:
        metrics = evaluate.evaluate(
            engine,
            {},
            ByteTokenizer(),
            scorer,
            held_out,
            EvaluateConfig(completions=1),
            SamplingConfig(4),
            jax.random.key(0),
        ).metrics
    assert metrics["eval/mean_reward"] == metrics["eval/pass@1"] == 3 / 5
    assert metrics["eval/length/mean"] == (2 + 3 + 2 + 4 + 2) / 5
    assert metrics["eval/length/truncated"] == 1 / 5


def test_p31_logged_advantages_are_those_that_are_trained():
    """The longest row is filtered out, and its advantage is in no statistic."""
    sampled = rollout(rewards=(1.0, 0.0, 5.0, 1.0), truncated=(0, 0, 1, 0))
    kept = prepare.finish(
        sampled,
        weighed := prepare.weigh(sampled, chosen := rules(FiltersConfig(overlong_filtering=True))),
        prepare.collate(sampled, weighed, CONFIG),
        chosen,
    )
    trained = np.asarray(kept.batch.advantages)[
        (np.asarray(kept.batch.token_mask)) & (np.asarray(kept.batch.sample_weights) > 0)
    ]
    assert trained.tolist() == [0.5, -0.5, -0.5, -2.0]
    for name in ("mean", "min", "max"):
        assert kept.metrics[f"advantages/{name}"] == getattr(trained, name)()


@pytest.mark.parametrize(("vote", "wanted"), [(True, -2.0), (False, 0.0)])
def test_p33_a_filtered_row_votes_or_does_not(vote, wanted):
    """By default it does, as in the reference: the kept row is below the mean of both."""
    sampled = rollout(rewards=(1.0, 0.0, 5.0, 1.0), truncated=(0, 0, 1, 0))
    chosen = rules(
        FiltersConfig(overlong_filtering=True),
        AdvantageConfig(
            normalize_rewards=False, use_leave_one_out_baseline=False, filtered_rows_vote=vote
        ),
    )
    weighed = prepare.weigh(sampled, chosen)
    config = RolloutConfig(2, 2, length_multiple=8)
    batch = prepare.finish(
        sampled, weighed, prepare.collate(sampled, weighed, config), chosen
    ).batch
    assert np.asarray(batch.advantages)[3, 2] == wanted
