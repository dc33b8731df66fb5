"""Between the sampler and the loss: which rows are trained, with what advantage, in what batch."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from grpo_jax.core.advantages import AdvantageConfig
from grpo_jax.data.prompts import Example, Prompt
from grpo_jax.data.tokenizer import ByteTokenizer
from grpo_jax.rewards.scoring import Scores
from grpo_jax.rewards.shaping import ScalingConfig, ShapingConfig
from grpo_jax.sampling.generate import STOP_REASONS, Generation
from grpo_jax.scale.processes import alone
from grpo_jax.train import loop, prepare
from grpo_jax.train import rollout as rollouts
from grpo_jax.train.filters import FiltersConfig
from grpo_jax.train.layout import Layout
from grpo_jax.train.rollout import Override, Rollout, RolloutConfig

CONFIG = RolloutConfig(prompts_per_step=2, completions_per_prompt=2, length_multiple=8)


def rules(filters=None, advantage=None, shaping=None, filtering_on=False) -> prepare.Rules:
    """Rules with defaults for what a test does not look at."""
    return prepare.Rules(
        shaping or ShapingConfig(),
        filters or FiltersConfig(),
        advantage or AdvantageConfig(normalize_rewards=False, use_leave_one_out_baseline=False),
        filtering_on,
    )


def rollout(
    rewards=(1.0, 0.0, 1.0, 1.0),
    truncated=(0, 0, 0, 0),
    valid=(1, 1, 1, 1),
    masked=(0, 0, 0, 0),
    overrides=((), (), (), ()),
) -> Rollout:
    """Four rows: prompts of 2 tokens, completions of 1, 2, 3 and 1 tokens."""
    lengths = np.array([1, 2, 3, 1], np.int32)
    tokens = np.arange(24, dtype=np.int32).reshape(4, 6) + 97
    inside = np.arange(6)[None] < 2 + lengths[:, None]
    reasons = [STOP_REASONS.index("length" if t else "stop") for t in truncated]
    return Rollout(
        prompts=[Prompt(Example("p", "a"), tokens[i, :2], f"prompt {i // 2}") for i in range(4)],
        group_ids=np.array([0, 0, 1, 1]),
        rows=Generation(
            np.where(inside, tokens, 0),
            np.full(4, 2, np.int32),
            lengths,
            np.where(inside & (np.arange(6) >= 2), -0.5, 0.0).astype(np.float32),
            np.array(reasons, np.int8),
        ),
        texts=["a", "b", "c", "d"],
        scores=Scores(
            np.array(rewards),
            {"verifier": np.array(rewards)},
            np.array(valid, bool),
            {},
            masked=np.array(masked, bool),
            spans=[()] * 4,
        ),
        seconds={"rollout": 1.0, "decode": 0.1, "reward": 0.5},
        overrides=list(overrides),
    )


def run(sampled: Rollout, chosen: prepare.Rules) -> prepare.Prepared:
    """All of it, without a score pass."""
    weighed = prepare.weigh(sampled, chosen)
    return prepare.finish(sampled, weighed, prepare.collate(sampled, weighed, CONFIG), chosen)


def test_advantages_stand_on_trained_tokens_only():
    prepared = run(rollout(), rules())
    advantages, mask = np.asarray(prepared.batch.advantages), np.asarray(prepared.batch.token_mask)
    assert mask.sum(axis=1).tolist() == [1, 2, 3, 1]
    assert np.all(advantages[~mask] == 0)
    assert advantages[0, 2] == 0.5 and advantages[1, 2:4].tolist() == [-0.5, -0.5]
    assert np.all(advantages[2:] == 0)  # a group of equal rewards has nothing to say


@pytest.mark.parametrize(
    ("filters", "sampled", "dropped"),
    [
        (FiltersConfig(overlong_filtering=True), dict(truncated=(0, 1, 0, 0)), {1: "overlong"}),
        (FiltersConfig(), dict(truncated=(0, 1, 0, 0)), {}),
        (
            FiltersConfig(drop_constant_groups=True),
            {},
            {2: "constant_group", 3: "constant_group"},
        ),
        (FiltersConfig(), dict(rewards=(1.0, 0.0, 0.0, 1.0), valid=(1, 1, 0, 1)), {2: "unscored"}),
    ],
)
def test_dropped_rows_have_no_weight_and_a_reason(filters, sampled, dropped):
    prepared = run(rollout(**sampled), rules(filters))
    assert {i: r for i, r in enumerate(prepared.dropped) if r} == dropped
    weights = np.asarray(prepared.batch.sample_weights)
    inside = np.asarray(prepared.batch.segment_ids) > 0
    for i in range(4):
        assert np.all(weights[i][inside[i]] == (0 if i in dropped else 1))
    ((_, counts),) = prepare.split_updates(prepared.batch, 1)
    assert counts.sequences == 4 - len(dropped)


def test_a_row_that_asks_to_be_masked_is_not_trained_and_votes():
    """Without a score too: then the mask is the reason, and the row has no vote."""
    prepared = run(rollout(masked=(0, 1, 0, 0)), rules())
    assert prepared.dropped == [None, "mask_sample", None, None]
    assert prepared.metrics["filters/mask_sample/removed"] == 1
    assert np.asarray(prepared.batch.advantages)[0, 2] == 0.5
    prepared = run(rollout(masked=(0, 1, 0, 0), valid=(1, 0, 1, 1)), rules())
    assert prepared.dropped == [None, "mask_sample", None, None]
    assert prepared.metrics["filters/unscored/removed"] == 0
    assert np.asarray(prepared.batch.advantages)[0, 2] == 0  # alone in its group


def test_overrides_come_after_the_estimator_and_before_the_clip():
    flagged = (
        (),
        (Override("tool", 0, 2, -5.0),),
        (Override("a", 0, 3, 1.0), Override("b", 1, 2, 9.0)),
        (),
    )
    advantage = AdvantageConfig(
        normalize_rewards=False, use_leave_one_out_baseline=False, advantage_clip_low=-2.0
    )
    prepared = run(rollout(overrides=flagged), rules(advantage=advantage))
    advantages = np.asarray(prepared.batch.advantages)
    assert advantages[1, 2:4].tolist() == [-2.0, -2.0]  # -5 is clipped like any other
    assert advantages[2, 2:5].tolist() == [1.0, 9.0, 1.0]  # the later one wins
    assert advantages[0, 2] == 0.5 and advantages[3, 2] == 0  # the others keep their own
    assert prepared.metrics["overrides/tool/rows"] == 1
    assert prepared.metrics["overrides/b/share"] == 0.25
    assert prepared.metrics["advantages/min"] == -2.0  # what is logged is what is trained
    order = np.array([3, 2, 0, 1])
    turned = run(prepare.take(rollout(overrides=flagged), order), rules(advantage=advantage))
    np.testing.assert_array_equal(np.asarray(turned.batch.advantages), advantages[order])


def test_overrides_leave_token_advantages_and_other_tokens_alone():
    flagged = ((), (), (Override("tool", 1, 2, -5.0),), ())
    advantage = AdvantageConfig(estimator="reinforce_plus_plus")
    plain = np.asarray(run(rollout(), rules(advantage=advantage)).batch.advantages)
    found = np.asarray(run(rollout(overrides=flagged), rules(advantage=advantage)).batch.advantages)
    assert found[2, 3] == -5.0
    different = found != plain
    assert different.sum() == 1 and different[2, 3]


def test_dynamic_sampling_sees_scaled_rewards():
    """Two rewards above the source interval are equal once scaled, so the group says nothing."""
    scaling = ScalingConfig(enabled=True, source_max=1.0)
    chosen = rules(
        FiltersConfig(use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=1),
        shaping=ShapingConfig(scaling=scaling),
    )
    sampled = rollout(rewards=(1.0, 3.0, 1.0, 0.0))
    whole, _ = prepare.sample(lambda key: sampled, jax.random.key(0), chosen, CONFIG)
    assert whole.scores.total.tolist() == [1.0, 0.0]


def two_components(gdpo: bool, weights=None) -> tuple[Rollout, prepare.Rules]:
    """A group whose totals are equal and whose components are not, and one that is all equal."""
    columns = {"a": np.array([1.0, 0, 1, 1]), "b": np.array([0.0, 1, 1, 1])}
    sampled = rollout(rewards=(1.0, 1.0, 2.0, 2.0))
    sampled = sampled._replace(scores=dataclasses.replace(sampled.scores, components=columns))
    advantage = AdvantageConfig(estimator="gdpo", reward_weights=weights) if gdpo else None
    return sampled, rules(FiltersConfig(drop_constant_groups=True), advantage)


def test_constant_for_gdpo_is_constant_in_every_component_that_weighs():
    assert run(*two_components(gdpo=False)).dropped == ["constant_group"] * 4
    kept = run(*two_components(gdpo=True, weights=(1.0, 2.0)))
    assert kept.dropped == [None, None, "constant_group", "constant_group"]
    assert np.asarray(kept.batch.advantages)[0, 2] < 0 < np.asarray(kept.batch.advantages)[1, 2]
    assert run(*two_components(gdpo=True, weights=(0.0, 0.0))).dropped == ["constant_group"] * 4
    sampled, chosen = two_components(gdpo=True)
    chosen = chosen._replace(
        filters=FiltersConfig(use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=1)
    )
    whole, _ = prepare.sample(lambda key: sampled, jax.random.key(0), chosen, CONFIG)
    assert whole.scores.total.tolist() == [1.0, 1.0]


def test_distillation_trains_rows_without_a_reward():
    """No advantage of opd is made of a reward, so that a row without one is as good as any."""
    sampled = rollout(valid=(1, 0, 1, 0), masked=(0, 0, 1, 0))
    chosen = rules(advantage=AdvantageConfig(estimator="opd"))
    weighed = prepare.weigh(sampled, chosen)
    batch = prepare.collate(sampled, weighed, CONFIG)
    teacher = np.asarray(batch.generation_logprobs) + 0.25
    batch = batch.replace(prev_logprobs=batch.generation_logprobs, teacher_logprobs=teacher)
    prepared = prepare.finish(sampled, weighed, batch, chosen)
    assert prepared.dropped == [None, None, "mask_sample", None]
    trained = np.asarray(batch.token_mask)[:4]
    assert np.all(np.asarray(prepared.batch.advantages)[:4][trained][[0, 1, 2, -1]] == 0.25)


def test_sequence_error_filter_reads_the_scored_logprobs():
    sampled, chosen = rollout(), rules(FiltersConfig(seq_logprob_error_threshold=2.0))
    weighed = prepare.weigh(sampled, chosen)
    batch = prepare.collate(sampled, weighed, CONFIG)
    previous = np.array(batch.generation_logprobs)
    previous[1, 2] -= 3.0
    prepared = prepare.finish(sampled, weighed, batch.replace(prev_logprobs=previous), chosen)
    assert prepared.dropped == [None, "sequence_error", None, None]


def test_values_become_advantages_and_returns_of_trained_tokens():
    """γ = λ = 1: every return is the row's reward; a row without weight teaches nothing."""
    sampled = rollout(rewards=(1.0, 0.0, 2.0, -1.0), valid=(1, 1, 1, 0))
    advantage = AdvantageConfig(estimator="gae", gae_lambda=1.0, normalize_advantages=False)
    chosen = rules(advantage=advantage)
    weighed = prepare.weigh(sampled, chosen)
    batch = prepare.collate(sampled, weighed, CONFIG)
    values = np.full(batch.tokens.shape, 0.25, np.float32)
    prepared = prepare.finish(sampled, weighed, batch.replace(values=values), chosen).batch
    mask = np.asarray(prepared.token_mask) & (np.asarray(prepared.sample_weights) > 0)
    rewards = np.broadcast_to(np.array([1.0, 0.0, 2.0, 0.0])[:, None], mask.shape)
    np.testing.assert_allclose(prepared.returns, np.where(mask, rewards, 0), atol=1e-6)
    expected = np.where(mask, rewards - 0.25, 0)
    np.testing.assert_allclose(prepared.advantages, expected, atol=1e-6)
    ((part, counts),) = prepare.split_updates(prepared, 1)
    assert part.returns.shape == part.tokens.shape and counts.tokens == 6


