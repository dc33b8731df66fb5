"""Importance weights: every truncation against a few lines of numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.core import corrections, masks, reductions
from grpo_jax.core.loss_config import LossConfig

pytestmark = pytest.mark.usefixtures("x64")

PREV = np.array([[-1, -2, -0.5], [-1, -1, -1.0]])
GEN = np.array([[-1.001, -2, -0.499], [-1.5, -0.8, -1.0]])
MASK = np.array([[1, 1, 1], [1, 1, 0.0]])


def weights(prev=PREV, gen=GEN, mask=MASK, rows=None, **options):
    rows = np.ones((mask.shape[0], 1)) if rows is None else rows
    actor = masks.ActorMasks(
        jnp.asarray(mask), jnp.asarray(rows), jnp.asarray(mask * np.asarray(rows))
    )
    config = LossConfig(use_importance_sampling_correction=True, **options)
    clean = [jnp.where(jnp.asarray(mask) != 0, jnp.asarray(x), 0) for x in (prev, gen)]
    sequences = reductions.Sequences(jnp.ones(mask.shape, jnp.int32), 1)
    return corrections.importance_weights(*clean, actor, sequences, config)


def truncated(kind, low, high):
    return {
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio_min": low,
        "truncated_importance_sampling_ratio": high,
    }


RATIO = np.where(MASK != 0, np.exp(PREV - GEN), 1.0)
GEOMETRIC = np.exp(((PREV - GEN) * MASK).sum(1) / MASK.sum(1))
PRODUCT = np.exp(((PREV - GEN) * MASK).sum(1))


def test_no_truncation():
    found = weights()
    np.testing.assert_allclose(found.weights, RATIO, rtol=1e-12)
    np.testing.assert_allclose(np.exp(found.log_geometric[:, 0]), GEOMETRIC, rtol=1e-7)
    assert not found.touched.any() and found.keep_sequences.all()


@pytest.mark.parametrize(
    ("kind", "low", "high", "wanted"),
    [
        ("tis", None, 1.2, np.minimum(RATIO, 1.2)),
        ("tis", 0.9, 1.2, np.clip(RATIO, 0.9, 1.2)),
        ("icepop", 0.9, 1.2, np.where((RATIO >= 0.9) & (RATIO <= 1.2), RATIO, 0)),
        ("seq-mask-tis", 0.999, 1.002, RATIO * [[1], [0]]),
        ("geo-rs", 0.999, 1.002, np.ones((2, 3)) * [[1], [0]]),
        ("geo-rs", 1.1, 1.2, np.ones((2, 3)) * [[0], [1]]),
        ("product-rs", 0.9, 1.2, np.ones((2, 3)) * [[1], [0]]),
        ("product-rs", 1.3, 1.4, np.ones((2, 3)) * [[0], [1]]),
    ],
)
def test_truncations(kind, low, high, wanted):
    assert GEOMETRIC[1] > 1.16 and 1.34 < PRODUCT[1] < 1.35
    found = weights(**truncated(kind, low, high))
    np.testing.assert_allclose(found.weights, wanted, rtol=1e-12)
    np.testing.assert_allclose(found.raw, RATIO, rtol=1e-12)


def test_bounds_are_inside():
    prev, gen = np.zeros((1, 2)), np.array([[0.0, -np.log(2.0)]])
    mask = np.ones((1, 2))
    at_two = float(jnp.exp(jnp.asarray(np.log(2.0))))
    found = weights(prev, gen, mask, **truncated("icepop", 1.0, at_two))
    assert found.keep_tokens.all()
    found = weights(prev, gen, mask, **truncated("tis", 1.0, at_two))
    assert not found.touched.any()


def test_one_broken_token_vetoes_its_sequence():
    gen = GEN.copy()
    gen[1, 1] = -1 + 9.5  # the trainer thinks it e^9.5 = 13,360 times less likely
    found = weights(PREV, gen, token_veto_threshold=1e-4)
    np.testing.assert_array_equal(found.vetoed[:, 0], [False, True])
    np.testing.assert_allclose(found.weights, RATIO * [[1], [0]], rtol=1e-12)
    kept = weights(PREV, gen, token_veto_threshold=5e-5)
    assert not kept.vetoed.any()
    masked = weights(PREV, gen, MASK * [[1, 1, 1], [1, 0, 0]], token_veto_threshold=1e-4)
    assert not masked.vetoed.any()


def test_what_the_type_cannot_hold_is_dropped_or_truncated():
    prev, gen, mask = np.zeros((1, 2)), np.array([[-800.0, 0.0]]), np.ones((1, 2))
    found = weights(prev, gen, mask, **truncated("tis", None, 2.0))
    np.testing.assert_array_equal(found.weights, [[0.0, 1.0]])
    np.testing.assert_array_equal(found.overflow, [[True, False]])
    found = weights(
        prev, gen, mask, importance_weight_overflow="truncate", **truncated("tis", None, 2.0)
    )
    np.testing.assert_array_equal(found.weights, [[2.0, 1.0]])
    np.testing.assert_array_equal(found.overflow, [[True, False]])


def test_sequence_ratios_make_the_weight_a_product_over_weighted_tokens():
    rows = np.array([[0.5], [1.0]])
    found = weights(rows=rows, sequence_level_importance_ratios=True, token_level_loss=False)
    wanted = np.exp(((PREV - GEN) * MASK * rows).sum(1, keepdims=True))
    np.testing.assert_allclose(found.weights, np.broadcast_to(wanted, (2, 3)), rtol=1e-12)


@pytest.mark.parametrize("kind", ["tis", "icepop", "seq-mask-tis", "geo-rs", "product-rs"])
def test_nan_is_visible_behind_every_gate(kind):
    gen = GEN.copy()
    gen[0, 1] = np.nan
    found = weights(PREV, gen, **truncated(kind, 0.5, 2.0))
    assert np.isnan(found.weights[0, 1]) and np.isfinite(found.weights[1]).all()
