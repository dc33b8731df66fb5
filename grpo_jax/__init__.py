"""GRPO post-training of language models in JAX.

This page holds the loss and the data structures that it reads, for use in anybody's research code;
using them loads jax, chex and flax.struct only. Everything else is imported from its own room.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_jax.core.batch import Batch, Counts, TokenScores
    from grpo_jax.core.diagnostics import (
        finalize_metrics,
        gradient_scale,
        merge_metrics,
        sum_metrics,
    )
    from grpo_jax.core.kl import calculate_kl
    from grpo_jax.core.loss_config import LossConfig
    from grpo_jax.core.losses import Survivors, clipped_pg_loss, survivor_counts
    from grpo_jax.core.masks import count
    from grpo_jax.core.policy import Decoder, Policy, policy_from_apply

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Counts",
    "Decoder",
    "LossConfig",
    "Policy",
    "Survivors",
    "TokenScores",
    "calculate_kl",
    "clipped_pg_loss",
    "count",
    "finalize_metrics",
    "gradient_scale",
    "merge_metrics",
    "policy_from_apply",
    "sum_metrics",
    "survivor_counts",
]

_HOMES = {  # public name -> its module
    "Batch": "grpo_jax.core.batch",
    "Counts": "grpo_jax.core.batch",
    "Decoder": "grpo_jax.core.policy",
    "LossConfig": "grpo_jax.core.loss_config",
    "Policy": "grpo_jax.core.policy",
    "Survivors": "grpo_jax.core.losses",
    "TokenScores": "grpo_jax.core.batch",
    "calculate_kl": "grpo_jax.core.kl",
    "clipped_pg_loss": "grpo_jax.core.losses",
    "count": "grpo_jax.core.masks",
    "finalize_metrics": "grpo_jax.core.diagnostics",
    "gradient_scale": "grpo_jax.core.diagnostics",
    "merge_metrics": "grpo_jax.core.diagnostics",
    "policy_from_apply": "grpo_jax.core.policy",
    "sum_metrics": "grpo_jax.core.diagnostics",
    "survivor_counts": "grpo_jax.core.losses",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, so that reward workers never load JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
