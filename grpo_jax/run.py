"""The commands: build everything a config names, run it, say what happened."""

import dataclasses
import json
import math
import os
import socket
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from grpo_jax import build, engines, exporting, loading
from grpo_jax import config as configs
from grpo_jax.config import Config, ConfigError
from grpo_jax.core.policy import Params
from grpo_jax.data import prompts as prompting
from grpo_jax.models import hf
from grpo_jax.rewards.scoring import Scorer
from grpo_jax.sampling.generate import STOP_REASONS
from grpo_jax.sampling.serving import ServeConfig
from grpo_jax.scale import multihost
from grpo_jax.train import checkpoint as checkpointing
from grpo_jax.train import evaluate, folder, loop, reporting, rollout
from grpo_jax.train import state as states
from grpo_jax.train.checkpoint import CheckpointConfig
from grpo_jax.train.state import TrainState

MAY_CHANGE = (
    "run.dir",
    "run.resume",
    "run.export",
    "lora.export",
    "run.dump_steps",
    "run.profile_steps",
    "run.max_nonfinite",
    "report.",
    *(f"checkpoint.{f.name}" for f in dataclasses.fields(CheckpointConfig) if f.name != "dir"),
    "reward.workers",
    "processes.",
    "engine.remote.",
)
"""Keys that an unfinished run may be resumed with another value of; see `_changed_keys`."""
Step = int | Literal["best"] | None
"""Which checkpoint: of this step, the best by `checkpoint.metric`, or None for the newest."""
EXIT_OK, EXIT_NONFINITE, EXIT_INTERRUPTED = 0, 3, 130
EXIT_PREEMPTED = 75
"""After SIGTERM: saved, start the same command again (EX_TEMPFAIL of sysexits.h)."""


def enable_compile_cache(path: Path) -> None:
    """Keep compiled programs between runs, unless the user has chosen a place already."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(path.absolute()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


def train(config: Config, console: Console | None = None) -> int:
    """Train; returns the exit status. Prints which of starting and resuming it does.

    Joins the job that the environment describes; then only process 0 prints and writes.
    """
    with multihost.job(config.processes):
        return _train(config, console or reporting.make_console(quiet=not multihost.is_main()))


def _train(config: Config, console: Console) -> int:
    begin = time.perf_counter()
    for warning in configs.validate(config):
        console.print(f"[yellow]warning:[/yellow] {warning}")
    place = Path(config.run.dir)
    plan = multihost.from_main(
        lambda: folder.plan(
            *(place, config.run.resume, _changed_keys(place, config)), config.checkpoint.dir
        ),
        "the run folder",
    )
    console.print(plan.said)
    enable_compile_cache(Path(os.environ.get("GRPO_JAX_CACHE", ".jax_cache")))
    # The scorer's workers start while the model loads.
    with Scorer(config.reward, multihost.watched) as scorer:
        ready = _set_up(config, console, scorer, plan)
        console.print(f"set-up took {reporting.duration(time.perf_counter() - begin)}")
        try:
            outcome = loop.train(ready.parts, ready.state, config.run, ready.start, ready.notes)
        except loop.NonFiniteError as error:
            console.print("stopped:", str(error), markup=False)
            return EXIT_NONFINITE
        finally:
            saved = ready.parts.checkpointer.close()  # first: nothing between a save and its end
            ready.parts.reporter.close()
        return _finish(config, console, ready.parts, outcome, saved, begin)


class _Ready(NamedTuple):
    """A run that may begin, or go on."""

    parts: loop.Parts
    state: TrainState
    start: int  # steps finished
    notes: dict[str, Any]


def _set_up(config: Config, console: Console, scorer: Scorer, plan: folder.Plan) -> _Ready:
    """Load everything, refuse what does not fit, and only then touch the folder.

    A function of its own, so that no frame holds the loaded weights while the run goes on: they
    are in the state, and in the reference if there is one.
    """
    place = Path(config.run.dir)
    model = loading.load_model(config)
    data = prompting.load_prompts(config.data, model.tokenizer)
    stream = build.build_stream(config, data)
    build.check(config, model, data)
    scorer.wait_ready()
    _describe(console, config, model, data)
    # What can be refused was refused above.
    multihost.from_main(lambda: folder.prepare(place, plan, configs.dump(config)), "the run folder")
    checkpointer = checkpointing.Checkpointer(
        folder.checkpoints_of(place, config.checkpoint.dir),
        config.checkpoint,
        say=lambda line: console.print(line, markup=False),
    )
    opt = build.build_optimizer(config)
    critic = build.build_critic(config, model)
    state, places, restored = build.initial_state(
        model, opt, critic, checkpointer if plan.action == "resume" else None
    )
    frozen = [path for path in (config.model.path, config.teacher.path) if path is not None]
    weights = "+".join(loading.fingerprint(path) for path in frozen)
    start, notes = 0, {"first": {}, "last": {}, "nonfinite": 0, "weights": weights}
    if restored is not None:
        start, notes = restored.step, restored.run["notes"]
        if notes["weights"] != weights:
            raise ConfigError(
                f"{' or '.join(map(repr, frozen))} holds other weights than the run began with "
                f"({weights} instead of {notes['weights']}), so its reference policy or teacher "
                "would change; put the old ones back, or start another run"
            )
        stream.restore(restored.run["stream"])
        console.print(f"going on after step {start} of {config.run.steps}")
    reporter = reporting.Reporter(
        place,
        config.report,
        config.run.steps,
        start_step=start,
        console=console,
        enabled=multihost.is_main(),
    )
    parts = build.build_parts(
        config, model, data, scorer, stream, opt, places, critic, checkpointer, reporter
    )
    return _Ready(parts, state, start, notes)


def _changed_keys(place: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Settings of the run in the folder that are different now, apart from harmless ones."""
    path = place / folder.CONFIG
    if not path.exists():
        return {}
    try:
        before = configs.load(path)
    except ConfigError as error:
        return {folder.CONFIG: (f"unreadable: {error}", "this version's keys")}
    # Schedules that stretch over the run bend when its length changes.
    fixed = any(
        (opt.schedule != "constant" or opt.warmup_fraction > 0) and opt.total_steps is None
        for opt in (config.optimizer, config.critic.optimizer)
    )
    return configs.differences(before, config, MAY_CHANGE + (() if fixed else ("run.steps",)))


