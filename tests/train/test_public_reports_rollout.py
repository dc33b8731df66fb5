"""Faults that other trainers had in public, as tests of ours: from sampler to trained tokens.

Completions are written by a decoder with a script, and go through the real sampler, engine, rollout
and collation. The numbers are those of the collection of public reports; each test names its case.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.core.advantages import AdvantageConfig
from grpo_jax.core.policy import Decoder
from grpo_jax.data.prompts import Example, Prompt
from grpo_jax.data.tokenizer import ByteTokenizer
from grpo_jax.rewards.scoring import RewardComponent, RewardConfig, Scorer
from grpo_jax.rewards.shaping import ShapingConfig
from grpo_jax.sampling.engine import EngineConfig, NativeEngine
from grpo_jax.sampling.generate import STOP_REASONS, SamplingConfig
from grpo_jax.train import prepare, rollout
from grpo_jax.train.filters import FiltersConfig
from grpo_jax.train.rollout import RolloutConfig

V = 128
SCORER = RewardConfig(components=(RewardComponent(kind="exact_match"),))


def scripted(logits) -> Decoder:
    """A decoder that reads the logits of its next token from `logits` f32[scripts, places, V].

    A prompt is one token, the number of its script.
    """
    table = jnp.asarray(logits, jnp.float32)

    def prefill(params, tokens, lengths, cache):
        return table[tokens[:, 0], 0], cache.at[:, 0, 0, 0].set(tokens[:, 0])

    def step(params, tokens, positions, cache):
        return table[cache[:, 0, 0, 0], jnp.minimum(positions, table.shape[1] - 1)], cache

    return Decoder(
        init_cache=lambda slots, length: jnp.zeros((slots, 1, length, 1), jnp.int32),
        prefill=prefill,
        step=step,
        prepare=lambda params: params,
    )


def sentences(rows) -> np.ndarray:
    """Logits under which only these tokens can be drawn."""
    places = max(map(len, rows))
    logits = np.full((len(rows), places, V), -1e4)
    for i, row in enumerate(rows):
        logits[i, np.arange(len(row)), row] = 0
    return logits


def collect(logits, new: int, stops, completions=1) -> rollout.Rollout:
    engine = NativeEngine(
        scripted(logits), SamplingConfig(new), stop_ids=stops, config=EngineConfig(prompt_bucket=1)
    )
    prompts = [Prompt(Example("p", "x"), np.array([i]), "p") for i in range(len(logits))]
    with Scorer(SCORER) as scorer:
        return rollout.collect(
            engine, {}, ByteTokenizer(), scorer, prompts, completions, jax.random.key(0)
        )


def weigh(sampled: rollout.Rollout, **filters):
    """Which rows keep a weight, and the tokens of the completions that are trained."""
    rules = prepare.Rules(ShapingConfig(), FiltersConfig(**filters), AdvantageConfig(), False)
    weighed = prepare.weigh(sampled, rules)
    config = RolloutConfig(len(sampled.texts), 1, length_multiple=1)
    batch = prepare.collate(sampled, weighed, config)
    return weighed.weights.tolist(), np.asarray(batch.token_mask)[:, 1:].astype(int)


@pytest.mark.parametrize("pad", [0, 2])
def test_a24_the_completion_ends_with_its_first_end_token(pad):
    rows = [[11, 12, 2, 0, 0], [11, 12, 13, 14, 15], [2, 0, 0, 0, 0], [11, 2, 12, 2, 0]]
    rows = [[pad if t == 0 else t for t in row] for row in rows]
    _, mask = weigh(collect(sentences(rows), 5, [2]))
    wanted = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert mask[:, :5].tolist() == wanted and not mask[:, 5:].any()


def test_a25_every_end_token_ends_a_completion():
    sampled = collect(sentences([[9, 106, 7, 1]]), 4, [1, 106])
    _, mask = weigh(sampled)
    assert np.flatnonzero(mask[0]).tolist() == [0, 1]
    assert not sampled.truncated[0]


def test_a26_the_stop_reason_is_decided_before_the_cut_and_the_filter_reads_it():
    generated = [[5, 6, 7, 8, 9, 2], [5, 6, 7, 2, 2, 2], [5, 6, 7, 8, 8, 8]]
    sampled = collect(sentences(generated), 4, [2])
    reasons = [STOP_REASONS[i] for i in sampled.rows.stop_reasons]
    assert reasons == ["length", "stop", "length"]
    assert sampled.rows.completion_lengths.tolist() == [4, 4, 4]
    weights, _ = weigh(sampled, overlong_filtering=True)
    assert weights == [0, 1, 0]


def test_a08_the_log_probability_is_that_of_the_sampled_token():
    """Of a likely and an unlikely one; the rest of the probability is at token 5."""
    logits = np.full((1, 1, V), -np.inf)
    logits[0, 0, [7, 3]] = -0.1, -2.5
    logits[0, 0, 5] = np.log1p(-np.exp(-0.1) - np.exp(-2.5))
    rows = collect(logits, 1, [], completions=64).rows
    found = {int(t): float(x) for t, x in zip(rows.tokens[:, 1], rows.logprobs[:, 1], strict=True)}
    assert found[7] == pytest.approx(-0.1, abs=1e-6) and found[3] == pytest.approx(-2.5, abs=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a08_a_sampled_token_without_a_log_probability_is_refused(value):
    rows = collect(sentences([[5, 6], [7, 2]]), 2, [2]).rows
    logprobs = np.array(rows.logprobs)
    logprobs[0, 0] = value  # a prompt token has none
    rollout.check(rows._replace(logprobs=logprobs), 2, 1)
    logprobs[1, 2] = value
    with pytest.raises(ValueError, match=r"token 1 of completion 1 \(id 2\).*1 tokens in all"):
        rollout.check(rows._replace(logprobs=logprobs), 2, 1)


def test_a50_an_engine_that_repeats_prompts_once_more_is_refused():
    rows = collect(sentences([[5, 6], [7, 2]]), 2, [2], completions=4).rows
    assert len(rows.tokens) == 8
    with pytest.raises(ValueError, match="returned 8 rows for 2 prompts with 2 completions each"):
        rollout.check(rows, 2, 2)
    with pytest.raises(ValueError, match="claims 4 tokens and the arrays are 3 wide"):
        rollout.check(rows._replace(completion_lengths=rows.completion_lengths + 1), 2, 4)
