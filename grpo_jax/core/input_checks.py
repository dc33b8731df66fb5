"""What the loss refuses before it computes anything: shapes, types, and masks that can be read.

Symbols: `B` rows, `T` tokens a row.
"""

import jax.core as jax_core
import jax.numpy as jnp
import numpy as np

from grpo_jax.core.batch import Batch, Counts, TokenScores

FLOATS = (
    "sample_weights",
    "advantages",
    "generation_logprobs",
    "prev_logprobs",
    "reference_logprobs",
    "rewards",
)
"""Arrays of a batch that the loss reads as floats."""


def check_arrays(scores: TokenScores, batch: Batch, counts: Counts) -> None:
    """Refuse arrays that broadcasting would quietly turn into another loss.

    Raises:
      ValueError: names the array, what it is, and what it must be.
    """
    shape = jnp.shape(batch.tokens)
    if len(shape) != 2:
        raise ValueError(f"batch.tokens has shape {shape}; it must be [B, T]")
    floats = {f"scores.{name}": value for name, value in scores._asdict().items()}
    floats |= {f"batch.{name}": getattr(batch, name) for name in FLOATS}
    others = {f"batch.{name}": getattr(batch, name) for name in ("segment_ids", "token_mask")}
    for name, value in (floats | others).items():
        if value is None:
            continue
        if not hasattr(value, "dtype"):
            raise ValueError(f"{name} is a {type(value).__name__}; make it an array [B, T]")
        if jnp.shape(value) != shape:
            raise ValueError(
                f"{name} has shape {jnp.shape(value)}, but batch.tokens has {shape}; every array "
                "is token-aligned: spread a number a row over its tokens, and put the score of "
                "token t at index t"
            )
        if name in floats and not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(f"{name} has type {value.dtype}; convert it to a float type")
    if not jnp.issubdtype(batch.segment_ids.dtype, jnp.integer):
        raise ValueError(
            f"batch.segment_ids has type {batch.segment_ids.dtype}; it must be an integer type"
        )
    for name in ("tokens", "sequences"):
        if jnp.shape(getattr(counts, name)) != ():
            raise ValueError(
                f"counts.{name} has shape {jnp.shape(getattr(counts, name))}; it is one number "
                "for the whole global batch, see masks.count"
            )
    _check_masks(batch)


def _check_masks(batch: Batch) -> None:
    """Where they can be read: a token mask lies in [0, 1], no sample weight is negative."""
    arrays = (batch.token_mask, batch.sample_weights, batch.segment_ids)
    if any(isinstance(x, jax_core.Tracer) for x in arrays):
        return
    if not all(getattr(x, "is_fully_addressable", True) for x in arrays):
        return
    mask, weights, segments = (np.asarray(x).astype(np.float64) for x in arrays)
    if (mask < 0).any() or (mask > 1).any():
        raise ValueError(
            f"batch.token_mask holds values from {np.nanmin(mask):g} to {np.nanmax(mask):g}; it "
            "must lie in [0, 1]: 1 for a trained token, 0 for every other"
        )
    bad = weights[(mask != 0) & (segments > 0) & (weights < 0)]
    if bad.size:
        raise ValueError(
            f"batch.sample_weights holds {bad.min():g}; a negative weight would train away from "
            "the sample: use 0 to leave it out, and the advantage for its sign"
        )
