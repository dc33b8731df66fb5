"""Checkpoints of a run: saved in the background, kept by rule, distrusted when read back.

A checkpoint of step `s` is a folder of two items, written under a temporary name and renamed when
complete: `state` (every array of the train state, bit for bit) and `run` (one JSON object: data
position, seeds, whatever the loop hands over). A run with a critic has a third item, `critic`, its
train state: whoever wants the policy alone need not read it. An older checkpoint is deleted only
after a newer one is complete. A checkpoint that cannot be read back is set aside under
`damaged_<step>`, and the one before it is used.
"""

import contextlib
import dataclasses
import json
import logging
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from grpo_jax.scale import rules
from grpo_jax.train.state import TrainState

_TEMPORARY = ".orbax-checkpoint-tmp"
_FORMAT = 1  # of the `run` item


class CheckpointError(RuntimeError):
    """No checkpoint of a folder can be used."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and what to keep."""

    # folder of the checkpoints, local or gs://bucket/...; null = checkpoints/ in the run folder
    dir: str | None = None
    every: int = 10  # steps between checkpoints; 0 saves at the end only
    keep: int = 2  # newest checkpoints to keep
    keep_best: int = 0  # best checkpoints to keep besides, by `metric`
    metric: str = "eval/mean_reward"  # what best means; a checkpoint without it is never best
    higher_is_better: bool = True  # false for losses
    background: bool = True  # write while training goes on

    def __post_init__(self):
        for name, least in (("every", 0), ("keep", 1), ("keep_best", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least {least}")


class Restored(NamedTuple):
    """What was read back."""

    step: int
    state: TrainState
    run: dict[str, Any]
    metrics: dict[str, float]


class Checkpointer:
    """The checkpoints of one folder.

    Every process of a job calls the same methods in the same order; process 0 writes shared files.

    Attributes:
      failures: (step, reason) of each save that did not complete.
    """

    def __init__(
        self,
        folder: epath.PathLike,
        config: CheckpointConfig,
        *,
        say: Callable[[str], Any] | None = None,
        read_only: bool = False,
    ):
        """Open a folder, and make it if it is not there.

        Args:
          folder: where the checkpoints live; anything that `etils.epath` opens, `gs://` too.
          config: when to save and what to keep.
          read_only: look, and leave everything as it is; a run may be writing there right now.
          say: told about everything unusual, a line each. Default: this module's logger.
        """
        _silence_orbax()
        self.folder, self.config, self._read_only = _absolute(folder), config, read_only
        self.failures: list[tuple[int, str]] = []
        self._say = say or logging.getLogger(__name__).warning
        self._saving: int | None = None
        self._complete = True  # the last save
        self._scores: dict[int, float | None] = {}
        unfinished = [] if read_only else _unfinished(self.folder)
        for name in sorted(path.name for path in unfinished):
            self._say(f"checkpoint {name.split('.')[0]} was never finished; it is removed")
        self._manager = self._open()
        for step in self.steps():
            with contextlib.suppress(Exception):  # damaged: found out when it is restored
                self._scores[step] = self._score(self._read_run(step)["metrics"])

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_Retention(self.config, self._scores),
            enable_async_checkpointing=self.config.background,
            cleanup_tmp_directories=not self._read_only,
            create=not self._read_only,
            lightweight_initialize=True,
        )
        return ocp.CheckpointManager(self.folder, options=options)

    def steps(self) -> list[int]:
        """Complete checkpoints, oldest first."""
        return sorted(step for step in self._manager.all_steps() if step != self._saving)

    def latest_step(self) -> int | None:
        """The newest complete checkpoint."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """The best complete checkpoint by the metric, the newest among equals; else the newest."""
        scores = {step: self._scores.get(step) for step in self.steps()}
        ranked = rank(scores)
        return ranked[0] if ranked else self.latest_step()

    def due(self, step: int) -> bool:
        """Say whether the interval asks for a checkpoint after `step`."""
        return self.config.every > 0 and step % self.config.every == 0

    def save(
        self,
        step: int,
        state: TrainState,
        run: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Save a checkpoint; returns as soon as the arrays may change.

        A save that fails, now or in the background, is said and noted in `failures`; it never
        harms the checkpoints that are complete, and never stops the run.

        Args:
          step: names the checkpoint; one that exists is left as it is.
          state: the train state.
          run: whatever else the run needs to go on; JSON (tuples come back as lists).
          metrics: the step's metrics; the one that `config.metric` names decides what is best.

        Raises:
          TypeError: `run` is not JSON.
          ValueError: the folder was opened to be read only.
        """
        if self._read_only:
            raise ValueError(
                f"{self.folder} was opened with read_only=True; open it without to save"
            )
        record = {
            "format": _FORMAT,
            "run": dict(run),
            "metrics": {k: float(v) for k, v in (metrics or {}).items()},
            "layout": _layout(state),
        }
        json.dumps(record["run"])
        self.wait()
        if step in self.steps():
            return
        self._scores[step] = self._score(record["metrics"])
        if self.config.background:
            state = jax.tree.map(_detached, state)
        items: dict[str, Any] = {"run": ocp.args.JsonSave(record)}  # pyright: ignore[reportCallIssue]
        for name, part in _parts(state).items():
            items[name] = ocp.args.StandardSave(part)  # pyright: ignore[reportCallIssue]
        arguments = ocp.args.Composite(**items)
        self._saving = step
        try:
            self._manager.save(step, args=arguments, force=True)
        except Exception as error:
            self._failed(error)
        if not self.config.background:
            self.wait()

    def wait(self) -> bool:
        """Wait for the save in progress; say whether the last save is complete."""
        if self._saving is not None:
            try:
                self._manager.wait_until_finished()
                self._manager.check_for_errors()
                self._saving, self._complete = None, True
            except Exception as error:
                self._failed(error)
        return self._complete

    def _failed(self, error: Exception) -> None:
        """Note a failed save, and begin again from what the folder really holds."""
        step, self._saving, self._complete = self._saving, None, False
        reason = _reason(error)
        self.failures.append((-1 if step is None else step, reason))
        with contextlib.suppress(Exception):  # it may repeat the failure
            self._manager.close()
        if jax.process_index() == 0:
            for leftover in _unfinished(self.folder):
                if leftover.name.startswith(f"{step}."):
                    with contextlib.suppress(OSError):
                        leftover.rmtree()
        self._manager = self._open()
        last = self.latest_step()
        kept = "there is no earlier one" if last is None else f"the one of step {last} is complete"
        self._say(
            f"checkpoint {step} could not be written ({reason}); {kept}. {_space(self.folder)}"
        )

    def restore(self, target: TrainState, step: int | None = None) -> Restored | None:
        """Read the newest checkpoint that is sound.

        Args:
          target: shapes, dtypes and shardings to restore onto (`state.targets`), or a state; one
            without a critic leaves the checkpoint's critic unread.
          step: this checkpoint and no other.

        Returns:
          None when the folder holds no checkpoint.

        Raises:
          ValueError: the checkpoint is sound and belongs to another model or optimizer.
          CheckpointError: there are checkpoints, and none is sound.
        """
        self.wait()
        wanted = list(reversed(self.steps())) if step is None else [step]
        damaged: list[tuple[int, str]] = []
        for candidate in wanted:
            try:
                record = self._read_run(candidate)
            except Exception as error:
                damaged.append((candidate, _reason(error)))
                continue
            _check_layout(record["layout"], target, self.folder / str(candidate))
            try:
                state = self._read_state(candidate, target)
            except Exception as error:
                damaged.append((candidate, _reason(error)))
                continue
            self._set_aside(damaged, candidate)
            return Restored(candidate, state, record["run"], record["metrics"])
        if damaged:
            listing = "; ".join(f"step {s}: {reason}" for s, reason in damaged)
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be read ({listing}). Restore the folder from "
                "a copy, or move it away to begin again"
            )
        return None

    def _read_run(self, step: int) -> dict[str, Any]:
        arguments = ocp.args.Composite(run=ocp.args.JsonRestore())
        record = self._manager.restore(step, args=arguments)["run"]
        if record["format"] != _FORMAT:
            raise ValueError(f"format {record['format']} is unknown; this version reads {_FORMAT}")
        return record

    def _read_state(self, step: int, target: TrainState) -> TrainState:
        shapes = _parts(jax.tree.map(_target, target))
        items = {name: ocp.args.StandardRestore(part) for name, part in shapes.items()}  # pyright: ignore[reportCallIssue]
        read = self._manager.restore(step, args=ocp.args.Composite(**items))
        state = dataclasses.replace(
            read["state"], critic=read["critic"] if "critic" in items else None
        )
        return jax.block_until_ready(state)

    def _set_aside(self, damaged: Sequence[tuple[int, str]], used: int) -> None:
        for step, reason in damaged:
            self._say(
                f"checkpoint {step} is damaged ({reason}); going back to the one of step {used}"
            )
            if self._read_only:
                continue
            if jax.process_index() == 0:
                place = self.folder / f"damaged_{step}"
                place.rmtree(missing_ok=True)
                (self.folder / str(step)).rename(place)
            self._scores.pop(step, None)
        if damaged and not self._read_only:
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices("checkpoints set aside")
            self._manager.reload()

    def close(self) -> bool:
        """Wait, let go of the threads, and say whether the last save is complete."""
        complete = self.wait()
        self._manager.close()
        return complete

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _score(self, metrics: Mapping[str, float]) -> float | None:
        """The metric, turned so that more is better; None when it is missing or not a number."""
        value = metrics.get(self.config.metric)
        if value is None or math.isnan(value):
            return None
        return value if self.config.higher_is_better else -value


