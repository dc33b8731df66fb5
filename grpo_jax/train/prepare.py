"""From a scored rollout to the batches an optimizer sees: shaping, filters, advantages, collating.

Everything is on the host. The order is the torch reference's: reward scaling, dynamic sampling,
shaping, row filters, log-probabilities, the sequence error filter, advantages, overrides, clipping.

Symbols: `P` prompts, `G` completions a prompt, `N` rows, `W` width of sampled rows, `T` tokens a
row of the batch.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.core import advantages as estimators
from grpo_jax.core import diagnostics
from grpo_jax.core.advantages import AdvantageConfig
from grpo_jax.core.batch import Batch, Counts
from grpo_jax.core.estimators_group import weigh_components
from grpo_jax.data import tokenizer as tokenizers
from grpo_jax.data import trajectories
from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.rewards import shaping
from grpo_jax.rewards.scoring import Scores
from grpo_jax.rewards.shaping import ShapingConfig
from grpo_jax.sampling.generate import STOP_REASONS
from grpo_jax.scale import processes
from grpo_jax.scale.processes import Gather, alone
from grpo_jax.train import filters
from grpo_jax.train.filters import FiltersConfig
from grpo_jax.train.rollout import Rollout, RolloutConfig


class Rules(NamedTuple):
    """What happens to a row between the sampler and the loss."""

    shaping: ShapingConfig
    filters: FiltersConfig
    advantage: AdvantageConfig
    filtering_on: bool  # the sampler keeps part of the vocabulary, so −inf is legal


class Weighed(NamedTuple):
    """A rollout after shaping and the filters that need no log-probabilities."""

    rewards: shaping.ShapedRewards
    correct: np.ndarray  # bool[N]
    weights: np.ndarray  # f64[N]
    reports: tuple[filters.Report, ...]


class Prepared(NamedTuple):
    """A batch ready for the optimizer, and what the log should know."""

    batch: Batch
    rewards: np.ndarray  # f64[N] after shaping
    dropped: list[str | None]  # why each row is not trained
    metrics: dict[str, float]


def sample(
    collect: Callable[[jax.Array], Rollout],
    key: jax.Array,
    rules: Rules,
    config: RolloutConfig,
    gather: Gather = alone,
) -> tuple[Rollout, dict[str, float]]:
    """Sample a step's rows; with dynamic sampling, until enough groups have unequal rewards.

    Every process samples whole groups, its share of the step's prompts, and goes on for as long as
    any of them is short.
    """
    if not rules.filters.use_dynamic_sampling:
        return collect(key), {}
    share = config.prompts_per_step // len(gather(None))
    parts: list[Rollout] = []
    while True:
        parts.append(collect(jax.random.fold_in(key, len(parts))))
        whole = join(parts)
        unshaped = shaping.shape_rewards(
            whole.scores.total,
            dataclasses.replace(rules.shaping, enabled=False),
            components=whole.scores.components,
        )
        choice = filters.choose_groups(
            _judged(unshaped, rules),
            whole.group_ids,
            share,
            rules.filters,
            valid=whole.scores.valid,
        )
        everywhere = gather(choice)
        missing = sum(other.missing for other in everywhere)
        if filters.enough(missing, config.prompts_per_step, len(parts), rules.filters):
            totals = {k: float(sum(c.metrics[k] for c in everywhere)) for k in choice.metrics}
            totals["dynamic_sampling/num_gen_batches"] = float(len(parts))
            left_out = ~np.isin(np.arange(len(whole.texts)), choice.rows)
            _, report = filters.remove(
                "dynamic_sampling",
                np.ones(len(whole.texts)),
                left_out,
                _correct(whole.scores, rules.filters),
            )
            totals |= filters.Report.join(gather(report)).metrics()
            return take(whole, choice.rows), totals


def _correct(scores: Scores, config: FiltersConfig) -> np.ndarray:
    """bool[N], for the reports of filters: of the rewards as they were given."""
    rewards = np.where(scores.valid, scores.total, np.nan)
    return filters.is_correct(rewards, config.correct_reward)


def _judged(rewards: shaping.ShapedRewards, rules: Rules) -> np.ndarray:
    """What must differ inside a group, scaled but not shaped: the total f[N], or columns f[N, C].

    GDPO learns from each component that has a weight, and two of them may differ where their sum
    does not.
    """
    if rules.advantage.estimator != "gdpo":
        return rewards.unshaped
    weighed = weigh_components(rewards.components, rules.advantage.reward_weights)
    return np.stack([column * (weight != 0) for _, column, weight in weighed], axis=1)


def join(parts: Sequence[Rollout]) -> Rollout:
    """Put the rows of several rollouts below each other, groups kept apart."""
    width = max(part.rows.tokens.shape[1] for part in parts)
    most = max(0 if p.rows.kept_ids is None else p.rows.kept_ids.shape[2] for p in parts)

    def widen(column: np.ndarray) -> np.ndarray:
        if column.ndim == 1:
            return column
        column = trajectories.fit_width(np.asarray(column), width)
        room = ((0, 0), (0, 0), (0, most - column.shape[-1]))
        return column if column.ndim == 2 else np.pad(column, room, constant_values=-1)

    rows = jax.tree.map(widen, [part.rows for part in parts])
    return Rollout(
        prompts=[prompt for part in parts for prompt in part.prompts],
        group_ids=filters.unique_groups([part.group_ids for part in parts]),
        rows=jax.tree.map(lambda *columns: np.concatenate(columns), *rows),
        texts=[text for part in parts for text in part.texts],
        scores=Scores.join([part.scores for part in parts]),
        seconds={k: sum(p.seconds[k] for p in parts) for k in parts[0].seconds},
        overrides=[overrides for part in parts for overrides in part.overrides],
    )


def take(rollout: Rollout, rows: np.ndarray) -> Rollout:
    """Select rows of a rollout."""
    return rollout._replace(
        prompts=[rollout.prompts[i] for i in rows],
        group_ids=rollout.group_ids[rows],
        rows=jax.tree.map(lambda column: np.asarray(column)[rows], rollout.rows),
        texts=[rollout.texts[i] for i in rows],
        scores=rollout.scores.take(rows),
        overrides=[rollout.overrides[i] for i in rows],
    )


def weigh(rollout: Rollout, rules: Rules) -> Weighed:
    """Shape the rewards and run the row filters that look at rewards and lengths."""
    scores, config = rollout.scores, rules.filters
    rewards = shaping.shape_rewards(
        scores.total,
        rules.shaping,
        lengths=np.asarray(rollout.rows.completion_lengths),
        truncated=rollout.truncated,
        components=scores.components,
    )
    correct = _correct(scores, config)
    # A row that asks to be masked may do so instead of having a score, and who distils needs none.
    known = scores.valid | scores.masked | (not rules.advantage.needs_rewards)
    weights, unscored = filters.unscored(np.ones(len(correct)), known, correct)
    reports = [unscored]
    if config.overlong_filtering:
        weights, report = filters.overlong(weights, rollout.truncated, correct)
        reports.append(report)
    weights, report = filters.mask_sample(weights, scores.masked, correct)
    reports.append(report)
    if config.drop_constant_groups:
        weights, report = filters.constant_groups(
            weights,
            _judged(rewards, rules),
            rollout.group_ids,
            correct,
            tolerance=config.constant_tolerance,
            valid=scores.valid,
        )
        reports.append(report)
    return Weighed(rewards, correct, weights, tuple(reports))


def collate(
    rollout: Rollout, weighed: Weighed, config: RolloutConfig, gather: Gather = alone
) -> Batch:
    """Lay the rows out as one batch of a static number of rows, advantages still zero.

    With several processes it is this one's share of the rows, as wide as everybody's.
    """
    rows = rollout.rows
    ends = np.asarray(rows.prompt_lengths) + np.asarray(rows.completion_lengths)
    longest = gather(int(ends.max(initial=0)))
    batch = trajectories.collate(
        np.asarray(rows.tokens),
        np.asarray(rows.prompt_lengths),
        np.asarray(rows.completion_lengths),
        np.asarray(rows.logprobs),
        advantages=np.zeros(len(rollout.texts)),
        sample_weights=weighed.weights,
        rewards=weighed.rewards.total,
        kept_ids=None if rows.kept_ids is None else np.asarray(rows.kept_ids),
        length=trajectories.bucket_length(max(longest), config.length_multiple),
    )
    return trajectories.pad_rows(batch, config.rows // len(longest))


def finish(
    rollout: Rollout, weighed: Weighed, batch: Batch, rules: Rules, gather: Gather = alone
) -> Prepared:
    """Filter by log-probability error, then make the advantages and put them into the batch.

    Args:
      batch: what `collate` returned, with the log-probabilities that were scored since.
      gather: statistics and metrics are those of the rows of all its processes; a group lives in
        one of them.
    """
    all_sum = processes.all_sum(gather)
    n = len(rollout.texts)
    weights, reports = weighed.weights, weighed.reports
    if batch.prev_logprobs is not None:
        weights, report = filters.sequence_error(
            token_mask=np.asarray(batch.token_mask)[:n],
            sample_weights=weights,
            prev_logprobs=np.asarray(batch.prev_logprobs)[:n],
            generation_logprobs=np.asarray(batch.generation_logprobs)[:n],
            correct=weighed.correct,
            threshold=rules.filters.seq_logprob_error_threshold,
            filtering_on=rules.filtering_on or batch.kept_ids is not None,
        )
        reports = (*reports, report)
    token_mask = np.asarray(batch.token_mask)
    mask = token_mask[:n] * weights[:, None]
    output = estimators.compute(
        rules.advantage, _inputs(rollout, weighed, batch, rules, mask, weights), all_sum=all_sum
    )
    advantages = _override(output.advantages, rollout, mask.shape[1])
    clipped = estimators.clip(
        advantages, rules.advantage.advantage_clip_low, rules.advantage.advantage_clip_high
    )
    metrics = output.metrics | _count_overrides(rollout, gather)
    metrics |= estimators.summarise(
        clipped, mask, all_sum=all_sum, all_max=processes.all_max(gather)
    )
    for parts in zip(*gather(reports), strict=True):
        metrics |= filters.Report.join(parts).metrics()
    known = weighed.rewards.total[rollout.scores.valid]
    total, rows = all_sum(np.array([known.sum(), known.size]))
    metrics["reward/shaped"] = float(total / rows) if rows else float("nan")
    spread = np.broadcast_to(clipped if clipped.ndim == 2 else clipped[:, None], mask.shape)
    rows = token_mask.shape[0]
    batch = batch.replace(
        teacher_logprobs=None,  # the advantages hold what the loss needs of it
        returns=None
        if output.returns is None
        else _pad(np.where(mask != 0, output.returns, 0.0).astype(np.float32), rows),
        advantages=_pad(np.where(token_mask[:n], spread, 0.0).astype(np.float32), rows),
        sample_weights=_pad(
            np.where(np.asarray(batch.segment_ids)[:n] > 0, weights[:, None], 0.0).astype(
                np.float32
            ),
            rows,
        ),
    )
    return Prepared(batch, weighed.rewards.total, filters.dropped_reasons(reports, n), metrics)


def _override(advantages: np.ndarray, rollout: Rollout, width: int) -> np.ndarray:
    """Give flagged tokens the advantage that a reward asked for."""
    starts = np.asarray(rollout.rows.prompt_lengths)
    spans = [
        estimators.Span(i, int(starts[i]) + start, int(starts[i]) + end, value)
        for i, overrides in enumerate(rollout.overrides)
        for _, start, end, value in overrides
    ]
    return estimators.override_spans(advantages, spans, width) if spans else advantages


def _count_overrides(rollout: Rollout, gather: Gather) -> dict[str, float]:
    """Say how many rows were flagged under each name."""
    mine = [{override.name for override in overrides} for overrides in rollout.overrides]
    rows = [names for part in gather(mine) for names in part]
    metrics = {}
    for name in sorted(set().union(*rows)):
        flagged = sum(name in names for names in rows)
        metrics[f"overrides/{name}/rows"] = float(flagged)
        metrics[f"overrides/{name}/share"] = flagged / len(rows)
    return metrics


def _inputs(
    rollout: Rollout,
    weighed: Weighed,
    batch: Batch,
    rules: Rules,
    mask: np.ndarray,
    weights: np.ndarray,
) -> estimators.AdvantageInputs:
    n = len(rollout.texts)

    def rows(array: Any) -> np.ndarray | None:
        return None if array is None else np.asarray(array)[:n]

    return estimators.AdvantageInputs(
        rewards=weighed.rewards.total,
        groups=rollout.group_ids,
        mask=mask,
        valid=filters.votes(
            rollout.scores.valid, weights, filtered_rows_vote=rules.advantage.filtered_rows_vote
        ),
        components=weighed.rewards.components,
        policy_logprobs=rows(batch.prev_logprobs),
        reference_logprobs=rows(batch.reference_logprobs),
        teacher_logprobs=rows(batch.teacher_logprobs),
        values=rows(batch.values),
    )


def _pad(array: np.ndarray, rows: int) -> Any:
    return np.pad(array, ((0, rows - array.shape[0]), (0, 0)))


def split_updates(batch: Batch, updates: int, gather: Gather = alone) -> list[tuple[Batch, Counts]]:
    """Cut a batch into the global batches of its optimizer updates, each with its own counts.

    Counts are those of all processes: together, their parts are one global batch.
    """
    rows = batch.tokens.shape[0] // updates
    all_sum = processes.all_sum(gather)
    parts = trajectories.split_rows(batch, rows)
    return [(part, trajectories.count(part, all_sum)) for part in parts]


_TOTALS = {"tokens", "sequences", "update_applied", "skipped_empty", "skipped_nonfinite"} | {
    name for name, entry in diagnostics.TABLE.items() if entry.normaliser == "none"
}
"""Numbers that add up over the updates of a step."""


def merge_updates(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a step from those of its updates: counts add up, the rest is averaged.

    An update without any trained token is left out of the averages. `grad_norm_max` is the largest
    of the updates; learning rate and parameter norm are the last.
    """
    merged = {}
    trained = [result for result in results if not result["skipped_empty"]] or results
    for name in results[0]:
        values = [result[name] for result in results]
        if name in _TOTALS:
            merged[name] = float(sum(values))
        elif name in ("learning_rate", "param_norm", "updates_skipped"):
            merged[name] = values[-1]
        elif name.endswith("_min"):
            merged[name] = min(values)
        elif name.endswith("_max"):
            merged[name] = max(values)
        else:
            merged[name] = float(np.mean([result[name] for result in trained]))
    merged["grad_norm_max"] = max(result["grad_norm"] for result in results)
    return merged


