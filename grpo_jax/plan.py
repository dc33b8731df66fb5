"""Does a step fit, and what bounds it? Compiled for devices that are not here.

The train, score, prefill and decode programs of a config are lowered and compiled for a topology;
nothing runs. Three kinds of numbers come out, and the report keeps them apart:

- the compiler's facts: bytes of arguments, results and temporaries of each program on a chip;
- counts: products of the traced program, and products, traffic and collectives of the compiled one,
  loops as often as they run (`scale.flops`, `scale.hlo`);
- estimates: the time, which is the largest of products over peak, traffic over memory bandwidth,
  and messages over the links of the torus. Real chips reach a part of each peak.

Every completion is assumed to reach the token limit, and every prompt its own.
"""

import dataclasses
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpo_jax import build, loading
from grpo_jax.config import Config, ConfigError
from grpo_jax.core import lanes
from grpo_jax.core.batch import Batch, Counts
from grpo_jax.data import trajectories
from grpo_jax.models import cache, hf, hf_config, presets, transformer
from grpo_jax.scale import chips, flops, hlo, rules
from grpo_jax.scale import mesh as meshes
from grpo_jax.train import state as states

SPARE = 0.1  # share of a chip's memory that should stay free


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """One compiled program on one chip, for one call."""

    name: str
    fits: bool | None  # None: the size of the memory is not known
    arguments: float  # bytes, the compiler's
    results: float  # bytes that are not written over arguments, the compiler's
    temporaries: float  # bytes, the compiler's
    flops: float  # products of the traced program, over all chips
    flops_compiled: float  # products of the compiled program on one chip
    traffic: float  # bytes between a chip and its memory, an estimate
    collectives: list[dict[str, Any]]
    seconds: dict[str, float]  # compute, memory, links; empty without peak numbers
    compile_seconds: float
    problem: str | None = None  # why it could not be compiled

    @property
    def bound(self) -> str | None:
        """What the call waits for most."""
        return max(self.seconds, key=lambda k: self.seconds[k]) if self.seconds else None


@dataclasses.dataclass(frozen=True)
class Plan:
    """All programs of a step on a topology."""

    topology: str
    chips: int
    mesh: dict[str, int]
    rows: int  # of one update
    width: int  # tokens a row
    micro_rows: int  # rows a chip sees at one time
    micro_batches: int
    parts: dict[str, float]  # bytes a chip holds all the time, by what they are
    inside: dict[
        str, float
    ]  # bytes of what stands out in the temporaries and arguments of programs
    memory: float | None  # bytes of a chip
    programs: list[ProgramReport]
    model_flops: float  # of an update without recomputation: three times the forward products
    mfu: float | None  # estimate, of the train program alone
    step_seconds: float | None  # estimate of a whole step: sampling, scoring, all updates
    source: str | None  # of the peak numbers

    @property
    def peak(self) -> float:
        """Bytes of the program that needs most, with all that stays in memory beside it."""
        return max(self.needs(p) for p in self.programs)

    def needs(self, program: ProgramReport) -> float:
        """Bytes a chip holds while a program runs."""
        if program.problem is not None:
            return math.inf
        beside = sum(size for name, size in self.parts.items() if name not in _HELD[program.name])
        return beside + program.arguments + program.results + program.temporaries

    @property
    def fits(self) -> bool | None:
        """Whether every program leaves the spare part of the memory free."""
        if any(program.problem for program in self.programs):
            return False
        return None if self.memory is None else self.peak <= (1 - SPARE) * self.memory


# What is among a program's arguments already, of the parts that are always there.
_HELD = {
    "train": ("parameters", "optimizer"),
    "score": ("parameters",),
    "prefill": ("parameters",),
    "decode": (),
}


Call = tuple[Any, tuple[Any, ...], tuple[int, ...]]  # program, arguments, rounds of its loops
PROGRAMS = ("train", "score", "prefill", "decode")


