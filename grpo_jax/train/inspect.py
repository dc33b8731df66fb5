"""See what was trained: the completions of one step, token by token, on a terminal or as a page.

Reads the run folder's `samples/step_XXXXXX.jsonl` (one JSON object a completion) and
`metrics.jsonl`. Tokens are coloured by one of three questions:

    mismatch    |sampler − trainer| in nats: do both see the same model?
    surprise    −log p of the sampler in nats: where did it choose?
    advantage   was the token pushed up or down?

Rows that a filter removed are shown with their reason.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from grpo_jax.train import reporting

Question = Literal["mismatch", "surprise", "advantage"]

# Upper bounds of the shades 0, 1, 2, 3 in nats; above the last stands shade 4. For a surprise they
# are the probabilities 0.9, 0.5, 0.1 and 0.01.
BOUNDS = {
    "mismatch": (0.01, 0.05, 0.2, 1.0),
    "surprise": (0.105, 0.69, 2.3, 4.6),
    "advantage": (0.01, 0.25, 0.75, 1.5),
}
BROKEN = 5  # the shade of a value that is not finite
_ORANGE = ("", "on #3d2f1f", "on #6b4a20", "on #a5661c", "black on #f0932b", "white on #c0392b")
_GREEN = ("", "on #1d3a27", "on #23562f", "on #2b7a3f", "black on #43c463", "white on #c0392b")
_RED = ("", "on #3f2222", "on #662a2a", "on #963232", "black on #ef6a6a", "white on #c0392b")


@dataclasses.dataclass(frozen=True)
class InspectOptions:
    """What to look at."""

    step: int | None = None
    """Step to show; the newest one with samples by default."""
    group: int | None = None
    """Show one prompt's completions only."""
    rows: int = 8
    """Completions shown on the terminal; 0 shows all."""
    dropped: bool = False
    """Show only completions that a filter removed."""
    color: Question | None = None
    """What the colour of a token says: mismatch, surprise or advantage. By default the mismatch
    where the trainer was asked for its log-probabilities, else the surprise."""
    html: str | None = None
    """Write a self-contained page with the curves to this file, instead of the terminal view."""

    def __post_init__(self):
        if self.color is not None and self.color not in get_args(Question):
            raise ValueError(f"color={self.color!r}; use one of {', '.join(get_args(Question))}")
        if self.rows < 0:
            raise ValueError(f"rows={self.rows} is negative; use 0 for all")


class Token(NamedTuple):
    """One token and what is known of it."""

    text: str
    id: int
    trained: bool
    generation_logprob: float
    prev_logprob: float | None
    advantage: float

    @property
    def mismatch(self) -> float | None:
        """|sampler − trainer| in nats; None where the trainer was not asked."""
        if self.prev_logprob is None:
            return None
        if self.prev_logprob == self.generation_logprob:  # both -inf: they agree
            return 0.0
        return abs(self.prev_logprob - self.generation_logprob)

    def value(self, question: Question) -> float | None:
        """The number behind the colour."""
        if question == "mismatch":
            return self.mismatch
        return -self.generation_logprob if question == "surprise" else self.advantage

    def shade(self, question: Question) -> int:
        """0 (nothing to see) to 4, or `BROKEN`."""
        value = self.value(question)
        if value is None or not self.trained:
            return 0
        if not math.isfinite(value):
            return BROKEN
        return sum(abs(value) > bound for bound in BOUNDS[question])


class Step(NamedTuple):
    """The completions of one step."""

    step: int
    rows: list[dict[str, Any]]
    metrics: dict[str, Any]  # the step's line of `metrics.jsonl`; empty if there is none


def steps_with_samples(folder: Path) -> list[int]:
    """Steps whose completions were written, ascending.

    Raises:
      ValueError: the folder is no run, or holds no samples.
    """
    samples = Path(folder) / "samples"
    found = sorted(int(path.stem.removeprefix("step_")) for path in samples.glob("step_*.jsonl"))
    if not found:
        raise ValueError(
            f"{str(folder)!r} holds no samples (samples/step_*.jsonl); give the folder of a run "
            "with report.samples_every above 0"
        )
    return found


def read_step(folder: Path, step: int | None = None) -> Step:
    """Read the completions of one step, the newest by default.

    Raises:
      ValueError: nothing was written for that step.
    """
    found = steps_with_samples(folder)
    step = found[-1] if step is None else step
    if step not in found:
        near = min(found, key=lambda other: abs(other - step))
        raise ValueError(
            f"step {step} has no samples in {str(folder)!r}; there are {len(found)}, from "
            f"{found[0]} to {found[-1]}, the nearest is {near}"
        )
    path = Path(folder) / "samples" / f"step_{step:06d}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    metrics: dict[str, Any] = {}
    for row in reporting.read_metrics(Path(folder)):
        if row.get("step") == step:
            metrics |= row
    return Step(step, rows, metrics)


def tokens_of(row: Mapping[str, Any]) -> list[Token]:
    """The tokens of one completion; fields that were not written are filled in."""
    count = len(row["tokens"])
    previous = row.get("prev_logprobs") or [None] * count
    trained = row.get("token_mask") or [True] * count
    advantages = row.get("advantages") or [row["advantage"]] * count
    columns = (row["token_texts"], row["tokens"], trained, row["generation_logprobs"], previous)
    return [Token(*values) for values in zip(*columns, advantages, strict=True)]


