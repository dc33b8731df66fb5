"""Rows spread over processes give the advantages of one process that has them all."""

import threading

import numpy as np
import pytest

from grpo_jax.core import advantages
from grpo_jax.core.advantages import AdvantageConfig, AdvantageInputs

RNG = np.random.default_rng(1)
ROWS, WIDTH = 12, 5
GROUPS = np.repeat(np.arange(4), 3)
MASK = (RNG.random((ROWS, WIDTH)) > 0.3) * np.array([0, 1, 1, 1, 1])
COMPONENTS = {"a": RNG.normal(size=ROWS), "b": RNG.normal(size=ROWS)}
TOKENS = {
    name: -RNG.random((ROWS, WIDTH))
    for name in ("policy_logprobs", "reference_logprobs", "teacher_logprobs", "values")
}
CONFIGS = {
    "grpo": dict(normalize_by="batch"),
    "gdpo": dict(estimator="gdpo"),
    "reinforce_plus_plus": dict(estimator="reinforce_plus_plus", kl_in_reward=0.1),
    "gae": dict(estimator="gae", kl_in_reward=0.1),
    "opd": dict(estimator="opd", subtract_global_baseline=True),
    "raw": dict(estimator="raw"),
}


def in_processes(programs):
    """Run programs that meet in `all_sum`, as processes would, on threads."""
    barrier, boxes = threading.Barrier(len(programs), timeout=20), {}
    results = [None] * len(programs)

    def worker(i, program):
        def all_sum(x):
            boxes[i] = np.asarray(x)
            barrier.wait()
            total = sum(boxes[j] for j in range(len(programs)))
            barrier.wait()
            return total

        results[i] = program(all_sum)

    threads = [threading.Thread(target=worker, args=item) for item in enumerate(programs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_rows_spread_over_processes_give_the_same(config):
    def program(rows, all_sum=np.asarray):
        inputs = AdvantageInputs(
            COMPONENTS["a"][rows],
            GROUPS[rows],
            mask=MASK[rows],
            components={name: x[rows] for name, x in COMPONENTS.items()},
            **{name: x[rows] for name, x in TOKENS.items()},
        )
        return advantages.compute(AdvantageConfig(**config), inputs, all_sum=all_sum)

    whole = program(slice(None))
    parts = in_processes([lambda s, r=r: program(r, s) for r in (slice(0, 3), slice(3, ROWS))])
    spread = np.concatenate([part.advantages for part in parts])
    # The sums are taken in another order: a few units in the last place of double precision.
    np.testing.assert_allclose(spread, whole.advantages, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("config", [dict(), dict(estimator="rloo"), dict(estimator="dr_grpo")])
def test_a_group_spread_over_processes_is_gathered_first(config):
    rewards = COMPONENTS["a"]
    whole = advantages.compute(AdvantageConfig(**config), AdvantageInputs(rewards, GROUPS))
    # Row i lives on process i % 2; gathering puts the rows of process 0 first.
    gathered = np.concatenate([np.arange(0, ROWS, 2), np.arange(1, ROWS, 2)])
    inputs = AdvantageInputs(rewards[gathered], GROUPS[gathered])
    out = advantages.compute(AdvantageConfig(**config), inputs).advantages
    np.testing.assert_array_equal(out[: ROWS // 2], whole.advantages[::2])
    np.testing.assert_array_equal(out[ROWS // 2 :], whole.advantages[1::2])
