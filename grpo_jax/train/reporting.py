"""What a person sees of a run, and what it leaves behind.

A run folder holds `config.yaml`, `metrics.jsonl` (one JSON object a step), `samples/` (every
completion as JSONL, and a page to read), `tensorboard/`, `run.png`, `checkpoints/` and `export/`.
"""

import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

COLUMNS = (  # (metric, heading, width, format)
    ("reward/mean", "reward", 7, "{:.3f}"),
    ("reward/std", "±", 6, "{:.3f}"),
    ("length/mean", "length", 7, "{:.1f}"),
    ("stop/fraction", "ended", 6, "{:.0%}"),
    ("loss", "loss", 9, "{:+.4f}"),
    ("grad_norm", "grad", 7, "{:.3f}"),
    ("learning_rate", "lr", 8, "{:.1e}"),
    ("tokens_per_second", "tok/s", 6, "{:.0f}"),
    ("seconds/step", "time", 7, "{:.1f}s"),
)


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """How a run is shown and recorded."""

    progress: bool = True  # a progress bar on a terminal; one line a step either way
    samples_every: int = 1  # steps between sample files; 0 writes none
    samples_shown: int = 4  # completions on the readable page of a step
    picture_every: int = 10  # steps between drawings of run.png; it is always drawn at the end
    tensorboard: bool = False  # write TensorBoard events; needs the `tensorboard` extra

    def __post_init__(self):
        for name in ("samples_every", "samples_shown", "picture_every"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name} = {getattr(self, name)} is negative; use 0 to switch it off"
                )


def make_console(quiet: bool = False) -> Console:
    """A console whose lines are not folded when they go to a file or a pipe."""
    console = Console(quiet=quiet, highlight=False)
    return console if console.is_terminal else Console(quiet=quiet, highlight=False, width=120)


