"""The mesh: sizes fill in, and what does not fit says so."""

import jax
import pytest

from grpo_jax.scale import mesh
from grpo_jax.scale.mesh import MeshConfig


@pytest.mark.parametrize(
    ("config", "devices", "sizes"),
    [
        (MeshConfig(), 1, (1, 1, 1, 1)),
        (MeshConfig(), 8, (1, 8, 1, 1)),
        (MeshConfig(data=2, fsdp=-1, tensor=2), 8, (2, 2, 1, 2)),
        (MeshConfig(data=-1, fsdp=4, tensor=2), 8, (1, 4, 1, 2)),
        (MeshConfig(data=2, fsdp=2, tensor=-1), 8, (2, 2, 1, 2)),
        (MeshConfig(data=1, fsdp=2, tensor=4), 8, (1, 2, 1, 4)),
        (MeshConfig(fsdp=-1, context=2, tensor=2), 8, (1, 2, 2, 2)),
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
    assert dict(made.shape) == {"data": 1, "fsdp": 2, "context": 1, "tensor": 1}
