"""Estimators with one advantage a token: values, degenerate masks, support, invariances."""

import numpy as np
import pytest

from grpo_jax.core import advantages, estimators_token
from grpo_jax.core.advantages import AdvantageConfig, AdvantageInputs

RNG = np.random.default_rng(0)
MASK = np.array([[0, 1, 1, 0, 1], [0, 0, 1, 1, 0], [0, 1, 0, 0, 0], [0, 1, 1, 1, 1]])
ROWS, WIDTH = MASK.shape
GROUPS = np.array([0, 0, 1, 1])
ARRAYS = dict(
    policy_logprobs=-RNG.random((ROWS, WIDTH)),
    reference_logprobs=-RNG.random((ROWS, WIDTH)),
    teacher_logprobs=-RNG.random((ROWS, WIDTH)),
    values=RNG.normal(size=(ROWS, WIDTH)),
)
REWARDS = np.array([1, 0, 0.5, 2])
CONFIGS = {
    "reinforce_plus_plus": dict(estimator="reinforce_plus_plus", kl_in_reward=0.1),
    "without_baseline": dict(estimator="reinforce_plus_plus", minus_baseline=False),
    "gae": dict(estimator="gae", kl_in_reward=0.1, kl_in_reward_type="k1"),
    "gae_decoupled": dict(estimator="gae", gae_lambda_value=1.0, length_adaptive_alpha=0.5),
    "opd": dict(estimator="opd", proximal_teacher_alpha=0.5, subtract_global_baseline=True),
    "raw": dict(estimator="raw"),
}
every = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def compute(config, mask=MASK, rewards=REWARDS, groups=GROUPS, all_sum=np.asarray, **arrays):
    inputs = AdvantageInputs(rewards, groups, mask=mask, **{**ARRAYS, **arrays})
    return advantages.compute(AdvantageConfig(**config), inputs, all_sum=all_sum)


def gae(rewards, mask, values, **config):
    inputs = AdvantageInputs(
        rewards=np.asarray(rewards, float),
        groups=np.zeros(1, int),
        mask=np.array([mask]),
        values=np.array([values]),
    )
    plain = AdvantageConfig(estimator="gae", normalize_advantages=False, **config)
    return advantages.compute(plain, inputs)


# --- values ----------------------------------------------------------------------------------


def test_gae_values():
    out = gae([1], [0, 1, 1, 0, 1], [0.9, 0.1, 0.2, 0.7, 0.4])
    np.testing.assert_allclose(out.advantages, [[0, 0.8315, 0.77, 0, 0.6]], rtol=1e-12)
    np.testing.assert_allclose(out.returns, [[1.7315, 0.9315, 0.97, 1.3, 1.0]], rtol=1e-12)


def test_a20_returns_cross_observations():
    # With λ = 1 and no values, GAE is the discounted return; the tool's tokens are transparent.
    out = gae([1], [1, 1, 0, 0, 1], [0.0] * 5, gae_gamma=0.9, gae_lambda=1.0)
    np.testing.assert_allclose(out.advantages, [[0.81, 0.9, 0, 0, 1]], rtol=1e-12)


def test_a20_reinforce_plus_plus_credits_tokens_before_a_tool_call():
    mask = np.array([[1, 1, 0, 0, 1], [1, 1, 1, 1, 1]])
    config = AdvantageConfig(estimator="reinforce_plus_plus")
    inputs = AdvantageInputs(np.array([1.0, 0.0]), np.zeros(2, int), mask=mask)
    out = advantages.compute(config, inputs).advantages
    assert (out[0] == out[0, 0]).all() and out[0, 0] > 0


def test_length_adaptive_decay():
    mask = np.zeros((2, 100), int)
    mask[0, :20] = mask[1] = 1
    np.testing.assert_allclose(estimators_token.length_adaptive_decay(mask, 0.05), [0, 0.8])


def test_decoupled_decays_reach_their_own_output():
    a = compute(dict(estimator="gae", normalize_advantages=False))
    b = compute(dict(estimator="gae", normalize_advantages=False, gae_lambda_value=0.5))
    c = compute(dict(estimator="gae", normalize_advantages=False, gae_lambda_policy=0.5))
    np.testing.assert_array_equal(a.advantages, b.advantages)
    np.testing.assert_array_equal(a.returns, c.returns)
    assert not np.allclose(a.returns, b.returns) and not np.allclose(a.advantages, c.advantages)