def test_order_of_rows_changes_nothing():
    sampled = rollout(rewards=(1.0, 0.0, 0.25, 0.75))
    order = np.array([3, 0, 2, 1])
    plain = np.asarray(run(sampled, rules()).batch.advantages)
    turned = np.asarray(run(prepare.take(sampled, order), rules()).batch.advantages)
    np.testing.assert_array_equal(plain[order], turned)


def test_updates_split_rows_and_count_each_part():
    prepared = run(rollout(), rules(FiltersConfig(drop_constant_groups=True)))
    parts = prepare.split_updates(prepared.batch, 2)
    assert [float(c.tokens) for _, c in parts] == [3.0, 0.0]
    assert [p.tokens.shape for p, _ in parts] == [(2, 8), (2, 8)]


def test_epochs_go_over_the_same_updates_which_are_laid_out_once():
    batch = run(rollout(), rules()).batch
    config = RolloutConfig(2, 2, updates_per_rollout=2, epochs=3)
    parts = SimpleNamespace(rollout=config, layout=Layout(micro_rows=1), gather=alone)
    updates = loop._lay_out(parts, batch)
    assert [float(counts.tokens) for _, counts in updates] == [3.0, 4.0] * 3
    assert len({id(laid.batch) for laid, _ in updates}) == 2


