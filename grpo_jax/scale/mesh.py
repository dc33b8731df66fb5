"""The device mesh: five axes, whatever the machine.

- `data`: replicas of the parameters; rows of a batch are split over it. Over several slices, or
  hosts that only a slower network joins, it is the one axis that leaves a slice.
- `fsdp`: parameters and rows are both split over it.
- `expert`: the experts of a routed layer are split over it. Everything else sees it as more `fsdp`.
- `context`: the tokens of each row are split over it; attention collects keys and values.
- `tensor`: heads, feed-forward width and vocabulary are split over it.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "expert", "context", "tensor")
ROW_AXES = ("data", "fsdp", "expert")  # what the rows of a batch are split over


@dataclasses.dataclass(frozen=True)
class ShardingRule:
    """Where the parameters of some paths live; the rules of a config stand before our own."""

    match: str  # regular expression on the path of a parameter, as in layers/mlp/up/weight
    # mesh axis of each of the last dimensions: data, fsdp, expert, context, tensor, several joined
    # by +, or null = whole; an empty list keeps all of it on every device
    axes: tuple[str | None, ...] = ()
    dimensions: int | None = None  # of arrays of so many dimensions only; null = of all

    def __post_init__(self):
        try:
            re.compile(self.match)
        except re.error as error:
            raise ValueError(f"match = {self.match!r} is no regular expression: {error}") from error
        for axis in self.axes:
            for name in (axis or "").split("+") if axis else ():
                if name not in AXES:
                    raise ValueError(
                        f"axes of {self.match!r}: unknown mesh axis {name!r}; there are "
                        f"{', '.join(AXES)}, several are joined by +"
                    )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many devices each axis of the mesh has; one of them may be -1, "all that are left"."""

    data: int = 1  # replicas of the whole model
    fsdp: int = -1  # shards of the parameters, and of the rows
    expert: int = 1  # shards of the experts of routed layers; of rows and other parameters too
    context: int = 1  # shards of the tokens of a row; divides rollout.length_multiple
    tensor: int = 1  # shards of heads, feed-forward width and vocabulary
    rules: tuple[ShardingRule, ...] = ()  # where parameters live; the first that matches decides

    def __post_init__(self):
        sizes = {name: getattr(self, name) for name in AXES}
        for name, size in sizes.items():
            if size < 1 and size != -1:
                raise ValueError(
                    f"mesh.{name} = {size} must be a positive number of devices, or -1 for all left"
                )
        free = [name for name, size in sizes.items() if size == -1]
        if len(free) > 1:
            raise ValueError(f"only one mesh axis may be -1, not {' and '.join(free)}")


def axis_sizes(config: MeshConfig, devices: int) -> tuple[int, ...]:
    """Fill in the axis that is -1.

    Args:
      config: the sizes that were asked for.
      devices: how many devices there are.

    Returns:
      One size per name in `AXES`; their product is `devices`.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    sizes = [getattr(config, name) for name in AXES]
    fixed = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and devices % fixed == 0:
        return tuple(devices // fixed if size == -1 else size for size in sizes)
    if fixed != devices:
        shape = " × ".join(f"{name} {size}" for name, size in zip(AXES, sizes, strict=True))
        raise ValueError(
            f"a mesh of {shape} does not fit {devices} devices; make the product {devices}, "
            "or set one axis to -1 and let the others divide it"
        )
    return tuple(sizes)


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Build the mesh over `devices` (default: all there are), with Auto axes.

    Where the devices belong to several slices, each slice holds whole replicas.

    Raises:
      ValueError: the sizes do not fit the devices, or `data` does not divide over the slices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = axis_sizes(config, len(devices))
    # Explicit axes, the default, make ordinary models fail at their first matmul.
    auto = (AxisType.Auto,) * len(AXES)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        return jax.make_mesh(sizes, AXES, axis_types=auto, devices=devices)
    return Mesh(over_slices(sizes, slices, devices), AXES, axis_types=auto)


def over_slices(sizes: Sequence[int], slices: int, devices: Sequence[Any]) -> np.ndarray:
    """Arrange devices of several slices: `data` leaves a slice, and no other axis does.

    Args:
      sizes: one for each of `AXES`.
      slices: how many different `slice_index` the devices have.
      devices: all of them.

    Returns:
      Devices [data, fsdp, ...], the replicas of one slice next to each other.
    """
    data, *rest = sizes
    if data % slices:
        raise ValueError(
            f"mesh.data = {data} over {slices} slices: only data leaves a slice, so make it a "
            f"multiple of {slices}"
        )
    inside, between = (data // slices, *rest), (slices, *(1 for _ in rest))
    return mesh_utils.create_hybrid_device_mesh(inside, between, devices=devices)


def row_shards(mesh: Mesh) -> int:
    """Into how many parts the rows of a batch are cut."""
    return math.prod(mesh.shape.get(name, 1) for name in ROW_AXES)
