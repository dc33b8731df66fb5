"""Tokens outside the top-k/top-p support: who leaves, who stays, and what is counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_cases import assert_same, random_case
from loss_cases import evaluate_small as evaluate

from grpo_jax.core import losses
from grpo_jax.core.batch import Batch, Counts, TokenScores
from grpo_jax.core.loss_config import LossConfig

pytestmark = pytest.mark.usefixtures("x64")

OFF = {"reference_policy_kl_penalty": 0.0}
IS = {"use_importance_sampling_correction": True}
GSPO = {"token_level_loss": False, "sequence_level_importance_ratios": True}


def two_tokens(current, prev, gen, **more):
    """One response of two trained tokens after a prompt token; advantage 1."""
    row = lambda x: jnp.asarray([[0.0, *x]], jnp.float64)  # noqa: E731
    batch = Batch(
        tokens=jnp.zeros((1, 3), jnp.int32),
        segment_ids=jnp.ones((1, 3), jnp.int32),
        positions=jnp.asarray([[0, 1, 2]], jnp.int32),
        token_mask=jnp.asarray([[False, True, True]]),
        sample_weights=jnp.ones((1, 3)),
        advantages=jnp.ones((1, 3)),
        generation_logprobs=row(gen),
        prev_logprobs=row(prev),
        reference_logprobs=row(more["ref"]) if "ref" in more else None,
    )
    unfiltered = row(more["unfiltered"]) if "unfiltered" in more else None
    return TokenScores(row(current), unfiltered), batch


HALF = -np.log(2.0)
COUNTS = Counts(jnp.asarray(2.0), jnp.asarray(1.0))


@pytest.mark.parametrize("source", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("correction", [{}, IS])
def test_acceptance_vectors(source, correction):
    """The first token is unsupported for the current, previous or generating policy.

    Token level: loss −1/2, one of two counted tokens is left. GSPO: loss −1, gradient on the
    supported token alone. (Through a two-token softmax these are (0.25, 0, −0.25) and
    (0.5, 0, −0.5) on its logits.)
    """
    arrays = [[HALF, HALF] for _ in range(3)]
    for which in source:
        arrays[which][0] = -np.inf
    for options, loss, grad in ((OFF, -0.5, -0.5), (GSPO | OFF, -1.0, -1.0)):
        config = LossConfig(**options, **correction)
        found = evaluate(*two_tokens(*arrays), config, COUNTS, filtering_on=True)
        np.testing.assert_allclose(found[0], loss, rtol=1e-7)
        np.testing.assert_allclose(found[1].logprobs, [[0, 0, grad]], rtol=1e-7)
        assert found[2]["policy_support_excluded_tokens"] == 1
        if options == OFF:
            np.testing.assert_allclose(found[2]["probs_ratio"], 0.5, rtol=1e-7)
            np.testing.assert_allclose(found[2]["probs_ratio_retained"], 1.0, rtol=1e-7)


def test_nothing_supported():
    arrays = [[-np.inf, HALF], [HALF, -np.inf], [HALF, HALF]]
    found = evaluate(*two_tokens(*arrays), LossConfig(**OFF), COUNTS, filtering_on=True)
    assert found[0] == 0 and not found[1].logprobs.any()
    assert found[2]["num_valid_samples"] == 0
    assert found[2]["policy_support_excluded_tokens"] == 2


KL = {"ref": (-1.1, -0.9), "unfiltered": (-0.8, -0.7)}


@pytest.mark.parametrize("excluded", [False, True])
@pytest.mark.parametrize("reduction", [{}, GSPO])
@pytest.mark.parametrize(
    ("options", "value", "grad"),
    [
        ({}, 0.00297745, (0.0150, 0.0100)),
        ({"use_on_policy_kl_approximation": True}, 0.00251837, (0.0123, 0.0090)),
    ],
)
def test_reference_kl_is_untouched_by_exclusion(excluded, reduction, options, value, grad):
    current = [-np.inf if excluded else -0.6, -0.6]
    scores, batch = two_tokens(current, (-0.6, -0.6), (-0.6, -0.6), **KL)
    batch = batch.replace(advantages=jnp.zeros((1, 3)))
    config = LossConfig(reference_policy_kl_penalty=0.1, **options, **reduction)
    loss, grads, metrics = evaluate(scores, batch, config, COUNTS, filtering_on=True)
    np.testing.assert_allclose(loss, value, atol=5e-9)
    np.testing.assert_allclose(grads.unfiltered[0, 1:], grad, atol=1e-4)
    np.testing.assert_allclose(metrics["kl_penalty"], value / 0.1, atol=5e-8)
    # Bit for bit the same as without the exclusion.
    plain = evaluate(
        scores._replace(logprobs=jnp.full((1, 3), -0.6)), batch, config, COUNTS, filtering_on=True
    )
    assert loss == plain[0] and (grads.unfiltered == plain[1].unfiltered).all()


def test_a_generation_outside_the_support_has_kl_weight_zero():
    scores, batch = two_tokens((-0.6, -0.6), (-0.6, -0.6), (-np.inf, -0.6), **KL)
    config = LossConfig(use_on_policy_kl_approximation=True)
    loss, grads, _ = evaluate(scores, batch, config, COUNTS, filtering_on=True)
    assert np.isfinite(loss) and np.isfinite(grads.unfiltered).all()
    assert grads.unfiltered[0, 1] == 0 and grads.unfiltered[0, 2] != 0


@pytest.mark.parametrize("options", [OFF, GSPO | IS | OFF, OFF | {"force_on_policy_ratio": True}])
def test_a_response_without_support_equals_sample_weight_zero(options):
    scores, batch = random_case(7, support=False)
    config = LossConfig(**options)
    lost = scores._replace(logprobs=scores.logprobs.at[0].set(-jnp.inf))
    counts = Counts(jnp.asarray(13.0), jnp.asarray(2.5))
    found = evaluate(lost, batch, config, counts, filtering_on=True)
    without = batch.replace(sample_weights=batch.sample_weights.at[0].set(0))
    wanted = evaluate(scores, without, config, counts, filtering_on=True)
    assert found[2]["policy_support_excluded_tokens"] == 4
    for name in (
        "policy_support_excluded_tokens", "batch_tokens", "batch_sequences",
        "kept_tokens", "kept_sequences", "survivor_tokens", "survivor_sequences",
        "effective_gradient_scale",  # made of these counts
    ):  # fmt: skip
        found[2].pop(name), wanted[2].pop(name)
    assert_same(found, wanted)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_positive_infinity_are_never_taken_for_unsupported(bad):
    for where in range(3):
        arrays = [[HALF, HALF] for _ in range(3)]
        arrays[where][0] = bad
        config = LossConfig(**OFF, **IS)
        loss, _, metrics = evaluate(*two_tokens(*arrays), config, COUNTS, filtering_on=True)
        assert metrics["policy_support_excluded_tokens"] == 0
        visible = [loss, metrics["token_mult_prob_error"], metrics["approx_entropy"]]
        assert not np.isfinite(visible).all()


def test_without_filters_negative_infinity_is_a_fault_and_stays_visible():
    arrays = [[HALF, HALF], [HALF, HALF], [-np.inf, HALF]]
    _, _, metrics = evaluate(*two_tokens(*arrays), LossConfig(**OFF), COUNTS)
    assert metrics["policy_support_excluded_tokens"] == 0
    assert np.isinf(metrics["token_mult_prob_error"])
    arrays = [[-np.inf, HALF], [HALF, HALF], [HALF, HALF]]
    loss = evaluate(*two_tokens(*arrays), LossConfig(disable_ppo_ratio=True, **OFF), COUNTS)[0]
    assert not np.isfinite(loss)


def test_gradients_reach_logits_finite_through_a_filtered_softmax():
    """The unsupported target's log-probability is −inf; its zero cotangent stays zero."""
    logits = jnp.asarray([[0.0, 0.0, -5.0], [0.0, -5.0, 0.0]])
    kept = jnp.asarray([[True, True, False], [True, False, True]])
    _, batch = two_tokens((HALF, HALF), (HALF, HALF), (HALF, HALF))

    def loss_fn(logits):
        filtered = jnp.where(kept, logits, -jnp.inf)
        norm = jax.nn.logsumexp(jnp.where(kept, logits, -1e30), axis=-1)
        picked = filtered[:, 2]
        current = jnp.concatenate([jnp.zeros((1, 1)), (picked - norm)[None]], axis=1)
        return losses.clipped_pg_loss(
            TokenScores(current), batch, COUNTS, LossConfig(**OFF, **IS), filtering_on=True
        )[0]

    loss, grads = jax.value_and_grad(loss_fn)(logits)
    np.testing.assert_allclose(loss, -0.5, rtol=1e-7)
    np.testing.assert_allclose(grads, [[0, 0, 0], [0.25, 0, -0.25]], atol=1e-8)
