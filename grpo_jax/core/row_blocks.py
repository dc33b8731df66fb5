"""Walk the rows of a batch in blocks, so that temporaries have the size of a block.

The loss is a partial sum and its raw metrics merge, so a block of rows is just a small micro-batch.
The gradient of each block is taken while the block is at hand (the loss is a scalar, so the
backward pass only scales it): nothing but the gradient itself has the size of the batch.

Meant for the rows of one device; rows sharded over devices are best left whole, or walked inside
`shard_map`. First derivatives only.

Symbols: `B` rows, `T` tokens a row.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array

from grpo_jax.core import diagnostics
from grpo_jax.core.batch import Batch, Counts, TokenScores
from grpo_jax.core.diagnostics import Metrics
from grpo_jax.core.loss_config import LossConfig


class RowsLoss(Protocol):
    """Loss and raw metrics of some rows."""

    def __call__(
        self, scores: TokenScores, batch: Batch, counts: Counts, config: LossConfig
    ) -> tuple[Array, Metrics]: ...


def block_size(rows: int, wanted: int) -> int:
    """The largest divisor of `rows` that is not above `wanted`.

    Raises:
      ValueError: `wanted` is below 1.
    """
    if wanted < 1:
        raise ValueError(
            f"row_block={wanted} must be at least 1; use None to take all rows at once"
        )
    return max(size for size in range(1, min(rows, wanted) + 1) if rows % size == 0)


def in_blocks(
    rows_loss: RowsLoss,
    scores: TokenScores,
    batch: Batch,
    counts: Counts,
    config: LossConfig,
    row_block: int,
) -> tuple[Array, Metrics]:
    """Loss and raw metrics of all rows, a block at a time."""
    size = block_size(batch.tokens.shape[0], row_block)
    fixed, numbers = without_tracers(config)

    def of_block(scores: TokenScores, batch: Batch, counts: Counts, numbers: dict[str, Array]):
        return rows_loss(scores, batch, counts, dataclasses.replace(fixed, **numbers))

    @jax.custom_vjp
    def total(scores, batch, counts, numbers):
        def step(carry, block):
            return carry, of_block(block[0], block[1], counts, numbers)

        _, (losses, metrics) = jax.lax.scan(step, None, _split((scores, batch), size))
        return jnp.sum(losses), diagnostics.sum_metrics(metrics)

    def forward(scores, batch, counts, numbers):
        value_and_grad = jax.value_and_grad(of_block, has_aux=True)

        def step(carry, block):
            return carry, value_and_grad(block[0], block[1], counts, numbers)

        _, ((losses, metrics), grads) = jax.lax.scan(step, None, _split((scores, batch), size))
        grads = jax.tree.map(lambda g, x: g.reshape(x.shape), grads, scores)
        return (jnp.sum(losses), diagnostics.sum_metrics(metrics)), grads

    def backward(grads, cotangents):
        loss_cotangent, _ = cotangents  # metrics carry no gradient
        return jax.tree.map(lambda g: (g * loss_cotangent).astype(g.dtype), grads), None, None, None

    total.defvjp(forward, backward)
    return total(scores, batch, counts, numbers)


def without_tracers(config: LossConfig) -> tuple[LossConfig, dict[str, Array]]:
    """Take traced hyperparameters out: a custom derivative must not close over tracers.

    `dataclasses.replace(fixed, **numbers)` is the config again.
    """
    numbers = {
        field.name: value
        for field in dataclasses.fields(config)
        if isinstance(value := getattr(config, field.name), jax.Array)
    }
    return dataclasses.replace(config, **{name: _default(name) for name in numbers}), numbers


def _split(tree, size: int):
    """[B, T] leaves as [B / size, size, T]: no copy."""
    return jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), tree)


def _default(name: str):
    return next(f.default for f in dataclasses.fields(LossConfig) if f.name == name)
