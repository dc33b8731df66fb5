"""The README's Python runs, and its commands exist."""

import re
from pathlib import Path

import jax
import pytest

from grpo_jax import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_python_example_trains(monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) == 1
    names: dict = {}
    exec(compile(blocks[0], "README.md", "exec"), names)  # noqa: S102
    metrics = jax.device_get(names["metrics"])
    assert metrics["update_applied"] == 1 and metrics["grad_norm"] > 0


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^grpo-jax (\w+)", README, re.M))))
def test_commands_exist(command):
    assert command in cli.COMMANDS


def test_files_that_the_readme_names_exist():
    for name in re.findall(r"(?:\]\(|`)((?:docs|configs|scripts)/[\w./]+)", README):
        assert (ROOT / name).exists(), name
