"""One rollout: prompts in, scored completions with group ids out.

Symbols: `P` prompts, `G` completions a prompt, `N = P·G` rows.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import numpy as np

from grpo_jax.core.policy import Params
from grpo_jax.data import tokenizer as tokenizers
from grpo_jax.data.prompts import Prompt, repeat_prompts
from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.rewards.scoring import Scorer, Scores
from grpo_jax.rewards.verdicts import TextSpan
from grpo_jax.sampling import engine as engines
from grpo_jax.sampling.generate import STOP_REASONS, Generation, SamplingConfig
from grpo_jax.scale import multihost
from grpo_jax.scale.processes import Gather, alone


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How much is sampled for a step, and into how many updates it is cut."""

    prompts_per_step: int = 8  # P
    completions_per_prompt: int = 8  # G; a group baseline needs at least 2
    updates_per_rollout: int = 1  # optimizer updates of one pass over the rows of a rollout
    epochs: int = 1  # passes over the rows of a rollout; its log-probabilities and values stay
    # rows a device sees at one time; changes memory, not numbers. null = 8, or 1 where rows are
    # packed, or what micro_batch_tokens allows
    micro_batch_size: int | None = None
    micro_batch_tokens: int | None = None  # the same as tokens, padding included; give one of them
    # rows are padded to 1, 2, 3, 4, 6, 8, 12, 16, 24, … times this many tokens, the longest decides
    length_multiple: int = 64
    # tokens whose logits exist at one time; auto = a 42nd of a device's micro-batch, at most 512
    # (the head then needs about 7 % of the memory of all logits, 9 % with every filter and metric),
    # and 128 where it has less than 4,096 tokens; null = all of them
    head_chunk: int | Literal["auto"] | None = "auto"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{field.name} = {value} must be at least 1")
        if self.micro_batch_size is not None and self.micro_batch_tokens is not None:
            raise ValueError(
                f"micro_batch_size = {self.micro_batch_size} and micro_batch_tokens = "
                f"{self.micro_batch_tokens} both bound a micro-batch; set one of them to null"
            )

    @property
    def rows(self) -> int:
        """N, completions a step."""
        return self.prompts_per_step * self.completions_per_prompt

    @property
    def updates(self) -> int:
        """Optimizer updates a step, over all epochs."""
        return self.updates_per_rollout * self.epochs


class Override(NamedTuple):
    """Tokens of one completion that get an advantage of their own."""

    name: str  # who asked for it
    start: int  # first token of the completion
    end: int  # one past the last
    advantage: float


class Rollout(NamedTuple):
    """N scored completions; everything is on the host."""

    prompts: list[Prompt]  # N, each prompt repeated G times in a row
    group_ids: np.ndarray  # i32[N]
    rows: Generation  # tokens i32[N, W] and what the sampler says of them
    texts: list[str]  # N, without special tokens
    scores: Scores
    seconds: dict[str, float]  # "rollout", "decode", "reward"
    overrides: list[tuple[Override, ...]]  # N, later ones win

    @property
    def truncated(self) -> np.ndarray:
        """bool[N], True where the token limit ended the completion."""
        return truncated(self.rows)


def collect(
    engine: engines.RolloutEngine,
    params: Params,
    tokenizer: Tokenizer,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    completions: int,
    key: jax.Array,
    *,
    sampling: SamplingConfig | None = None,
) -> Rollout:
    """Sample `completions` answers to each prompt and score them.

    Row `i` belongs to group `i // completions`. The key is consumed; `sampling` replaces the
    engine's own settings. With several processes each decodes and scores the completions of its
    share of the prompts, and all receive the whole rollout.
    """
    start = time.perf_counter()
    rows = engine.generate(
        params, [prompt.ids for prompt in prompts], completions, key, sampling=sampling
    )
    check(rows, len(prompts), completions)
    sampled = time.perf_counter()
    repeated, group_ids = repeat_prompts(prompts, completions)
    ids = completion_ids(rows)
    cut, mine = truncated(rows), multihost.my_share(len(prompts))
    mine = slice(mine.start * completions, mine.stop * completions)  # whole groups

    def judge() -> Judged:
        begin = time.perf_counter()
        texts = tokenizer.decode_batch(ids[mine])
        decoded = time.perf_counter()
        scores = scorer.score(
            [prompt.example for prompt in repeated[mine]],
            texts,
            tokens=np.asarray(rows.completion_lengths)[mine],
            truncated=cut[mine],
        )
        spans = zip(ids[mine], scores.spans, strict=True)
        flagged = [overrides(tokenizer, row, found) for row, found in spans]
        return Judged(texts, scores, flagged, decoded - begin)

    judged = _join(multihost.all_succeed(judge, "the rewards"))
    seconds = {
        "rollout": sampled - start,
        "decode": judged.seconds,
        "reward": time.perf_counter() - sampled - judged.seconds,
    }
    return Rollout(
        repeated, group_ids, rows, judged.texts, judged.scores, seconds, judged.overrides
    )


class Judged(NamedTuple):
    """What a process says of its share of the completions."""

    texts: list[str]
    scores: Scores
    overrides: list[tuple[Override, ...]]
    seconds: float  # of decoding


