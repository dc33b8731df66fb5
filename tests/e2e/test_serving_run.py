"""A run that samples on a server: `grpo-jax serve` in one process, `grpo-jax train` in another."""

import json
import re

import pytest

from tests.e2e.conftest import changed, finish, start

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")


@pytest.fixture
def served(write_config, base_config, tmp_path):
    """A server of the tiny model that accepts weights; yields its root and the weights' folder."""
    folder = tmp_path / "weights"
    config = write_config(base_config, "serve.yaml")
    process = start("serve", config, "--port", 0, "--weights", folder, PYTHONUNBUFFERED="1")
    try:
        assert process.stdout is not None
        line = ""
        for line in process.stdout:
            if found := re.search(r"http://\S+/v1", line):
                yield found[0], folder
                break
        else:
            pytest.fail(f"the server ended: {line}")
    finally:
        process.terminate()
        process.communicate()


def test_a_run_samples_on_a_server_from_the_weights_it_just_trained(
    served, write_config, base_config, tmp_path
):
    url, folder = served
    remote = {"url": url, "weights": str(folder), "backoff": 0.1}
    config = changed(
        base_config,
        run={"steps": 2, "dir": str(tmp_path / "run"), "dump_steps": []},
        engine={"remote": remote},
        evaluate={"at_start": False, "at_end": False},
    )
    status, output = finish(start("train", write_config(config)))
    assert status == 0, output
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 2
    for row in steps:
        # The server drew from the very weights that score: what is left is rounding.
        assert abs(row["token_mult_prob_error"] - 1) < 1e-4
    assert any(folder.glob("*.safetensors"))


def test_training_on_a_server_that_keeps_its_weights_is_refused(
    write_config, base_config, tmp_path
):
    config = changed(
        base_config,
        run={"dir": str(tmp_path / "run")},
        engine={"remote": {"url": "http://127.0.0.1:9/v1"}},
    )
    status, output = finish(start("train", write_config(config)))
    assert status == 2
    assert "would sample from the same weights for the whole run" in output
