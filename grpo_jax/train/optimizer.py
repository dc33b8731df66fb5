"""AdamW with a global-norm clip and a learning-rate schedule, built from one small config.

The schedule counts *optimizer updates that were applied*: not rollouts, not micro-batches, not
evaluations. An update that the train step skips does not move it. The count is part of the
optimizer state, so that a resumed run goes on where it stopped.

With `k` the number of updates so far, `W` the updates of warm-up and `N` the updates of the run:

    k < W:   lr · (s + (1 − s) · k/W)                    s = warmup_start
    k ≥ W:   constant  lr
             linear    lr · (1 − (1 − e) · x)            x = min(1, (k − W)/(N − W)),  e = end
             cosine    lr · (e + (1 − e) · (1 + cos πx)/2)
"""

import dataclasses
import math
import re
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax.scale import rules


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, its schedule, and the clip."""

    lr: float = 5e-6  # the learning rate after warm-up
    betas: tuple[float, float] = (0.9, 0.999)  # decay of the first and second moments
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.01  # decoupled; a weight shrinks by lr × weight_decay an update
    no_decay: tuple[str, ...] = ()  # regular expressions on parameter paths without weight decay
    max_grad_norm: float | None = 1.0  # L2 over all parameters; null does not clip
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after warm-up
    warmup_steps: int = 0  # optimizer updates of warm-up
    warmup_fraction: float = 0.0  # the same as a fraction of the run; give one of the two
    warmup_start: float = 0.1  # learning rate of the first update, as a fraction of lr
    end: float = 0.0  # learning rate at the end of linear and cosine, as a fraction of lr
    total_steps: int | None = None  # optimizer updates the schedule spans; null: the whole run
    # dtype of the first moment; bfloat16 saves 2 bytes a weight
    first_moment_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self):
        for name in ("lr", "weight_decay", "eps", "warmup_steps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} = {value} must be finite and not negative")
        for name in ("warmup_fraction", "warmup_start", "end"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)} is a fraction, from 0 to 1")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {self.betas} must be two numbers from 0 up to, not at, 1")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(
                f"max_grad_norm = {self.max_grad_norm} must be positive; null turns clipping off"
            )
        if self.warmup_steps and self.warmup_fraction:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps} and warmup_fraction = {self.warmup_fraction} "
                "both size the warm-up; keep one of the two"
            )
        if self.total_steps is not None and self.total_steps < 1:
            raise ValueError(
                f"total_steps = {self.total_steps} must be at least 1 optimizer update"
            )
        for pattern in self.no_decay:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"no_decay: {pattern!r} is no regular expression: {error}"
                ) from error


class Optimizer(NamedTuple):
    """An Optax transformation, and the schedule inside it for anyone who wants to report it."""

    transform: optax.GradientTransformation
    schedule: optax.Schedule


def build_optimizer(config: OptimizerConfig, total_updates: int) -> Optimizer:
    """Build the clip, AdamW and the schedule.

    Args:
      config: the settings.
      total_updates: optimizer updates of the whole run; sizes the warm-up fraction and the decay,
        unless `config.total_steps` does.

    Raises:
      ValueError: the warm-up is longer than the schedule, or (at `init`) a `no_decay` expression
        matches no parameter.
    """
    schedule = build_schedule(config, total_updates)
    steps: list[optax.GradientTransformation] = []
    if config.max_grad_norm is not None:
        steps.append(optax.clip_by_global_norm(config.max_grad_norm))
    steps.append(
        optax.adamw(
            schedule,
            b1=config.betas[0],
            b2=config.betas[1],
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=(lambda params: decay_mask(params, config.no_decay)) if config.no_decay else None,
            # None follows the master parameters, which are float32 (float64 under x64).
            mu_dtype=jnp.bfloat16 if config.first_moment_dtype == "bfloat16" else None,
        )
    )
    return Optimizer(optax.chain(*steps), schedule)


def build_schedule(config: OptimizerConfig, total_updates: int) -> optax.Schedule:
    """Build `updates so far -> learning rate`; the equation stands at the top of this file."""
    total = total_updates if config.total_steps is None else config.total_steps
    warmup = config.warmup_steps or round(config.warmup_fraction * total)
    if warmup > total:
        raise ValueError(
            f"warm-up of {warmup} updates is longer than the schedule of {total}; "
            "lower warmup_steps or raise total_steps"
        )
    rest = max(total - warmup, 1)
    after: optax.Schedule
    if config.schedule == "linear":
        after = optax.linear_schedule(config.lr, config.lr * config.end, rest)
    elif config.schedule == "cosine":
        after = optax.cosine_decay_schedule(config.lr, rest, alpha=config.end)
    else:
        after = optax.constant_schedule(config.lr)
    if not warmup:
        return after
    rise = optax.linear_schedule(config.lr * config.warmup_start, config.lr, warmup)
    return optax.join_schedules([rise, after], [warmup])


def decay_mask(params: Any, no_decay: tuple[str, ...]) -> Any:
    """Mark the parameters that decay: those whose path no expression is found in.

    Raises:
      ValueError: an expression matches no parameter.
    """
    names = [rules.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for pattern in no_decay:
        if names and not any(re.search(pattern, name) for name in names):
            raise ValueError(
                f"no_decay: {pattern!r} matches no parameter; paths look like "
                f"{', '.join(names[:3])}"
            )
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not any(re.search(p, rules.path_name(path)) for p in no_decay), params
    )
