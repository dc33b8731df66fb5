"""Evaluation: the held-out prompts, sampled with settings of their own and scored as in training.

Symbols: `P` prompts, `k` completions a prompt.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.policy import Params
from grpo_jax.data.prompts import Prompt
from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.rewards.scoring import Scorer
from grpo_jax.sampling.engine import RolloutEngine
from grpo_jax.sampling.generate import SamplingConfig
from grpo_jax.train import rollout as rollouts
from grpo_jax.train import statistics


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """How the held-out prompts are evaluated, and when."""

    every: int = 0  # steps between evaluations; 0 = none between start and end
    at_start: bool = True  # evaluate before the first step
    at_end: bool = True  # evaluate after the last step
    completions: int = 1  # k, completions a prompt
    temperature: float = 1.0  # 0 = greedy
    top_k: int | None = None  # keep the k likeliest tokens; null keeps all
    top_p: float = 1.0  # keep the likeliest tokens up to this probability; 1 keeps all
    max_new_tokens: int | None = None  # null = sampling.max_new_tokens
    correct_reward: float = 1.0  # rewards from here up count as correct in pass@k
    pass_k: tuple[int, ...] = ()  # k of pass@k and pass^k; empty = powers of two, and k itself
    stop_metric: str | None = None  # end training early once this metric …
    stop_threshold: float = 1.0  # … reaches this value

    def __post_init__(self):
        if self.every < 0:
            raise ValueError(f"every = {self.every} is negative; use 0 for none between")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens = {self.max_new_tokens} must be at least 1, or null for training's"
            )
        FilterConfig(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)  # checks
        if self.completions < 1:
            raise ValueError(f"completions = {self.completions} must be at least 1")
        for k in self.pass_k:
            if not 1 <= k <= self.completions:
                raise ValueError(
                    f"pass_k = {k} is not within the {self.completions} completions that are "
                    f"drawn; raise completions to {k}, or leave it out"
                )
        if self.temperature == 0 and self.completions > 1:
            raise ValueError(
                f"completions = {self.completions} at temperature = 0 are all the same; "
                "use 1 completion, or a temperature above 0"
            )

    def sampling(self, training: SamplingConfig) -> SamplingConfig:
        """The sampler's settings for evaluation."""
        return SamplingConfig(
            max_new_tokens=self.max_new_tokens or training.max_new_tokens,
            min_new_tokens=min(
                training.min_new_tokens, self.max_new_tokens or training.max_new_tokens
            ),
            filter=FilterConfig(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                vocabulary=training.filter.vocabulary,
            ),
            stop_strings=training.stop_strings,
        )


def metric_names(config: EvaluateConfig, components: Sequence[str]) -> list[str]:
    """Names that every evaluation reports, whatever its rewards are.

    `avg@n` is not among them: it is there where all rewards are 0 or 1, and equals mean_reward.
    """
    n = config.completions
    numbers = statistics.evaluation(np.zeros(n), n, ks=config.pass_k or None)
    numbers |= statistics.lengths(np.ones(1), np.zeros(1, bool))
    numbers |= dict.fromkeys((f"reward/{name}" for name in components), 0.0)
    return [f"eval/{name}" for name in numbers if not name.startswith("avg@")]


class Evaluation(NamedTuple):
    """What came out, and the completions behind it."""

    metrics: dict[str, float]  # names begin with "eval/"
    rollout: rollouts.Rollout
    seconds: float


def evaluate(
    engine: RolloutEngine,
    params: Params,
    tokenizer: Tokenizer,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    config: EvaluateConfig,
    training: SamplingConfig,
    key: jax.Array,
) -> Evaluation:
    """Evaluate the held-out prompts; the same key draws with the same random numbers.

    Raises:
      ValueError: there are no held-out prompts.
    """
    if not prompts:
        raise ValueError("there are no held-out prompts; set data.eval_size above 0")
    start = time.perf_counter()
    rollout = rollouts.collect(
        engine,
        params,
        tokenizer,
        scorer,
        prompts,
        config.completions,
        key,
        sampling=config.sampling(training),
    )
    scores = rollout.scores
    totals = np.where(scores.valid, scores.total, np.nan)
    metrics = statistics.evaluation(
        totals, config.completions, correct_reward=config.correct_reward, ks=config.pass_k or None
    )
    metrics |= statistics.lengths(np.asarray(rollout.rows.completion_lengths), rollout.truncated)
    metrics |= {f"reward/{name}": _mean(column) for name, column in scores.components.items()}
    metrics = {f"eval/{name}": value for name, value in metrics.items()}
    return Evaluation(metrics, rollout, time.perf_counter() - start)


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")
