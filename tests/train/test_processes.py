"""Rows spread over processes, and rows in another order: the same step, the same log."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from grpo_jax.core import advantages
from grpo_jax.core.advantages import AdvantageConfig
from grpo_jax.data.prompts import Example, Prompt
from grpo_jax.rewards.scoring import Scores
from grpo_jax.rewards.shaping import ShapingConfig
from grpo_jax.sampling.generate import Generation
from grpo_jax.scale import processes
from grpo_jax.scale.processes import alone, gather
from grpo_jax.train import prepare
from grpo_jax.train import rollout as rollouts
from grpo_jax.train.filters import FiltersConfig
from grpo_jax.train.rollout import Override, Rollout, RolloutConfig

GROUPS, SIZE, PROMPT, NEW = 6, 4, 2, 5
ROWS = GROUPS * SIZE
CONFIG = RolloutConfig(GROUPS, SIZE, updates_per_rollout=1, length_multiple=4)
FILTERS = FiltersConfig(
    overlong_filtering=True, drop_constant_groups=True, seq_logprob_error_threshold=1.12
)
ESTIMATORS = {
    "grpo": AdvantageConfig(),
    "batch": AdvantageConfig(normalize_by="batch", filtered_rows_vote=False),
    "gdpo": AdvantageConfig(estimator="gdpo"),
    "reinforce_plus_plus": AdvantageConfig(estimator="reinforce_plus_plus", kl_in_reward=0.1),
    "gae": AdvantageConfig(estimator="gae"),
    "opd": AdvantageConfig(estimator="opd", subtract_global_baseline=True),
    "raw": AdvantageConfig(estimator="raw"),
}


def rules(estimator: str) -> prepare.Rules:
    shaping = ShapingConfig() if estimator == "gdpo" else ShapingConfig(True, 2, 0.5, NEW)
    filters = FiltersConfig() if estimator == "opd" else FILTERS
    return prepare.Rules(shaping, filters, ESTIMATORS[estimator], filtering_on=False)


def make() -> tuple[Rollout, dict[str, np.ndarray]]:
    """All rows of a step, and what a device would say of their tokens."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, NEW + 1, ROWS).astype(np.int32)
    tokens = rng.integers(1, 9, (ROWS, PROMPT + NEW)).astype(np.int32)
    logprobs = -rng.random(tokens.shape).astype(np.float32)
    a, b = rng.integers(0, 2, ROWS).astype(float), rng.random(ROWS)
    a[:SIZE], b[:SIZE] = 1, 0.5  # a group in which all are right
    valid = rng.random(ROWS) > 0.1
    columns = {"a": np.where(valid, a, np.nan), "b": np.where(valid, b, np.nan)}
    flagged = [(Override("tool", 0, 1, -3.0),) if i % 7 == 0 else () for i in range(ROWS)]
    rollout = Rollout(
        prompts=[Prompt(Example("p"), t[:PROMPT], "p") for t in tokens],
        group_ids=np.repeat(np.arange(GROUPS), SIZE),
        rows=Generation(
            tokens,
            np.full(ROWS, PROMPT, np.int32),
            lengths,
            logprobs,
            np.where(lengths == NEW, 2, 1).astype(np.int8),
        ),
        texts=[f"text {i}" for i in range(ROWS)],
        scores=Scores(
            np.where(valid, a + b, 0), columns, valid, {}, np.arange(ROWS) % 11 == 5, [()] * ROWS
        ),
        seconds={"rollout": 1.0},
        overrides=flagged,
    )
    scored = {
        name: (logprobs - spread * rng.random(tokens.shape)).astype(np.float32)
        for name, spread in (("prev", 0.2), ("reference", 0.5), ("teacher", 0.5), ("values", 1.0))
    }
    return rollout, scored


def step(rows: np.ndarray, estimator: str, gather=alone):
    """The host side of a step on some of the rows; advantages, dropped rows, counts, metrics."""
    whole, scored = make()
    mine = {name: np.pad(column[rows], ((0, 0), (0, 8))) for name, column in scored.items()}
    chosen = rules(estimator)
    rollout, drawn = prepare.sample(
        lambda key: prepare.take(whole, rows), jax.random.key(0), chosen, CONFIG, gather
    )
    weighed = prepare.weigh(rollout, chosen)
    batch = prepare.collate(rollout, weighed, CONFIG, gather)
    fit = {k: x[:, : batch.tokens.shape[1]] for k, x in mine.items()}
    batch = batch.replace(
        prev_logprobs=fit["prev"],
        reference_logprobs=fit["reference"],
        teacher_logprobs=fit["teacher"],
        values=fit["values"],
    )
    prepared = prepare.finish(rollout, weighed, batch, chosen, gather)
    ((_, counts),) = prepare.split_updates(prepared.batch, 1, gather=gather)
    metrics = rollouts.summary(rollout, gather) | drawn | prepared.metrics
    return np.asarray(prepared.batch.advantages), prepared.dropped, tuple(counts[:3]), metrics


