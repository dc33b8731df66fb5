"""Checkpoints in a bucket: the same code, every path through epath and TensorStore.

The bucket is a folder of this machine behind the doors of both libraries: names begin with `gs://`
for us and for Orbax, which then commits as on object storage, without a rename.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
from etils.epath import backend
from fsspec.implementations.dirfs import DirFileSystem
from orbax.checkpoint._src.path import gcs_utils

from grpo_jax.scale.mesh import MeshConfig
from grpo_jax.train import folder
from grpo_jax.train.checkpoint import CheckpointConfig, Checkpointer
from tests.train.test_checkpoint import assert_identical, make_state, shapes_of

BUCKET = "gs://bucket/runs/first"


class Bucket(DirFileSystem):
    """A folder whose names begin with gs://."""

    def _join(self, path):
        return super()._join(str(path).removeprefix("gs://"))

    def rename(self, path1, path2, **options):
        return self.mv(path1, path2, **options)


@pytest.fixture
def bucket(tmp_path, monkeypatch) -> Path:
    files = Bucket(path=str(tmp_path))

    def filesystem(self, name):
        assert name == "gcs", name
        return files

    def store(path):
        place = tmp_path / str(path).removeprefix("gs://")
        return {"driver": "file", "path": str(place)}

    monkeypatch.setattr(backend._FileSystemSpecBackend, "_get_filesystem", filesystem)
    monkeypatch.setattr(gcs_utils, "get_kvstore_for_gcs", store)
    monkeypatch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda path: False)
    return tmp_path / "bucket" / "runs" / "first"


def open_bucket(said, **settings):
    return Checkpointer(BUCKET, CheckpointConfig(**settings), say=said.append)


def test_a_bucket_holds_checkpoints_as_a_folder_does(bucket):
    """Saved in the background on one mesh, kept by rule, and restored onto another."""
    said, run = [], {"stream": {"epoch": 1}}
    made = make_state(seed=3, mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    with open_bucket(said, keep=2) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, made, run)
        assert checkpointer.wait()
    assert sorted(path.name for path in bucket.iterdir() if path.name.isdigit()) == ["2", "3"]
    elsewhere = make_state(seed=4, mesh=MeshConfig(fsdp=4, tensor=2))
    with open_bucket(said) as checkpointer:
        restored = checkpointer.restore(shapes_of(elsewhere))
    assert restored.step == 3 and restored.run == run and said == []
    wanted = jax_put(made, elsewhere)
    assert_identical(restored.state, wanted)


def jax_put(made, like):
    import jax

    return jax.tree.map(lambda x, y: jax.device_put(np.asarray(x), y.sharding), made, like)


def test_a_damaged_one_is_set_aside_and_a_cut_off_one_removed(bucket):
    said, made = [], make_state(seed=1)
    with open_bucket(said) as checkpointer:
        checkpointer.save(1, made, {"at": 1})
        checkpointer.save(2, made, {"at": 2})
    arrays = [p for p in (bucket / "2").rglob("*") if p.is_file() and "/d/" in str(p)]
    for path in arrays:
        path.write_bytes(b"")
    shutil.copytree(bucket / "1", bucket / "3.orbax-checkpoint-tmp-7")
    with open_bucket(said) as checkpointer:
        restored = checkpointer.restore(shapes_of(made))
        assert checkpointer.steps() == [1]
    assert restored.step == 1 and restored.run == {"at": 1}
    assert any("checkpoint 2 is damaged" in line and "step 1" in line for line in said), said
    assert (bucket / "damaged_2").exists()
    assert any("checkpoint 3 was never finished" in line for line in said)


def test_a_run_asks_the_bucket_whether_it_goes_on(bucket, tmp_path):
    place = tmp_path / "run"
    place.mkdir()
    (place / folder.CONFIG).write_text("")
    assert "had saved nothing yet" in folder.plan(place, "auto", {}, BUCKET).said
    with open_bucket([]) as checkpointer:
        checkpointer.save(1, make_state(), {})
    assert folder.plan(place, "auto", {}, BUCKET).action == "resume"
    moved = {"checkpoint.dir": (BUCKET, None)}
    with pytest.raises(ValueError, match="unfinished run with other settings"):
        folder.plan(place, "auto", moved)
    with pytest.raises(ValueError, match="'gs://bucket/runs/first' holds checkpoints of another"):
        folder.plan(tmp_path / "new", "auto", {}, BUCKET)
