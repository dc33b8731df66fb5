"""A model without a cache can be sampled from: slow, right, and it says so once."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.logprobs import token_scores
from grpo_jax.models import adapters, cache, presets, transformer
from grpo_jax.sampling.engine import EngineConfig, NativeEngine
from grpo_jax.sampling.generate import SamplingConfig
from grpo_jax.sampling.session import Request
from grpo_jax.scale import mesh as meshes
from tests.models.test_adapters import LinenBigram, NnxBigram, nnx

MODEL = presets.preset(
    "tiny", num_layers=2, hidden_size=16, intermediate_size=32, num_heads=4, num_kv_heads=2,
    head_dim=8, vocab_size=48, initializer_range=0.25,
)  # fmt: skip
FILTER = FilterConfig(temperature=0.9, top_k=30)
SAMPLING = SamplingConfig(12, filter=FILTER)
KEY = jax.random.key(5)


def drawn(decoder, params, mesh=None):
    """Five prompts with two completions each, in four slots: they are refilled, moved, widened."""
    shapes = EngineConfig(prompt_bucket=4, burst=4, rows=4)
    engine = NativeEngine(decoder, SAMPLING, stop_ids=[3], config=shapes, mesh=mesh)
    asked = [
        Request(np.arange(1, 3 + i), id=i, members=(0, 1), max_new_tokens=12 - 2 * i)
        for i in range(5)
    ]
    return {(c.request.id, c.member): c for c in engine.complete(params, asked, KEY)}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, c in found.items():
        assert c.tokens.tolist() == wanted[name].tokens.tolist()
        # float32 sums in another order: 1e-5 nats
        np.testing.assert_allclose(c.logprobs, wanted[name].logprobs, atol=1e-5)


@pytest.mark.parametrize("shape", [None, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_what_is_drawn_is_what_a_cache_gives(shape):
    params = transformer.init_params(MODEL, jax.random.key(0))
    policy = transformer.policy_for(MODEL)
    mesh = None if shape is None else meshes.make_mesh(meshes.MeshConfig(**shape))
    slow = adapters.decoder_from_policy(policy, say=lambda _: None)
    assert_same(drawn(slow, params, mesh), drawn(cache.decoder_for(MODEL), params, mesh))


def doors():
    """The same bigram behind each door: (policy, params)."""
    policy, params = adapters.policy_from_nnx(NnxBigram(48, nnx.Rngs(0)))
    table = params["table"]["embedding"]
    yield policy, params
    constants = {"constants": {"shift": jnp.float32(0.5)}}
    linen = adapters.policy_from_linen(LinenBigram(48), constants=constants)
    yield linen, {"Embed_0": {"embedding": table}}
    yield adapters.policy_from_apply(lambda p, tokens, *_: p["t"][tokens] + 0.5), {"t": table}


def test_each_door_is_sampled_with_the_log_probabilities_that_training_sees():
    found = []
    for policy, params in doors():
        completions = drawn(adapters.decoder_from_policy(policy, say=lambda _: None), params)
        found.append(completions)
        for c in completions.values():
            row = jnp.asarray([[*np.asarray(c.request.prompt), *c.tokens]], jnp.int32)
            places = jnp.arange(row.shape[1], dtype=jnp.int32)[None]
            scores = token_scores(
                policy, params, row, places, jnp.ones_like(row), filter=FILTER
            ).logprobs[0, -len(c.tokens) :]
            np.testing.assert_allclose(c.logprobs, scores, atol=1e-5)
    for other in found[1:]:
        assert_same(other, found[0])


def test_it_says_once_what_it_costs(caplog):
    (policy, params), *_ = doors()
    with caplog.at_level(logging.WARNING):
        decoder = adapters.decoder_from_policy(policy)
        drawn(decoder, params)
        drawn(decoder, params)
    (record,) = caplog.records
    assert "no key-value cache" in record.message
    assert "reads its whole row again for every token" in record.message


def test_only_the_logits_that_are_asked_for_are_computed():
    """With a head that can be split off, nothing has the size of all logits."""
    policy = transformer.policy_for(MODEL)
    decoder = adapters.decoder_from_policy(policy, say=lambda _: None)
    slots = jax.eval_shape(lambda: decoder.init_cache(3, 40))
    assert all(
        x.ndim >= 4 and x.shape[0] == 3 and x.shape[-2] == 40 for x in jax.tree.leaves(slots)
    )
    numbers = jax.ShapeDtypeStruct((3,), jnp.int32)
    shapes = transformer.abstract_params(MODEL)
    text = jax.jit(decoder.step).lower(shapes, numbers, numbers, slots).as_text()
    assert "3x48x" in text or "3x48>" in text
    assert "3x40x48" not in text
