"""`grpo-jax parity FILE.npz`: recompute a dumped step twice and say where the numbers part.

float64 is the truth, float32 shows what single precision does to this very step, and `theirs` (if
the file has it) is what another trainer made of the same inputs. The schema is in `train/dump.py`.
"""

import dataclasses
import functools
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table

from grpo_jax.core import diagnostics, losses
from grpo_jax.core.batch import Batch, Counts, TokenScores
from grpo_jax.core.loss_config import LossConfig
from grpo_jax.train import causes, dump

Array = np.ndarray
TOLERANCE = {"f32": 1e-4, "theirs": 1e-4}  # relative; a float32 sum over a batch is good to 1e-5


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The loss of one step in one precision."""

    loss: float
    grad: Array  # f64[B, T] with respect to the (filtered) log-probabilities
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Difference:
    """One number in three columns."""

    name: str
    f64: float
    f32: float
    theirs: float | None


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that the printed page says."""

    totals: tuple[Difference, ...]
    tokens: tuple[dict[str, Any], ...]  # worst first
    causes: tuple[str, ...]
    notes: tuple[str, ...]
    agrees: bool  # float32 with float64, and theirs with float64, within TOLERANCE


def evaluate(step: dump.Dump, dtype: str) -> Evaluation:
    """Recompute loss, gradient and metrics in `dtype` ("float32" or "float64")."""

    def cast(x: Any) -> jax.Array:
        array = np.asarray(x)
        return jnp.asarray(array.astype(dtype) if array.dtype.kind == "f" else array)

    with jax.enable_x64(dtype == "float64"):
        arguments = jax.tree.map(cast, (step.scores, step.batch, step.counts))
        loss, grad, metrics = _recompute(
            *arguments, step.config, step.filtering_on, step.max_segments
        )
        return Evaluation(
            loss=float(loss),
            grad=np.asarray(grad, np.float64),
            metrics={k: float(v) for k, v in metrics.items()},
        )


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _recompute(
    scores: TokenScores,
    batch: Batch,
    counts: Counts,
    config: LossConfig,
    filtering_on: bool,
    max_segments: int,
):
    """Loss, d loss / d log-probabilities and finished metrics, as arrays."""
    options: dict[str, Any] = dict(filtering_on=filtering_on, max_segments=max_segments)
    if config.truncated_is_normalization == "survivors" and counts.survivors is None:
        left = losses.survivor_counts(scores, batch, config, **options)
        counts = counts._replace(survivors=left)

    def loss(logprobs):
        replaced = scores._replace(logprobs=logprobs)
        return losses.clipped_pg_loss(replaced, batch, counts, config, **options)

    (value, raw), grad = jax.value_and_grad(loss, has_aux=True)(scores.logprobs)
    return value, grad, diagnostics.finalize_metrics(raw, counts, config, rescale=False)


def compare(step: dump.Dump, worst: int = 20) -> Report:
    """Recompute, line the three columns up, rank the tokens and name likely causes."""
    true, single = evaluate(step, "float64"), evaluate(step, "float32")
    totals = [Difference("loss", true.loss, single.loss, step.theirs.loss)]
    for name in true.metrics:
        if name != "loss":
            theirs = step.theirs.metrics.get(name)
            totals.append(Difference(name, true.metrics[name], single.metrics[name], theirs))
    gaps, norms = {"f32": _gap(single.grad, true.grad)}, [_norm(true.grad), _norm(single.grad)]
    theirs = None
    if step.theirs.grad is not None:
        gaps["theirs"], theirs = _gap(step.theirs.grad, true.grad), _norm(step.theirs.grad)
    totals.insert(1, Difference("gradient norm", norms[0], norms[1], theirs))
    agrees = all(
        _close(t.f64, t.f32, TOLERANCE["f32"])
        and (t.theirs is None or _close(t.f64, t.theirs, TOLERANCE["theirs"]))
        for t in totals
    ) and all((gap <= TOLERANCE[name]).all() for name, gap in gaps.items())
    return Report(
        totals=tuple(totals),
        tokens=_worst_tokens(step, true, single, gaps, worst),
        causes=likely_causes(step, true),
        notes=step.notes,
        agrees=agrees,
    )


def _norm(grad: Array) -> float:
    return float(np.linalg.norm(grad))


def _gap(grad: Array, true: Array) -> Array:
    """|grad - true| in units of the largest true gradient; inf where either is not finite."""
    fine = np.isfinite(grad) & np.isfinite(true)
    scale = max(float(np.abs(np.where(fine, true, 0)).max(initial=0)), 1e-30)
    return np.where(fine, np.abs(np.where(fine, grad - true, 0)) / scale, np.inf)


def _close(a: float, b: float, tolerance: float) -> bool:
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)  # the gradient says which token it was
    return a == b or abs(a - b) <= tolerance * max(abs(a), abs(b), 1e-2)


