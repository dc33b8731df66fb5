"""Where sequences lie on the devices: packed or one a row, and how many rows at one time.

A batch arrives with one sequence a row, as the host works with it. It leaves with rows spread over
the devices that share them, cut into micro-batches of bounded size, and with a way back for what
is computed of it.

Each data shard is given sequences of about equal total length, the longest first to the shard with
the least (Graham 1969, "Bounds on multiprocessing timing anomalies"); packing then happens inside
each shard. Micro-batch m takes R rows of every shard. Padding rows come last, so that the step,
which ends with the last micro-batch that holds a token, computes none of those without any.

Symbols: `N` sequences, `S` data shards, `R` rows of a micro-batch on one device, `M` micro-batches,
`B = S·R·M` rows, `T` tokens a row.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from grpo_jax.core.batch import Batch
from grpo_jax.data import packing, trajectories
from grpo_jax.data.packing import Bins, PackingConfig, Placement


class Laid(NamedTuple):
    """A batch as the devices get it."""

    batch: Batch  # [B, T]
    placement: Placement  # of the N sequences
    shard_tokens: np.ndarray  # i64[S] real tokens of each data shard
    computed_tokens: int  # real ones and padding, of the micro-batches that hold any
    used_rows: int  # rows that hold a token
    micro_batches: int  # that hold a token

    def restore(self, values: np.ndarray, width: int) -> np.ndarray:
        """Bring [B, T] back to the rows that came, [N, width]; 0 on padding."""
        return packing.unpack(values, self.placement, width)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How every batch of a run is laid out."""

    packing: PackingConfig = PackingConfig()
    shards: int = 1  # S
    micro_rows: int | None = None  # R; None: as many as fit into micro_tokens
    micro_tokens: int | None = None  # tokens a device sees at one time, at most

    def __post_init__(self):
        if (self.micro_rows is None) == (self.micro_tokens is None):
            raise ValueError(
                f"micro_rows = {self.micro_rows} and micro_tokens = {self.micro_tokens}; give one "
                "of the two"
            )

    @property
    def max_segments(self) -> int:
        """Most sequences in a row."""
        return self.packing.max_sequences if self.packing.enabled else 1

    def rows_at_once(self, width: int) -> int:
        """R for rows of this width.

        Raises:
          ValueError: a single row has more tokens than a micro-batch may have.
        """
        if self.micro_tokens is None:
            return self.micro_rows or 1
        if width > self.micro_tokens:
            raise ValueError(
                f"a row of {width} tokens does not fit rollout.micro_batch_tokens = "
                f"{self.micro_tokens}; raise it to {width} or more, or shorten the rows"
            )
        return self.micro_tokens // width

    def micro_batches(self, rows: int, width: int) -> int:
        """M of a batch [B, T] that was laid out."""
        return rows // (self.rows_at_once(width) * self.shards)

    def lay_out(self, batch: Batch) -> Laid:
        """Lay out an unpacked batch, one sequence a row.

        The number of rows is static: all of them without packing, one of few with it.

        Raises:
          ValueError: a sequence longer than a packed row, or a row longer than a micro-batch.
        """
        lengths = packing.sequence_lengths(batch)
        rows, width = batch.tokens.shape
        if self.packing.enabled:
            width = self.packing.row_length
            whose = [packing.find_bins(lengths, s, self.packing) for s in self._deal(lengths)]
        else:
            whose = [[[int(i)] for i in s] for s in self._deal(lengths, -(-rows // self.shards))]
        at_once = self.rows_at_once(width)
        used = -(-max((len(bins) for bins in whose), default=0) // at_once)
        if self.packing.enabled:
            parts = trajectories.bucket_count(max(used, 1))
        else:
            parts = max(-(-rows // (at_once * self.shards)), 1)
        laid, placement = packing.lay_out(
            batch,
            _interleave(whose, at_once, parts),
            width,
            self.packing.length_multiple if self.packing.enabled else 1,
        )
        return Laid(
            laid,
            placement,
            shard_tokens=np.array([sum(int(lengths[b].sum()) for b in bins) for bins in whose]),
            computed_tokens=used * at_once * self.shards * width,
            used_rows=sum(len(bins) for bins in whose),
            micro_batches=used,
        )

    def _deal(self, lengths: np.ndarray, most: int | None = None) -> list[np.ndarray]:
        """Give each shard sequences of about equal total length, in their order; at most `most`."""
        present = np.flatnonzero(lengths)
        totals, dealt = np.zeros(self.shards, np.int64), [[] for _ in range(self.shards)]
        for i in present[np.argsort(-lengths[present], kind="stable")]:
            free = [s for s in range(self.shards) if most is None or len(dealt[s]) < most]
            least = min(free, key=lambda s: totals[s])
            dealt[least].append(i)
            totals[least] += lengths[i]
        return [np.sort(np.array(members, np.int64)) for members in dealt]


def _interleave(whose: Sequence[Bins], at_once: int, parts: int) -> Bins:
    """Order the bins of each shard so that the step finds R of every shard in micro-batch m.

    The j-th bin of shard s is row r of micro-batch m with j = m·R + r. The step takes the rows m,
    m + M, m + 2M, … into micro-batch m, and shard s holds the s-th block of R·M rows.
    """
    rows: Bins = [[] for _ in range(len(whose) * at_once * parts)]
    for s, bins in enumerate(whose):
        for j, members in enumerate(bins):
            m, r = divmod(j, at_once)
            rows[(s * at_once + r) * parts + m] = members
    return rows


def report(laid: Sequence[Laid]) -> dict[str, float]:
    """How well the micro-batches of a step's updates were used.

    packing/fill       = real tokens / tokens of the micro-batches that were computed
    packing/waste      = 1 − fill
    packing/imbalance  = largest / mean of the shards' real tokens − 1
    packing/tokens: real tokens of all updates, prompts included
    packing/trained_tokens: those of them whose log-probability is trained
    packing/rows, packing/micro_batches: of all updates, those that hold a token
    """
    real = sum(int(part.shard_tokens.sum()) for part in laid)
    computed = sum(part.computed_tokens for part in laid)
    shards = sum(part.shard_tokens for part in laid)
    fill = real / computed if computed else 0.0
    return {
        "packing/fill": fill,
        "packing/waste": 1.0 - fill,
        "packing/imbalance": float(np.max(shards) / np.mean(shards) - 1) if real else 0.0,
        "packing/tokens": real,
        "packing/trained_tokens": sum(int(part.batch.token_mask.sum()) for part in laid),
        "packing/rows": sum(part.used_rows for part in laid),
        "packing/micro_batches": sum(part.micro_batches for part in laid),
    }