def make_plan(config: Config, topology: str, programs: Sequence[str] = PROGRAMS) -> Plan:
    """Compile a config's programs for a topology.

    Args:
      config: what a run would be given.
      topology: see `chips.topology`.
      programs: which of them, for a quick look; what is left out is not in the plan.

    Raises:
      ConfigError: the config does not fit the devices, or its model is neither a folder nor known.
      ValueError: the topology is unknown, or its compiler is not installed.
    """
    if config.lora.on:
        raise ConfigError(
            f"lora.rank = {config.lora.rank}: a plan counts the training of all weights, and an "
            "adapter needs far less; plan without the section lora for an upper bound"
        )
    if config.advantage.estimator in ("gae", "opd"):
        raise ConfigError(
            f"advantage.estimator = {config.advantage.estimator!r} keeps a second model, critic or "
            "teacher, which a plan does not count yet; plan with another estimator, and add the "
            "second model's parameters (and a critic's optimizer) to what it says"
        )
    target = chips.topology(topology)
    mesh = meshes.make_mesh(config.mesh, target.devices)
    work = updates(config, mesh)
    model, compiled, trips = work.model, work.steps, work.trips
    state, batch = work.state, work.batch
    score = compiled.previous or compiled.reference or compiled.current
    sampler, cache_bytes, waves = _sampler(config, model, work.places)
    wanted: dict[str, Call] = {
        "train": (compiled.train, (state, batch, work.counts), trips),
        "score": (score, (state.params, batch), trips),
        **sampler,
    }
    calls = {name: wanted[name] for name in PROGRAMS if name in programs}
    reports = [_compile(name, call, mesh, target.chip) for name, call in calls.items()]
    resident = {
        "parameters": shard_bytes(state.params),
        "optimizer": shard_bytes(state.opt_state),
    }
    if compiled.reference is not None:
        resident["reference"] = resident["parameters"]
    forward = flops.count(score.trace(state.params, batch).jaxpr, while_trips=trips)
    by_name, chip = {report.name: report for report in reports}, target.chip
    mfu = step_seconds = None
    if chip is not None and "train" in by_name and by_name["train"].seconds:
        least = max(by_name["train"].seconds.values())
        mfu = 3 * forward / (least * chip.flops * len(target.devices))
    if all(by_name.get(name) and by_name[name].seconds for name in PROGRAMS):
        passes = (compiled.previous is not None) + (compiled.reference is not None)
        step_seconds = _step_seconds(config, by_name, passes, waves)
    return Plan(
        topology=topology,
        chips=len(target.devices),
        mesh=dict(mesh.shape),
        rows=batch.tokens.shape[0],
        width=batch.tokens.shape[1],
        micro_rows=work.rows_at_once,
        micro_batches=work.micro_batches,
        parts=resident,
        inside={
            "gradients": resident["parameters"],
            "activations": kept_activations(model, work.rows_at_once, batch.tokens.shape[1]),
            "cache": cache_bytes,
        },
        memory=None if chip is None else chip.memory,
        programs=reports,
        model_flops=3 * forward,
        mfu=mfu,
        step_seconds=step_seconds,
        source=None if chip is None else chip.source,
    )


class Work(NamedTuple):
    """What the programs of an update are compiled with: shapes and places, no numbers."""

    model: loading.Model
    places: states.Placement
    steps: build.PolicySteps
    state: states.TrainState
    batch: Batch
    counts: Counts
    trips: tuple[int, ...]  # rounds of the loops that end with the data
    rows_at_once: int  # on a device
    micro_batches: int


def updates(config: Config, mesh: Mesh) -> Work:
    """Shapes and places of what train and score step of a config are called with on a mesh."""
    model = abstract_model(config, mesh)
    opt = build.build_optimizer(config)  # a frozen router does not decay
    shapes = states.abstract(model.loaded.params, opt.transform)
    places = model.places(model.loaded.params, opt.transform, say=loading.quiet)
    state = states.targets(shapes, places)
    layout = build.build_layout(config, model)
    compiled = build.policy_steps(config, model, opt, places)
    rows = config.rollout.rows // config.rollout.updates_per_rollout
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    width = trajectories.bucket_length(longest, config.rollout.length_multiple)
    if config.packing.enabled:
        width = config.packing.row_length
        rows = _packed_rows(config, layout, longest, rows)
    at_once, parts = layout.rows_at_once(width), layout.micro_batches(rows, width)
    per_row = _sequences_per_row(config, longest) if config.packing.enabled else 1
    trips = _trips(config, at_once, width, parts, per_row)
    batch = abstract_batch(rows, width, mesh, compiled)
    number: Any = jax.ShapeDtypeStruct((), jnp.float32, sharding=rules.replicated(mesh))
    counts = Counts(tokens=number, sequences=number, positives=number)
    return Work(model, places, compiled, state, batch, counts, trips, at_once, parts)


def _step_seconds(
    config: Config, programs: Mapping[str, ProgramReport], passes: int, waves: int
) -> float:
    """Add up the least times of all calls of a step.

    updates · train + score passes over the rollout + for each wave of rows: prefill, and decode
    once a token.
    """
    each = {name: max(report.seconds.values()) for name, report in programs.items()}
    rollout = config.rollout
    sampled = waves * (each["prefill"] + config.sampling.max_new_tokens * each["decode"])
    scored = passes * rollout.updates_per_rollout * each["score"]
    return rollout.updates * each["train"] + scored + sampled


