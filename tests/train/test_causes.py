"""Each detector fires on a synthetic fault of its own kind and stays silent on healthy data."""

import numpy as np
import pytest

from grpo_jax.train import causes

NAMES = ("prev", "generation")
B, T, V = 6, 40, 30


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


@pytest.fixture
def world():
    """Logits, tokens drawn from them, and the mask of trained tokens."""
    rng = np.random.default_rng(0)
    logits = 2.0 * rng.standard_normal((B, T, V))
    p = np.exp(log_softmax(logits))
    tokens = (p.cumsum(-1) > rng.random((B, T, 1))).argmax(-1)
    valid = np.zeros((B, T), bool)
    valid[:, 5:35] = True
    return logits, tokens, valid, rng


def pick(logits, tokens):
    return np.take_along_axis(log_softmax(logits), tokens[..., None], -1)[..., 0]


def noisy(logits, rng, scale=0.05):
    """The same policy after a kernel with other rounding, or one small optimizer step."""
    return logits + scale * rng.standard_normal(logits.shape)


def fired(x, y, valid):
    detectors = dict(shift=causes.shift, temperature=causes.temperature, support=causes.support)
    return {k for k, f in detectors.items() if f(x, y, valid, NAMES)}


def test_healthy_data_raises_no_suspicion(world):
    logits, tokens, valid, rng = world
    assert fired(pick(logits, tokens), pick(noisy(logits, rng), tokens), valid) == set()


@pytest.mark.parametrize("temperature", [0.6, 1.6])
def test_another_temperature_is_named(world, temperature):
    logits, tokens, valid, rng = world
    x, y = pick(logits, tokens), pick(noisy(logits, rng) / temperature, tokens)
    assert "temperature" in fired(x, y, valid)
    said = causes.temperature(x, y, valid, NAMES)
    sharper = "generation" if temperature < 1 else "prev"
    assert f"as if {sharper} were taken at a lower temperature" in said


@pytest.mark.parametrize("by,word", [(1, "later"), (-1, "earlier")])
def test_a_shift_by_one_is_named(world, by, word):
    logits, tokens, valid, rng = world
    x, y = pick(logits, tokens), np.roll(pick(noisy(logits, rng), tokens), by, axis=1)
    assert fired(x, y, valid) == {"shift"}
    assert f"read one token {word}" in causes.shift(x, y, valid, NAMES)


def test_a_renormalised_side_is_named(world):
    logits, tokens, valid, rng = world
    cut = np.sort(logits, -1)[..., -20, None]
    kept = np.maximum(cut, np.take_along_axis(logits, tokens[..., None], -1))
    y = pick(np.where(logits >= np.minimum(cut, kept), logits, -np.inf), tokens)
    x = pick(noisy(logits, rng, 1e-5), tokens)
    supported = valid & np.isfinite(y)
    assert fired(x, y, supported) == {"support"}
    assert "generation looks renormalised" in causes.support(x, y, supported, NAMES)
    assert "prev looks renormalised" in causes.support(y, x, supported, ("prev", "generation"))


def test_tokens_outside_one_support_are_counted(world):
    logits, tokens, valid, rng = world
    x, y = pick(logits, tokens), pick(noisy(logits, rng), tokens)
    x = x.copy()
    x[2, 7:10] = -np.inf
    assert "3 trained tokens are outside the top-k/top-p set of prev only" in causes.support(
        x, y, valid, NAMES
    )


def test_gradients_at_other_tokens_are_a_mask_difference(world):
    _, _, valid, rng = world
    ours = np.where(valid, rng.standard_normal((B, T)), 0.0)
    theirs = ours.copy()
    theirs[:, 4] = 0.3
    theirs[0, 5] = 0.0
    assert causes.mask(ours, ours, valid, ours, None) is None
    said = causes.mask(ours, theirs, valid, ours, None)
    assert f"at {B} tokens that are not trained here, and none at 1" in said


def test_a_mask_over_the_prompt_is_named(world):
    logits, tokens, valid, _ = world
    prev = pick(logits, tokens)
    generation = np.where(valid, prev, 0.0)
    wide = valid.copy()
    assert causes.mask(prev, None, wide, generation, prev) is None
    wide[:, 1:5] = True
    assert "does the mask cover the prompt" in causes.mask(prev, None, wide, generation, prev)
    wide[:, 0] = True
    assert "column 0" in causes.mask(prev, None, wide, generation, prev)


def test_one_constant_factor_is_a_denominator(world):
    _, _, valid, rng = world
    ours = np.where(valid, rng.standard_normal((B, T)), 0.0)
    known = {"global tokens": 400.0, "global sequences": 16.0, "rows x columns": 240.0}
    assert causes.denominator(ours, ours, None, known) is None
    said = causes.denominator(ours, ours * 400 / 240, None, known)
    assert "divided by 240 = rows x columns and not by 400 = global tokens" in said
    said = causes.denominator(ours, None, (2.0, 50.0), known)
    assert "their loss is 25 times ours" in said and "16 = global sequences" in said
    unmatched = causes.denominator(ours, ours * 1.7, None, known)
    assert "as if they divided by 235.294 and not by" in unmatched


def test_a_factor_per_row_is_the_other_reduction(world):
    _, _, valid, rng = world
    ours = np.where(valid, rng.standard_normal((B, T)), 0.0)
    theirs = ours * np.linspace(0.5, 2.0, B)[:, None]
    said = causes.denominator(ours, theirs, None, {"global tokens": 1.0})
    assert "averages inside each sequence first" in said


def test_unrelated_gradients_are_not_a_denominator(world):
    _, _, valid, rng = world
    ours, theirs = (np.where(valid, rng.standard_normal((B, T)), 0.0) for _ in range(2))
    assert causes.denominator(ours, theirs, None, {"global tokens": 1.0}) is None