def test_dynamic_sampling_collects_until_groups_differ():
    calls = []

    def collect(key):
        calls.append(key)
        return rollout()

    chosen = rules(FiltersConfig(use_dynamic_sampling=True))
    whole, metrics = prepare.sample(collect, jax.random.key(0), chosen, CONFIG)
    assert len(calls) == 2  # each batch has one group with unequal rewards
    assert not np.array_equal(*(jax.random.key_data(k) for k in calls))
    assert whole.scores.total.tolist() == [1, 0, 1, 0]
    assert len(set(whole.group_ids.tolist())) == 2
    assert metrics["dynamic_sampling/num_gen_batches"] == 2
    report = {k.rpartition("/")[2]: v for k, v in metrics.items() if k.startswith("filters/")}
    assert (report["before"], report["after"], report["removed"]) == (8, 4, 4)
    assert report["correct_removed_share"] == 4 / 6  # both rows of each group that is all right
    assert report["removed_correct_share"] == 1
    assert whole.seconds == {"rollout": 2.0, "decode": 0.2, "reward": 1.0}


def test_a_short_step_is_filled_with_rows_without_weight():
    sampled = prepare.take(rollout(), np.array([0, 1]))
    prepared = run(sampled, rules())
    assert prepared.batch.tokens.shape[0] == 4
    assert np.all(np.asarray(prepared.batch.sample_weights)[2:] == 0)


