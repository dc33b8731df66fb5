"""Checkpoints: bit for bit, kept by rule, and distrusted when they are read back."""

import dataclasses
import json
import resource
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.scale.mesh import MeshConfig, make_mesh
from grpo_jax.train import checkpoint, optimizer, state
from grpo_jax.train.checkpoint import CheckpointConfig, Checkpointer, CheckpointError
from grpo_jax.train.optimizer import OptimizerConfig

TRANSFORM = optimizer.build_optimizer(OptimizerConfig(), 10).transform
METRIC = CheckpointConfig().metric


def make_params(width=64, seed=0):
    rng = np.random.default_rng(seed)
    odd = np.array([np.nan, -np.inf, -0.0, 1e-45, np.pi], np.float32)  # a denormal among them
    return {"embed": {"table": rng.normal(size=(width, 16))}, "odd": odd}


def make_state(seed=0, mesh=None):
    """A state in which every array, moments included, holds numbers of its own."""
    params, places = make_params(seed=seed), None
    if mesh is not None:
        shapes = state.abstract(params, TRANSFORM)
        places = state.placement(shapes, TRANSFORM, make_mesh(mesh), say=lambda text: None)
    made = state.create(params, TRANSFORM, places)
    leaves, tree = jax.tree.flatten(made)
    leaves = [x + i if x.ndim else jnp.full_like(x, i + seed) for i, x in enumerate(leaves)]
    made = jax.tree.unflatten(tree, leaves)
    return made if places is None else jax.device_put(made, places.state)


def shapes_of(made):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), made)


def assert_identical(a, b):
    """Equal bits, so that NaN equals NaN and -0 differs from 0; and the same places."""

    def one(x, y):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)

    jax.tree.map(one, a, b)


@pytest.fixture
def said():
    return []


@pytest.fixture
def open_folder(tmp_path, said):
    """Open the same folder as often as wanted; everything is closed at the end."""
    opened = []

    def open_it(**settings):
        options = {"read_only": settings.pop("read_only", False)}
        opened.append(
            Checkpointer(tmp_path, CheckpointConfig(**settings), say=said.append, **options)
        )
        return opened[-1]

    yield open_it
    for checkpointer in opened:
        checkpointer.close()


def largest_file(folder: Path) -> Path:
    files = [p for p in folder.rglob("*") if p.is_file()]
    return max(files, key=lambda p: p.stat().st_size)


# --- round trips ----------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [True, False])
def test_a_checkpoint_comes_back_bit_for_bit(open_folder, said, background):
    run = {"stream": {"epoch": 3, "position": 7}, "seed": 2**127 + 1, "ratio": 0.1, "none": None}
    first = open_folder(background=background)
    made = make_state(seed=5)
    first.save(12, made, run, {METRIC: 0.25, "loss": np.float32(1.5)})
    assert first.close()
    restored = open_folder().restore(shapes_of(made))
    assert restored.step == 12 and restored.run == run
    assert restored.metrics == {METRIC: 0.25, "loss": 1.5}
    assert_identical(restored.state, made)
    assert said == []


def test_a_critic_comes_back_with_the_policy_or_stays_behind(open_folder, said):
    policy, beside = make_state(seed=1), make_state(seed=2)
    made = dataclasses.replace(policy, critic=beside)
    open_folder(background=False).save(1, made, {})
    checkpointer = open_folder()
    assert_identical(checkpointer.restore(shapes_of(made)).state, made)
    assert_identical(checkpointer.restore(shapes_of(policy)).state, policy)
    checkpointer.save(2, policy, {})
    with pytest.raises(ValueError, match=r"critic/step is absent there and int32\[\] here"):
        checkpointer.restore(shapes_of(made))
    assert said == []


def test_a_checkpoint_is_restored_onto_another_mesh(open_folder):
    made = make_state(mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    checkpointer = open_folder()
    checkpointer.save(1, made, {})
    assert_identical(checkpointer.restore(shapes_of(made)).state, made)
    other = make_state(seed=1, mesh=MeshConfig())
    restored = checkpointer.restore(shapes_of(other)).state
    jax.tree.map(lambda x, y: np.testing.assert_(x.sharding == y.sharding), restored, other)
    jax.tree.map(np.testing.assert_array_equal, restored, made)


def test_donating_the_state_right_after_save_does_not_reach_the_checkpoint(open_folder):
    made = make_state()
    copy = jax.tree.map(jnp.copy, made)
    table = made.params["embed"]["table"]  # the writer must not hold on to what a step overwrites
    assert checkpoint._detached(table).unsafe_buffer_pointer() != table.unsafe_buffer_pointer()
    checkpointer = open_folder()
    checkpointer.save(1, made, {})
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 + 7, s), donate_argnums=0)
    jax.block_until_ready(overwrite(made))
    assert_identical(checkpointer.restore(shapes_of(copy)).state, copy)


