"""The public names import, and bring nothing heavy along."""

import subprocess
import sys

import grpo_jax

HEAVY = ("optax", "orbax", "transformers", "yaml", "tyro", "rich", "safetensors", "tensorstore")


def test_every_public_name_is_there():
    for name in grpo_jax.__all__:
        assert getattr(grpo_jax, name) is not None, name


def test_importing_the_loss_loads_nothing_heavy():
    code = (
        "from grpo_jax import clipped_pg_loss, LossConfig, Batch, Counts, policy_from_apply\n"
        "import sys\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
