"""Faults reported in public post-training libraries, as tests; each names its report."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_cases import evaluate_small as evaluate

from grpo_jax.core import corrections, kl, masks, reductions, surrogates
from grpo_jax.core.batch import Batch, Counts, TokenScores
from grpo_jax.core.loss_config import LossConfig

pytestmark = pytest.mark.usefixtures("x64")

OFF = {"reference_policy_kl_penalty": 0.0}
REINFORCE = OFF | {"disable_ppo_ratio": True}


def batch_of(token_losses, mask, segment_ids=None):
    """Log-probabilities and advantages −1 such that REINFORCE's token losses are the given ones."""
    mask = np.asarray(mask, bool)
    values = jnp.asarray(token_losses, jnp.float64)
    ids = np.ones(mask.shape, np.int32) if segment_ids is None else np.asarray(segment_ids)
    batch = Batch(
        tokens=jnp.zeros(mask.shape, jnp.int32),
        segment_ids=jnp.asarray(ids, jnp.int32),
        positions=jnp.zeros(mask.shape, jnp.int32),
        token_mask=jnp.asarray(mask),
        sample_weights=jnp.ones(mask.shape),
        advantages=-jnp.ones(mask.shape),
        generation_logprobs=values,
        prev_logprobs=values,
    )
    return TokenScores(values), batch


A02_MASK = [[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
A02_LOSSES = [[2, 4, 9, 9], [1, 1, 1, 1], [5, 5, 5, 5]]


@pytest.mark.parametrize("cuts", [[(0, 10)], [(0, 2), (2, 10)], [(0, 5), (5, 10)]])
def test_a01_the_loss_does_not_depend_on_the_cut(cuts):
    """trl#2647, tunix#1744, mlx-lm#1413, maxtext#3040."""
    scores, batch = batch_of([[1.0]] * 2 + [[3.0]] * 8, [[1]] * 10)
    counts, config = masks.count(batch), LossConfig(**REINFORCE)
    total, grads = 0.0, []
    for start, stop in cuts:
        part = jax.tree.map(lambda x, a=start, b=stop: x[a:b], (scores, batch))
        loss, grad, _ = evaluate(*part, config, counts)
        total, grads = total + loss, [*grads, *np.ravel(grad.logprobs)]
    np.testing.assert_allclose(total, 2.6, rtol=1e-7)
    np.testing.assert_allclose(grads, [0.1] * 10, rtol=1e-7)


def test_a02_fully_masked_rows_do_not_count():
    """verl#5417."""
    scores, batch = batch_of(A02_LOSSES, A02_MASK)
    for options, wanted in (
        ({}, 10 / 6),
        ({"token_level_loss": False}, 2.0),
        ({"token_level_loss": False, "loss_normalizer": 1.0}, 5.0),
    ):
        loss, _, _ = evaluate(scores, batch, LossConfig(**REINFORCE, **options))
        np.testing.assert_allclose(loss, wanted, rtol=1e-7)
    empty = batch.replace(token_mask=jnp.zeros((3, 4), bool))
    for options in ({}, {"token_level_loss": False}):
        loss, grads, metrics = evaluate(scores, empty, LossConfig(**REINFORCE, **options))
        assert loss == 0 and not grads.logprobs.any()
        assert not any(np.isnan(value) for value in metrics.values())


def test_a03_tool_tokens_are_not_in_the_denominator():
    """slime#365."""
    scores, batch = batch_of([[2, 7, 7, 2]], [[1, 0, 0, 1]])
    for options in ({}, {"token_level_loss": False}):
        loss, _, _ = evaluate(scores, batch, LossConfig(**REINFORCE, **options))
        np.testing.assert_allclose(loss, 2.0, rtol=1e-7)


def test_a04_dr_grpo_has_a_constant_of_its_own():
    """trl#2881, #3256, #3138; understand-r1-zero#10, #11: never the padded width."""
    config = LossConfig(token_level_loss=False, loss_normalizer=4.0, **REINFORCE)
    scores, batch = batch_of(A02_LOSSES, A02_MASK)
    np.testing.assert_allclose(evaluate(scores, batch, config)[0], 1.25, rtol=1e-7)
    three = masks.count(batch)._replace(sequences=jnp.asarray(3.0))
    np.testing.assert_allclose(evaluate(scores, batch, config, three)[0], 10 / 12, rtol=1e-7)
    wide = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 2))), (scores, batch))
    np.testing.assert_allclose(evaluate(*wide, config)[0], 1.25, rtol=1e-7)


