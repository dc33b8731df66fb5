"""A batch in parts that fit the memory: cut by rows, walked in a loop, added up.

The sum over micro-batches is a loop that carries the gradients. Metrics leave it stacked, `[M]`
each, because some add up and some are extrema, and one table says which; a SUM accumulator around
everything would add minima.

A micro-batch takes every M-th row. With rows split over devices, each device then finds its part
of every micro-batch among the rows it already holds. The loop ends with the last micro-batch that
holds a token: shapes are static, and trailing micro-batches of padding cost nothing.

Symbols: `B` rows, `T` tokens a row, `M` micro-batches.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpo_jax.core import diagnostics
from grpo_jax.core.batch import Batch, Counts
from grpo_jax.core.policy import Params
from grpo_jax.scale import rules
from grpo_jax.train.state import Placement

Metrics = dict[str, jax.Array]
GradientStep = Callable[[Params, Batch, Counts], tuple[jax.Array, Params, Metrics]]
Cut = int | Callable[[int, int], int]
"""Number of micro-batches, or a function of (rows, width) where shapes differ over a run."""


def mapped(
    score_one: Callable[[Params, Batch], Any],
    params: Params,
    batch: Batch,
    micro_batches: Cut,
    mesh: Mesh | None,
) -> Any:
    """Arrays [B, T] of a function of (params, part); 0 in the parts beyond the last token."""
    count = parts_of(batch, micro_batches, mesh)
    if count == 1:
        return score_one(params, batch)
    parts = split_rows(batch, count, mesh)
    shapes = jax.eval_shape(score_one, params, part_at(parts, 0))
    empty = jax.tree.map(lambda s: jnp.zeros((count, *s.shape), s.dtype), shapes)

    def body(i: jax.Array, done: Any) -> Any:
        part = score_one(params, part_at(parts, i))
        return jax.tree.map(lambda x, y: x.at[i].set(y), done, part)

    done = jax.lax.fori_loop(0, parts_used(parts), body, stay_apart(empty, mesh))
    return jax.tree.map(join_rows, done)


def summed_gradient(
    loss_of: Callable[[Params, Batch, Counts], tuple[jax.Array, Metrics]],
    micro_batches: Cut,
    places: Placement | None,
    sum_metrics: Callable[[Metrics], Metrics],
) -> GradientStep:
    """Differentiate a partial loss, and add it up over micro-batches.

    Args:
      loss_of: (params, batch, counts) -> (loss, raw metrics) of a part of the batch, under the
        counts of the whole.
      micro_batches: into how many parts the rows are cut.
      places: where parameters, and so gradients, live.
      sum_metrics: combines metrics that carry a leading axis of parts.
    """
    mesh = None if places is None else places.mesh
    value_and_grad = jax.value_and_grad(loss_of, has_aux=True)

    def in_place(grads: Params) -> Params:
        if places is None:
            return grads
        return jax.lax.with_sharding_constraint(grads, places.state.params)

    def gradient(params: Params, batch: Batch, counts: Counts):
        count = parts_of(batch, micro_batches, mesh)
        if count == 1:
            (loss, metrics), grads = value_and_grad(params, batch, counts)
            return loss, in_place(grads), metrics
        parts = split_rows(batch, count, mesh)
        shape, shapes = jax.eval_shape(loss_of, params, part_at(parts, 0), counts)
        nothing = in_place(jax.tree.map(jnp.zeros_like, params))
        empty = {
            name: jnp.full((count, *s.shape), diagnostics.neutral(name), s.dtype)
            for name, s in shapes.items()
        }

        def add(i: jax.Array, sums: tuple[Params, jax.Array, Metrics]):
            total, partial_losses, stacked = sums
            (loss, metrics), grads = value_and_grad(params, part_at(parts, i), counts)
            total = in_place(jax.tree.map(jnp.add, total, grads))
            stacked = {name: x.at[i].set(metrics[name]) for name, x in stacked.items()}
            return total, partial_losses.at[i].set(loss), stacked

        sums = nothing, jnp.zeros((count,), shape.dtype), empty
        grads, partial_losses, stacked = jax.lax.fori_loop(0, parts_used(parts), add, sums)
        return jnp.sum(partial_losses), grads, sum_metrics(stacked)

    return gradient


def split_rows(batch: Any, parts: int, mesh: Mesh | None = None) -> Any:
    """Cut [B, ...] into [M, B/M, ...]; part m takes the rows m, m + M, m + 2M, …"""

    def one(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)

    return stay_apart(jax.tree.map(one, batch), mesh)


def stay_apart(parts: Any, mesh: Mesh | None) -> Any:
    """Pin [M, B/M, ...] to the devices that hold the rows."""
    if mesh is None:
        return parts
    rows = rules.batch_sharding(mesh).spec
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, *rows))
    return jax.lax.with_sharding_constraint(parts, place)


def parts_of(batch: Batch, micro_batches: Cut, mesh: Mesh | None) -> int:
    """Say into how many micro-batches a batch of this shape is cut, once it is known to divide."""
    rows, width = batch.tokens.shape
    count = micro_batches if isinstance(micro_batches, int) else micro_batches(rows, width)
    rules.check_rows(rows, mesh, count)
    return count


def parts_used(parts: Batch) -> jax.Array:
    """Count the micro-batches [M, B/M, T] up to the last one that holds a token, i32[]."""
    held = jnp.any(parts.segment_ids > 0, axis=(1, 2))
    return jnp.max(jnp.where(held, jnp.arange(1, held.shape[0] + 1), 0))


def part_at(parts: Any, i: Any) -> Any:
    """Take one micro-batch [B/M, ...] out of [M, B/M, ...]."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), parts)


def join_rows(parts: jax.Array) -> jax.Array:
    """Put [M, B/M, ...] back into [B, ...], in the order before `split_rows`."""
    return parts.swapaxes(0, 1).reshape(-1, *parts.shape[2:])
