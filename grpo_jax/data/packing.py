"""Packing: several short sequences share one row of static width.

Bin packing is exact integer work and deterministic, ties included, so that every process finds the
same bins; algorithms and tie orders are those of the torch reference.

Symbols: `N` sequences, `C` capacity of a bin, `B'` packed rows, `T'` their width.
Modified first-fit decreasing: Johnson & Garey, "A 71/60 theorem for bin packing" (1985).
"""

import bisect
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from grpo_jax.core.batch import Batch

Bins = list[list[int]]


@dataclasses.dataclass(frozen=True)
class PackingConfig:
    """Whether and how sequences share rows."""

    enabled: bool = False  # put several sequences into one row; changes speed, not numbers
    # how sequences are distributed; see data/packing.py
    algorithm: Literal[
        "modified_first_fit_decreasing",
        "first_fit_decreasing",
        "first_fit_shuffle",
        "concatenative",
    ] = "modified_first_fit_decreasing"
    row_length: int = 2048  # tokens of a packed row; attention costs its square
    max_sequences: int = 64  # sequences of a packed row, at most
    length_multiple: int = 1  # each sequence takes a multiple of this many tokens
    seed: int = 0  # of first_fit_shuffle

    def __post_init__(self):
        for key in ("row_length", "max_sequences", "length_multiple"):
            if getattr(self, key) < 1:
                raise ValueError(f"packing.{key} = {getattr(self, key)} must be at least 1")
        if self.algorithm not in _ALGORITHMS:
            raise ValueError(_unknown(self.algorithm))


class Placement(NamedTuple):
    """Where each of the N sequences went: the inverse of packing."""

    rows: np.ndarray  # i32[N] packed row
    starts: np.ndarray  # i32[N] first token in that row
    lengths: np.ndarray  # i32[N] tokens
    fill: float  # fraction of packed tokens that are real; 0 when there are none


def pack(
    lengths: Sequence[int],
    capacity: int,
    algorithm: str = "modified_first_fit_decreasing",
    *,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
    seed: int = 0,
) -> Bins:
    """Distribute sequences over bins of `capacity` tokens; return the indices in each bin.

    Args:
        lengths: tokens of each sequence.
        algorithm: concatenative, first_fit_decreasing, first_fit_shuffle, or
            modified_first_fit_decreasing; case does not matter.
        min_bin_count: at least so many bins.
        bin_count_multiple: the number of bins is raised to a multiple of this.
        seed: of first_fit_shuffle only.

    Raises:
        ValueError: unknown algorithm, a sequence longer than a bin, fewer sequences than the bins
            that must be filled, or a count that is not positive.
    """
    _check(lengths, capacity, algorithm, min_bin_count, bin_count_multiple)
    if not len(lengths):
        return []
    bins = _ALGORITHMS[algorithm.lower()]([int(n) for n in lengths], capacity, seed)
    return _adjust(bins, len(lengths), min_bin_count or 0, bin_count_multiple or 1)


