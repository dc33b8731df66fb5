"""What a run writes down and shows: metrics, samples, the picture, the lines of a step."""

import io
import json

import pytest
from rich.console import Console

from grpo_jax.train import picture, reporting
from grpo_jax.train.reporting import ReportConfig, Reporter

METRICS = {
    "reward/mean": 0.5,
    "reward/std": 0.1,
    "length/mean": 9.0,
    "stop/fraction": 1.0,
    "loss": -0.25,
    "grad_norm": 1.5,
    "learning_rate": 1e-5,
    "tokens_per_second": 100.0,
    "gen_kl_error": 1e-4,
    "seconds/rollout": 1.0,
    "seconds/update": 2.0,
    "seconds/step": 3.0,
}
ROW = {
    "prompt": "1 + 1 =",
    "completion": "2",
    "reward": 1.0,
    "advantage": 0.5,
    "components": {"verifier": 1.0},
    "completion_length": 2,
    "stop_reason": "stop",
    "dropped": "overlong",
}


@pytest.fixture
def console():
    """A console that writes into a string."""
    return Console(file=io.StringIO(), width=120, highlight=False)


def test_steps_are_recorded_and_shown(tmp_path, console):
    reporter = Reporter(tmp_path, ReportConfig(), total_steps=3, console=console)
    reporter.header()
    reporter.step(1, METRICS)
    reporter.evaluation(1, {"eval/mean_reward": 0.75, "eval/length/mean": 4.0}, 61)
    reporter.close()
    rows = reporting.read_metrics(tmp_path)
    assert rows[0]["loss"] == -0.25 and rows[1]["eval/mean_reward"] == 0.75
    shown = console.file.getvalue()
    assert "6s" in shown  # two steps of three seconds are left
    assert "mean reward 0.750" in shown and "(1m01s)" in shown
    assert (tmp_path / "run.png").stat().st_size > 10_000


def test_resuming_drops_later_rows_and_a_torn_line(tmp_path, console):
    lines = [json.dumps({"step": s, "loss": s}) for s in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "lo')
    Reporter(tmp_path, ReportConfig(), 5, start_step=2, console=console).step(3, {"loss": 9.0})
    assert [(r["step"], r["loss"]) for r in reporting.read_metrics(tmp_path)] == [
        (1, 1),
        (2, 2),
        (3, 9.0),
    ]


def test_a_process_that_does_not_write_leaves_nothing(tmp_path):
    reporter = Reporter(tmp_path / "none", ReportConfig(), 1, enabled=False)
    reporter.step(1, METRICS)
    reporter.samples(1, [ROW]) if reporter.wants_samples(1) else None
    reporter.close()
    assert not (tmp_path / "none").exists()


def test_samples_are_complete_as_data_and_readable_as_a_page(tmp_path, console):
    reporter = Reporter(
        tmp_path, ReportConfig(samples_shown=2, samples_every=2), 4, console=console
    )
    assert not reporter.wants_samples(1) and reporter.wants_samples(2)
    reporter.samples(2, [ROW | {"completion": str(i)} for i in range(4)])
    rows = (tmp_path / "samples" / "step_000002.jsonl").read_text().splitlines()
    assert [json.loads(r)["completion"] for r in rows] == ["0", "1", "2", "3"]
    page = (tmp_path / "samples" / "step_000002.txt").read_text()
    assert "[completion]\n0\n" in page and "[completion]\n2\n" in page  # from several prompts
    assert "DROPPED: overlong" in page and "ended by stop" in page


def test_tensorboard_events_are_written(tmp_path, console):
    pytest.importorskip("tensorboardX")
    reporter = Reporter(tmp_path, ReportConfig(tensorboard=True), 1, console=console)
    reporter.step(1, METRICS)
    reporter.close()
    assert any((tmp_path / "tensorboard").iterdir())


def test_the_picture_needs_no_particular_column(tmp_path):
    picture.draw([{"step": 1}, {"step": 2, "reward/mean": 1.0}], tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (75, "1m15s"), (3700, "1h01m"), (float("nan"), "-")]
)
def test_durations(seconds, text):
    assert reporting.duration(seconds) == text


def test_negative_numbers_are_refused():
    with pytest.raises(ValueError, match="samples_every = -1 is negative; use 0"):
        ReportConfig(samples_every=-1)
