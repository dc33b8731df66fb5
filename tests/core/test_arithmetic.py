"""Series and logarithms of `arithmetic` against longer arithmetic."""

import jax
import numpy as np
import pytest

from grpo_jax.core import arithmetic

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_log1p_keeps_what_rounding_takes_from_one_plus_x(dtype):
    """Within 2 units in the last place, of which the logarithm itself uses one; compiled, since a
    compiler that takes (1 + x) − 1 for x would undo it."""
    x = np.concatenate([[0.0], 10.0 ** np.linspace(-30, 30, 6001)]).astype(dtype)
    wanted = np.log1p(x.astype(np.longdouble))
    np.testing.assert_allclose(jax.jit(arithmetic.log1p)(x), wanted, rtol=2 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_k3_both_ways_and_its_parts_are_exact_to_rounding(dtype):
    """A handful of roundings, each half a unit, also where series and plain form meet (±1/4)."""
    x = np.linspace(-0.25, 0.25, 4001).astype(dtype)
    x = x[np.abs(x) > 1e-3]
    powers = np.arange(2, 20, dtype=np.longdouble)
    factorials = np.cumprod(np.arange(1, 20, dtype=np.longdouble))[1:]

    def series(x):
        return np.sum(x[:, None] ** powers / factorials, axis=1)

    up, down, above, below, apart = jax.jit(arithmetic.both_ways)(x)
    wide, tolerance = x.astype(np.longdouble), 4 * np.finfo(dtype).eps
    for found, wanted in (
        (up, np.exp(wide)),
        (down, np.exp(-wide)),
        (above, series(wide)),
        (below, series(-wide)),
        (apart, (series(wide) + series(-wide)) / 2),
        (jax.jit(arithmetic.exp_beyond_line)(x), series(wide)),
    ):
        np.testing.assert_allclose(found, wanted, rtol=tolerance)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_step_on_the_way_is_nan_for_a_large_argument(dtype):
    """One operation at a time: powers in a series would be ∞ − ∞, though nothing uses them."""
    most = float(np.finfo(dtype).max)
    x = np.asarray([-most, -1e9, -1e5, 0.1, 1e5, 1e9, most], dtype)
    with jax.debug_nans(True):
        assert all(np.isfinite(part).all() for part in arithmetic.both_ways(jax.numpy.asarray(x)))
        slope = jax.vmap(jax.grad(arithmetic.exp_beyond_line))(jax.numpy.asarray(x))
    assert np.isfinite(slope).all()
