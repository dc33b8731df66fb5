"""SIGKILL at random moments of a run, saves included: it ends as if nothing had happened."""

import random
import signal
import time
from pathlib import Path

import pytest
import yaml
from safetensors.numpy import load_file

from tests.e2e.conftest import changed, finish, start
from tests.e2e.test_train_command import metrics

SLOW = {"REWARD_SECONDS": "0.02"}  # a step of about a third of a second, so that moments differ


@pytest.fixture(scope="module")
def undisturbed(base_config, tmp_path_factory):
    config = changed(
        base_config,
        run={"steps": 60, "dump_steps": []},
        evaluate={"at_start": False, "at_end": False},
        checkpoint={"every": 1},
    )
    place = tmp_path_factory.mktemp("undisturbed")
    path = place / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    status, output = finish(start("train", path, "--run.dir", place / "run"))
    assert status == 0, output
    return place / "run", path


def is_saving(folder: Path) -> bool:
    """Whether a checkpoint is being written, under its temporary name."""
    return any((folder / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


def kill_at_random(process, folder: Path, rows: int, draw: random.Random) -> str:
    """Kill a run that has got somewhere; every other time in the middle of a save."""
    limit = time.monotonic() + 240
    while len(metrics(folder)) <= rows and process.poll() is None:
        assert time.monotonic() < limit, "the run gets nowhere"
        time.sleep(0.01)
    moment = "anywhere"
    if draw.random() < 0.5:
        moment, limit = "saving", time.monotonic() + 20
        while not is_saving(folder) and process.poll() is None and time.monotonic() < limit:
            time.sleep(0.0005)
        time.sleep(draw.uniform(0, 0.02))
    else:
        time.sleep(draw.uniform(0, 0.5))
    process.send_signal(signal.SIGKILL)
    return moment


@pytest.mark.parametrize("kills", [2, pytest.param(25, marks=pytest.mark.nightly)])
def test_killed_again_and_again_ends_bit_identical(undisturbed, tmp_path, kills):
    reference, path = undisturbed
    folder, draw = tmp_path / "run", random.Random(kills)
    died = 0
    while died < kills:
        rows = len(metrics(folder))
        process = start("train", path, "--run.dir", folder, **SLOW)
        kill_at_random(process, folder, rows, draw)
        status, output = finish(process)
        assert status in (0, -signal.SIGKILL), output
        assert status != 0, f"the run of 60 steps ended after {died} kills; make it longer"
        died += 1
    status, output = finish(start("train", path, "--run.dir", folder))
    assert status == 0 and "resuming the unfinished run" in output, output
    assert metrics(folder) == metrics(reference)
    ours, theirs = (load_file(f / "export" / "model.safetensors") for f in (folder, reference))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.tobytes() == ours[name].tobytes(), name
