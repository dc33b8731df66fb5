"""The whole main job in real processes: what it leaves, and what kills and signals do to it."""

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from grpo_jax.models import hf
from grpo_jax.train import dump, parity
from tests.e2e.conftest import changed, finish, start

TIMINGS = ("time", "seconds/", "tokens_per_second", "programs/")


def metrics(folder: Path) -> list[dict]:
    """Rows of metrics.jsonl without what a clock decides."""
    text = (folder / "metrics.jsonl").read_text() if (folder / "metrics.jsonl").exists() else ""
    rows = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return [{k: v for k, v in row.items() if not k.startswith(TIMINGS)} for row in rows]


def wait_for(condition: Callable[[], bool], limit: float = 240) -> None:
    """Wait until something is true of a run folder that a process is writing."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def undisturbed(base_config, tmp_path_factory):
    """A run from start to end; its folder and what it printed."""
    place = tmp_path_factory.mktemp("undisturbed")
    path = place / "config.yaml"
    path.write_text(yaml.safe_dump(base_config))
    folder = place / "run"
    status, output = finish(start("train", path, "--run.dir", folder))
    assert status == 0, output
    return folder, output, path


def test_a_run_leaves_what_it_promises(undisturbed):
    folder, output, _ = undisturbed
    assert "starting a new run" in output and "before and after" in output
    for name in ("config.yaml", "metrics.jsonl", "run.png", "result.json"):
        assert (folder / name).stat().st_size > 0, name
    assert (folder / "samples" / "step_000006.jsonl").exists()
    assert "[completion]" in (folder / "samples" / "step_000006.txt").read_text()
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["4", "6"]
    assert "model.safetensors" in {p.name for p in (folder / "export").iterdir()}
    steps = [row["step"] for row in metrics(folder)]
    assert steps == [0, 1, 2, 3, 4, 5, 6, 6]  # evaluations before the first and after the last
    for row in metrics(folder):
        assert all(value == value for value in row.values()), row  # no NaN


def test_killed_interrupted_and_resumed_equals_undisturbed_bit_for_bit(undisturbed, tmp_path):
    """SIGKILL in the middle, Ctrl-C later, then to the end: the same numbers and weights."""
    reference, _, config = undisturbed
    folder = tmp_path / "run"
    process = start("train", config, "--run.dir", folder, REWARD_SECONDS="0.1")
    wait_for(lambda: (folder / "checkpoints" / "2").exists())
    process.send_signal(signal.SIGKILL)
    finish(process)
    assert not (folder / "result.json").exists()

    process = start("train", config, "--run.dir", folder, REWARD_SECONDS="0.1")
    wait_for(lambda: any(row["step"] >= 4 for row in metrics(folder)))
    process.send_signal(signal.SIGINT)
    status, output = finish(process)
    assert status == 130, output
    assert "resuming the unfinished run" in output
    assert re.search(r"going on after step [24] of 6", output), output
    assert re.search(r"interrupted, saved after step [45]. The same command goes on", output)

    status, output = finish(start("train", config, "--run.dir", folder))
    assert "resuming the unfinished run" in output
    assert status == 0, output
    assert metrics(folder) == metrics(reference)
    ours = load_file(folder / "export" / "model.safetensors")
    theirs = load_file(reference / "export" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.tobytes() == ours[name].tobytes(), name


def test_a_step_is_profiled_where_asked(undisturbed, tmp_path):
    folder, _, config = undisturbed
    assert not (folder / "profile").exists()
    assert all("mfu" not in row for row in metrics(folder))  # no peak number of a CPU is known
    short = ("--run.steps", "1", "--run.profile-steps", "1", "--optimizer.schedule", "constant")
    quick = ("--evaluate.no-at-start", "--evaluate.no-at-end", "--run.no-export")
    status, output = finish(start("train", config, "--run.dir", tmp_path / "run", *short, *quick))
    assert status == 0 and "its profile is in" in output, output
    place = tmp_path / "run" / "profile" / "step_000001"
    assert (place / "memory_0.prof").stat().st_size > 0
    assert list(place.glob("plugins/profile/*/*.xplane.pb"))


def test_other_commands_read_the_run(undisturbed, tmp_path):
    folder, _, config = undisturbed
    result = tmp_path / "eval.json"
    status, output = finish(start("eval", config, "--checkpoint", folder, "--out", result))
    assert status == 0 and "mean_reward" in output, output
    last = json.loads((folder / "result.json").read_text())["last"]
    measured = json.loads(result.read_text())
    assert measured["eval/mean_reward"] == last["eval/mean_reward"]
    assert measured["source"].startswith("step 6 of")

    out = tmp_path / "exported"
    status, output = finish(start("export", folder, out, "--dtype", "bfloat16"))
    assert status == 0, output
    assert yaml.safe_load((out / "config.json").read_text())["dtype"] == "bfloat16"
    status, output = finish(start("export", folder, out))
    assert status == 2 and "exists already" in output

    status, output = finish(start("sample", config, "--prompt", "1 + 1 =", "--completions", "2"))
    assert status == 0 and output.count("log-probability") == 2, output


def test_a_run_ends_at_its_target_and_the_best_checkpoint_can_be_asked_for(base_config, tmp_path):
    """Every completion has a token, so the first evaluation after a step ends the run."""
    config = changed(
        base_config,
        run={"steps": 6, "export": False, "dump_steps": []},
        evaluate={
            "at_start": False,
            "every": 2,
            "stop_metric": "eval/length/mean",
            "stop_threshold": 1.0,
            "completions": 2,
        },
        checkpoint={"every": 1, "keep": 1, "keep_best": 1},
    )
    path, folder = tmp_path / "config.yaml", tmp_path / "run"
    path.write_text(yaml.safe_dump(config))
    status, output = finish(start("train", path, "--run.dir", folder))
    assert status == 0, output
    outcome = json.loads((folder / "result.json").read_text())
    assert (outcome["reason"], outcome["steps"]) == ("target", 2)
    assert [row["step"] for row in metrics(folder)] == [1, 2, 2]
    result = tmp_path / "result.json"
    status, output = finish(
        start("eval", path, "--checkpoint", folder, "--step", "best", "--out", result)
    )
    assert status == 0, output
    measured = json.loads(result.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert measured["source"].startswith("step 2 of")
    assert (measured["prompts"], measured["completions"]) == (4, 2)
    assert "pass^2" in output and "mean_reward" in output


def test_non_finite_steps_are_refused_dumped_and_end_the_run(base_config, tmp_path):
    """Rewards near the largest float overflow the loss: nothing is updated, everything is kept."""
    rewards = tmp_path / "huge.py"
    rewards.write_text("def score(sample):\n    return 3e38 * (-1) ** len(sample.completion)\n")
    config = base_config | {
        "reward": {"components": [{"kind": f"{rewards}:score"}], "workers": 0},
        "advantage": {"estimator": "dr_grpo"},
        "run": {"steps": 6, "max_nonfinite": 2, "export": False},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    folder = tmp_path / "run"
    status, output = finish(start("train", path, "--run.dir", folder))
    assert status == 3, output
    assert "no update was applied; the inputs are in" in output
    assert "2 steps in a row" in output
    dumps = sorted((folder / "nonfinite").glob("*.npz"))
    assert dumps
    assert parity.main_parity(dumps[0]) == 1  # it says what is not finite, and does not fall over


def test_a_chosen_step_is_dumped_and_agrees_with_itself(undisturbed):
    """The loss that training logged is the one that the parity tool recomputes from the files."""
    folder, _, _ = undisturbed
    files = sorted((folder / "dumps").glob("*.npz"))
    assert [f.name for f in files] == ["step_000006_update_0.npz", "step_000006_update_1.npz"]
    losses = [parity.evaluate(dump.load_dump(f), "float64").loss for f in files]
    logged = [row["loss"] for row in metrics(folder) if row["step"] == 6 and "loss" in row]
    assert logged == [pytest.approx(np.mean(losses), abs=1e-6)]


def test_the_export_opens_in_transformers_with_the_same_logits(undisturbed):
    """Float32 rounding of two implementations: 2e-4 on logits of order 1."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = undisturbed[0] / "export"
    ours = hf.load_model(folder)
    tokens = np.random.default_rng(0).integers(0, ours.config.vocab_size, (3, 20), np.int32)
    positions = np.broadcast_to(np.arange(20, dtype=np.int32), tokens.shape)
    hidden = ours.policy.hidden(ours.params, tokens, positions, np.ones_like(tokens))
    logits = ours.policy.unembed(ours.policy.head(ours.params), hidden)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=2e-4)
