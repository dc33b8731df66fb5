"""Utilisation by hand, and the launch script's dry run."""

import math
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from grpo_jax import config as configs
from grpo_jax.scale import chips

SCRIPT = Path(__file__).parents[2] / "scripts" / "launch_tpu_pod.sh"


def test_utilisation_is_work_over_peak():
    """9.6e15 FLOPs in 10 s on 16 chips of 197 TFLOP/s."""
    found = chips.utilisation(9.6e15, 10.0, 16, "TPU v5 lite")
    assert found == pytest.approx(9.6e15 / (10 * 16 * 197e12))
    assert chips.utilisation(1.0, 1.0, 1, "TPU of tomorrow") is None
    assert chips.utilisation(1.0, 1.0, 1) is None  # a CPU


def test_every_chip_has_a_source_and_sane_numbers():
    for name, chip in chips.CHIPS.items():
        assert name == chip.name and chip.source.startswith("https://")
        assert 100 < chip.flops / chip.memory_bandwidth < 1000
    assert set(chips.KINDS.values()) <= set(chips.CHIPS)


def launch(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env={"PATH": os.environ["PATH"]} | variables,
        capture_output=True,
        text=True,
    )


SLICE = {"TPU": "my-slice", "ZONE": "us-west4-a", "PROJECT": "p", "FOLDER": "/opt/grpo"}


def test_the_launch_script_runs_one_command_on_all_workers():
    found = launch("train", "my config.yaml", "--run.dir", "/mnt/r", DRY_RUN="1", **SLICE)
    assert found.returncode == 0, found.stderr
    assert "gcloud compute tpus tpu-vm ssh my-slice --project p --zone us-west4-a" in found.stdout
    assert "--worker all" in found.stdout and "my\\\\\\ config.yaml" in found.stdout


def test_the_launch_script_asks_for_what_is_missing():
    assert launch(**SLICE).returncode == 2
    found = launch("train", "x.yaml", **{k: v for k, v in SLICE.items() if k != "ZONE"})
    assert found.returncode == 2 and "set ZONE" in found.stderr


def test_the_launch_script_starts_again_after_a_preemption_only(tmp_path):
    """A stand-in for gcloud that is preempted twice."""
    count = tmp_path / "count"
    fake = tmp_path / "gcloud"
    fake.write_text(
        f"#!/bin/bash\necho x >> {count}\n[ $(wc -l < {count}) -lt 3 ] && exit 75\nexit 3\n"
    )
    fake.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    found = launch("train", "x.yaml", RESTARTS="5", **(SLICE | {"PATH": path}))
    assert found.returncode == 3 and len(count.read_text().split()) == 3
    count.unlink()
    assert launch("train", "x.yaml", RESTARTS="1", **(SLICE | {"PATH": path})).returncode == 75


def test_the_examples_of_the_page_are_well_formed(tmp_path):
    """Bash reads the Slurm script, and the GKE manifest asks for the chips of its topology."""
    text = (SCRIPT.parents[1] / "docs" / "pods.md").read_text()
    (slurm,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", text, re.S)
    assert subprocess.run(["bash", "-n"], input=slurm, text=True).returncode == 0
    assert "--gpus-per-node=8" in slurm and "--gpus-per-task" not in slurm  # JAX picks by local id
    rules, manifest = re.findall(r"```yaml\n(.*?)```", text, re.S)
    mesh = configs.from_dict(yaml.safe_load(rules)).mesh
    assert [rule.match for rule in mesh.rules] == ["embed/table", r"Dense_\d+/kernel", "bias"]
    (job,) = yaml.safe_load(manifest)["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    machine = pods["template"]["spec"]
    chips_each = machine["containers"][0]["resources"]["limits"]["google.com/tpu"]
    sides = machine["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    assert pods["parallelism"] * chips_each == math.prod(map(int, sides))
    assert pods["completionMode"] == "Indexed"