def kept_activations(model: loading.Model, rows: int, width: int) -> float:
    """Bytes that the layers keep of a micro-batch [rows, width] on a chip for the backward pass.

    Read from the traced program, before the partitioner: what lies over `tensor` is counted whole,
    so this is an upper bound there, and exact without it.
    """
    from jax._src.ad_checkpoint import saved_residuals  # jax prints these, and returns them nowhere

    ids = jax.ShapeDtypeStruct((rows, width), jnp.int32)
    hidden = jax.jit(model.loaded.policy.hidden)
    shapes = model.loaded.params
    found = saved_residuals(lambda p, t, at, s: hidden(p, t, at, s), shapes, ids, ids, ids)
    kept: list[Any] = [aval for aval, origin in found if not origin.startswith("from the argument")]
    parts = model.mesh.shape["context"]
    return float(sum(math.prod(a.shape) * a.dtype.itemsize for a in kept)) / parts


def abstract_model(config: Config, mesh: Mesh) -> loading.Model:
    """A model without weights: of a folder with a config.json, or of a known name."""
    path = config.model.path
    if Path(path).is_dir():
        found = hf_config.read_config(path)
    elif path in presets.PRESETS:
        found = presets.preset(path)
    else:
        raise ConfigError(
            f"model.path = {path!r} is no folder, and no known model; known are "
            f"{', '.join(presets.PRESETS)}"
        )
    shape = dataclasses.replace(
        found,
        param_dtype="float32",
        compute_dtype=config.model.compute_dtype,
        remat=config.model.remat,
        attention=config.model.attention,
    )
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    loaded = hf.LoadedModel(
        shape,
        transformer.policy_for(shape),
        cache.decoder_for(shape, unroll=on_cpu, dtype=config.engine.cache_dtype),
        transformer.abstract_params(shape),
    )
    table = rules.table(config.mesh)
    return loading.Model(loaded, None, mesh, config.sampling, rules=table)  # type: ignore[arg-type]


