"""Every mesh gives the numbers of one device: loss, metrics and gradients, in one program each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from grpo_jax.core import masks
from grpo_jax.core.batch import Batch
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.losses import LossConfig
from grpo_jax.models import presets, transformer
from grpo_jax.scale import hlo, rules
from grpo_jax.scale.mesh import MeshConfig, make_mesh
from grpo_jax.train import optimizer, state, step

ROWS, WIDTH, V = 16, 8, 32
MESHES = {
    "fsdp 8": MeshConfig(),
    "2 x 2 x 2": MeshConfig(data=2, fsdp=2, tensor=2),
    "tensor 4, context 2": MeshConfig(fsdp=1, tensor=4, context=2),
    "expert 2, fsdp 4": MeshConfig(expert=2),
    "expert 2, tensor 2, context 2": MeshConfig(fsdp=1, expert=2, tensor=2, context=2),
}
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}


def shape(dtype: str, experts: bool):
    routed = {"num_experts": 4, "experts_per_token": 2, "expert_size": 8, "normalize_experts": True}
    return presets.preset(
        "tiny",
        vocab_size=V,
        hidden_size=16,
        intermediate_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        tie_embeddings=False,
        compute_dtype=dtype,
        param_dtype=dtype,
        remat="full",
        **(routed if experts else {}),
    )


def draw(dtype: str, experts: bool):
    """Parameters of one size, and a batch whose rows have different lengths."""
    rng = np.random.default_rng(1)
    shapes = transformer.abstract_params(shape(dtype, experts))
    params = jax.tree.map(lambda s: (0.3 * rng.normal(size=s.shape)).astype(dtype), shapes)
    inside = np.arange(WIDTH) < rng.integers(3, WIDTH + 1, (ROWS, 1))
    numbers = [rng.normal(size=(ROWS, WIDTH)).astype(dtype) for _ in range(3)]
    advantages = np.broadcast_to(numbers[0][:, :1], (ROWS, WIDTH))
    return params, Batch(
        tokens=rng.integers(0, V, (ROWS, WIDTH)).astype(np.int32),
        segment_ids=inside.astype(np.int32),
        positions=np.where(inside, np.arange(WIDTH), 0).astype(np.int32),
        token_mask=inside & (np.arange(WIDTH) >= 2),
        sample_weights=np.ones((ROWS, WIDTH), dtype),
        advantages=advantages,
        generation_logprobs=-3 + 0.1 * numbers[1],
        prev_logprobs=-3 + 0.1 * numbers[2],
        reference_logprobs=-3 + 0.2 * numbers[1],
    )


def gradient(dtype: str, experts: bool, mesh: MeshConfig | None):
    """Loss, gradient and all metrics of a batch; and how many programs it took for two calls."""
    params, batch = draw(dtype, experts)
    counts, places = masks.count(batch), None
    if mesh is not None:
        transform = optimizer.build_optimizer(optimizer.OptimizerConfig(), 10).transform
        shapes = state.abstract(params, transform)
        places = state.placement(shapes, transform, make_mesh(mesh), say=lambda text: None)
        batch = rules.place(batch, places.mesh)
        params = jax.device_put(params, places.state.params)
    run = step.make_gradient_step(
        transformer.policy_for(shape(dtype, experts)),
        LossConfig(),
        FilterConfig(),
        micro_batches=2,
        chunk_size=8,
        places=places,
    )
    run(params, batch, counts)
    return jax.device_get(run(params, batch, counts)), run.programs, places


@pytest.fixture(autouse=True)
def quick():
    """Compiling is most of what these tests do."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def alone(dtype: str, experts: bool):
    return gradient(dtype, experts, None)[0]


CASES = [(name, True, "float64") for name in MESHES] + [("2 x 2 x 2", False, "float64")]
CASES += [("expert 2, fsdp 4", True, "float32")]
MORE = [(name, True, "float32") for name in MESHES] + [("2 x 2 x 2", False, "float32")]
MORE = [pytest.param(*case, marks=pytest.mark.nightly) for case in MORE if case not in CASES]


@pytest.mark.parametrize(("name", "experts", "dtype"), CASES + MORE)
def test_a_mesh_changes_nothing_and_compiles_once(name, experts, dtype):
    """Tolerances: the rounding of sums in another order, relative to the largest of an array."""
    with jax.enable_x64(dtype == "float64"):
        found, programs, places = gradient(dtype, experts, MESHES[name])
        wanted = alone(dtype, experts)
    assert programs == 1
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert ours.dtype == theirs.dtype
        scale = max(1.0, float(np.abs(theirs).max()))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE[dtype] * scale)
    smallest = min(float(np.abs(g).max()) for g in jax.tree.leaves(wanted[1]))
    assert smallest > 1e-4  # no parameter is left out
    if experts:
        spec = places.state.params["layers"]["mlp"]["up"]["weight"].spec
        assert spec == P(None, "expert", "tensor", "fsdp")


def test_experts_are_computed_where_they_lie():
    """Of 4 experts on 4 devices each holds one; only tokens and their parts move along `expert`."""
    mesh = make_mesh(MeshConfig(fsdp=1, expert=4), jax.devices()[:4])
    config = shape("float32", True)
    params = transformer.abstract_params(config)
    params = jax.tree.map(
        lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place),
        params,
        rules.partition(params, mesh, say=lambda text: None),
    )
    ids = jax.ShapeDtypeStruct((8, 16), jnp.int32, sharding=rules.batch_sharding(mesh))
    hidden = step.rows_stay(transformer.policy_for(config), mesh).hidden
    text = jax.jit(hidden).lower(params, ids, ids, ids).compile().as_text()
    moved = {(c.kind, c.axes) for c in hlo.read(text, dict(mesh.shape)).collectives}
    assert ("reduce-scatter", "expert") in moved
    whole = f"f32[{config.num_experts},{config.expert_size},{config.hidden_size}]"
    assert whole not in text  # no device ever holds the matrices of all experts


def test_experts_that_do_not_divide_are_refused():
    mesh = make_mesh(MeshConfig(fsdp=1, expert=8))
    config = shape("float32", True)
    ids = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    hidden = step.rows_stay(transformer.policy_for(config), mesh).hidden
    with pytest.raises(ValueError, match="mesh.expert = 8 does not divide the 4 experts"):
        jax.eval_shape(hidden, transformer.abstract_params(config), ids, ids, ids)


def test_a_state_is_born_in_its_shards():
    """The program that draws parameters and moments returns no array whole that is to be split."""
    config, transform = shape("float32", True), optimizer.build_optimizer(
        optimizer.OptimizerConfig(), 10
    ).transform  # fmt: skip
    made, places = state.born_sharded(
        lambda key: transformer.init_params(config, key),
        jax.random.key(0),
        transform=transform,
        mesh=make_mesh(MeshConfig(expert=2, tensor=2)),
    )
    moments = [made.opt_state, made.params]
    for name in ("gate", "up", "down"):
        for tree in jax.tree.leaves(moments, is_leaf=lambda x: isinstance(x, dict)):
            if isinstance(tree, dict):
                weight = tree["layers"]["mlp"][name]["weight"]
                assert weight.addressable_shards[0].data.size == weight.size / 8
    assert jax.tree.map(lambda x: x.sharding, made) == places.state
