"""What each token contributes to the policy-gradient loss: one small function per objective.

A surrogate turns log-ratios, log-probabilities and advantages into a loss per token, before any
weight or reduction. A new one is a function here and a line in `SURROGATES`.

Symbols: c current log-probability, p previous one, l = c − p, ρ = e^l, A advantage,
`B` rows, `T` tokens a row.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from grpo_jax.core import arithmetic
from grpo_jax.core.loss_config import LossConfig


class View(NamedTuple):
    """What a surrogate may look at. Everything is sanitised: finite outside the mask."""

    log_ratio: Float[Array, "B T"]  # nats; already the mean over the response under GSPO
    logprobs: Float[Array, "B T"]  # nats, current policy, differentiable
    advantages: Float[Array, "B T"]
    sequence_mean: Callable[[Array], Array]  # f32[B, T] -> each token's response mean, f32[B, T]


class Terms(NamedTuple):
    """What a surrogate says of each token."""

    loss: Float[Array, "B T"]
    ratio: Float[Array, "B T"]  # for the metrics; the log-probability under REINFORCE
    clipped: Float[Array, "B T"]  # the ratio after its clip


def interval(config: LossConfig) -> tuple[Array | float, Array | float]:
    """Bounds of the clipped ratio."""
    return 1.0 - config.ratio_clip_min, 1.0 + config.ratio_clip_max


def _dual_clip(loss: Array, advantages: Array, config: LossConfig) -> Array:
    """Bound the loss of negative advantages.

        A < 0:  min(loss, −A·k)

    Source: Ye et al. 2019, "Mastering Complex Control in MOBA Games", arXiv:1912.09729.
    """
    if config.ratio_clip_c is None:
        return loss
    # jnp.minimum splits a tie in halves, as torch does.
    bounded = jnp.minimum(loss, -advantages * config.ratio_clip_c)
    return jnp.where(advantages < 0, bounded, loss)


def ppo(view: View, config: LossConfig) -> Terms:
    """Clipped ratio: PPO, GRPO, DAPO, and GSPO when `log_ratio` is a response mean.

        ρ = e^min(l, cap),  ρ_c = clip(ρ, 1 − ε_min, 1 + ε_max),  loss = max(−A ρ, −A ρ_c)

    Source: Schulman et al. 2017, arXiv:1707.06347; asymmetric bounds: Yu et al. 2025 (DAPO),
    arXiv:2503.14476; response ratios: Zheng et al. 2025 (GSPO), arXiv:2507.18071.
    """
    ratio = arithmetic.capped_exp(view.log_ratio, config.log_ratio_cap)
    clipped = arithmetic.clip_through(ratio, *interval(config))
    plain, bounded = -view.advantages * ratio, -view.advantages * clipped
    # On a tie both branches have the same derivative, so taking one equals torch's two halves.
    loss = jnp.where(plain >= bounded, plain, bounded)
    return Terms(_dual_clip(loss, view.advantages, config), ratio, clipped)


def on_policy(view: View, config: LossConfig) -> Terms:
    """Ratio exactly 1 with the gradient of log p; clips have nothing to do.

    ρ = e^(c − sg(c)),  loss = −A ρ
    """
    del config  # neither bound can be reached by 1
    ratio = jnp.exp(view.logprobs - jax.lax.stop_gradient(view.logprobs))
    return Terms(-view.advantages * ratio, ratio, ratio)


def reinforce(view: View, config: LossConfig) -> Terms:
    """Plain policy gradient, also RLOO with its advantages:  loss = −A c.

    Source: Williams 1992; Ahmadian et al. 2024 (RLOO), arXiv:2402.14740.
    """
    logprobs = arithmetic.bound(view.logprobs)
    loss = _dual_clip(-view.advantages * logprobs, view.advantages, config)
    return Terms(loss, logprobs, logprobs)


def cispo(view: View, config: LossConfig) -> Terms:
    """The clipped ratio as a constant weight.

        loss = −A · sg(clip(ρ, 1 − ε_min, 1 + ε_max)) · c

    Tokens outside the interval keep their gradient. Source: MiniMax-M1 2025, arXiv:2506.13585.
    """
    ratio = arithmetic.capped_exp(view.log_ratio, config.log_ratio_cap)
    clipped = arithmetic.clip_through(ratio, *interval(config))
    weight = -view.advantages * jax.lax.stop_gradient(clipped)
    return Terms(weight * arithmetic.bound(view.logprobs), ratio, clipped)


def sapo(view: View, config: LossConfig) -> Terms:
    """Soft gate in place of the hard clip.

        loss = −A · (4/τ) σ(τ (ρ − 1)),   τ = τ_pos where A > 0, τ_neg elsewhere

    At ρ = 1 the gradient is that of PPO; away from it the weight 4 σ(1 − σ) falls off smoothly.
    Source: Gao et al. 2025, "Soft Adaptive Policy Optimization", arXiv:2511.20347.
    """
    ratio = arithmetic.capped_exp(view.log_ratio, config.log_ratio_cap)
    temperature = jnp.where(
        view.advantages > 0, config.sapo_temperature_positive, config.sapo_temperature_negative
    )
    gate = 4.0 / temperature * jax.nn.sigmoid(temperature * (ratio - 1.0))
    return Terms(-view.advantages * gate, ratio, ratio)


def gmpo(view: View, config: LossConfig) -> Terms:
    """Geometric mean of clipped token ratios.

        l' = min(l, log(1 + ε_max)) where A > 0,  max(l, log(1 − ε_min)) elsewhere
        loss = −A · exp(mean over the response of l')

    Source: Zhao et al. 2025, "Geometric-Mean Policy Optimization", arXiv:2507.20673, algorithm 1,
    with its ε expressed by the clip interval of this config.
    """
    low, high = jnp.log1p(-config.ratio_clip_min), jnp.log1p(config.ratio_clip_max)
    log_ratio = arithmetic.bound(view.log_ratio)
    clipped = jnp.where(
        view.advantages > 0,
        arithmetic.clip_through(log_ratio, -jnp.inf, high),
        arithmetic.clip_through(log_ratio, low, jnp.inf),
    )
    cap = config.log_ratio_cap
    geometric = arithmetic.capped_exp(view.sequence_mean(clipped), cap)
    unclipped = arithmetic.capped_exp(view.sequence_mean(jax.lax.stop_gradient(log_ratio)), cap)
    return Terms(-view.advantages * geometric, unclipped, geometric)


SURROGATES: dict[str, Callable[[View, LossConfig], Terms]] = {
    "ppo": ppo,
    "on_policy": on_policy,
    "reinforce": reinforce,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
}

CLIPPED = ("ppo", "cispo")
"""Surrogates whose clipped ratio is `clip(ratio, *interval(config))`."""