def abstract_batch(rows: int, width: int, mesh: Mesh, compiled: build.PolicySteps) -> Batch:
    """Shapes of what the train step is given."""
    rules.check_width(width, mesh)
    sharding = rules.batch_sharding(mesh)

    def array(dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((rows, width), dtype, sharding=sharding)

    return Batch(
        tokens=array(jnp.int32),
        segment_ids=array(jnp.int32),
        positions=array(jnp.int32),
        token_mask=array(jnp.bool_),
        sample_weights=array(jnp.float32),
        advantages=array(jnp.float32),
        generation_logprobs=array(jnp.float32),
        prev_logprobs=None if compiled.previous is None else array(jnp.float32),
        reference_logprobs=None if compiled.reference is None else array(jnp.float32),
        rewards=array(jnp.float32),
    )


def _packed_rows(config: Config, layout: Any, longest: int, sequences: int) -> int:
    """Rows that hold all sequences at their full length."""
    per_row = _sequences_per_row(config, longest)
    unit = layout.rows_at_once(config.packing.row_length) * layout.shards
    least = -(-sequences // per_row)
    return trajectories.bucket_count(-(-least // unit)) * unit


def _sequences_per_row(config: Config, longest: int) -> int:
    """Sequences of full length that a packed row holds."""
    packing = config.packing
    padded = trajectories.padded_length(longest, packing.length_multiple)
    return max(min(packing.row_length // padded, packing.max_sequences), 1)


def _trips(config: Config, at_once: int, width: int, parts: int, per_row: int) -> tuple[int, ...]:
    """Rounds of the loops that end with the data: micro-batches, and chunks of the head."""
    trained = at_once * min(per_row * config.sampling.max_new_tokens, width)
    chunk = config.rollout.head_chunk
    chunks = 1
    if chunk is not None:
        chunks = -(-trained // lanes.chunk_length(chunk, at_once * width))
    return (parts, chunks) if parts > 1 else (chunks,)


def _sampler(
    config: Config, model: loading.Model, places: states.Placement
) -> tuple[dict[str, Call], float, int]:
    """Prefill of a step's prompts, and one token of all their completions.

    Returns the two, the bytes of the cache on a chip, and how often a step runs through them.
    Rows are split over data and fsdp, heads of the cache over tensor, weights by the rules.
    """
    decoder, mesh = model.loaded.decoder, model.mesh
    prompts, group = config.rollout.prompts_per_step, config.rollout.completions_per_prompt
    if config.engine.rows is not None:
        prompts = max(1, min(prompts, config.engine.rows // group))
    waves = -(-config.rollout.prompts_per_step // prompts)
    shards = meshes.row_shards(mesh)
    prompts = -(-prompts // shards) * shards
    longest = config.data.max_prompt_tokens
    bucket = -(-longest // config.engine.prompt_bucket) * config.engine.prompt_bucket
    rows = rules.row_sharding(mesh)

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)

    weights = _placed(model.loaded.params, places.state.params)
    prepared = jax.eval_shape(decoder.prepare, model.loaded.params)
    prepared = _placed(prepared, rules.partition(prepared, mesh, model.rules, say=loading.quiet))
    length = bucket + config.sampling.max_new_tokens
    slots = jax.eval_shape(lambda: decoder.init_cache(prompts * group, length))
    held = _placed(slots, jax.tree.map(lambda x: rules.cache_sharding(x, mesh), slots))
    small = jax.eval_shape(lambda: decoder.init_cache(prompts, length))
    small = jax.tree.map(lambda x: rules.cache_sharding(x, mesh), small)

    def prefill(params: Any, tokens: jax.Array, lengths: jax.Array) -> Any:
        return decoder.prefill(
            decoder.prepare(params), tokens, lengths, decoder.init_cache(prompts, length)
        )

    read = jax.jit(prefill, out_shardings=(rows, small))
    step = jax.jit(
        decoder.step, donate_argnums=3, out_shardings=(rows, jax.tree.map(_sharding, held))
    )
    n = prompts * group
    calls: dict[str, Call] = {
        "prefill": (read, (weights, ints(prompts, bucket), ints(prompts)), (1,)),
        "decode": (step, (prepared, ints(n), ints(n), held), (1,)),
    }
    return calls, shard_bytes(held), waves


def _placed(shapes: Any, places: Any) -> Any:
    return jax.tree.map(
        lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes, places
    )


def _sharding(x: Any) -> Any:
    return x.sharding


def shard_bytes(tree: Any) -> float:
    """Bytes that one device holds of a tree of placed arrays, or of shapes with places."""
    return float(
        sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(tree)
        )
    )


def _compile(name: str, call: Call, mesh: Mesh, chip: chips.Chip | None) -> ProgramReport:
    """Compile one program and count what it does."""
    program, arguments, trips = call
    begin = time.perf_counter()
    traced = program.trace(*arguments)
    products = flops.count(traced.jaxpr, while_trips=trips)
    try:
        compiled = traced.lower().compile()
    except Exception as error:
        problem = _out_of_memory(error)
        if problem is None:
            raise
        seconds = time.perf_counter() - begin
        return ProgramReport(
            name, False, 0.0, 0.0, 0.0, products, 0.0, 0.0, [], {}, seconds, problem
        )
    seconds = time.perf_counter() - begin
    stats, found = (
        compiled.memory_analysis(),
        hlo.read(compiled.as_text(), dict(mesh.shape), unknown_trips=trips),
    )
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    held = stats.argument_size_in_bytes + results + stats.temp_size_in_bytes
    return ProgramReport(
        name=name,
        fits=None if chip is None else held <= chip.memory,
        arguments=float(stats.argument_size_in_bytes),
        results=float(results),
        temporaries=float(stats.temp_size_in_bytes),
        flops=products,
        flops_compiled=found.flops,
        traffic=found.bytes,
        collectives=[c._asdict() for c in found.collectives],
        seconds=_roofline(products / mesh.size, found, chip),
        compile_seconds=seconds,
    )


def _out_of_memory(error: Exception) -> str | None:
    """The compiler's own sentence, where it refuses a program for its size."""
    found = re.search(r"Used [\d.]+\w+ of [\d.]+\w+ hbm[^\n]*", str(error))
    return found[0] if found else None


def _roofline(products: float, found: hlo.Program, chip: chips.Chip | None) -> dict[str, float]:
    """Seconds that each resource is busy at its peak; nothing is assumed of their overlap.

    compute = products / peak · memory = traffic / bandwidth
    links   = messages of a chip / (what it sends ÷ dimensions of the torus): a mesh axis lies along
              one dimension of the torus
    """
    if chip is None:
        return {}
    sent = sum(c.bytes for c in found.collectives)
    return {
        "compute": products / chip.flops,
        "memory": found.bytes / chip.memory_bandwidth,
        "links": sent / (chip.link_bandwidth / chip.dimensions),
    }
