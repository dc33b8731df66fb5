"""A run as one picture: rewards, lengths, gradients, and where the time went."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed, nor wanted

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

BLUE, ORANGE, GREY, GREEN = "#2a6f97", "#e07a1f", "#8a8f98", "#3a8f5c"
PHASES = (("rollout", BLUE), ("reward", GREEN), ("score", GREY), ("update", ORANGE))


def draw(history: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the curves of `history` (rows of `metrics.jsonl`) to a PNG file."""
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(2, 2, figsize=(10, 6), layout="constrained")
        _rewards(axes[0, 0], history)
        _lengths(axes[0, 1], history)
        _gradients(axes[1, 0], history)
        _seconds(axes[1, 1], history)
        for ax in axes.flat:
            ax.grid(alpha=0.25, linewidth=0.6)
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        temporary = path.with_suffix(".tmp.png")
        figure.savefig(temporary, dpi=110)
        plt.close(figure)
    temporary.replace(path)


def _column(history: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    rows = [(row["step"], row[name]) for row in history if row.get(name) is not None]
    return [r[0] for r in rows], [r[1] for r in rows]


def _smooth(values: Sequence[float], window: int = 5) -> list[float]:
    """Mean over the last `window` values; the first ones have fewer to average."""
    return [
        sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))
    ]


def _rewards(ax: Axes, history: Sequence[Mapping[str, Any]]) -> None:
    steps, values = _column(history, "reward/mean")
    ax.plot(steps, values, color=BLUE, alpha=0.3, linewidth=1)
    ax.plot(steps, _smooth(values), color=BLUE, linewidth=1.8, label="training, mean of 5 steps")
    steps, values = _column(history, "eval/mean_reward")
    if steps:
        ax.plot(steps, values, "o-", color=ORANGE, markersize=5, label="held-out prompts")
        for step, value in {(steps[0], values[0]), (steps[-1], values[-1])}:
            ax.annotate(
                f"{value:.2f}", (step, value), (0, 7), textcoords="offset points", ha="center"
            )
    ax.set(title="reward", xlabel="step")
    ax.margins(y=0.15)
    if ax.get_legend_handles_labels()[1]:
        ax.legend(frameon=False, loc="lower right")


def _lengths(ax: Axes, history: Sequence[Mapping[str, Any]]) -> None:
    steps, values = _column(history, "length/mean")
    ax.plot(steps, values, color=BLUE, linewidth=1.6)
    ax.set(title="tokens a completion", xlabel="step")
    ax.set_ylim(bottom=0)


def _gradients(ax: Axes, history: Sequence[Mapping[str, Any]]) -> None:
    steps, values = _column(history, "grad_norm")
    ax.plot(steps, values, color=BLUE, linewidth=1.4, label="gradient norm")
    ax.set(title="gradient norm and log-prob mismatch", xlabel="step")
    ax.set_ylim(bottom=0)
    steps, values = _column(history, "gen_kl_error")
    if steps:
        twin = ax.twinx()
        twin.plot(steps, values, color=ORANGE, linewidth=1, label="sampler/trainer KL (right)")
        twin.spines["right"].set_visible(True)
        twin.set_ylim(bottom=0)
        lines = ax.get_lines() + twin.get_lines()
        ax.legend(lines, [str(line.get_label()) for line in lines], frameon=False, fontsize=8)


def _seconds(ax: Axes, history: Sequence[Mapping[str, Any]]) -> None:
    bottom: dict[float, float] = {}
    for name, color in PHASES:
        steps, values = _column(history, f"seconds/{name}")
        if not steps:
            continue
        ax.bar(steps, values, 0.9, [bottom.get(s, 0.0) for s in steps], color=color, label=name)
        bottom.update({s: bottom.get(s, 0.0) + v for s, v in zip(steps, values, strict=True)})
    ax.set(title="seconds a step", xlabel="step")
    if bottom:
        ax.legend(frameon=False, fontsize=8)