def test_reinforce_plus_plus_is_white_over_trained_tokens():
    out = compute(CONFIGS["reinforce_plus_plus"]).advantages[MASK != 0]
    assert out.mean() == pytest.approx(0, abs=1e-12)
    assert out.var() == pytest.approx(1)


def test_raw_without_whitening_is_the_reward():
    out = compute(dict(estimator="raw", normalize_advantages=False))
    np.testing.assert_array_equal(out.advantages, np.tile(REWARDS[:, None], (1, WIDTH)))
    assert out.returns is None


def test_opd_is_the_gap_and_its_mixture_is_bounded():
    plain = compute(dict(estimator="opd"))
    gap = (ARRAYS["teacher_logprobs"] - ARRAYS["policy_logprobs"]) * MASK
    np.testing.assert_allclose(plain.advantages, gap, rtol=1e-12)
    bounded = compute(
        dict(estimator="opd", proximal_teacher_alpha=0.9),
        teacher_logprobs=np.full((ROWS, WIDTH), -np.inf),
    )
    np.testing.assert_allclose(bounded.advantages[MASK != 0], np.log1p(-0.9), rtol=1e-12)


def test_opd_global_baseline_leaves_mean_zero_and_the_raw_gap():
    name = "on_policy_distillation/teacher_student_logprob_gap_mean"
    plain = compute(dict(estimator="opd"))
    centred = compute(dict(estimator="opd", subtract_global_baseline=True))
    assert centred.metrics["on_policy_distillation/adv_mean"] == pytest.approx(0, abs=1e-15)
    assert centred.metrics[name] == plain.metrics[name] != 0
    assert (centred.advantages[MASK == 0] == 0).all()


def test_opd_pads_a_short_teacher_and_refuses_a_long_one():
    mask = MASK * np.array([1, 1, 1, 1, 0])
    teacher = ARRAYS["teacher_logprobs"]
    short = compute(dict(estimator="opd"), mask=mask, teacher_logprobs=teacher[:, :4])
    whole = compute(dict(estimator="opd"), mask=mask)
    np.testing.assert_array_equal(short.advantages, whole.advantages)
    with pytest.raises(ValueError, match="6 columns, the student has 5"):
        compute(dict(estimator="opd"), teacher_logprobs=np.zeros((ROWS, 6)))


def test_opd_refuses_a_teacher_that_rules_tokens_out():
    teacher = np.where(np.arange(WIDTH) == 1, -np.inf, ARRAYS["teacher_logprobs"])
    with pytest.raises(ValueError, match="without top-k/top-p, or set proximal_teacher_alpha"):
        compute(dict(estimator="opd"), teacher_logprobs=teacher)


@pytest.mark.parametrize(
    "estimator, name",
    [
        ("opd", "teacher_logprobs"),
        ("opd", "policy_logprobs"),
        ("gae", "values"),
        ("reinforce_plus_plus", "reference_logprobs"),
        ("raw", "mask"),
    ],
)
def test_missing_inputs_are_named(estimator, name):
    with pytest.raises(ValueError, match=f"estimator '{estimator}' needs {name}"):
        compute(dict(estimator=estimator, kl_in_reward=0.1), **{name: None})


# --- degenerate masks ------------------------------------------------------------------------


@every
@pytest.mark.parametrize("trained", [0, 1])
def test_an_almost_empty_mask_gives_finite_numbers(config, trained):
    mask = np.zeros_like(MASK)
    mask[0, 1] = trained
    out = compute(config, mask=mask)
    assert np.isfinite(out.advantages).all()
    assert all(np.isfinite(value) for value in out.metrics.values())


def test_constant_rewards_give_zero():
    out = compute(dict(estimator="reinforce_plus_plus"), rewards=np.full(ROWS, 0.3))
    np.testing.assert_array_equal(out.advantages, 0)


def test_a_row_without_trained_tokens_gets_no_reward():
    placed = estimators_token.place_at_end(np.ones(2), np.array([[0, 1, 0], [0, 0, 0]]))
    np.testing.assert_array_equal(placed, [[0, 1, 0], [0, 0, 0]])


