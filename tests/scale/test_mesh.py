"""The mesh: sizes fill in, and what does not fit says so."""

import dataclasses

import jax
import numpy as np
import pytest

from grpo_jax.scale import chips, mesh
from grpo_jax.scale.mesh import MeshConfig


@pytest.mark.parametrize(
    ("config", "devices", "sizes"),
    [
        (MeshConfig(), 1, (1, 1, 1, 1, 1)),
        (MeshConfig(), 8, (1, 8, 1, 1, 1)),
        (MeshConfig(data=2, fsdp=-1, tensor=2), 8, (2, 2, 1, 1, 2)),
        (MeshConfig(data=-1, fsdp=4, tensor=2), 8, (1, 4, 1, 1, 2)),
        (MeshConfig(data=2, fsdp=2, tensor=-1), 8, (2, 2, 1, 1, 2)),
        (MeshConfig(data=1, fsdp=2, tensor=4), 8, (1, 2, 1, 1, 4)),
        (MeshConfig(fsdp=-1, context=2, tensor=2), 8, (1, 2, 1, 2, 2)),
        (MeshConfig(fsdp=-1, expert=4), 8, (1, 2, 4, 1, 1)),
    ],
)
def test_sizes_fill_in(config, devices, sizes):
    assert mesh.axis_sizes(config, devices) == sizes


@pytest.mark.parametrize(
    ("config", "devices"),
    [(MeshConfig(data=3), 8), (MeshConfig(data=2, fsdp=2, tensor=1), 8), (MeshConfig(fsdp=16), 8)],
)
def test_a_mesh_that_does_not_fit_names_the_devices(config, devices):
    with pytest.raises(ValueError, match="does not fit 8 devices; make the product 8"):
        mesh.axis_sizes(config, devices)


def test_bad_sizes_are_refused_at_construction():
    with pytest.raises(ValueError, match=r"mesh.tensor = 0 must be a positive number of devices"):
        MeshConfig(tensor=0)
    with pytest.raises(ValueError, match="only one mesh axis may be -1, not data and fsdp"):
        MeshConfig(data=-1)


def test_axes_are_auto_and_rows_count_data_times_fsdp():
    made = mesh.make_mesh(MeshConfig(data=2, fsdp=-1, tensor=2))
    assert made.axis_names == mesh.AXES
    assert all(kind == jax.sharding.AxisType.Auto for kind in made.axis_types)
    assert mesh.row_shards(made) == 4
    assert mesh.row_shards(jax.make_mesh((8,), ("tensor",), axis_types=made.axis_types[:1])) == 1


def test_a_mesh_may_use_some_of_the_devices():
    made = mesh.make_mesh(MeshConfig(), jax.devices()[:2])
    assert dict(made.shape) == {"data": 1, "fsdp": 2, "expert": 1, "context": 1, "tensor": 1}


@dataclasses.dataclass(frozen=True)
class Chip:
    """As much of a device as the arrangement looks at."""

    id: int
    slice_index: int
    process_index: int = 0
    platform: str = "gpu"
    device_kind: str = "chip"


def test_only_replicas_leave_a_slice():
    """Four slices of four chips, told apart by `slice_index` and given in any order."""
    chips = [Chip(id=i, slice_index=i % 4) for i in range(16)]
    made = mesh.over_slices((8, 2, 1, 1, 1), 4, chips)
    assert made.shape == (8, 2, 1, 1, 1)
    slices = np.vectorize(lambda chip: chip.slice_index)(made).reshape(8, 2)
    assert (slices[:, :1] == slices).all()  # a replica lies in one slice
    assert slices[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len({chip.id for chip in made.flat}) == 16


def test_data_that_does_not_divide_over_slices_is_refused():
    with pytest.raises(ValueError, match="mesh.data = 1 over 4 slices: .* a multiple of 4"):
        mesh.over_slices((1, 4, 1, 1, 1), 4, [Chip(i, i) for i in range(4)])


def test_slices_of_a_topology():
    """The same with the devices of the TPU compiler, through the ordinary door."""
    pytest.importorskip("libtpu", reason="needs jax[tpu]: its compiler runs without a TPU")
    devices = chips.topology("v5e:2x2*2").devices
    made = mesh.make_mesh(MeshConfig(data=2, fsdp=4), devices)
    assert [{d.slice_index for d in row.flat} for row in made.devices] == [{0}, {1}]
    with pytest.raises(ValueError, match="mesh.data = 1 over 2 slices"):
        mesh.make_mesh(MeshConfig(), devices)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"match": "("}, "match = '\\(' is no regular expression"),
        ({"match": "up", "axes": ("model",)}, "axes of 'up': unknown mesh axis 'model'"),
        ({"match": "up", "axes": ("data+x",)}, "unknown mesh axis 'x'; there are data, fsdp"),
    ],
)
def test_rules_of_a_config_are_checked_at_construction(rule, message):
    with pytest.raises(ValueError, match=message):
        mesh.ShardingRule(**rule)
