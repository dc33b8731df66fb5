"""Sampled rows become token-aligned batches of static shape, with their counts.

Everything here is vectorised numpy on the host. Which tokens are trained is decided by lengths and
spans alone, so padding that equals an end token changes nothing.

Symbols: `N` rows, `W` width of the sampled rows, `T` width of the batch, `R` rows of a micro-batch.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from grpo_jax.core.batch import Batch, Counts


def collate(
    tokens: np.ndarray,
    prompt_lengths: np.ndarray,
    completion_lengths: np.ndarray,
    logprobs: np.ndarray,
    *,
    advantages: np.ndarray,
    sample_weights: np.ndarray | None = None,
    rewards: np.ndarray | None = None,
    trained: np.ndarray | None = None,
    kept_ids: np.ndarray | None = None,
    length_multiple: int = 1,
    length: int | None = None,
) -> Batch:
    """Lay sampled rows out as a token-aligned batch, one sequence a row.

        token_mask[n, t] = prompt[n] ≤ t < prompt[n] + completion[n],  t ≥ 1,  trained[n, t]

    Args:
        tokens: i32[N, W], prompt then completion then anything.
        prompt_lengths, completion_lengths: i32[N], tokens.
        logprobs: f32[N, W], nats; read at trained tokens only.
        advantages: f32[N] or f32[N, W].
        sample_weights: f32[N], 0 = excluded; all ones when left out.
        rewards: f32[N], kept for losses that look at them.
        trained: bool[N, W], False on tokens inside the completion that the policy did not write
            (tool output, other speakers); everything is the policy's own when left out.
        kept_ids: i32[N, W, K], the tokens that the sampler kept where it drew each one, padded with
            negative numbers; `K` is rounded up to one of few widths, as lengths are.
        length_multiple: `T` is rounded up to a multiple of this.
        length: fixes `T`, so that every batch of a run has one shape.

    Raises:
        ValueError: rows longer than the arrays, or than `length`.
    """
    tokens, logprobs = np.asarray(tokens, np.int32), np.asarray(logprobs, np.float32)
    prompt_lengths = np.asarray(prompt_lengths, np.int32)
    ends = prompt_lengths + np.asarray(completion_lengths, np.int32)
    rows, width = tokens.shape
    longest = int(ends.max(initial=0))
    if longest > width:
        raise ValueError(
            f"a row claims {longest} tokens but the arrays are {width} wide; lengths must count "
            "the tokens that are there"
        )
    target = padded_length(longest, length_multiple) if length is None else length
    if longest > target:
        raise ValueError(f"a row of {longest} tokens does not fit length={target}; raise length")
    columns = np.arange(target, dtype=np.int32)[None, :]
    inside = columns < ends[:, None]
    token_mask = inside & (columns >= np.maximum(prompt_lengths, 1)[:, None])
    if trained is not None:
        token_mask &= fit_width(np.asarray(trained, bool), target)
    weights = np.ones(rows) if sample_weights is None else np.asarray(sample_weights)
    return Batch(
        tokens=_numpy(np.where(inside, fit_width(tokens, target), 0)),
        segment_ids=_numpy(inside.astype(np.int32)),
        positions=_numpy(np.where(inside, columns, 0).astype(np.int32)),
        token_mask=_numpy(token_mask),
        sample_weights=_numpy(_over_tokens(weights, inside)),
        advantages=_numpy(_over_tokens(np.asarray(advantages), token_mask)),
        generation_logprobs=_numpy(
            np.where(token_mask, fit_width(logprobs, target), np.float32(0))
        ),
        rewards=None if rewards is None else _numpy(_over_tokens(np.asarray(rewards), inside)),
        kept_ids=None if kept_ids is None else _numpy(_kept_ids(kept_ids, token_mask)),
    )


def _kept_ids(kept_ids: np.ndarray, token_mask: np.ndarray) -> np.ndarray:
    """Lay i32[N, W, K] out as i32[N, T, K'], −1 where nothing is trained or nothing was kept."""
    kept_ids = fit_width(np.asarray(kept_ids, np.int32), token_mask.shape[1])
    room = bucket_count(kept_ids.shape[2]) - kept_ids.shape[2]
    kept_ids = np.pad(kept_ids, ((0, 0), (0, 0), (0, room)), constant_values=-1)
    return np.where(token_mask[..., None], kept_ids, np.int32(-1))


def count(batch: Batch, all_sum: Callable[[np.ndarray], np.ndarray] = np.asarray) -> Counts:
    """Count what the loss divides by, over a whole global batch: `all_sum` adds its processes up.

        tokens    = Σ token_mask · sample_weights
        sequences = Σ over sequences with a trained token of sample_weights
        positives = Σ token_mask · sample_weights over sequences with reward > 0

    Summed in float64 and rounded once to float32, so no count is lost above 2²⁴ tokens.
    """
    mask, weights = np.asarray(batch.token_mask), np.asarray(batch.sample_weights, np.float64)
    segments = np.asarray(batch.segment_ids)
    row, column = np.nonzero(mask)
    by_sequence = np.zeros((mask.shape[0], int(segments.max(initial=0)) + 1))
    by_sequence[row, segments[row, column]] = weights[row, column]  # constant inside a sequence
    positive = mask & (0 if batch.rewards is None else np.asarray(batch.rewards) > 0)
    sums = [weights[mask].sum(), by_sequence.sum(), weights[positive].sum()]
    tokens, sequences, positives = all_sum(np.array(sums)).astype(np.float32)
    return Counts(
        tokens=_numpy(tokens),
        sequences=_numpy(sequences),
        positives=None if batch.rewards is None else _numpy(positives),
    )


def pad_rows(batch: Batch, rows: int) -> Batch:
    """Append all-padding rows until the batch has `rows` of them; they carry no weight anywhere."""
    missing = rows - batch.tokens.shape[0]
    if missing < 0:
        raise ValueError(f"the batch has {batch.tokens.shape[0]} rows, more than rows={rows}")
    return jax.tree.map(
        lambda x: np.pad(np.asarray(x), [(0, missing)] + [(0, 0)] * (np.ndim(x) - 1)), batch
    )


def split_rows(batch: Batch, rows: int) -> list[Batch]:
    """Cut a batch into consecutive ones of exactly `rows` rows, the last filled with padding rows.

    Used once for optimizer steps and once more for micro-batches. Order is kept, nothing is
    dropped, and every part has the same shape, so one compiled program serves them all.
    """
    if rows < 1:
        raise ValueError(f"rows={rows} is not positive; use at least 1 row a part")
    total = batch.tokens.shape[0]
    parts = -(-total // rows)
    whole = pad_rows(batch, parts * rows)
    return [take_rows(whole, slice(i * rows, (i + 1) * rows)) for i in range(parts)]


def take_rows(batch: Batch, rows: slice | np.ndarray) -> Batch:
    """Select rows of every array of a batch."""
    return jax.tree.map(lambda x: np.asarray(x)[rows], batch)


def padded_length(length: int, multiple: int) -> int:
    """Round a length up to a multiple, and at least to one multiple."""
    if multiple < 1:
        raise ValueError(f"length_multiple={multiple} is not positive; use 1 for no rounding")
    return max(-(-length // multiple), 1) * multiple


def bucket_length(length: int, multiple: int) -> int:
    """Round a length up to one of few widths: 1, 2, 3, 4, 6, 8, 12, 16, 24, … times `multiple`.

    A run whose lengths differ then compiles a handful of programs, and from 4 multiples on pads by
    less than a half.
    """
    return bucket_count(padded_length(length, multiple) // multiple) * multiple


def bucket_count(least: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, … that is at least `least`."""
    power = 1 << max(least - 1, 0).bit_length()  # the next power of two
    return power * 3 // 4 if power >= 4 and least <= power * 3 // 4 else power


def fit_width(array: np.ndarray, width: int) -> np.ndarray:
    """Cut or zero-pad the second axis to `width`."""
    if array.shape[1] >= width:
        return array[:, :width]
    return np.pad(array, [(0, 0), (0, width - array.shape[1])] + [(0, 0)] * (array.ndim - 2))


def _over_tokens(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Spread f[N] (or f[N, W]) over the tokens of `mask`, zero elsewhere, as f32[N, T]."""
    values = values.astype(np.float32)
    spread = values[:, None] if values.ndim == 1 else fit_width(values, mask.shape[1])
    return np.where(mask, spread, np.float32(0))


def _numpy(array: Any) -> Any:
    """Tell the type checker that a host array may stand where a device array is declared."""
    return array
