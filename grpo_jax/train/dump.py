"""One step's loss inputs as a file, written by any trainer and read by `grpo-jax parity`.

The file is an `.npz`. `B` rows, `T` tokens; everything is aligned with the tokens (entry `t` speaks
of token `t`), except the arrays named `*[B, T-1]`, whose entry `t` speaks of token `t + 1`.

    config                     JSON text: keys of the loss configuration
    logprobs [B, T]            current log-probabilities, or next_token_logprobs [B, T-1];
                               without either the previous ones stand in
    unfiltered_logprobs [B, T] or curr_logprobs_unfiltered [B, T-1]; optional
    policy_support_mask [B, T-1]   optional: False where top-k/top-p excludes the token
    generation_logprobs, advantages, token_mask [B, T]
    prev_logprobs, reference_policy_logprobs [B, T]   where the configuration needs them
    sample_mask [B] or [B, T], rewards [B] or [B, T]  optional, default ones / absent
    tokens, segment_ids [B, T] optional
    filtering_on               optional flag: top-k, top-p or min-p was active, so that -inf means
                               "outside the support"; default: policy_support_mask is in the file
    global_valid_toks, global_valid_seqs, global_positive_toks   optional scalars
    global_survivors [2]       optional: denominators of the actor term and of the rest, where
                               truncated_is_normalization is "survivors"
    theirs_loss, theirs_grad [B, T] or [B, T-1], theirs_logprobs [B, T] or [B, T-1],
    theirs_metrics (JSON text)  optional: what another implementation made of the same inputs

Log-probabilities are in nats; -inf is legal where a filter is on.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any

import numpy as np

from grpo_jax.core import masks
from grpo_jax.core.batch import Batch, Counts, TokenScores
from grpo_jax.core.loss_config import LossConfig

Array = np.ndarray
HostArray = Any  # a numpy array in a field that is declared as a device array


@dataclasses.dataclass(frozen=True)
class Theirs:
    """What somebody else computed from the same inputs; each part may be missing."""

    loss: float | None = None
    grad: Array | None = None  # [B, T] with respect to the log-probabilities
    logprobs: Array | None = None  # [B, T]
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Dump:
    """One step as host arrays, in the precision of the file."""

    scores: TokenScores
    batch: Batch
    counts: Counts
    config: LossConfig
    filtering_on: bool
    max_segments: int
    theirs: Theirs
    notes: tuple[str, ...] = ()


def dump_step(
    path: str | os.PathLike,
    batch: Batch,
    counts: Counts,
    scores: TokenScores | None,
    loss_config: LossConfig,
    *,
    filtering_on: bool = False,
) -> pathlib.Path:
    """Write one step; the file appears complete or not at all.

    Args:
      path: target, ends in `.npz`; missing folders are made.
      batch: host or fully addressable device arrays.
      counts: of the whole global batch.
      scores: the current policy's scores, or None when only the inputs are at hand.
      loss_config: what the step was trained with.
      filtering_on: as given to the loss.

    Returns:
      The path written.
    """
    path = pathlib.Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"a dump must end in .npz, not {str(path)!r}; rename it")
    arrays: dict[str, Any] = {
        "config": json.dumps(dataclasses.asdict(loss_config)),
        "filtering_on": np.asarray(filtering_on),
    }
    for ours, theirs in _BATCH_NAMES.items():
        value = getattr(batch, ours)
        if value is not None:
            arrays[theirs] = _host(value)
    if scores is not None:
        arrays |= {"logprobs": _host(scores.logprobs)}
        if scores.unfiltered is not None:
            arrays["unfiltered_logprobs"] = _host(scores.unfiltered)
        for name in ("entropy", "kept_mass"):
            if getattr(scores, name) is not None:
                arrays[name] = _host(getattr(scores, name))
    for ours, theirs in _COUNT_NAMES.items():
        value = getattr(counts, ours)
        if value is not None:
            arrays[theirs] = _host(value)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with open(partial, "wb") as file:
        np.savez_compressed(file, **arrays)
    os.replace(partial, path)
    return path


_BATCH_NAMES = dict(
    tokens="tokens",
    segment_ids="segment_ids",
    positions="positions",
    token_mask="token_mask",
    sample_weights="sample_mask",
    advantages="advantages",
    generation_logprobs="generation_logprobs",
    prev_logprobs="prev_logprobs",
    reference_logprobs="reference_policy_logprobs",
    rewards="rewards",
)
_COUNT_NAMES = dict(
    tokens="global_valid_toks",
    sequences="global_valid_seqs",
    positives="global_positive_toks",
    survivors="global_survivors",
)


def _host(value: Any) -> Array:
    """A numpy array in a dtype that numpy itself can store."""
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype.kind not in "biuf" else array


def load_dump(path: str | os.PathLike) -> Dump:
    """Read a file of the schema above.

    Raises:
      ValueError: naming the array that is missing, unknown, or of the wrong shape.
    """
    with np.load(path, allow_pickle=False) as file:
        data = _Arrays(str(path), {name: file[name] for name in file.files})
    config = LossConfig.from_dict(json.loads(data.text("config")))
    current: HostArray = data.tokens("logprobs", "next_token_logprobs")
    notes = ()
    if current is None:
        current = data.need("prev_logprobs")
        notes = ("no current log-probabilities in the file: the previous ones stand in",)
    support = data.get("policy_support_mask")
    if support is not None:
        outside = np.pad(~data.shaped("policy_support_mask", (data.rows, data.width - 1)), _LEFT)
        current = np.where(outside, -np.inf, current)
    batch = _read_batch(data)
    return Dump(
        scores=TokenScores(
            logprobs=current,
            unfiltered=data.tokens("unfiltered_logprobs", "curr_logprobs_unfiltered"),
            entropy=data.tokens("entropy"),
            kept_mass=data.tokens("kept_mass"),
        ),
        batch=batch,
        counts=_read_counts(data, batch),
        config=config,
        filtering_on=bool(data.values.get("filtering_on", support is not None)),
        max_segments=_most_segments(batch),
        theirs=Theirs(
            loss=None if "theirs_loss" not in data.values else float(data.values["theirs_loss"]),
            grad=data.tokens("theirs_grad", "theirs_grad"),
            logprobs=data.tokens("theirs_logprobs", "theirs_logprobs"),
            metrics=json.loads(data.text("theirs_metrics", "{}")),
        ),
        notes=notes,
    )


_LEFT = ((0, 0), (1, 0))


class _Arrays:
    """The arrays of one file, brought to [B, T]."""

    def __init__(self, path: str, values: dict[str, Array]):
        unknown = sorted(set(values) - _KNOWN)
        if unknown:
            raise ValueError(f"{path}: unknown arrays {unknown}; known are {sorted(_KNOWN)}")
        self.path, self.values = path, values
        if "token_mask" not in values:
            raise ValueError(f"{path}: token_mask [B, T] is missing; write it")
        if values["token_mask"].ndim != 2:
            raise ValueError(
                f"{path}: token_mask has shape {values['token_mask'].shape}, not [B, T]"
            )
        self.rows, self.width = values["token_mask"].shape

    def get(self, name: str) -> HostArray:
        return self.values.get(name)

    def text(self, name: str, default: str | None = None) -> str:
        if name in self.values:
            return str(self.values[name])
        if default is None:
            raise ValueError(f"{self.path}: {name} (JSON text) is missing; write it")
        return default

    def shaped(self, name: str, *shapes: tuple[int, ...]) -> Array:
        value = self.values[name]
        if value.shape not in shapes:
            wanted = " or ".join(map(str, shapes))
            raise ValueError(f"{self.path}: {name} has shape {value.shape}, must be {wanted}")
        return value

    def tokens(self, name: str, shifted: str | None = None) -> HostArray:
        """[B, T] from `name` [B, T] or `shifted` [B, T-1], or None."""
        full, short = (self.rows, self.width), (self.rows, self.width - 1)
        if name in self.values:
            shapes = (full, short) if name == shifted else (full,)
            value = self.shaped(name, *shapes)
        elif shifted in self.values:
            value = self.shaped(shifted, short)
        else:
            return None
        return np.pad(value, _LEFT) if value.shape == short else value

    def need(self, name: str) -> HostArray:
        value = self.tokens(name)
        if value is None:
            raise ValueError(f"{self.path}: {name} [B, T] is missing; write it")
        return value

    def spread(self, name: str) -> HostArray:
        """[B, T] from [B] or [B, T], or None."""
        if name not in self.values:
            return None
        value = self.shaped(name, (self.rows,), (self.rows, self.width))
        return np.repeat(value[:, None], self.width, axis=1) if value.ndim == 1 else value


def _read_batch(data: _Arrays) -> Batch:
    full = (data.rows, data.width)
    default: HostArray = np.zeros(full, np.int32)
    counted: HostArray = np.tile(np.arange(data.width, dtype=np.int32), (data.rows, 1))
    ones: HostArray = np.ones(full, np.float32)
    mask: HostArray = data.values["token_mask"] != 0
    segments = data.tokens("segment_ids")
    positions, weights = data.tokens("positions"), data.spread("sample_mask")
    tokens = data.tokens("tokens")
    return Batch(
        tokens=default if tokens is None else tokens,
        segment_ids=default + 1 if segments is None else segments,
        positions=counted if positions is None else positions,
        token_mask=mask,
        sample_weights=ones if weights is None else weights,
        advantages=data.need("advantages"),
        generation_logprobs=data.need("generation_logprobs"),
        prev_logprobs=data.tokens("prev_logprobs"),
        reference_logprobs=data.tokens("reference_policy_logprobs"),
        rewards=data.spread("rewards"),
    )


def _most_segments(batch: Batch) -> int:
    return max(int(np.asarray(batch.segment_ids).max(initial=0)), 1)


def _read_counts(data: _Arrays, batch: Batch) -> Counts:
    """The counts in the file, or those of the file's own rows."""
    own = masks.count(batch, max_segments=_most_segments(batch))
    found = {k: data.get(name) for k, name in _COUNT_NAMES.items()}
    return Counts(**{k: getattr(own, k) if v is None else v for k, v in found.items()})


_KNOWN = {
    *_BATCH_NAMES.values(),
    *_COUNT_NAMES.values(),
    *(
        "config",
        "filtering_on",
        "logprobs",
        "next_token_logprobs",
        "unfiltered_logprobs",
        "entropy",
        "kept_mass",
    ),
    *("curr_logprobs_unfiltered", "policy_support_mask"),
    *("theirs_loss", "theirs_grad", "theirs_logprobs", "theirs_metrics"),
}
