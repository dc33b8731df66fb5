"""Every golden case of the torch reference, in double and in single precision.

Tolerances are those of `check.py`: in float64 1e-9 relative, in float32 those of the manifest.
Cases are evaluated eagerly at one padded shape, which is faster than compiling a thousand programs.
"""

import os
import sys
import types

import jax
import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import check  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
FAMILIES = (
    "loss_grid",
    "loss_support",
    "logprobs",
    "advantages",
    "filters",
    "packing",
    "illegal_configs",
)


@pytest.fixture(scope="module")
def vectors():
    vectors = check.Set(HERE)
    yield vectors
    for file in vectors.npz.values():
        file.close()


@pytest.fixture(scope="module")
def adapter():
    return check.load_adapter(os.path.join(HERE, "adapter.py"))


@pytest.fixture(params=["float64", "float32"])
def precision(request, adapter):
    before = jax.config.jax_enable_x64
    adapter.setup(request.param)
    yield request.param
    jax.config.update("jax_enable_x64", before)


def run(adapter, vectors, cases, precision):
    """Counts by outcome, and what went wrong."""
    args = types.SimpleNamespace(strict_metrics=True)
    outcomes, wrong = {"ok": 0, "not provided": 0}, []
    for case in cases:
        result = check.Result()
        try:
            outcome = check.run_case(
                adapter, vectors, case, np.dtype(precision), precision, args, result
            )
        except NotImplementedError:
            outcome = "not provided"
        except check.Bad as error:
            outcome, complaint = "bad", str(error)
        else:
            complaint = f"{result.where}: {result.ratio:.3g} times the tolerance"
            outcome = "bad" if result.ratio > 1 else outcome
        if outcome == "bad":
            wrong.append(f"{case['id']} {case['tags']}: {complaint}")
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return outcomes, wrong


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_of_a_family(family, precision, adapter, vectors):
    # The reference ignores unknown keys; here they are refused, on purpose.
    cases = [
        case
        for case in vectors.man["cases"]
        if case["family"] == family and "some_unknown_key" not in case.get("config", {})
    ]
    assert len(cases) >= vectors.man["counts"][family] - 1
    outcomes, wrong = run(adapter, vectors, cases, precision)
    print(f"\ngolden {family} {precision}: {outcomes} of {len(cases)}")
    assert not wrong, "\n".join(wrong[:20])
    assert outcomes["ok"] == len(cases)


def test_a_wrong_number_is_noticed(adapter, vectors):
    """The machinery can fail: the same case with another clip bound is rejected."""
    case = dict(next(c for c in vectors.man["cases"] if c["function"] == "clipped_pg_loss"))
    case["config"] = case["config"] | {"disable_ppo_ratio": True}
    before = jax.config.jax_enable_x64
    adapter.setup("float64")
    try:
        outcomes, wrong = run(adapter, vectors, [case], "float64")
    finally:
        jax.config.update("jax_enable_x64", before)
    assert outcomes["ok"] == 0 and wrong
