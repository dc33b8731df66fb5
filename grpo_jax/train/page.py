"""One step of a run as a single HTML file: curves, completions, tokens in colour.

The page loads nothing from anywhere: style, curves (SVG) and the few lines of script are inside.
All text of the run is escaped; a completion cannot put markup into the page.
"""

import html
import math
import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from grpo_jax.train import inspect

CURVES = (  # (title, ((metric, label), ...))
    ("reward", (("reward/mean", "training"), ("eval/mean_reward", "held-out prompts"))),
    ("tokens a completion", (("length/mean", "mean"), ("length/max", "longest"))),
    ("gradient norm", (("grad_norm", "before clipping"),)),
    ("loss", (("loss", "loss"),)),
    ("sampler and trainer", (("gen_kl_error", "KL, nats"),)),
    ("seconds a step", (("seconds/step", "whole step"), ("seconds/rollout", "sampling"))),
)
_COLORS = ("#2a6f97", "#e07a1f")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 340, 150, 52, 22, 8


def write(
    path: Path,
    name: str,
    step: inspect.Step,
    history: Sequence[Mapping[str, Any]],
    question: inspect.Question = "mismatch",
) -> Path:
    """Write the page; it appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(render(name, step, history, question), encoding="utf-8")
    os.replace(temporary, path)
    return path


def render(
    name: str,
    step: inspect.Step,
    history: Sequence[Mapping[str, Any]],
    question: inspect.Question = "mismatch",
) -> str:
    """The page as text; `question` decides the colours it opens with."""
    title = html.escape(f"{name}, step {step.step}")
    groups = groupby(step.rows, key=lambda row: row["group"])
    body = [
        f"<h1>{title}</h1>",
        _summary(step),
        '<section class="curves">',
        *(curve(heading, series, history) for heading, series in CURVES),
        "</section>",
        _controls(question),
        *(_group(number, list(rows)) for number, rows in groups),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title>\n<style>{_STYLE}{_shades()}</style></head>\n"
        f'<body class="{question}">\n'
        + "\n".join(body)
        + f"\n<script>{_SCRIPT}</script>\n</body></html>\n"
    )


def _summary(step: inspect.Step) -> str:
    reasons = inspect.dropped_counts(step.rows)
    total, removed = len(step.rows), sum(reasons.values())
    cells = [("completions", f"{total}"), ("trained", f"{total - removed}")]
    cells += [(f"dropped: {reason}", f"{count}") for reason, count in reasons.items()]
    if total:
        cells.append(("mean reward", f"{sum(r['reward'] for r in step.rows) / total:.3f}"))
    items = "".join(
        f"<div><b>{html.escape(value)}</b><span>{html.escape(label)}</span></div>"
        for label, value in cells
    )
    return f'<section class="cards">{items}</section>'


def curve(
    title: str, series: Sequence[tuple[str, str]], history: Sequence[Mapping[str, Any]]
) -> str:
    """One chart as inline SVG; empty text where nothing was recorded."""
    lines = [(label, points(name, history)) for name, label in series]
    lines = [(label, xy) for label, xy in lines if xy]
    if not lines:
        return ""
    xs = [x for _, xy in lines for x, _ in xy]
    ys = [y for _, xy in lines for _, y in xy]
    x_range, y_range = _range(xs), _range(ys, pad=0.08)
    parts = [_axes(x_range, y_range)]
    for color, (label, xy) in zip(_COLORS, lines, strict=False):
        at = [(_at_x(x, x_range), _at_y(y, y_range)) for x, y in xy]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts.append(f'<polyline points="{path}" stroke="{color}"/>')
        if len(at) <= 200:
            parts += [
                f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.6" fill="{color}">'
                f"<title>{html.escape(label)}, step {x:g}: {y:.5g}</title></circle>"
                for (px, py), (x, y) in zip(at, xy, strict=True)
            ]
    legend = " ".join(
        f'<span style="color:{color}">■ {html.escape(label)}, last {xy[-1][1]:.4g}</span>'
        for color, (label, xy) in zip(_COLORS, lines, strict=False)
    )
    return (
        f"<figure><figcaption><b>{html.escape(title)}</b> {legend}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}">'
        + "".join(parts)
        + "</svg></figure>"
    )


def points(name: str, history: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """(step, value) of a metric, finite values only."""
    found = [(row["step"], row.get(name)) for row in history]
    return [(float(x), float(y)) for x, y in found if y is not None and math.isfinite(y)]


def _range(values: Sequence[float], pad: float = 0.0) -> tuple[float, float]:
    """Smallest and largest, never equal, with a margin of `pad` of their distance."""
    low, high = min(values), max(values)
    if low == high:
        margin = abs(low) * 0.5 or 0.5
    else:
        margin = (high - low) * pad
    floor = 0.0 if low >= 0 else -math.inf  # what cannot be negative is not drawn below zero
    return max(low - margin, floor), high + margin


def _short(value: float) -> str:
    """A number that fits beside an axis: `0.00029`, `42`, `1234`."""
    return f"{value:.0f}" if 100 <= abs(value) < 1e6 else f"{value:.2g}"


def _at_x(x: float, span: tuple[float, float]) -> float:
    return _LEFT + (x - span[0]) / (span[1] - span[0]) * (_WIDTH - _LEFT - 8)


def _at_y(y: float, span: tuple[float, float]) -> float:
    return _TOP + (span[1] - y) / (span[1] - span[0]) * (_HEIGHT - _TOP - _BOTTOM)


def _axes(x_range: tuple[float, float], y_range: tuple[float, float]) -> str:
    """Grid lines with numbers: three heights, and the first and last step."""
    parts = []
    for share in (0.0, 0.5, 1.0):
        value = y_range[0] + share * (y_range[1] - y_range[0])
        y = _at_y(value, y_range)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{_LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{_short(value)}</text>'
        )
    for value, anchor in ((x_range[0], "start"), (x_range[1], "end")):
        parts.append(
            f'<text x="{_at_x(value, x_range):.1f}" y="{_HEIGHT - 6}" '
            f'text-anchor="{anchor}">{value:g}</text>'
        )
    return "".join(parts)


def _controls(question: str) -> str:
    """What the colours say, and which rows are shown."""
    choices = "".join(
        f'<label><input type="radio" name="color" value="{name}"'
        f"{' checked' if name == question else ''}> {text}</label>"
        for name, text in (
            ("mismatch", "mismatch of sampler and trainer"),
            ("surprise", "surprise of the sampler"),
            ("advantage", "advantage"),
        )
    )
    legends = "".join(_legend(name) for name in inspect.BOUNDS)
    return (
        f'<nav><div><b>colour</b>{choices}<label class="only"><input type="checkbox" id="only"> '
        f"dropped completions only</label></div>{legends}</nav>"
    )


def _legend(question: str) -> str:
    bounds = inspect.BOUNDS[question]
    labels = [f"≤ {bound:g}" for bound in bounds] + [f"&gt; {bounds[-1]:g}", "not finite"]
    letter, unit = question[0], "" if question == "advantage" else " nats"
    swatches = "".join(f'<i class="{letter}{n}">{text}</i>' for n, text in enumerate(labels))
    if question == "advantage":
        swatches += '<i class="n a3">negative</i>'
    return f'<div class="legend {question}"><span>{question}{unit}</span>{swatches}</div>'


def _group(number: int, rows: Sequence[Mapping[str, Any]]) -> str:
    answer = rows[0].get("answer")
    known = "" if answer in (None, "") else f"<p>answer: <b>{html.escape(str(answer))}</b></p>"
    return (
        f"<section class=group><h2>prompt {number}</h2>"
        f"<pre class=prompt>{html.escape(str(rows[0]['prompt']).strip())}</pre>{known}"
        + "\n".join(_completion(row) for row in rows)
        + "</section>"
    )


def _completion(row: Mapping[str, Any]) -> str:
    sign = "up" if row["advantage"] > 0 else "down" if row["advantage"] < 0 else "flat"
    dropped = row.get("dropped")
    badge = f'<em class="badge">dropped: {html.escape(str(dropped))}</em>' if dropped else ""
    tokens = "".join(_token(token) for token in inspect.tokens_of(row))
    heading = " · ".join(html.escape(fact) for fact in inspect.facts(row))
    return (
        f'<article class="{sign}{" dropped" if dropped else ""}"><h3>{heading} {badge}</h3>'
        f'<div class="tokens">{tokens}</div></article>'
    )


def _token(token: inspect.Token) -> str:
    shades = " ".join(f"{name[0]}{token.shade(name)}" for name in ("mismatch", "surprise"))
    negative = "n " if token.advantage < 0 else ""
    classes = f"{shades} {negative}a{token.shade('advantage')}"
    facts = [f"token {token.id}", f"sampler {_nats(token.generation_logprob)}"]
    if token.prev_logprob is not None:
        facts += [f"trainer {_nats(token.prev_logprob)}", f"mismatch {_nats(token.mismatch)}"]
    facts.append(f"advantage {token.advantage:+.4g}" if token.trained else "not trained")
    text = html.escape(token.text).replace("\n", '<s class="nl">⏎</s>\n')
    extra = "" if token.trained else " off"
    return f'<i class="{classes}{extra}" title="{html.escape(" · ".join(facts))}">{text}</i>'


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _shades() -> str:
    """One rule a question and shade, active while the body carries the question's name."""
    alphas = (0, 0.12, 0.28, 0.5, 0.85)
    rules = []
    for question, rgb in (
        ("mismatch", "224,122,31"),
        ("surprise", "96,84,190"),
        ("advantage", "58,143,92"),
    ):
        for shade, alpha in enumerate(alphas):
            rules.append(f".{question} .{question[0]}{shade}{{background:rgba({rgb},{alpha})}}")
        rules.append(f".{question} .{question[0]}5{{background:#c0392b;color:#fff}}")
    for shade, alpha in enumerate(alphas):
        rules.append(f".advantage .n.a{shade}{{background:rgba(200,60,60,{alpha})}}")
    return "".join(rules)


