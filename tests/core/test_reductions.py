"""Masked sums and means, and sums inside sequences of packed rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.core import reductions

pytestmark = pytest.mark.usefixtures("x64")


def test_masked_mean_is_the_quotient_with_epsilon():
    x, m = jnp.asarray([[1.0, 2.0, 4.0]]), jnp.asarray([[1.0, 0.5, 0.0]])
    np.testing.assert_allclose(reductions.masked_mean(x, m), 2.0 / (1.5 + 1e-8), rtol=1e-14)
    np.testing.assert_allclose(reductions.masked_mean(x, m, axis=1), [2.0 / (1.5 + 1e-8)])
    np.testing.assert_allclose(reductions.masked_mean(x, m, denominator=8.0), 0.25, rtol=1e-8)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("dtype", [bool, np.int32, np.float64])
def test_garbage_outside_the_mask_reaches_neither_sum_nor_gradient(garbage, dtype):
    x, m = jnp.asarray([1.0, garbage]), jnp.asarray(np.array([1, 0], dtype))
    value, grad = jax.value_and_grad(lambda v: 3 * reductions.masked_mean(v, m))(x)
    np.testing.assert_allclose(value, 3.0, rtol=1e-7)
    np.testing.assert_allclose(grad, [3.0, 0.0], rtol=1e-7)


def test_an_empty_mask_gives_zero():
    x, m = jnp.asarray([np.nan, 3.0]), jnp.zeros(2)
    value, grad = jax.value_and_grad(lambda v: reductions.masked_mean(v, m))(x)
    assert value == 0 and not grad.any()


def test_variance_of_none_and_of_one_is_zero():
    x = jnp.asarray([1.0, 2.0, 6.0, np.nan])
    wanted = np.var([1.0, 2.0, 6.0], ddof=1)
    found = reductions.masked_var(x, jnp.asarray([1.0, 1.0, 1.0, 0.0]))
    np.testing.assert_allclose(found, wanted, rtol=1e-7)
    found = reductions.masked_var(x, jnp.asarray([1.0, 1.0, 1.0, 0.0]), unbiased=False)
    np.testing.assert_allclose(found, wanted * 2 / 3, rtol=1e-7)
    assert reductions.masked_var(x, jnp.asarray([0.0, 1.0, 0.0, 0.0])) == 0
    assert reductions.masked_var(x, jnp.zeros(4)) == 0


SEGMENTS = jnp.asarray([[1, 1, 2, 2, 0], [1, 2, 2, 3, 3]], jnp.int32)
VALUES = jnp.arange(1.0, 11.0).reshape(2, 5)


def test_sums_means_and_maxima_inside_sequences():
    rows = reductions.Sequences(SEGMENTS, 3)
    np.testing.assert_array_equal(rows.sum(VALUES), [[3, 7, 0], [6, 15, 19]])
    np.testing.assert_array_equal(rows.max(VALUES), [[2, 4, 0], [6, 8, 10]])
    mask = jnp.asarray([[1.0, 0, 1, 1, 1], [1, 0, 1, 1, 1]])
    np.testing.assert_allclose(rows.mean(VALUES, mask), [[1, 3.5, 0], [6, 8, 9.5]], rtol=1e-7)
    spread = rows.spread(jnp.asarray([[1.0, 2, 3], [4, 5, 6]]))
    np.testing.assert_array_equal(spread, [[1, 1, 2, 2, 0], [4, 5, 5, 6, 6]])


def test_one_slot_is_the_row():
    rows = reductions.Sequences(SEGMENTS, 1)
    np.testing.assert_array_equal(rows.sum(VALUES), VALUES.sum(1, keepdims=True))
    np.testing.assert_array_equal(rows.spread(jnp.asarray([[7.0], [8.0]]))[:, 0], [7, 8])


def test_more_sequences_than_slots_is_refused():
    with pytest.raises(ValueError, match="a row holds 3 sequences but max_segments=2"):
        reductions.check_slots(SEGMENTS, 2)
    reductions.check_slots(SEGMENTS, 3)
    reductions.check_slots(np.asarray(SEGMENTS), 3)
    jax.jit(lambda s: reductions.check_slots(s, 2))(SEGMENTS)  # unreadable, so not refused