@pytest.mark.parametrize(
    ("ratio", "positive", "negative", "dual"),
    [
        (0.5, -0.5, 0.8, 0.8),
        (1.0, -1, 1, 1),
        (1.1, -1.1, 1.1, 1.1),
        (1.5, -1.28, 1.5, 1.5),
        (2.0, -1.28, 2.0, 2.0),
        (5.0, -1.28, 5.0, 3.0),
    ],
)
def test_a05_the_dual_clip_reaches_the_loss(ratio, positive, negative, dual):
    """slime#2247."""

    def loss(log_ratio, advantage, c):
        config = LossConfig(ratio_clip_min=0.2, ratio_clip_max=0.28, ratio_clip_c=c)
        one = lambda x: jnp.reshape(x, (1, 1))  # noqa: E731
        view = surrogates.View(
            one(log_ratio), one(log_ratio), one(jnp.asarray(advantage)), lambda x: x
        )
        return surrogates.ppo(view, config).loss[0, 0]

    at = jnp.log(jnp.asarray(ratio))
    np.testing.assert_allclose(loss(at, 1.0, None), positive, rtol=1e-6)
    np.testing.assert_allclose(loss(at, -1.0, None), negative, rtol=1e-6)
    np.testing.assert_allclose(loss(at, -1.0, 3.0), dual, rtol=1e-6)
    if ratio == 5.0:
        assert jax.grad(loss)(at, -1.0, 3.0) == 0


@pytest.mark.parametrize("c", [1.0, 0.5])
def test_a05_a_dual_clip_of_one_or_less_is_refused(c):
    """slime#2247."""
    with pytest.raises(ValueError, match=f"ratio_clip_c={c} must be above 1.0"):
        LossConfig(ratio_clip_c=c)


@pytest.mark.parametrize(
    ("ratio", "weight"), [(0.5 / 0.45, 0.5 / 0.45), (2.0, 1.28)], ids=["inside", "clipped"]
)
def test_a06_no_gradient_through_an_importance_weight(ratio, weight):
    """verl#4105."""
    config = LossConfig(use_cispo=True, ratio_clip_max=0.28, **OFF)
    scores, batch = batch_of([[np.log(0.5)]], [[1]])
    batch = batch.replace(
        advantages=jnp.ones((1, 1)), prev_logprobs=scores.logprobs - np.log(ratio)
    )
    loss, grads, _ = evaluate(scores, batch, config)
    np.testing.assert_allclose(grads.logprobs, [[-weight]], rtol=1e-6)
    np.testing.assert_allclose(loss, weight * np.log(2.0), rtol=1e-6)


def test_a09_with_the_sampler_s_support_the_ratio_is_one():
    """trl#6789, #7269; prime-rl#2601, #3235; NeMo-RL#2053."""
    kept = jnp.asarray([True, True, False, False])

    def logprob(logits):
        return logits[1] - jax.nn.logsumexp(jnp.where(kept, logits, -1e30))

    logits = jnp.asarray([2.0, 1.0, 0.0, -1.0])
    np.testing.assert_allclose(logprob(logits), -1.3132617, rtol=1e-6)
    scores, batch = batch_of([[-1.3132617]], [[1]])
    batch = batch.replace(advantages=jnp.ones((1, 1)))

    def loss(logits):
        found = TokenScores(logprob(logits)[None, None])
        return evaluate(found, batch, LossConfig(**OFF), filtering_on=True)[0]

    np.testing.assert_allclose(loss(logits), -1.0, rtol=1e-6)
    np.testing.assert_allclose(
        jax.grad(loss)(logits), [0.7310586, -0.7310586, 0, 0], rtol=1e-6, atol=1e-12
    )


