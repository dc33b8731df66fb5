"""Writing out of shards: every value under its name, and never a second model on the host."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from grpo_jax.models import hf, hf_write, lora, presets
from grpo_jax.scale import multihost, rules
from grpo_jax.scale.mesh import MeshConfig, make_mesh

SHAPE = presets.preset(
    "tiny", vocab_size=2048, num_layers=6, hidden_size=256, intermediate_size=512
)
LARGEST = 2048 * 256 * 4  # the table, in float32
CONFIG = lora.LoraConfig(rank=2, alpha=4.0)


def on_a_mesh(tree):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    return jax.device_put(tree, rules.partition(tree, mesh, say=lambda _: None))


@pytest.fixture(scope="module")
def params(draw):
    return on_a_mesh(draw(SHAPE))


@pytest.fixture(scope="module")
def adapter(params):
    fresh = lora.init_adapter(params, CONFIG, jax.random.key(0))
    return on_a_mesh(jax.tree.map(lambda x: x + 0.1, fresh))


@pytest.mark.parametrize("max_shard_bytes", [hf.DEFAULT_SHARD_BYTES, 4 * LARGEST])
@pytest.mark.parametrize("what", ["weights", "cast", "with an adapter"])
def test_the_host_holds_a_tensor_at_a_time(params, adapter, what, max_shard_bytes, tmp_path):
    """Of a model six times as large as its largest tensor, in one file and in several."""
    assert sum(x.nbytes for x in jax.tree.leaves(params)) > 6 * LARGEST
    dtype = "bfloat16" if what == "cast" else None

    def save(params):
        if what == "with an adapter":
            params = lora.attach(params, adapter, CONFIG.scale)
        hf.save_model(tmp_path / "m", SHAPE, params, dtype=dtype, max_shard_bytes=max_shard_bytes)

    fresh = jax.tree.map(jnp.copy, params)  # an array may keep what it once gave to the host
    save(params)  # compiled
    tracemalloc.start()
    try:
        save(fresh)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.1 * LARGEST + 2**18
    assert after < 2**18  # no copy is kept beside an array


def test_an_adapter_is_merged_on_the_way_out(params, adapter, tmp_path):
    hf.save_model(tmp_path / "m", SHAPE, lora.attach(params, adapter, CONFIG.scale))
    found = hf.load_model(tmp_path / "m").params
    wanted = lora.merge(params, adapter, CONFIG.scale)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def test_a_dtype_on_the_way_out_is_that_of_the_cast_tree(params, tmp_path):
    hf.save_model(tmp_path / "m", SHAPE, params, dtype="bfloat16")
    model = hf.load_model(tmp_path / "m")
    assert model.config.param_dtype == "bfloat16"
    cast = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    jax.tree.map(np.testing.assert_array_equal, model.params, cast)


def test_a_file_is_what_the_safetensors_library_reads(tmp_path):
    """Widest numbers first, so that each tensor begins at a multiple of its own width."""
    rng = np.random.default_rng(0)
    arrays = {
        "half": rng.normal(size=(3, 5)).astype("float16"),
        "brain": np.asarray(jax.numpy.arange(7, dtype="bfloat16")),
        "double": rng.normal(size=(2, 2)),
        "single": rng.normal(size=(1,)).astype("float32"),
        "of no size": np.zeros((0, 4), "float32"),
        'name "quoted" é': np.float32([[1]]),
    }
    tensors = [hf_write.Tensor(name, x.shape, x.dtype, lambda x=x: x) for name, x in arrays.items()]
    hf_write.write_shards(tmp_path, tensors, 10**6)
    found = load_file(tmp_path / hf.SINGLE)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    with safe_open(tmp_path / hf.SINGLE, framework="np") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_number_without_a_name_in_the_format_is_refused(tmp_path):
    tensor = hf_write.Tensor("x", (2,), np.dtype("complex64"), lambda: np.zeros(2, "complex64"))
    with pytest.raises(ValueError, match="x is complex64; a weight file holds float64, float32"):
        hf_write.write_shards(tmp_path, [tensor], 10**6)


def test_a_process_that_does_not_write_reads_all_the_same(params, tmp_path, monkeypatch):
    """Bringing a tensor to process 0 takes all processes."""
    fetched = []
    monkeypatch.setattr(multihost, "is_main", lambda: False)
    monkeypatch.setattr(multihost, "count", lambda: 2)
    monkeypatch.setattr(multihost, "fetch", lambda x: fetched.append(x.shape) or np.asarray(x))
    hf_write.write_shards(tmp_path, hf_write.tensors_of(SHAPE, params), 4 * LARGEST)
    assert list(tmp_path.iterdir()) == [] and len(fetched) == 2 + 9 * 6


def test_a_disk_that_fills_up_ends_the_reading_too_and_is_said_by_all(
    params, tmp_path, monkeypatch
):
    """In a job the other processes still bring what they hold, or they would wait for ever."""
    fetched = []
    monkeypatch.setattr(multihost, "count", lambda: 2)
    monkeypatch.setattr(multihost, "everyone", lambda value, *_: [value, None])
    monkeypatch.setattr(multihost, "fetch", lambda x: fetched.append(x.shape) or np.asarray(x))

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_write, "_append", full)
    with pytest.raises(OSError, match="No space left"):
        hf.save_model(tmp_path / "m", SHAPE, params)
    assert list(tmp_path.iterdir()) == [] and len(fetched) == 2 + 9 * 6
