"""Objectives and gates beyond the reference, each against its equation in float64 numpy.

Value and gradient of the whole loss. The numpy side walks sequences and tokens in plain loops and
knows nothing of the code under test; its gradient is a central difference (step 1e-6, so good to
some 1e-9 of values of order one).
"""

import jax.numpy as jnp
import numpy as np
import pytest
from loss_cases import evaluate_small, random_case

from grpo_jax.core.loss_config import LossConfig

pytestmark = pytest.mark.usefixtures("x64")

LOW, HIGH = 0.1, 0.15  # clip bounds that some of the ratios below exceed


class Case:
    """Rows of numpy arrays, and what the reductions need."""

    def __init__(self, seed):
        scores, batch = random_case(seed, support=False)
        self.scores, self.batch = scores, batch
        self.current = np.asarray(scores.logprobs)
        self.previous = np.asarray(batch.prev_logprobs)
        self.generation = np.asarray(batch.generation_logprobs)
        self.advantages = np.asarray(batch.advantages)
        self.mask = np.asarray(batch.token_mask)
        self.row_weights = np.asarray(batch.sample_weights)[:, 0]
        self.entropy = np.asarray(scores.entropy)

    def reduce(self, per_token, reduction, keep=None):
        """Σ over tokens over N_tok, or the mean of means over N_seq; dropped rows stay in N."""
        total, tokens, sequences = 0.0, 0.0, 0.0
        for i, weight in enumerate(self.row_weights):
            on = self.mask[i]
            tokens, sequences = tokens + weight * on.sum(), sequences + weight
            kept = weight if keep is None else weight * keep[i]
            if reduction == "token":
                total += kept * per_token[i][on].sum()
            elif reduction == "sequence":
                total += kept * per_token[i][on].mean()
            else:  # Dr. GRPO with L = 5
                total += kept * per_token[i][on].sum() / 5.0
        return total / (tokens if reduction == "token" else sequences)

    def log_weight(self, i):
        return (self.previous[i] - self.generation[i])[self.mask[i]]


def ppo(case, current):
    ratio = np.exp(current - case.previous)
    clipped = np.clip(ratio, 1 - LOW, 1 + HIGH)
    return np.maximum(-case.advantages * ratio, -case.advantages * clipped)


def sapo(case, current, reduction):
    """−A (4/τ) σ(τ(ρ − 1))."""
    tau = np.where(case.advantages > 0, 0.8, 1.3)
    gate = 4 / tau / (1 + np.exp(-tau * (np.exp(current - case.previous) - 1)))
    return case.reduce(-case.advantages * gate, reduction)


def gmpo(case, current, reduction):
    """−A (Π ρ')^(1/n), ρ' clipped from the side that A pushes to."""
    ratio, loss = np.exp(current - case.previous), np.zeros_like(current)
    for i, on in enumerate(case.mask):
        advantage = case.advantages[i, 0]
        bounded = np.minimum(ratio[i], 1 + HIGH) if advantage > 0 else np.maximum(ratio[i], 1 - LOW)
        loss[i] = -advantage * np.prod(bounded[on]) ** (1 / on.sum())
    return case.reduce(loss, reduction)


def geo_rs(case, current, reduction):
    """Rows whose (Π v)^(1/n) is outside [0.97, 1.03] are dropped, others are not weighted."""
    means = [np.prod(np.exp(case.log_weight(i))) ** (1 / case.mask[i].sum()) for i in range(4)]
    keep = [0.97 <= mean <= 1.03 for mean in means]
    assert 0 < sum(keep) < 4
    return case.reduce(ppo(case, current), reduction, keep)


def product_rs(case, current, reduction):
    """The same with Π v in [0.9, 1.2]."""
    keep = [0.9 <= np.prod(np.exp(case.log_weight(i))) <= 1.2 for i in range(4)]
    assert 0 < sum(keep) < 4
    return case.reduce(ppo(case, current), reduction, keep)


def veto(case, current, reduction):
    """Rows with any v below 0.75 are dropped, others keep their v as a weight."""
    keep = [np.exp(case.log_weight(i)).min() >= 0.75 for i in range(4)]
    assert 0 < sum(keep) < 4
    weights = np.exp(case.previous - case.generation)
    return case.reduce(weights * ppo(case, current), reduction, keep)


def entropy_bonus(case, current, reduction):
    """PPO − 0.3 H."""
    return case.reduce(ppo(case, current) - 0.3 * case.entropy, reduction)


def dr_grpo(case, current, reduction):
    return case.reduce(ppo(case, current), reduction)


CLIP = {"ratio_clip_min": LOW, "ratio_clip_max": HIGH, "reference_policy_kl_penalty": 0.0}
IS = {"use_importance_sampling_correction": True}


def gate(kind, low, high):
    return IS | {
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio_min": low,
        "truncated_importance_sampling_ratio": high,
    }


SAPO = {
    "objective": "sapo",
    "sapo_temperature_positive": 0.8,
    "sapo_temperature_negative": 1.3,
}
EXTRAS = {
    "sapo": (sapo, SAPO),
    "gmpo": (gmpo, {"objective": "gmpo"}),
    "geo-rs": (geo_rs, gate("geo-rs", 0.97, 1.03)),
    "product-rs": (product_rs, gate("product-rs", 0.9, 1.2)),
    "veto": (veto, IS | {"token_veto_threshold": 0.75}),
    "entropy": (entropy_bonus, {"entropy_bonus": 0.3}),
    "ppo": (dr_grpo, {}),
}
REDUCTIONS = {
    "token": {},
    "sequence": {"token_level_loss": False},
    "dr_grpo": {"token_level_loss": False, "loss_normalizer": 5.0},
}


def difference(function, current, step=1e-6):
    """Central differences of a function of one array."""
    grad = np.zeros_like(current)
    for at in np.ndindex(*current.shape):
        up, down = current.copy(), current.copy()
        up[at] += step
        down[at] -= step
        grad[at] = (function(up) - function(down)) / (2 * step)
    return grad


LEGAL = [  # gmpo is one ratio a response: with the token mean it is refused
    (name, reduction) for name in EXTRAS for reduction in REDUCTIONS
    if (name, reduction) != ("gmpo", "token")
]  # fmt: skip


@pytest.mark.parametrize(("name", "reduction"), LEGAL)
def test_value_and_gradient_are_those_of_the_equation(name, reduction):
    written, options = EXTRAS[name]
    case = Case(3)  # where every gate keeps some weighted rows and drops another
    config = LossConfig(**CLIP, **options, **REDUCTIONS[reduction])
    loss, grads, _ = evaluate_small(case.scores, case.batch, config)
    np.testing.assert_allclose(loss, written(case, case.current, reduction), rtol=1e-7)
    wanted = difference(lambda c: written(case, c, reduction), case.current)
    np.testing.assert_allclose(grads.logprobs, wanted, atol=1e-8)
    assert np.abs(wanted).max() > 1e-2
    if name == "entropy":
        entropy = jnp.asarray(case.mask * case.row_weights[:, None])
        share = -0.3 * entropy / entropy.sum()
        if reduction == "token":
            np.testing.assert_allclose(grads.entropy, share, atol=1e-9)
