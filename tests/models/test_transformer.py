"""The forward pass: equal to transformers, blind to padding and to other segments."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.core import logprobs
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.policy import Params, Policy
from grpo_jax.models import hf, hf_write, model_config, presets, transformer
from tests.models.families import FAMILIES, LENGTHS

# Their switches, under gradients, are those of others.
SAME_SWITCHES = ("linear", "mistral", "qwen3")


def logits_of(model: hf.LoadedModel, params, tokens, positions, segment_ids):
    hidden = model.policy.hidden(params, tokens, positions, segment_ids)
    return model.policy.unembed(model.policy.head(params), hidden)


def score(policy, params, tokens, positions, segment_ids):
    """Sum of cos(logits) over real tokens: a smooth scalar that every logit moves."""
    hidden = policy.hidden(params, tokens, positions, segment_ids)
    values = jnp.cos(policy.unembed(policy.head(params), hidden)).sum(-1)
    return jnp.where(segment_ids > 0, values, 0.0).sum()


@pytest.mark.torch
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_in_float32(torch_models, rows, family):
    torch_model = torch_models(family, "float32")
    model = hf.load_model(torch_model.folder)
    tokens, positions, segment_ids = rows(97, LENGTHS[family], 40)
    ours = jax.jit(lambda p: logits_of(model, p, tokens, positions, segment_ids))(model.params)
    theirs = torch_model.logits(tokens, segment_ids)
    real = np.asarray(segment_ids) > 0
    assert np.abs(theirs[real]).max() > 1  # else the comparison says nothing
    # The project's target; float32 rounding of logits around 10 is 1e-6 a sum.
    np.testing.assert_allclose(np.asarray(ours)[real], theirs[real], rtol=0, atol=2e-4)


@pytest.mark.torch
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in SAME_SWITCHES])
def test_logits_and_gradients_equal_transformers_in_float64(x64, torch_models, rows, family):
    import torch

    torch_model = torch_models(family, "float64")
    model = hf.load_model(torch_model.folder)
    tokens, positions, segment_ids = rows(97, LENGTHS[family], 40)
    weights = np.random.default_rng(1).normal(size=(2, 40, 97)) * np.asarray(segment_ids)[..., None]

    def loss(params):
        ours = logits_of(model, params, tokens, positions, segment_ids)
        return jnp.sum(ours * weights), ours

    (_, ours), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(model.params)
    theirs = torch_model.with_gradient(tokens, segment_ids)
    torch_model.module.zero_grad()
    (theirs * torch.tensor(weights)).sum().backward()

    assert ours.dtype == jnp.float64
    real = np.asarray(segment_ids) > 0
    # transformers computes norms, softmax and RoPE in float32 even here: about 1e-7 of each value.
    np.testing.assert_allclose(
        np.asarray(ours)[real], theirs.detach().numpy()[real], rtol=0, atol=1e-5
    )
    named = torch_model.gradients()
    seen = 0
    for tensor in hf_write.tensors_of(model.config, gradients):
        gradient, expected = tensor.read(), named[tensor.name]
        np.testing.assert_allclose(
            gradient, expected, rtol=0, atol=1e-5 * np.abs(expected).max(), err_msg=tensor.name
        )
        seen += 1
    assert seen == len(named)


class Tiny(NamedTuple):
    """A model, and its value and gradient of `score`, compiled once for [3, 32] tokens."""

    config: model_config.ModelConfig
    policy: Policy
    params: Params
    grad: Any  # compiled (params, tokens, positions, segment_ids) -> (value, gradients)


@pytest.fixture(scope="module")
def tiny(draw) -> Tiny:
    config = presets.preset("tiny")
    params = draw(config)
    return Tiny(config, transformer.policy_for(config), params, compile_grad(config, params))


def compile_grad(config, params):
    grad = jax.jit(jax.value_and_grad(functools.partial(score, transformer.policy_for(config))))
    return grad.lower(params, *[jax.ShapeDtypeStruct((3, 32), jnp.int32)] * 3).compile()


def assert_close(found, expected):
    """Compare trees of gradients: float32 sums in another order."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_padding_may_hold_anything(tiny, rows):
    tokens, positions, segment_ids = rows(264, [9, 5, 0], 32)
    clean_value, clean = tiny.grad(tiny.params, tokens, positions, segment_ids)
    assert np.isfinite(clean_value)
    for garbage in (-1, 10**6, 2**31 - 1):
        dirty = (jnp.where(segment_ids > 0, x, garbage) for x in (tokens, positions))
        value, gradients = tiny.grad(tiny.params, *dirty, segment_ids)
        np.testing.assert_allclose(value, clean_value, rtol=1e-6)
        assert_close(gradients, clean)


