"""The forward pass: equal to transformers, blind to padding and to other segments."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models import hf, presets, transformer


def logits_of(model: hf.LoadedModel, params, tokens, positions, segment_ids):
    hidden = model.policy.hidden(params, tokens, positions, segment_ids)
    return model.policy.unembed(model.policy.head(params), hidden)


@functools.cache
def tiny():
    config = presets.preset("tiny", initializer_range=0.2)
    params = jax.jit(lambda key: transformer.init_params(config, key))(jax.random.key(0))
    return config, transformer.policy_for(config), params


def score(policy, params, tokens, positions, segment_ids):
    """Sum of cos(logits) over real tokens: a smooth scalar that every logit moves."""
    hidden = policy.hidden(params, tokens, positions, segment_ids)
    values = jnp.cos(policy.unembed(policy.head(params), hidden)).sum(-1)
    return jnp.where(segment_ids > 0, values, 0.0).sum()


@pytest.mark.torch
@pytest.mark.parametrize("family", ["llama", "linear", "mistral"])
def test_logits_equal_transformers_in_float32(torch_models, rows, family):
    torch_model = torch_models(family, "float32")
    model = hf.load_model(torch_model.folder)
    tokens, positions, segment_ids = rows(97, [40, 23], 40)
    ours = jax.jit(lambda p: logits_of(model, p, tokens, positions, segment_ids))(model.params)
    theirs = torch_model.logits(tokens, segment_ids)
    real = np.asarray(segment_ids) > 0
    assert np.abs(theirs[real]).max() > 1  # else the comparison says nothing
    # The project's target; float32 rounding of logits around 10 is 1e-6 a sum.
    np.testing.assert_allclose(np.asarray(ours)[real], theirs[real], rtol=0, atol=2e-4)


@pytest.mark.torch
@pytest.mark.parametrize("family", ["llama", "llama3", "qwen2"])
def test_logits_and_gradients_equal_transformers_in_float64(x64, torch_models, rows, family):
    import torch

    torch_model = torch_models(family, "float64")
    model = hf.load_model(torch_model.folder)
    tokens, positions, segment_ids = rows(97, [40, 23], 40)
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
    named = dict(torch_model.module.named_parameters())
    seen = 0
    for name, gradient in hf.named_tensors(model.config, gradients):
        expected = named[name].grad.numpy()
        np.testing.assert_allclose(
            gradient, expected, rtol=0, atol=1e-5 * np.abs(expected).max(), err_msg=name
        )
        seen += 1
    assert seen == len(named)


def test_padding_may_hold_anything(rows):
    _, policy, params = tiny()
    tokens, positions, segment_ids = rows(264, [9, 5], 9)
    real = segment_ids > 0
    grad = jax.jit(jax.value_and_grad(lambda p, *batch: score(policy, p, *batch)))
    clean_value, clean = grad(params, tokens, positions, segment_ids)
    for garbage in (-1, 10**6, 2**31 - 1):
        dirty = (jnp.where(real, x, garbage) for x in (tokens, positions))
        dirty_value, gradients = grad(params, *dirty, segment_ids)
        np.testing.assert_allclose(dirty_value, clean_value, rtol=1e-6)
        for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(clean), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_padding_more_changes_nothing(rows):
    _, policy, params = tiny()
    tokens, positions, segment_ids = rows(264, [9, 5], 16)
    hidden = jax.jit(policy.hidden)
    wide = hidden(params, tokens, positions, segment_ids)
    narrow = hidden(params, tokens[:, :9], positions[:, :9], segment_ids[:, :9])
    real = np.asarray(segment_ids[:, :9]) > 0
    # Another width may sum in another order: a few units in the last place of values around 1.
    np.testing.assert_allclose(np.asarray(wide[:, :9])[real], np.asarray(narrow)[real], atol=2e-6)


def test_a_row_of_padding_is_finite(rows):
    _, policy, params = tiny()
    tokens, positions, segment_ids = rows(264, [0, 3], 6)
    hidden = jax.jit(policy.hidden)(params, tokens, positions, segment_ids)
    assert jnp.isfinite(hidden).all()


def test_packed_equals_separate_with_gradients(rows):
    _, policy, params = tiny()
    tokens, positions, segment_ids = rows(264, [7, 5, 4], 7)
    packed = [jnp.concatenate([x[0], x[1, :5], x[2, :4]])[None] for x in (tokens, positions)]
    packed.append(jnp.repeat(jnp.array([1, 2, 3]), jnp.array([7, 5, 4]))[None])
    grad = jax.value_and_grad(lambda p, *batch: score(policy, p, *batch))
    separate_value, separate = jax.jit(grad)(params, tokens, positions, segment_ids)
    packed_value, gradients = jax.jit(grad)(params, *packed)
    np.testing.assert_allclose(packed_value, separate_value, rtol=2e-6)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(separate), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_a_token_never_sees_what_comes_later(rows):
    _, policy, params = tiny()
    tokens, positions, segment_ids = rows(264, [8], 8)
    hidden = jax.jit(policy.hidden)
    before = hidden(params, tokens, positions, segment_ids)
    after = hidden(params, tokens.at[0, 5].add(1), positions, segment_ids)
    np.testing.assert_array_equal(before[0, :5], after[0, :5])
    assert (jnp.abs(before[0, 5:] - after[0, 5:]).max(-1) > 1e-3).all()


@pytest.mark.parametrize("name", presets.REMAT_NAMES[2:])
def test_every_remat_policy_exists(name):
    assert callable(getattr(jax.checkpoint_policies, name))


@pytest.mark.parametrize("name", ["full", "dots_saveable"])
def test_remat_changes_memory_and_nothing_else(rows, name):
    batch = rows(264, [32, 20], 32)
    config, policy, params = tiny()
    again = transformer.policy_for(dataclasses.replace(config, remat=name))
    plain, rematted = (
        jax.jit(jax.value_and_grad(lambda p, m=m: score(m, p, *batch))).lower(params).compile()
        for m in (policy, again)
    )
    for a, b in zip(jax.tree.leaves(plain(params)), jax.tree.leaves(rematted(params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
    if name == "full":
        temporary = [c.memory_analysis().temp_size_in_bytes for c in (plain, rematted)]
        assert temporary[1] < 0.8 * temporary[0]


def test_bfloat16_compute_stays_near_float32(rows):
    batch = rows(264, [20, 11], 20)
    config, policy, params = tiny()
    half = transformer.policy_for(dataclasses.replace(config, compute_dtype="bfloat16"))
    wide = jax.jit(policy.hidden)(params, *batch)
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


def test_the_program_does_not_grow_with_depth(rows):
    batch = rows(264, [6], 6)
    lines = []
    for depth in (2, 6):
        config = presets.preset("tiny", num_layers=depth)
        policy = transformer.policy_for(config)
        shapes = transformer.abstract_params(config)
        text = jax.jit(jax.grad(lambda p, m=policy: score(m, p, *batch))).lower(shapes).as_text()
        lines.append(text.count("\n"))
    assert lines[0] == lines[1]