def test_a10_a_sequence_gate_leaves_token_weights_alone():
    """trl#4530, training#895."""
    prev = jnp.asarray([[-1, -2, -0.5], [-1, -1, 0.0]])
    gen = jnp.asarray([[-1.001, -2, -0.499], [-1.5, -0.8, 0.0]])
    mask = jnp.asarray([[1, 1, 1], [1, 1, 0.0]])
    actor = masks.ActorMasks(mask, jnp.ones((2, 1)), mask)
    rows = reductions.Sequences(jnp.ones((2, 3), jnp.int32), 1)

    def weights(kind, low, high):
        config = LossConfig(
            use_importance_sampling_correction=True,
            truncated_importance_sampling_type=kind,
            truncated_importance_sampling_ratio_min=low,
            truncated_importance_sampling_ratio=high,
        )
        return corrections.importance_weights(prev, gen, actor, rows, config)

    gated = weights("seq-mask-tis", 0.999, 1.002)
    raw = [[1.0010005, 1, 0.9990005], [1.6487213, 0.8187308, 1]]
    np.testing.assert_allclose(gated.raw, raw, rtol=1e-6)
    np.testing.assert_allclose(np.exp(gated.log_geometric[:, 0]), [1.0, 1.1618342], rtol=1e-6)
    np.testing.assert_array_equal(gated.keep_sequences[:, 0], [True, False])
    np.testing.assert_allclose(gated.weights, [raw[0], [0, 0, 0]], rtol=1e-6)
    np.testing.assert_allclose(weights("tis", None, 1.2).weights[1], [1.2, 0.8187308, 1], rtol=1e-6)
    np.testing.assert_allclose(weights("icepop", 0.9, 1.2).weights[1], [0, 0, 1], rtol=1e-6)
    # The product gate sees 1 and 1.3498588.
    assert weights("product-rs", 1.3498, 1.3499).keep_sequences[:, 0].tolist() == [False, True]
    assert weights("product-rs", 0.9999999, 1.0000001).keep_sequences[:, 0].tolist() == [
        True,
        False,
    ]


def test_a11_absent_rollout_logprobs_are_an_error_or_visible():
    """marin#6335, SkyRL#917, #1870."""
    scores, batch = batch_of([[-1.0, -1.0], [-1.0, -1.0]], [[1, 1], [1, 1]])
    config = LossConfig(
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="tis",
        truncated_importance_sampling_ratio=2.0,
        **OFF,
    )
    with pytest.raises(ValueError, match="batch.generation_logprobs: have the sampler"):
        evaluate(scores, batch.replace(generation_logprobs=None), config)
    one_row = batch.generation_logprobs.at[1].set(jnp.nan)
    assert np.isnan(evaluate(scores, batch.replace(generation_logprobs=one_row), config)[0])


def test_a12_the_kl_in_the_loss_has_a_gradient():
    """SkyRL#1353."""
    value = lambda lp: kl.calculate_kl(lp, jnp.asarray(-1.5), "k3")  # noqa: E731
    np.testing.assert_allclose(value(jnp.asarray(-1.0)), 0.1065307, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(value)(jnp.asarray(-1.0)), 0.3934693, rtol=1e-6)
    scores, batch = batch_of([[-1.0]], [[1]])
    batch = batch.replace(reference_logprobs=jnp.asarray([[-1.5]]), advantages=jnp.zeros((1, 1)))
    grads = evaluate(scores, batch, LossConfig(reference_policy_kl_penalty=1.0))[1]
    np.testing.assert_allclose(grads.logprobs, [[0.5]], rtol=1e-6)  # −d, with the score function


def test_a13_estimator_names():
    """verl#6058, slime#483."""
    lp, ref = jnp.asarray([-1.0, -1.0]), jnp.asarray([-1.5, -0.5])
    for name, wanted in (
        ("k1", [0.5, -0.5]),
        ("k2", [0.125, 0.125]),
        ("k3", [0.1065307, 0.1487213]),
    ):
        np.testing.assert_allclose(kl.calculate_kl(lp, ref, name), wanted, rtol=1e-6)
    for name in ("k3+", "low_var_kl", "kl"):
        with pytest.raises(ValueError, match="use one of k1, k2, k3"):
            kl.calculate_kl(lp, ref, name)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32, jnp.bfloat16])
