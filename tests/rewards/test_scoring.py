"""Scoring in worker processes: whatever a reward does, the run goes on and says what happened."""

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from grpo_jax.data.prompts import Example
from grpo_jax.rewards.scoring import RewardComponent, RewardConfig, Scorer

HOSTILE = f"{Path(__file__).parent / 'hostile_rewards.py'}"
LIMIT = 0.3  # seconds of CPU time
PATIENCE = 240.0  # seconds; a run that goes on at all is far below, even on a busy machine


def component(function, **more):
    return RewardComponent(f"{HOSTILE}:{function}", **more)


def score(scorer, *completions, answers=None):
    answers = answers or [None] * len(completions)
    return scorer.score([Example("q", a) for a in answers], list(completions))


@pytest.fixture(scope="module")
def hostile():
    config = RewardConfig(
        (component("act", weight=2.0, params={"bonus": 0.25}), component("always_one")),
        workers=2,
        time_limit=LIMIT,
        clock_limit=PATIENCE,
        memory_limit_mb=2048,
    )
    with Scorer(config) as scorer:
        scorer.wait_ready()
        yield scorer


@pytest.fixture(scope="module")
def maths():
    config = RewardConfig(
        (RewardComponent("math"),), workers=2, time_limit=0.5, clock_limit=PATIENCE
    )
    with Scorer(config) as scorer:
        scorer.wait_ready()
        yield scorer


@pytest.mark.parametrize(
    "behaviour, problem",
    [
        ("raise", "raised"),
        ("text", "raised"),
        ("hog", "raised"),
        ("recurse", "raised"),
        ("nan", "non_finite"),
        ("inf", "non_finite"),
        ("hang", "timed_out"),
        ("swallow", "timed_out"),
        ("compute outside python", "timed_out"),
        ("die", "died"),
    ],
)
def test_what_fails_scores_zero_is_counted_and_stops_nothing(hostile, behaviour, problem):
    start = time.monotonic()
    scores = score(hostile, "1", behaviour, "2", "3")
    assert time.monotonic() - start < PATIENCE
    assert scores.components["act"].tolist() == [1.25, 0, 2.25, 3.25]
    assert scores.components["always_one"].tolist() == [1, 1, 1, 1]  # the other term is untouched
    assert scores.total.tolist() == [3.5, 1.0, 5.5, 7.5]
    assert scores.problems == {f"act/{problem}": 1}
    assert scores.valid.all()


def test_several_hanging_rewards_at_once_leave_the_pool_alive(hostile):
    scores = score(hostile, *["compute outside python", "die"] * 2, "5")
    assert scores.components["act"].tolist() == [0, 0, 0, 0, 5.25]
    assert scores.problems == {"act/timed_out": 2, "act/died": 2}
    assert score(hostile, "6").components["act"].tolist() == [6.25]


def test_a_reward_that_waits_for_ever_is_ended_by_the_clock_and_its_worker_replaced():
    config = RewardConfig((component("act"),), workers=1, time_limit=LIMIT, clock_limit=1.0)
    with Scorer(config) as scorer:
        scorer.wait_ready()
        before = scorer._workers[0]._process.pid
        scores = score(scorer, "wait outside python")
        assert scores.total.tolist() == [0.0] and scores.problems == {"act/timed_out": 1}
        scorer.wait_ready()
        assert scorer._workers[0]._process.pid != before


def test_an_interrupted_call_leaves_no_answer_behind_for_the_next(hostile, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hostile, "_finished", interrupted)
        with pytest.raises(KeyboardInterrupt):
            score(hostile, "1", "2")
    assert score(hostile, "3", "4").components["act"].tolist() == [3.25, 4.25]


def test_each_problem_is_said_once_with_its_traceback(caplog):
    config = RewardConfig((component("act"),), workers=0)
    with caplog.at_level(logging.WARNING), Scorer(config) as scorer:
        score(scorer, "raise", "raise", "nan")
        score(scorer, "raise")
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "reward 'act': raised, so the completion scores 0" in messages[0]
    assert "KeyError: 'oh no'" in messages[0]
    assert "non finite" in messages[1]


