"""Cached decoding says what the full forward says, in place, in both layouts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models import attention, cache, model_config, presets, transformer

LENGTHS, WIDTH, NEW = [7, 3, 5], 8, 4
SWITCHES = {
    "tied, biased": {"qkv_bias": True, "family": "qwen2"},
    "gemma": {
        "pattern": ("local", "global"),
        "window": 4,
        "local_rope_theta": 30.0,
        "activation": "gelu_tanh",
        "sandwich_norms": True,
        "centered_norms": True,
        "scale_embeddings": True,
        "query_width": 5,
        "attention_soft_cap": 2.0,
        "logit_soft_cap": 3.0,
    },
    "experts": {
        "num_experts": 5,
        "experts_per_token": 2,
        "expert_size": 24,
        "normalize_experts": True,
    },
    # Three kinds of layers, whose windows begin inside the prompt and inside what is decoded.
    "untied, mixed": {
        "tie_embeddings": False,
        "num_layers": 4,
        "pattern": ("global", "local", "local_nope"),
        "window": 4,
        "qk_norm": True,
        "rope_scaling": model_config.RopeScaling("yarn", 2.0, original_length=6),
    },
}
UNROLL = pytest.mark.parametrize("unroll", [True, False], ids=["unrolled", "stacked"])


def make(draw, **changes):
    config = presets.preset("tiny", **{"rope_theta": 100.0, **changes})
    return config, draw(config)


@functools.partial(jax.jit, static_argnums=0)
def full_logits(config, params, tokens, positions, segment_ids):
    policy = transformer.policy_for(config)
    return policy.unembed(
        policy.head(params), policy.hidden(params, tokens, positions, segment_ids)
    )


def decode(config, decoder, params, tokens, lengths, cache_length):
    """Prefill, then NEW steps of teacher forcing; logits f32[N, 1 + NEW, V]."""
    rows = jnp.arange(len(lengths))

    @jax.jit
    def run(params):
        params = decoder.prepare(params)
        slots = decoder.init_cache(len(lengths), cache_length)
        logits, slots = decoder.prefill(params, tokens[:, :WIDTH], lengths, slots)

        def one(carry, i):
            positions = lengths + i
            logits, carry = decoder.step(params, tokens[rows, positions], positions, carry)
            return carry, logits

        _, later = jax.lax.scan(one, slots, jnp.arange(NEW))
        return jnp.concatenate([logits[None], later]).swapaxes(0, 1)

    return run(params)


def compare(draw, rows, atol, unroll, cache_length=WIDTH + NEW, **changes):
    config, params = make(draw, **changes)
    lengths = jnp.array(LENGTHS, jnp.int32)
    tokens, positions, _ = rows(264, LENGTHS, WIDTH + NEW)
    decoder = cache.decoder_for(config, unroll=unroll)
    found = decode(config, decoder, params, tokens, lengths, cache_length)
    segment_ids = (positions < lengths[:, None] + NEW).astype(jnp.int32)
    whole = full_logits(config, params, tokens, positions, segment_ids)
    where = lengths[:, None] - 1 + jnp.arange(1 + NEW)[None]
    expected = jnp.take_along_axis(whole, where[..., None], axis=1)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
    assert float(jnp.abs(expected).max()) > 1


@pytest.mark.parametrize("unroll", [True, False])
@pytest.mark.parametrize("name", SWITCHES)
def test_cached_decode_equals_the_full_forward(x64, draw, rows, unroll, name):
    wide = {"param_dtype": "float64", "compute_dtype": "float64"}
    # RoPE's angles are float32 on both sides, and the same.
    compare(draw, rows, 1e-12, unroll, **SWITCHES[name], **wide)


@UNROLL
def test_dynamic_rope_decodes_as_far_as_the_models_own_length(draw, rows, unroll):
    scaling = model_config.RopeScaling("dynamic", 2.0)
    changes = {"rope_scaling": scaling, "max_length": WIDTH + NEW}
    compare(draw, rows, 1e-5, unroll, **changes)
    decoder = cache.decoder_for(presets.preset("tiny", **changes), unroll=unroll)
    with pytest.raises(ValueError, match="13 positions is longer than the model's 12, and its dyn"):
        decoder.init_cache(2, WIDTH + NEW + 1)


def test_cached_decode_with_a_longer_cache_in_float32(draw, rows):
    # Sums in another order, on logits around 5.
    compare(draw, rows, 1e-5, True, cache_length=40)


def test_cached_decode_in_bfloat16(draw, rows):
    # bfloat16 rounds to 2^-9 of logits around 5, a few times on the way.
    compare(draw, rows, 0.15, False, compute_dtype="bfloat16")


@UNROLL
def test_every_leaf_has_the_slots_in_front(unroll):
    slots = cache.decoder_for(presets.preset("tiny"), unroll=unroll).init_cache(5, 12)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(slots)} == {5}


@UNROLL
def test_a_position_beyond_the_cache_writes_nothing(draw, unroll):
    config, params = make(draw)
    decoder = cache.decoder_for(config, unroll=unroll)
    tokens, positions = jnp.array([4, 5], jnp.int32), jnp.array([6, 2], jnp.int32)
    _, after = jax.jit(
        lambda p: decoder.step(decoder.prepare(p), tokens, positions, decoder.init_cache(2, 6))
    )(params)
    for leaf in jax.tree.leaves(after):
        assert not leaf[0].any() and leaf[1].any()


@UNROLL
def test_the_cache_is_updated_in_place(unroll):
    """The loop needs no room for a second cache, and the donated one is given back."""
    config = presets.preset("tiny")
    decoder = cache.decoder_for(config, unroll=unroll)
    rows, length = 4, 4096
    shapes = jax.eval_shape(decoder.prepare, transformer.abstract_params(config))
    slots = jax.eval_shape(lambda: decoder.init_cache(rows, length))

    def loop(params, tokens, slots):
        def body(state):
            i, tokens, slots = state
            logits, slots = decoder.step(params, tokens, jnp.full((rows,), i), slots)
            return i + 1, jnp.argmax(logits, -1).astype(jnp.int32), slots

        return jax.lax.while_loop(lambda state: state[0] < 9, body, (0, tokens, slots))

    token = jax.ShapeDtypeStruct((rows,), jnp.int32)
    memory = jax.jit(loop, donate_argnums=2).lower(shapes, token, slots).compile().memory_analysis()
    size = sum(leaf.size * 4 for leaf in jax.tree.leaves(slots))
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < 0.6 * size  # one layer's keys and values may pass through


def test_keys_and_values_are_not_copied_for_each_head():
    """Attention over a grouped cache makes nothing as large as one copy of the keys a head."""
    rows, heads, kv_heads, length, width = 2, 8, 1, 2048, 32
    key = jax.ShapeDtypeStruct((rows, kv_heads, length, width), jnp.float32)
    query = jax.ShapeDtypeStruct((rows, 1, heads, width), jnp.float32)
    mask = jax.ShapeDtypeStruct((rows, 1, length), jnp.bool_)
    attend = jax.jit(functools.partial(attention.weigh, presets.preset("tiny")))
    memory = attend.lower(query, key, key, mask).compile().memory_analysis()
    assert memory.temp_size_in_bytes < rows * heads * length * width * 4 / 4


@UNROLL
@pytest.mark.parametrize(("dtype", "atol"), [("bfloat16", 0.05), ("int8", 0.2)])
def test_a_smaller_cache_costs_little(draw, rows, unroll, dtype, atol):
    """bfloat16 is off by 2^-9 of a number, int8 by 1/254 of the largest in its head: 4 times that.

    Bounds on logits around 5, of a model with sharp attention; docs/numerics.md has a real one.
    """
    config, params = make(draw)
    lengths = jnp.array(LENGTHS, jnp.int32)
    tokens, *_ = rows(264, LENGTHS, WIDTH + NEW)
    run = functools.partial(decode, config)
    exact = run(cache.decoder_for(config, unroll=unroll), params, tokens, lengths, WIDTH + NEW)
    small = cache.decoder_for(config, unroll=unroll, dtype=dtype)
    found = run(small, params, tokens, lengths, WIDTH + NEW)
    np.testing.assert_array_equal(found[:, 0], exact[:, 0])  # a prompt is read before it is stored
    error = np.abs(found - exact).max()
    assert 1e-4 < error < atol


@UNROLL
def test_int8_is_off_by_half_a_step_and_holds_zeros(unroll):
    config = presets.preset("tiny", num_layers=1)
    small = cache.decoder_for(config, unroll=unroll, dtype="int8").init_cache(3, 8)
    held = jax.tree.leaves(small, is_leaf=lambda x: isinstance(x, cache.Int8))[0]
    assert held.values.dtype == jnp.int8 and held.scale.shape == (*held.values.shape[:-1], 1)
    x = jax.random.normal(jax.random.key(0), (3, 2, 16)) * jnp.array([1e-3, 1, 1e3])[:, None, None]
    x = x.at[0, 0].set(0)
    stored = cache._as_held(x, held)
    assert stored.values.dtype == jnp.int8
    assert np.all(np.abs(cache._read(stored, x.dtype) - x) <= stored.scale / 2 * (1 + 1e-5))
    assert not np.any(cache._read(stored, x.dtype)[0, 0])
