"""Which sampled rows are trained: every filter is a pure function that says what it removed.

Row filters take the weights of the rows, f[N], and return new ones with a `Report`; chain them in
this order: `unscored`, `overlong`, `mask_sample`, `constant_groups`, `sequence_error`. Filters
only multiply weights, so the counts that normalise the loss are taken after all of them. A row
removed here may still vote in its group's baseline: `votes` decides.

Dynamic sampling (DAPO) decides before all that which groups are kept at all, and whether to sample
again: `choose_groups`.

Everything is numpy on the host; `N` rows, `T` tokens. DAPO: https://arxiv.org/abs/2503.14476.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True)
class FiltersConfig:
    """What is thrown away before the update. Names follow the torch reference where it has them."""

    overlong_filtering: bool = False  # do not train completions that hit the token limit
    # weight 0 where all rewards of a prompt are equal; for gdpo: in each component by itself
    drop_constant_groups: bool = False
    seq_logprob_error_threshold: float | None = None  # mean e^|sampler − trainer| a row may have
    correct_reward: float = 1.0  # rewards from here up count as correct, in the reports
    constant_tolerance: float = 1e-6  # rewards closer than this · max(1, |reward|) are equal
    use_dynamic_sampling: bool = False  # sample until enough groups are not constant (see above)
    batch_multiplier: float = 1.0  # prompts drawn at a time, over rollout.prompts_per_step
    dynamic_sampling_max_gen_batches: int = 10  # batches sampled for one step, at most
    on_shortage: Literal["train", "error"] = "train"  # too few groups: train those, or stop

    def __post_init__(self):
        """Refuse what cannot be meant."""
        threshold = self.seq_logprob_error_threshold
        if threshold is not None and not threshold >= 1:
            raise ValueError(
                f"seq_logprob_error_threshold={threshold} is below 1, which a perfect match "
                "reaches, so every row would be removed; use a number from 1 up, such as 1.5"
            )
        if self.constant_tolerance < 0:
            raise ValueError(f"constant_tolerance={self.constant_tolerance} is negative; use 0")
        if self.batch_multiplier <= 0:
            raise ValueError(f"batch_multiplier={self.batch_multiplier} must be above 0")
        if self.batch_multiplier != 1 and not self.use_dynamic_sampling:
            raise ValueError(
                f"batch_multiplier={self.batch_multiplier} draws prompts that nothing would use; "
                "set use_dynamic_sampling=true, or batch_multiplier=1"
            )
        if self.dynamic_sampling_max_gen_batches < 1:
            raise ValueError(
                f"dynamic_sampling_max_gen_batches={self.dynamic_sampling_max_gen_batches} "
                "must be at least 1"
            )
        if self.on_shortage not in ("train", "error"):
            raise ValueError(f"on_shortage={self.on_shortage!r}; use 'train' or 'error'")

    def unread(self) -> dict[str, str]:
        """Keys that were set to another value than the default and that nothing reads, with why."""
        found = {}
        if not self.use_dynamic_sampling:
            for key in ("dynamic_sampling_max_gen_batches", "on_shortage"):
                if getattr(self, key) != getattr(FiltersConfig, key):
                    found[key] = "filters.use_dynamic_sampling is false"
            if not self.drop_constant_groups:
                if self.constant_tolerance != FiltersConfig.constant_tolerance:
                    found["constant_tolerance"] = "no filter looks for constant groups"
        return found


@dataclasses.dataclass(frozen=True)
class Report:
    """What one filter did."""

    name: str  # the reason that a dropped row is given
    before: int  # rows with weight before
    after: int  # rows with weight after
    correct_before: int  # correct rows among those before
    removed: np.ndarray  # bool[N]
    removed_correct: int
    removed_weight: float
    errors: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # suffix -> f64[rows]

    @staticmethod
    def join(parts: Sequence["Report"]) -> "Report":
        """What one filter did in several processes, rows in their order."""
        sums = ("before", "after", "correct_before", "removed_correct", "removed_weight")
        return Report(
            name=parts[0].name,
            removed=np.concatenate([part.removed for part in parts]),
            errors={
                suffix: np.concatenate([part.errors[suffix] for part in parts])
                for suffix in parts[0].errors
            },
            **{field: sum(getattr(part, field) for part in parts) for field in sums},
        )

    def metrics(self) -> dict[str, float]:
        """Numbers for the log, under `filters/<name>/`.

        correct_removed_share is the share of all correct rows that this filter removed: what it
        costs. removed_correct_share is the share of correct rows among the removed: whom it hits.
        """
        numbers = {
            "before": float(self.before),
            "after": float(self.after),
            "removed": float(self.before - self.after),
            "correct_removed_share": self.removed_correct / max(self.correct_before, 1),
            "removed_correct_share": self.removed_correct / max(self.before - self.after, 1),
        }
        return {
            f"filters/{self.name}/{key}": value for key, value in (numbers | self.extra).items()
        }

    @property
    def extra(self) -> dict[str, float]:
        """Maximum, mean and minimum of the errors, for a filter that measures some."""
        numbers: dict[str, float] = {}
        for suffix, errors in self.errors.items():
            numbers |= _spread(errors, suffix)
        return numbers


def is_correct(rewards: np.ndarray, correct_reward: float) -> np.ndarray:
    """bool[N]: reward ≥ correct_reward, of the unshaped rewards; an unscored row is not correct."""
    return np.nan_to_num(np.asarray(rewards, np.float64), nan=-np.inf) >= correct_reward


def remove(
    name: str,
    weights: np.ndarray,
    removed: np.ndarray,
    correct: np.ndarray,
    errors: dict[str, np.ndarray] | None = None,
) -> tuple[np.ndarray, Report]:
    """Set the weight of the removed rows to 0 and report; rows already at 0 are not counted."""
    weights = np.asarray(weights, np.float64)
    alive = weights != 0
    removed = np.asarray(removed, bool) & alive
    report = Report(
        name=name,
        before=int(alive.sum()),
        after=int((alive & ~removed).sum()),
        correct_before=int((alive & correct).sum()),
        removed=removed,
        removed_correct=int((removed & correct).sum()),
        removed_weight=float(weights[removed].sum()),
        errors=errors or {},
    )
    return np.where(removed, 0.0, weights), report


def unscored(
    weights: np.ndarray, scored: np.ndarray, correct: np.ndarray
) -> tuple[np.ndarray, Report]:
    """Remove rows without a reward, for example with a gold answer that cannot be parsed."""
    return remove("unscored", weights, ~np.asarray(scored, bool), correct)


def overlong(
    weights: np.ndarray, truncated: np.ndarray, correct: np.ndarray
) -> tuple[np.ndarray, Report]:
    """Remove completions that the token limit ended (DAPO's overlong filtering)."""
    return remove("overlong", weights, truncated, correct)


def mask_sample(
    weights: np.ndarray, masked: np.ndarray, correct: np.ndarray
) -> tuple[np.ndarray, Report]:
    """Remove the rows that the rollout itself asks not to train."""
    return remove("mask_sample", weights, masked, correct)


def constant_groups(
    weights: np.ndarray,
    rewards: np.ndarray,
    groups: np.ndarray,
    correct: np.ndarray,
    *,
    tolerance: float = 1e-6,
    valid: np.ndarray | None = None,
) -> tuple[np.ndarray, Report]:
    """Remove groups whose rewards are all equal, so that they leave the denominators too."""
    removed = ~informative(rewards, groups, tolerance=tolerance, valid=valid)
    return remove("constant_group", weights, removed, correct)


def informative(
    rewards: np.ndarray,
    groups: np.ndarray,
    *,
    tolerance: float = 1e-6,
    valid: np.ndarray | None = None,
) -> np.ndarray:
    """bool[N]: max − min > tolerance · max(1, |reward|) over the valid rows of the row's group.

    Of several columns, f[N, C], one that differs is enough; NaN has no vote. Decided for whole
    groups, and never by a leave-one-out deviation, which would drop the unique success and keep its
    failing siblings. Pass the rewards before shaping, so that a length penalty alone does not make
    a group informative.
    """
    rewards = np.asarray(rewards, np.float64).reshape(len(groups), -1)
    votes = ~np.isnan(rewards)
    if valid is not None:
        votes &= np.asarray(valid, bool)[:, None]
    _, inverse = np.unique(groups, return_inverse=True)
    shape = int(inverse.max(initial=-1)) + 1, rewards.shape[1]
    low, high = np.full(shape, np.inf), np.full(shape, -np.inf)
    np.minimum.at(low, inverse, np.where(votes, rewards, np.inf))
    np.maximum.at(high, inverse, np.where(votes, rewards, -np.inf))
    seen = np.isfinite(low) & np.isfinite(high)
    low, high = np.where(seen, low, 0), np.where(seen, high, 0)
    noise = tolerance * np.maximum(1, np.maximum(np.abs(low), np.abs(high)))
    return np.any(high - low > noise, axis=1)[inverse]


def sequence_errors(
    token_mask: np.ndarray,
    sample_weights: np.ndarray,
    prev_logprobs: np.ndarray,
    generation_logprobs: np.ndarray,
    *,
    filtering_on: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """How far sampler and trainer disagree on each row.

        e_i = Σ_t e^{|g − p|} / n_i        over the row's n_i trained tokens

    Tokens outside the support (−inf in p or g, where top-k/top-p is on) are left out. The weight of
    the row stands outside: down-weighted rows are not made to look more exact. The first column
    has no predecessor and is never read.

    Returns:
      e f64[N] (0 where n = 0; inf or NaN where something is wrong) and n i64[N], tokens.
    """
    p = np.asarray(prev_logprobs, np.float64)[:, 1:]
    g = np.asarray(generation_logprobs, np.float64)[:, 1:]
    mask = (np.asarray(token_mask)[:, 1:] != 0) & (np.asarray(sample_weights)[:, None] != 0)
    if filtering_on:
        mask = mask & ~np.isneginf(p) & ~np.isneginf(g)
    with np.errstate(over="ignore", invalid="ignore"):
        gaps = np.exp(np.abs(np.where(mask, g, 0) - np.where(mask, p, 0)))
        counts = mask.sum(axis=1)
        errors = np.where(mask, gaps, 0).sum(axis=1) / np.maximum(counts, 1)
    return errors, counts


def sequence_error(
    *,
    token_mask: np.ndarray,
    sample_weights: np.ndarray,
    prev_logprobs: np.ndarray,
    generation_logprobs: np.ndarray,
    correct: np.ndarray,
    threshold: float | None,
    filtering_on: bool,
) -> tuple[np.ndarray, Report]:
    """Remove rows on which sampler and trainer disagree: keep where e ≤ threshold.

    NaN and inf fail; a row without any comparable token stays. A threshold of None only measures.

    Args:
      token_mask: [N, T]; sample_weights: f[N]; prev_logprobs, generation_logprobs: f[N, T] nats.
      correct: bool[N], for the report.
      filtering_on: top-k, top-p or min-p was on, so that −inf is legal.
    """
    errors, counts = sequence_errors(
        token_mask, sample_weights, prev_logprobs, generation_logprobs, filtering_on=filtering_on
    )
    measured = counts > 0
    removed = np.zeros(len(errors), bool)
    if threshold is not None:
        removed = measured & ~(errors <= threshold)
    found = {"": errors[measured], "_after_mask": errors[measured & ~removed]}
    return remove("sequence_error", sample_weights, removed, correct, found)


def _spread(errors: np.ndarray, suffix: str) -> dict[str, float]:
    """Maximum, mean and minimum under the reference's names; 0 where there is nothing."""
    if not errors.size:
        errors = np.zeros(1)
    statistics = dict(max=errors.max(), mean=errors.mean(), min=errors.min())
    return {f"{k}_seq_mult_prob_error{suffix}": float(v) for k, v in statistics.items()}


def votes(scored: np.ndarray, weights: np.ndarray, *, filtered_rows_vote: bool) -> np.ndarray:
    """bool[N]: rows that count in their group's baseline.

    An unscored row never does. A row that a filter removed does by default, as in the torch
    reference: without its vote, truncated failures would no longer pull their baseline down.
    """
    scored = np.asarray(scored, bool)
    return scored if filtered_rows_vote else scored & (np.asarray(weights) != 0)


def dropped_reasons(reports: Sequence[Report], rows: int) -> list[str | None]:
    """The filter that removed each row, or None for rows that are trained."""
    reasons: list[str | None] = [None] * rows
    for report in reports:
        for row in np.flatnonzero(report.removed):
            reasons[row] = report.name
    return reasons


def unique_groups(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Group ids of several batches, joined so that no id of one batch meets one of another."""
    out, offset = [], 0
    for part in parts:
        _, inverse = np.unique(part, return_inverse=True)
        out.append(inverse + offset)
        offset += int(inverse.max(initial=-1)) + 1
    return np.concatenate(out) if out else np.zeros(0, int)


class Choice(NamedTuple):
    """What dynamic sampling makes of the batches so far."""

    rows: np.ndarray  # i[M], rows to train, whole groups in the order they came
    missing: int  # groups short of those wanted
    metrics: dict[str, float]


def choose_groups(
    rewards: np.ndarray,
    groups: np.ndarray,
    wanted: int,
    config: FiltersConfig,
    *,
    valid: np.ndarray | None = None,
) -> Choice:
    """Keep the first `wanted` informative groups, whole; `enough` says whether to sample again.

    Args:
      rewards: f[N] or f[N, C], unshaped, of everything sampled for this step so far.
      groups: i[N], see `unique_groups`.
      wanted: groups a step trains.
    """
    groups = np.asarray(groups)
    keep = informative(rewards, groups, tolerance=config.constant_tolerance, valid=valid)
    ids, first = np.unique(groups[keep], return_index=True)
    ids = ids[np.argsort(first)]  # in the order in which they were sampled
    chosen = np.isin(groups, ids[:wanted])
    missing = max(wanted - len(ids), 0)
    metrics = {
        "groups_sampled": float(len(np.unique(groups))),
        "groups_informative": float(len(ids)),
        "num_discarded_valid_samples": float(keep.sum() - chosen.sum()),
        "groups_missing": float(missing),
    }
    return Choice(
        rows=np.flatnonzero(chosen),
        missing=missing,
        metrics={f"dynamic_sampling/{name}": value for name, value in metrics.items()},
    )


def enough(missing: int, wanted: int, batches: int, config: FiltersConfig) -> bool:
    """Say whether a step has its groups, or must do with those it has.

    Args:
      missing: groups short of `wanted`, over all processes, after `batches` batches.
    Raises:
      ValueError: the batches are used up, groups are missing, and `on_shortage` is "error".
    """
    last = batches >= config.dynamic_sampling_max_gen_batches
    if missing and last and config.on_shortage == "error":
        raise ValueError(
            f"{wanted - missing} of {wanted} groups have unequal rewards after {batches} batches "
            "of prompts; raise dynamic_sampling_max_gen_batches, choose prompts of other "
            "difficulty, or set on_shortage='train'"
        )
    return not missing or last
