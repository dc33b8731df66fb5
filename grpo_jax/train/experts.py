"""Where a model with routed experts sends its tokens: one pass over the trunk for each rollout.

The load of an expert is its share of the tokens times the number of experts: 1 when all experts of
its layer get the same. A router that drifts while it is trained shows here first (`maths.md`).

Symbols: `B` rows, `L` layers, `E` experts.
"""

import jax
import numpy as np

from grpo_jax.core.batch import Batch
from grpo_jax.core.policy import Params, Policy
from grpo_jax.train.micro_batches import Cut
from grpo_jax.train.state import Placement
from grpo_jax.train.step import ScoreStep, compile_score


def make_count_step(
    policy: Policy, *, micro_batches: Cut = 1, places: Placement | None = None
) -> ScoreStep | None:
    """Compile (params, batch) -> f32[B, L, E], the tokens for each expert; None without experts."""
    counts = policy.expert_counts
    if counts is None:
        return None

    def count(params: Params, batch: Batch) -> jax.Array:
        return counts(params, batch.tokens, batch.positions, batch.segment_ids)

    return compile_score(count, micro_batches, places)


def report(counts: np.ndarray) -> dict[str, float]:
    """Make metrics of f32[B, L, E]; nothing where no token was there."""
    tokens = np.asarray(counts, np.float64).sum(0)
    if not tokens.sum():
        return {}
    load = tokens / tokens.mean(-1, keepdims=True)  # [L, E]
    return {
        "experts/load_max": float(load.max()),
        "experts/load_spread": float(load.std(-1).mean()),
        "experts/idle": float((tokens == 0).mean()),
    }
