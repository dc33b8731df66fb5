"""Every implementation of attention against one written out in full, values and gradients."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models import attention, presets, transformer
from grpo_jax.scale import mesh as meshes

ROWS, LENGTH, HEADS, KV_HEADS, WIDTH = 2, 150, 4, 2, 32  # two blocks and a part; 256 for splash
SWITCHES = {
    "plain": ({}, None),
    "window": ({}, 37),  # begins inside a block
    "soft cap": ({"attention_soft_cap": 2.0, "query_width": 20}, None),
    "both": ({"attention_soft_cap": 2.0}, 70),
}


def config_of(name, **switches):
    return dataclasses.replace(
        presets.preset("tiny"), num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=WIDTH,
        attention=name, **switches,
    )  # fmt: skip


def arrays(dtype=jnp.float32):
    """Two rows of several segments and padding at their ends."""
    rng = np.random.default_rng(0)
    draw = lambda heads: jnp.asarray(rng.normal(0, 2, (ROWS, LENGTH, heads, WIDTH)), dtype)  # noqa: E731
    ids = np.zeros((ROWS, LENGTH), np.int32)
    ids[0, :66], ids[0, 66:140], ids[1, :149] = 1, 2, 1
    return jnp.asarray(ids), draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)


def written_out(config, ids, window, query, key, value):
    """Softmax over the visible keys, head by head, in numpy-like steps."""
    scale = (config.query_width or WIDTH) ** -0.5
    length = query.shape[1]
    places = jnp.arange(length)
    age = places[:, None] - places[None]
    near = (age >= 0) & (age < (window or length))
    seen = (ids[:, :, None] == ids[:, None]) & near[None]
    parts = []
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        scores = jnp.einsum("btd,bsd->bts", query[:, :, head], key[:, :, group]) * scale
        if config.attention_soft_cap:
            scores = config.attention_soft_cap * jnp.tanh(scores / config.attention_soft_cap)
        weights = jnp.where(seen, jnp.exp(scores - scores.max(-1, keepdims=True)), 0)
        weights = weights / weights.sum(-1, keepdims=True)
        parts.append(jnp.einsum("bts,bsd->btd", weights, value[:, :, group]))
    return jnp.stack(parts, 2)


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("name", ["dot_product", "blocked", "splash"])
def test_values_and_gradients_are_those_written_out(name, switches):
    """Float32: scores of size 10 over 150 keys; 2e-5 of the largest entry."""
    changes, window = SWITCHES[switches]
    config = config_of(name, **changes)
    ids, *qkv = arrays()
    assert_same(config, window, ids, *qkv)


def assert_same(config, window, ids, *qkv):
    """Values and gradients of real tokens, to 2e-5 of the largest entry."""
    real = (ids > 0)[:, :, None, None]
    slopes = jnp.asarray(np.random.default_rng(1).normal(size=qkv[0].shape), jnp.float32)

    def total(function):
        def weighed(*qkv):
            mixed = jnp.where(real, function(config, ids, window, *qkv), 0)
            return jnp.sum(mixed * slopes), mixed

        return jax.jit(jax.grad(weighed, argnums=(0, 1, 2), has_aux=True))(*qkv)

    found, wanted = total(attention.attend), total(written_out)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        largest = max(float(jnp.abs(theirs).max()), 0.1)  # of one key the gradient is 0
        np.testing.assert_allclose(ours, theirs, atol=2e-5 * largest)


@pytest.mark.parametrize("length", [1, 63, 65, 129])
@pytest.mark.parametrize("name", ["auto", "dot_product", "blocked", "splash"])
def test_a_row_need_not_be_a_multiple_of_any_block(name, length):
    """Blocks are of 64 and 128 tokens; the window and a segment end inside one."""
    config = config_of(name, attention_soft_cap=3.0)
    cut = [x[:, :length] for x in arrays()]
    assert_same(config, 20, *cut)
    mixed = attention.attend(config, cut[0], 20, *cut[1:])
    assert mixed.shape == (ROWS, length, HEADS, WIDTH) and np.isfinite(mixed).all()


@pytest.mark.parametrize("name", ["dot_product", "blocked", "splash"])
def test_padding_gives_numbers(name):
    config = config_of(name)
    ids, *qkv = arrays()
    mixed = attention.attend(config, jnp.zeros_like(ids), None, *qkv)
    assert np.isfinite(mixed).all()


def test_half_precision_stays_near_float32():
    """bfloat16 keeps 8 bits: scores of size 10 in it, weights and values are rounded once each."""
    ids, *qkv = arrays(jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in qkv]
    wanted = attention.attend(config_of("blocked"), ids, None, *wide)
    for name in ("dot_product", "blocked", "splash"):
        found = attention.attend(config_of(name), ids, None, *qkv)
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(found.astype(jnp.float32), wanted, atol=2**-5, rtol=2**-5)


def test_no_attention_weights_are_kept_for_the_backward_pass():
    """What crosses from forward to backward is queries, keys and values, and not [T, T]."""
    config, (ids, *qkv) = config_of("dot_product"), arrays()
    _, pull = jax.vjp(lambda *x: attention.attend(config, ids, None, *x), *qkv)
    kept = [x.shape for x in jax.tree.leaves(pull)]
    assert kept and all(shape.count(LENGTH) < 2 for shape in kept), kept


def test_splash_on_a_mesh_is_splash_and_refuses_cut_rows():
    ids, *qkv = arrays()
    config = config_of("splash")
    wanted = attention.attend(config, ids, None, *qkv)
    mesh = meshes.make_mesh(meshes.MeshConfig(data=1, fsdp=2, tensor=2), jax.devices()[:4])
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        found = jax.jit(lambda *x: attention.attend(config, x[0], None, *x[1:]))(
            *jax.device_put((ids, *qkv), jax.NamedSharding(mesh, jax.P(("data", "fsdp"))))
        )
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    cut = meshes.make_mesh(meshes.MeshConfig(data=1, fsdp=2, context=2), jax.devices()[:4])
    with jax.sharding.use_abstract_mesh(cut.abstract_mesh):
        with pytest.raises(ValueError, match="mesh.context = 2 cuts them; use dot_product"):
            jax.eval_shape(lambda *x: attention.attend(config, x[0], None, *x[1:]), ids, *qkv)


def test_an_unknown_implementation_is_named():
    with pytest.raises(ValueError, match="attention='flash' is not known; choose one of auto"):
        config_of("flash")


@pytest.fixture(scope="module")
def tpu():
    """Describe four TPU v5e chips that are not there."""
    pytest.importorskip("libtpu")
    if os.environ.get("TPU_SKIP_MDS_QUERY") != "1":
        pytest.skip("needs TPU_SKIP_MDS_QUERY=1, or libtpu asks the network for a TPU")
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("width,dtype", [(128, "bfloat16"), (64, "float32")])
def test_splash_compiles_for_a_tpu_with_its_gradient(tpu, switches, width, dtype):
    changes, window = SWITCHES[switches]
    config = dataclasses.replace(config_of("splash", **changes), head_dim=width)
    one = jax.sharding.SingleDeviceSharding(tpu[0])
    shape = lambda *s, d=dtype: jax.ShapeDtypeStruct(s, d, sharding=one)  # noqa: E731

    def loss(query, key, value, ids):
        return jnp.sum(attention.attend(config, ids, window, query, key, value) ** 2)

    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(
        shape(2, 1000, HEADS, width), *(shape(2, 1000, KV_HEADS, width),) * 2,
        shape(2, 1000, d="int32"),
    ).compile()  # fmt: skip
    assert program.as_text().count("tpu_custom_call") >= 3  # forward, dq, and dk with dv
    assert program.memory_analysis().temp_size_in_bytes < 2 * HEADS * 1000 * 1000 * 4  # no weights


def test_a_model_with_splash_compiles_for_a_mesh_of_tpus(tpu):
    """A train-like gradient on fsdp 2 x tensor 2, with a layer of each kind."""
    config = dataclasses.replace(
        config_of("splash"), num_layers=2, hidden_size=256, intermediate_size=512,
        pattern=("local", "global"), window=300, remat="full", head_dim=128,
        compute_dtype="bfloat16",
    )  # fmt: skip
    mesh = meshes.make_mesh(meshes.MeshConfig(fsdp=2, tensor=2), tpu)
    policy = transformer.policy_for(config)
    rows = jax.NamedSharding(mesh, jax.P(("data", "fsdp")))
    whole = jax.NamedSharding(mesh, jax.P())
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
        transformer.abstract_params(config),
    )
    ids = jax.ShapeDtypeStruct((4, 1000), jnp.int32, sharding=rows)

    def loss(params, tokens, positions, segments):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            hidden = policy.hidden(params, tokens, positions, segments)
        return jnp.sum(hidden.astype(jnp.float32) ** 2)

    program = jax.jit(jax.grad(loss)).lower(params, ids, ids, ids).compile()
    assert "tpu_custom_call" in program.as_text()