def _describe(
    console: Console, config: Config, model: loading.Model, data: prompting.PromptSets
) -> None:
    """Say in a few lines what is about to be trained on what."""
    size = sum(x.size for x in jax.tree.leaves(model.loaded.params))
    devices = model.mesh.devices.ravel()
    if multihost.count() > 1:
        console.print(
            f"job     {multihost.count()} processes; each scores its share of the completions"
        )
    console.print(
        f"model   {config.model.path} ({size / 1e6:.0f}M parameters, "
        f"{config.model.compute_dtype}) on {len(devices)} × {devices[0].device_kind}"
    )
    skipped = f", {data.too_long} too long and skipped" if data.too_long else ""
    if data.overlapping:
        skipped += f", {data.overlapping} equal to a held-out one and left out"
    if data.overlapping and (config.data.eval_path or config.data.eval_split):
        console.print(
            f"[yellow]warning:[/yellow] {data.overlapping} training prompts are in the held-out "
            "set too; they are not trained, and whoever made the two sets may want to know"
        )
    console.print(
        f"data    {config.data.source}:{config.data.path or config.data.name}: {len(data.train)} "
        f"training prompts, {len(data.held_out)} held out{skipped}"
    )
    console.print(
        f"step    {config.rollout.prompts_per_step} prompts × "
        f"{config.rollout.completions_per_prompt} completions of up to "
        f"{config.sampling.max_new_tokens} tokens, {config.rollout.updates} update(s)"
    )
    if model.adapter is not None:
        count = sum(x.size for x in jax.tree.leaves(model.adapter))
        console.print(
            f"lora    rank {config.lora.rank} on {len(model.adapter)} kinds of matrices: "
            f"{count / 1e6:.2f}M parameters are trained, the model stays as it is"
        )
    if config.advantage.needs_teacher:
        console.print(f"teacher {config.teacher.path}")
    if config.advantage.needs_values:
        console.print(
            "critic  a value head on a copy of the model; for the first "
            f"{config.critic.warmup_steps} step(s) it is trained alone"
        )


