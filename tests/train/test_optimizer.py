"""AdamW, its schedule and its clip, against the equations written out in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax.train import optimizer
from grpo_jax.train.optimizer import OptimizerConfig


def rates(total, *at, **settings):
    schedule = optimizer.build_schedule(OptimizerConfig(**settings), total)
    return [float(schedule(jnp.int32(k))) for k in at]


def test_defaults_are_the_reference_recipe():
    config = OptimizerConfig()
    assert (config.lr, config.betas, config.eps) == (5e-6, (0.9, 0.999), 1e-8)
    assert (config.weight_decay, config.max_grad_norm) == (0.01, 1.0)


def test_reference_warm_up_is_a_tenth_to_one_over_fifty_updates():
    got = rates(500, 0, 25, 50, 400, lr=1.0, warmup_steps=50)
    np.testing.assert_allclose(got, [0.1, 0.55, 1.0, 1.0], rtol=1e-6)


def test_linear_and_cosine_follow_their_equations():
    at = [10, 35, 60, 110, 200]  # W = 10, N = 110
    x = np.minimum(1.0, (np.array(at) - 10) / 100)
    settings = {"lr": 2.0, "warmup_steps": 10, "end": 0.1}
    linear = rates(110, *at, schedule="linear", **settings)
    np.testing.assert_allclose(linear, 2 * (1 - 0.9 * x), rtol=1e-6)
    cosine = rates(110, *at, schedule="cosine", **settings)
    expected = 2 * (0.1 + 0.9 * (1 + np.cos(np.pi * x)) / 2)
    np.testing.assert_allclose(cosine, expected, rtol=2e-6)


def test_total_steps_overrides_the_run():
    assert rates(10, 50, lr=1.0, schedule="linear", total_steps=100) == [0.5]


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(ValueError, match="warm-up of 20 updates is longer than the schedule of 10"):
        rates(10, 0, warmup_steps=20)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr = -1.0 must be finite and not negative"),
        ({"lr": float("nan")}, "lr = nan must be finite"),
        ({"weight_decay": float("inf")}, "weight_decay = inf"),
        ({"warmup_steps": -1}, "warmup_steps = -1"),
        ({"warmup_fraction": 1.5}, "warmup_fraction = 1.5 is a fraction"),
        ({"end": -0.1}, "end = -0.1 is a fraction"),
        ({"betas": (0.9, 1.0)}, r"betas = \(0.9, 1.0\) must be two numbers"),
        ({"max_grad_norm": 0.0}, "max_grad_norm = 0.0 must be positive; null turns clipping off"),
        ({"warmup_steps": 3, "warmup_fraction": 0.1}, "keep one of the two"),
        ({"total_steps": 0}, "total_steps = 0 must be at least 1"),
        ({"no_decay": ("(",)}, "is no regular expression"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**settings)


def adamw_by_hand(p, gradients, *, lr, b1, b2, eps, decay, clip):
    """Three lines of AdamW with a global-norm clip over one array."""
    m = v = np.zeros_like(p)
    for k, g in enumerate(gradients, 1):
        g = g * min(1.0, clip / np.linalg.norm(g))
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        update = (m / (1 - b1**k)) / (np.sqrt(v / (1 - b2**k)) + eps)
        p = p - lr * (update + decay * p)
    return p


def test_updates_equal_adamw_written_out(x64):
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=7), rng.normal(size=(5, 7)) * [[0.1], [3], [1], [5], [0.2]]
    config = OptimizerConfig(lr=0.03, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    transform = optimizer.build_optimizer(config, 10).transform
    params, state = jnp.asarray(start), transform.init(jnp.asarray(start))
    for g in gradients:
        updates, state = transform.update(jnp.asarray(g), state, params)
        params = optax.apply_updates(params, updates)
    expected = adamw_by_hand(
        start, gradients, lr=0.03, b1=0.8, b2=0.95, eps=1e-6, decay=0.1, clip=1.0
    )
    np.testing.assert_allclose(params, expected, rtol=1e-12)  # float64 rounding over five updates


def test_the_clip_is_the_norm_over_all_parameters():
    config = OptimizerConfig(max_grad_norm=1.0)
    clip = optimizer.build_optimizer(config, 10).transform
    grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    _, state = clip.update(grads, clip.init(grads), grads)
    first_moment = optax.tree.get(state, "mu")
    np.testing.assert_allclose(first_moment["a"], [0.1 * 3 / 5], rtol=1e-6)
    np.testing.assert_allclose(first_moment["b"], [0.1 * 4 / 5], rtol=1e-6)
    free = optimizer.build_optimizer(OptimizerConfig(max_grad_norm=None), 10).transform
    _, state = free.update(grads, free.init(grads), grads)
    np.testing.assert_allclose(optax.tree.get(state, "mu")["b"], [0.4], rtol=1e-6)


def test_no_decay_leaves_the_named_parameters_alone():
    params = {
        "layers": {"norm": {"scale": jnp.ones((2, 3))}, "up": {"weight": jnp.ones((2, 3, 3))}}
    }
    config = OptimizerConfig(lr=0.1, weight_decay=0.5, no_decay=("norm", "bias|scale"))
    transform = optimizer.build_optimizer(config, 10).transform
    nothing = jax.tree.map(jnp.zeros_like, params)
    updates, _ = transform.update(nothing, transform.init(params), params)
    assert not updates["layers"]["norm"]["scale"].any()
    np.testing.assert_allclose(updates["layers"]["up"]["weight"], -0.05, rtol=1e-6)


def test_no_decay_that_matches_nothing_is_refused():
    params = {"w": jnp.ones(2)}
    config = OptimizerConfig(no_decay=("nrom",))
    transform = optimizer.build_optimizer(config, 10).transform
    with pytest.raises(
        ValueError, match="no_decay: 'nrom' matches no parameter; paths look like w"
    ):
        transform.update(params, transform.init(params), params)


def test_the_first_moment_may_be_bfloat16():
    transform = optimizer.build_optimizer(
        OptimizerConfig(first_moment_dtype="bfloat16"), 1
    ).transform
    state = transform.init({"w": jnp.ones(2)})
    assert optax.tree.get(state, "mu")["w"].dtype == jnp.bfloat16
    assert optax.tree.get(state, "nu")["w"].dtype == jnp.float32