def test_save_returns_before_the_checkpoint_is_complete(open_folder, monkeypatch):
    checkpointer, made = open_folder(), make_state()
    finalize = checkpointer._manager._finalize

    def slow(*arguments):
        time.sleep(0.5)
        finalize(*arguments)

    monkeypatch.setattr(checkpointer._manager, "_finalize", slow)
    begin = time.perf_counter()
    checkpointer.save(1, made, {})
    assert checkpointer.steps() == []  # in progress: not counted as complete
    assert checkpointer.wait() and time.perf_counter() - begin > 0.5
    assert checkpointer.steps() == [1]


def test_an_empty_folder_restores_to_nothing(open_folder):
    assert open_folder().restore(make_state()) is None
    assert open_folder().latest_step() is None


def test_a_run_item_that_is_not_json_is_refused_before_anything_is_written(open_folder):
    checkpointer = open_folder()
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpointer.save(1, make_state(), {"key": jnp.ones(2)})
    assert checkpointer.steps() == []


def test_a_step_that_exists_is_left_as_it_is(open_folder):
    checkpointer = open_folder()
    checkpointer.save(1, make_state(seed=1), {"n": 1})
    checkpointer.save(1, make_state(seed=2), {"n": 2})
    assert checkpointer.wait() and checkpointer.restore(make_state()).run == {"n": 1}


# --- retention ------------------------------------------------------------------------------------


def test_the_newest_and_the_best_are_kept(open_folder):
    checkpointer, made = open_folder(keep=2, keep_best=1), make_state()
    for step, score in [(1, 0.2), (2, 0.9), (3, None), (4, float("nan")), (5, 0.1)]:
        checkpointer.save(step, made, {}, {} if score is None else {METRIC: score})
    checkpointer.wait()
    assert checkpointer.steps() == [2, 4, 5] and checkpointer.best_step() == 2
    again = open_folder(keep=1, keep_best=1)  # scores are read back
    assert again.best_step() == 2
    again.save(6, made, {}, {METRIC: 0.3})
    again.wait()
    assert again.steps() == [2, 6]


def test_without_a_metric_the_newest_is_best(open_folder):
    checkpointer = open_folder()
    for step in (1, 2):
        checkpointer.save(step, make_state(), {})
    checkpointer.wait()
    assert checkpointer.best_step() == checkpointer.latest_step() == 2


def test_due_follows_the_interval(open_folder):
    assert [s for s in range(1, 31) if open_folder(every=10).due(s)] == [10, 20, 30]
    assert not any(open_folder(every=0).due(s) for s in range(1, 31))


@pytest.mark.parametrize("settings", [{"keep": 0}, {"every": -1}, {"keep_best": -1}])
def test_bad_settings_are_refused(settings):
    (name, value) = next(iter(settings.items()))
    with pytest.raises(ValueError, match=f"{name} = {value} must be at least"):
        CheckpointConfig(**settings)


# --- damage ---------------------------------------------------------------------------------------


def two_checkpoints(open_folder):
    checkpointer = open_folder()
    for step in (1, 2):
        checkpointer.save(step, make_state(seed=step), {"n": step})
    checkpointer.wait()
    return checkpointer


