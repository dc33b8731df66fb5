"""The device mesh: four axes, whatever the machine.

- `data`: replicas of the parameters; rows of a batch are split over it.
- `fsdp`: parameters and rows are both split over it.
- `context`: the tokens of each row are split over it; attention collects keys and values.
- `tensor`: heads, feed-forward width and vocabulary are split over it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "context", "tensor")
ROW_AXES = ("data", "fsdp")  # what the rows of a batch are split over


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many devices each axis of the mesh has; one of them may be -1, "all that are left"."""

    data: int = 1  # replicas of the whole model
    fsdp: int = -1  # shards of the parameters, and of the rows
    context: int = 1  # shards of the tokens of a row; divides rollout.length_multiple
    tensor: int = 1  # shards of heads, feed-forward width and vocabulary

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
    """Build the mesh over `devices` (default: all there are), with Auto axes."""
    devices = list(jax.devices() if devices is None else devices)
    # Explicit axes, the default, make ordinary models fail at their first matmul.
    auto = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(axis_sizes(config, len(devices)), AXES, axis_types=auto, devices=devices)


def row_shards(mesh: Mesh) -> int:
    """Into how many parts the rows of a batch are cut."""
    return math.prod(mesh.shape.get(name, 1) for name in ROW_AXES)
