"""The critic: whose state a value speaks of, how a batch is cut, and what an update may change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.core import masks
from grpo_jax.core.value_loss import ValueLossConfig
from grpo_jax.data.packing import PackingConfig, pack_batch, unpack
from grpo_jax.scale.mesh import MeshConfig, make_mesh
from grpo_jax.train import critic, state
from tests.train.test_step import D, assert_same, bigram_policy, make_optimizer
from tests.train.test_step import make_batch as make_policy_batch
from tests.train.test_step import make_params as make_trunk

CLIPPED = ValueLossConfig(scale=0.5, cliprange=0.1)
MESH = MeshConfig(data=2, fsdp=2, tensor=2)


def make_params(seed=0):
    """A critic whose head says something."""
    params = critic.init_params(make_trunk(seed), D)
    head = {"kernel": np.random.default_rng(9).normal(size=D), "bias": np.float64(0.25)}
    return params | {"value_head": head}


def make_batch(rows=16, dtype=np.float32):
    batch = make_policy_batch(rows=rows, dtype=dtype)
    noise = np.random.default_rng(5).normal(size=(2, *batch.tokens.shape)).astype(dtype)
    return batch.replace(values=noise[0], returns=noise[1])


@functools.cache
def compiled(config=CLIPPED, micro_batches=1, mesh=None):
    """The step, the value step, and what makes a first state; compiled once a test run."""
    opt, places = make_optimizer(), None
    if mesh is not None:
        shapes = state.abstract(make_params(), opt.transform)
        places = state.placement(shapes, opt.transform, make_mesh(mesh), say=lambda text: None)
    how = dict(micro_batches=micro_batches, places=places)
    train = critic.make_critic_step(bigram_policy(), opt, config, **how)
    score = critic.make_value_step(bigram_policy(), **how)
    return train, score, lambda params: state.create(params, opt.transform, places)


def run(batch, steps=3, **how):
    train, score, create = compiled(**how)
    now, history = create(make_params()), []
    first = score(now.params, batch)
    for _ in range(steps):
        now, metrics = train(now, batch, masks.count(batch))
        history.append(metrics)
    return jax.device_get((now, history, first))


def test_a_value_speaks_of_the_state_before_its_token():
    """V_t = w · h_{t−1} + b at trained tokens, 0 elsewhere, as the reference shifts its head."""
    batch, params = make_batch(), make_params()
    hidden = bigram_policy().hidden(params["trunk"], batch.tokens, None, None)
    head = params["value_head"]
    expected = np.zeros(batch.tokens.shape)
    expected[:, 1:] = hidden[:, :-1] @ head["kernel"] + head["bias"]
    values = critic.values(bigram_policy(), params, batch)
    np.testing.assert_allclose(values, np.where(batch.token_mask, expected, 0), atol=1e-5)


def test_a_new_critic_says_zero():
    params = critic.init_params(make_trunk(), D)
    assert np.all(critic.values(bigram_policy(), params, make_batch()) == 0)


def test_packed_rows_have_the_values_of_rows_alone():
    batch, params = make_batch(), make_params()
    packed, placement = pack_batch(batch, PackingConfig(row_length=16))
    assert packed.tokens.shape[0] < batch.tokens.shape[0]
    values = unpack(critic.values(bigram_policy(), params, packed), placement, 6)
    alone = critic.values(bigram_policy(), params, batch)
    np.testing.assert_allclose(values, alone, atol=1e-6)


def test_micro_batches_and_a_mesh_change_nothing_in_double_precision(x64):
    batch = make_batch(dtype=np.float64)
    whole = run(batch)
    assert_same(whole, run(batch, micro_batches=4), 1e-10)
    assert_same(whole, run(batch, micro_batches=2, mesh=MESH), 1e-10)


def test_the_loss_falls_to_the_noise_of_the_returns():
    """Twelve tokens, a table of their values: 60 updates reach what least squares leaves."""
    batch = make_batch()
    weights = np.where(batch.token_mask, batch.sample_weights, 0)
    keep = weights != 0
    before = np.roll(batch.tokens, 1, axis=1)[keep]
    onehot = np.eye(12)[before] * np.sqrt(weights[keep])[:, None]
    target = batch.returns[keep] * np.sqrt(weights[keep])
    residual = target - onehot @ np.linalg.lstsq(onehot, target, rcond=None)[0]
    floor = 0.5 * (residual**2).sum() / weights.sum()
    history = run(batch, steps=60, config=ValueLossConfig())[1]
    assert history[0]["loss"] > 1.9 * floor
    assert floor - 1e-4 < history[-1]["loss"] < 1.2 * floor


@pytest.mark.parametrize("fault", [np.nan, np.inf])
def test_a_non_finite_update_changes_nothing_but_the_counters(fault):
    train, _, create = compiled()
    batch = make_batch()
    returns = np.where(batch.token_mask & (batch.sample_weights > 0), fault, 0)
    before = create(make_params())
    kept = jax.device_get(before)
    after, metrics = train(
        before, batch.replace(returns=returns.astype(np.float32)), masks.count(batch)
    )
    assert metrics["skipped_nonfinite"] == 1 and metrics["update_applied"] == 0
    assert after.skipped == 1 and after.step == 1
    jax.tree.map(np.testing.assert_array_equal, kept.params, jax.device_get(after.params))
    jax.tree.map(np.testing.assert_array_equal, kept.opt_state, jax.device_get(after.opt_state))


def test_an_empty_batch_is_skipped():
    train, _, create = compiled()
    batch = make_batch().replace(sample_weights=jnp.zeros((16, 6)))
    after, metrics = train(create(make_params()), batch, masks.count(batch))
    assert metrics["skipped_empty"] == 1 and after.skipped == 1


def test_hidden_states_that_nobody_reads_may_hold_anything():
    """NaN on padding and on prompts reaches neither values nor gradient."""
    batch, params = make_batch(), make_params()
    read = np.pad(batch.token_mask[:, 1:], ((0, 0), (0, 1)))  # a state is read by the next token
    poison = jnp.where(read, 0.0, jnp.nan)[..., None]
    plain = bigram_policy()
    dirty = plain._replace(hidden=lambda *a: plain.hidden(*a) + poison)

    def total(head, policy):
        return jnp.sum(critic.values(policy, params | {"value_head": head}, batch) ** 2)

    clean, poisoned = (jax.value_and_grad(total)(params["value_head"], p) for p in (plain, dirty))
    jax.tree.map(np.testing.assert_array_equal, clean, poisoned)


def test_settings_that_cannot_be_meant_are_refused():
    with pytest.raises(ValueError, match="warmup_steps = -1 must be at least 0"):
        critic.CriticConfig(warmup_steps=-1)
