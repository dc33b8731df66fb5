"""Reading into shards: every value where it belongs, and never much on the host at one time."""

import dataclasses

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from grpo_jax.models import hf, hf_shards, presets
from grpo_jax.scale import rules
from grpo_jax.scale.mesh import MeshConfig, make_mesh


@pytest.fixture(scope="module")
def saved(draw, tmp_path_factory):
    """A folder of many small files."""
    config = presets.preset(
        "tiny", num_layers=2, hidden_size=32, intermediate_size=64, tie_embeddings=False
    )
    params = draw(config)
    folder = tmp_path_factory.mktemp("sharded") / "m"
    hf.save_model(folder, config, params, max_shard_bytes=20_000)
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder, config, params


def on_a_mesh(shapes):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    return rules.partition(shapes, mesh, say=lambda _: None)


@pytest.mark.parametrize("staging", [2**20, 1024], ids=["whole_parts", "blocks"])
@pytest.mark.parametrize("place", [None, on_a_mesh])
def test_every_shard_holds_its_slice(saved, staging, place):
    folder, config, params = saved
    found = hf.load_params(folder, config, place, staging_bytes=staging)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    if place is not None:
        wanted = place(params)
        assert all(
            x.sharding == y
            for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
        )
        up = found["layers"]["mlp"]["up"]["weight"]
        assert up.addressable_shards[0].data.shape == (2, 32, 16)


def test_no_block_is_larger_than_half_the_staging_and_replicas_are_read_once(saved, monkeypatch):
    """Bytes are counted as they leave the files: 4 replicas or 1, each value leaves once."""
    folder, config, params = saved
    sizes, read = [], hf_shards.row_blocks

    def counted(*arguments):
        for start, block in read(*arguments):
            sizes.append(block.nbytes)
            yield start, block

    monkeypatch.setattr(hf_shards, "row_blocks", counted)
    hf.load_params(folder, config, on_a_mesh, staging_bytes=2048)
    assert max(sizes) <= 1024
    assert sum(sizes) == sum(x.nbytes for x in jax.tree.leaves(params))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_are_cast_block_by_block(saved, dtype, tmp_path):
    folder, config, params = saved
    half = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    hf.save_model(tmp_path / "half", config, half)
    wanted = dataclasses.replace(config, param_dtype=dtype)
    found = hf.load_params(tmp_path / "half", wanted, staging_bytes=1024)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(half), strict=True):
        assert ours.dtype == dtype
        np.testing.assert_array_equal(ours, theirs.astype(dtype))


def test_two_stacked_axes_are_cut_along_each(tmp_path):
    """Experts: [L, E, out, in] out of L · E tensors."""
    values = np.arange(2 * 4 * 6 * 4, dtype=np.float32).reshape(2, 4, 6, 4)
    names = [f"{layer}.{e}" for layer in range(2) for e in range(4)]
    save_file(dict(zip(names, values.reshape(8, 6, 4).copy(), strict=True)), tmp_path / "f")
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    spec = jax.sharding.PartitionSpec(None, "fsdp", "tensor")
    place = jax.sharding.NamedSharding(mesh, spec)
    leaf = jax.ShapeDtypeStruct(values.shape, np.float32)
    with safe_open(tmp_path / "f", framework="np") as file:
        tensors = dict.fromkeys(names, file)
        for staging in (2**20, 64):
            found = hf_shards.read_array(tensors, names, leaf, (6, 4), place, staging)
            np.testing.assert_array_equal(found, values)
            assert found.sharding == place
