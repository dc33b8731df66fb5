"""The run folder: whether to begin, to go on, or to refuse, and what marks a run as finished."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from etils import epath

CONFIG, RESULT, CHECKPOINTS = "config.yaml", "result.json", "checkpoints"


class Plan(NamedTuple):
    """What to do with a run folder."""

    action: Literal["start", "resume"]
    said: str  # one line for the user
    aside: Path | None = None  # where `prepare` moves an old run that is in the way


def plan(
    folder: Path,
    resume: Literal["auto", "never"],
    changed: Mapping[str, tuple[Any, Any]],
    checkpoints: epath.PathLike | None = None,
) -> Plan:
    """Decide between starting and resuming; nothing is touched yet.

    Args:
      folder: the run folder.
      resume: "never" always starts.
      changed: key -> (value of the run in the folder, value now), keys that matter for resuming.
      checkpoints: where the run's checkpoints are, if not in its folder.

    Raises:
      ValueError: there is an unfinished run with another configuration, or checkpoints elsewhere
        that a new run would mix with its own.
    """
    chosen = _plan(folder, resume, changed, checkpoints_of(folder, checkpoints))
    if checkpoints is not None and chosen.action == "start":
        if has_checkpoint(epath.Path(checkpoints)):
            raise ValueError(
                f"checkpoint.dir = {str(checkpoints)!r} holds checkpoints of another run, and "
                f"{folder} is to start a new one; name another folder, or move them away"
            )
    return chosen


def checkpoints_of(folder: Path, checkpoints: epath.PathLike | None) -> epath.Path:
    """Where the checkpoints of a run are: in its folder, unless the config says otherwise."""
    return epath.Path(folder / CHECKPOINTS if checkpoints is None else checkpoints)


def _plan(
    folder: Path,
    resume: Literal["auto", "never"],
    changed: Mapping[str, tuple[Any, Any]],
    checkpoints: epath.Path,
) -> Plan:
    if not (folder / CONFIG).exists():
        return Plan("start", f"starting a new run in {folder}")
    if (folder / RESULT).exists() or resume == "never":
        state = "a finished run" if (folder / RESULT).exists() else "an unfinished run"
        aside = _free_name(folder)
        said = f"{folder} holds {state}, which moves to {aside}; starting a new one"
        return Plan("start", said, aside)
    if not has_checkpoint(checkpoints) and "checkpoint.dir" not in changed:
        aside = _free_name(folder)
        said = f"the run in {folder} had saved nothing yet (it moves to {aside}); starting it again"
        return Plan("start", said, aside)
    if changed:
        listing = "; ".join(f"{k}: {old!r} there, {new!r} now" for k, (old, new) in changed.items())
        raise ValueError(
            f"{folder} holds an unfinished run with other settings ({listing}). Set them back to "
            "resume it, or choose another run.dir, or set run.resume to never to begin again "
            "(the old run is moved aside)"
        )
    return Plan("resume", f"resuming the unfinished run in {folder}")


def prepare(folder: Path, chosen: Plan, config: str) -> None:
    """Move an old run aside (never delete it), make the folder, and write the config into it."""
    if chosen.aside is not None:
        folder.rename(chosen.aside)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(config)


def has_checkpoint(folder: epath.Path) -> bool:
    """Say whether anything in a folder of checkpoints looks like a complete one."""
    return folder.exists() and any(path.name.isdigit() for path in folder.iterdir())


def finish(folder: Path, result: Mapping[str, Any]) -> None:
    """Mark a run as finished, with its result."""
    temporary = folder / (RESULT + ".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(folder / RESULT)


def _free_name(folder: Path) -> Path:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    return aside
