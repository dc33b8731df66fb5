"""The run folder: whether to begin, to go on, or to refuse, and what marks a run as finished."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
) -> Plan:
    """Decide between starting and resuming; nothing is touched yet.

    Args:
      folder: the run folder.
      resume: "never" always starts.
      changed: key -> (value of the run in the folder, value now), keys that matter for resuming.

    Raises:
      ValueError: there is an unfinished run with another configuration.
    """
    if not (folder / CONFIG).exists():
        return Plan("start", f"starting a new run in {folder}")
    if (folder / RESULT).exists() or resume == "never":
        state = "a finished run" if (folder / RESULT).exists() else "an unfinished run"
        aside = _free_name(folder)
        said = f"{folder} holds {state}, which moves to {aside}; starting a new one"
        return Plan("start", said, aside)
    if not has_checkpoint(folder):
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


def has_checkpoint(folder: Path) -> bool:
    """Say whether anything in the folder looks like a complete checkpoint."""
    return any(p.name.isdigit() for p in (folder / CHECKPOINTS).glob("*"))


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
