"""LoRA as a whole command: what is saved, what is exported, and that resuming changes nothing."""

import json
import signal

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from grpo_jax.models import hf, lora
from tests.e2e.conftest import changed, finish, start
from tests.e2e.test_train_command import metrics, wait_for

LORA = {"rank": 2, "alpha": 4.0}


@pytest.fixture(scope="module")
def run(base_config, tmp_path_factory):
    config = changed(
        base_config,
        run={"dump_steps": []},
        lora=LORA,
        optimizer={"lr": 0.02},
        rollout={"updates_per_rollout": 1},
    )
    place = tmp_path_factory.mktemp("lora")
    path = place / "config.yaml"
    path.write_text(json.dumps(config))
    status, output = finish(start("train", path, "--run.dir", place / "run"))
    assert status == 0, output
    assert "lora    rank 2 on 7 kinds of matrices" in output
    return place / "run", path


def test_both_exports_are_the_trained_policy_and_the_base_is_the_reference(run, tiny_folder):
    """Merged weights = base + adapter folder; metrics begin at KL 0 and leave it."""
    folder, _ = run
    rows = [row for row in metrics(folder) if "kl_penalty" in row]
    base, exported = hf.load_model(tiny_folder), hf.load_model(folder / "export")
    adapter = load_file(folder / "adapter" / lora.WEIGHTS)
    a, b = (adapter[f"base_model.model.model.layers.0.mlp.up_proj.lora_{x}.weight"] for x in "AB")
    w, merged = (m.params["layers"]["mlp"]["up"]["weight"][0] for m in (base, exported))
    assert np.abs(b).max() > 0.001
    np.testing.assert_allclose(merged, w + 2.0 * b @ a, atol=1e-6)
    for part in ("embed", "norm"):
        jax.tree.map(np.testing.assert_array_equal, base.params[part], exported.params[part])
    assert rows[0]["kl_penalty"] == pytest.approx(0, abs=1e-6) and rows[-1]["kl_penalty"] > 1e-6


def test_a_checkpoint_holds_the_adapter_and_its_moments_alone(run):
    record = json.loads((run[0] / "checkpoints" / "6" / "run" / "metadata").read_text())
    arrays = [name for name, (shape, _) in record["layout"].items() if shape]
    assert len(arrays) == 3 * 7 * 2  # the adapter and two moments, of 7 targets, A and B
    assert all(name.endswith(("/a", "/b")) for name in arrays)


def test_a_killed_run_goes_on_as_if_nothing_had_been(run, tmp_path):
    reference, config = run
    folder = tmp_path / "run"
    process = start("train", config, "--run.dir", folder, REWARD_SECONDS="0.1")
    wait_for(lambda: (folder / "checkpoints" / "2").exists())
    process.send_signal(signal.SIGKILL)
    finish(process)
    status, output = finish(start("train", config, "--run.dir", folder))
    assert status == 0 and "resuming the unfinished run" in output, output
    assert metrics(folder) == metrics(reference)
    for name in (f"adapter/{lora.WEIGHTS}", "export/model.safetensors"):
        assert (folder / name).read_bytes() == (reference / name).read_bytes(), name


def test_export_evaluate_and_sample_read_the_adapter(run, tmp_path):
    folder, config = run
    status, output = finish(start("export", folder, tmp_path / "adapter", "--adapter"))
    assert status == 0 and "wrote the adapter of step 6" in output, output
    exported = (tmp_path / "adapter" / lora.WEIGHTS).read_bytes()
    assert exported == (folder / "adapter" / lora.WEIGHTS).read_bytes()
    out = tmp_path / "scores.json"
    status, output = finish(start("eval", config, "--checkpoint", folder, "--out", out))
    assert status == 0, output
    result = json.loads((folder / "result.json").read_text())
    found = json.loads(out.read_text())
    assert {k: found[k] for k in result["last"]} == result["last"]
    status, output = finish(
        start("export", folder, tmp_path / "x", "--adapter", "--dtype", "bfloat16")
    )
    assert status == 2 and "an adapter is written in float32" in output


def test_settings_of_an_adapter_that_is_not_there_are_refused(write_config, base_config):
    path = write_config(changed(base_config, lora={"alpha": 8.0}))
    status, output = finish(start("config", path))
    assert status == 2 and "lora.alpha = 8.0 with lora.rank = 0" in output, output