def test_results_keep_the_order_of_the_completions(hostile):
    """A47: one score for each completion, in its place, however the workers finish."""
    completions = ["slow", "1", "raise", "2", "slow", "3"]
    scores = score(hostile, *completions)
    assert scores.components["act"].tolist() == [1.0, 1.25, 0.0, 2.25, 1.0, 3.25]


def test_a22_logged_rewards_equal_optimised_rewards(hostile):
    config = RewardConfig(
        (
            RewardComponent("exact_match", "one", weight=2.0, params={"ignore_case": True}),
            RewardComponent("exact_match", "two", weight=0.5),
        ),
        workers=0,
    )
    with Scorer(config) as scorer:
        scores = score(scorer, "A", "a", answers=["a", "a"])
    assert scores.components["one"].tolist() == [1, 1]
    assert scores.components["two"].tolist() == [0, 1]
    assert scores.total.tolist() == [2.0, 2.5]
    assert scores.metrics()["reward"] == scores.total.mean() == 2.25
    assert scores.metrics()["reward/one"] == 1.0 and scores.metrics()["reward/two"] == 0.5


def test_a22_none_from_one_component_is_skipped_and_not_zero(hostile):
    scores = score(hostile, "none", "1")
    assert np.isnan(scores.components["act"][0]) and scores.total.tolist() == [1.0, 3.5]
    assert scores.valid.all() and scores.problems == {"act/skipped": 1}
    assert scores.metrics()["reward/act"] == 1.25  # the mean of the verdicts there are


def test_a23_a_score_of_zero_is_a_score(hostile):
    assert score(hostile, "zero score", "no score").components["act"].tolist() == [0.0, 0.7]


def test_a48_a_sample_without_any_verdict_is_left_out_and_counted(maths):
    scores = score(maths, r"\boxed{1}", r"\boxed{6}", answers=["???", "6"])
    assert scores.valid.tolist() == [False, True] and scores.total.tolist() == [0.0, 1.0]
    metrics = scores.metrics()
    assert metrics["reward"] == 1.0
    assert metrics["reward/no_verdict"] == 1.0 and metrics["reward/math/skipped"] == 1.0


def test_a48_an_unreadable_reference_is_said_once_with_its_row(caplog):
    examples = [
        Example("q", "???", index=7),
        Example("q", "6", index=8),
        Example("q", "$", index=9),
    ]
    with Scorer(RewardConfig((RewardComponent("math"),), workers=0)) as scorer:
        for _ in range(2):
            scores = scorer.score(examples, [r"\boxed{6}"] * 3)
            assert scores.problems == {"math/skipped": 2}
    (record,) = caplog.records
    said = record.getMessage()
    assert "gives no verdict; the first is of row 7 of the data" in said and "'???'" in said


ADVERSARIAL = [
    r"\boxed{9^{9^{9^{9^{9}}}}}",
    r"\boxed{" + "9^{" * 300 + "9" + "}" * 301,
    r"\boxed{" + r"\frac{1}{1+" * 150 + "x" + "}" * 151,
    r"\boxed{" + "1" * 1_000_000 + "}",
    r"\boxed{(10^{10})!}",
    r"\boxed{\binom{10^{12}}{10^{11}}}",
    r"\boxed{\sum_{k=1}^{10^{9}} \frac{1}{k}}",
    r"\boxed{(x+y+z+w)^{4000}}",
    r"\boxed{" * 100_000,
    "{" * 1_000_000,
]


def test_a54_adversarial_answers_end_in_time_and_the_workers_survive(maths):
    start = time.monotonic()
    scores = score(maths, *ADVERSARIAL, r"\boxed{4}", answers=["4"] * (len(ADVERSARIAL) + 1))
    assert time.monotonic() - start < PATIENCE
    assert scores.total.tolist() == [0.0] * len(ADVERSARIAL) + [1.0]


