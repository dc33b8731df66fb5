"""What a plan says: to a person, as JSON, and over a search of meshes and micro-batches."""

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax import plan as planning
from grpo_jax.config import Config, ConfigError
from grpo_jax.plan import SPARE, Plan
from grpo_jax.scale import chips

GIB = 2**30


ORIGIN_MEANS = {
    "asked": "of the config and the topology",
    "compiler": "what the compiler says of its program",
    "compiled": "counted in the compiled program",
    "traced": "counted in the traced program",
    "shardings": "sizes and places of arrays",
    "sum": "the compiler's sizes and those of the shardings, added up",
    "published": "the maker's number, not measured here",
    "estimate": "worked out under assumptions; no chip was there",
    "clock": "of this machine",
}
"""What each word of `ORIGINS` says."""

ORIGINS = {
    **dict.fromkeys(("topology", "chips", "mesh", "rows", "width"), "asked"),
    **dict.fromkeys(("micro_rows", "micro_batches", "programs[].name"), "asked"),
    **dict.fromkeys(("parts", "inside.gradients", "inside.cache"), "shardings"),
    "inside.activations": "estimate",
    **dict.fromkeys(("memory", "source"), "published"),
    **dict.fromkeys(
        ("programs[].arguments", "programs[].results", "programs[].temporaries"), "compiler"
    ),
    "programs[].problem": "compiler",
    **dict.fromkeys(("programs[].flops_compiled", "programs[].collectives"), "compiled"),
    **dict.fromkeys(("programs[].flops", "model_flops"), "traced"),
    **dict.fromkeys(("programs[].fits", "programs[].needs", "peak", "fits"), "sum"),
    **dict.fromkeys(("programs[].traffic", "programs[].seconds", "programs[].bound"), "estimate"),
    **dict.fromkeys(("mfu", "step_seconds"), "estimate"),
    "programs[].compile_seconds": "clock",
}
"""Where every figure of the JSON comes from, by its path; a path stands for all below it."""


def to_json(plan: Plan) -> str:
    """The whole plan as JSON, with the origin of each figure; sizes in bytes, times in seconds."""
    fields = dataclasses.asdict(plan)
    for program, kept in zip(fields["programs"], plan.programs, strict=True):
        program["bound"] = kept.bound
        program["needs"] = None if kept.problem else plan.needs(kept)
    peak = None if math.isinf(plan.peak) else plan.peak
    said = {"peak": peak, "fits": plan.fits, "origins": ORIGINS}
    return json.dumps(fields | said, indent=1)


_INSIDE = (
    ("gradients", "of train", "from the shardings"),
    ("activations", "kept by train for a micro-batch", "traced; ESTIMATE, at most, over tensor"),
    ("cache", "of decode", "from the shardings"),
)


def lines(plan: Plan) -> Iterator[str]:
    """The report for a person."""
    shape = " × ".join(f"{name} {n}" for name, n in plan.mesh.items() if n > 1) or "one chip"
    yield f"{plan.topology}: {plan.chips} chips as {shape}"
    yield (
        f"an update of {plan.rows} rows × {plan.width} tokens in {plan.micro_batches} "
        f"micro-batches of {plan.micro_rows} rows a chip"
    )
    yield ""
    yield "always in memory, GiB a chip (from the shardings):"
    for name, size in plan.parts.items():
        yield f"  {name:<12} {size / GIB:8.3f}"
    yield "inside programs, GiB a chip:"
    for name, where, source in _INSIDE:
        yield f"  {name:<12} {plan.inside[name] / GIB:8.3f} {where} ({source})"
    yield "programs, GiB a chip (the compiler's):"
    yield f"  {'':<12} {'arguments':>9} {'results':>9} {'temporary':>9} {'with all':>9}"
    for p in plan.programs:
        if p.problem:
            yield f"  {p.name:<12} does not compile: {p.problem}"
            continue
        sizes = (p.arguments, p.results, p.temporaries, plan.needs(p))
        yield f"  {p.name:<12} " + " ".join(f"{size / GIB:9.3f}" for size in sizes)
    yield _verdict(plan)
    yield ""
    yield "work of a call (products counted in the traced program; compiled, a chip's share):"
    for p in plan.programs:
        share = p.flops / plan.chips
        yield f"  {p.name:<12} {share / 1e12:.3g} TFLOP a chip, traced" + (
            f"; compiled: {p.flops_compiled / share:.2f} times that" if p.flops_compiled else ""
        )
        yield (
            f"    {p.traffic / 1e9:.3f} GB between a chip and its memory (ESTIMATE), "
            f"{sum(c['bytes'] for c in p.collectives) / 1e9:.3f} GB sent to other chips "
            "(compiled program):"
        )
        for c in p.collectives:
            yield (
                f"    {c['kind']} over {c['axes']}: {c['times']} times, "
                f"{c['bytes'] / 1e9:.3f} GB sent by a chip"
            )
    if plan.memory is None:
        return
    yield ""
    yield "ESTIMATE of the least time of a call, from peak numbers (" + str(plan.source) + "):"
    for p in plan.programs:
        if p.seconds:
            each = ", ".join(f"{name} {s * 1e3:.1f}" for name, s in p.seconds.items())
            yield f"  {p.name:<12} {each} ms: bound by {p.bound}"
    if plan.mfu is not None:
        yield f"  MFU of the train step at most {plan.mfu:.0%} (recomputed products left out)"
    if plan.step_seconds is not None:
        yield f"  a whole step of sampling, scoring and updates: {plan.step_seconds:.2f} s at least"


