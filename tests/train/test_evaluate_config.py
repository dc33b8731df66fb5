"""Settings of evaluation, and the metric that ends a run early."""

import jax
import numpy as np
import pytest

from grpo_jax.data.prompts import Example, Prompt
from grpo_jax.data.tokenizer import ByteTokenizer
from grpo_jax.rewards.scoring import RewardComponent, RewardConfig, Scorer
from grpo_jax.sampling.engine import EngineConfig, NativeEngine
from grpo_jax.sampling.generate import SamplingConfig
from grpo_jax.train import loop
from grpo_jax.train.evaluate import EvaluateConfig, evaluate, metric_names
from tests.train.test_public_reports_rollout import scripted, sentences

KEY = jax.random.key(0)


def test_evaluation_samples_with_settings_of_its_own():
    training = SamplingConfig(max_new_tokens=64, min_new_tokens=32)
    own = EvaluateConfig(temperature=0.0, top_p=0.9, max_new_tokens=16).sampling(training)
    assert own.max_new_tokens == 16 and own.min_new_tokens == 16
    assert own.filter.temperature == 0.0 and own.filter.top_p == 0.9
    assert EvaluateConfig().sampling(training).max_new_tokens == 64


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(every=-1), "every = -1 is negative"),
        (dict(completions=0), "completions = 0 must be at least 1"),
        (dict(completions=4, temperature=0.0), "are all the same"),
        (dict(completions=4, pass_k=(8,)), "raise completions to 8"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        EvaluateConfig(**settings)


def test_names_that_every_evaluation_reports_are_those_of_one():
    """Held against a real evaluation, whose rewards are not binary."""
    answers = [[97, 2], [98, 2]]
    engine = NativeEngine(
        scripted(sentences(answers)), SamplingConfig(2), stop_ids=[2], config=EngineConfig(1)
    )
    held_out = [Prompt(Example("p", "x"), np.array([i]), "p") for i in range(2)]
    config = EvaluateConfig(completions=3, pass_k=(2,))
    rewards = RewardConfig((RewardComponent("length", params={"target": 3}),))
    with Scorer(rewards) as scorer:
        metrics = evaluate(
            engine, {}, ByteTokenizer(), scorer, held_out, config, SamplingConfig(2), KEY
        ).metrics
    assert metric_names(config, ["length"]) == list(metrics)


def test_a_run_ends_early_at_its_target():
    config = EvaluateConfig(stop_metric="eval/mean_reward", stop_threshold=0.5)
    assert loop._target_hit(config, {"eval/mean_reward": 0.5})
    assert not loop._target_hit(config, {"eval/mean_reward": 0.4})
    assert not loop._target_hit(config, {})
    with pytest.raises(ValueError, match="there are eval/length"):
        loop._target_hit(config, {"eval/length": 1.0})
