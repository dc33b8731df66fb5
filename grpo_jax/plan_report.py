"""What a plan says: to a person, as JSON, and over a search of meshes and micro-batches."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from grpo_jax import plan as planning
from grpo_jax.config import Config, ConfigError
from grpo_jax.plan import SPARE, Plan
from grpo_jax.scale import chips
from grpo_jax.scale import mesh as meshes

GIB = 2**30


def to_json(plan: Plan) -> str:
    """The whole plan as JSON; every size in bytes, every time in seconds."""
    fields = dataclasses.asdict(plan)
    for program, kept in zip(fields["programs"], plan.programs, strict=True):
        program["bound"] = kept.bound
        program["needs"] = None if kept.problem else plan.needs(kept)
    peak = None if math.isinf(plan.peak) else plan.peak
    return json.dumps(fields | {"peak": peak, "fits": plan.fits}, indent=1)


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
        for c in p.collectives[:6]:
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
    """One mesh and micro-batch of a search."""

    mesh: dict[str, int]
    micro_rows: int
    plan: Plan | None
    problem: str | None


def search(config: Config, topology: str, per_mesh: int = 2) -> list[Candidate]:
    """Compile other meshes and micro-batches, the best first: what fits, by estimated time.

    Tensor sizes 1, 2, 4 and 8 that divide the chips, with fsdp over the rest; for each the
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
        if count % tensor:
            continue
        rows = config.rollout.rows // config.rollout.updates_per_rollout
        share = rows // (count // tensor)
        sizes_here = [size for size in (8, 4, 2, 1) if share and share % size == 0]
        for micro in sizes_here[:per_mesh]:
            changed = dataclasses.replace(
                config,
                mesh=meshes.MeshConfig(data=1, fsdp=count // tensor, tensor=tensor),
                rollout=dataclasses.replace(
                    config.rollout, micro_batch_size=micro, micro_batch_tokens=None
                ),
            )
            sizes = {"fsdp": count // tensor, "tensor": tensor}
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


def main(config: Config, topology: str, out: str | None, searching: bool) -> int:
    """Print a plan, or the candidates of a search; returns 1 where nothing fits."""
    if not searching:
        plan = planning.make_plan(config, topology)
        print("\n".join(lines(plan)))
        if out is not None:
            Path(out).write_text(to_json(plan) + "\n")
        return 1 if plan.fits is False else 0
    found = search(config, topology)
    print("fsdp tensor rows/chip      fits  GiB a chip  train step at least (ESTIMATE)")
    for candidate in found:
        print(_row(candidate))
    if out is not None:
        plans = [json.loads(to_json(c.plan)) for c in found if c.plan is not None]
        Path(out).write_text(json.dumps(plans, indent=1) + "\n")
    return 0 if any(c.plan is not None and c.plan.fits is not False for c in found) else 1


def _row(candidate: Candidate) -> str:
    sizes = f"{candidate.mesh['fsdp']:4} {candidate.mesh['tensor']:6} {candidate.micro_rows:9}"
    plan = candidate.plan
    if plan is None:
        return f"{sizes}  {candidate.problem}"
    train = plan.programs[0]
    seconds = f"{max(train.seconds.values()):.3f} s, {train.bound}" if train.seconds else "-"
    fits = {True: "yes", False: "no", None: "?"}[plan.fits]
    return f"{sizes} {fits:>9} {plan.peak / GIB:11.2f}  {seconds}"
