"""The whole main job in several processes on loopback: the same training, and a bounded end."""

import json
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from grpo_jax.scale.multihost import ProcessesConfig
from tests.e2e.conftest import changed, finish, start
from tests.e2e.test_train_command import metrics, wait_for
from tests.scale.test_notice import Metadata

QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiling is most of what these tests do


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start_job(count: int, *arguments: object, **variables: str) -> list:
    """Start `grpo-jax` in `count` processes that find each other by addresses."""
    address = f"127.0.0.1:{free_port()}"
    return [
        start(
            *arguments,
            JAX_COORDINATOR_ADDRESS=address,
            JAX_NUM_PROCESSES=str(count),
            JAX_PROCESS_ID=str(i),
            **QUICK,
            **variables,
        )
        for i in range(count)
    ]


def finish_job(processes: list, timeout: float = 300) -> list[tuple[int, str]]:
    try:
        return [finish(process, timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def config(base_config) -> dict:
    """Two updates a rollout, a reference policy, and rows that divide over four devices."""
    return changed(
        base_config,
        run={"steps": 3, "dump_steps": []},
        rollout={"prompts_per_step": 4, "completions_per_prompt": 4, "micro_batch_size": 2},
        # An eps far above the gradients' rounding: Adam would blow up the noise of the smallest.
        optimizer={"lr": 0.01, "schedule": "constant", "eps": 1e-3},
        evaluate={"at_start": False},
        checkpoint={"every": 1},
    )


@pytest.fixture(scope="module")
def single(config, tmp_path_factory):
    """The run of one process: its folder, and the config file."""
    place = tmp_path_factory.mktemp("single")
    path = place / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    status, output = finish(start("train", path, "--run.dir", place / "run", **QUICK))
    assert status == 0, output
    return place / "run", path


def samples(folder: Path) -> list[dict]:
    text = (folder / "samples" / "step_000001.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "export" / "model.safetensors")


def assert_same_training(folder: Path, reference: Path, initial: Path) -> None:
    """Float32 sums in another order: 1e-5 on weights that moved by a hundred times as much."""
    ours, theirs = weights(folder), weights(reference)
    before = load_file(initial / "model.safetensors")
    moved = max(float(np.abs(theirs[name] - before[name]).max()) for name in theirs)
    assert moved > 1e-3
    for name, tensor in theirs.items():
        np.testing.assert_allclose(ours[name], tensor, rtol=0, atol=1e-5, err_msg=name)
    for row, other in zip(metrics(folder), metrics(reference), strict=True):
        assert row.keys() == other.keys()
        for key, value in other.items():
            if key.startswith("packing/"):  # other devices, other micro-batches
                continue
            assert row[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_job_of_processes_trains_as_one_does(single, tiny_folder, tmp_path, count):
    reference, path = single
    folder = tmp_path / "run"
    results = finish_job(start_job(count, "train", path, "--run.dir", folder))
    assert [status for status, _ in results] == [0] * count, results
    assert f"{count} processes" in results[0][1] and "reward" in results[0][1]
    for _, output in results[1:]:  # only process 0 talks
        assert not [line for line in output.splitlines() if not line.startswith("[Gloo]")], output
    assert_same_training(folder, reference, tiny_folder)
    for row, other in zip(samples(folder), samples(reference), strict=True):
        assert row["tokens"] == other["tokens"] and row["reward"] == other["reward"]


def test_a_preempted_job_goes_on_with_another_number_of_processes(single, tiny_folder, tmp_path):
    """The platform gives notice; all save after the same step; one process ends the run.

    Then SIGTERM to one of two, as a notice is followed by it: both end as they would have.
    """
    reference, path = single
    folder, server = tmp_path / "run", Metadata()
    more = {"REWARD_SECONDS": "0.1", "GCE_METADATA_HOST": server.host}
    job = start_job(2, "train", path, "--run.dir", folder, **more)
    wait_for(lambda: any(row["step"] >= 1 for row in metrics(folder)))
    server.values["preempted"] = "TRUE"
    job[1].send_signal(signal.SIGTERM)
    results = finish_job(job)
    assert [status for status, _ in results] == [75, 75], results
    assert "preempted, saved after step" in results[0][1]
    server.shutdown()
    server.server_close()

    status, output = finish(start("train", path, "--run.dir", folder, **QUICK))
    assert status == 0 and "resuming the unfinished run" in output, output
    assert_same_training(folder, reference, tiny_folder)


DIED = (  # ours; and the coordination service's, of another process and of its own
    "another process of the job has ended",
    "stopped sending heartbeats",
    "another task died",
)


@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_a_process_ends_the_others(single, tmp_path, victim):
    """Process 0 too, which runs the coordinator that the other one would hear of it from."""
    _, path = single
    folder = tmp_path / "run"
    job = start_job(2, "train", path, "--run.dir", folder, REWARD_SECONDS="0.1")
    wait_for(lambda: any(row["step"] >= 1 for row in metrics(folder)))
    job[victim].kill()
    begin = time.monotonic()
    status, output = finish_job(job, timeout=60)[1 - victim]
    assert time.monotonic() - begin < 60
    assert status not in (0, 75), output
    assert any(said in output for said in DIED), output


def test_a_reward_that_hangs_in_one_process_ends_all(config, tmp_path):
    config = changed(
        config,
        reward={"components": [{"kind": f"{Path(__file__).parent}/hanging_reward.py:score"}]},
        processes={"hang_limit": 3.0, "heartbeat_limit": 5.0},
    )
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    job = start_job(2, "train", path, "--run.dir", tmp_path / "run", HANGS_IN="1")
    results = finish_job(job, timeout=120)
    assert all(status not in (0, 75) for status, _ in results), results
    assert (
        "process 1 of 2: reward 'score' takes longer than processes.hang_limit = 3 s"
        in (results[1][1])
    )
    assert "another process of the job has ended" in results[0][1] or "heartbeat" in results[0][1]


def test_the_default_limits_end_a_job_that_hangs_within_a_minute():
    default = ProcessesConfig()
    assert default.hang_limit + default.heartbeat_limit < 60
