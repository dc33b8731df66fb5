"""Estimators that compare completions of one prompt: GRPO, Dr. GRPO, RLOO, GDPO.

Everything here is plain numpy in double precision. It runs on the host, once a step, on `N` numbers
whose count may change from step to step: under `jit` every new count would compile again, and the
arithmetic itself takes microseconds.

Groups are explicit integer ids, one a row. Rows of a group may stand anywhere; values are summed in
sorted order, so the result does not depend on the order of the rows, to the last bit.

Symbols: `N` rows (completions), `n` rows of one group, `V` voting rows of one group.

Papers: GRPO, https://arxiv.org/abs/2402.03300; Dr. GRPO, https://arxiv.org/abs/2503.20783;
RLOO, https://arxiv.org/abs/2402.14740; GDPO, https://arxiv.org/abs/2601.05242.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

AllReduce = Callable[[np.ndarray], np.ndarray]
"""Combines an array element by element over all processes; the identity in a single one."""


class GroupStatistics(NamedTuple):
    """What each row is compared with."""

    baseline: np.ndarray  # f64[N]
    std: np.ndarray  # f64[N], 0 means "do not normalise"
    constant: np.ndarray  # bool[N], the group's voting rewards are all equal
    voters: np.ndarray  # i64[N], V of the row's group


def group_statistics(
    rewards: np.ndarray,
    groups: np.ndarray,
    *,
    leave_one_out: bool,
    valid: np.ndarray | None = None,
    std_rewards: np.ndarray | None = None,
    tolerance: float = 1e-6,
    reference_std: bool = False,
) -> GroupStatistics:
    """Mean and standard deviation of the rows that each row is compared with.

        C_i  = voting rows of i's group, without i itself under leave-one-out;  D_i = |C_i|
        b_i  = Σ_{j ∈ C_i} r_j / D_i
        s_i² = Σ_{j ∈ C_i} (r_j − mean)² / (D_i − 1)          two passes, centred

    Stated results: fewer than two voters give b_i = r_i, s_i = 0. A comparison set of one row, or
    of rewards within `tolerance · max(1, |r|)` of each other, gives s_i = 0. Under leave-one-out,
    if that happens to one voting row of a group, the whole group is left unnormalised: the
    unique success and its failing siblings stay on one scale, and the group's sum stays zero.

    Args:
      rewards: f[N].
      groups: i[N], any integers.
      valid: bool[N], False = the row has no vote (it still gets a baseline).
      std_rewards: f[N], measures the spread instead of `rewards` (for example unshaped rewards).
      reference_std: decide on s_i row by row, and divide by V − 1 for rows without a vote too, as
        the torch reference does.
    """
    rewards = finite_rewards("rewards", rewards, len(groups), valid)
    spread = rewards
    if std_rewards is not None:
        spread = finite_rewards("std_rewards", std_rewards, len(groups), valid)
    votes = np.ones(len(groups), bool) if valid is None else np.asarray(valid) != 0
    out = GroupStatistics(
        rewards.copy(),
        np.zeros(len(groups)),
        np.ones(len(groups), bool),
        np.zeros(len(groups), int),
    )
    for index in _blocks(np.asarray(groups), (spread, rewards, votes)):
        r, x, v = rewards[index], spread[index], votes[index]
        count = v.sum(axis=1, keepdims=True)  # [k, 1]
        members = _comparison_sets(v, leave_one_out)  # [k, n or 1, n]
        divisor = members.sum(axis=2)
        if reference_std and leave_one_out:
            divisor = np.broadcast_to(count - 1, divisor.shape)
        baseline, _ = _moments(r, members, divisor)
        low, span = _range(r, members)
        if not (reference_std and leave_one_out):
            baseline = np.where(span == 0, low, baseline)  # the mean of 16 times 0.3 is not 0.3
        _, variance = _moments(x, members, divisor)
        std = np.sqrt(np.where(_range(x, members)[1] <= _noise(x, tolerance), 0, variance))
        if leave_one_out and not reference_std:
            std = std * ((std > 0) | ~v).all(axis=1, keepdims=True)
        alone = count <= 1
        out.baseline[index] = np.where(alone, r, baseline)
        out.std[index] = np.where(alone, 0, std)
        constant = _range(r, v[:, None, :])[1] <= _noise(r, tolerance)
        out.constant[index] = np.broadcast_to(constant, index.shape)
        out.voters[index] = np.broadcast_to(count, index.shape)
    return out


def finite_rewards(
    name: str, values: np.ndarray, rows: int, valid: np.ndarray | None
) -> np.ndarray:
    """f64[N]; a row without a vote may hold anything, and counts as 0 if it is not finite.

    Finite means in float32: larger rewards would overflow the loss, and from 1e154 on the squares
    of a deviation, whose infinite root would turn a whole group to zero.

    Raises:
      ValueError: wrong shape, or a valid row whose reward is not finite: it would silently decide
        its whole group.
    """
    values = np.asarray(values, np.float64)
    if values.shape != (rows,):
        raise ValueError(f"{name} has shape {values.shape}, the groups have ({rows},)")
    strange = ~(np.abs(values) <= np.finfo(np.float32).max)
    bad = np.flatnonzero(strange if valid is None else strange & (np.asarray(valid) != 0))
    if bad.size:
        raise ValueError(
            f"{name}[{bad[0]}] = {values[bad[0]]} is not finite in float32 ({bad.size} such rows); "
            "score it, or mark the row invalid and give it weight 0"
        )
    return np.where(strange, 0.0, values)


def _blocks(groups: np.ndarray, keys: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    """Row numbers i[k, n] of all groups of one size n, for each size; sorted inside a group."""
    order = np.lexsort((*keys, groups))
    _, starts, sizes = np.unique(groups[order], return_index=True, return_counts=True)
    return [order[starts[sizes == n][:, None] + np.arange(n)[None, :]] for n in np.unique(sizes)]


def _comparison_sets(votes: np.ndarray, leave_one_out: bool) -> np.ndarray:
    """bool[k, n, n] (or [k, 1, n] where all rows share one): row j is in the set of row i."""
    if not leave_one_out:
        return votes[:, None, :]
    return votes[:, None, :] & ~np.eye(votes.shape[1], dtype=bool)[None, :, :]


def _moments(
    values: np.ndarray, members: np.ndarray, divisor: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sample variance of each comparison set, both [k, n or 1].

        mean = Σ x / D;   variance = (Σ (x − m)² / D + (c − c²) m²) · D / (D − 1),   c = |C| / D

    With D = |C| the second term is zero and this is the textbook formula; the torch reference
    divides by V − 1 even where |C| = V, which is what the term is for.
    """
    safe = np.maximum(divisor, 1)
    sizes = members.sum(axis=2)
    x = np.broadcast_to(values[:, None, :], members.shape)
    mean = _sum(np.where(members, x, 0)) / np.maximum(sizes, 1)
    squares = _sum(np.where(members, np.square(x - mean[:, :, None]), 0))
    share = sizes / safe
    population = squares / safe + (share - np.square(share)) * np.square(mean)
    correction = np.where(divisor > 1, divisor / np.maximum(divisor - 1, 1), 0)
    return mean * share, np.maximum(population * correction, 0)


