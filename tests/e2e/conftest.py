"""A tiny model folder, a config, and runs of the real command line in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import yaml

from grpo_jax.models import hf, presets, transformer

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A Hugging Face folder of a random two-layer Llama over bytes."""
    config = presets.preset("tiny", num_layers=1, hidden_size=32, intermediate_size=64)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    hf.save_model(folder, config, transformer.init_params(config, jax.random.key(0)))
    return folder


@pytest.fixture(scope="session")
def base_config(tiny_folder) -> dict:
    """A run of six short steps whose reward likes short completions."""
    return {
        "run": {"steps": 6, "seed": 3, "dump_steps": [6]},
        "model": {"path": str(tiny_folder)},
        "tokenizer": {"path": "bytes"},
        "data": {
            "name": "chain_sum",
            "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            "size": 64,
            "eval_size": 4,
            "max_prompt_tokens": 120,
        },
        "rollout": {
            "prompts_per_step": 2,
            "completions_per_prompt": 4,
            "micro_batch_size": 4,
            "updates_per_rollout": 2,
        },
        "sampling": {"max_new_tokens": 8},
        "engine": {"prompt_bucket": 128},
        "reward": {
            "components": [{"kind": f"{Path(__file__).parent}/slow_reward.py:score"}],
            "workers": 0,
        },
        "optimizer": {"lr": 0.003, "schedule": "cosine"},
        "checkpoint": {"every": 2},
        "report": {"picture_every": 0},
    }


@pytest.fixture
def write_config(tmp_path):
    """Write nested settings to a file and return its path."""

    def write(config: dict, name: str = "config.yaml") -> Path:
        path = tmp_path / name
        path.write_text(yaml.safe_dump(config))
        return path

    return write


def changed(config: dict, **sections: dict) -> dict:
    """A copy of a nested config with some keys of some sections replaced."""
    merged = json.loads(json.dumps(config))
    for name, values in sections.items():
        merged[name] = merged.get(name, {}) | values
    return merged


def environment() -> dict[str, str]:
    """One CPU device, and the compile cache of the test session."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "GRPO_JAX_CACHE": str(REPOSITORY / ".jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }


def start(*arguments: object, **variables: str) -> subprocess.Popen:
    """Start `grpo-jax` in a process of its own, with additional environment variables."""
    return subprocess.Popen(
        [sys.executable, "-m", "grpo_jax", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment() | variables,
        cwd=REPOSITORY,
    )


def finish(process: subprocess.Popen, timeout: float = 300) -> tuple[int, str]:
    """Wait for a process; returns its exit status and everything it printed."""
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, output