def _finish(
    config: Config,
    console: Console,
    parts: loop.Parts,
    outcome: loop.Outcome,
    saved: bool,
    begin: float,
) -> int:
    """Say how the run ended, export the weights, and mark the folder."""
    place = Path(config.run.dir)
    if outcome.reason in ("interrupted", "preempted"):
        state = f"saved after step {outcome.step}" if saved else "the last save FAILED (see above)"
        console.print(
            f"[bold]{outcome.reason}[/bold], {state}. The same command goes on from there."
        )
        return EXIT_INTERRUPTED if outcome.reason == "interrupted" else EXIT_PREEMPTED
    if outcome.first and outcome.last:
        console.print(comparison(outcome.first, outcome.last))
    if config.run.export:
        trained, wanted = outcome.state.params, config.lora.export if config.lora.on else "merged"
        exporting.write(
            *(config, hf.hf_config.read_config(config.model.path), parts.tokenizer),
            adapter=(place / "adapter", trained) if wanted != "merged" else None,
            model=(place / "export", parts.whole(trained)) if wanted != "adapter" else None,
            say=lambda what, where: console.print(f"exported {what} to {where}"),
        )
    if not multihost.is_main():
        return EXIT_OK
    seconds = time.perf_counter() - begin
    folder.finish(
        place,
        {
            "steps": outcome.step,
            "reason": outcome.reason,
            "first": outcome.first,
            "last": outcome.last,
            "seconds": seconds,
        },
    )
    console.print(
        f"[bold]done[/bold] in {reporting.duration(seconds)}: curves in {place / 'run.png'}, "
        f"completions in {place / 'samples'}, numbers in {place / 'metrics.jsonl'}"
    )
    return EXIT_OK


def comparison(first: dict[str, float], last: dict[str, float]) -> Table:
    """Held-out prompts before and after, side by side."""
    table = Table(title="the same held-out prompts, before and after", title_justify="left")
    for name in ("", "before", "after", "change"):
        table.add_column(name, justify="left" if not name else "right")
    for name in first:
        if name.endswith(("/low", "/high")) or name not in last:
            continue
        a, b = first[name], last[name]
        table.add_row(
            name.removeprefix("eval/"),
            _with_interval(first, name),
            _with_interval(last, name),
            f"{b - a:+.3f}",
        )
    return table


def _with_interval(metrics: dict[str, float], name: str) -> str:
    text = f"{metrics[name]:.3f}"
    if f"{name}/low" in metrics:
        text += f" [{metrics[f'{name}/low']:.3f}, {metrics[f'{name}/high']:.3f}]"
    return text


def evaluate_model(
    config: Config, checkpoint: str | None = None, step: Step = None, out: str | None = None
) -> int:
    """Evaluate the config's model, or a checkpoint of a run, on the held-out prompts."""
    if out is not None and not Path(out).absolute().parent.is_dir():  # known before the work
        raise FileNotFoundError(f"{out} cannot be written: its folder does not exist; make it")
    console = reporting.make_console()
    enable_compile_cache(Path(os.environ.get("GRPO_JAX_CACHE", ".jax_cache")))
    with Scorer(config.reward, multihost.watched) as scorer:
        model = loading.load_model(config)
        data = prompting.load_prompts(config.data, model.tokenizer)
        params, source = _sampled(model, config, checkpoint, step)
        console.print(f"evaluating {source} on {len(data.held_out)} held-out prompts …")
        result = evaluate.evaluate(
            engines.make_engine(config, model),
            params,
            model.tokenizer,
            scorer,
            data.held_out,
            config.evaluate,
            model.sampling,
            loop.evaluation_key(jax.random.key(config.run.seed)),
        )
    table = Table(title=f"{source} ({reporting.duration(result.seconds)})", title_justify="left")
    table.add_column("")
    table.add_column("value [95 % interval]", justify="right")
    for name in result.metrics:
        if not name.endswith(("/low", "/high")):
            table.add_row(name.removeprefix("eval/"), _with_interval(result.metrics, name))
    console.print(table)
    if out is not None:
        finite = {k: v if math.isfinite(v) else None for k, v in result.metrics.items()}
        facts = {
            "source": source,
            "prompts": len(data.held_out),
            "completions": config.evaluate.completions,
            "temperature": config.evaluate.temperature,
            "top_p": config.evaluate.top_p,
        }
        Path(out).write_text(json.dumps(facts | finite, indent=1) + "\n")  # JSON knows no NaN
        console.print(f"written to {out}")
    return EXIT_OK


def sample(
    config: Config,
    prompt: str,
    completions: int = 4,
    checkpoint: str | None = None,
    step: Step = None,
) -> int:
    """Print completions of one prompt, with the log-probability of each."""
    console = reporting.make_console()
    enable_compile_cache(Path(os.environ.get("GRPO_JAX_CACHE", ".jax_cache")))
    model = loading.load_model(config)
    params, _ = _sampled(model, config, checkpoint, step)
    example = prompting.Example(prompt=prompt)
    ids = prompting.encode_prompt(example, model.tokenizer, config.data).ids
    rows = engines.make_engine(config, model).generate(
        params, [ids], completions, jax.random.key(config.run.seed)
    )
    for i, completion in enumerate(rollout.completion_ids(rows)):
        reason = STOP_REASONS[int(rows.stop_reasons[i])]
        nats = float(np.sum(rows.logprobs[i]))
        console.print(
            f"[bold]{i + 1}[/bold] [dim]({len(completion)} tokens, ended by {reason}, "
            f"log-probability {nats:.2f} nats)[/dim]"
        )
        console.print(model.tokenizer.decode(completion.tolist()), markup=False)
    return EXIT_OK


