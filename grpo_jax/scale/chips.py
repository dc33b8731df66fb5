"""What a chip can do at most, with the source of each number, and devices that are not here.

A topology is a chip and a shape, `v5e:16x16`, or a number of GPUs of one machine, `h200x8`, or
`cpu:8`: devices of this machine, for which a plan can be compared with what really runs. With `*4`
behind it a TPU topology is four slices, joined by a slower network.
"""

import dataclasses
import math
import re
from typing import Any

import jax
from jax.experimental import topologies


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peak numbers of one chip; nothing here was measured by us."""

    name: str
    flops: float  # bfloat16 operations a second
    memory: float  # bytes
    memory_bandwidth: float  # bytes a second
    link_bandwidth: float  # bytes a second that a chip sends to all its neighbours together
    dimensions: int  # of the torus that the links form
    source: str


CHIPS: dict[str, Chip] = {
    # Links: the pages give both directions together; a chip sends half of that.
    "v5e": Chip(
        "v5e", 197e12, 16e9, 819e9, 400e9 / 2, 2, "https://docs.cloud.google.com/tpu/docs/v5e"
    ),
    "v5p": Chip(
        "v5p", 459e12, 95e9, 2765e9, 1200e9 / 2, 3, "https://docs.cloud.google.com/tpu/docs/v5p"
    ),
    # Dense products, without sparsity; every GPU of a machine reaches every other by NVLink.
    "h100": Chip(
        "h100", 989e12, 80e9, 3350e9, 900e9 / 2, 1, "https://www.nvidia.com/en-us/data-center/h100/"
    ),
    "h200": Chip(
        "h200",
        989e12,
        141e9,
        4800e9,
        900e9 / 2,
        1,
        "https://www.nvidia.com/en-us/data-center/h200/",
    ),
    "v6e": Chip(
        "v6e", 918e12, 32e9, 1638e9, 800e9 / 2, 2, "https://docs.cloud.google.com/tpu/docs/v6e"
    ),
}


_GPU = """\
gpu_device_info {
  cuda_compute_capability { major: 9 }
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 core_count: 132 fpus_per_core: 128
  shared_memory_per_block_optin: 232448 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: %d device_memory_size: %d
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "%s"
"""  # a Hopper GPU, as XLA's own target descriptions spell it
_GPUS = ("h100", "h200")

KINDS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e"}
KINDS |= {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200"}
"""What JAX calls a chip (`device_kind`), and our name for it."""


def utilisation(
    flops: float, seconds: float, devices: int, kind: str | None = None
) -> float | None:
    """MFU: FLOPs / (seconds · devices · peak), a fraction; arXiv:2204.02311.

    Args:
      flops: that the work needs, over all chips; see `models.work`.
      seconds: by the clock.
      devices: how many chips shared the work.
      kind: `device_kind` of the chips; None: of this process's first.

    Returns:
      None where no peak number of the chip is known.
    """
    known = KINDS.get(jax.devices()[0].device_kind if kind is None else kind)
    if known is None or seconds <= 0:
        return None
    return flops / (seconds * devices * CHIPS[known].flops)


@dataclasses.dataclass(frozen=True)
class Topology:
    """The devices that a program is compiled for."""

    name: str
    devices: tuple[Any, ...]
    chip: Chip | None  # None: no peak numbers are known


def topology(name: str) -> Topology:
    """Look up or make the devices of `v5e:16x16`, or the first N of this machine for `cpu:N`.

    Raises:
      ValueError: an unknown name or shape, or no compiler for it.
    """
    match = re.fullmatch(r"([a-z]+\d*[a-z]?)[:x](\d+(?:x\d+)*)(?:\*(\d+))?", name)
    if not match:
        raise ValueError(
            f"topology {name!r} is not CHIP:SHAPE, such as v5e:16x16, v5p:4x4x4, h200x8 or cpu:8"
        )
    kind, shape, slices = match.groups()
    if kind == "cpu" and slices is None:
        return Topology(name, _local(math.prod(map(int, shape.split("x")))), None)
    if kind not in CHIPS:
        raise ValueError(
            f"no peak numbers of a chip {kind!r} are known; there are {', '.join(CHIPS)} and cpu"
        )
    make = _gpus if kind in _GPUS else _tpus
    return Topology(name, make(name, kind, shape, int(slices or 1)), CHIPS[kind])


def _tpus(name: str, kind: str, shape: str, slices: int) -> tuple[Any, ...]:
    try:
        several: dict[str, Any] = {} if slices == 1 else {"num_slices": slices}
        if math.prod(map(int, shape.split("x"))) == 1:
            several["chips_per_host_bounds"] = (1, 1, 1)  # else a host has four chips
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{kind}:{shape}", **several
        )
    except Exception as error:
        text = str(error).splitlines()[0]
        missing = "libtpu" in str(error) or "not installed" in text
        raise ValueError(
            f"the TPU compiler is not here ({text}), and a plan without it would be arithmetic "
            "alone; install it with pip install 'jax[tpu]' (no TPU is needed), and set "
            "TPU_SKIP_MDS_QUERY=1 outside Google Cloud"
            if missing
            else f"the TPU compiler refuses the topology {name!r}: {text}"
        ) from error
    return tuple(found.devices)


def _gpus(name: str, kind: str, shape: str, machines: int) -> tuple[Any, ...]:
    if "x" in shape or machines > 1:
        raise ValueError(
            f"topology {name!r}: GPUs of one machine have a number, as in {kind}x8; several "
            "machines cannot be planned yet"
        )
    chip = CHIPS[kind]
    description = _GPU % (chip.memory_bandwidth, chip.memory, f"NVIDIA {kind.upper()}")
    try:
        found = topologies.get_topology_desc(
            kind, "cuda", target_config=description, topology=f"1x1x{shape}"
        )
    except NotImplementedError as error:
        raise ValueError(
            "the CUDA compiler is not here, and a plan without it would be arithmetic alone; "
            "install it with pip install 'jax[cuda13]' (no GPU is needed)"
        ) from error
    return tuple(found.devices)


def _local(count: int) -> tuple[Any, ...]:
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ValueError(
            f"cpu:{count} needs {count} CPU devices and there are {len(devices)}; set "
            f"JAX_NUM_CPU_DEVICES={count}"
        )
    return tuple(devices[:count])
