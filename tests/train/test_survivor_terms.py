"""Survivors as denominator beside other terms: only the actor term is divided by them.

The whole loss and its gradient are written a second time in numpy, from the equations of
docs/maths.md, differentiated by central differences, and compared with what the train step
differentiates, however the batch is cut. float64; 1e-7 is the error of a central difference with
steps of 1e-5, and the 1e-8 that every denominator carries.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_layout import places_of
from test_step import PLAIN, bigram_policy, make_batch, make_optimizer, make_params

from grpo_jax import build
from grpo_jax.core import masks
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.scale.mesh import MeshConfig
from grpo_jax.train import state, step

TERMS = {
    "kl": {"reference_policy_kl_penalty": 0.3},
    "nll": {"positive_example_nll_weight": 0.2},
    "entropy": {"entropy_bonus": 0.1},
}
TERMS["all"] = TERMS["kl"] | TERMS["nll"] | TERMS["entropy"]
LOW, HIGH = 0.9, 1.15
GATED = dataclasses.replace(
    PLAIN,
    use_importance_sampling_correction=True,
    truncated_importance_sampling_type="seq-mask-tis",
    truncated_importance_sampling_ratio=HIGH,
    truncated_importance_sampling_ratio_min=LOW,
    truncated_is_normalization="survivors",
)


def batch_of(params, top_k):
    """Sampler and trainer agree on some rows, differ mildly or much on others."""
    batch, rng = make_batch(dtype=np.float64), np.random.default_rng(6)
    shape = batch.tokens.shape
    now = log_probs(params, batch, None)[0]
    gap = rng.permutation(np.repeat([0.02, 0.4], shape[0] // 2))[:, None] * rng.choice(
        [-1, 1], (shape[0], 1)
    )
    previous = now + rng.normal(0, 0.02, shape)
    if top_k:
        previous = np.where(np.isfinite(log_probs(params, batch, top_k)[0]), previous, -np.inf)
    return batch.replace(
        prev_logprobs=previous,
        generation_logprobs=now + gap + rng.normal(0, 0.01, shape),
        reference_logprobs=now + rng.normal(0, 0.2, shape),
        rewards=np.broadcast_to(rng.integers(0, 2, (shape[0], 1)), shape).astype(np.float64),
    )


def log_probs(params, batch, top_k):
    """Log-probability of each token, filtered and not, and entropy, nats; column 0 is unused."""
    hidden = np.tanh(params["embed"]["table"][batch.tokens] @ params["up"]["weight"].T)
    logits = (hidden @ params["head"]["weight"].T)[:, :-1]

    def picked(logits):
        probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            logs = np.log(probability)
        found = np.take_along_axis(logs, batch.tokens[:, 1:, None], -1)[..., 0]
        entropy = -(probability * np.where(probability > 0, logs, 0)).sum(-1)
        return (np.pad(x, ((0, 0), (1, 0))) for x in (found, entropy))

    whole, entropy = picked(logits)
    if not top_k:
        return whole, whole, entropy
    last_kept = np.sort(logits, -1)[..., -top_k, None]
    kept, entropy = picked(np.where(logits >= last_kept, logits, -np.inf))
    return kept, whole, entropy


def numpy_loss(params, batch, config, top_k, base):
    """The equations; `base` are the log-probabilities where gradients are stopped."""
    c, u, entropy = log_probs(params, batch, top_k)
    m = np.where(batch.token_mask, batch.sample_weights, 0)
    stopped, still = base[0], base[1]
    p = stopped if config.force_on_policy_ratio else batch.prev_logprobs
    on = (m > 0) & np.isfinite(stopped) & np.isfinite(p)
    log_v = np.where(on, p - batch.generation_logprobs, 0)
    c, stopped, p = (np.where(on, x, 0) for x in (c, stopped, p))
    mean = log_v.sum(1, keepdims=True) / np.maximum(on.sum(1, keepdims=True), 1)
    keep = (np.exp(mean) >= LOW) & (np.exp(mean) <= HIGH)
    n, k = m.sum(), (m * keep).sum()
    ratio = np.exp(c - stopped) if config.force_on_policy_ratio else np.exp(c - p)
    clipped = ratio if config.force_on_policy_ratio else np.clip(ratio, 0.8, 1.2)
    worst = np.maximum(-batch.advantages * ratio, -batch.advantages * clipped)
    loss = (worst * np.exp(log_v) * m * on * keep).sum() / k
    d = np.where(m > 0, batch.reference_logprobs - u, 0)
    weight = np.exp(np.where(m > 0, u - still, 0))
    kl = (weight * (np.exp(d) - 1 - d) * m).sum() / n
    positive = m * (batch.rewards > 0)
    nll = -(c * positive * on).sum() / positive.sum()
    bonus = (entropy * m * on).sum() / n
    loss += config.reference_policy_kl_penalty * kl + config.positive_example_nll_weight * nll
    return loss - config.entropy_bonus * bonus, k, n


def wanted_of(params, batch, config, top_k):
    """Loss, gradient by central differences, K and N."""
    base = log_probs(params, batch, top_k)
    loss, k, n = numpy_loss(params, batch, config, top_k, base)
    grads = jax.tree.map(np.zeros_like, params)
    for group, name in (("embed", "table"), ("up", "weight"), ("head", "weight")):
        values, gradient = params[group][name], grads[group][name]
        for index in np.ndindex(values.shape):
            start, sides = values[index], []
            for shift in (1e-5, -1e-5):
                values[index] = start + shift
                sides.append(numpy_loss(params, batch, config, top_k, base)[0])
            values[index] = start
            gradient[index] = (sides[0] - sides[1]) / 2e-5
    return loss, grads, k, n


CUTS = {
    "whole": {},
    "micro_batches": {"micro_batches": 4},
    "chunks": {"micro_batches": 2, "chunk_size": 2},
    "devices": {"micro_batches": 2, "mesh": MeshConfig(data=2, fsdp=2, tensor=2)},
}


CASES = [
    ("previous", "kl", ["micro_batches"]),
    ("previous", "nll", ["micro_batches"]),
    ("previous", "entropy", ["micro_batches"]),
    ("previous", "all", ["whole", "chunks", "devices"]),
    ("on_policy", "all", ["micro_batches", "devices"]),
    ("filters", "kl", ["chunks", "devices"]),
    ("filters", "nll", ["micro_batches"]),
]


@pytest.mark.parametrize(("how", "terms", "cuts"), CASES)
def test_only_the_actor_term_is_divided_by_the_survivors(x64, how, terms, cuts):
    top_k = 10 if how == "filters" else None
    forced = {"force_on_policy_ratio": True} if how == "on_policy" else {}
    config = dataclasses.replace(GATED, **TERMS[terms], **forced)
    params = make_params()
    batch = batch_of(params, top_k)
    loss, grads, k, n = wanted_of(params, batch, config, top_k)
    assert 0.2 < k / n < 0.8
    filter_config = FilterConfig(top_k=top_k) if top_k else FilterConfig()
    for cut in (CUTS[name] for name in cuts):
        options = cut | {"places": places_of(params, cut.get("mesh"))}
        options.pop("mesh", None)
        gradient = step.make_gradient_step(bigram_policy(), config, filter_config, **options)
        found = gradient(jax.tree.map(jnp.asarray, params), batch, masks.count(batch))
        np.testing.assert_allclose(found[0], loss, rtol=1e-7)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-8), found[1], grads
        )
        assert found[2]["gradient_scale"] == found[2]["effective_gradient_scale"] == 1
        np.testing.assert_allclose(found[2]["survivor_tokens"], k, rtol=1e-12)


@pytest.mark.parametrize("forced", [False, True])
def test_without_a_survivor_the_update_is_skipped_and_counted(forced):
    params = make_params()
    batch = batch_of(params, None)
    batch = batch.replace(generation_logprobs=batch.generation_logprobs - 2.0)
    config = dataclasses.replace(GATED, **TERMS["all"], force_on_policy_ratio=forced)
    opt = make_optimizer()
    train = step.make_train_step(bigram_policy(), opt, config, FilterConfig(), micro_batches=2)
    before = state.create(params, opt.transform)
    copy = jax.device_get(before.params)
    after, metrics = train(before, batch, masks.count(batch))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after.params), copy)
    assert metrics["skipped_empty"] == 1 and int(after.skipped) == 1
    assert metrics["gradient_scale"] == metrics["effective_gradient_scale"] == 0


def test_the_batch_mode_reports_what_the_filter_did_to_the_step(x64):
    params = make_params()
    batch = batch_of(params, None)
    config = dataclasses.replace(GATED, truncated_is_normalization="batch")
    counts = masks.count(batch)
    gradient = step.make_gradient_step(bigram_policy(), config, FilterConfig(), micro_batches=4)
    metrics = gradient(jax.tree.map(jnp.asarray, params), batch, counts)[2]
    _, k, n = numpy_loss(params, batch, config, None, log_probs(params, batch, None))
    np.testing.assert_allclose(metrics["effective_gradient_scale"], k / n, rtol=1e-12)
    np.testing.assert_allclose(metrics["is_oob_token_ratio"], 1 - k / n, rtol=1e-6)
    assert metrics["gradient_scale"] == 1


def test_one_update_a_rollout_goes_on_policy_with_survivors_too():
    config = dataclasses.replace(GATED, **TERMS["kl"])
    assert build.on_policy(config, 1).force_on_policy_ratio
    assert not build.on_policy(config, 2).force_on_policy_ratio
