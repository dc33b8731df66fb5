"""Faults that other trainers had in public, as tests of ours: updates, checkpoints, schedules.

The numbers are those of the collection of public reports; each test names its case.
"""

import os
import signal
import socket
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax.core import advantages, masks
from grpo_jax.core.advantages import AdvantageConfig, AdvantageInputs
from grpo_jax.core.batch import Batch
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.losses import LossConfig
from grpo_jax.core.policy import Policy
from grpo_jax.data.prompts import PromptStream
from grpo_jax.scale.mesh import MeshConfig, make_mesh
from grpo_jax.train import optimizer, state, step
from grpo_jax.train.checkpoint import CheckpointConfig, Checkpointer
from grpo_jax.train.optimizer import OptimizerConfig

V = 5
ON_POLICY = LossConfig(
    reference_policy_kl_penalty=0.0, force_on_policy_ratio=True, metrics_level="minimal"
)


def unigram_policy() -> Policy:
    """Logits that depend on nothing, so that a gradient depends on which tokens there are alone."""

    def hidden(params, tokens, positions, segment_ids):
        del positions, segment_ids
        return jnp.zeros((*tokens.shape, V), params.dtype) + params[None, None, :]

    return Policy(hidden=hidden, head=lambda params: (), unembed=lambda head, x: x)


def batch_of(rows, width=None):
    """Rows of (token, loss) pairs; on-policy, the loss of a token is minus its advantage."""
    width = width or 1 + max(len(row) for row in rows)
    shape = (len(rows), width)
    tokens, advantage = np.zeros(shape, np.int32), np.zeros(shape, np.float64)
    mask, segments = np.zeros(shape, bool), np.zeros(shape, np.int32)
    for i, row in enumerate(rows):
        segments[i, : 1 + len(row)] = 1
        for t, (token, loss) in enumerate(row, 1):
            tokens[i, t], advantage[i, t], mask[i, t] = token, -loss, True
    positions = np.broadcast_to(np.arange(width, dtype=np.int32), shape) * segments
    ones, zeros = np.ones(shape), np.zeros(shape)
    return Batch(tokens, segments, positions, mask, ones, advantage, zeros)


ONE, THREE = (1, 1.0), (3, 3.0)
SPLITS = {
    "10": ([[ONE] * 2 + [THREE] * 8], 1),
    "2+8": ([[ONE] * 2, [THREE] * 8], 2),
    "5+5": ([[ONE] * 2 + [THREE] * 3, [THREE] * 5], 2),
}


def test_a01_any_split_has_the_loss_and_the_gradient_of_the_whole(x64):
    found = []
    for rows, micro_batches in SPLITS.values():
        batch = batch_of(rows, width=11)
        gradient = step.make_gradient_step(
            unigram_policy(), ON_POLICY, FilterConfig(), micro_batches=micro_batches
        )
        loss, grads, metrics = gradient(jnp.zeros(V), batch, masks.count(batch))
        found.append((loss, grads))
        np.testing.assert_allclose(loss, 2.6, atol=1e-6)
        np.testing.assert_allclose(metrics["actor_loss"], 2.6, atol=1e-6)
    # d/dz of the mean of A log softmax(z)_y, written out: Σ_t loss_t (1[y] − 1/V) / 10
    expected = (2 * 1.0 * np.eye(V)[1] + 8 * 3.0 * np.eye(V)[3] - (2 + 24) / V) / 10
    for _, grads in found:
        np.testing.assert_allclose(grads, expected, atol=1e-6)


def test_a21_the_micro_batch_does_not_cut_groups(x64):
    config = AdvantageConfig(use_leave_one_out_baseline=False, epsilon=1e-6)
    inputs = AdvantageInputs(rewards=np.array([1.0, 0.0]), groups=np.array([0, 0]))
    made = advantages.compute(config, inputs).advantages
    np.testing.assert_allclose(made, [0.7071058, -0.7071058], atol=1e-6)
    batch = batch_of([[(1, -made[0])], [(3, -made[1])]])
    found = []
    for micro_batches in (1, 2):
        gradient = step.make_gradient_step(
            unigram_policy(), ON_POLICY, FilterConfig(), micro_batches=micro_batches
        )
        found.append(gradient(jnp.zeros(V), batch, masks.count(batch))[1])
    np.testing.assert_allclose(found[0], found[1], atol=1e-12)
    expected = 0.7071058 * (np.eye(V)[3] - np.eye(V)[1]) / 2
    np.testing.assert_allclose(found[1], expected, atol=1e-6)


TRANSFORM = optimizer.build_optimizer(OptimizerConfig(), 10).transform


