"""The torch mirror must itself be right before anything is compared with it."""

import importlib.util
import json
import pathlib

import numpy as np
import pytest

pytest.importorskip("torch")
HERE = pathlib.Path(__file__).parent
GOLDEN = HERE.parent / "golden"
pytestmark = [pytest.mark.torch]


def _load():
    spec = importlib.util.spec_from_file_location("torch_loss", HERE / "torch_loss.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


torch_loss = _load()


class _Vectors:
    def __init__(self):
        self.manifest = json.loads((GOLDEN / "manifest.json").read_text())
        self.files = {}

    def array(self, case, key):
        name = case["npz"]
        if name not in self.files:
            self.files[name] = np.load(GOLDEN / name)
        return self.files[name][key]

    def cases(self, family):
        return [c for c in self.manifest["cases"] if c["family"] == family]

    def inputs(self, case):
        arrays = {k: self.array(case, v) for k, v in case["inputs"].items()}
        return {k: a.astype(np.float64) if a.dtype.kind == "f" else a for k, a in arrays.items()}


def _off(got, want):
    """The worst error in units of 1e-12 + 1e-9 |want|; nan in `want` means "not defined"."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where(got == want, 0.0, np.abs(got - want))
        scaled = error / (1e-12 * max(1.0, np.abs(want[np.isfinite(want)]).max(initial=0.0)))
        scaled = np.minimum(scaled, error / (1e-9 * np.abs(want) + 1e-300))
    return np.where(np.isnan(want), 0.0, scaled).max(initial=0.0)


def _failures(vectors, case):
    got = torch_loss.loss_and_grad(vectors.inputs(case), case["config"], case.get("params"))
    want = {k: vectors.array(case, v["f64"]) for k, v in case["expected"].items()}
    bad = {"loss": _off(got["loss"], want["loss"])}
    for name, grad in got["grads"].items():
        bad[name] = _off(grad, want["grad/" + name])
    for name, value in zip(case["metric_names"], want["metrics"], strict=True):
        alternatives = [value, case.get("alt_metrics", {}).get(name, value)]
        bad[name] = min(_off(got["metrics"][name], v) for v in alternatives)
    return {k: v for k, v in bad.items() if not v <= 1.0}


@pytest.fixture
def vectors():
    vectors = _Vectors()
    yield vectors
    for file in vectors.files.values():
        file.close()


@pytest.mark.parametrize("family,count", [("loss_grid", 404), ("loss_support", 143)])
def test_the_mirror_agrees_with_every_golden_loss_case(vectors, family, count):
    """float64, 1e-9 relative: values, gradients and every metric."""
    cases = vectors.cases(family)
    assert len(cases) == count
    wrong = {c["id"]: bad for c in cases if (bad := _failures(vectors, c))}
    assert not wrong


def test_the_comparison_notices_a_wrong_number(vectors):
    case = vectors.cases("loss_grid")[0]
    case["config"] |= dict(ratio_clip_min=0.01, ratio_clip_max=0.01)
    assert _failures(vectors, case)
