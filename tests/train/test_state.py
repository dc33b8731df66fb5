"""The train state: float32 masters, born where the rules say, moments beside their parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from grpo_jax.scale.mesh import MeshConfig, make_mesh
from grpo_jax.train import optimizer, state
from grpo_jax.train.optimizer import OptimizerConfig

RULES = (("table", ("tensor", "fsdp")), ("scale", None))


@pytest.fixture(scope="module")
def transform():
    return optimizer.build_optimizer(OptimizerConfig(no_decay=("scale",)), 10).transform


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))


def make_params(key):
    return {"table": jax.random.normal(key, (8, 4)), "scale": jnp.ones(4), "w": jnp.ones((3, 6))}


def test_masters_are_float32_and_the_callers_arrays_stay(transform):
    params = {"w": jnp.ones((2, 2), jnp.bfloat16), "scale": jnp.ones(3)}
    made = state.create(params, transform)
    assert made.params["w"].dtype == jnp.float32
    donated = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(made)
    assert made.params["scale"].is_deleted() and not params["scale"].is_deleted()
    np.testing.assert_array_equal(donated.params["scale"], 2.0)


def test_double_precision_is_kept(transform, x64):
    assert state.create({"scale": np.ones(2)}, transform).params["scale"].dtype == jnp.float64


def test_moments_live_beside_their_parameters(transform, mesh):
    params = make_params(jax.random.key(0))
    shapes = state.abstract(params, transform)
    places = state.placement(shapes, transform, mesh, RULES)
    made = state.create(params, transform, places)
    for name, spec in {"table": P("tensor", "fsdp"), "scale": P(), "w": P(None, "fsdp")}.items():
        arrays = [made.params[name]] + [
            optax.tree.get(made.opt_state, m)[name] for m in ("mu", "nu")
        ]
        for array in arrays:
            assert array.sharding.is_equivalent_to(
                jax.sharding.NamedSharding(mesh, spec), array.ndim
            ), name
            assert len(array.sharding.device_set) == 8  # not zeros on one device
    assert made.step.sharding.is_fully_replicated
    np.testing.assert_array_equal(made.params["table"], params["table"])


def test_a_state_is_born_sharded_and_equals_the_one_made_whole(transform, mesh):
    key = jax.random.key(1)
    made, places = state.born_sharded(
        make_params, key, transform=transform, mesh=mesh, partition_rules=RULES
    )
    whole = state.create(make_params(key), transform)
    jax.tree.map(np.testing.assert_array_equal, made, whole)
    assert made.params["table"].addressable_shards[0].data.shape == (4, 2)
    jax.tree.map(lambda x, place: np.testing.assert_(x.sharding == place), made, places.state)


def test_factored_moments_are_kept_whole(mesh):
    transform = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    shapes = state.abstract({"table": np.ones((8, 4), np.float32)}, transform)
    places = state.placement(shapes, transform, mesh, RULES)
    factors = optax.tree.get(places.state.opt_state, "v_row")["table"]
    assert factors.spec == P()
    state.create({"table": np.ones((8, 4), np.float32)}, transform, places)  # it can be made


def test_targets_join_shapes_and_places(transform, mesh):
    shapes = state.abstract(make_params(jax.random.key(0)), transform)
    places = state.placement(shapes, transform, mesh, RULES)
    target = state.targets(shapes, places).params["table"]
    assert (target.shape, target.dtype) == ((8, 4), jnp.float32)
    assert target.sharding == places.state.params["table"]


def test_updates_are_steps_less_skipped(transform):
    made = state.create({"scale": np.ones(1)}, transform)
    assert int(made.replace(step=jnp.int32(7), skipped=jnp.int32(2)).updates) == 5