def _absolute(folder: epath.PathLike) -> epath.Path:
    """A path that holds wherever we stand; one in a bucket does already."""
    path = epath.Path(folder)
    return path if "://" in str(path) else path.absolute()


def _unfinished(folder: epath.Path) -> list[epath.Path]:
    """What saves that were cut off have left behind."""
    return list(folder.glob(f"*{_TEMPORARY}*")) if folder.exists() else []


def _space(folder: epath.Path) -> str:
    """How much room there is, where somebody can say it."""
    if "://" in str(folder):
        return f"The folder is {folder}"
    return f"Free space is {shutil.disk_usage(folder).free / 1e9:.1f} GB in {folder}"


def rank(scores: Mapping[int, float | None]) -> list[int]:
    """Order steps from best to worst, the newest first among equals; no score, no place."""
    known = [(score, step) for step, score in scores.items() if score is not None]
    return [step for _, step in sorted(known, reverse=True)]


class _Retention:
    """Keep the newest few, and the best few; implements Orbax's preservation policy."""

    def __init__(self, config: CheckpointConfig, scores: Mapping[int, float | None]):
        self._config, self._scores = config, scores

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        steps = [checkpoint.step for checkpoint in checkpoints]
        best = rank({step: self._scores.get(step) for step in steps})[: self._config.keep_best]
        keep = set(sorted(steps)[-self._config.keep :]) | set(best)
        return [step in keep for step in steps]