_STYLE = """
:root{color-scheme:light}
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;padding:24px;max-width:1180px;color:#1d2530;
background:#f6f7f9}
h1{font-size:24px;margin:0 0 14px}h2{font-size:16px;margin:0 0 8px;color:#2a6f97}
h3{font-size:13px;font-weight:600;margin:0 0 6px}
.cards{display:flex;gap:12px;flex-wrap:wrap;margin-bottom:16px}
.cards div{background:#fff;border:1px solid #e2e6eb;border-radius:8px;padding:8px 14px}
.cards b{display:block;font-size:19px}.cards span{font-size:12px;color:#667}
.curves{display:grid;grid-template-columns:repeat(auto-fill,minmax(320px,1fr));gap:12px}
figure{background:#fff;border:1px solid #e2e6eb;border-radius:8px;margin:0;padding:10px}
figcaption{font-size:12px;min-height:36px}svg{width:100%;height:auto;display:block}
svg polyline{fill:none;stroke-width:1.6}svg line{stroke:#e6e9ee}
svg text{font-size:10px;fill:#778}
nav{position:sticky;top:0;background:#f6f7f9ee;padding:10px 0;margin:14px 0 4px;z-index:1;
border-bottom:1px solid #dde2e8;font-size:13px}
nav label{margin-left:14px;cursor:pointer}.legend{display:none;margin-top:6px;font-size:12px}
.mismatch .legend.mismatch,.surprise .legend.surprise,.advantage .legend.advantage{display:block}
.legend span{color:#667}.legend i{padding:2px 7px;margin-left:6px;border:1px solid #dde2e8;
border-radius:4px}
i{font-style:normal}
.group{background:#fff;border:1px solid #e2e6eb;border-radius:8px;padding:14px 16px;margin:14px 0}
.group p{margin:4px 0 10px;font-size:13px}
pre.prompt{white-space:pre-wrap;background:#f3f5f8;border-radius:6px;padding:8px 12px;
margin:0 0 8px;font:13px/1.5 ui-monospace,monospace;max-height:14em;overflow:auto}
article{border-left:4px solid #b9a24c;padding:6px 0 6px 12px;margin:12px 0}
article.up{border-color:#3a8f5c}article.down{border-color:#c83c3c}
article.dropped .tokens{opacity:.55}
.only-dropped article:not(.dropped),.only-dropped .group:not(:has(.dropped)){display:none}
.badge{background:#c0392b;color:#fff;border-radius:4px;padding:1px 7px;font-style:normal;
white-space:nowrap}
.tokens{font:13px/1.65 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere}
.tokens i{border-radius:3px}.tokens i:hover{outline:1px solid #2a6f97}
.tokens .off{background:none!important;color:#99a;text-decoration:line-through}
s.nl{color:#889;text-decoration:none}
@media print{nav{position:static}}
"""

_SCRIPT = """
for (const input of document.querySelectorAll('input[name=color]'))
  input.addEventListener('change', () => {
    document.body.classList.remove('mismatch', 'surprise', 'advantage');
    document.body.classList.add(input.value);
  });
document.getElementById('only').addEventListener('change', event =>
  document.body.classList.toggle('only-dropped', event.target.checked));
"""