def _worst_tokens(step, true, single, gaps, worst) -> tuple[dict[str, Any], ...]:
    """The tokens whose gradient is furthest off (by somebody else, or in float32), worst first."""
    gap = gaps.get("theirs", gaps["f32"])
    order = np.argsort(-gap, axis=None, kind="stable")[:worst]
    rows, columns = np.unravel_index(order, gap.shape)
    batch, scores = step.batch, step.scores
    get = lambda x, at: None if x is None else float(np.asarray(x)[at])  # noqa: E731
    return tuple(
        dict(
            row=int(r),
            column=int(t),
            token=int(np.asarray(batch.tokens)[r, t]),
            trained=bool(_valid(step)[r, t]),
            logprob=get(scores.logprobs, (r, t)),
            prev=get(batch.prev_logprobs, (r, t)),
            generation=get(batch.generation_logprobs, (r, t)),
            theirs_logprob=get(step.theirs.logprobs, (r, t)),
            advantage=get(batch.advantages, (r, t)),
            grad=get(true.grad, (r, t)),
            grad_f32=get(single.grad, (r, t)),
            grad_theirs=get(step.theirs.grad, (r, t)),
            gap=float(gap[r, t]),
        )
        for r, t in zip(rows, columns, strict=True)
        if gap[r, t] > 0
    )


def _valid(step: dump.Dump) -> Array:
    batch = step.batch
    return np.asarray(batch.token_mask) & (np.asarray(batch.sample_weights) != 0)


def likely_causes(step: dump.Dump, true: Evaluation) -> tuple[str, ...]:
    """Run every detector of `train/causes.py`; the first finding about a pair explains the pair."""
    batch, valid = step.batch, _valid(step)
    generation = np.asarray(batch.generation_logprobs)
    prev = None if batch.prev_logprobs is None else np.asarray(batch.prev_logprobs)
    current = np.asarray(step.scores.logprobs)
    pairs = [("current", current, "generation", generation)]
    if prev is not None:
        pairs = [("prev", prev, "generation", generation), ("prev", prev, "current", current)]
    if step.theirs.logprobs is not None:
        pairs.append(("current", current, "theirs", step.theirs.logprobs))
    found = []
    for name_x, x, name_y, y in pairs:
        for detect in (causes.shift, causes.temperature, causes.support):
            said = detect(x, y, valid, (name_x, name_y))
            if said:
                found.append(said)
                break
    theirs = step.theirs
    found.append(causes.mask(true.grad, theirs.grad, valid, generation, prev))
    losses_pair = None if theirs.loss is None else (true.loss, theirs.loss)
    found.append(causes.denominator(true.grad, theirs.grad, losses_pair, _known_counts(step)))
    return tuple(dict.fromkeys(x for x in found if x))


def _known_counts(step: dump.Dump) -> dict[str, float]:
    """Every count that somebody might have divided by; the one used here comes first."""
    batch, counts = step.batch, step.counts
    rows, width = np.asarray(batch.token_mask).shape
    weights = np.asarray(batch.sample_weights, np.float64)
    tokens = {"global tokens": float(counts.tokens)}
    sequences = {"global sequences": float(counts.sequences)}
    first = {**tokens, **sequences} if step.config.token_level_loss else {**sequences, **tokens}
    return {
        **first,
        "trained tokens of this file": float((np.asarray(batch.token_mask) * weights).sum()),
        "rows": float(rows),
        "rows x columns": float(rows * width),
        "rows x (columns - 1)": float(rows * (width - 1)),
        "1 (no division)": 1.0,
    }


def print_report(report: Report, console: rich.console.Console) -> None:
    """Print the three tables: totals, worst tokens, causes."""
    table = rich.table.Table(title="totals", title_justify="left")
    table.add_column("name")
    for column in ("float64", "float32", "off", "theirs", "off"):
        table.add_column(column, justify="right")
    for t in report.totals:
        style = "" if _close(t.f64, t.f32, 1e-4) else "yellow"
        if t.theirs is not None and not _close(t.f64, t.theirs, TOLERANCE["theirs"]):
            style = "bold red"
        table.add_row(
            t.name,
            *map(_number, (t.f64, t.f32, _off(t.f32, t.f64), t.theirs, _off(t.theirs, t.f64))),
            style=style,
        )
    console.print(table)
    if report.tokens:
        console.print(_token_table(report.tokens))
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    for cause in report.causes:
        console.print(f"likely cause: {cause}", markup=False, style="bold")
    if not report.causes:
        console.print("likely cause: none of temperature, support, shift, mask, denominator")
    console.print("agrees" if report.agrees else "DIFFERS")


def _token_table(tokens: tuple[dict[str, Any], ...]) -> rich.table.Table:
    names = [name for name in tokens[0] if any(t[name] is not None for t in tokens)]
    table = rich.table.Table(
        title="worst tokens (gap in units of the largest gradient)", title_justify="left"
    )
    for name in names:
        table.add_column(name, justify="right")
    for token in tokens:
        table.add_row(*(_number(token[name]) for name in names))
    return table


def _off(a: float | None, b: float) -> float | None:
    return None if a is None else a - b


def _number(x: Any) -> str:
    if x is None:
        return "-"
    return f"{x:.6g}" if isinstance(x, float) else str(x)


def main_parity(path: str | os.PathLike, worst: int = 20, console: Any = None) -> int:
    """Print the comparison for one file.

    Returns:
      0 when float32 and theirs (if present) agree with float64, else 1.
    """
    report = compare(dump.load_dump(path), worst)
    print_report(report, console or rich.console.Console())
    return 0 if report.agrees else 1
