"""From safetensors files into the shards of a mesh, a block of rows at a time.

Each device's part of an array is read by slices of the file and written where it will live. A part
that is small enough is put together on the host first; a larger one is a buffer on the device that
takes block after block, in place. So the host holds `STAGING_BYTES` at most beside what the
devices hold, whatever the model's size, and a process reads its own devices' parts alone.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

STAGING_BYTES = 32 * 2**20

Index = tuple[slice, ...]
Tensors = dict[str, Any]  # name -> the open file that holds it


def read_array(
    tensors: Tensors,
    names: Sequence[str],
    leaf: jax.ShapeDtypeStruct,
    inner: tuple[int, ...],
    place: jax.sharding.Sharding,
    staging_bytes: int = STAGING_BYTES,
) -> jax.Array:
    """Read one of our arrays, stacked out of the file's tensors.

    Args:
      tensors: the open files.
      names: the tensors, in the order of the leading axes of `leaf`.
      leaf: shape and dtype of the array; values are cast to it block by block.
      inner: shape of each tensor: the last axes of `leaf`.
      place: where the array lives; only the parts of this process's devices are read.
      staging_bytes: what the host may hold at one time.
    """
    parts: dict[tuple, jax.Array] = {}
    arrays = []
    for device, index in place.addressable_devices_indices_map(leaf.shape).items():
        bounds = tuple(
            slice(*s.indices(size)[:2]) for s, size in zip(index or (), leaf.shape, strict=True)
        )
        key = tuple((s.start, s.stop) for s in bounds)
        if key not in parts:
            parts[key] = _read_part(
                tensors, names, leaf.dtype, leaf.shape, inner, bounds, device, staging_bytes
            )
        arrays.append(jax.device_put(parts[key], device))  # a replica is copied, not read again
    return jax.make_array_from_single_device_arrays(leaf.shape, place, arrays)


def _read_part(
    tensors: Tensors,
    names: Sequence[str],
    dtype: Any,
    full: tuple[int, ...],
    inner: tuple[int, ...],
    bounds: Index,
    device: Any,
    staging_bytes: int,
) -> jax.Array:
    """Read what one device holds of an array."""
    stacked = len(full) - len(inner)
    chosen = np.arange(len(names)).reshape(full[:stacked])[bounds[:stacked]]
    shape = tuple(s.stop - s.start for s in bounds)
    small = math.prod(shape) * np.dtype(dtype).itemsize <= staging_bytes
    buffer: Any = np.empty(shape, dtype) if small else jnp.zeros(shape, dtype, device=device)
    for at in np.ndindex(chosen.shape):
        name = names[int(chosen[at])]
        for start, block in row_blocks(tensors, name, bounds[stacked:], staging_bytes // 2):
            if small:
                buffer[at][start : start + len(block)] = block
                continue
            corner = (*at, start, *(0 for _ in inner[1:]))
            block = block.astype(dtype).reshape((1,) * stacked + block.shape)
            # Waited for, or blocks would pile up on the host.
            buffer = jax.block_until_ready(_write(buffer, block, corner))
    return jax.device_put(buffer, device)


def row_blocks(
    tensors: Tensors, name: str, bounds: Index, limit: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first row, rows) of a part of one tensor, in blocks of about `limit` bytes."""
    rows, *rest = bounds
    part = tensors[name].get_slice(name)
    row_bytes = 4 * max(1, math.prod(s.stop - s.start for s in rest))  # as wide as it is cast to
    step = max(1, limit // row_bytes)
    for start in range(rows.start, rows.stop, step):
        stop = min(start + step, rows.stop)
        yield start - rows.start, part[(slice(start, stop), *rest)]


def _update(buffer: jax.Array, block: jax.Array, corner: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(buffer, block, corner)


_write = jax.jit(_update, donate_argnums=0)