def _verdict(plan: Plan) -> str:
    if plan.fits is None:
        return f"  the largest needs {plan.peak / GIB:.3f} GiB"
    if plan.memory is None or math.isinf(plan.peak):
        return "  DOES NOT FIT"
    share = plan.peak / plan.memory
    return (
        f"  {'fits' if plan.fits else 'DOES NOT FIT'}: {share:.0%} of {plan.memory / GIB:.2f} GiB, "
        f"{SPARE:.0%} should stay free"
    )


class Candidate(NamedTuple):
    """One mesh and micro-batch of a search, or one change that is suggested."""

    mesh: dict[str, int]
    micro_rows: int
    plan: Plan | None
    problem: str | None
    change: str = ""  # as it is written on the command line


_REMAT = ("none", "dots_with_no_batch_dims_saveable", "full")  # from much kept to little


def suggestions(config: Config, topology: str, plan: Plan) -> list[Candidate]:
    """Compile the train step with one thing changed, towards less memory or towards more speed.

    Where the plan does not fit: half the micro-batch, more recomputation, twice the tensor axis.
    Where it does: twice the micro-batch, less recomputation, half the tensor axis.
    """
    less = plan.fits is False
    found = []
    for change, changed in _changes(config, plan, less):
        try:
            made = planning.make_plan(changed, topology, ("train",))
            found.append(Candidate(made.mesh, made.micro_rows, made, None, change))
        except (ConfigError, ValueError) as error:
            found.append(Candidate({}, 0, None, str(error), change))
    return sorted(found, key=_rank)


def _changes(config: Config, plan: Plan, less: bool) -> Iterator[tuple[str, Config]]:
    """Yield what a suggestion changes, and the config with it."""
    rollout, mesh = config.rollout, plan.mesh
    micro = plan.micro_rows // 2 if less else plan.micro_rows * 2
    if micro >= 1 and rollout.micro_batch_tokens is None:
        changed = dataclasses.replace(rollout, micro_batch_size=micro)
        yield f"--rollout.micro-batch-size {micro}", dataclasses.replace(config, rollout=changed)
    remat = config.model.remat if config.model.remat in _REMAT else _REMAT[1]
    at = _REMAT.index(remat) + (1 if less else -1)
    if 0 <= at < len(_REMAT):
        model = dataclasses.replace(config.model, remat=_REMAT[at])
        yield f"--model.remat {_REMAT[at]}", dataclasses.replace(config, model=model)
    factor = 2 if less else 0.5
    fsdp, tensor = mesh["fsdp"] / factor, mesh["tensor"] * factor
    if fsdp >= 1 and tensor >= 1 and fsdp == int(fsdp):
        sizes = {"fsdp": int(fsdp), "tensor": int(tensor)}
        changed = dataclasses.replace(config.mesh, **{**mesh, **sizes})
        words = f"--mesh.fsdp {sizes['fsdp']} --mesh.tensor {sizes['tensor']}"
        yield words, dataclasses.replace(config, mesh=changed)


def suggestion_lines(found: Sequence[Candidate], plan: Plan) -> Iterator[str]:
    """What the train step would need and take with each change, compiled."""
    if not found:
        return
    yield ""
    yield "one change at a time, the train step compiled for each:"
    before = plan.programs[0]
    now = "does not compile" if before.problem else f"{plan.needs(before) / GIB:.2f} GiB"
    yield f"  {'as it is':<56} {now}{_least(plan)}"
    for candidate in found:
        made = candidate.plan
        if made is None or made.programs[0].problem:
            said = candidate.problem if made is None else made.programs[0].problem
            yield f"  {candidate.change:<56} {said}"
            continue
        needs = made.needs(made.programs[0]) / GIB
        yield f"  {candidate.change:<56} {needs:.2f} GiB{_least(made)}"