def pack_batch(
    batch: Batch, config: PackingConfig, *, rows: int | None = None, rows_multiple: int = 1
) -> tuple[Batch, Placement]:
    """Put the sequences of an unpacked batch (one a row) together in rows of `row_length` tokens.

    Sequence k of a row has segment id k + 1 and positions from 0, so attention, targets and
    per-sequence sums never cross its ends. A bin of more than `max_sequences` is split. Rows of
    padding fill up to `rows`, or to a multiple of `rows_multiple` (data shards).

    Raises:
        ValueError: a sequence longer than a row, or more packed rows than `rows`.
    """
    lengths = sequence_lengths(batch)
    bins = find_bins(lengths, np.flatnonzero(lengths), config)  # padding rows have no sequence
    target = -(-max(len(bins), 1) // rows_multiple) * rows_multiple if rows is None else rows
    if len(bins) > target:
        raise ValueError(
            f"the sequences need {len(bins)} packed rows but rows={rows}; raise rows or row_length"
        )
    bins += [[] for _ in range(target - len(bins))]
    return lay_out(batch, bins, config.row_length, config.length_multiple)


def sequence_lengths(batch: Batch) -> np.ndarray:
    """Tokens of each row of an unpacked batch, i32[N]; 0 for rows of padding."""
    return (np.asarray(batch.segment_ids) > 0).sum(axis=1).astype(np.int32)


def find_bins(lengths: np.ndarray, chosen: np.ndarray, config: PackingConfig) -> Bins:
    """Distribute the `chosen` ones of N sequences over rows, at most `max_sequences` in each.

    Raises:
        ValueError: a sequence longer than a row.
    """
    slots = -(-lengths[chosen] // config.length_multiple) * config.length_multiple
    found = pack(slots.tolist(), config.row_length, config.algorithm, seed=config.seed)
    return [
        [int(chosen[i]) for i in one[first : first + config.max_sequences]]
        for one in found
        for first in range(0, len(one), config.max_sequences)
    ]


def unpack(packed: np.ndarray, placement: Placement, width: int) -> np.ndarray:
    """Bring a packed [B', T'] array back to [N, width], zero beyond each sequence."""
    columns = np.arange(width)[None, :]
    inside = columns < placement.lengths[:, None]
    source = np.where(inside, placement.starts[:, None] + columns, 0)
    values = np.asarray(packed)[placement.rows[:, None], source]
    return np.where(inside, values, np.zeros((), values.dtype))


def lay_out(
    batch: Batch, bins: Bins, width: int, length_multiple: int = 1
) -> tuple[Batch, Placement]:
    """Put the sequences of an unpacked batch into rows of `width` tokens, as `bins` says.

    Args:
        batch: one sequence a row, from column 0 on.
        bins: for each row of the result the sequences in it; an empty one is a row of padding.
        width: tokens a row.
        length_multiple: each sequence takes a multiple of this many tokens.
    """
    # One index serves every array of the batch.
    lengths, rows = sequence_lengths(batch), len(bins)
    placed_rows, starts, segments = (np.zeros(len(lengths), np.int32) for _ in range(3))
    for row, members in enumerate(bins):
        start = 0
        for segment, index in enumerate(members, start=1):
            placed_rows[index], starts[index], segments[index] = row, start, segment
            start += -(-int(lengths[index]) // length_multiple) * length_multiple
    # One entry for each real token: only these are copied, never a sequence's alignment padding.
    source_row = np.repeat(np.arange(len(lengths)), lengths)
    source_column = np.arange(len(source_row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    target = placed_rows[source_row], starts[source_row] + source_column

    def gather(array: Any) -> np.ndarray:
        array = np.asarray(array)
        out = np.zeros((rows, width, *array.shape[2:]), array.dtype)
        out[target] = array[source_row, source_column]
        return out

    packed = jax.tree.map(gather, batch)
    ids = np.zeros((rows, width), np.int32)
    ids[target] = segments[source_row]
    fill = float(lengths.sum()) / max(rows * width, 1)
    return packed.replace(segment_ids=ids), Placement(placed_rows, starts, lengths, fill)


def _concatenative(lengths: list[int], capacity: int, seed: int) -> Bins:
    """Fill bins in input order."""
    del seed  # nothing is random here
    bins: Bins = []
    used = capacity
    for index, length in enumerate(lengths):
        if used + length > capacity or not bins:
            bins.append([])
            used = 0
        bins[-1].append(index)
        used += length
    return bins


def _first_fit_decreasing(lengths: list[int], capacity: int, seed: int) -> Bins:
    """Put the longest first into the first bin with room; of equal ones, the later index first."""
    del seed  # nothing is random here
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i), reverse=True)
    return _first_fit(order, lengths, capacity)


def _first_fit_shuffle(lengths: list[int], capacity: int, seed: int) -> Bins:
    """First fit in an order drawn from the seed, never from the global generator."""
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    return _first_fit(order, lengths, capacity)


def _first_fit(order: Sequence[int], lengths: list[int], capacity: int) -> Bins:
    bins: Bins = []
    room: list[int] = []
    for index in order:
        fits = next((b for b, left in enumerate(room) if lengths[index] <= left), len(bins))
        if fits == len(bins):
            bins.append([])
            room.append(capacity)
        bins[fits].append(index)
        room[fits] -= lengths[index]
    return bins


def _modified_first_fit_decreasing(lengths: list[int], capacity: int, seed: int) -> Bins:
    """Pair large sequences with what fits beside them before anything else is placed.

    Classes by length: large > C/2, medium > C/3, small > C/6, tiny.
    """
    del seed  # nothing is random here
    large, medium, small, tiny = _classes(lengths, capacity)
    bins: Bins = [[i] for i in large]
    room = [capacity - lengths[i] for i in large]

    def put(b: int, index: int) -> None:
        bins[b].append(index)
        room[b] -= lengths[index]

    with_medium = set()
    for b in range(len(bins)):  # the largest medium one that fits, at most one a bin
        fits = next((i for i in medium if lengths[i] <= room[b]), None)
        if fits is not None:
            medium.remove(fits)
            put(b, fits)
            with_medium.add(b)
    for b in reversed(range(len(bins))):  # two small ones where no medium one went
        if b in with_medium or len(small) < 2:
            continue
        if lengths[small[0]] + lengths[small[1]] > room[b]:
            continue
        put(b, small.pop(0))
        fits = next(i for i in reversed(small) if lengths[i] <= room[b])
        small.remove(fits)
        put(b, fits)
    rest = sorted(medium + small + tiny, key=lambda i: lengths[i], reverse=True)
    for b in range(len(bins)):  # whatever still fits, the largest first
        kept = []
        for index in rest:
            if lengths[index] <= room[b]:
                put(b, index)
            else:
                kept.append(index)
        rest = kept
    return bins + _least_loaded(rest, lengths, capacity)


def _classes(
    lengths: list[int], capacity: int
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Large and medium ones in descending, small and tiny ones in ascending order, both stable."""
    indices = range(len(lengths))
    descending = sorted(indices, key=lambda i: -lengths[i])
    ascending = sorted(indices, key=lambda i: lengths[i])
    return (
        [i for i in descending if 2 * lengths[i] > capacity],
        [i for i in descending if 2 * lengths[i] <= capacity < 3 * lengths[i]],
        [i for i in ascending if 3 * lengths[i] <= capacity < 6 * lengths[i]],
        [i for i in ascending if 6 * lengths[i] <= capacity],
    )


def _least_loaded(order: Sequence[int], lengths: list[int], capacity: int) -> Bins:
    """Put each into the least-loaded bin if it fits there, else into a new one (worst fit)."""
    loads: list[tuple[int, list[int]]] = []  # ascending; of equal loads the newest comes last
    for index in order:
        if loads and loads[0][0] + lengths[index] <= capacity:
            load, members = loads.pop(0)
        else:
            load, members = 0, []
        members.append(index)
        load += lengths[index]
        loads.insert(bisect.bisect_right(loads, load, key=lambda entry: entry[0]), (load, members))
    return [members for _, members in loads]


def _adjust(bins: Bins, items: int, least: int, multiple: int) -> Bins:
    """Raise the number of bins by moving single sequences out of the fullest ones."""
    target = -(-max(len(bins), least) // multiple) * multiple
    if target > items:
        raise ValueError(
            f"{items} sequences cannot fill {target} bins (min_bin_count={least}, "
            f"bin_count_multiple={multiple}); give more sequences or fewer bins"
        )
    order = sorted(range(len(bins)), key=lambda b: (len(bins[b]), b), reverse=True)
    sources = iter(order)
    source = next(sources, None)
    new: Bins = []
    while len(bins) + len(new) < target:
        while source is not None and len(bins[source]) <= 1:
            source = next(sources, None)
        assert source is not None  # there are at least as many items as bins
        new.append([bins[source].pop()])
    return bins + new


_ALGORITHMS: dict[str, Callable[[list[int], int, int], Bins]] = {
    "concatenative": _concatenative,
    "first_fit_decreasing": _first_fit_decreasing,
    "first_fit_shuffle": _first_fit_shuffle,
    "modified_first_fit_decreasing": _modified_first_fit_decreasing,
}


def _check(
    lengths: Sequence[int],
    capacity: int,
    algorithm: str,
    min_bin_count: int | None,
    bin_count_multiple: int | None,
) -> None:
    if algorithm.lower() not in _ALGORITHMS:
        raise ValueError(_unknown(algorithm))
    if capacity < 1:
        raise ValueError(f"bin capacity {capacity} is not positive; use at least one token")
    if min_bin_count is not None and min_bin_count < 0:
        raise ValueError(f"min_bin_count={min_bin_count} is negative; use 0 or more")
    if bin_count_multiple is not None and bin_count_multiple < 1:
        raise ValueError(f"bin_count_multiple={bin_count_multiple} must be at least 1")
    for index, length in enumerate(lengths):
        if length > capacity:
            raise ValueError(
                f"sequence {index} has {length} tokens, more than the {capacity} of a packed row; "
                "raise the row length or shorten the responses"
            )
        if length < 1:
            raise ValueError(
                f"sequence {index} has {length} tokens; only real sequences are packed"
            )


def _unknown(algorithm: str) -> str:
    return f"packing algorithm {algorithm!r} is unknown; use one of {', '.join(_ALGORITHMS)}"
