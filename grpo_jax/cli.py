"""The command line: `grpo-jax train | eval | sample | serve | config | plan | …`, and its errors.

The first six take a config file, then overrides: `grpo-jax train my.yaml --optimizer.lr 1e-5`.
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

import tyro

from grpo_jax import config as configs
from grpo_jax.sampling.serving import ServeConfig
from grpo_jax.scale import multihost
from grpo_jax.train.inspect import InspectOptions

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def train(argv: Sequence[str]) -> int:
    """Train with GRPO; resumes the run folder if it holds an unfinished run."""
    config = parse(argv, "train")
    from grpo_jax import run

    return run.train(config)


def evaluate(argv: Sequence[str]) -> int:
    """Evaluate a model, or a run's newest checkpoint, on the held-out prompts of a config."""
    config, options = parse_with(argv, "eval", EvalOptions)
    assert options is not None
    from grpo_jax import run

    return run.evaluate_model(
        config, checkpoint=options.checkpoint, step=options.step, out=options.out
    )


def sample(argv: Sequence[str]) -> int:
    """Print completions of a prompt of your own, with their log-probabilities."""
    config, options = parse_with(argv, "sample", SampleOptions)
    assert options is not None
    from grpo_jax import run

    return run.sample(config, **dataclasses.asdict(options))


def show_config(argv: Sequence[str]) -> int:
    """Check a config and print every key of it, defaults and overrides resolved."""
    config = parse(argv, "config")
    print(configs.dump(config), end="")
    for warning in configs.validate(config):
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def serve(argv: Sequence[str]) -> int:
    """Serve a model, or a run's newest checkpoint, to OpenAI clients and to other runs."""
    config, options = parse_with(argv, "serve", ServeConfig)
    assert options is not None
    from grpo_jax import run

    return run.serve(config, options)


def export(argv: Sequence[str]) -> int:
    """Write a checkpoint of a run as a Hugging Face folder."""
    options = tyro.cli(ExportOptions, args=list(argv), prog="grpo-jax export")
    from grpo_jax import run

    return run.export(
        *(options.run, options.out),
        step=options.step,
        dtype=options.dtype,
        adapter=options.adapter,
    )


def inspect(argv: Sequence[str]) -> int:
    """Show the completions of a run token by token, on the terminal or as an HTML page."""
    from grpo_jax.train import inspect as inspecting

    options = tyro.cli(InspectCommand, args=list(argv), prog="grpo-jax inspect")
    inspecting.inspect_run(options.run, options.options)
    return 0


def plan(argv: Sequence[str]) -> int:
    """Say whether a step fits devices that are not here, and what bounds it; nothing runs."""
    config, options = parse_with(argv, "plan", PlanOptions)
    assert options is not None
    for warning in configs.validate(config):
        print(f"warning: {warning}", file=sys.stderr)
    from grpo_jax import plan_report

    return plan_report.main(config, options.topology, options.out, options.search, options.suggest)


def parity(argv: Sequence[str]) -> int:
    """Recompute a dumped step in float32 and float64 and say where the numbers part."""
    from grpo_jax.train import parity as comparing

    options = tyro.cli(ParityOptions, args=list(argv), prog="grpo-jax parity")
    return comparing.main_parity(options.file, options.worst)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "eval": evaluate,
    "sample": sample,
    "serve": serve,
    "config": show_config,
    "export": export,
    "inspect": inspect,
    "plan": plan,
    "parity": parity,
}


Options = TypeVar("Options")


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """What to evaluate."""

    checkpoint: str | None = None
    """Run folder whose checkpoint is evaluated; without it the model of the config is."""
    step: int | Literal["best"] | None = None
    """Step of the checkpoint, or `best` by checkpoint.metric; the newest one by default."""
    out: str | None = None
    """File for the results as JSON."""


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """What to plan for."""

    topology: str
    """Chip and shape: v5e:16x16, v5p:4x4x4, v5e:16x16*4 for four slices, h200x8, or cpu:8 for
    devices of this machine."""
    out: str | None = None
    """File for the plan as JSON."""
    search: bool = False
    """Compile other meshes and micro-batches too, and rank them."""
    suggest: bool = False
    """Compile the train step with one thing changed at a time, also where everything fits."""


@dataclasses.dataclass(frozen=True)
class SampleOptions:
    """What to sample."""

    prompt: str
    """The user's message."""
    completions: int = 4
    """How many completions to draw."""
    checkpoint: str | None = None
    """Run folder whose checkpoint is sampled from; without it the model of the config is."""
    step: int | Literal["best"] | None = None
    """Step of the checkpoint, or `best` by checkpoint.metric; the newest one by default."""


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """Write a checkpoint of a run as a Hugging Face folder."""

    run: Annotated[str, tyro.conf.Positional]
    """Run folder."""
    out: Annotated[str, tyro.conf.Positional]
    """Folder to write; it must not exist yet."""
    step: int | Literal["best"] | None = None
    """Step of the checkpoint, or `best` by checkpoint.metric; the newest one by default."""
    dtype: str = "float32"
    """float32 or bfloat16."""
    adapter: bool = False
    """Write the LoRA adapter alone, as a `peft` folder, in place of the merged model."""


@dataclasses.dataclass(frozen=True)
class InspectCommand:
    """Show the completions of a run."""

    run: Annotated[str, tyro.conf.Positional]
    """Run folder."""
    options: Annotated[InspectOptions, tyro.conf.arg(name="")] = InspectOptions()