def _sum(values: np.ndarray) -> np.ndarray:
    """Add the last axis one by one: a zero in between changes no bit, unlike in a pairwise sum."""
    return np.cumsum(values, axis=-1)[..., -1]


def _range(values: np.ndarray, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The smallest of each comparison set, and largest minus smallest; 0 where it is empty."""
    x = np.broadcast_to(values[:, None, :], members.shape)
    high = np.where(members, x, -np.inf).max(axis=2)
    low = np.where(members, x, np.inf).min(axis=2)
    low, high = (np.where(members.any(axis=2), x, 0) for x in (low, high))
    return low, high - low


def _noise(values: np.ndarray, tolerance: float) -> np.ndarray:
    """[k, 1]: rewards closer than this are equal; they may have passed through float32."""
    return tolerance * np.maximum(1, np.abs(values).max(axis=1, keepdims=True))


def normalise(centred: np.ndarray, std: np.ndarray, epsilon: float) -> np.ndarray:
    """A / (s + ε) where s > 0, A where s = 0."""
    return np.where(std > 0, centred / (np.maximum(std, 0) + epsilon), centred)


def batch_std(
    values: np.ndarray, valid: np.ndarray | None, all_sum: AllReduce
) -> tuple[float, float]:
    """Mean and sample standard deviation (0 for fewer than two rows) over all processes' rows."""
    keep = np.ones(len(values), bool) if valid is None else np.asarray(valid) != 0
    total, count = all_sum(np.array([values[keep].sum(), keep.sum()], np.float64))
    mean = total / max(count, 1)
    squares = all_sum(np.array([np.square(values[keep] - mean).sum()], np.float64))[0]
    return float(mean), float(np.sqrt(squares / (count - 1))) if count > 1 else 0.0


def whiten_rows(values: np.ndarray, valid: np.ndarray | None, all_sum: AllReduce) -> np.ndarray:
    """(x − mean) / s over the batch, without epsilon; x − mean where s = 0."""
    mean, std = batch_std(values, valid, all_sum)
    return (values - mean) / (std if std > 0 else 1.0)


def weigh_components(
    components: Mapping[str, np.ndarray] | None, weights: Sequence[float] | None
) -> list[tuple[str, np.ndarray, float]]:
    """Pair reward components, in alphabetical order of their names, with their weights.

    Raises:
      ValueError: fewer than two components, or not one weight for each.
    """
    names = sorted(components or {})
    if len(names) < 2:
        raise ValueError(
            f"estimator 'gdpo' needs at least two reward components, got {names}; "
            "add a reward or use estimator 'grpo'"
        )
    weights = [1.0] * len(names) if weights is None else list(weights)
    if len(weights) != len(names):
        raise ValueError(
            f"reward_weights has {len(weights)} entries for the {len(names)} components {names}; "
            "give one for each, in this order"
        )
    assert components is not None
    return [(n, np.asarray(components[n]), float(w)) for n, w in zip(names, weights, strict=True)]
