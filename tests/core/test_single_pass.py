"""The single pass is the same function as the loss of the scores, with one product less."""

import dataclasses
import functools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from loss_cases import random_case  # noqa: E402
from test_invariances import CASES  # noqa: E402

from grpo_jax.core import logprobs, losses, masks, single_pass  # noqa: E402
from grpo_jax.core.batch import Batch, Counts  # noqa: E402
from grpo_jax.core.filtering import FilterConfig  # noqa: E402
from grpo_jax.core.loss_config import LossConfig  # noqa: E402
from grpo_jax.core.policy import Policy  # noqa: E402

OFF = FilterConfig(temperature=0.8)
ON = FilterConfig(temperature=0.8, top_k=9, top_p=0.95)
ROWS, WIDTH, D, V = 4, 7, 5, 12


@pytest.fixture
def quick_compilation():
    """Programs that run once: compiling them well would take several times as long."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


quickly = pytest.mark.usefixtures("quick_compilation")


# --- where it is allowed --------------------------------------------------------------------------


def one_token_decides(case, config, filtering_on):
    """Whether each token's derivative stays when all other scores become 0."""
    scores, batch = case
    counts = masks.count(batch)

    def derivative(scores):
        return jax.grad(
            lambda s: losses.clipped_pg_loss(s, batch, counts, config, filtering_on=filtering_on)[0]
        )(scores)

    tokens = jnp.arange(scores.logprobs.size)

    def alone(token):
        only = (tokens == token).reshape(scores.logprobs.shape)
        found = derivative(jax.tree.map(lambda x: jnp.where(only, x, 0), scores))
        return jax.tree.map(lambda g: g.ravel()[token], found)

    whole, parts = derivative(scores), jax.vmap(alone)(tokens)
    assert any(np.any(g != 0) for g in jax.tree.leaves(whole))
    return all(
        np.allclose(a.ravel(), b, rtol=1e-12, atol=1e-14)
        for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True)
    )


ALLOWED = {
    name: single_pass.separable(config, True)  # with filters wherever they are allowed
    for name, config in CASES.items()
    if single_pass.separable(config, False)
}


@quickly
@pytest.mark.parametrize("name", list(ALLOWED))
def test_where_it_is_allowed_one_token_decides(name, x64):
    filtering_on = ALLOWED[name]
    assert one_token_decides(random_case(3, support=filtering_on), CASES[name], filtering_on)


GATE = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_ratio_min": 0.5,
    "truncated_importance_sampling_ratio": 2.0,
}
REFUSED = {
    "gspo": (False, {"sequence_level_importance_ratios": True, "token_level_loss": False}),
    "gmpo": (False, {"objective": "gmpo", "token_level_loss": False}),
    "check": (
        False,
        {
            "seq_logprob_error_in_loss": True,
            "seq_logprob_error_threshold": 1.5,
            "force_on_policy_ratio": True,
        },
    ),
    "gate_on_policy": (
        False,
        GATE | {"truncated_importance_sampling_type": "geo-rs", "force_on_policy_ratio": True},
    ),
    "seq-mask-tis": (True, GATE | {"truncated_importance_sampling_type": "seq-mask-tis"}),
    "geo-rs": (True, GATE | {"truncated_importance_sampling_type": "geo-rs"}),
    "product-rs": (True, GATE | {"truncated_importance_sampling_type": "product-rs"}),
    "veto": (True, {"use_importance_sampling_correction": True, "token_veto_threshold": 0.1}),
    "response_mean": (True, {"token_level_loss": False}),
    "local_count": (True, {"positive_example_nll_weight": 0.1, "positive_nll_local_count": True}),
}


@quickly
@pytest.mark.parametrize("name", list(REFUSED))
def test_where_it_is_refused_other_tokens_decide(name, x64):
    filtering_on, options = REFUSED[name]
    config = LossConfig(**options)
    scores, batch = random_case(3, support=filtering_on)
    if filtering_on:  # the token outside the support is the one that the gates would stumble over
        sampler = batch.generation_logprobs.at[0, 3].set(batch.prev_logprobs[0, 3] + 5)
        batch = batch.replace(generation_logprobs=sampler)
    assert not one_token_decides((scores, batch), config, filtering_on)
    assert not single_pass.separable(config, filtering_on)
    assert not filtering_on or single_pass.separable(config, False)
    with pytest.raises(ValueError, match="needs the scores of whole sequences"):
        single_pass.policy_loss(
            bag_policy(), {}, batch, masks.count(batch), config,
            filter=ON if filtering_on else OFF, chunk_size=4,
        )  # fmt: skip


# --- equal to the general path --------------------------------------------------------------------


def bag_policy(row_wise_head=False):
    """Hidden states that are an embedding plus a bias."""

    def hidden(params, tokens, positions, segment_ids):
        return params["embed"][tokens] + positions[..., None] * params["drift"][None, None]

    return Policy(
        hidden=hidden,
        head=lambda params: params["head"],
        unembed=lambda head, hidden: jnp.einsum("...d,vd->...v", hidden, head),
        row_wise_head=row_wise_head,
    )


