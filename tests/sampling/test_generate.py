"""What is sampled is what the trainer scores, and no row notices what else runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.core import logprobs
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.models import cache, presets, transformer
from grpo_jax.sampling import generate as generating
from grpo_jax.sampling.engine import EngineConfig, NativeEngine
from grpo_jax.sampling.generate import LENGTH, STOP, SamplingConfig

MODEL = presets.preset(
    "tiny", num_layers=1, hidden_size=16, intermediate_size=32, num_heads=2, num_kv_heads=1,
    head_dim=8, vocab_size=40, initializer_range=0.4,
)  # fmt: skip
FILTERED = FilterConfig(temperature=0.8, top_k=20, top_p=0.95)
NEW = 5
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12]]


@functools.cache
def params():
    return transformer.init_params(MODEL, jax.random.key(0))


@functools.cache
def engine(stop_ids, pad_id, width):
    config = EngineConfig(prompt_bucket=width, burst=3)
    return NativeEngine(
        cache.decoder_for(MODEL), SamplingConfig(), stop_ids=stop_ids, pad_id=pad_id, config=config
    )


def sample(
    prompts,
    *,
    width=4,
    ids=None,
    seed=1,
    filter=FILTERED,
    new=NEW,
    least=0,
    stop_ids=(),
    pad_id=0,
    group_size=1,
):
    ids = np.arange(len(prompts)) if ids is None else np.asarray(ids)
    config = SamplingConfig(new, least, filter)
    return engine(tuple(stop_ids), pad_id, width).generate(
        params(), prompts, group_size, jax.random.key(seed), request_ids=ids, sampling=config
    )


def completion(out, row):
    start, count = out.prompt_lengths[row], out.completion_lengths[row]
    return out.tokens[row, start : start + count], out.logprobs[row, start : start + count]


@functools.partial(jax.jit, static_argnames=("filter", "chunk_size"))
def rescore(weights, tokens, lengths, filter, chunk_size):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    return logprobs.token_scores(
        transformer.policy_for(MODEL), weights, tokens, positions, segments,
        filter=filter, chunk_size=chunk_size,
    ).logprobs  # fmt: skip


@pytest.mark.parametrize(
    ("filter", "chunk_size"), [(FilterConfig(temperature=0.7), None), (FILTERED, 8)]
)
def test_the_trainer_scores_what_was_sampled_the_same(filter, chunk_size):
    out = sample(PROMPTS, group_size=2, filter=filter, stop_ids=(3,))
    lengths = out.prompt_lengths + out.completion_lengths
    scores = np.asarray(rescore(params(), out.tokens, lengths, filter, chunk_size))
    columns = np.arange(out.tokens.shape[1])
    sampled = (columns >= out.prompt_lengths[:, None]) & (columns < lengths[:, None])
    assert sampled.sum() == out.completion_lengths.sum() > 0
    # float32, the same products in another order
    np.testing.assert_allclose(out.logprobs[sampled], scores[sampled], atol=1e-5)
    assert np.all(out.logprobs[~sampled] == 0)


def test_rows_are_prompt_then_completion_then_padding():
    out = sample(PROMPTS, group_size=2, stop_ids=(3, 17, 22), pad_id=39)
    for row, prompt in enumerate(np.repeat(np.array(PROMPTS, object), 2)):
        end = len(prompt) + out.completion_lengths[row]
        assert out.tokens[row, : len(prompt)].tolist() == prompt
        assert np.all(out.tokens[row, end:] == 39) and np.all(out.logprobs[row, end:] == 0)
        assert np.all(out.logprobs[row, len(prompt) : end] < 0)


@pytest.mark.parametrize(
    "filter", [FILTERED, FilterConfig(temperature=0.0)], ids=["drawn", "greedy"]
)
def test_report_a30_a_prompt_alone_and_in_a_batch_gives_the_same(filter):
    together = sample(PROMPTS, width=4, filter=filter)
    alone = sample(PROMPTS[2:], width=9, ids=[2], filter=filter)
    np.testing.assert_array_equal(completion(together, 2)[0], completion(alone, 0)[0])
    np.testing.assert_allclose(completion(together, 2)[1], completion(alone, 0)[1], atol=1e-5)


def test_a_completion_depends_on_its_request_not_on_its_place():
    one = sample(PROMPTS, ids=[7, 8, 9], group_size=2)
    other = sample(PROMPTS[::-1], ids=[9, 8, 7], group_size=2)
    for i, j in [(0, 4), (1, 5), (2, 2), (3, 3), (4, 0), (5, 1)]:
        np.testing.assert_array_equal(completion(one, i)[0], completion(other, j)[0])


def test_the_same_key_gives_the_same_tokens_and_members_of_a_group_differ():
    one, again = sample(PROMPTS, group_size=2), sample(PROMPTS, group_size=2)
    jax.tree.map(np.testing.assert_array_equal, one, again)
    other = sample(PROMPTS, group_size=2, seed=2)
    assert np.any(one.tokens != other.tokens)
    assert len({tuple(completion(one, row)[0]) for row in range(2)}) > 1


def test_a_group_shares_its_prefill_and_equals_repeated_prompts():
    # Member 0 of a group draws with the same key as a group of one.
    group, single = sample(PROMPTS, group_size=2), sample(PROMPTS)
    for i in range(len(PROMPTS)):
        np.testing.assert_array_equal(completion(group, 2 * i)[0], completion(single, i)[0])


def test_report_a25_any_of_several_stop_tokens_ends_a_row_and_is_kept():
    free = sample(PROMPTS, group_size=2)
    stops = (int(completion(free, 0)[0][1]), int(completion(free, 3)[0][2]))
    out = sample(PROMPTS, group_size=2, stop_ids=stops)
    for row in range(6):
        wanted = completion(free, row)[0]
        hits = np.flatnonzero(np.isin(wanted, stops))
        end = hits[0] + 1 if hits.size else NEW
        np.testing.assert_array_equal(completion(out, row)[0], wanted[:end])
        np.testing.assert_allclose(completion(out, row)[1], completion(free, row)[1][:end])
    assert out.completion_lengths.min() < NEW


def test_report_a26_the_stop_reason_says_how_a_row_ended():
    free = sample(PROMPTS)
    last = int(completion(free, 0)[0][-1])  # a stop token in the very last place is a stop
    out = sample(PROMPTS, stop_ids=(last,))
    for row in range(3):
        tokens, _ = completion(out, row)
        assert out.stop_reasons[row] == (STOP if tokens[-1] == last else LENGTH)
    assert out.stop_reasons[0] == STOP
    assert set(free.stop_reasons.tolist()) == {LENGTH}


@pytest.mark.parametrize("pad_id", [0, 3])
def test_report_a24_a_pad_token_equal_to_the_stop_token_changes_nothing(pad_id):
    out = sample(PROMPTS, group_size=2, stop_ids=(3,), pad_id=pad_id)
    reference = sample(PROMPTS, group_size=2, stop_ids=(3,), pad_id=39)
    np.testing.assert_array_equal(out.completion_lengths, reference.completion_lengths)
    for row in range(6):
        np.testing.assert_array_equal(completion(out, row)[0], completion(reference, row)[0])


@pytest.mark.parametrize("new", [1, 3])
def test_report_a29_exactly_so_many_tokens_and_no_step_too_many(new):
    decoder = cache.decoder_for(MODEL)
    steps = []

    def counted(*arguments):
        jax.debug.callback(lambda: steps.append(1))
        return decoder.step(*arguments)

    used = NativeEngine(decoder._replace(step=counted), SamplingConfig(new), stop_ids=())
    out = used.generate(params(), PROMPTS, 1, jax.random.key(1))
    jax.effects_barrier()
    assert np.all(np.asarray(out.completion_lengths) == new)
    assert len(steps) == new - 1
    ends = np.asarray(out.prompt_lengths) + new
    beyond = np.arange(out.tokens.shape[1]) >= ends[:, None]
    assert np.all(np.asarray(out.tokens)[beyond] == 0)


def test_decoding_ends_when_every_row_has_stopped():
    everything = tuple(range(MODEL.vocab_size))
    out = sample(PROMPTS, stop_ids=everything)
    assert np.all(out.completion_lengths == 1) and np.all(out.stop_reasons == STOP)


@pytest.mark.parametrize("least", [3])
def test_no_stop_token_among_the_first_tokens(least):
    stops = tuple(range(0, 38))  # nearly everything stops
    out = sample(PROMPTS, stop_ids=stops, least=least, filter=FilterConfig())
    assert np.all(out.completion_lengths >= least)
    for row in range(3):
        assert not np.any(np.isin(completion(out, row)[0][: least - 1], stops))
    assert np.all(np.isfinite(out.logprobs))


def test_greedy_takes_the_most_likely_token_and_reports_its_full_log_probability():
    logits = jnp.array([[0.0, 2.0, 2.0, 1.0]])
    token, logprob = jax.jit(generating.draw, static_argnums=2)(
        logits, jnp.array([0.9]), FilterConfig(0.0, top_k=1)
    )
    assert token[0] == 1  # the smallest id of the tie
    np.testing.assert_allclose(logprob, jax.nn.log_softmax(logits)[0, 1:2], rtol=1e-6)


def test_draws_follow_the_filtered_distribution():
    count = 4000
    logits = jnp.broadcast_to(jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3]])), (count, 4))
    # Stratified numbers, so the shares are exact to 1/count.
    uniform = (jnp.arange(count) + 0.5) / count
    token, logprob = jax.jit(generating.draw, static_argnums=2)(
        logits, uniform, FilterConfig(top_k=3)
    )
    shares = np.bincount(token, minlength=4) / count
    np.testing.assert_allclose(shares, np.array([0, 4, 2, 3]) / 9, atol=2 / count)
    np.testing.assert_allclose(np.exp(logprob), shares[token], atol=2 / count)


def test_a_fault_in_the_logits_is_visible_in_the_log_probability():
    logits = jnp.array([[0.0, jnp.nan, 1.0], [0.0, 1.0, 2.0]])
    token, logprob = jax.jit(generating.draw, static_argnums=2)(
        logits, jnp.array([0.5, 0.5]), FILTERED
    )
    assert np.isnan(logprob[0]) and np.isfinite(logprob[1])
    assert 0 <= token[0] < 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"max_new_tokens": 4, "min_new_tokens": 5}, "min_new_tokens=5 must lie between 0 and"),
        ({"min_new_tokens": -1}, "min_new_tokens=-1"),
    ],
)
def test_impossible_lengths_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**values)
