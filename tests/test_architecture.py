"""The layering contracts, the size of files and functions, and names that may not exist."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "grpo_jax").rglob("*.py"))


def test_layers():
    """import-linter's contracts of pyproject.toml, the same as `lint-imports`."""
    result = subprocess.run(
        [Path(sys.executable).with_name("lint-imports")], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file_is_small_and_says_what_it_is_for(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    assert ast.get_docstring(ast.parse(text)), "no module docstring"


def test_no_room_where_everything_may_be_put_down():
    names = {path.stem for path in FILES}
    assert not names & {"utils", "common", "helpers", "misc"}


@pytest.mark.parametrize("name", ["losses.py"])
def test_functions_of_the_loss_are_short(name):
    tree = ast.parse((ROOT / "grpo_jax" / "core" / name).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]
            assert lines <= 40, f"{node.name} has {lines} lines"


def test_every_public_function_is_documented():
    missing = []
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            public = isinstance(node, (ast.FunctionDef, ast.ClassDef))
            if public and not node.name.startswith("_") and not ast.get_docstring(node):
                missing.append(f"{path.name}:{node.name}")
    assert not missing