def select(rows: Sequence[dict[str, Any]], options: InspectOptions) -> list[dict[str, Any]]:
    """Rows that were asked for, those of one prompt next to each other.

    Raises:
      ValueError: there is no such group.
    """
    groups = sorted({row["group"] for row in rows})
    if options.group is not None and options.group not in groups:
        raise ValueError(f"group {options.group} is not in this step; there are {groups}")
    chosen = [
        row
        for row in rows
        if (options.group is None or row["group"] == options.group)
        and (not options.dropped or row.get("dropped"))
    ]
    return sorted(chosen, key=lambda row: row["group"])


def dropped_counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Rows removed, by reason."""
    return dict(Counter(row["dropped"] for row in rows if row.get("dropped")).most_common())


def facts(row: Mapping[str, Any]) -> list[str]:
    """What decided the training of one completion, in words."""
    parts = [f"reward {row['reward']:.3f}"]
    parts += [f"{name} {value:.3f}" for name, value in (row.get("components") or {}).items()]
    shaped = row.get("shaped_reward", row["reward"])
    if shaped != row["reward"]:
        parts.append(f"shaped {shaped:.3f}")
    parts.append(f"advantage {row['advantage']:+.3f}")
    for span in row.get("overrides") or ():
        parts.append(
            f"{span['name']} sets tokens {span['start']}–{span['end'] - 1} to "
            f"{span['advantage']:+.3f}"
        )
    parts.append(f"{row['completion_length']} tokens, ended by {row['stop_reason']}")
    worst = worst_mismatch(row)
    if worst is not None:
        parts.append(f"largest mismatch {worst:.3f} nats")
    return parts


def worst_mismatch(row: Mapping[str, Any]) -> float | None:
    """The largest |sampler − trainer| of a completion; None where the trainer was not asked."""
    values = [t.mismatch for t in tokens_of(row) if t.trained and t.mismatch is not None]
    if not values:
        return None
    return math.nan if any(math.isnan(v) for v in values) else max(values)


def question_for(rows: Sequence[Mapping[str, Any]], asked: Question | None) -> Question:
    """The question that was asked, or the most telling one that these rows can answer."""
    if asked is not None:
        return asked
    return "mismatch" if any(row.get("prev_logprobs") for row in rows) else "surprise"


def inspect_run(
    folder: str | Path, options: InspectOptions, console: Console | None = None
) -> Path | None:
    """Show one step of a run, or write it as a page.

    Returns:
      The page, if one was asked for.
    """
    from grpo_jax.train import page

    folder, console = Path(folder), console or Console(highlight=False)
    step = read_step(folder, options.step)
    rows = select(step.rows, options)
    if options.html is not None:
        history = reporting.read_metrics(folder)
        step, question = step._replace(rows=rows), question_for(rows, options.color)
        path = page.write(Path(options.html), folder.name, step, history, question)
        console.print(Text(f"step {step.step} with {len(rows)} completions is in {path}"))
        return path
    _show(console, step, rows, options)
    return None


def _show(
    console: Console, step: Step, rows: Sequence[dict[str, Any]], options: InspectOptions
) -> None:
    """The terminal view."""
    question = question_for(rows, options.color)
    _summary(console, step, question)
    shown = rows[: options.rows] if options.rows else rows
    group = None
    for row in shown:
        if row["group"] != group:
            group = row["group"]
            console.print(Rule(f"prompt {group}", style="blue"))
            console.print(Text(str(row["prompt"]).strip(), style="dim"))
            if row.get("answer") not in (None, ""):
                console.print(Text(f"answer: {row['answer']}", style="bold"))
        _completion(console, row, question)
    if len(shown) < len(rows):
        console.print(
            f"[dim]{len(rows) - len(shown)} more completions: --rows 0 shows all, --group one "
            "prompt's, --html writes a page[/dim]"
        )


def _summary(console: Console, step: Step, question: Question) -> None:
    reasons = dropped_counts(step.rows)
    trained = len(step.rows) - sum(reasons.values())
    table = Table.grid(padding=(0, 2))
    table.add_row("step", str(step.step))
    table.add_row("completions", f"{len(step.rows)}, {trained} of them trained")
    for reason, count in reasons.items():
        table.add_row("dropped", f"{count} by {reason}")
    console.print(table)
    console.print(_legend(question))


def _legend(question: Question) -> Text:
    """The shades, with the bounds between them."""
    bounds = BOUNDS[question]
    text = Text(f"{question}, nats: " if question != "advantage" else "advantage: ")
    labels = [f"≤ {bounds[0]:g}", *(f"≤ {b:g}" for b in bounds[1:]), f"> {bounds[-1]:g}"]
    for shade, label in enumerate([*labels, "not finite"]):
        text.append(
            f" {label} ", style=_ORANGE[shade] if question != "advantage" else _GREEN[shade]
        )
        text.append(" ")
    return text


def _completion(console: Console, row: Mapping[str, Any], question: Question) -> None:
    style = "green" if row["advantage"] > 0 else "red" if row["advantage"] < 0 else "yellow"
    heading = Text("● ", style=style)
    heading.append(" · ".join(facts(row)), style="bold")
    if row.get("dropped"):
        heading.append(f"  DROPPED: {row['dropped']}", style="bold white on red")
    console.print(heading)
    text = Text()
    for token in tokens_of(row):
        text.append(token.text, style=_style(token, question))
    console.print(text)


def _style(token: Token, question: Question) -> str:
    if not token.trained:
        return "dim strike"
    palette = _ORANGE
    if question == "advantage":
        palette = _GREEN if token.advantage > 0 else _RED
    return palette[token.shade(question)]
