"""How evenly a model with routed experts spreads its tokens (`maths.md`).

Symbols: `B` rows, `L` layers, `E` experts.
"""

import numpy as np


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