def make_state(value=0.0):
    return state.create({"w": np.full((4, 4), value, np.float32)}, TRANSFORM)


def test_a40_a_run_resumed_at_the_end_of_an_epoch_gets_a_whole_next_epoch(tmp_path):
    def serve(stream, batches):
        return [next(stream) for _ in range(batches)]

    stream = PromptStream(list(range(8)), 2, seed=3)
    serve(stream, 4)  # an epoch
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        checkpointer.save(4, make_state(), {"stream": stream.state()})
    resumed = PromptStream(list(range(8)), 2, seed=3)
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        resumed.restore(checkpointer.restore(make_state()).run["stream"])
    batches = serve(resumed, 4)
    assert sorted(sum(batches, [])) == list(range(8))
    assert batches == serve(stream, 4)


def run_python(code, *arguments):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


KILLED = """
    import os, signal, sys
    import numpy as np
    from orbax.checkpoint._src.path import atomicity
    from grpo_jax.train import optimizer, state
    from grpo_jax.train.checkpoint import CheckpointConfig, Checkpointer

    transform = optimizer.build_optimizer(optimizer.OptimizerConfig(), 10).transform
    checkpointer = Checkpointer(sys.argv[1], CheckpointConfig(keep=1))
    make = lambda x: state.create({"w": np.full((4, 4), x, np.float32)}, transform)
    checkpointer.save(1, make(1.0), {"n": 1})
    assert checkpointer.wait()

    async def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    atomicity.AtomicRenameTemporaryPath.finalize = die  # the moment before the rename
    checkpointer.save(2, make(2.0), {"n": 2})
    checkpointer.wait()
"""


def test_a41_a_crash_in_the_second_save_leaves_the_first_though_one_is_kept(tmp_path):
    process = run_python(KILLED, tmp_path)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, errors
    assert [p for p in tmp_path.iterdir() if p.name.startswith("2.")], "it died before the save"
    said = []
    with Checkpointer(tmp_path, CheckpointConfig(keep=1), say=said.append) as checkpointer:
        assert checkpointer.steps() == [1]
        restored = checkpointer.restore(make_state())
    assert restored.run == {"n": 1} and np.all(restored.state.params["w"] == 1.0)
    assert said == ["checkpoint 2 was never finished; it is removed"]


def test_a42_a_resumed_schedule_goes_on_and_evaluation_does_not_move_it(tmp_path):
    opt = optimizer.build_optimizer(OptimizerConfig(lr=1.0, warmup_steps=20, warmup_start=0.0), 40)
    train = step.make_train_step(unigram_policy(), opt, ON_POLICY, FilterConfig())
    score = step.make_score_step(unigram_policy(), FilterConfig())
    batch = jax.tree.map(
        lambda x: x.astype(np.float32) if x.dtype == float else x, batch_of([[ONE]])
    )
    counts = masks.count(batch)

    def rates(now, updates):
        found = []
        for _ in range(updates):
            now, metrics = train(now, batch, counts)
            found.append(float(metrics["learning_rate"]))
        return now, found

    fresh = lambda: state.create(np.zeros(V, np.float32), opt.transform)  # noqa: E731
    whole, uninterrupted = rates(fresh(), 30)
    now, before = rates(fresh(), 10)
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        checkpointer.save(10, now, {})
        score(now.params, batch)  # an evaluation
        checkpointer.wait()
        restored = checkpointer.restore(state.abstract(now.params, opt.transform))
    resumed, after = rates(restored.state, 20)
    assert before + after == uninterrupted
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)  # the moments went along
    np.testing.assert_allclose(uninterrupted[:22], [*np.arange(21) / 20, 1.0], rtol=1e-6)


def test_a42_a_warm_up_fraction_is_a_fraction_of_this_run():
    config = OptimizerConfig(lr=1.0, warmup_fraction=0.1, warmup_start=0.0)
    schedule = optimizer.build_schedule(config, 500)
    assert float(schedule(50)) == 1.0 and float(schedule(49)) < 1.0
    np.testing.assert_allclose(float(schedule(25)), 0.5, rtol=1e-6)


