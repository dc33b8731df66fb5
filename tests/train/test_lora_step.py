"""The compiled steps over frozen weights: only the adapter moves, and nothing else is held."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax.core import masks
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.losses import LossConfig
from grpo_jax.models import lora, presets, transformer
from grpo_jax.models.lora import LoraConfig
from grpo_jax.scale import rules
from grpo_jax.scale.mesh import MeshConfig, make_mesh
from grpo_jax.train import optimizer, state, step
from grpo_jax.train.optimizer import OptimizerConfig
from tests.train.test_step import make_batch

SHAPE = presets.preset("tiny", num_layers=2, hidden_size=32, intermediate_size=64, vocab_size=260)
CONFIG = LoraConfig(rank=2, alpha=8.0)
POLICY = transformer.policy_for(SHAPE)
LOSS = LossConfig(reference_policy_kl_penalty=0.0, metrics_level="minimal")
OPTIMIZER = optimizer.build_optimizer(OptimizerConfig(lr=0.01), 10)


def make(places_for=None):
    base = transformer.init_params(SHAPE, jax.random.key(0))
    adapter = lora.init_adapter(base, CONFIG, jax.random.key(1))
    places = None
    if places_for is not None:
        base = jax.device_put(base, rules.partition(base, places_for, say=lambda _: None))
        shapes = state.abstract(adapter, OPTIMIZER.transform)
        places = state.placement(shapes, OPTIMIZER.transform, places_for, say=lambda _: None)
    made = state.create(adapter, OPTIMIZER.transform, places)
    return base, made, places


def train(base, made, places, chunk_size=None, steps=3):
    policy = lora.graft(POLICY, base, CONFIG.scale)
    run = step.make_train_step(
        policy, OPTIMIZER, LOSS, FilterConfig(), chunk_size=chunk_size, places=places
    )
    batch = make_batch(rows=8, width=12, vocabulary=260)
    rows = []
    for _ in range(steps):
        made, metrics = run(made, batch, masks.count(batch))
        rows.append({k: float(v) for k, v in metrics.items()})
    return run, made, rows, batch


def test_training_moves_the_adapter_and_leaves_the_base_to_others():
    base, made, _ = make()
    before = jax.tree.map(np.array, base)
    first = jax.tree.map(np.array, made.params)
    run, made, rows, batch = train(base, made, None)
    assert run.programs == 1 and all(row["update_applied"] == 1 for row in rows)
    for name in first:  # A follows once B has left 0
        assert np.any(first[name]["b"] != made.params[name]["b"]), name
        assert np.any(first[name]["a"] != made.params[name]["a"]), name
    jax.tree.map(np.testing.assert_array_equal, before, base)  # not given away, not touched
    score = step.make_score_step(lora.graft(POLICY, base, CONFIG.scale), FilterConfig())
    whole = step.make_score_step(POLICY, FilterConfig())
    merged = lora.merge(base, made.params, CONFIG.scale)
    # float32 sums in another order
    np.testing.assert_allclose(score(made.params, batch), whole(merged, batch), atol=2e-5)
    assert np.abs(score(made.params, batch) - whole(base, batch)).max() > 1e-3


def test_the_state_holds_the_adapter_and_its_moments_and_no_weight():
    base, made, _ = make()
    size = sum(x.size for x in jax.tree.leaves(made.params))
    held = sum(x.size for x in jax.tree.leaves(made) if x.ndim)
    assert held == 3 * size  # the adapter and its two moments
    assert size == sum(
        2 * (x.shape[1] + x.shape[2]) * CONFIG.rank for name, x in _linear(base).items()
    )


def _linear(base):
    paths = jax.tree_util.tree_leaves_with_path(base["layers"])
    return {rules.path_name(p): x for p, x in paths if x.ndim == 3}


@pytest.mark.parametrize("chunk_size", [None, 8])
def test_the_step_builds_no_gradient_of_a_frozen_matrix(chunk_size):
    """In the optimised program no product has the shape of a weight: head and layers are spared."""
    base, made, _ = make()
    batch = make_batch(rows=8, width=12, vocabulary=260)

    def products(policy, params):
        run = step.make_train_step(policy, OPTIMIZER, LOSS, FilterConfig(), chunk_size=chunk_size)
        made = state.create(params, OPTIMIZER.transform)
        text = run.lower(made, batch, masks.count(batch)).compile().as_text()
        weights = ("f32[260,32]", "f32[64,32]", "f32[32,64]", "f32[32,260]")
        lines = [line for line in text.splitlines() if " dot(" in line]
        assert lines
        return [line for line in lines if line.split("=")[1].strip().startswith(weights)]

    assert products(POLICY, base)  # the full step does build them
    assert products(lora.graft(POLICY, base, CONFIG.scale), made.params) == []


def test_a_sharded_adapter_trains_as_on_one_device():
    base, made, _ = make()
    _, alone, rows, _ = train(base, made, None, chunk_size=8, steps=2)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    base, made, places = make(mesh)
    a = made.params["layers.mlp.up.weight"]["a"]
    b = made.params["layers.mlp.down.weight"]["b"]
    assert tuple(a.sharding.spec) == (None, None, "fsdp")
    assert tuple(b.sharding.spec) == (None, "fsdp", None)
    _, spread, sharded, _ = train(base, made, places, chunk_size=8, steps=2)
    for ours, theirs in zip(sharded, rows, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    difference = optax.tree.sub(jax.device_get(spread.params), jax.device_get(alone.params))
    # Adam turns a rounded gradient near 0 into a step of up to lr; 2 steps of lr = 0.01
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(difference)) < 0.005