def _join(parts: Sequence[Judged]) -> Judged:
    if len(parts) == 1:
        return parts[0]
    return Judged(
        [text for part in parts for text in part.texts],
        Scores.join([part.scores for part in parts]),
        [flagged for part in parts for flagged in part.overrides],
        max(part.seconds for part in parts),
    )


def check(rows: Generation, prompts: int, completions: int) -> None:
    """Refuse what an engine must not return, before it is trained in silence.

    Raises:
      ValueError: another number of rows than was asked for, lengths beyond the arrays, a sampled
        token without a log-probability, or one that is not among those that were kept.
    """
    tokens, logprobs = np.asarray(rows.tokens), np.asarray(rows.logprobs)
    if len(tokens) != prompts * completions:
        raise ValueError(
            f"the engine returned {len(tokens)} rows for {prompts} prompts with {completions} "
            f"completions each; it must return {prompts * completions}, the completions of a "
            "prompt next to each other"
        )
    starts = np.asarray(rows.prompt_lengths)
    ends = starts + np.asarray(rows.completion_lengths)
    if ends.max(initial=0) > tokens.shape[1]:
        raise ValueError(
            f"a row of the engine claims {ends.max()} tokens and the arrays are {tokens.shape[1]} "
            "wide; lengths must count the tokens that are there"
        )
    columns = np.arange(tokens.shape[1])
    sampled = (columns >= starts[:, None]) & (columns < ends[:, None])
    missing = np.argwhere(sampled & (np.isnan(logprobs) | np.isposinf(logprobs)))
    if missing.size:
        row, column = missing[0]
        raise ValueError(
            f"token {column - starts[row]} of completion {row} (id {tokens[row, column]}) has the "
            f"log-probability {logprobs[row, column]}, and {len(missing)} tokens in all have none; "
            "an engine must report that of each token it sampled. Where ours says so, the model's "
            "weights are not finite"
        )
    if rows.kept_ids is not None:
        _check_kept_ids(np.asarray(rows.kept_ids), tokens, sampled)


def _check_kept_ids(kept_ids: np.ndarray, tokens: np.ndarray, sampled: np.ndarray) -> None:
    """Refuse kept sets of another shape than the tokens, or without the token that was drawn."""
    if kept_ids.ndim != 3 or kept_ids.shape[:2] != tokens.shape:
        raise ValueError(
            f"the engine returned kept_ids{list(kept_ids.shape)} for tokens{list(tokens.shape)}; "
            "they must be [N, W, K], each token's list padded with -1"
        )
    strangers = np.argwhere(sampled & ~np.any(kept_ids == tokens[..., None], axis=-1))
    if strangers.size:
        row, column = strangers[0]
        raise ValueError(
            f"the engine drew token {tokens[row, column]} at column {column} of row {row}, and it "
            f"is not among the {np.sum(kept_ids[row, column] >= 0)} that it says it kept there; "
            "entry t of kept_ids must speak of token t"
        )


def overrides(
    tokenizer: Tokenizer, ids: np.ndarray, spans: Sequence[TextSpan]
) -> tuple[Override, ...]:
    """Turn flagged stretches of text into tokens: every token that spells part of one is in it.

    A span without ends is the whole message, with its end token.
    """
    if not spans:
        return ()
    first, last = tokenizers.token_offsets(tokenizer, ids).T
    out = []
    for span in spans:
        inside = np.arange(len(ids))
        if span.start is not None:
            inside = np.flatnonzero((first < span.end) & (last > span.start) & (last > first))
        if inside.size:
            out.append(Override(span.name, int(inside[0]), int(inside[-1]) + 1, span.advantage))
    return tuple(out)


def truncated(rows: Generation) -> np.ndarray:
    """bool[N], True where the token limit ended the completion."""
    return np.asarray(rows.stop_reasons) == STOP_REASONS.index("length")


def completion_ids(rows: Generation) -> list[np.ndarray]:
    """The completion of each row, end token included."""
    starts = rows.prompt_lengths
    ends = starts + rows.completion_lengths
    return [row[a:b] for row, a, b in zip(rows.tokens, starts, ends, strict=True)]


def summary(rollout: Rollout, gather: Gather = alone) -> dict[str, float]:
    """Means over the rows of a rollout, those of all processes, for the log."""
    rows = rollout.rows
    mine = (rows.completion_lengths, rows.prompt_lengths, rollout.truncated)
    parts = gather((rollout.scores, [np.asarray(column) for column in mine]))
    scores = Scores.join([scores for scores, _ in parts])
    lengths, prompts, cut = (
        np.concatenate(columns) for columns in zip(*(c for _, c in parts), strict=True)
    )
    metrics = {("reward/mean" if k == "reward" else k): v for k, v in scores.metrics().items()}
    valid = scores.total[scores.valid]
    return metrics | {
        "reward/std": float(valid.std()) if valid.size else float("nan"),
        "length/mean": _mean(lengths),
        "length/max": float(lengths.max(initial=0)),
        "length/total": float(lengths.sum()),
        "stop/fraction": 1.0 - _mean(cut),
        "prompt_length/mean": _mean(prompts),
    }


def _mean(values: np.ndarray) -> float:
    """The mean, and NaN of nothing without a complaint."""
    return float(values.mean()) if values.size else float("nan")
