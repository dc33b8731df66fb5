"""The native engine: ragged prompts in, ordered rows out, a handful of programs."""

import functools

import jax
import numpy as np
import pytest

from grpo_jax.core.filtering import FilterConfig
from grpo_jax.models import cache, presets, transformer
from grpo_jax.sampling.engine import EngineConfig, NativeEngine
from grpo_jax.sampling.generate import SamplingConfig

MODEL = presets.preset(
    "tiny", num_layers=1, hidden_size=16, intermediate_size=32, num_heads=2, num_kv_heads=1,
    head_dim=8, vocab_size=40, initializer_range=0.4,
)  # fmt: skip
PROMPTS = [np.arange(1, 1 + n, dtype=np.int32) for n in (3, 9, 1, 5, 2)]
SAMPLING = SamplingConfig(4, filter=FilterConfig(top_k=20))


@functools.cache
def params():
    return transformer.init_params(MODEL, jax.random.key(0))


def engine(**options):
    return NativeEngine(cache.decoder_for(MODEL), SAMPLING, stop_ids=[3, 17], **options)


@functools.cache
def together():
    """Sample all prompts in one call of one program."""
    used = engine(config=EngineConfig(prompt_bucket=16), pad_id=39)
    return used.generate(params(), PROMPTS, 2, jax.random.key(5)), used.programs


def rows_of(out):
    rows = zip(out.tokens, out.logprobs, out.prompt_lengths + out.completion_lengths, strict=True)
    return [(tokens[:end].tolist(), logprobs[:end]) for tokens, logprobs, end in rows]


def test_rows_come_back_on_the_host_in_the_order_of_the_prompts():
    out, _ = together()
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(out))
    for row in range(10):
        assert rows_of(out)[row][0][: len(PROMPTS[row // 2])] == PROMPTS[row // 2].tolist()
    assert np.all(out.tokens[2, 9 + out.completion_lengths[2] :] == 39)


def test_buckets_and_row_limits_change_no_completion_and_compile_few_programs():
    wanted, programs = together()
    assert programs == 4  # empty, read, seat, burst
    used = engine(config=EngineConfig(prompt_bucket=4, rows=4), pad_id=39)
    out = used.generate(params(), PROMPTS, 2, jax.random.key(5))
    for (tokens, logprobs), (same, close) in zip(rows_of(out), rows_of(wanted), strict=True):
        assert tokens == same
        np.testing.assert_allclose(logprobs, close, atol=1e-5)
    np.testing.assert_array_equal(out.stop_reasons, wanted.stop_reasons)
    # widths 4, 8 and 12 are read, into slots of 8 and of 16 positions
    assert used.programs == 11
    used.generate(params(), PROMPTS[::-1], 2, jax.random.key(6))
    assert used.programs == 11


def test_request_ids_carry_the_randomness():
    wanted, _ = together()
    used = engine(config=EngineConfig(prompt_bucket=16))
    out = used.generate(params(), PROMPTS[3:4], 2, jax.random.key(5), request_ids=[3])
    assert [row[0] for row in rows_of(out)] == [row[0] for row in rows_of(wanted)[6:8]]


def test_a_call_may_bring_its_own_sampling():
    greedy = SamplingConfig(2, filter=FilterConfig(temperature=0.0))
    used = engine(config=EngineConfig(prompt_bucket=16))
    out = used.generate(params(), PROMPTS[:1], 2, jax.random.key(5), sampling=greedy)
    assert rows_of(out)[0][0] == rows_of(out)[1][0]
    assert out.completion_lengths.max() <= 2
    assert out.tokens.shape == (2, 3 + out.completion_lengths.max())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 1), "there are no prompts"),
        (([[]], 1), "prompt 0 has shape"),
        (([[1] * 7], 1), "7 tokens with max_new_tokens=4 exceeds the model's context of 10"),
        (([[1]], 0), "group_size=0 must be at least 1"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        engine(context_length=10).generate(params(), *arguments, jax.random.key(0))


def test_a_prompt_that_just_fits_the_context_is_served():
    out = engine(context_length=10, config=EngineConfig(prompt_bucket=6)).generate(
        params(), [np.arange(1, 7)], 1, jax.random.key(0)
    )
    assert out.tokens.shape == (1, 10)


def test_request_ids_must_match_the_prompts():
    with pytest.raises(ValueError, match="2 request ids for 1 prompts"):
        engine().generate(params(), [[1]], 1, jax.random.key(0), request_ids=[1, 2])


@pytest.mark.parametrize("values", [{"prompt_bucket": 0}, {"rows": 0}])
def test_shapes_that_hold_nothing_are_refused(values):
    with pytest.raises(ValueError, match="must be at least 1"):
        EngineConfig(**values)