def general(params, batch, counts, config, filter, chunk_size=None, lanes=1, max_segments=1):
    """The loss of the scores, differentiated afterwards."""
    scores = logprobs.token_scores(
        bag_policy(), params, batch.tokens, batch.positions, batch.segment_ids,
        filter=filter, unfiltered=filter.active and config.kl_on, entropy=True, kept_mass=True,
        chunk_size=chunk_size, mask=batch.token_mask, lanes=lanes,
    )  # fmt: skip
    return losses.clipped_pg_loss(
        scores, batch, counts, config, filtering_on=filter.active, max_segments=max_segments
    )


def single(params, batch, counts, config, filter, **options):
    return single_pass.policy_loss(
        bag_policy(), params, batch, counts, config,
        filter=filter, entropy=True, kept_mass=True, **options,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("loss", "config", "filter", "options"))
def value_and_gradient(params, batch, counts, loss, config, filter, options=()):
    """Loss, metrics, gradient; the loss is doubled outside, so that the cotangent is not 1."""

    def twice(params):
        value, metrics = loss(params, batch, counts, config, filter, **dict(options))
        return 2 * value, metrics

    return jax.value_and_grad(twice, has_aux=True)(params)


def case(dtype, packed=False):
    """Parameters and a batch whose ratios lie on both sides of the clip."""
    rng = np.random.default_rng(4)
    draw = lambda *shape: rng.normal(size=shape).astype(dtype)  # noqa: E731
    params = {"embed": draw(V, D), "drift": draw(D) / 3, "head": draw(V, D)}
    batch = random_case(3, support=False, dtype=dtype)[1]
    if packed:
        batch = batch.replace(segment_ids=jnp.asarray(np.sort(rng.integers(1, 3, (ROWS, WIDTH)))))
    current = logprobs.token_scores(
        bag_policy(), params, batch.tokens, batch.positions, batch.segment_ids, filter=OFF
    ).logprobs
    near = lambda: current + jnp.asarray(0.15 * draw(ROWS, WIDTH))  # noqa: E731
    batch = batch.replace(
        prev_logprobs=near(), generation_logprobs=near(), reference_logprobs=near()
    )
    return params, batch


TERMS = {"entropy_bonus": 0.02, "positive_example_nll_weight": 0.1}
TIS = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "tis",
    "truncated_importance_sampling_ratio": 1.1,
}
SURVIVORS = TIS | {
    "truncated_importance_sampling_type": "icepop",
    "truncated_importance_sampling_ratio_min": 0.9,
    "truncated_is_normalization": "survivors",
}
EQUAL = {
    "filters_kl_and_all_terms": (ON, {"ratio_clip_c": 1.2, **TIS, **TERMS}),
    "filters_without_kl": (ON, {"reference_policy_kl_penalty": 0.0, "use_cispo": True}),
    "response_mean_gated": (
        OFF,
        {
            "token_level_loss": False,
            "truncated_importance_sampling_type": "geo-rs",
            **GATE,
            **TERMS,
        },
    ),
    "dr_grpo": (ON, {"token_level_loss": False, "loss_normalizer": 5.0, **TERMS}),
    "survivors": (
        OFF, {"reference_policy_kl_penalty": 0.0, "disable_ppo_ratio": True, **SURVIVORS},
    ),
    "on_policy": (
        ON,
        {
            "force_on_policy_ratio": True,
            "use_on_policy_kl_approximation": True,
            "metrics_level": "minimal",
        },
    ),
}  # fmt: skip


def assert_equal(found, wanted, loss_tolerance, gradient_tolerance):
    ((loss, metrics), grads), ((loss2, metrics2), grads2) = found, wanted
    assert np.isfinite(loss) and metrics.keys() == metrics2.keys()
    np.testing.assert_allclose(loss, loss2, rtol=loss_tolerance, atol=loss_tolerance)
    for name, value in metrics2.items():
        np.testing.assert_allclose(
            metrics[name], value, rtol=loss_tolerance * 10, atol=loss_tolerance, err_msg=name
        )
    for name, wanted in grads2.items():
        size = np.abs(wanted).max()
        assert size > 1e-3
        np.testing.assert_allclose(grads[name], wanted, atol=gradient_tolerance * size, rtol=0)


@quickly
@pytest.mark.parametrize("name", list(EQUAL))
def test_value_gradient_and_metrics_are_those_of_the_general_path(name, x64):
    (filter, options), (params, batch) = EQUAL[name], case(np.float64)
    config, counts = LossConfig(**options), masks.count(batch)
    wanted = value_and_gradient(params, batch, counts, general, config, filter)
    how = (("chunk_size", 3), ("lanes", 2))
    found = value_and_gradient(params, batch, counts, single, config, filter, how)
    assert_equal(found, wanted, 1e-10, 1e-10)
    if filter.active:
        assert found[0][1]["policy_support_excluded_tokens"] > 0


