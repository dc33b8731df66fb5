"""Packed rows and token budgets in whole runs: the same training as with padded rows."""

import json

import numpy as np
import pytest
import yaml

from grpo_jax.train import dump, parity
from tests.e2e.conftest import changed, finish, start
from tests.e2e.test_train_command import metrics

LAYOUTS = {
    "padded": {},
    "packed": {
        "rollout": {"micro_batch_size": None},
        "packing": {"enabled": True, "row_length": 200, "max_sequences": 8},
    },
    "token_budget": {"rollout": {"micro_batch_size": None, "micro_batch_tokens": 400}},
}
OURS = ("packing/",)


@pytest.fixture(scope="module")
def runs(base_config, tmp_path_factory):
    """Three steps each, with a reference policy, a row filter and two updates a rollout."""
    folders = {}
    for name, sections in LAYOUTS.items():
        place = tmp_path_factory.mktemp(name)
        config = changed(
            base_config,
            run={"steps": 3, "dump_steps": [3], "export": False},
            filters={"seq_logprob_error_threshold": 1.5},
            evaluate={"at_start": False, "at_end": False},
            checkpoint={"every": 0},
        )
        config = changed(config, **sections)
        path = place / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        folders[name] = place / "run"
        status, output = finish(start("train", path, "--run.dir", folders[name]))
        assert status == 0, output
    return folders


@pytest.mark.parametrize("name", ["packed", "token_budget"])
def test_the_layout_changes_no_metric(runs, name):
    """Float32 sums in another order, and what three updates make of them."""
    for row, other in zip(metrics(runs[name]), metrics(runs["padded"]), strict=True):
        assert row.keys() == other.keys()
        for key, value in other.items():
            if not key.startswith(OURS):
                assert row[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    last = json.loads((runs[name] / "metrics.jsonl").read_text().splitlines()[-1])
    assert 1 <= last["programs/train"] <= 3 and 1 <= last["programs/score"] <= 6
    assert 0 < last["packing/fill"] <= 1


def test_packing_fills_rows_better_than_padding(runs):
    fill = {name: metrics(folder)[-1]["packing/fill"] for name, folder in runs.items()}
    assert fill["packed"] > fill["padded"]


def test_completions_are_written_one_by_one(runs):
    """Log-probabilities of the packed score passes stand at the completions they belong to."""
    for packed, padded in zip(
        *(
            (runs[name] / "samples" / "step_000001.jsonl").read_text().splitlines()
            for name in ("packed", "padded")
        ),
        strict=True,
    ):
        packed, padded = json.loads(packed), json.loads(padded)
        assert packed["tokens"] == padded["tokens"] and packed["tokens"]
        for key in ("prev_logprobs", "advantages"):
            np.testing.assert_allclose(packed[key], padded[key], atol=1e-5)


def test_a_packed_step_is_dumped_and_agrees_with_itself(runs):
    files = sorted((runs["packed"] / "dumps").glob("*.npz"))
    steps = [dump.load_dump(f) for f in files]
    assert len(steps) == 2 and max(s.max_segments for s in steps) > 1
    losses = [parity.evaluate(s, "float64").loss for s in steps]
    assert metrics(runs["packed"])[-1]["loss"] == pytest.approx(np.mean(losses), abs=1e-6)
    assert parity.main_parity(files[0]) == 0