def test_a54_scoring_works_from_a_thread(maths):
    found = []
    thread = threading.Thread(
        target=lambda: found.append(score(maths, r"\boxed{4}", answers=["4"]).total.tolist())
    )
    thread.start()
    thread.join()
    assert found == [[1.0]]


def test_workers_do_not_import_jax_and_cannot_write_on_our_output(hostile, capfd):
    assert score(hostile, "jax", "print").components["act"].tolist() == [0.0, 0.5]
    assert "in the way" not in capfd.readouterr().out


def test_importing_the_reward_rooms_does_not_import_jax():
    code = (
        "import sys, grpo_jax.rewards.scoring, grpo_jax.rewards.text, grpo_jax.rewards.math\n"
        "import grpo_jax.rewards.worker, grpo_jax.rewards.shaping\n"
        "sys.exit('jax' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_cheap_components_start_no_process():
    components = (
        RewardComponent("exact_match"),
        RewardComponent("length", params={"target": 4}),
    )
    with Scorer(RewardConfig(components, workers=2)) as scorer:
        assert not scorer._workers
        scores = scorer.score([Example("q", "a")], ["a"], tokens=[2])
    assert scores.total.tolist() == [1.5]


def test_users_classes_and_import_paths(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    components = (
        RewardComponent("hostile_rewards:Counter", params={"start": 5}),
        RewardComponent("hostile_rewards:needs_task", params={"table": {"a": 3}}),
    )
    with Scorer(RewardConfig(components, workers=1)) as scorer:
        scores = score(scorer, "x", "y", answers=["a", "a"])
    assert scores.components["Counter"].tolist() == [6, 7]
    assert scores.components["needs_task"].tolist() == [3, 3]


def test_closing_ends_the_processes():
    scorer = Scorer(RewardConfig((component("act"),), workers=1))
    process = scorer._workers[0]._process
    scorer.close()
    assert process.poll() is not None


def test_workers_end_when_the_run_does():
    scorer = Scorer(RewardConfig((component("act"),), workers=1))
    scorer.wait_ready()
    worker = scorer._workers[0]
    worker.connection.close()  # as the operating system does for a run that was killed
    assert worker._process.wait(timeout=20) == 0


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "kind, params, message",
    [
        ("no_such_module_x:f", {}, "No module named 'no_such_module_x'"),
        (f"{HOSTILE}:missing", {}, "has no attribute 'missing'"),
        (f"{HOSTILE}:act", {"bonsu": 1}, "unexpected keyword argument 'bonsu'"),
    ],
)
def test_components_that_cannot_be_set_up_are_refused_before_the_run(
    workers, kind, params, message
):
    config = RewardConfig((RewardComponent(kind, params=params),), workers=workers)
    with pytest.raises(ValueError, match=message), Scorer(config) as scorer:
        scorer.wait_ready()


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: RewardComponent("exactmatch"), "'exactmatch' is unknown; use one of verifier"),
        (lambda: RewardComponent(weight=float("nan")), "'verifier' has weight=nan"),
        (lambda: RewardConfig(()), "reward.components is empty"),
        (lambda: RewardConfig((RewardComponent(),) * 2), r"are called \['verifier'\]"),
        (lambda: RewardConfig(workers=-1), "reward.workers = -1, .*: use 0 or more"),
        (lambda: RewardConfig(time_limit=0), "time_limit = 0 and .*use 0 < time_limit"),
        (lambda: RewardConfig(time_limit=30), "= 30 and reward.clock_limit = 20.0: use"),
    ],
)
def test_bad_settings_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_examples_and_completions_must_pair_up(hostile):
    with pytest.raises(ValueError, match="1 examples for 2 completions; repeat each"):
        hostile.score([Example("q")], ["a", "b"])


def test_an_empty_batch_has_empty_scores(hostile):
    scores = hostile.score([], [])
    assert scores.total.shape == (0,) and np.isnan(scores.metrics()["reward"])
