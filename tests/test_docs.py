"""The documentation keeps its promises: code blocks run, every metric and every switch is there."""

import dataclasses
import importlib
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.core import diagnostics
from grpo_jax.core.loss_config import LossConfig
from grpo_jax.data.prompts import Example
from grpo_jax.rewards import verdicts
from grpo_jax.rewards.scoring import Sample
from grpo_jax.train import dump, parity

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"


def blocks(name):
    return re.findall(r"^```python\n(.*?)^```", (DOCS / name).read_text(), re.M | re.S)


def test_every_example_of_bring_your_own_runs():
    """Each prints or computes a loss whose gradient is finite and not zero."""
    found = blocks("bring_your_own.md")
    assert len(found) == 5
    world: dict = {}
    for block in found:
        exec(compile(block, "bring_your_own.md", "exec"), world)
        loss, grads = world["loss"], jax.tree.leaves(world["grads"])
        assert np.isfinite(loss)
        assert all(np.isfinite(g).all() for g in grads)
        assert max(float(jnp.abs(g).max()) for g in grads) > 0
    assert abs(float(world["metrics"]["probs_ratio"]) - 1) < 0.5
    assert len(world["completions"]) == 3
    assert all(np.isfinite(c.logprobs).all() for c in world["completions"])


def test_the_example_of_rewards_returns_what_it_says():
    (block,) = blocks("rewards.md")
    world = {}
    exec(compile(block, "rewards.md", "exec"), world)

    def read(completion, answer="5"):
        sample = Sample(completion, Example("2 + 3", answer))
        return verdicts.read(world["sums"](sample, penalty=-1.0), len(completion))

    assert read("2 + 3 = 5") == verdicts.Verdict(1.0)
    assert read("2 + 3 = 5", " ") == verdicts.Verdict(None)
    assert read("ERROR").masked
    assert read("2 = 3 = 5").spans == (verdicts.TextSpan(-1.0, 6, 7, "second_equals"),)


def test_the_engine_of_the_sampling_page_runs():
    world: dict = {}
    first, second = blocks("sampling.md")
    exec(compile(first, "sampling.md", "exec"), world)
    assert len(world["parts"]) == 6 and len(world["whole"]) == len(world["cut_off"]) > 0
    assert {7, 8} == {v for c in world["whole"] for v in c.versions.tolist()}
    exec(compile(second, "sampling.md", "exec"), world)
    assert 16 <= len(world["told"][0]) < 32 and len(world["told"][1]) == 8


def test_the_adapter_of_the_lora_page_runs():
    (block,) = blocks("lora.md")
    world: dict = {}
    exec(compile(block, "lora.md", "exec"), world)
    assert world["hidden"].shape == (1, 3, 32)


SPELT = {  # normaliser of the code -> words of the page
    "tokens": "tokens",
    "sequences": "sequences",
    "truncation": "tokens, or sequences",
    "loss": "as the loss",
    "none": "none",
    "min": "smallest",
    "max": "largest",
}
INSIDE = {"is_weight_sum", "is_weight_square_sum", "is_geometric_ratio_histogram"}  # see `derived`


def test_metrics_have_the_names_and_normalisers_of_the_code():
    """Both ways: a metric of the page exists in the code, and is divided by what the page says."""
    text = (DOCS / "maths.md").read_text()
    lines = text[text.index("## Metrics") :].splitlines()
    found = {}
    for line in lines:
        if not line.startswith("| `"):
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        names, formula, normaliser, advice = cells
        assert formula and advice, line
        for name in re.findall(r"`([^`]+)`", names):
            assert name not in found, name
            found[name] = normaliser
    wanted = {
        name: SPELT[entry.normaliser] + (", retained" if entry.retained else "")
        for name, entry in diagnostics.TABLE.items()
        if name not in INSIDE
    }
    quantiles = {f"is_geometric_ratio_q{q * 100:02.0f}" for q in diagnostics.QUANTILES}
    assert found == wanted | dict.fromkeys(
        {"is_weight_ess", "gradient_scale", "effective_gradient_scale", *quantiles}, "derived"
    )


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(LossConfig)])
def test_every_switch_of_the_loss_is_documented(name):
    assert re.search(rf"`[^`]*\b{name}\b[^`]*`", (DOCS / "maths.md").read_text())


def test_functions_named_in_the_maths_exist():
    text = (DOCS / "maths.md").read_text()
    named = re.findall(r"`(\w+)\.(\w+)`", text) + [("losses", "clipped_pg_loss")]
    assert len(named) >= 5
    for module, function in named:
        found = importlib.import_module(f"grpo_jax.core.{module}")
        assert hasattr(found, function), f"docs/maths.md names {module}.{function}"


class _Tensor(np.ndarray):
    """As much of a torch tensor as the snippet touches, where torch is not installed."""

    grad = None

    def detach(self):
        return self

    def cpu(self):
        return self

    def float(self):
        return self.astype(np.float32)

    def numpy(self):
        return np.asarray(self)


def _golden_case():
    """One conformance case with every optional part: filters, KL, importance weights."""
    folder = ROOT / "tests" / "golden"
    for case in json.loads((folder / "manifest.json").read_text())["cases"]:
        wanted = {"policy_support_mask", "curr_logprobs_unfiltered"} <= set(case.get("inputs", {}))
        if wanted and "tis_min" in case["tags"] and "beyond_reference" not in case["tags"]:
            with np.load(folder / case["npz"]) as file:
                want = {k: file[v["f32"]] for k, v in case["expected"].items()}
                return case, {k: file[v] for k, v in case["inputs"].items()}, want
    raise AssertionError("no conformance case has what this test needs")


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_the_torch_snippet_writes_what_parity_reads(tmp_path, kind):
    """End to end on a conformance case, with the reference's own float32 numbers as `theirs`."""
    if kind == "torch":
        torch = pytest.importorskip("torch")
        make = lambda x: torch.as_tensor(np.array(x))  # noqa: E731
    else:
        make = lambda x: np.array(x).view(_Tensor)  # noqa: E731
    (block,) = blocks("numerics.md")
    world = {}
    exec(compile(block, "numerics.md", "exec"), world)
    case, inputs, want = _golden_case()
    data = {k: make(v) for k, v in inputs.items()}
    current = data.pop("next_token_logprobs")
    current.grad = make(want["grad/next_token_logprobs"])
    metrics = dict(zip(case["metric_names"], want["metrics"].tolist(), strict=True))
    path = tmp_path / "step.npz"
    world["write_parity_dump"](path, data, current, case["config"], want["loss"], metrics)
    report = parity.compare(dump.load_dump(path))
    assert report.agrees, [t for t in report.totals if t.theirs is not None]
    assert sum(t.theirs is not None for t in report.totals) > 10