TWO_PROCESSES = """
    import sys
    folder, port, index = sys.argv[1], sys.argv[2], int(sys.argv[3])
    import jax
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
    import numpy as np
    from grpo_jax.scale.mesh import MeshConfig, make_mesh
    from grpo_jax.train import optimizer, state
    from grpo_jax.train.checkpoint import CheckpointConfig, Checkpointer

    transform = optimizer.build_optimizer(optimizer.OptimizerConfig(), 10).transform
    mesh = make_mesh(MeshConfig())
    assert mesh.shape["fsdp"] == 4
    make = lambda: {"w": jax.numpy.arange(32.0).reshape(8, 4)}
    made, places = state.born_sharded(make, transform=transform, mesh=mesh)
    checkpointer = Checkpointer(folder, CheckpointConfig(keep=2))
    for step in (1, 2):
        checkpointer.save(step, made, {"step": step})
        assert checkpointer.wait(), checkpointer.failures
    target = state.targets(jax.eval_shape(lambda: made), places)
    restored = checkpointer.restore(target)
    assert restored.step == 2 and restored.run == {"step": 2}
    shards = zip(restored.state.params["w"].addressable_shards, made.params["w"].addressable_shards)
    assert all(np.array_equal(a.data, b.data) for a, b in shards)
    checkpointer.close()
    print("returned", index, checkpointer.steps())
"""


@pytest.mark.slow
def test_a43_two_processes_save_to_one_folder(tmp_path):
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    folder = tmp_path / "there already"
    folder.mkdir()
    processes = [run_python(TWO_PROCESSES, folder, port, index) for index in range(2)]
    try:
        outputs = [process.communicate(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for index, (output, errors) in enumerate(outputs):
        assert f"returned {index} [1, 2]" in output, errors
    restored = Checkpointer(folder, CheckpointConfig()).restore(
        state.create({"w": np.zeros((8, 4), np.float32)}, TRANSFORM)
    )
    np.testing.assert_array_equal(restored.state.params["w"], np.arange(32.0).reshape(8, 4))


@pytest.mark.parametrize(("higher", "scores"), [(True, (0.8, 0.8, 0.7)), (False, (0.2, 0.2, 0.3))])
def test_a44_the_best_of_equals_is_the_newest_and_is_on_disk(tmp_path, higher, scores):
    config = CheckpointConfig(keep=1, keep_best=1, metric="score", higher_is_better=higher)
    with Checkpointer(tmp_path, config) as checkpointer:
        for at, score in zip((10, 20, 30), scores, strict=True):
            checkpointer.save(at, make_state(), {}, {"score": score})
        checkpointer.wait()
        assert checkpointer.best_step() == 20
        assert checkpointer.steps() == [20, 30]
        assert checkpointer.restore(make_state(), step=20).step == 20
    with Checkpointer(tmp_path, config) as checkpointer:
        assert checkpointer.best_step() == 20  # after a restart too


def test_a45_the_schedule_counts_updates_not_rows_nor_micro_batches():
    batches, epochs, fraction, rows = 100, 2, 0.5, 4
    updates = int(batches * epochs * fraction)
    opt = optimizer.build_optimizer(OptimizerConfig(lr=1.0, schedule="linear"), updates)
    batch = jax.tree.map(
        lambda x: x.astype(np.float32) if x.dtype == float else x, batch_of([[ONE]] * rows)
    )
    train = step.make_train_step(
        unigram_policy(), opt, ON_POLICY, FilterConfig(), micro_batches=rows
    )
    now, rates = state.create(np.zeros(V, np.float32), opt.transform), []
    for _ in range(updates):
        now, metrics = train(now, batch, masks.count(batch))
        rates.append(float(metrics["learning_rate"]))
    assert updates == 100 and int(now.updates) == 100
    assert int(optax.tree.get(now.opt_state, "count", filtering=_is_schedule)) == 100
    np.testing.assert_allclose(rates, 1 - np.arange(100) / 100, atol=1e-6)
    assert float(opt.schedule(now.updates)) == 0.0


def _is_schedule(path, value):
    del value
    return "ScaleByScheduleState" in str(path)


def test_a46_a_metric_is_a_mean_over_tokens_not_over_ranks():
    batch = batch_of([[ONE] * 2, [THREE] * 8])
    batch = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == float else x, batch)
    opt = optimizer.build_optimizer(OptimizerConfig(), 10)
    mesh = make_mesh(MeshConfig(data=2, fsdp=1), jax.devices()[:2])
    params = np.zeros(V, np.float32)
    places = state.placement(state.abstract(params, opt.transform), opt.transform, mesh)
    train = step.make_train_step(unigram_policy(), opt, ON_POLICY, FilterConfig(), places=places)
    _, metrics = train(state.create(params, opt.transform, places), batch, masks.count(batch))
    np.testing.assert_allclose(metrics["loss"], 2.6, rtol=1e-6)
    np.testing.assert_allclose(metrics["actor_loss"], 2.6, rtol=1e-6)
    assert metrics["tokens"] == 10
