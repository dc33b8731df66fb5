"""What `inspect` shows of a run: the right rows, the right colours, a page that is safe to open."""

import html.parser
import io
import json
import math
import re

import pytest
from rich.console import Console

from grpo_jax.train import inspect, page
from grpo_jax.train.inspect import InspectOptions, Token


def row(group=0, step=3, **changes):
    texts = ["The", " answer", "\n", "4"]
    base = {
        "step": step,
        "group": group,
        "prompt": f"What is 2 + 2? [bold]{group}[/bold]",
        "completion": "".join(texts),
        "answer": "4",
        "reward": 1.0,
        "shaped_reward": 0.5,
        "components": {"exact": 1.0},
        "advantage": 0.8,
        "dropped": None,
        "stop_reason": "stop",
        "completion_length": 4,
        "tokens": [1, 2, 3, 4],
        "token_texts": texts,
        "generation_logprobs": [-0.1, -1.0, -3.0, -math.inf],
        "prev_logprobs": [-0.1, -1.03, -3.5, -math.inf],
    }
    return base | changes


@pytest.fixture
def run(tmp_path):
    samples = tmp_path / "samples"
    samples.mkdir()
    rows = [row(1), row(0), row(1, dropped="overlong", reward=0.0, advantage=-0.8)]
    for step in (1, 3):
        text = "".join(json.dumps(r | {"step": step}) + "\n" for r in rows)
        (samples / f"step_{step:06d}.jsonl").write_text(text)
    lines = [{"step": s, "reward/mean": 0.1 * s, "loss": float("nan")} for s in (1, 2, 3)]
    lines.append({"step": 3, "eval/mean_reward": 0.5})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return tmp_path


def shown(run, **options):
    console = Console(width=100, record=True, highlight=False, file=io.StringIO())
    inspect.inspect_run(run, InspectOptions(**options), console)
    return console.export_text()


def test_the_newest_step_by_default(run):
    assert inspect.read_step(run).step == 3
    step = inspect.read_step(run, 1)
    assert step.step == 1 and step.metrics["reward/mean"] == 0.1
    assert inspect.read_step(run).metrics["eval/mean_reward"] == 0.5


def test_a_missing_step_and_a_missing_run_are_explained(run, tmp_path):
    with pytest.raises(ValueError, match="step 2 has no samples.*from 1 to 3, the nearest is 1"):
        inspect.read_step(run, 2)
    with pytest.raises(ValueError, match="holds no samples.*report.samples_every above 0"):
        inspect.read_step(tmp_path / "nowhere")


def test_rows_of_one_prompt_stand_together_and_can_be_chosen(run):
    rows = inspect.read_step(run).rows
    assert [r["group"] for r in inspect.select(rows, InspectOptions())] == [0, 1, 1]
    assert len(inspect.select(rows, InspectOptions(group=1))) == 2
    assert [r["dropped"] for r in inspect.select(rows, InspectOptions(dropped=True))] == [
        "overlong"
    ]
    with pytest.raises(ValueError, match=r"group 7 is not in this step; there are \[0, 1\]"):
        inspect.select(rows, InspectOptions(group=7))


@pytest.mark.parametrize(
    "gen, prev, mismatch, shade",
    [
        (-1.0, -1.0, 0.0, 0),
        (-1.0, -1.02, 0.02, 1),
        (-1.0, -0.9, 0.1, 2),
        (-1.0, -1.5, 0.5, 3),
        (-1.0, -3.0, 2.0, 4),
        (-1.0, -math.inf, math.inf, inspect.BROKEN),
        (-math.inf, -math.inf, 0.0, 0),
        (-1.0, None, None, 0),
    ],
)
def test_shades_of_a_mismatch(gen, prev, mismatch, shade):
    token = Token("x", 1, True, gen, prev, 0.0)
    assert token.mismatch == (mismatch if mismatch is None else pytest.approx(mismatch))
    assert token.shade("mismatch") == shade
    assert token._replace(trained=False).shade("mismatch") == 0


def test_shades_of_surprise_and_advantage():
    token = Token("x", 1, True, -math.log(2) - 0.1, None, -2.0)
    assert (token.shade("surprise"), token.shade("advantage")) == (2, 4)
    assert token._replace(generation_logprob=math.nan).shade("surprise") == inspect.BROKEN


def test_the_question_follows_what_was_scored():
    assert inspect.question_for([row()], None) == "mismatch"
    assert inspect.question_for([row(prev_logprobs=None)], None) == "surprise"
    assert inspect.question_for([row()], "advantage") == "advantage"


def test_facts_of_a_row():
    facts = inspect.facts(row())
    assert facts[:4] == ["reward 1.000", "exact 1.000", "shaped 0.500", "advantage +0.800"]
    assert "largest mismatch 0.500 nats" in facts
    assert not any("mismatch" in fact for fact in inspect.facts(row(prev_logprobs=None)))


def test_terminal_view(run):
    text = shown(run)
    assert "3, 2 of them trained" in text and "1 by overlong" in text
    assert "DROPPED: overlong" in text
    assert "[bold]0[/bold]" in text  # text of the run is not markup
    assert text.count("The answer") == 3
    assert "2 more completions" in shown(run, rows=1)


def test_options_are_checked():
    with pytest.raises(ValueError, match="color='red'; use one of mismatch, surprise, advantage"):
        InspectOptions(color="red")
    with pytest.raises(ValueError, match="rows=-1 is negative"):
        InspectOptions(rows=-1)


class Balance(html.parser.HTMLParser):
    """Checks that tags are balanced, and collects what a page refers to."""

    VOID = {"meta", "input", "line", "circle", "polyline"}

    def __init__(self):
        super().__init__()
        self.open, self.links, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_page_is_whole_and_loads_nothing(run):
    path = inspect.inspect_run(run, InspectOptions(html=str(run / "out" / "page.html")))
    text = path.read_text()
    parser = Balance()
    parser.feed(text)
    assert parser.open == [] and parser.links == []
    assert not re.search(r"https?://|@import|url\(", text)
    assert parser.tags.count("article") == 3 and parser.tags.count("svg") == 1
    assert text.count('class="badge"') == 1 and "dropped: overlong" in text
    assert [p.name for p in path.parent.iterdir()] == ["page.html"]


def test_a_completion_cannot_put_markup_into_the_page():
    evil = '<script>alert("x")</script>'
    bad = row(token_texts=[evil, "'\"", "&", "</i>"], prompt=evil, answer=evil, dropped=evil)
    text = page.render(evil, inspect.Step(1, [bad], {}), [])
    assert evil not in text and text.count("<script>") == 1
    assert "&lt;script&gt;" in text


def test_curves_skip_what_is_not_finite():
    history = [{"step": 1, "loss": math.nan}, {"step": 2, "loss": 3.0}, {"step": 3, "loss": None}]
    assert page.points("loss", history) == [(2.0, 3.0)]
    assert page.curve("loss", (("loss", "loss"),), history).count("<circle") == 1
    assert page.curve("none", (("absent", "x"),), history) == ""


def test_tokens_that_were_not_trained_are_marked():
    masked = row(token_mask=[True, False, True, True], advantages=[1.0, 0.0, -1.0, 0.0])
    text = page.render("run", inspect.Step(1, [masked], {}), [])
    assert text.count(' off"') == 1 and "not trained" in text
    assert [t.advantage for t in inspect.tokens_of(masked)] == [1.0, 0.0, -1.0, 0.0]
