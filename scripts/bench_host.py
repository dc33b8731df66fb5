"""Time the host side of a step: everything between a sampler and the update, by its parts.

    python scripts/bench_host.py [--rows 1024] [--tokens 512] [--rounds 5]

The rows are slices of this repository's own documentation in the ids of a real tokenizer, so that
decoding sees text; a stand-in for the sampler hands them out at once. From there on everything is
what the loop calls, in its order: decode, score (exact match), dynamic sampling, shaping and row
filters, collate, the log-probability filter with the advantages, the cut into updates with their
counts, the layout, and the sample files. Seconds by the clock, medians of `rounds`, the last line
is one JSON object. `host` is the sum that a step cannot do without; sample files are beside it, and
so is a reward that lives in worker processes, at the price of a message each way for each row.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jax  # noqa: E402
import numpy as np  # noqa: E402

from grpo_jax.core.advantages import AdvantageConfig  # noqa: E402
from grpo_jax.data.prompts import Example, Prompt  # noqa: E402
from grpo_jax.data.tokenizer import HFTokenizer, Tokenizer  # noqa: E402
from grpo_jax.rewards.scoring import RewardComponent, RewardConfig, Scorer  # noqa: E402
from grpo_jax.rewards.shaping import ShapingConfig  # noqa: E402
from grpo_jax.sampling.generate import Generation  # noqa: E402
from grpo_jax.train import prepare, reporting  # noqa: E402
from grpo_jax.train import rollout as rollouts  # noqa: E402
from grpo_jax.train.filters import FiltersConfig  # noqa: E402
from grpo_jax.train.layout import Layout  # noqa: E402
from grpo_jax.train.rollout import RolloutConfig  # noqa: E402

REPOSITORY = Path(__file__).resolve().parent.parent
GROUP, PROMPT_TOKENS = 8, 64
TOKEN_ESTIMATORS = {
    "reinforce_plus_plus": AdvantageConfig(estimator="reinforce_plus_plus", kl_in_reward=0.1),
    "gae": AdvantageConfig(estimator="gae"),
}


class Sampler:
    """Hands out rows that were made before, as an engine would return them."""

    def __init__(self, rows: Generation):
        self._rows = rows

    def generate(self, *_: object, **__: object) -> Generation:
        """All the rows."""
        return self._rows


def make_rows(tokenizer: Tokenizer, rows: int, tokens: int) -> Generation:
    """Slices of the documentation: prompt and completion; one row in eight hits the limit."""
    text = "\n".join(p.read_text() for p in sorted((REPOSITORY / "docs").glob("*.md")))
    ids = np.asarray(tokenizer.encode(text), np.int32)
    rng = np.random.default_rng(0)
    width = PROMPT_TOKENS + tokens
    starts = rng.integers(0, len(ids) - width, rows)
    columns = np.arange(width)[None]
    return Generation(
        ids[starts[:, None] + columns],
        np.full(rows, PROMPT_TOKENS, np.int32),
        np.full(rows, tokens, np.int32),
        np.where(columns < PROMPT_TOKENS, 0, -rng.uniform(0, 3, (rows, width))).astype(np.float32),
        np.where(np.arange(rows) % 8 == 0, 2, 1).astype(np.int8),
    )


def make_prompts(tokenizer: Tokenizer, rows: Generation) -> list[Prompt]:
    """One prompt a group; its answer is what the first completion of the group says."""
    completions = tokenizer.decode_batch(rollouts.completion_ids(rows)[::GROUP])
    return [
        Prompt(Example("prompt", answer.strip()), np.asarray(rows.tokens)[0, :PROMPT_TOKENS], "…")
        for answer in completions
    ]


class Clock:
    """Seconds of each part, one list a name."""

    def __init__(self):
        self.seconds: dict[str, list[float]] = {}

    def run(self, name: str, function: Callable, *arguments: Any) -> Any:
        """Call, and keep how long it took."""
        mark = time.perf_counter()
        result = function(*arguments)
        self.add(name, time.perf_counter() - mark)
        return result

    def add(self, name: str, seconds: float) -> None:
        """Keep a number that somebody else measured."""
        self.seconds.setdefault(name, []).append(seconds)

    def medians(self) -> dict[str, float]:
        """One number a part."""
        return {name: statistics.median(found) for name, found in self.seconds.items()}


def one_step(
    clock: Clock, sampler: Sampler, tokenizer: Tokenizer, scorer: Scorer, prompts: list[Prompt]
) -> None:
    """What the loop does with the rows of a step, without the device."""
    config = RolloutConfig(len(prompts), GROUP, updates_per_rollout=4)
    rules = prepare.Rules(
        ShapingConfig(True, 128, 1.0, 512),
        FiltersConfig(
            overlong_filtering=True,
            drop_constant_groups=True,
            use_dynamic_sampling=True,
            seq_logprob_error_threshold=2.0,
        ),
        AdvantageConfig(),
        filtering_on=True,
    )

    def collect(key):
        return rollouts.collect(sampler, (), tokenizer, scorer, prompts, GROUP, key)

    mark = time.perf_counter()
    rollout, _ = prepare.sample(collect, jax.random.key(0), rules, config)
    gathered = time.perf_counter() - mark
    clock.add("decode", rollout.seconds["decode"])
    clock.add("score", rollout.seconds["reward"])
    clock.add("dynamic sampling", gathered - sum(rollout.seconds.values()))
    weighed = clock.run("shaping and filters", prepare.weigh, rollout, rules)
    batch = clock.run("collate", prepare.collate, rollout, weighed, config)
    noise = np.random.default_rng(1).normal(0, 0.05, batch.tokens.shape).astype(np.float32)
    scored = np.where(batch.token_mask, batch.generation_logprobs + noise, 0)
    batch = batch.replace(prev_logprobs=scored, reference_logprobs=scored, values=scored)
    prepared = clock.run("advantages", prepare.finish, rollout, weighed, batch, rules)
    parts = clock.run("counts", prepare.split_updates, prepared.batch, 4)
    layout = Layout(micro_rows=8)
    clock.run("layout", lambda: [layout.lay_out(part) for part, _ in parts])
    clock.run("summary", rollouts.summary, rollout)
    for name, advantage in TOKEN_ESTIMATORS.items():
        other = rules._replace(advantage=advantage)
        clock.run(f"[{name}]", prepare.finish, rollout, weighed, batch, other)
    with tempfile.TemporaryDirectory() as folder:
        reporter = reporting.Reporter(
            Path(folder), reporting.ReportConfig(progress=False), 1, console=quiet()
        )
        rows = clock.run("[sample rows]", prepare.sample_rows, 1, rollout, prepared, tokenizer)
        clock.run("[sample files]", reporter.samples, 1, rows)


def quiet():
    """A console that prints nothing."""
    return reporting.make_console(quiet=True)


def trivial(sample) -> float:
    """A reward that costs nothing but the way to a worker and back."""
    return float(len(sample.completion) % 2)


def main() -> None:
    """Print a table and the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokenizer", default=str(REPOSITORY / "models/SmolLM2-135M-Instruct"))
    options = parser.parse_args()
    tokenizer = HFTokenizer(options.tokenizer)
    rows = make_rows(tokenizer, options.rows, options.tokens)
    prompts, clock = make_prompts(tokenizer, rows), Clock()
    trivially = (RewardComponent(kind="exact_match"),)
    with Scorer(RewardConfig(components=trivially)) as scorer:
        for _ in range(options.rounds + 1):
            one_step(clock, Sampler(rows), tokenizer, scorer, prompts)
    clock.seconds = {name: found[1:] for name, found in clock.seconds.items()}  # the first warms up
    texts = tokenizer.decode_batch(rollouts.completion_ids(rows))
    examples = [prompts[i // GROUP].example for i in range(options.rows)]
    outside = (RewardComponent(kind=f"{Path(__file__).resolve()}:trivial"),)
    with Scorer(RewardConfig(components=outside)) as scorer:
        scorer.wait_ready()
        for _ in range(options.rounds):
            clock.run("[score in workers]", scorer.score, examples, texts)
    medians = clock.medians()
    total = sum(s for name, s in medians.items() if not name.startswith("["))
    for name, seconds in medians.items():
        share = "" if name.startswith("[") else f"{seconds / total:6.1%}"
        print(f"{name:<22} {1000 * seconds:8.1f} ms  {share}")
    print(f"{'host':<22} {1000 * total:8.1f} ms")
    figures = {"host": total} | medians
    figures = {k.strip("[]").replace(" ", "_") + "_s": round(s, 4) for k, s in figures.items()}
    print(json.dumps({"bench": "host", "figures": figures}))


if __name__ == "__main__":
    main()
