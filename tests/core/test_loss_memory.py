"""Temporaries that the compiler plans for: deterministic, so they can be held on any machine."""

import jax
import jax.numpy as jnp

from grpo_jax.core import losses
from grpo_jax.core.batch import Batch, Counts, TokenScores
from grpo_jax.core.loss_config import LossConfig

ROWS, WIDTH = 256, 4096


def planned(row_block, **options):
    """Bytes of temporaries of value, gradient and every metric at [256, 4096]."""
    shape = lambda dtype: jax.ShapeDtypeStruct((ROWS, WIDTH), dtype)  # noqa: E731
    numbers, whole = shape(jnp.float32), shape(jnp.int32)
    batch = Batch(
        tokens=whole,
        segment_ids=whole,
        positions=whole,
        token_mask=shape(bool),
        sample_weights=numbers,
        advantages=numbers,
        generation_logprobs=numbers,
        prev_logprobs=numbers,
        reference_logprobs=numbers,
    )
    scalar = jax.ShapeDtypeStruct((), jnp.float32)

    def loss(logprobs, batch, counts):
        config = LossConfig(**options)
        scores = TokenScores(logprobs)
        return losses.clipped_pg_loss(scores, batch, counts, config, row_block=row_block)

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    compiled = step.lower(numbers, batch, Counts(scalar, scalar)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_a_walk_in_row_blocks_needs_less_than_two_mebibytes():
    """One array [256, 4096] of float32 is 4 MiB: not even one of them is kept."""
    assert planned(4) < 2 * 2**20


def test_all_rows_at_once_need_no_more_than_a_few_arrays():
    """A guard against an accidental [B, T, S] or a copy of everything; measured 17 arrays."""
    assert planned(None) < 24 * ROWS * WIDTH * 4