@dataclasses.dataclass(frozen=True)
class ParityOptions:
    """Recompute a dumped step."""

    file: Annotated[str, tyro.conf.Positional]
    """File that training (or another trainer) wrote; docs/numerics.md has the format."""
    worst: int = 20
    """Tokens to list, the largest differences first."""


def parse(argv: Sequence[str], command: str) -> configs.Config:
    """Read `CONFIG [--section.key value ...]`."""
    return parse_with(argv, command, None)[0]


def parse_with(
    argv: Sequence[str], command: str, options: type[Options] | None
) -> tuple[configs.Config, Options | None]:
    """Read `CONFIG [options] [--section.key value ...]` into config and options."""
    argv = list(argv)
    path = argv.pop(0) if argv and not argv[0].startswith("-") else None
    wants_help = "--help" in argv or "-h" in argv
    if path is None and not wants_help:
        raise configs.ConfigError(
            f"grpo-jax {command} needs a config file first, e.g. "
            f"`grpo-jax {command} configs/quickstart.yaml`"
        )
    base = configs.load(path)
    prog = f"grpo-jax {command} {path or 'CONFIG'}"
    if options is None:
        return _override(base, argv, prog), None
    known = {field.name for field in dataclasses.fields(cast(Any, options))}
    own, rest = _split(argv, known)
    if wants_help:
        own, rest = ["--help"], []
    chosen = tyro.cli(
        options,
        args=own,
        prog=prog,
        description=f"{(options.__doc__ or '').strip()} Every key of the config is an option too, "
        f"as in --data.eval-size 32; `grpo-jax train {path or 'CONFIG'} --help` lists them, and "
        "configs/base.yaml explains them.",
    )
    return _override(base, rest, prog), chosen


def _override(base: configs.Config, argv: Sequence[str], prog: str) -> configs.Config:
    """Read `--section.key value ...` over a config."""
    _check_keys(argv, set(configs.keys(base)))
    return tyro.cli(configs.Config, args=_flags(argv, base), prog=prog, default=base)


def _flags(argv: Sequence[str], base: configs.Config) -> list[str]:
    """Rewrite `--section.key true` and `… false` into the flags that the parser knows.

    Raises:
      ConfigError: a key that is on or off is given another value.
    """
    switches = {key for key in configs.keys(base) if isinstance(configs.value_of(base, key), bool)}
    out: list[str] = []
    for word in argv:
        key, _, given = word.removeprefix("--").partition("=")
        if not word.startswith("--"):  # a value, perhaps of a switch
            key, given = out[-1].removeprefix("--") if out else "", word
        name = key.replace("-", "_")
        if name not in switches or not given:
            out.append(word)
            continue
        section, _, leaf = key.rpartition(".")
        on, off = f"--{key}", f"--{section}.no-{leaf}"
        if given.lower() not in ("true", "false"):
            raise configs.ConfigError(
                f"--{key} is on or off, not {given!r}; write {on} or {on} true to switch it on, "
                f"{off} or {on} false to switch it off"
            )
        if not word.startswith("--"):
            out.pop()
        out.append(on if given.lower() == "true" else off)
    return out


def _split(argv: list[str], names: set[str]) -> tuple[list[str], list[str]]:
    """Separate `--name value` pairs of a command from those of the config."""
    own: list[str] = []
    rest: list[str] = []
    target = rest
    for word in argv:
        if word.startswith("--"):
            target = own if word[2:].split("=")[0].replace("-", "_") in names else rest
        target.append(word)
    return own, rest


def _check_keys(argv: Sequence[str], known: set[str]) -> None:
    """Name the nearest key for a mistyped override, before the parser only says it is unknown."""
    for word in argv:
        if not word.startswith("--") or word == "--help":
            continue
        name = word[2:].split("=")[0].replace("-", "_")
        positive = ".".join(part.removeprefix("no_") for part in name.split("."))
        if name not in known and positive not in known:
            raise configs.ConfigError(
                f"unknown override --{name}.{configs.nearest(name, known)} "
                "`grpo-jax config CONFIG` prints every key"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; wrong input ends in one line on stderr and exit status 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else EXIT_USAGE
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        close = configs.nearest(name, COMMANDS)
        print(f"grpo-jax: unknown command {name!r}.{close}\n\n{usage()}", file=sys.stderr)
        return EXIT_USAGE
    try:
        return COMMANDS[name](rest)
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        if os.environ.get("GRPO_JAX_TRACEBACK"):
            raise
        return _failed(f"grpo-jax {name}: ", error, EXIT_USAGE)
    except (RuntimeError, OSError) as error:  # a full disk, damaged checkpoints, a dead worker
        if os.environ.get("GRPO_JAX_TRACEBACK"):
            raise
        return _failed(f"grpo-jax {name} failed: ", error, EXIT_FAILED)
    except KeyboardInterrupt:
        print(f"\ngrpo-jax {name}: stopped; what was saved is kept", file=sys.stderr)
        return EXIT_INTERRUPTED


def _failed(prefix: str, error: Exception, status: int) -> int:
    """Say in one line what went wrong; a process of a job ends here, without waiting for others."""
    print(f"{prefix}{multihost.explain(error)}", file=sys.stderr)
    multihost.abandon(status)
    return status


def usage() -> str:
    """The text of `grpo-jax --help`."""
    lines = ["usage: grpo-jax COMMAND CONFIG [--section.key value ...]", "", "commands:"]
    lines += [f"  {name:<8} {(f.__doc__ or '').splitlines()[0]}" for name, f in COMMANDS.items()]
    lines += [
        "",
        "`grpo-jax train --help` lists every key of the config; configs/base.yaml explains them.",
        "GRPO_JAX_TRACEBACK=1 shows where an error came from.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
