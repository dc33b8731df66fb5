"""Write configs/base.yaml: every key, its default, and the comment that stands in the code.

Run after a configuration dataclass has changed: `python scripts/make_base_config.py`.
"""

import dataclasses
import textwrap
from pathlib import Path
from typing import Any

import yaml
from tyro import _docstrings  # reads the comments that `--help` shows

from grpo_jax import config as configs

TARGET = Path(__file__).parent.parent / "configs" / "base.yaml"
MISSING: list[str] = []
HEADER = """\
# Every key with its default. A config names only what it changes; anything can be overridden on the
# command line: grpo-jax train CONFIG --section.key value. Lengths are in tokens, log-probabilities
# in nats, times in seconds. Written by scripts/make_base_config.py from the comments in the code.
"""


def lines(section: Any, indent: int = 0) -> list[str]:
    """The YAML of one dataclass, a comment on each key."""
    out, pad = [], "  " * indent
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            title = (value.__doc__ or "").strip().splitlines()[0]
            out += [] if indent else [""]
            out += [f"{pad}{field.name}:  # {title}", *lines(value, indent + 1)]
            continue
        comment = " ".join(
            (_docstrings.get_field_docstring(type(section), field.name, ()) or "").split()
        )
        if not comment:
            MISSING.append(f"{type(section).__name__}.{field.name}")
            continue
        if isinstance(value, tuple) and any(dataclasses.is_dataclass(v) for v in value):
            out.append(f"{pad}{field.name}:  # {comment}")
            for item in value:
                inner = lines(item, indent + 2)
                inner[0] = inner[0][: 2 * indent + 2] + "- " + inner[0].lstrip()
                out += inner
            continue
        text = yaml.safe_dump(configs.to_plain(value), default_flow_style=True, width=10**6)
        out += commented(
            f"{pad}{field.name}: {text.removesuffix('...' + chr(10)).strip()}", comment
        )
    return out


def commented(entry: str, comment: str) -> list[str]:
    """An entry with its comment, beside it if there is room and above it if not."""
    if len(entry) + len(comment) + 4 <= 100:
        return [f"{entry}  # {comment}"]
    pad = " " * (len(entry) - len(entry.lstrip()))
    return [f"{pad}# {part}" for part in textwrap.wrap(comment, 96 - len(pad))] + [entry]


if __name__ == "__main__":
    text = HEADER + "\n".join(lines(configs.Config())) + "\n"
    if MISSING:
        raise SystemExit(f"fields without a comment: {', '.join(MISSING)}")
    TARGET.write_text(text)
    print(f"wrote {TARGET}")
