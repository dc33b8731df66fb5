"""Masked sums and means, and the per-sequence sums behind every "mean over a response".

A *sequence* is one prompt with its response. An unpacked row holds one sequence; a packed row holds
up to `S` of them, told apart by `segment_ids` (0 = padding, k >= 1 = k-th sequence of the row).

Symbols: `B` rows, `T` tokens a row, `S` sequence slots a row (a static number).
"""

from typing import NamedTuple

import jax
import jax.core as jax_core
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

EPSILON = 1e-8
"""Added to every denominator: an empty mask then gives 0/1e-8 = 0 rather than NaN. At a count of
one or more it is below the resolution of float32."""


def safe_masked_sum(values: Array, mask: Array, axis: int | None = None) -> Array:
    """Sum `values` weighted by `mask`, ignoring whatever stands where the mask is zero.

        Σ mask · values   over mask != 0

    The selection stands before the product, so NaN and inf outside the mask reach neither the sum
    nor its gradient.
    """
    selected = jnp.where(mask != 0, values, jnp.zeros((), values.dtype))
    return jnp.sum(selected * mask.astype(values.dtype), axis=axis)


def masked_mean(
    values: Array, mask: Array, axis: int | None = None, denominator: Array | float | None = None
) -> Array:
    """Average `values` over a mask.

        Σ mask · values / (D + 1e-8),   D = Σ mask, or `denominator` where one is given

    With a global `denominator` the result is a partial sum: adding it over micro-batches and
    devices gives the mean of the whole batch. Fractional masks weight both sums.
    """
    if denominator is None:
        denominator = jnp.sum(mask.astype(values.dtype), axis=axis)
    return safe_masked_sum(values, mask, axis) / (denominator + EPSILON)


def masked_var(
    values: Array, mask: Array, mean: Array | None = None, unbiased: bool = True
) -> Array:
    """Variance of `values` over a mask, a scalar.

        v = Σ mask (x − μ)² / (n + 1e-8),   unbiased: v · n / (n − 1),   n = Σ mask

    Zero where n <= 1, since one number has no spread.
    """
    mean = masked_mean(values, mask) if mean is None else mean
    centred = jnp.where(mask != 0, values - mean, jnp.zeros((), values.dtype))
    variance = masked_mean(jnp.square(centred), mask)
    if not unbiased:
        return variance
    count = jnp.sum(mask.astype(values.dtype))
    correction = count / jnp.where(count > 1, count - 1, 1)
    return jnp.where(count > 1, variance * correction, 0)


class Sequences(NamedTuple):
    """Which sequence each token belongs to, and the sums and means over one sequence.

    `slots == 1` means that a row is a sequence: the sums are plain row sums and `segment_ids` is
    never read. With more slots, each sum is one masked pass, which XLA fuses: nothing of shape
    [B, T, S] is kept.
    """

    segment_ids: Int[Array, "B T"]
    slots: int

    def _membership(self) -> Array:
        """bool[B, T, S]: token t belongs to slot s. Only ever read inside a fused reduction."""
        numbers = jnp.arange(1, self.slots + 1, dtype=self.segment_ids.dtype)
        return self.segment_ids[..., None] == numbers[None, None, :]

    def sum(self, values: Float[Array, "B T"]) -> Float[Array, "B S"]:
        """Add up a token array inside each sequence."""
        if self.slots == 1:
            return jnp.sum(values, axis=1, keepdims=True)
        return jnp.sum(jnp.where(self._membership(), values[..., None], 0), axis=1)

    def max(self, values: Float[Array, "B T"]) -> Float[Array, "B S"]:
        """Largest entry of each sequence; 0 for an empty slot. For non-negative arrays."""
        if self.slots == 1:
            return jnp.max(values, axis=1, keepdims=True, initial=0)
        return jnp.max(jnp.where(self._membership(), values[..., None], 0), axis=1, initial=0)

    def mean(self, values: Float[Array, "B T"], mask: Float[Array, "B T"]) -> Float[Array, "B S"]:
        """Average inside each sequence:  Σ_t mask · values / (Σ_t mask + 1e-8)."""
        return self.sum(values * mask) / (self.sum(mask) + EPSILON)

    def spread(self, values: Float[Array, "B S"]) -> Float[Array, "B T"]:
        """Give every token the value of its sequence; 0 on padding of a packed row."""
        if self.slots == 1:
            return jnp.broadcast_to(values, self.segment_ids.shape)
        return jnp.sum(jnp.where(self._membership(), values[:, None, :], 0), axis=2)


def slots_factor(segment_ids: Array, slots: int) -> Array | float:
    """1, and NaN where only the running program can see what `check_slots` would refuse.

    A loss that is multiplied by it is NaN with NaN gradients, instead of missing sequences.
    """
    if not isinstance(segment_ids, jax_core.Tracer):
        return 1.0
    return jnp.where(jnp.max(segment_ids, initial=0) > slots, jnp.nan, 1.0)


def check_slots(segment_ids: Array, slots: int) -> None:
    """Refuse rows that hold more sequences than there are slots, where the ids can be read.

    Raises:
      ValueError: a concrete `segment_ids` has a number above `slots`. Under `jit` the numbers are
        not there to be read, so check a batch once on the host.
    """
    if isinstance(segment_ids, jax_core.Tracer):  # first: a tracer refuses the next question
        return
    if not getattr(segment_ids, "is_fully_addressable", True):
        return
    with jax.ensure_compile_time_eval():  # constants of a traced function are concrete too
        most = int(segment_ids.max(initial=0))  # where the ids are: one number travels
    if most > slots:
        raise ValueError(
            f"a row holds {most} sequences but max_segments={slots}; "
            f"pass max_segments={most} or more (a static number, the same for every batch)"
        )
