"""The commands themselves: what a run holds in memory once it has begun."""

import gc
import io
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from rich.console import Console

from grpo_jax import config as configs
from grpo_jax import run
from grpo_jax.data import prompts
from grpo_jax.data.tokenizer import ByteTokenizer
from grpo_jax.models import hf, presets, transformer
from grpo_jax.train import loop

WIDTH = 24  # no other test has weights of this shape


@pytest.mark.parametrize("separate", [False, True])
def test_prompts_left_out_because_they_are_held_out_are_said(tmp_path, separate):
    """Duplicates inside one source are a fact about it; between two sets they are a leak."""
    rows = [{"prompt": f"q{i % 3}", "answer": "a"} for i in range(12)]
    for name in ("train", "held_out"):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    chosen = {"eval_path": str(tmp_path / "held_out.jsonl")} if separate else {}
    settings = {"source": "jsonl", "path": str(tmp_path / "train.jsonl"), "eval_size": 1}
    config = configs.from_dict({"data": settings | chosen})
    data = prompts.load_prompts(config.data, ByteTokenizer())
    mesh = SimpleNamespace(devices=np.array(jax.devices()[:1]))
    model = SimpleNamespace(loaded=SimpleNamespace(params={}), mesh=mesh, adapter=None)
    console = Console(record=True, width=200, file=io.StringIO())
    run._describe(console, config, model, data)
    text = console.export_text()
    assert f"{data.overlapping} equal to a held-out one and left out" in text
    assert data.overlapping == (4 if separate else 3)
    assert ("warning: 4 training prompts are in the held-out set too" in text) == separate


class _BegunError(Exception):
    """Ends a run where its first step would begin."""


@pytest.mark.parametrize(
    ("estimator", "beta", "copies"), [("grpo", 0.0, 3), ("grpo", 0.01, 4), ("gae", 0.0, 6)]
)
def test_a_run_holds_weights_moments_and_a_reference_only_if_read(
    tmp_path, monkeypatch, estimator, beta, copies
):
    """Parameters and two moments, for policy and critic each; one more set for the KL.

    What was loaded is not kept besides.
    """
    shape = presets.preset("tiny", num_layers=1, hidden_size=WIDTH, intermediate_size=16)
    hf.save_model(tmp_path / "model", shape, transformer.init_params(shape, jax.random.key(0)))
    config = configs.from_dict(
        {
            "run": {"dir": str(tmp_path / "run")},
            "model": {"path": str(tmp_path / "model")},
            "tokenizer": {"path": "bytes"},
            "data": {"size": 64, "eval_size": 4, "max_prompt_tokens": 300},
            "rollout": {"micro_batch_size": 1},
            "sampling": {"max_new_tokens": 8},
            "reward": {"workers": 0},
            "advantage": {"estimator": estimator},
            "loss_fn": {"reference_policy_kl_penalty": beta},
            "report": {"picture_every": 0},
        }
    )
    found = []

    def begin(*arguments):
        del arguments
        gc.collect()
        found.extend(x for x in jax.live_arrays() if x.shape == (shape.vocab_size, WIDTH))
        raise _BegunError

    monkeypatch.setattr(loop, "train", begin)
    with pytest.raises(_BegunError):
        run.train(config)
    assert len(found) == copies
    assert all(len(x.sharding.device_set) == 8 for x in found)
