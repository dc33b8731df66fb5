"""Out of the shards of a mesh into safetensors files, a tensor at a time.

Every tensor is cut out of its stack where it lives, given its adapter and its dtype there, brought
to the host, and appended to its file; so the host holds one of them, whatever the model's size. In
a job of several processes all of them take part in bringing it, and process 0 alone writes.

A safetensors file is the length of its header (u64), the header (JSON: name -> dtype, shape and
place among the bytes), and the bytes of all tensors.
"""

import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np

from grpo_jax.core.policy import Params
from grpo_jax.models import hf_names
from grpo_jax.models.low_rank import LowRank
from grpo_jax.models.model_config import ModelConfig
from grpo_jax.scale import multihost

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class Tensor(NamedTuple):
    """A tensor of a file, not yet on the host."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]  # called by all processes, in the same order

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def tensors_of(config: ModelConfig, params: Params, dtype: Any = None) -> list[Tensor]:
    """Name what a file holds of the parameters, in the order of their tree.

    Args:
      config: the model.
      params: arrays, anywhere; a matrix with an adapter beside it (`lora.attach`) is merged.
      dtype: of the tensors; what they have if None.
    """
    tensors = []
    for path, leaf in jax.tree.leaves_with_path(params, is_leaf=_is_low_rank):
        base = leaf.base if _is_low_rank(leaf) else leaf
        wanted = np.dtype(dtype or base.dtype)
        names, shape = hf_names.file_names(path, base.shape, config)
        stack = base.shape[: base.ndim - len(shape)]
        for name, at in zip(names, np.ndindex(stack), strict=True):
            read = functools.partial(_read, leaf, at, wanted)
            tensors.append(Tensor(name, shape, wanted, read))
    return tensors


def _is_low_rank(x: Any) -> bool:
    return isinstance(x, LowRank)


def _read(leaf: Any, at: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Bring entry `at` of a stack to the host, in every process."""
    if isinstance(leaf, np.ndarray):
        return leaf[at].astype(dtype, copy=False)
    place = (leaf.base if _is_low_rank(leaf) else leaf).sharding
    if isinstance(place, jax.sharding.NamedSharding):
        place = jax.NamedSharding(place.mesh, jax.P(*place.spec[len(at) :]))
    else:
        place = None
    # Not `np.asarray(leaf)[at]`: an array keeps its copy on the host for as long as it lives.
    return multihost.fetch(_entry(leaf, at, dtype, place))


@functools.partial(jax.jit, static_argnames=("dtype", "place"))
def _entry(leaf: Any, at: tuple[jax.Array, ...], dtype: np.dtype, place: Any) -> jax.Array:
    for i in at:
        take = functools.partial(jax.lax.dynamic_index_in_dim, index=i, axis=0, keepdims=False)
        leaf = jax.tree.map(take, leaf)
    whole = (leaf.merged() if _is_low_rank(leaf) else leaf).astype(dtype)
    return whole if place is None else jax.lax.with_sharding_constraint(whole, place)


def write_shards(folder: Path, tensors: Sequence[Tensor], limit: int) -> None:
    """Write one file, or several of at most `limit` bytes (one tensor at least) and their index.

    All processes of a job call this; process 0 writes.
    """
    shards = _cut(tensors, limit)
    arrays = (tensor.read() for shard in shards for tensor in shard)
    try:
        if multihost.is_main():
            _write_all(folder, shards, arrays)
    finally:
        if multihost.count() > 1:  # after an error too: the others wait for what this one holds
            for _ in arrays:
                pass


def _cut(tensors: Sequence[Tensor], limit: int) -> list[list[Tensor]]:
    """Fill shards in order, each up to `limit` bytes; inside, the widest numbers come first."""
    shards: list[list[Tensor]] = [[]]
    room = limit
    for tensor in tensors:
        if tensor.nbytes > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return [sorted(shard, key=lambda t: -t.dtype.itemsize) for shard in shards]


def _write_all(folder: Path, shards: list[list[Tensor]], arrays: Iterator[np.ndarray]) -> None:
    if len(shards) == 1:
        _write_file(folder / SINGLE, shards[0], arrays)
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / name, shard, arrays)
        weight_map |= {tensor.name: name for tensor in shard}
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(path: Path, shard: list[Tensor], arrays: Iterator[np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in shard:
        if tensor.dtype.name not in _DTYPES:
            raise ValueError(
                f"{tensor.name} is {tensor.dtype.name}; a weight file holds {', '.join(_DTYPES)}"
            )
        begin, end = end, end + tensor.nbytes
        kind, shape = _DTYPES[tensor.dtype.name], list(tensor.shape)
        header[tensor.name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the first tensor is aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in shard:
            _append(file, next(arrays))


def _append(file: BinaryIO, array: np.ndarray) -> None:
    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