class Reporter:
    """Writes metrics, samples and curves of one run, and shows its progress.

    Only one process of a job holds a reporter that writes; the others are given `enabled=False`.
    """

    def __init__(
        self,
        folder: Path,
        config: ReportConfig,
        total_steps: int,
        *,
        start_step: int = 0,
        console: Console | None = None,
        enabled: bool = True,
    ):
        self.folder, self.config, self.total_steps = Path(folder), config, total_steps
        self.enabled = enabled
        self.console = console or make_console(quiet=not enabled)
        self.history: list[dict[str, Any]] = []
        self._tensorboard = None
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._durations: list[float] = []
        if enabled:
            self._open(start_step)

    def _open(self, start_step: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.history = read_metrics(self.folder, before=start_step)
        write_lines(self.folder / "metrics.jsonl", self.history)
        if self.config.tensorboard:
            self._tensorboard = _open_tensorboard(self.folder / "tensorboard", start_step)
        if self.config.progress and self.console.is_terminal:
            progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=self.console,
            )
            self._task = progress.add_task(
                "training", total=self.total_steps, completed=start_step, left=""
            )
            progress.start()
            self._progress = progress

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self.console.print(text, markup=False)  # brackets in a path or a message are no markup

    def phase(self, text: str) -> None:
        """Show what the run is doing right now (on a terminal only)."""
        if self._progress is not None:
            self._progress.update(self._task, description=text)

    def header(self) -> None:
        """Print the headings of the step lines."""
        cells = [f"{name:>{width}}" for _, name, width, _ in COLUMNS]
        self.console.print(f"[bold]{'step':>5} {' '.join(cells)} {'left':>8}[/bold]")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step; `step` counts finished steps, from 1."""
        row = {"step": step, "time": time.time(), **{k: _number(v) for k, v in metrics.items()}}
        self.history.append(row)
        if not self.enabled:
            return
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        if self._tensorboard is not None:
            for name, value in metrics.items():
                if math.isfinite(value):
                    self._tensorboard.add_scalar(name, value, step)
        if row.get("seconds/step") is not None:
            self._durations.append(row["seconds/step"])
            self._line(step, row)
        if self.config.picture_every and step % self.config.picture_every == 0:
            self.picture()

    def _line(self, step: int, row: Mapping[str, Any]) -> None:
        left = duration(self._seconds_left(step))
        cells = []
        for name, _, width, form in COLUMNS:
            value = row.get(name)
            text = "-" if value is None else form.format(value)
            cells.append(f"{text:>{width}}")
        self.console.print(f"{step:>5} {' '.join(cells)} {left:>8}")
        if self._progress is not None:
            self._progress.update(
                self._task, completed=step, left=f"{left} left", description="training"
            )

    def _seconds_left(self, step: int) -> float:
        recent = sorted(self._durations[-10:])
        return recent[len(recent) // 2] * (self.total_steps - step) if recent else math.nan

    def wants_samples(self, step: int) -> bool:
        """Say whether the completions of this step are to be written."""
        every = self.config.samples_every
        return self.enabled and every > 0 and step % every == 0

    def evaluation(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        """Record one evaluation and print its mean reward."""
        self.step(step, metrics)
        interval = ""
        if "eval/mean_reward/low" in metrics:
            low, high = metrics["eval/mean_reward/low"], metrics["eval/mean_reward/high"]
            interval = rf" \[{low:.3f}, {high:.3f}]"  # the backslash: a bracket, not markup
        self.console.print(
            f"[bold]held-out prompts after step {step}:[/bold] mean reward "
            f"{metrics['eval/mean_reward']:.3f}{interval}, length "
            f"{metrics['eval/length/mean']:.1f} tokens ({duration(seconds)})"
        )

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write every completion of a step as JSONL, and a few of them as a page to read."""
        folder = self.folder / "samples"
        folder.mkdir(exist_ok=True)
        write_lines(folder / f"step_{step:06d}.jsonl", rows)
        apart = max(1, len(rows) // max(self.config.samples_shown, 1))  # from several prompts
        page = [sample_page(row) for row in rows[::apart][: self.config.samples_shown]]
        (folder / f"step_{step:06d}.txt").write_text(f"step {step}\n\n" + "\n".join(page))

    def picture(self) -> None:
        """Draw `run.png` from everything recorded so far."""
        from grpo_jax.train import picture  # matplotlib is slow to import

        if self.enabled and self.history:
            picture.draw(self.history, self.folder / "run.png")

    def close(self) -> None:
        """Draw the final picture and let go of files and terminal."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self.picture()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None


def read_metrics(folder: Path, before: int | None = None) -> list[dict[str, Any]]:
    """Rows of `metrics.jsonl`, up to and including step `before`; a torn last line is dropped."""
    path = Path(folder) / "metrics.jsonl"
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # the process died while it wrote this line
            continue
        if before is None or row["step"] <= before:
            rows.append(row)
    return rows


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace `path` by one JSON object a line, never leaving half a file."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    temporary.replace(path)


def sample_page(row: Mapping[str, Any]) -> str:
    """One completion, for a reader."""
    parts = [f"reward {row['reward']:.3f}", f"advantage {row['advantage']:+.3f}"]
    parts += [f"{name} {value:.3f}" for name, value in row.get("components", {}).items()]
    parts += [f"{row['completion_length']} tokens", f"ended by {row['stop_reason']}"]
    if row.get("dropped"):
        parts.append(f"DROPPED: {row['dropped']}")
    return (
        f"--- {' · '.join(parts)}\n[prompt]\n{row['prompt']}\n[completion]\n{row['completion']}\n"
    )


def duration(seconds: float) -> str:
    """`75` -> `1m15s`."""
    if not math.isfinite(seconds):
        return "-"
    seconds = round(seconds)
    hours, minutes, rest = seconds // 3600, seconds // 60 % 60, seconds % 60
    return (
        f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
    )


def _number(value: Any) -> float | int | None:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None  # JSON has no NaN and no infinity


def _open_tensorboard(folder: Path, start_step: int):
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "report.tensorboard = true needs an extra: pip install 'grpo-jax[tensorboard]'"
        ) from error
    return SummaryWriter(str(folder), purge_step=start_step + 1)
