"""What a plan says a step needs, against what the process that runs it grows by."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_jax.models import hf_config, presets

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's /proc")
def test_the_planned_memory_is_what_running_takes(tmp_path):
    """Within 5 %: a step of eight layers, 128 rows of 64 tokens in two micro-batches, one device.

    The remainder is workspace of the CPU's matrix library, one product at a time, which no plan
    of the compiler knows. It weighs more where layers are few or their activations are recomputed.
    """
    shape = presets.preset("tiny", num_layers=8)
    (tmp_path / "config.json").write_text(json.dumps(hf_config.config_to_fields(shape)))
    run = subprocess.run(
        [sys.executable, "-m", "tests.plan_memory", str(tmp_path)],
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1",
            "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_ARENA_MAX": "1",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["planned"] > 200e6  # large against the pages of everything else
    assert found["taken"] == pytest.approx(found["planned"], rel=0.05), found
