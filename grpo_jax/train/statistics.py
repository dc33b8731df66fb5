"""What an evaluation says: pass@k, pass^k, mean reward, lengths, with bootstrap intervals.

Rewards come as a matrix of prompts by completions. Labels take k from the completions that were
*asked for*: a completion that could not be scored counts as missing, and does not rename a metric.

Symbols: `P` prompts, `n` completions asked for a prompt, `c` correct ones among them, `k <= n`.

pass@k: https://arxiv.org/abs/2107.03374; pass^k: https://arxiv.org/abs/2406.12045.
"""

from collections.abc import Callable, Sequence

import numpy as np

RESAMPLES = 1000
CONFIDENCE = 0.95


def pass_at_k(n: int, c: np.ndarray | int, k: int) -> np.ndarray:
    """Chance that at least one of k completions drawn without replacement is correct, unbiased.

        pass@k = 1 − C(n − c, k) / C(n, k) = 1 − Π_{i=n−c+1..n} (1 − k / i)

    Args:
      n: completions of each prompt.
      c: i[P], correct ones.
    Returns:
      f64[P].
    Raises:
      ValueError: k > n, which only a biased extrapolation could answer.
    """
    c = _check_counts(n, c, k)
    return 1.0 - _draw_chance(n, n - c, k)


def pass_hat_k(n: int, c: np.ndarray | int, k: int) -> np.ndarray:
    """Chance that all of k completions drawn without replacement are correct, unbiased.

    pass^k = C(c, k) / C(n, k)
    """
    return _draw_chance(n, _check_counts(n, c, k), k)


def _draw_chance(n: int, marked: np.ndarray, k: int) -> np.ndarray:
    """C(marked, k) / C(n, k) as the product Π_{j<k} (marked − j) / (n − j), without factorials."""
    j = np.arange(k)[None, :]
    return np.prod(np.maximum(marked[..., None] - j, 0) / (n - j), axis=-1)


def _check_counts(n: int, c: np.ndarray | int, k: int) -> np.ndarray:
    """c as i[P], after refusing what has no answer."""
    if k < 1 or k > n:
        raise ValueError(
            f"k={k} needs 1 <= k <= n, and there are n={n} completions a prompt; "
            f"sample at least {max(k, 1)} completions a prompt"
        )
    c = np.atleast_1d(np.asarray(c))
    if c.min(initial=0) < 0 or c.max(initial=0) > n:
        raise ValueError(f"correct counts must lie in [0, n={n}], got {c.min()} to {c.max()}")
    return c


def bootstrap_interval(
    values: np.ndarray,
    *,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile interval of a mean over prompts, drawing prompts with replacement.

    Prompts are the independent draws; completions of one prompt stay together. The same values
    give the same interval. One prompt gives an interval of width zero.

    Args:
      values: f[P], one number a prompt; NaN = nothing is known of it.
    """
    values = np.asarray(values, np.float64)
    values = np.sort(values[np.isfinite(values)])  # sorted: independent of the order of prompts
    if not values.size:
        return float("nan"), float("nan")
    draws = np.random.default_rng(seed).integers(values.size, size=(resamples, values.size))
    means = values[draws].mean(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def evaluation(
    rewards: np.ndarray,
    completions: int,
    *,
    correct_reward: float = 1.0,
    ks: Sequence[int] | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Everything that rewards say about a policy.

        mean_reward, /low, /high       always; over scored completions
        avg@n                          the same, only where all rewards are 0 or 1: accuracy
        pass@k, pass^k, /low, /high    k = 1, 2, 4, … up to n, and n; correct: ≥ correct_reward
        unscored                       completions without a reward

    Means are over prompts, each prompt the mean of its scored completions. Unscored completions
    (NaN) leave the mean. For pass@k they are wrong answers: n stays what was asked for.

    Args:
      rewards: f[P·n], the completions of a prompt next to each other; NaN = not scored.
      completions: n, asked for.
      ks: other values of k.
    Raises:
      ValueError: the rewards do not divide into groups of n, or a k is above n.
    """
    rewards = np.asarray(rewards, np.float64)
    if completions < 1 or rewards.size % completions:
        raise ValueError(
            f"{rewards.size} rewards do not divide into groups of completions={completions}; "
            "give one for each completion asked for, NaN where it was not scored"
        )
    table = rewards.reshape(-1, completions)
    scored = np.isfinite(table)
    counts = scored.sum(axis=1)
    means = np.where(
        counts > 0, np.where(scored, table, 0).sum(axis=1) / np.maximum(counts, 1), np.nan
    )
    metrics = _with_interval("mean_reward", means, seed)
    if np.isin(table[scored], (0.0, 1.0)).all():
        metrics[f"avg@{completions}"] = metrics["mean_reward"]
    correct = (np.where(scored, table, -np.inf) >= correct_reward).sum(axis=1)
    estimators: dict[str, Callable] = {"pass@": pass_at_k, "pass^": pass_hat_k}
    for k in default_ks(completions) if ks is None else ks:
        for name, estimator in estimators.items():
            metrics |= _with_interval(f"{name}{k}", estimator(completions, correct, k), seed)
    return metrics | {"unscored": float((~scored).sum())}


def default_ks(completions: int) -> list[int]:
    """Powers of two up to n, and n itself."""
    powers = [1 << i for i in range(completions.bit_length()) if 1 << i <= completions]
    return powers if powers[-1] == completions else [*powers, completions]


def _with_interval(name: str, values: np.ndarray, seed: int) -> dict[str, float]:
    """The mean over prompts with its interval."""
    known = values[np.isfinite(values)]
    low, high = bootstrap_interval(values, seed=seed)
    mean = float(known.mean()) if known.size else float("nan")
    return {name: mean, f"{name}/low": low, f"{name}/high": high}


def lengths(tokens: np.ndarray, truncated: np.ndarray | None = None) -> dict[str, float]:
    """Length statistics of completions, in tokens; every completion has the same weight."""
    tokens = np.asarray(tokens, np.float64)
    if not tokens.size:
        return {}
    quantiles = np.quantile(tokens, [0.1, 0.5, 0.9])
    metrics = {
        "length/mean": float(tokens.mean()),
        "length/min": float(tokens.min()),
        "length/p10": float(quantiles[0]),
        "length/median": float(quantiles[1]),
        "length/p90": float(quantiles[2]),
        "length/max": float(tokens.max()),
    }
    if truncated is not None:
        metrics["length/truncated"] = float(np.mean(truncated))
    return metrics
