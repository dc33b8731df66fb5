"""The critic of `gae`: the policy's trunk with a value head, trained beside the policy.

    V_t = ⟨w, h_{t−1}⟩ + b          h_{t−1}: the trunk's last hidden state before token t

A critic begins as a copy of the policy's trunk, with w = 0 and b = 0, so its first values are 0 and
the first advantages are rewards to go. It has parameters, moments and a schedule of its own, held
as a train state inside the policy's (`TrainState.critic`). No temperature divides its values.

Symbols: `B` rows, `T` tokens a row, `D` width.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.core import logprobs, value_loss
from grpo_jax.core.batch import Batch, Counts
from grpo_jax.core.policy import Params, Policy
from grpo_jax.core.value_loss import ValueLossConfig
from grpo_jax.models.work import Work
from grpo_jax.train import micro_batches as micro_batching
from grpo_jax.train import step as steps
from grpo_jax.train.micro_batches import Cut, Metrics
from grpo_jax.train.optimizer import Optimizer, OptimizerConfig
from grpo_jax.train.state import Placement, TrainState
from grpo_jax.train.step import ScoreStep, TrainStep


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """The critic of the estimator gae: how it is trained, and for how long alone."""

    warmup_steps: int = 0  # first steps of the run in which only the critic is trained
    value_loss: ValueLossConfig = ValueLossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()

    def __post_init__(self):
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps = {self.warmup_steps} must be at least 0")


class Critic(NamedTuple):
    """A critic, built."""

    score: ScoreStep  # (params, batch) -> values f32[B, T]
    step: TrainStep
    work: Work  # of the step, for a token
    warmup_steps: int


def init_params(trunk: Params, width: int) -> Params:
    """Parameters of a critic over a trunk whose hidden states have `width` numbers."""
    head = {"kernel": jnp.zeros((width,), jnp.float32), "bias": jnp.zeros((), jnp.float32)}
    return {"trunk": trunk, "value_head": head}


def values(trunk: Policy, params: Params, batch: Batch) -> jax.Array:
    """Value of the state before each trained token, f32[B, T] (or wider); 0 at every other token.

    The head works in float32, whatever the trunk computes in.
    """
    states = trunk.hidden(params["trunk"], batch.tokens, batch.positions, batch.segment_ids)
    states = states.astype(jnp.promote_types(states.dtype, jnp.float32))
    wanted = logprobs.has_predecessor(batch.segment_ids) & (batch.token_mask != 0)
    before = jnp.where(wanted[..., None], logprobs.previous(states), 0)
    head = params["value_head"]
    return jnp.where(wanted, before @ head["kernel"] + head["bias"], 0)


def make_value_step(
    trunk: Policy, *, micro_batches: Cut = 1, places: Placement | None = None
) -> ScoreStep:
    """Compile the values of a batch under given parameters, without gradients.

    Args:
      trunk: a policy, of which only the hidden states are used.
      micro_batches: into how many parts the rows are cut.
      places: `state.placement(...)` of the critic's state; None: everything on one device.

    Returns:
      `(params, batch) -> f32[B, T]`, see `values`.
    """
    trunk = steps.rows_stay(trunk, None if places is None else places.mesh)

    def score(params: Params, batch: Batch) -> jax.Array:
        return values(trunk, params, batch)

    return steps.compile_score(score, micro_batches, places)


def make_critic_step(
    trunk: Policy,
    optimizer: Optimizer,
    config: ValueLossConfig,
    *,
    micro_batches: Cut = 1,
    places: Placement | None = None,
) -> TrainStep:
    """Compile one optimizer update of the critic.

    Args:
      trunk: a policy, of which only the hidden states are used.
      optimizer: its transformation sees the gradient of the whole batch, once.
      config: the loss.
      micro_batches: into how many parts the rows are cut; bounds the memory, not the result.
      places: `state.placement(...)` of the critic's state; None: everything on one device.

    Returns:
      `(state, batch, counts) -> (state, metrics)`; the state is donated. An update whose loss or
      gradient is not finite, or that has no trained token, changes nothing but the counters.
      Metrics are f32[]: those of `value_loss` and of `step.apply_gradient`.
    """
    trunk = steps.rows_stay(trunk, None if places is None else places.mesh)

    def loss_of(params: Params, batch: Batch, counts: Counts) -> tuple[jax.Array, Metrics]:
        return value_loss.value_loss(values(trunk, params, batch), batch, counts, config)

    def add_up(stacked: Metrics) -> Metrics:
        return {name: jnp.sum(x, axis=0) for name, x in stacked.items()}

    gradient = micro_batching.summed_gradient(loss_of, micro_batches, places, add_up)

    def step(state: TrainState, batch: Batch, counts: Counts) -> tuple[TrainState, Metrics]:
        loss, grads, metrics = gradient(state.params, batch, counts)
        metrics |= {"gradient_scale": jnp.ones(())}  # nothing is dropped
        state, applied = steps.apply_gradient(state, loss, grads, metrics, counts, optimizer)
        return state, metrics | applied

    return steps.compile_step(step, places)


def report(merged: Mapping[str, float]) -> dict[str, float]:
    """Name the merged metrics of a step's updates; counts that the policy reports are left out."""
    left_out = ("tokens", "sequences", "gradient_scale")
    return {f"critic/{k}": v for k, v in merged.items() if k not in left_out}