def _detached(x: jax.Array) -> jax.Array:
    """Copy an array that lives in host memory.

    There the writer looks at the array itself, and a step that is given the array to overwrite
    would wait until the checkpoint is written. From an accelerator the writer takes a copy anyway.
    """
    on_host = all(device.platform == "cpu" for device in x.sharding.device_set)
    return jnp.copy(x) if on_host else x


def _layout(state: TrainState) -> dict[str, list[Any]]:
    """Path -> [shape, dtype] of every array."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {rules.path_name(path): [list(x.shape), np.dtype(x.dtype).name] for path, x in leaves}


def _parts(state: TrainState) -> dict[str, TrainState]:
    """The items that a state is saved as."""
    policy = dataclasses.replace(state, critic=None)
    return {"state": policy} if state.critic is None else {"state": policy, "critic": state.critic}


def _check_layout(saved: Mapping[str, Any], target: TrainState, where: epath.Path) -> None:
    """Refuse a checkpoint of something else, naming the first difference."""
    wanted = _layout(target)
    if target.critic is None:  # whoever wants the policy alone may have it
        saved = {name: entry for name, entry in saved.items() if not name.startswith("critic/")}
    for name in [*wanted, *saved]:
        if saved.get(name) != wanted.get(name):
            raise ValueError(
                f"checkpoint {where} does not fit this run: {name} is {_describe(saved.get(name))} "
                f"there and {_describe(wanted.get(name))} here; use the model and optimizer "
                "settings it was saved with, or another folder"
            )


def _describe(entry: Sequence[Any] | None) -> str:
    return "absent" if entry is None else f"{entry[1]}{list(entry[0])}"


def _target(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))


def _reason(error: BaseException) -> str:
    """One readable line of an error that may carry pages."""
    text = " ".join(str(error).split()) or type(error).__name__
    for known in ("No space left on device", "File too large", "Disk quota exceeded"):
        if known in text:
            return known
    return text if len(text) <= 160 else text[:157] + "..."


class _NotOrbax(logging.Filter):
    """Drop what Orbax logs through absl: we say ourselves what a user needs to know."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname


def _silence_orbax() -> None:
    logger = logging.getLogger("absl")
    if any(isinstance(f, _NotOrbax) for f in logger.filters):
        return
    logger.addFilter(_NotOrbax())
    others = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not _left_by_orbax(unraisable):
            others(unraisable)

    sys.unraisablehook = hook


def _left_by_orbax(unraisable: Any) -> bool:
    """Say whether an error that Python cannot raise is the debris of a save or restore that failed.

    Python would print a page for each array, around the one line that we say.
    """
    code = getattr(unraisable.object, "cr_code", None)
    coroutine = code is not None and "orbax" in code.co_filename
    return coroutine or str(unraisable.exc_value) == "Event loop is closed"
