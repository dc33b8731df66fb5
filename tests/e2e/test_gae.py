"""gae as a whole command: the critic learns, alone at first, and resuming changes nothing."""

import json
import signal

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.e2e.conftest import changed, finish, start
from tests.e2e.test_train_command import metrics, wait_for


@pytest.fixture(scope="module")
def run(base_config, tmp_path_factory):
    """Two steps of the critic alone, then both; packed, several updates, and a clip that bites."""
    config = changed(
        base_config,
        run={"steps": 7, "dump_steps": []},
        rollout={"completions_per_prompt": 8, "micro_batch_size": None, "epochs": 2},
        packing={"enabled": True, "row_length": 200, "max_sequences": 8},
        advantage={"estimator": "gae", "gae_lambda_value": 1.0, "length_adaptive_alpha": 0.5},
        critic={
            "warmup_steps": 2,
            "value_loss": {"cliprange": 0.5},
            "optimizer": {"lr": 0.01, "weight_decay": 0.0},
        },
        loss_fn={"reference_policy_kl_penalty": 0.0},
        evaluate={"at_start": False, "at_end": False},
    )
    place = tmp_path_factory.mktemp("critic")
    path = place / "config.yaml"
    path.write_text(json.dumps(config))
    status, output = finish(start("train", path, "--run.dir", place / "run"))
    assert status == 0, output
    assert "warning" not in output
    return place / "run", path


def test_the_critic_learns_alone_and_then_beside_the_policy(run):
    rows = metrics(run[0])
    losses = [row["critic/loss"] for row in rows]
    assert max(losses[-3:]) < 0.3 * losses[0]
    assert rows[0]["critic/values_mean"] == 0  # a new critic knows nothing
    gap = [abs(row["critic/values_mean"] - row["critic/returns_mean"]) for row in rows]
    assert gap[-1] < 0.2 * gap[0]
    assert [row["critic/update_applied"] for row in rows] == [4] * 7  # 2 epochs of 2 updates
    assert [row["update_applied"] for row in rows] == [0, 0, 4, 4, 4, 4, 4]
    assert ["loss" in row for row in rows] == [False, False, True, True, True, True, True]
    assert all(0.5 < row["packing/fill"] < 1 for row in rows)  # the first two among them
    assert rows[0]["critic/vf_clipfrac"] > 0  # values may move by 0.5, and began 3 away


def test_a_killed_run_goes_on_as_if_nothing_had_been(run, tmp_path, tiny_folder):
    """Metrics hold the critic's loss, norms and values: they are equal, so its whole state is."""
    reference, config = run
    folder = tmp_path / "run"
    process = start("train", config, "--run.dir", folder, REWARD_SECONDS="0.1")
    wait_for(lambda: (folder / "checkpoints" / "2").exists())
    process.send_signal(signal.SIGKILL)
    finish(process)

    # The policy alone is read from it, and has not moved while the critic warmed up.
    out = tmp_path / "exported"
    status, output = finish(start("export", folder, out, "--step", "2"))
    assert status == 0, output
    exported, initial = (load_file(f / "model.safetensors") for f in (out, tiny_folder))
    assert all(np.array_equal(exported[name], x) for name, x in initial.items())

    status, output = finish(start("train", config, "--run.dir", folder))
    assert status == 0 and "resuming the unfinished run" in output, output
    assert metrics(folder) == metrics(reference)
    ours, theirs = (load_file(f / "export" / "model.safetensors") for f in (folder, reference))
    assert all(ours[name].tobytes() == x.tobytes() for name, x in theirs.items())
