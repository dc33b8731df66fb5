"""KL estimators: the reference's table, torch's derivatives on the clamps, and overflow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.core import kl

X = (-1.0, -2.0, -30.0, -1.0)
X_REF = (-1.5, -1.0, -1.0, -40.0)
TABLE = {
    "k1": ((0.5, -1.0, -10.0, 10.0), (1.0, 1.0, 0.0, 0.0)),
    "k2": ((0.125, 0.5, 10.0, 10.0), (0.5, -1.0, 0.0, 0.0)),
    "k3": (
        (np.exp(-0.5) - 0.5, np.e - 2.0, 10.0, 10.0),
        (1 - np.exp(-0.5), 1 - np.e, 0.0, 0.0),
    ),
}


def grad_of(x, ref, **options):
    return jax.grad(lambda v: jnp.sum(kl.calculate_kl(v, jnp.asarray(ref), **options)))(
        jnp.asarray(x)
    )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kl_type", TABLE)
def test_values_and_gradients_of_the_table(kl_type):
    values, slopes = TABLE[kl_type]
    found = kl.calculate_kl(jnp.asarray(X), jnp.asarray(X_REF), kl_type)
    np.testing.assert_allclose(found, values, rtol=1e-12)
    np.testing.assert_allclose(grad_of(X, X_REF, kl_type=kl_type), slopes, atol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kl_type", TABLE)
def test_the_weight_adds_the_score_function_term(kl_type):
    """With w = e^(c − sg(c)): k1 gives 1 + k, k2 gives −d + d²/2, k3 gives −d; clamped gives 0."""
    x, ref = jnp.asarray(X), jnp.asarray(X_REF)
    d = np.asarray(ref - x)

    def weighted(v):
        return jnp.sum(
            kl.calculate_kl(v, ref, kl_type, weights=jnp.exp(v - jax.lax.stop_gradient(v)))
        )

    wanted = {"k1": 1 - d, "k2": -d + d**2 / 2, "k3": -d}[kl_type]
    wanted[2:] = 0  # both clamps are active there
    np.testing.assert_allclose(jax.grad(weighted)(x), wanted, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_derivative_is_one_on_a_clamp_and_zero_beyond():
    # d = 2 is exactly on the input clamp, k1 = −2 exactly on the output clamp.
    on = grad_of([-3.0, 1.0], [-1.0, -1.0], kl_type="k1", input_clamp=2.0, output_clamp=2.0)
    np.testing.assert_array_equal(on, [1.0, 1.0])
    beyond = grad_of([-3.25], [-1.0], kl_type="k1", input_clamp=2.0, output_clamp=None)
    np.testing.assert_array_equal(beyond, [0.0])


@pytest.mark.usefixtures("x64")
def test_an_active_input_clamp_cuts_the_gradient_of_the_weight():
    def of_weight(w):
        return jnp.sum(
            kl.calculate_kl(
                jnp.asarray([-1.0, -5.0]), jnp.asarray([-2.0, -1.0]), "k1",
                input_clamp=3.0, output_clamp=None, weights=w,
            )
        )  # fmt: skip

    np.testing.assert_allclose(jax.grad(of_weight)(jnp.asarray([2.0, 2.0])), [1.0, 0.0])


def test_without_clamps_the_largest_gap_stays_finite_in_float32():
    x, ref = jnp.asarray([-1e4, -300.0], jnp.float32), jnp.asarray([-1.0, -1.0], jnp.float32)
    options = {"input_clamp": None, "output_clamp": None}
    assert np.isfinite(kl.calculate_kl(x, ref, "k3", **options)).all()
    assert np.isfinite(grad_of(x, ref, kl_type="k3", **options)).all()


def test_faults_stay_visible():
    x = jnp.asarray([jnp.nan, -1.0])
    found = kl.calculate_kl(x, jnp.asarray([-1.0, jnp.nan]), "k3")
    assert np.isnan(found).all()


@pytest.mark.parametrize("name", ["k4", "", "low_var_kl", "reverse"])
def test_unknown_estimators_are_refused_with_the_list(name):
    with pytest.raises(ValueError, match="use one of k1, k2, k3"):
        kl.calculate_kl(jnp.zeros(1), jnp.zeros(1), name)


@pytest.mark.parametrize("kl_type", TABLE)
@pytest.mark.parametrize("clamp", [1e30, jnp.float32(1e30), 3e38])
def test_clamps_beyond_what_float32_can_bear_keep_everything_finite(kl_type, clamp):
    """A clamp of 1e30 squared is infinite; as good as no clamp, it is held to the type's bounds."""
    x, ref = jnp.asarray([-1e20, -1.0, -2.0], jnp.float32), jnp.asarray([-1.0, -3e38, -2.5])
    for options in (
        {"input_clamp": clamp, "output_clamp": clamp},
        {"input_clamp": clamp, "output_clamp": 10.0},
        {"input_clamp": clamp, "output_clamp": None},
    ):

        def total(v, weights, options=options):
            found = kl.calculate_kl(v, ref, kl_type, weights=weights, **options)
            return jnp.sum(found), found

        for weights in (None, jnp.asarray([1e38, 1e38, 1.0])):
            grads, found = jax.grad(total, has_aux=True)(x, weights)
            assert np.isfinite(found).all() and np.isfinite(grads).all()
            assert found[2] != 0 and grads[2] != 0
