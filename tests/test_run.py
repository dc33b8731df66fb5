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
from grpo_jax.models.work import Work
from grpo_jax.scale import chips
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


PARTS = ("rollout", "decode", "reward", "score", "update", "step")
LAYER = 2 * 24 * 64 + 2 * 24 * 32 + 3 * 24 * 16  # query and output, key and value, MLP
ADAPTER = 2 * (2 * (24 + 64) + 2 * (24 + 32) + 3 * (24 + 16))  # rank 2 on all seven


@pytest.mark.parametrize(
    ("sections", "token", "scored"),
    [
        ({}, 6 * LAYER, 6 * 264 * 24),
        ({"lora": {"rank": 2}}, 4 * LAYER + 6 * ADAPTER, 4 * 264 * 24),
    ],
    ids=["all weights", "adapter"],
)
def test_metrics_of_a_run_say_mfu_speed_and_where_the_time_went(
    tmp_path, monkeypatch, sections, token, scored
):
    """Eight CPU devices that pass for v5e chips, 197 TFLOP/s each: FLOPs by hand."""
    monkeypatch.setitem(chips.KINDS, jax.devices()[0].device_kind, "v5e")
    shape = presets.preset("tiny", num_layers=1, hidden_size=WIDTH, intermediate_size=16)
    hf.save_model(tmp_path / "model", shape, transformer.init_params(shape, jax.random.key(0)))
    settings = {
        "run": {"dir": str(tmp_path / "run"), "steps": 2, "export": False},
        "model": {"path": str(tmp_path / "model")},
        "tokenizer": {"path": "bytes"},
        "data": {"size": 64, "eval_size": 4, "max_prompt_tokens": 300},
        "rollout": {"prompts_per_step": 4, "completions_per_prompt": 2, "micro_batch_size": 1},
        "sampling": {"max_new_tokens": 8},
        "reward": {"workers": 0},
        "optimizer": {"warmup_steps": 0},
        "evaluate": {"at_start": False, "at_end": False},
        "report": {"picture_every": 0},
    }
    assert run.train(configs.from_dict(settings | sections)) == 0
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["packing/trained_tokens"] == row["length/total"] > 0
        flops = token * row["packing/tokens"] + scored * row["packing/trained_tokens"]
        assert row["mfu"] == pytest.approx(flops / (row["seconds/update"] * 8 * 197e12))
        sampled = row["length/total"] / row["seconds/step"]
        assert row["tokens_per_second"] == pytest.approx(sampled)
        assert row["tokens_per_second_per_chip"] == pytest.approx(sampled / 8)
        seconds = {name: row[f"seconds/{name}"] for name in PARTS}
        assert all(value > 0 for value in seconds.values())
        assert seconds["decode"] + seconds["reward"] <= seconds["rollout"]
        whole = seconds["rollout"] + seconds["score"] + seconds["update"]
        assert whole <= seconds["step"]


@pytest.mark.parametrize(("step", "expected"), [(2, 700.0), (3, 700.0 + 1350.0)])
def test_mfu_counts_the_critic_and_the_policy_once_it_is_trained(step, expected):
    parts = SimpleNamespace(
        work=Work(token=12.0, scored=5.0),
        critic=SimpleNamespace(work=Work(token=7.0, scored=0.0), warmup_steps=2),
    )
    metrics = {"packing/tokens": 100, "packing/trained_tokens": 30}
    assert loop._flops(parts, metrics, step) == expected  # type: ignore[arg-type]
