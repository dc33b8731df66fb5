"""GRPO post-training of language models in JAX.

This page holds the loss and the data structures that it reads, for use in anybody's research code;
importing it loads jax, chex and flax.struct only. Everything else is imported from its own room.
"""

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
