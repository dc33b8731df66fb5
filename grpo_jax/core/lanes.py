"""Tokens of a batch in lanes: each lane moves its own to its front, and back.

A chunked head takes its tokens from the front of every lane at once. Where rows are sharded over a
mesh, a lane for each shard keeps chunks from mixing devices.

Symbols: `B` rows, `T` tokens a row, `S` lanes, `L = B·T/S` tokens a lane, `C` tokens a chunk.
"""

from typing import Literal

import jax
import jax.numpy as jnp

Chunk = int | Literal["auto"]
"""Tokens of a lane whose logits exist at one time; "auto": as many as `chunk_length` says."""

_SMALL, _MOST = 128, 512  # of "auto"; above 128 a head gains a few percent of speed at most


def chunk_length(chunk_size: Chunk, tokens: int) -> int:
    """Tokens of a chunk, of a lane of so many tokens.

    "auto" is a 42nd of the lane, up to 512: three copies of a chunk's logits are then about 7 % of
    all logits. Below 4,096 tokens, where all of them are small, it is 128, because smaller chunks
    cost time.

    Raises:
      ValueError: the size is not positive.
    """
    if chunk_size == "auto":
        chunk_size = min(tokens // 42 // 32 * 32, _MOST) if tokens >= 4096 else _SMALL
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1 token, or None for no chunks")
    return min(chunk_size, tokens)


def to_lanes(x: jax.Array, lanes: int) -> jax.Array:
    """Cut [B, T, ...] into [S, B·T/S, ...]."""
    return x.reshape(lanes, -1, *x.shape[2:])


def lane_order(
    scored: jax.Array, chunk_size: Chunk, lanes: int
) -> tuple[jax.Array, int, jax.Array]:
    """Order the tokens of each lane, those to score first.

    Returns:
      i32[S, M] places in a lane, M a multiple of the chunk: `take` reads 0 beyond the end of a
      lane, and `put` writes nothing there; tokens of a chunk; i32[] chunks that hold any to score.
    """
    rows, width = scored.shape
    if lanes < 1 or rows % lanes:
        raise ValueError(f"lanes={lanes} must divide the {rows} rows of the batch")
    by_lane = to_lanes(scored, lanes)
    size = by_lane.shape[1]
    chunk = chunk_length(chunk_size, size)
    order = jnp.argsort(~by_lane, axis=-1, stable=True)
    beyond = size + jnp.arange(-size % chunk, dtype=order.dtype)
    order = jnp.concatenate([order, jnp.broadcast_to(beyond, (lanes, beyond.size))], axis=1)
    return order, chunk, -(-jnp.max(jnp.sum(by_lane, axis=-1)) // chunk)


def take(x: jax.Array, at: jax.Array) -> jax.Array:
    """Read places `at` [S, C] of each lane of [S, L, ...]."""
    return jax.vmap(lambda x, at: x.at[at].get(mode="fill", fill_value=0))(x, at)


def put(x: jax.Array, at: jax.Array, new: jax.Array) -> jax.Array:
    """Write places `at` [S, C] of each lane of [S, L, ...]."""
    write = lambda x, at, new: x.at[at].set(new, mode="drop", unique_indices=True)  # noqa: E731
    return jax.vmap(write)(x, at, new)
