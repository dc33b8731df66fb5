"""Objectives per token, against numbers worked out in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.core import losses, surrogates
from grpo_jax.core.batch import Batch, Counts, TokenScores
from grpo_jax.core.loss_config import LossConfig

pytestmark = pytest.mark.usefixtures("x64")


def row_mean(x):
    return jnp.broadcast_to(jnp.mean(x, axis=1, keepdims=True), x.shape)


def losses_of(log_ratio, advantages, config, logprobs=None):
    """Loss per token and its derivative with respect to log p, for one row of tokens."""
    log_ratio = jnp.asarray(log_ratio, jnp.float64)[None]
    advantages = jnp.asarray(advantages, jnp.float64)[None]
    start = jnp.zeros_like(log_ratio) if logprobs is None else jnp.asarray(logprobs)[None]
    function = surrogates.SURROGATES[config.surrogate]

    def terms(logprobs):
        shifted = log_ratio + logprobs - start
        return function(surrogates.View(shifted, logprobs, advantages, row_mean), config)

    grads = jax.grad(lambda c: jnp.sum(terms(c).loss))(start)
    return terms(start), np.asarray(terms(start).loss[0]), np.asarray(grads[0])


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_bounds_belong_to_the_inside(advantage):
    """On a clip bound torch's derivative is 1, so the token keeps its gradient."""
    config = LossConfig(ratio_clip_min=0.5, ratio_clip_max=1.0)
    ratio = np.array([0.5, 2.0])
    _, loss, grad = losses_of(np.log(ratio), [advantage] * 2, config)
    np.testing.assert_allclose(loss, -advantage * ratio, rtol=1e-12)
    np.testing.assert_allclose(grad, -advantage * ratio, rtol=1e-12)


def test_an_exact_tie_with_the_dual_clip_gives_half_as_in_torch():
    _, loss, grad = losses_of([np.log(2.0)], [-1.0], LossConfig(ratio_clip_c=2.0))
    np.testing.assert_allclose(loss, [2.0])
    assert grad[0] in (1.0, 2.0, 0.0)  # e^log 2 may round to either side
    config = LossConfig(ratio_clip_c=2.0)
    half = jax.grad(lambda x: surrogates._dual_clip(x, jnp.asarray(-1.0), config))(jnp.asarray(2.0))
    assert half == 0.5


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("objective", ["ppo", "cispo", "sapo", "gmpo"])
@pytest.mark.parametrize("gap", [50.0, 800.0, 1e30])
def test_an_overflowing_ratio_has_a_finite_loss_and_gradient(advantage, objective, gap):
    config = {
        "ppo": LossConfig(),
        "cispo": LossConfig(use_cispo=True),
        "sapo": LossConfig(objective="sapo"),
        "gmpo": LossConfig(objective="gmpo", token_level_loss=False),
    }[objective]
    _, loss, grad = losses_of([gap, 0.1], [advantage] * 2, config, logprobs=[-1.0, -2.0])
    assert np.isfinite(loss).all() and np.isfinite(grad).all()
    if objective == "ppo":
        wanted = -1.2 if advantage > 0 else np.exp(20.0)
        np.testing.assert_allclose(loss[0], wanted, rtol=1e-12)
        assert grad[0] == 0.0


def test_gmpo_s_capped_ratio_times_a_large_weight_is_finite():
    """e^20, an importance weight of e^73, float32: the random draw that found it was seed 4."""
    row = lambda *x: jnp.asarray([x], jnp.float32)  # noqa: E731
    batch = Batch(
        tokens=jnp.zeros((1, 3), jnp.int32),
        segment_ids=jnp.ones((1, 3), jnp.int32),
        positions=jnp.zeros((1, 3), jnp.int32),
        token_mask=jnp.asarray([[False, True, True]]),
        sample_weights=row(1, 1, 1),
        advantages=row(-2, -2, -2),
        generation_logprobs=row(0, -373, -300),
        prev_logprobs=row(0, -300, -300),
    )
    config = LossConfig(
        objective="gmpo",
        token_level_loss=False,
        use_importance_sampling_correction=True,
        reference_policy_kl_penalty=0.0,
    )

    def loss(current):
        counts = Counts(jnp.float32(2), jnp.float32(1))
        return losses.clipped_pg_loss(TokenScores(current), batch, counts, config)[0]

    value, grad = jax.value_and_grad(loss)(row(0, -1, -1))
    limit = float(np.finfo(np.float32).max) ** 0.75  # half a response: one of its two tokens
    np.testing.assert_allclose(value, limit / 2, rtol=1e-4)
    assert np.isfinite(grad).all()


def test_infinite_and_nan_ratios_stay_visible():
    terms, loss, _ = losses_of([np.inf, np.nan], [-1.0, -1.0], LossConfig())
    assert np.isinf(loss[0]) and np.isnan(loss[1]) and np.isinf(terms.ratio[0, 0])


def test_sapo_is_the_paper_s_gate():
    """f(ρ) = (4/τ) σ(τ(ρ − 1)); df/dlog ρ = 4 σ(1 − σ) ρ, so 1 at ρ = 1."""
    ratio, advantages = np.array([0.6, 1.0, 1.7, 1.0]), np.array([1.0, 2.0, -0.5, -1.0])
    tau = np.where(advantages > 0, 1.0, 1.05)
    sigma = 1 / (1 + np.exp(-tau * (ratio - 1)))
    _, loss, grad = losses_of(np.log(ratio), advantages, LossConfig(objective="sapo"))
    np.testing.assert_allclose(loss, -advantages * 4 / tau * sigma, rtol=1e-12)
    np.testing.assert_allclose(grad, -advantages * 4 * sigma * (1 - sigma) * ratio, rtol=1e-12)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_gmpo_is_the_geometric_mean_of_one_sided_clips(advantage):
    config = LossConfig(
        objective="gmpo", token_level_loss=False, ratio_clip_min=0.3, ratio_clip_max=0.4
    )
    log_ratio = np.array([0.1, 0.9, -0.8, -0.05])
    if advantage > 0:
        clipped, passes = np.minimum(log_ratio, np.log(1.4)), log_ratio <= np.log(1.4)
    else:
        clipped, passes = np.maximum(log_ratio, np.log(0.7)), log_ratio >= np.log(0.7)
    geometric = np.exp(clipped.mean())
    terms, loss, grad = losses_of(log_ratio, [advantage] * 4, config)
    np.testing.assert_allclose(loss, -advantage * geometric, rtol=1e-12)
    # Four tokens carry the same loss; a quarter of each token's log-ratio is in the mean.
    np.testing.assert_allclose(grad, -advantage * geometric * passes, rtol=1e-12)
    np.testing.assert_allclose(terms.ratio[0], np.exp(log_ratio.mean()), rtol=1e-12)


def test_a_zero_advantage_gives_nothing():
    for config in (LossConfig(), LossConfig(use_cispo=True), LossConfig(objective="sapo")):
        _, loss, grad = losses_of([0.5, -0.5], [0.0, 0.0], config, logprobs=[-1.0, -1.0])
        assert not loss.any() and not grad.any()
