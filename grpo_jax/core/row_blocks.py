"""Walk the rows of a batch in blocks, so that temporaries have the size of a block.

The loss is a partial sum and its raw metrics merge, so a block of rows is just a small micro-batch.
The gradient of each block is taken while the block is at hand (the loss is a scalar, so the
backward pass only scales it): nothing but the gradient itself has the size of the batch.

Meant for the rows of one device; rows sharded over devices are best left whole, or walked inside
`shard_map`. First derivatives only. Temporaries are some 40 arrays of a block's size; 2^13 to 2^14
tokens a block suit a CPU's cache.

Symbols: `B` rows, `T` tokens a row.
"""

import dataclasses
from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array

from grpo_jax.core import diagnostics
from grpo_jax.core.batch import Batch, Counts, TokenScores
from grpo_jax.core.diagnostics import Metrics
from grpo_jax.core.loss_config import LossConfig


class Contributions(Protocol):
    """What each token or sequence of some rows adds to the loss and its metrics."""

    def __call__(
        self, scores: TokenScores, batch: Batch, counts: Counts, config: LossConfig
    ) -> Metrics: ...


class Total(Protocol):
    """Loss and raw metrics out of contributions."""

    def __call__(
        self, contributions: Metrics, counts: Counts, config: LossConfig
    ) -> tuple[Array, Metrics]: ...


class _Held(flax.struct.PyTreeNode):
    """Contributions, each array once, however many metrics it stands for."""

    arrays: Metrics
    held_as: tuple[tuple[str, str], ...] = flax.struct.field(pytree_node=False)

    @classmethod
    def of(cls, contributions: Metrics) -> "_Held":
        first: dict[tuple[int, str], str] = {}
        held_as = []
        for name, values in contributions.items():
            held_as.append((name, first.setdefault((id(values), _kind(name)), name)))
        kept = {at: jax.lax.stop_gradient(contributions[at]) for at in first.values()}
        return cls(kept, tuple(held_as))

    def by_name(self) -> Metrics:
        return {name: self.arrays[at] for name, at in self.held_as}


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
    contributions: Contributions,
    total: Total,
    scores: TokenScores,
    batch: Batch,
    counts: Counts,
    config: LossConfig,
    row_block: int,
) -> tuple[Array, Metrics]:
    """Loss and raw metrics of all rows, a block at a time.

    Contributions of one block are added to those of the blocks before it entry by entry, and summed
    up once at the end: a vector addition, where a sum to one number waits for each addend.
    """
    size = block_size(batch.tokens.shape[0], row_block)
    fixed, numbers = without_tracers(config)

    def of_block(scores: TokenScores, batch: Batch, counts: Counts, numbers: dict[str, Array]):
        """Loss of a block alone, for its gradient, and its contributions."""
        config = dataclasses.replace(fixed, **numbers)
        parts = contributions(scores, batch, counts, config)
        return total(parts, counts, config)[0], _Held.of(parts)

    def walk(function, scores, batch, counts, numbers):
        """Fold `function(block) -> (output, contributions)`; what is left to do is `total`."""
        blocks = _split((scores, batch), size)
        first = jax.tree.map(lambda x: x[0], blocks)
        held = jax.eval_shape(of_block, *first, counts, numbers)[1]

        def step(held, block):
            output, new = function(*block, counts, numbers)
            return held.replace(arrays=diagnostics.merge_metrics(held.arrays, new.arrays)), output

        start = {
            # Like the scores, so that inside `shard_map` it varies over the same axes.
            name: jnp.full_like(scores.logprobs, diagnostics.neutral(name), x.dtype, x.shape)
            for name, x in held.arrays.items()
        }
        held, outputs = jax.lax.scan(step, held.replace(arrays=start), blocks)
        config = dataclasses.replace(fixed, **numbers)
        return total(held.by_name(), counts, config), outputs

    @jax.custom_vjp
    def value(*inputs):
        return walk(lambda *block: (None, of_block(*block)[1]), *inputs)[0]

    def forward(scores, *others):
        answer, grads = walk(jax.grad(of_block, has_aux=True), scores, *others)
        return answer, jax.tree.map(lambda g, x: g.reshape(x.shape), grads, scores)

    def backward(grads, cotangents):
        loss_cotangent, _ = cotangents  # metrics carry no gradient
        return jax.tree.map(lambda g: (g * loss_cotangent).astype(g.dtype), grads), None, None, None

    value.defvjp(forward, backward)
    return value(scores, batch, counts, numbers)


def _kind(name: str) -> str:
    return {"min": "min", "max": "max"}.get(diagnostics.TABLE[name].normaliser, "sum")


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