def truncate(folder: Path):
    file = largest_file(folder)
    with open(file, "r+b") as handle:
        handle.truncate(file.stat().st_size // 2)


def empty(folder: Path):
    for file in [p for p in folder.rglob("*") if p.is_file()]:
        file.write_bytes(b"")


def cut_the_run_item(folder: Path):
    item = folder / "run" / "metadata"
    item.write_text(item.read_text()[:20])


def lose_the_arrays(folder: Path):
    for file in [p for p in (folder / "state").rglob("*") if p.is_file()]:
        file.unlink()


@pytest.mark.parametrize("damage", [truncate, empty, cut_the_run_item, lose_the_arrays])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(open_folder, said, tmp_path, damage):
    two_checkpoints(open_folder).close()
    damage(tmp_path / "2")
    checkpointer = open_folder()
    restored = checkpointer.restore(make_state())
    assert restored.step == 1 and restored.run == {"n": 1}
    assert_identical(restored.state, make_state(seed=1))
    assert len(said) == 1 and said[0].startswith("checkpoint 2 is damaged (")
    assert said[0].endswith("going back to the one of step 1") and len(said[0]) < 300
    assert (tmp_path / "damaged_2").is_dir()  # kept for whoever wants to look
    checkpointer.save(2, make_state(seed=9), {"n": 9})  # its place is free again
    assert checkpointer.wait() and checkpointer.restore(make_state()).run == {"n": 9}


def test_a_checkpoint_that_was_never_finished_is_said_and_passed_over(open_folder, said, tmp_path):
    two_checkpoints(open_folder).close()
    (tmp_path / "2").rename(tmp_path / "2.orbax-checkpoint-tmp-7")
    watching = open_folder(read_only=True)
    assert watching.steps() == [1] and (tmp_path / "2.orbax-checkpoint-tmp-7").is_dir()
    assert said == []
    checkpointer = open_folder()
    assert said == ["checkpoint 2 was never finished; it is removed"]
    assert checkpointer.restore(make_state()).step == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1"]


def test_when_nothing_is_sound_it_says_so_and_touches_nothing(open_folder, tmp_path):
    two_checkpoints(open_folder).close()
    empty(tmp_path / "1")
    empty(tmp_path / "2")
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* can be read \(step 2: .*step 1"
    ):
        open_folder().restore(make_state())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


def test_reading_only_sets_nothing_aside_and_saves_nothing(open_folder, said, tmp_path):
    two_checkpoints(open_folder).close()
    truncate(tmp_path / "2")
    reader = open_folder(read_only=True)
    assert reader.restore(make_state()).step == 1 and len(said) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]
    with pytest.raises(ValueError, match="opened with read_only=True"):
        reader.save(3, make_state(), {})


def test_another_models_checkpoint_is_not_damage_but_an_error(open_folder, tmp_path):
    checkpointer = two_checkpoints(open_folder)
    wider = state.create(make_params(width=80), TRANSFORM)
    with pytest.raises(
        ValueError,
        match=r"params/embed/table is float32\[64, 16\] there and float32\[80, 16\] here",
    ):
        checkpointer.restore(wider)
    sgd = optimizer.build_optimizer(OptimizerConfig(max_grad_norm=None), 10).transform
    with pytest.raises(ValueError, match="is absent there and .* here|there and absent here"):
        checkpointer.restore(state.create(make_params(), sgd))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


def test_an_unknown_format_is_named(open_folder, tmp_path):
    two_checkpoints(open_folder).close()
    item = tmp_path / "2" / "run" / "metadata"
    record = json.loads(item.read_text())
    item.write_text(json.dumps(record | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99 is unknown; this version reads 1"):
        open_folder().restore(make_state(), step=2)


# --- a disk that is full --------------------------------------------------------------------------


@pytest.fixture
def small_disk():
    """The operating system refuses to let any file grow beyond 2 KiB, while this is on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(on: bool):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048 if on else soft, hard))

    yield limit
    limit(False)


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_leaves_the_earlier_checkpoint(
    open_folder, said, small_disk, background, capfd
):
    checkpointer, made = open_folder(keep=1, background=background), make_state(seed=1)
    checkpointer.save(1, made, {"n": 1})
    checkpointer.wait()
    small_disk(True)
    checkpointer.save(2, make_state(seed=2), {"n": 2})
    complete = checkpointer.wait()
    small_disk(False)
    assert not complete and checkpointer.steps() == [1]
    assert checkpointer.failures == [(2, "File too large")]
    assert said[0].startswith(
        "checkpoint 2 could not be written (File too large); the one of step 1 is complete"
    )
    assert_identical(checkpointer.restore(make_state()).state, made)
    checkpointer.save(3, make_state(seed=3), {"n": 3})  # space again: it goes on
    assert checkpointer.wait() and checkpointer.steps() == [3]
    assert capfd.readouterr().err == ""  # one line was said, and nothing else


def test_rank_prefers_the_newest_among_equals():
    assert checkpoint.rank({1: 0.5, 2: None, 3: 0.5, 4: 0.1}) == [3, 1, 4]