MIXED = {
    "num_layers": 4,
    "pattern": ("global", "local", "local_nope"),
    "window": 4,
    "qk_norm": True,
    "rope_scaling": model_config.RopeScaling("dynamic", 2.0),
    "max_length": 6,
    "local_rope_theta": 100.0,
    "activation": "gelu_tanh",
    "sandwich_norms": True,
    "centered_norms": True,
    "scale_embeddings": True,
    "query_width": 40,
    "attention_soft_cap": 2.0,
    "logit_soft_cap": 3.0,
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_size": 24,
    "normalize_experts": True,
}


@pytest.fixture(scope="module")
def mixed(draw) -> Tiny:
    """Layers of three kinds, and RoPE that depends on the length of each sequence."""
    config = presets.preset("tiny", **MIXED)
    params = draw(config)
    return Tiny(config, transformer.policy_for(config), params, compile_grad(config, params))


@pytest.mark.parametrize("name", ["tiny", "mixed"])
def test_packed_equals_separate_with_gradients(name, request, rows):
    tiny: Tiny = request.getfixturevalue(name)
    separate = tokens, positions, segment_ids = rows(264, [7, 5, 4], 32)
    packed = [jnp.zeros_like(x) for x in separate]
    begin = 0
    for row, length in enumerate([7, 5, 4]):
        span = slice(begin, begin + length)
        packed[0] = packed[0].at[0, span].set(tokens[row, :length])
        packed[1] = packed[1].at[0, span].set(positions[row, :length])
        packed[2] = packed[2].at[0, span].set(row + 1)
        begin += length
    value, gradients = tiny.grad(tiny.params, *packed)
    expected_value, expected = tiny.grad(tiny.params, *separate)
    np.testing.assert_allclose(value, expected_value, rtol=2e-6)
    assert_close(gradients, expected)


@pytest.mark.parametrize("switches", [{}, MIXED], ids=["tiny", "mixed"])
def test_the_program_does_not_grow_with_depth(switches):
    def lines(depth: int) -> int:
        config = presets.preset("tiny", **{**switches, "num_layers": depth})
        grad = jax.jit(jax.grad(functools.partial(score, transformer.policy_for(config))))
        batch = [jax.ShapeDtypeStruct((3, 32), jnp.int32)] * 3
        lowered = grad.lower(transformer.abstract_params(config), *batch)
        return lowered.as_text().count("\n")

    assert lines(30) == lines(6) > 100


def test_a_frozen_router_has_no_gradient_and_the_rest_has_its_own(mixed, rows):
    batch = rows(264, [9, 5, 3], 32)
    value, gradients = mixed.grad(mixed.params, *batch)
    frozen = dataclasses.replace(mixed.config, freeze_router=True)
    found, others = compile_grad(frozen, mixed.params)(mixed.params, *batch)
    np.testing.assert_allclose(found, value, rtol=1e-6)
    router, free = (g["layers"]["mlp"].pop("router")["weight"] for g in (others, gradients))
    assert not router.any() and jnp.abs(free).max() > 1e-3
    assert_close(others, gradients)  # tokens still feel the router through what they send to it


def test_expert_counts_are_those_of_real_tokens(mixed, rows):
    tokens, positions, segment_ids = rows(264, [9, 5, 0], 32)
    counts = mixed.policy.expert_counts
    assert (
        counts is not None and transformer.policy_for(presets.preset("tiny")).expert_counts is None
    )
    found = jax.jit(counts)(mixed.params, tokens, positions, segment_ids)
    assert found.shape == (3, 4, 4)  # rows, layers, experts
    np.testing.assert_array_equal(found.sum(-1), 2 * np.array([[9], [5], [0]]) * np.ones(4))
    alone = jax.jit(counts)(mixed.params, tokens[:1, :9], positions[:1, :9], segment_ids[:1, :9])
    np.testing.assert_array_equal(alone[0], found[0])


