r"""Reward scaling, the overlong penalty, and the penalty for not stopping, in that order.

Pure numpy functions of whole rollouts, in the precision of the rewards they are given.

Symbols: `N` completions, `L` length of a completion in tokens.
Overlong penalty: DAPO, arXiv:2503.14476, equation 13.
"""

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ScalingConfig:
    """Map rewards linearly from a source interval to a target interval."""

    enabled: bool = False  # scale rewards
    source_min: float = 0.0  # rewards outside the source interval are clipped to it
    source_max: float = 1.0  # the other end of it
    target_min: float = 0.0  # what source_min becomes
    target_max: float = 1.0  # what source_max becomes

    def __post_init__(self):
        ends = [self.source_min, self.source_max, self.target_min, self.target_max]
        if not all(math.isfinite(end) for end in ends):
            raise ValueError(f"reward scaling has ends {ends}; all four must be finite")
        if self.enabled and not self.source_min < self.source_max:
            raise ValueError(
                f"source_min = {self.source_min} is not below source_max = {self.source_max}, so "
                "the scaling would divide by zero; give the interval that rewards really span"
            )


@dataclasses.dataclass(frozen=True)
class ShapingConfig:
    """Penalties on length and on truncation; key names are those of the torch reference."""

    enabled: bool = False  # penalise long or truncated completions
    overlong_buffer_length: int | None = None  # tokens before the maximum where the penalty begins
    overlong_buffer_penalty: float | None = None  # at the maximum length
    max_response_length: int | None = None  # tokens
    overlong_penalty_floor: float | None = None  # e.g. -1.0; null = grows on past the maximum
    stop_properly_penalty_coef: float | None = None  # factor on truncated rewards, in [0, 1]
    # A factor below one improves a negative reward. False never lets truncation improve a reward.
    stop_properly_scales_negative: bool = False  # true = as the torch reference
    scaling: ScalingConfig = ScalingConfig()  # applied first, to the components too

    def __post_init__(self):
        if self.enabled and self.stop_properly_penalty_coef is not None:
            _check_stop_properly(self)
        elif self.enabled:
            _check_overlong(self)

    def unread(self) -> dict[str, str]:
        """Keys that were set to another value than the default and that nothing reads, with why."""
        found = {}
        for field in dataclasses.fields(self):
            if field.name in ("enabled", "scaling") or getattr(self, field.name) == field.default:
                continue
            truncation = field.name.startswith("stop_properly")
            if not self.enabled:
                found[field.name] = "shaping.enabled is false"
            elif self.stop_properly_penalty_coef is not None and not truncation:
                found[field.name] = "stop_properly_penalty_coef is set and takes its place"
            elif self.stop_properly_penalty_coef is None and truncation:
                found[field.name] = "stop_properly_penalty_coef is null"
        if not self.scaling.enabled and self.scaling != ScalingConfig():
            found["scaling"] = "shaping.scaling.enabled is false"
        return found


class ShapedRewards(NamedTuple):
    """What the advantages see, and what it was made from."""

    total: np.ndarray  # f[N]
    unshaped: np.ndarray  # f[N] scaled, before the penalties
    components: dict[str, np.ndarray]  # f[N] each, scaled


def shape_rewards(
    total: np.ndarray,
    config: ShapingConfig,
    *,
    lengths: np.ndarray | None = None,
    truncated: np.ndarray | None = None,
    components: Mapping[str, np.ndarray] | None = None,
) -> ShapedRewards:
    """Scale, then penalise, the rewards of a rollout.

    Args:
        total: f[N].
        lengths: i[N], all generated tokens of a row, over every turn.
        truncated: bool[N], the token limit ended the row.
        components: f[N] each; scaled like the total, never penalised; NaN (no verdict) stays.

    Raises:
        ValueError: the configuration needs `lengths` or `truncated` and they are missing.
    """
    total = np.asarray(total)
    scaled = scale(total, config.scaling)
    columns = {k: scale(np.asarray(v), config.scaling) for k, v in (components or {}).items()}
    shaped = scaled
    if config.enabled and config.stop_properly_penalty_coef is not None:
        shaped = _penalise_truncation(scaled, _given(truncated, "truncated", total), config)
    elif config.enabled:
        shaped = scaled + overlong_penalty(_given(lengths, "lengths", total), config, scaled.dtype)
    return ShapedRewards(shaped, scaled, columns)