def test_updates_of_a_step_merge_by_kind():
    common = {"skipped_empty": 0.0, "kept_tokens": 3.0, "probs_ratio_max": 1.5, "param_norm": 1.0}
    merged = prepare.merge_updates(
        [
            common | {"tokens": 3.0, "loss": 1.0, "grad_norm": 2.0},
            common | {"tokens": 5.0, "loss": 3.0, "grad_norm": 4.0, "probs_ratio_max": 1.2},
            common | {"tokens": 0.0, "loss": 0.0, "grad_norm": 0.0, "skipped_empty": 1.0},
        ]
    )
    assert merged == {
        "tokens": 8.0,
        "kept_tokens": 9.0,
        "skipped_empty": 1.0,
        "loss": 2.0,  # an empty update has no loss to average
        "grad_norm": 3.0,
        "grad_norm_max": 4.0,
        "probs_ratio_max": 1.5,
        "param_norm": 1.0,
    }


def test_nothing_at_all_is_a_batch_without_weight():
    """Dynamic sampling that found no group to train must not end the run."""
    empty = prepare.take(rollout(), np.array([], int))
    prepared = run(empty, rules())
    ((batch, counts),) = prepare.split_updates(prepared.batch, 1)
    assert batch.tokens.shape[0] == 4 and counts.tokens == 0 and counts.sequences == 0
    assert rollouts.summary(empty)["length/max"] == 0


def test_sample_rows_tell_what_decided_the_training():
    sampled = rollout(truncated=(0, 1, 0, 0))
    prepared = run(sampled, rules(FiltersConfig(overlong_filtering=True)))
    rows = prepare.sample_rows(7, sampled, prepared, ByteTokenizer())
    assert rows[1]["dropped"] == "overlong" and rows[1]["weight"] == 0
    assert rows[1]["stop_reason"] == "length" and rows[0]["stop_reason"] == "stop"
    assert (
        rows[2]["completion_length"] == len(rows[2]["tokens"]) == len(rows[2]["token_texts"]) == 3
    )
    assert rows[0]["advantage"] == 0.5 and rows[0]["components"] == {"verifier": 1.0}