def test_padding_more_changes_nothing(tiny, rows):
    tokens, positions, segment_ids = rows(264, [9, 5, 0], 32)
    hidden = jax.jit(tiny.policy.hidden)
    wide = hidden(tiny.params, tokens, positions, segment_ids)
    narrow = hidden(tiny.params, tokens[:2, :9], positions[:2, :9], segment_ids[:2, :9])
    assert jnp.isfinite(wide).all()  # the row of nothing but padding too
    real = np.asarray(segment_ids[:2, :9]) > 0
    # Another width may sum in another order: a few units in the last place of values around 1.
    np.testing.assert_allclose(np.asarray(wide)[:2, :9][real], np.asarray(narrow)[real], atol=5e-6)


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_report_a37_padding_left_or_right_leaves_log_probabilities_alone(tiny, chunk_size):
    real, places = jnp.array([[7, 5, 9, 7, 3]]), jnp.arange(5)[None]

    @jax.jit
    def padded_scores(pad):
        widen = lambda x, value: jnp.pad(  # noqa: E731
            x, ((0, 0), (3, 3)), constant_values=value
        )
        tokens = jnp.where(widen(real, -1) < 0, pad, widen(real, -1))
        scores = logprobs.token_scores(
            tiny.policy, tiny.params, tokens, widen(places, 0), widen(jnp.ones_like(real), 0),
            filter=FilterConfig(), chunk_size=chunk_size,
        )  # fmt: skip
        return scores.logprobs[0]

    alone = logprobs.token_scores(
        tiny.policy, tiny.params, real, places, jnp.ones_like(real),
        filter=FilterConfig(), chunk_size=chunk_size,
    ).logprobs[0]  # fmt: skip
    for pad in (0, 7):  # 7 is also a real token
        padded = padded_scores(pad)
        np.testing.assert_allclose(padded[3:8], alone, atol=1e-5)
        np.testing.assert_array_equal(padded[jnp.array([0, 1, 2, 8, 9, 10])], 0)


def test_a_token_never_sees_what_comes_later(tiny, rows):
    tokens, positions, segment_ids = rows(264, [8, 8, 8], 32)
    hidden = jax.jit(tiny.policy.hidden)
    before = hidden(tiny.params, tokens, positions, segment_ids)
    after = hidden(tiny.params, tokens.at[0, 5].add(1), positions, segment_ids)
    np.testing.assert_array_equal(before[0, :5], after[0, :5])
    assert (jnp.abs(before[0, 5:8] - after[0, 5:8]).max(-1) > 1e-3).all()


@pytest.mark.parametrize("name", model_config.REMAT_NAMES[1:])
@pytest.mark.parametrize("model", ["tiny", "mixed"])
def test_remat_changes_memory_and_nothing_else(model, name, request, rows):
    """Value and gradients are those without it, for every policy that has a name."""
    kept: Tiny = request.getfixturevalue(model)
    batch = rows(264, [32, 20, 7], 32)
    again = compile_grad(dataclasses.replace(kept.config, remat=name), kept.params)
    (found, gradients), (expected, wanted) = (
        again(kept.params, *batch),
        kept.grad(kept.params, *batch),
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert_close(gradients, wanted)
    if name == "full" and model == "tiny":
        temporary = [c.memory_analysis().temp_size_in_bytes for c in (kept.grad, again)]
        assert temporary[1] < 0.8 * temporary[0]


def test_bfloat16_compute_stays_near_float32(tiny, rows):
    batch = rows(264, [20, 11, 32], 32)
    params = tiny.params
    half = transformer.policy_for(dataclasses.replace(tiny.config, compute_dtype="bfloat16"))
    wide = jax.jit(tiny.policy.hidden)(params, *batch)
    narrow = jax.jit(half.hidden)(params, *batch)
    assert narrow.dtype == jnp.bfloat16
    logits = half.unembed(half.head(params), narrow)
    assert logits.dtype == jnp.float32
    real = np.asarray(batch[2]) > 0
    error = np.abs(np.asarray(narrow, np.float32) - np.asarray(wide))[real]
    # bfloat16 rounds to 2^-9; a handful of roundings a layer, on values of root mean square 1.
    assert 1e-4 < error.mean() < 2e-2


def test_parameters_are_born_under_jit_and_eval_shape():
    config = presets.preset("tiny", tie_embeddings=False, param_dtype="bfloat16")
    shapes = transformer.abstract_params(config)
    params = jax.jit(lambda key: transformer.init_params(config, key))(jax.random.key(3))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
    assert params["head"]["weight"].shape == (264, 64)
    assert params["layers"]["mlp"]["down"]["weight"].shape == (2, 64, 160)
    first, second = params["layers"]["mlp"]["down"]["weight"]
    assert (first != second).any()  # every layer draws its own
    np.testing.assert_allclose(float(first.astype("float32").std()), 0.02, rtol=0.05)
