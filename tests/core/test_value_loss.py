"""The critic's loss: the reference's numbers, sums over parts, nothing from outside the mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.core import masks
from grpo_jax.core.batch import Batch
from grpo_jax.core.value_loss import ValueLossConfig, value_loss

B, T = 6, 5


def make_batch(seed=0, dtype=np.float64) -> Batch:
    """Rows with fractional weights, one row without any, and old values near and far."""
    rng = np.random.default_rng(seed)
    inside = np.arange(T)[None] < rng.integers(3, T + 1, (B, 1))
    weights = np.array([1.0, 0.5, 0.0, 1.0, 0.25, 1.0])[:, None] * inside
    noise = rng.normal(size=(3, B, T)).astype(dtype)
    return Batch(
        tokens=np.ones((B, T), np.int32),
        segment_ids=inside.astype(np.int32),
        positions=np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)),
        token_mask=inside & (np.arange(T) >= 2),
        sample_weights=weights.astype(dtype),
        advantages=noise[0],
        generation_logprobs=noise[0],
        values=noise[1],
        returns=noise[2],
    )


def expected(v, batch, config):
    """The formula, in numpy: loss, gradient, and the share that the clip took."""
    m = np.where(batch.token_mask, batch.sample_weights, 0)
    r, old, reach = batch.returns, batch.values, config.cliprange
    clipped = v if not reach else np.clip(v, old - reach, old + reach)
    over = (clipped - r) ** 2 > (v - r) ** 2
    error = np.maximum((v - r) ** 2, (clipped - r) ** 2)
    factor = config.scale / m.sum()
    gradient = factor * m * np.where(over, 0, v - r)
    return 0.5 * factor * (m * error).sum(), gradient, (m * over).sum() / m.sum()


@pytest.mark.parametrize(
    "config",
    [ValueLossConfig(), ValueLossConfig(scale=0.4, cliprange=0.2), ValueLossConfig(cliprange=0.0)],
    ids=["plain", "ppo_recipe", "zero_is_off"],
)
def test_loss_gradient_and_clip_fraction_in_double_precision(config, x64):
    batch = make_batch()
    v = np.random.default_rng(1).normal(size=(B, T))
    run = jax.value_and_grad(value_loss, has_aux=True)
    (loss, metrics), gradient = run(v, batch, masks.count(batch), config)
    loss_, gradient_, fraction_ = expected(v, batch, config)
    # the denominator is a float32 count plus 1e-8
    np.testing.assert_allclose(loss, loss_, rtol=1e-7)
    np.testing.assert_allclose(gradient, gradient_, rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(metrics["vf_clipfrac"], fraction_, rtol=1e-7)
    assert not config.cliprange or 0.1 < fraction_ < 0.9


@pytest.mark.torch
def test_ties_and_bounds_have_torchs_gradient():
    """Where clipped and plain agree, and exactly on the bound, torch gives the plain gradient."""
    torch = pytest.importorskip("torch")
    batch = make_batch(dtype=np.float32).replace(
        values=np.zeros((B, T), np.float32), returns=np.ones((B, T), np.float32)
    )
    v = np.resize(np.array([0.0, 0.25, -0.25, 0.5, -0.5, 2.5, 0.2499], np.float32), (B, T))
    config, counts = ValueLossConfig(cliprange=0.25), masks.count(batch)
    ours = jax.grad(lambda v: value_loss(v, batch, counts, config)[0])(v)
    x = torch.tensor(v, requires_grad=True)
    m = torch.tensor(np.where(batch.token_mask, batch.sample_weights, 0).astype(np.float32))
    error = torch.max((x - 1) ** 2, (torch.clamp(x, -0.25, 0.25) - 1) ** 2)
    (0.5 * (m * error).sum() / m.sum()).backward()
    np.testing.assert_allclose(ours, x.grad.numpy(), rtol=1e-6)


def test_parts_of_a_batch_add_up():
    batch, config = make_batch(dtype=np.float32), ValueLossConfig(cliprange=0.2)
    v = np.random.default_rng(1).normal(size=(B, T)).astype(np.float32)
    counts = masks.count(batch)
    whole, metrics = value_loss(v, batch, counts, config)
    parts = [
        value_loss(v[i : i + 2], jax.tree.map(lambda x, i=i: x[i : i + 2], batch), counts, config)
        for i in (0, 2, 4)
    ]
    np.testing.assert_allclose(sum(p[0] for p in parts), whole, rtol=1e-6)
    total = sum(p[1]["vf_clipfrac"] for p in parts)
    np.testing.assert_allclose(total, metrics["vf_clipfrac"], rtol=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -1e30])
def test_what_stands_outside_the_mask_changes_no_bit(poison):
    batch, config = make_batch(dtype=np.float32), ValueLossConfig(cliprange=0.2)
    v = np.random.default_rng(1).normal(size=(B, T)).astype(np.float32)
    outside = ~batch.token_mask | (batch.sample_weights == 0)
    run = functools.partial(jax.value_and_grad(value_loss, has_aux=True), config=config)
    clean = run(v, batch, masks.count(batch))
    dirty = batch.replace(
        values=np.where(outside, poison, batch.values).astype(np.float32),
        returns=np.where(outside, poison, batch.returns).astype(np.float32),
    )
    poisoned = run(np.where(outside, poison, v).astype(np.float32), dirty, masks.count(batch))
    jax.tree.map(np.testing.assert_array_equal, clean, poisoned)


def test_a_fault_inside_the_mask_stays_visible():
    batch = make_batch(dtype=np.float32)
    v = np.where(batch.token_mask, np.nan, 0).astype(np.float32)
    loss, _ = value_loss(v, batch, masks.count(batch), ValueLossConfig(cliprange=0.2))
    assert np.isnan(loss)


def test_an_empty_batch_has_loss_and_gradient_zero():
    batch = make_batch(dtype=np.float32)
    batch = batch.replace(sample_weights=jnp.zeros((B, T)))
    run = jax.value_and_grad(value_loss, has_aux=True)
    (loss, _), gradient = run(jnp.ones((B, T)), batch, masks.count(batch), ValueLossConfig())
    assert loss == 0 and np.all(gradient == 0)


def test_missing_inputs_and_wrong_settings_are_named():
    batch = make_batch(dtype=np.float32)
    v, counts = np.zeros((B, T), np.float32), masks.count(batch)
    with pytest.raises(ValueError, match="needs batch.returns"):
        value_loss(v, batch.replace(returns=None), counts, ValueLossConfig())
    with pytest.raises(ValueError, match="batch.values for its clip"):
        value_loss(v, batch.replace(values=None), counts, ValueLossConfig(cliprange=0.2))
    value_loss(v, batch.replace(values=None), counts, ValueLossConfig())
    for wrong in (dict(cliprange=-0.1), dict(scale=float("nan"))):
        with pytest.raises(ValueError, match="must be finite and not negative"):
            ValueLossConfig(**wrong)