@quickly
def test_packed_rows_are_those_of_the_general_path(x64):
    params, batch = case(np.float64, packed=True)
    config, counts = LossConfig(token_level_loss=False), masks.count(batch, max_segments=2)
    how = (("chunk_size", 100), ("max_segments", 2))
    wanted, found = (
        value_and_gradient(params, batch, counts, loss, config, OFF, how)
        for loss in (general, single)
    )
    assert_equal(found, wanted, 1e-10, 1e-10)


@quickly
def test_single_precision_differs_by_rounding():
    filter, options = EQUAL["filters_kl_and_all_terms"]
    params, batch = case(np.float32)
    config, counts = LossConfig(**options), masks.count(batch)
    wanted = value_and_gradient(params, batch, counts, general, config, filter)
    found = value_and_gradient(params, batch, counts, single, config, filter, (("chunk_size", 5),))
    assert_equal(found, wanted, 1e-6, 1e-5)


def test_without_a_gradient_it_is_the_loss_of_the_scores(x64):
    (params, batch), config = case(np.float64), LossConfig()
    counts = masks.count(batch)
    wanted = general(params, batch, counts, config, OFF)
    found = single(params, batch, counts, config, OFF, chunk_size=4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, wanted)


@quickly
def test_hyperparameters_can_be_mapped_over(x64):
    params, batch = case(np.float64)
    counts = masks.count(batch)

    def gradient(bound, loss):
        config = dataclasses.replace(LossConfig(), ratio_clip_max=bound)
        options = {"chunk_size": 8} if loss is single else {}
        return jax.grad(lambda p: loss(p, batch, counts, config, OFF, **options)[0])(params)

    bounds = jnp.asarray([0.05, 0.3])
    mapped = (jax.vmap(functools.partial(gradient, loss=loss)) for loss in (single, general))
    found, wanted = (jax.jit(of)(bounds) for of in mapped)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), found, wanted)
    assert np.abs(wanted["head"][0] - wanted["head"][1]).max() > 1e-3


@quickly
def test_a_fault_in_a_hidden_state_stays_visible():
    params, batch = case(np.float32)
    params["embed"][int(batch.tokens[0, 2])] = np.nan
    (loss, _), grads = value_and_gradient(
        params, batch, masks.count(batch), single, LossConfig(), OFF, (("chunk_size", 5),)
    )
    assert np.isnan(loss) and np.isnan(grads["head"]).any()


# --- what the compiler plans ----------------------------------------------------------------------


def shapes_of_batch(rows, width):
    numbers, whole, flags = (
        jax.ShapeDtypeStruct((rows, width), dtype) for dtype in (jnp.float32, jnp.int32, bool)
    )
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    batch = Batch(
        tokens=whole,
        segment_ids=whole,
        positions=whole,
        token_mask=flags,
        sample_weights=numbers,
        advantages=numbers,
        generation_logprobs=numbers,
        prev_logprobs=numbers,
        reference_logprobs=numbers,
    )
    return batch, Counts(scalar, scalar)


def planned(loss, rows, width, d, vocabulary, row_wise_head, **options):
    """Compile value and gradient with respect to hidden states and head."""
    policy = bag_policy(row_wise_head)._replace(hidden=lambda params, *batch: params["hidden"])

    def of(params, batch, counts):
        return loss(policy, params, batch, counts, LossConfig(), filter=OFF, **options)[0]

    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)  # noqa: E731
    params = {"hidden": shape(rows, width, d), "head": shape(vocabulary, d)}
    step = jax.jit(jax.value_and_grad(of)).lower(params, *shapes_of_batch(rows, width))
    return step.compile()


def loss_of_scores(policy, params, batch, counts, config, *, filter, chunk_size):
    scores = logprobs.token_scores(
        policy, params, batch.tokens, batch.positions, batch.segment_ids,
        filter=filter, chunk_size=chunk_size, mask=batch.token_mask,
    )  # fmt: skip
    return losses.clipped_pg_loss(scores, batch, counts, config)


@pytest.mark.parametrize(("loss", "products"), [(single_pass.policy_loss, 3), (loss_of_scores, 4)])
def test_a_chunk_meets_the_head_three_times_and_not_four(loss, products):
    chunk, d, vocabulary = 16, 128, 2048
    compiled = planned(loss, 4, 32, d, vocabulary, False, chunk_size=chunk)
    # The compiler counts the body of a loop once. Softmax adds about 20 operations a logit, a
    # product 2 · 128.
    found = compiled.cost_analysis()["flops"] / (2 * chunk * d * vocabulary)
    assert products <= found < products + 0.3


def test_temporaries_stay_below_a_twelfth_of_the_logits():
    """8 % of the float32 logits [4096, 151936] beside inputs and gradients: 190 MiB."""
    rows, width, vocabulary = 16, 256, 151_936
    compiled = planned(single_pass.policy_loss, rows, width, 1024, vocabulary, True, chunk_size=128)
    full = rows * width * vocabulary * 4
    assert compiled.memory_analysis().temp_size_in_bytes <= 0.08 * full