def serve(config: Config, options: ServeConfig) -> int:
    """Answer completion requests over HTTP until Ctrl-C."""
    console = reporting.make_console()
    enable_compile_cache(Path(os.environ.get("GRPO_JAX_CACHE", ".jax_cache")))
    options.token()  # refuse an open door before the model is loaded
    model = loading.load_model(config)
    params, source = _weights(model, config, options.checkpoint, options.step)
    app, batcher = engines.make_server(config, options, model, params)
    import uvicorn  # `make_server` has said what to install

    with socket.create_server((options.host, options.port)) as listening:
        host, port = listening.getsockname()[:2]
        console.print(f"serving {source} at http://{host}:{port}/v1 (Ctrl-C stops it)")
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        try:
            server.run(sockets=[listening])
        finally:
            batcher.close()
    return EXIT_OK


def export(
    run: str, out: str, step: Step = None, dtype: str = "float32", adapter: bool = False
) -> int:
    """Write a checkpoint of a run as a Hugging Face folder, or its adapter alone."""
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype = {dtype!r}; use float32 or bfloat16")
    if Path(out).exists():
        raise FileExistsError(f"{out} exists already; name a folder that does not, or remove it")
    config = _run_config(run)
    if adapter and not config.lora.on:
        raise ConfigError(f"{run} trained all weights (lora.rank = 0); export it without --adapter")
    if adapter and dtype != "float32":
        raise ConfigError(f"dtype = {dtype!r}: an adapter is written in float32, as it was trained")
    model = loading.load_model(config)
    trained, source = _restored(model, config, run, step)
    exporting.write(
        *(config, model.loaded.config, model.tokenizer),
        adapter=(out, trained) if adapter else None,
        model=None if adapter else (out, model.whole(trained)),
        dtype=dtype,
        say=lambda what, where: print(f"wrote {what} of {source} to {where} ({dtype})"),
    )
    return EXIT_OK


def _run_config(run: str) -> Config:
    path = Path(run) / folder.CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{run} is not a run folder: it has no {folder.CONFIG}")
    return configs.load(path)


def _sampled(
    model: loading.Model, config: Config, run: str | None, step: Step
) -> tuple[Params, str]:
    """The weights that the engine will sample from, and what to call them."""
    remote = config.engine.remote
    if remote.url is None or remote.weights is not None:
        return _weights(model, config, run, step)
    if run is not None:
        raise ConfigError(
            f"engine.remote.url = {remote.url!r} samples from weights of its own, not from a "
            f"checkpoint of {run}; set engine.remote.weights, or leave --checkpoint out"
        )
    return model.loaded.params, f"the model at {remote.url}"


def _weights(
    model: loading.Model, config: Config, run: str | None, step: Step
) -> tuple[Params, str]:
    """The weights that the sampler reads, and what to call them."""
    if run is None:
        return model.loaded.params, config.model.path
    trained = _run_config(run)
    model = loading.with_adapter(model._replace(adapter=None), trained)
    params, source = _restored(model, trained, run, step)
    return model.whole(params), source


def _restored(model: loading.Model, config: Config, run: str, step: Step) -> tuple[Params, str]:
    """What a run of this config has trained so far, and what to call it."""
    opt = build.build_optimizer(config)
    shapes = states.abstract(model.trained, opt.transform)
    places = model.places(model.trained, opt.transform)
    with checkpointing.Checkpointer(
        folder.checkpoints_of(Path(run), config.checkpoint.dir),
        config.checkpoint,
        say=print,
        read_only=True,
    ) as checkpointer:
        if step == "best":
            step = checkpointer.best_step()
        if step is not None and step not in checkpointer.steps():
            raise ConfigError(
                f"{run} has no checkpoint of step {step}; it has {checkpointer.steps()}"
            )
        restored = checkpointer.restore(states.targets(shapes, places), step)
    if restored is None:
        raise FileNotFoundError(f"{run} holds no checkpoint yet")
    return restored.state.params, f"step {restored.step} of {run}"