def scale(rewards: np.ndarray, config: ScalingConfig) -> np.ndarray:
    """Map rewards from the source interval to the target interval.

        r ← t_min + (clip(r, s_min, s_max) - s_min) / (s_max - s_min) · (t_max - t_min)

    NaN passes through; a reward outside the source interval is clipped with a warning.
    """
    if not config.enabled:
        return rewards
    low, high = config.source_min, config.source_max
    outside = int(((rewards < low) | (rewards > high)).sum())
    if outside:
        _LOG.warning(
            "%d of %d rewards are outside [%g, %g] and were clipped to it",
            outside, rewards.size, low, high,
        )  # fmt: skip
    fraction = (np.clip(rewards, low, high) - low) / (high - low)
    return config.target_min + fraction * (config.target_max - config.target_min)


def overlong_penalty(
    lengths: np.ndarray, config: ShapingConfig, dtype: np.dtype | type = np.float64
) -> np.ndarray:
    """Penalise length, linearly from the start of the buffer.

        E = max_response_length - buffer
        penalty(L) = max(min(-(L - E) / buffer · p, 0), floor)

    Without a floor it keeps growing past the maximum length, as in the torch reference: for a
    buffer of 20, a maximum of 100 and p = 1, lengths 90, 100, 101 give -0.5, -1, -1.05.
    """
    buffer, limit = config.overlong_buffer_length, config.max_response_length
    assert buffer is not None and limit is not None and config.overlong_buffer_penalty is not None
    over = np.asarray(lengths).astype(dtype) - (limit - buffer)
    penalty = np.minimum(-over / buffer * config.overlong_buffer_penalty, 0)
    if config.overlong_penalty_floor is not None:
        penalty = np.maximum(penalty, config.overlong_penalty_floor)
    return penalty.astype(dtype)


def _penalise_truncation(
    rewards: np.ndarray, truncated: np.ndarray, config: ShapingConfig
) -> np.ndarray:
    """Multiply truncated rewards: r ← min(r, c·r), or c·r where the reference is followed."""
    scaled = rewards * rewards.dtype.type(config.stop_properly_penalty_coef)
    if not config.stop_properly_scales_negative:
        scaled = np.minimum(rewards, scaled)
    return np.where(np.asarray(truncated, bool), scaled, rewards)


def _given(values: np.ndarray | None, name: str, rewards: np.ndarray) -> np.ndarray:
    if values is None:
        raise ValueError(f"this reward shaping needs {name} of every row; pass {name}=…")
    if np.shape(values) != rewards.shape:
        raise ValueError(f"{name} has shape {np.shape(values)}, the rewards have {rewards.shape}")
    return np.asarray(values)


def _check_stop_properly(config: ShapingConfig) -> None:
    coefficient = config.stop_properly_penalty_coef
    if coefficient is None or not 0 <= coefficient <= 1:
        raise ValueError(
            f"stop_properly_penalty_coef = {coefficient} is outside [0, 1]; 0 takes the whole "
            "reward of a truncated response, 1 takes nothing"
        )


def _check_overlong(config: ShapingConfig) -> None:
    keys = ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length")
    missing = [key for key in keys if getattr(config, key) is None]
    if missing:
        raise ValueError(
            f"reward shaping is enabled but {', '.join(missing)} is not set; set all of "
            f"{', '.join(keys)}, or stop_properly_penalty_coef, or enabled: false"
        )
    buffer, limit = config.overlong_buffer_length, config.max_response_length
    penalty, floor = config.overlong_buffer_penalty, config.overlong_penalty_floor
    assert buffer is not None and limit is not None and penalty is not None
    if not 1 <= buffer <= limit:
        raise ValueError(
            f"overlong_buffer_length = {buffer} must be between 1 and max_response_length = "
            f"{limit}; for no penalty set enabled: false"
        )
    if not (math.isfinite(penalty) and penalty >= 0):
        raise ValueError(
            f"overlong_buffer_penalty = {penalty} must be 0 or more; it is taken off at the maximum"
        )
    if floor is not None and not floor <= 0:
        raise ValueError(f"overlong_penalty_floor = {floor} must be 0 or less, e.g. {-penalty}")