# --- tokens outside the support of the policy ------------------------------------------------


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "gae"])
def test_a_token_outside_the_support_carries_no_kl(estimator, kl_type):
    config = dict(estimator=estimator, kl_in_reward=0.1, kl_in_reward_type=kl_type)
    policy = ARRAYS["policy_logprobs"].copy()
    policy[0, 2] = -np.inf
    equal = np.where(np.isinf(policy), ARRAYS["reference_logprobs"], policy)
    out = compute(config, policy_logprobs=policy).advantages
    np.testing.assert_array_equal(out, compute(config, policy_logprobs=equal).advantages)


@pytest.mark.parametrize("alpha, baseline", [(1.0, False), (0.4, True)])
def test_opd_narrows_its_mask_to_the_support(alpha, baseline):
    config = dict(estimator="opd", proximal_teacher_alpha=alpha, subtract_global_baseline=baseline)
    policy = ARRAYS["policy_logprobs"].copy()
    policy[0, 2] = -np.inf
    out = compute(config, policy_logprobs=policy)
    narrowed = compute(config, mask=MASK * np.isfinite(policy))
    np.testing.assert_array_equal(out.advantages, narrowed.advantages)
    assert out.metrics == narrowed.metrics
    nothing = compute(config, policy_logprobs=np.full((ROWS, WIDTH), -np.inf))
    assert set(nothing.metrics.values()) == {0.0} and (nothing.advantages == 0).all()


# --- invariances -----------------------------------------------------------------------------


@every
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_nothing_outside_the_mask_leaks_in(config, poison):
    bad = {k: np.where(MASK != 0, x, poison) for k, x in ARRAYS.items()}
    out, clean = compute(config, **bad), compute(config)
    np.testing.assert_array_equal(out.advantages[MASK != 0], clean.advantages[MASK != 0])
    if out.returns is not None and clean.returns is not None:
        np.testing.assert_array_equal(out.returns[MASK != 0], clean.returns[MASK != 0])


@every
def test_row_order_and_padding_change_nothing(config):
    order = np.array([2, 0, 3, 1])
    arrays = {k: np.pad(x[order], ((0, 0), (0, 3))) for k, x in ARRAYS.items()}
    mask = np.pad(MASK[order], ((0, 0), (0, 3)))
    out = compute(config, mask=mask, rewards=REWARDS[order], groups=GROUPS[order], **arrays)
    clean = compute(config).advantages[order]
    keep = MASK[order] != 0
    np.testing.assert_allclose(out.advantages[:, :WIDTH][keep], clean[keep], rtol=1e-11)


def test_explained_variance_of_a_critic():
    """1 for a perfect one, 0 for the best constant, below 0 for a misleading one; weights count."""
    returns = RNG.normal(size=MASK.shape)
    mask = MASK * np.array([1.0, 0.5, 2.0, 1.0])[:, None]

    def fit(values, mask=mask):
        return estimators_token.value_fit(values, returns, mask, np.asarray)

    outside = np.where(MASK != 0, 0, np.nan)
    assert fit(returns + outside)["critic/explained_var"] == pytest.approx(1)
    assert fit(np.full(MASK.shape, 3.0))["critic/explained_var"] == pytest.approx(0)
    assert fit(-returns)["critic/explained_var"] == pytest.approx(-3)
    values = RNG.normal(size=MASK.shape)
    m = mask / mask.sum()
    mean = lambda x: (m * x).sum()  # noqa: E731
    variance = lambda x: mean(x**2) - mean(x) ** 2  # noqa: E731  as the reference has it
    found = fit(values)
    expected = 1 - variance(returns - values) / variance(returns)
    assert found["critic/explained_var"] == pytest.approx(expected)
    assert found["critic/returns_mean"] == pytest.approx(mean(returns))
    assert found["critic/values_mean"] == pytest.approx(mean(values))
    assert set(fit(values, np.zeros(MASK.shape)).values()) == {0.0}
    constant = estimators_token.value_fit(
        np.ones((1, 2)), np.ones((1, 2)), np.ones((1, 2)), np.asarray
    )
    assert constant["critic/explained_var"] == 1  # no variance, and none left