def sample_rows(
    step: int, rollout: Rollout, prepared: Prepared, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Every completion of a step, with all that decided its training, as plain values."""
    rows, batch = rollout.rows, prepared.batch
    columns = {name: np.asarray(c) for name, c in rollout.scores.components.items()}
    out = []
    for i, text in enumerate(rollout.texts):
        start = int(rows.prompt_lengths[i])
        span = slice(start, start + int(rows.completion_lengths[i]))
        ids = np.asarray(rows.tokens)[i, span].tolist()
        advantages = np.asarray(batch.advantages)[i, span]
        out.append(
            {
                "step": step,
                "group": int(rollout.group_ids[i]),
                "prompt": rollout.prompts[i].text,
                "completion": text,
                "answer": _plain(rollout.prompts[i].example.answer),
                "reward": float(rollout.scores.total[i]),
                "shaped_reward": float(prepared.rewards[i]),
                "components": {name: float(column[i]) for name, column in columns.items()},
                "advantage": float(advantages.mean()) if advantages.size else 0.0,
                "advantages": advantages.tolist(),
                "token_mask": np.asarray(batch.token_mask)[i, span].tolist(),
                "weight": float(np.asarray(batch.sample_weights)[i, 0]),
                "dropped": prepared.dropped[i],
                "overrides": [override._asdict() for override in rollout.overrides[i]],
                "stop_reason": STOP_REASONS[int(rows.stop_reasons[i])],
                "completion_length": len(ids),
                "tokens": ids,
                "token_texts": tokenizers.token_texts(tokenizer, ids),
                "generation_logprobs": np.asarray(rows.logprobs)[i, span].tolist(),
                "prev_logprobs": None
                if batch.prev_logprobs is None
                else np.asarray(batch.prev_logprobs)[i, span].tolist(),
            }
        )
    return out


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
