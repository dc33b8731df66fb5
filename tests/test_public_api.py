"""The public names import, and bring nothing heavy along."""

import subprocess
import sys

import grpo_jax


def test_every_public_name_is_there():
    for name in grpo_jax.__all__:
        assert getattr(grpo_jax, name) is not None, name


def test_importing_the_loss_loads_nothing_heavy():
    code = """
import sys
import chex, flax.struct, jax, jaxtyping
before = {name.split(".")[0] for name in sys.modules}
from grpo_jax import *
print(sorted({name.split(".")[0] for name in sys.modules} - before))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "['grpo_jax']", result.stdout + result.stderr