def _least(plan: Plan) -> str:
    seconds = plan.programs[0].seconds
    return f", {max(seconds.values()):.3f} s at least (ESTIMATE)" if seconds else ""


def search(config: Config, topology: str, per_mesh: int = 2) -> list[Candidate]:
    """Compile other meshes and micro-batches, the best first: what fits, by estimated time.

    Tensor sizes 1, 2, 4 and 8 that divide the chips, with fsdp over the rest, and the config's own
    expert axis; for each the
    `per_mesh` largest micro-batches of 8, 4, 2 or 1 rows a chip that divide the rows.

    Raises:
      ConfigError: the config splits over data or context, which the search would undo.
    """
    if config.mesh.data != 1 or config.mesh.context != 1:
        raise ConfigError(
            f"mesh.data = {config.mesh.data}, mesh.context = {config.mesh.context}: the search "
            "tries fsdp and tensor alone; set both to 1, or plan without --search"
        )
    count = len(chips.topology(topology).devices)
    found: list[Candidate] = []
    for tensor in (1, 2, 4, 8):
        if count % (tensor * config.mesh.expert):
            continue
        share_fsdp = count // tensor // config.mesh.expert
        rows = config.rollout.rows // config.rollout.updates_per_rollout
        share = rows // (count // tensor)
        sizes_here = [size for size in (8, 4, 2, 1) if share and share % size == 0]
        for micro in sizes_here[:per_mesh]:
            changed = dataclasses.replace(
                config,
                mesh=dataclasses.replace(config.mesh, fsdp=share_fsdp, tensor=tensor),
                rollout=dataclasses.replace(
                    config.rollout, micro_batch_size=micro, micro_batch_tokens=None
                ),
            )
            sizes = {"fsdp": share_fsdp, "tensor": tensor}
            try:
                plan = planning.make_plan(changed, topology)
                found.append(Candidate(sizes, micro, plan, None))
            except (ConfigError, ValueError) as error:
                found.append(Candidate(sizes, micro, None, str(error)))
    return sorted(found, key=_rank)


def _rank(candidate: Candidate) -> tuple[bool, float, float]:
    plan = candidate.plan
    if plan is None:
        return (True, math.inf, math.inf)
    seconds = max(plan.programs[0].seconds.values(), default=0.0)
    return (plan.fits is False, seconds, plan.peak)


def main(
    config: Config, topology: str, out: str | None, searching: bool, suggesting: bool = False
) -> int:
    """Print a plan, or the candidates of a search; returns 1 where nothing fits.

    Suggestions are compiled where they are asked for, and where the plan does not fit.
    """
    if not searching:
        plan = planning.make_plan(config, topology)
        print("\n".join(lines(plan)), flush=True)
        wanted = suggesting or plan.fits is False
        found = suggestions(config, topology, plan) if wanted else []
        print("\n".join(suggestion_lines(found, plan)))
        if out is not None:
            fields = json.loads(to_json(plan)) | {"suggestions": [_entry(c) for c in found]}
            Path(out).write_text(json.dumps(fields, indent=1) + "\n")
        return 1 if plan.fits is False else 0
    found = search(config, topology)
    print("fsdp tensor rows/chip      fits  GiB a chip  train step at least (ESTIMATE)")
    for candidate in found:
        print(_row(candidate))
    if out is not None:
        Path(out).write_text(json.dumps([_entry(c) for c in found], indent=1) + "\n")
    return 0 if any(c.plan is not None and c.plan.fits is not False for c in found) else 1


def _entry(candidate: Candidate) -> dict[str, Any]:
    """A candidate as JSON."""
    plan = None if candidate.plan is None else json.loads(to_json(candidate.plan))
    return candidate._asdict() | {"plan": plan}


def _row(candidate: Candidate) -> str:
    sizes = f"{candidate.mesh['fsdp']:4} {candidate.mesh['tensor']:6} {candidate.micro_rows:9}"
    plan = candidate.plan
    if plan is None:
        return f"{sizes}  {candidate.problem}"
    train = plan.programs[0]
    seconds = f"{max(train.seconds.values()):.3f} s, {train.bound}" if train.seconds else "-"
    fits = {True: "yes", False: "no", None: "?"}[plan.fits]
    return f"{sizes} {fits:>9} {plan.peak / GIB:11.2f}  {seconds}"