def test_a14_one_stray_token_does_not_poison_the_kl(dtype):
    """tunix#1560."""
    lp, ref = jnp.asarray([-30.0], dtype), jnp.asarray([-1.0], dtype)
    clamped = jax.value_and_grad(lambda x: jnp.sum(kl.calculate_kl(x, ref, "k3")))
    value, grad = clamped(lp)
    assert value == 10 and grad == 0
    free = {"input_clamp": None, "output_clamp": None}
    value, grad = jax.value_and_grad(lambda x: jnp.sum(kl.calculate_kl(x, ref, "k3", **free)))(lp)
    np.testing.assert_allclose(float(value), 3.931e12, rtol=1e-2)
    assert np.isfinite(float(grad[0]))


def test_a15_k3_is_never_negative_near_equality():
    """tunix#2315."""
    found = kl.calculate_kl(jnp.asarray(-1e-6, jnp.float32), jnp.asarray(0.0, jnp.float32), "k3")
    assert 0 <= found < 1e-12


def test_a16_nan_times_zero():
    """SkyRL#1635, verl#2377, trl#5594: the input is masked, before exp."""
    total = reductions.safe_masked_sum(jnp.asarray([-1.0, -jnp.inf]), jnp.asarray([1.0, 0.0]))
    assert total == -1
    scores, batch = batch_of([[-1.0, 1e4]], [[1, 0]])
    batch = batch.replace(prev_logprobs=jnp.asarray([[-1.0, -1.0]]))
    loss, grads, _ = evaluate(scores, batch, LossConfig(**OFF))
    np.testing.assert_allclose(loss, 1.0, rtol=1e-7)
    np.testing.assert_allclose(grads.logprobs, [[1.0, 0.0]], rtol=1e-7)


def test_a28_every_path_reads_the_loss_mask():
    """verl#2543, trl#4975."""
    scores, batch = batch_of([[1, 1, 10, 10, 1]], [[1, 1, 0, 0, 1]])
    for options in ({}, {"row_block": 1}, {"max_segments": 2}):
        loss, _, _ = evaluate(scores, batch, LossConfig(**REINFORCE), **options)
        np.testing.assert_allclose(loss, 1.0, rtol=1e-7)


def test_a34_alignment_padding_belongs_to_no_sequence():
    """NeMo-RL#3182: lengths 3 and 2, aligned to 8 in total."""
    scores, batch = batch_of(
        [[9, 2, 4, 9, 6, 7, 7, 7]], [[0, 1, 1, 0, 1, 0, 0, 0]], [[1, 1, 1, 2, 2, 0, 0, 0]]
    )
    config = LossConfig(token_level_loss=False, **REINFORCE)
    loss, grads, metrics = evaluate(scores, batch, config, max_segments=2)
    np.testing.assert_allclose(loss, (3.0 + 6.0) / 2, rtol=1e-7)
    assert not grads.logprobs[0, 5:].any() and metrics["num_valid_samples"] == 2


def test_a35_the_first_token_of_a_packed_document_is_never_trained():
    """Same class as NeMo-RL#3182: [5, 6, 7] and [8, 9] in one row train 5→6, 6→7 and 8→9 only."""
    mask = [[0, 1, 1, 0, 1]]
    scores, batch = batch_of([[1, 1, 1, 1, 1]], mask, [[1, 1, 1, 2, 2]])
    grads = evaluate(scores, batch, LossConfig(**REINFORCE), max_segments=2)[1]
    np.testing.assert_allclose(grads.logprobs, np.array(mask) / 3, rtol=1e-7)


def test_a36_a_tied_head_receives_both_gradients():
    """NeMo-RL#2363."""

    def loss(table):
        logprobs = jax.nn.log_softmax(table @ table[0])[1]
        scores = TokenScores(logprobs[None, None])
        _, batch = batch_of([[-1.0]], [[1]])
        counts = Counts(jnp.asarray(1.0), jnp.asarray(1.0))
        return evaluate(scores, batch, LossConfig(**REINFORCE), counts)[0]

    value, grads = jax.value_and_grad(loss)(jnp.eye(2))
    np.testing.assert_allclose(value, -1.3132617, rtol=1e-6)
    np.testing.assert_allclose(grads, [[-1.4621172, 0.7310586], [0.7310586, 0]], atol=1e-7)