def in_processes(programs):
    """Run programs that meet in `gather`, as processes would, on threads."""
    barrier, boxes = threading.Barrier(len(programs), timeout=20), {}
    results = [None] * len(programs)

    def worker(i, program):
        def meet(value):
            boxes[i] = value
            barrier.wait()
            values = [boxes[j] for j in range(len(programs))]
            barrier.wait()
            return values

        try:
            results[i] = program(meet)
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=worker, args=item) for item in enumerate(programs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def assert_same(spread, order, whole):
    """Parts of a step against all of it: sums are taken in another order, a few units in the last
    place of double precision (the advantages are then rounded to float32)."""
    advantages = np.concatenate([part[0] for part in spread])
    np.testing.assert_allclose(advantages, whole[0][order], rtol=2e-7, atol=1e-7)
    assert [reason for part in spread for reason in part[1]] == [whole[1][i] for i in order]
    for _, _, counts, metrics in spread:
        np.testing.assert_allclose(counts, whole[2], rtol=1e-7)
        assert list(metrics) == list(whole[3])
        found, wanted = np.array(list(metrics.values())), np.array(list(whole[3].values()))
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_groups_spread_over_processes_make_the_step_of_one(estimator):
    """Interleaved groups, and rows in another order inside each group."""
    whole = step(np.arange(ROWS), estimator)
    order = np.random.default_rng(3).permutation(ROWS)
    of_group = make()[0].group_ids[order]
    spread = [order[of_group % 2 == 0], order[of_group % 2 == 1]]
    parts = in_processes([lambda g, rows=rows: step(rows, estimator, g) for rows in spread])
    assert_same(parts, np.concatenate(spread), whole)
    assert whole[3]["overrides/tool/rows"] == 4 and len(set(whole[1])) >= 2


def test_a46_a_mean_over_processes_is_not_the_mean_of_their_means():
    """Rank 0: two tokens of value 1; rank 1: eight tokens of value 3."""

    def program(values):
        def run(gather):
            mask = np.ones((len(values), 1))
            return advantages.summarise(np.array(values), mask, all_sum=processes.all_sum(gather))

        return run

    for metrics in in_processes([program([1.0] * 2), program([3.0] * 8)]):
        assert metrics["advantages/mean"] == 2.6


def test_dynamic_sampling_goes_on_while_any_process_is_short():
    whole, _ = make()
    plain = prepare.Rules(
        ShapingConfig(), FiltersConfig(use_dynamic_sampling=True), AdvantageConfig(), False
    )
    config = RolloutConfig(prompts_per_step=2, completions_per_prompt=SIZE)
    drawn = {0: [1, 2], 1: [0, 3]}  # the second process begins with the group without spread

    def program(i):
        def run(gather):
            batches = iter(drawn[i])

            def collect(key):
                return prepare.take(whole, np.flatnonzero(whole.group_ids == next(batches)))

            return prepare.sample(collect, jax.random.key(i), plain, config, gather)

        return run

    (first, metrics), (second, others) = in_processes([program(0), program(1)])
    assert [len(first.texts), len(second.texts)] == [SIZE, SIZE]
    assert first.texts[0] == f"text {1 * SIZE}" and second.texts[0] == f"text {3 * SIZE}"
    assert metrics == others
    assert metrics["dynamic_sampling/num_gen_batches"] == 2
    assert metrics["dynamic_sampling/groups_sampled"] == 4
    assert metrics["filters/dynamic_sampling/before"] == 4 * SIZE
    assert metrics["filters/dynamic_sampling/after"] == 2 * SIZE
    assert metrics["dynamic_sampling/num_discarded_valid_samples"] == SIZE


def test_a_shortage_ends_every_process_at_once():
    whole, _ = make()
    strict = FiltersConfig(
        use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=1, on_shortage="error"
    )
    plain = prepare.Rules(ShapingConfig(), strict, AdvantageConfig(), False)
    config = RolloutConfig(prompts_per_step=2, completions_per_prompt=SIZE)

    def program(group):
        rows = np.flatnonzero(whole.group_ids == group)
        return lambda gather: prepare.sample(
            lambda key: prepare.take(whole, rows), jax.random.key(0), plain, config, gather
        )

    for outcome in in_processes([program(0), program(1)]):
        assert isinstance(outcome, ValueError) and "1 of 2 groups" in str(outcome)


def main(port: str, index: str) -> None:
    """One of two real processes, on every estimator."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(index))
    assert gather({"x": 1 / 3, "process": int(index)}) == [
        {"x": 1 / 3, "process": i} for i in range(2)
    ]
    assert gather("short" if index == "0" else "much longer") == ["short", "much longer"]
    mine = np.flatnonzero(make()[0].group_ids % 2 == int(index))
    for estimator in ESTIMATORS:
        found, whole = step(mine, estimator, gather), step(np.arange(ROWS), estimator)
        np.testing.assert_allclose(found[0], whole[0][mine], rtol=2e-7, atol=1e-7)
        assert_same([(whole[0], whole[1], *found[2:])], np.arange(ROWS), whole)
    print("agreed", index, flush=True)


@pytest.mark.slow
def test_two_real_processes_agree():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent.parent)])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "XLA_FLAGS": ""}
    code = "import sys, test_processes; test_processes.main(*sys.argv[1:])"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(port), str(index)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    for index, (output, errors) in enumerate(outputs):
        assert f"agreed {index}" in output, errors
