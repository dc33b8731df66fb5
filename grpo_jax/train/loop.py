"""The loop: rollout, prepare, score, update, report, save. It only calls; each room has its test.

The loop receives built objects and never sees a configuration file. All randomness comes from one
root key folded with the step, so a resumed run draws what the uninterrupted one would have drawn.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from grpo_jax.core.batch import Batch, Counts, TokenScores
from grpo_jax.core.policy import Params
from grpo_jax.data.prompts import Prompt, PromptStream
from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.models.work import Work
from grpo_jax.rewards.scoring import Scorer
from grpo_jax.sampling.engine import RolloutEngine
from grpo_jax.sampling.generate import SamplingConfig
from grpo_jax.scale import chips, multihost, notice
from grpo_jax.scale.processes import Gather
from grpo_jax.train import critic as critics
from grpo_jax.train import evaluate as evaluating
from grpo_jax.train import experts, prepare, reporting
from grpo_jax.train import layout as layouts
from grpo_jax.train import rollout as rollouts
from grpo_jax.train.checkpoint import Checkpointer
from grpo_jax.train.interrupt import Interrupt
from grpo_jax.train.layout import Laid, Layout
from grpo_jax.train.state import TrainState
from grpo_jax.train.step import ScoreStep, TrainStep


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Where a run lives and how long it goes on."""

    dir: str = "runs/default"  # run folder
    steps: int = 100  # rollouts in the whole run
    seed: int = 0  # decides every draw of the sampler
    resume: Literal["auto", "never"] = "auto"  # auto goes on with an unfinished run in dir
    export: bool = True  # write the final weights as a Hugging Face folder
    max_nonfinite: int = 3  # stop after so many steps in a row with a non-finite loss or gradient
    dump_steps: tuple[int, ...] = ()  # steps whose loss inputs are written for `grpo-jax parity`
    profile_steps: tuple[int, ...] = ()  # steps whose trace and memory profile are written

    def __post_init__(self):
        for name in ("steps", "max_nonfinite"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed = {self.seed} is negative; use 0 or more")


class Parts(NamedTuple):
    """Everything a run is made of, built."""

    engine: RolloutEngine
    sampling: SamplingConfig
    tokenizer: Tokenizer
    scorer: Scorer
    stream: PromptStream[Prompt]
    held_out: list[Prompt]
    rollout: rollouts.RolloutConfig
    evaluate: evaluating.EvaluateConfig
    rules: prepare.Rules
    layout: Layout
    train_step: TrainStep
    work: Work  # of the train step, for a token
    score_previous: ScoreStep | None  # None where the current forward pass already says it
    score_reference: ScoreStep | None  # None without a KL penalty
    count_experts: ScoreStep | None  # None without routed experts
    score_teacher: ScoreStep | None  # None without distillation
    score_current: Callable[[Params, Batch], TokenScores]  # compiled only when a step is dumped
    reference: Params | None
    whole: Callable[[Params], Params]  # what is trained -> what the sampler reads
    teacher: Params | None
    critic: critics.Critic | None  # None without values
    place: Callable[[Batch], Batch]  # host arrays onto the mesh
    dump: Callable[[Path, Batch, Counts, TokenScores], Path]
    checkpointer: Checkpointer
    reporter: reporting.Reporter
    # Over processes that hold different groups. In `grpo-jax train` all hold the whole rollout, and
    # this is `processes.alone`: so every number is that of a run of one process.
    gather: Gather


class Outcome(NamedTuple):
    """How a run ended."""

    state: TrainState
    step: int  # steps finished
    reason: Literal["finished", "interrupted", "preempted", "target"]
    first: dict[str, float]  # metrics of the first and
    last: dict[str, float]  # the last evaluation; empty where there was none


class NonFiniteError(RuntimeError):
    """Too many steps in a row had a non-finite loss or gradient."""


def evaluation_key(root: jax.Array) -> jax.Array:
    """The key of every evaluation: the same draws each time, so that differences mean something."""
    return jax.random.fold_in(root, 2**31 - 1)


def train(
    parts: Parts, state: TrainState, config: RunConfig, start: int, notes: dict[str, Any]
) -> Outcome:
    """Run steps `start + 1 .. config.steps`.

    Args:
      parts: the built objects.
      state: parameters, moments and counters; donated.
      config: how long, and what to do about faults.
      start: steps already finished.
      notes: what earlier steps left for later ones: `first`, `last` evaluations and `nonfinite`
        steps in a row; saved with each checkpoint.

    Returns:
      The last state and how the run ended. It is saved in every case but a crash.

    Raises:
      NonFiniteError: `config.max_nonfinite` steps in a row; the last good checkpoint stays.
    """
    root, reporter = jax.random.key(config.seed), parts.reporter
    step, reason = start, "finished"
    with Interrupt(reporter.say) as interrupt:
        if start == 0 and parts.evaluate.at_start:
            notes["first"] = notes["last"] = _evaluate(parts, state, root, 0)
        if _target_hit(parts.evaluate, notes["last"]):  # at the start, or before it was killed
            return Outcome(state, step, "target", notes["first"], notes["last"])
        reporter.header()
        while step < config.steps:
            step += 1
            key = jax.random.fold_in(root, step)
            state, metrics = _traced_step(parts, state, config, key, step)
            reporter.step(step, metrics)
            _watch(metrics, notes, config, parts, step)
            finished = step == config.steps
            if _evaluation_due(parts.evaluate, step, finished):
                notes["last"] = _evaluate(parts, state, root, step)
                metrics |= notes["last"]  # only this step's own: it decides which one is best
            hit = _target_hit(parts.evaluate, notes["last"])
            asked = _asked(interrupt)
            stop = finished or hit or asked is not None
            if stop or parts.checkpointer.due(step):
                _save(parts, state, step, notes, metrics)
            if stop:
                reason = "finished" if finished else "target" if hit else asked or "interrupted"
                break
    return Outcome(state, step, reason, notes["first"], notes["last"])


def _asked(interrupt: Interrupt) -> Literal["interrupted", "preempted"] | None:
    """Why the run is to end now, if any process was asked: all end after the same step."""
    asked = multihost.everyone(interrupt.requested, "the end of a step")
    if {"SIGTERM", notice.NOTICE} & set(asked):
        return "preempted"
    return "interrupted" if any(asked) else None


def _step(
    parts: Parts, state: TrainState, config: RunConfig, key: jax.Array, step: int
) -> tuple[TrainState, dict[str, float]]:
    """One rollout and its updates."""
    begin = time.perf_counter()
    parts.reporter.phase("sampling")
    rollout, drawn = prepare.sample(
        lambda k: _collect(parts, state.params, k), key, parts.rules, parts.rollout, parts.gather
    )
    parts.reporter.phase("scoring")
    mark = time.perf_counter()
    weighed = prepare.weigh(rollout, parts.rules)
    batch = prepare.collate(rollout, weighed, parts.rollout, parts.gather)
    load = _expert_load(parts, state, batch)
    batch = _score(parts, state, batch)
    prepared = prepare.finish(rollout, weighed, batch, parts.rules, parts.gather)
    scored = time.perf_counter()
    parts.reporter.phase("updating")
    state, updates = _update(parts, state, config, prepared.batch, step)
    updated = time.perf_counter()
    if parts.reporter.wants_samples(step):
        rows = prepare.sample_rows(step, rollout, prepared, parts.tokenizer)
        parts.reporter.samples(step, rows)
    end = time.perf_counter()
    metrics = rollouts.summary(rollout, parts.gather) | drawn | prepared.metrics | updates | load
    metrics |= {f"seconds/{name}": value for name, value in rollout.seconds.items()}
    metrics |= {
        "seconds/score": scored - mark,
        "seconds/update": updated - scored,
        "seconds/step": end - begin,
        "programs/sampler": parts.engine.programs,
    }
    metrics |= _speed(parts, metrics, step)
    return state, metrics | _programs(parts)


def _speed(parts: Parts, metrics: Mapping[str, float], step: int) -> dict[str, float]:
    """Tokens sampled a second of the whole step; and MFU of the updates, on chips we know."""
    devices = jax.device_count()
    sampled = metrics["length/total"] / metrics["seconds/step"]
    speed = {"tokens_per_second": sampled, "tokens_per_second_per_chip": sampled / devices}
    mfu = chips.utilisation(_flops(parts, metrics, step), metrics["seconds/update"], devices)
    return speed if mfu is None else speed | {"mfu": mfu}


def _flops(parts: Parts, metrics: Mapping[str, float], step: int) -> float:
    """What the updates of a step needed: of the policy, unless the critic warms up, and the critic.

    Every one of several epochs is counted.
    """
    tokens, trained = metrics["packing/tokens"], metrics["packing/trained_tokens"]
    critic = parts.critic
    if critic is None:
        return parts.work.total(tokens, trained)
    alone = step <= critic.warmup_steps
    policy = 0.0 if alone else parts.work.total(tokens, trained)
    return policy + critic.work.total(tokens, trained)


def _traced_step(
    parts: Parts, state: TrainState, config: RunConfig, key: jax.Array, step: int
) -> tuple[TrainState, dict[str, float]]:
    """One step, with a profile of it where one was asked for: a trace, and the memory after it."""
    if step not in config.profile_steps:
        return _step(parts, state, config, key, step)
    place = parts.reporter.folder / "profile" / f"step_{step:06d}"
    place.mkdir(parents=True, exist_ok=True)
    with jax.profiler.trace(str(place)):
        result = _step(parts, state, config, key, step)
    jax.profiler.save_device_memory_profile(place / f"memory_{multihost.index()}.prof")
    parts.reporter.say(f"step {step}: its profile is in {place}")
    return result


def _programs(parts: Parts) -> dict[str, float]:
    """How many programs the updates and the score passes were compiled into so far."""
    scores = [parts.score_previous, parts.score_reference, parts.score_teacher, parts.count_experts]
    updates = [parts.train_step]
    if parts.critic is not None:
        scores.append(parts.critic.score)
        updates.append(parts.critic.step)
    return {
        "programs/train": sum(step.programs for step in updates),
        "programs/score": sum(step.programs for step in scores if step is not None),
    }


def _collect(parts: Parts, params: Params, key: jax.Array) -> rollouts.Rollout:
    return rollouts.collect(
        parts.engine,
        parts.whole(params),
        parts.tokenizer,
        parts.scorer,
        next(parts.stream),
        parts.rollout.completions_per_prompt,
        key,
    )


def _expert_load(parts: Parts, state: TrainState, batch: Batch) -> dict[str, float]:
    """Say how evenly the policy spreads the rollout's tokens over its experts."""
    if parts.count_experts is None:
        return {}
    placed = parts.place(parts.layout.lay_out(batch).batch)
    return experts.report(multihost.fetch(parts.count_experts(state.params, placed)))


def _score(parts: Parts, state: TrainState, batch: Batch) -> Batch:
    """Add log-probabilities and values of everyone that somebody reads, and of nobody else."""
    passes = {
        "prev_logprobs": (parts.score_previous, state.params),
        "reference_logprobs": (parts.score_reference, parts.reference),
        "teacher_logprobs": (parts.score_teacher, parts.teacher),
    }
    if parts.critic is not None and state.critic is not None:
        passes["values"] = (parts.critic.score, state.critic.params)
    wanted = {name: (score, params) for name, (score, params) in passes.items() if score}
    if not wanted:
        return batch
    laid, width = parts.layout.lay_out(batch), batch.tokens.shape[1]
    placed = parts.place(laid.batch)
    scored = {n: multihost.fetch(score(params, placed)) for n, (score, params) in wanted.items()}
    return batch.replace(**{name: laid.restore(x, width) for name, x in scored.items()})


def _update(
    parts: Parts, state: TrainState, config: RunConfig, batch: Batch, step: int
) -> tuple[TrainState, dict[str, float]]:
    """Run the optimizer updates of one rollout, the critic's first.

    Metrics are those of `prepare.merge_updates`. While the critic warms up there are none of the
    policy, which stays as it is.
    """
    found: dict[str, float] = {}
    updates = _lay_out(parts, batch)
    critic, state = state.critic, dataclasses.replace(state, critic=None)
    if parts.critic is not None and critic is not None:
        critic, found = _update_critic(parts, parts.critic, critic, updates, step)
        if step <= parts.critic.warmup_steps:
            names = ("update_applied", "skipped_empty", "skipped_nonfinite")
            return dataclasses.replace(state, critic=critic), found | dict.fromkeys(names, 0.0)
    results = []
    for i, (laid, counts) in enumerate(updates):
        part = laid.batch.replace(values=None, returns=None)  # the policy's loss does not read them
        placed = parts.place(part)
        asked = step in config.dump_steps
        current = parts.score_current(state.params, placed) if asked else None
        state, metrics = parts.train_step(state, placed, counts)
        metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
        results.append(metrics)
        bad = metrics["skipped_nonfinite"] > 0
        if bad or asked:
            if current is None:  # the refused update has left the parameters as they were
                current = parts.score_current(state.params, placed)
            folder = parts.reporter.folder / ("nonfinite" if bad else "dumps")
            path = parts.dump(folder / f"step_{step:06d}_update_{i}.npz", part, counts, current)
            if bad:
                parts.reporter.say(
                    f"step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}: "
                    f"no update was applied; the inputs are in {path}"
                )
    metrics = found | prepare.merge_updates(results) | layouts.report([laid for laid, _ in updates])
    return dataclasses.replace(state, critic=critic), metrics


def _update_critic(
    parts: Parts,
    critic: critics.Critic,
    state: TrainState,
    updates: Sequence[tuple[Laid, Counts]],
    step: int,
) -> tuple[TrainState, dict[str, float]]:
    """Run the critic's updates, on the parts of the rollout that the policy's take too."""
    results = []
    for laid, counts in updates:
        placed = parts.place(laid.batch)
        state, metrics = critic.step(state, placed, counts)
        results.append({name: float(x) for name, x in jax.device_get(metrics).items()})
        if results[-1]["skipped_nonfinite"] > 0:
            parts.reporter.say(
                f"step {step}: critic's loss {results[-1]['loss']}, gradient norm "
                f"{results[-1]['grad_norm']}: no update was applied to it"
            )
    report = layouts.report([laid for laid, _ in updates])  # also while the critic is alone
    return state, critics.report(prepare.merge_updates(results)) | report


def _lay_out(parts: Parts, batch: Batch) -> list[tuple[Laid, Counts]]:
    """The updates of a rollout as the devices get them, with their counts.

    Further epochs go over the same ones in the same order.
    """
    split = prepare.split_updates(batch, parts.rollout.updates_per_rollout, parts.gather)
    return [(parts.layout.lay_out(part), counts) for part, counts in split] * parts.rollout.epochs


def _watch(
    metrics: dict[str, float], notes: dict[str, Any], config: RunConfig, parts: Parts, step: int
) -> None:
    """Count non-finite steps in a row and end the run when there are too many."""
    if metrics["skipped_empty"] > 0:
        parts.reporter.say(
            f"step {step}: nothing was left to train after the filters in "
            f"{metrics['skipped_empty']:.0f} of {parts.rollout.updates} update(s); "
            f"{metrics['update_applied']:.0f} applied"
        )
    bad = metrics["skipped_nonfinite"] > 0 or metrics.get("critic/skipped_nonfinite", 0) > 0
    notes["nonfinite"] = notes["nonfinite"] + 1 if bad else 0
    if notes["nonfinite"] >= config.max_nonfinite:
        raise NonFiniteError(
            f"{notes['nonfinite']} steps in a row had a non-finite loss or gradient, the last one "
            f"step {step}; none of those updates was applied. Look at the inputs with "
            f"`grpo-jax parity {parts.reporter.folder}/nonfinite/…`; run.max_nonfinite is the limit"
        )


def _evaluation_due(config: evaluating.EvaluateConfig, step: int, last: bool) -> bool:
    return (last and config.at_end) or (config.every > 0 and step % config.every == 0)


def _target_hit(config: evaluating.EvaluateConfig, metrics: dict[str, float]) -> bool:
    """Say whether the metric that ends a run early has reached its threshold."""
    if config.stop_metric is None or not metrics:
        return False
    if config.stop_metric not in metrics:
        raise ValueError(
            f"evaluate.stop_metric = {config.stop_metric!r} is not measured; "
            f"there are {', '.join(sorted(metrics))}"
        )
    return metrics[config.stop_metric] >= config.stop_threshold


def _evaluate(parts: Parts, state: TrainState, root: jax.Array, step: int) -> dict[str, float]:
    parts.reporter.phase("evaluating")
    result = evaluating.evaluate(
        parts.engine,
        parts.whole(state.params),
        parts.tokenizer,
        parts.scorer,
        parts.held_out,
        parts.evaluate,
        parts.sampling,
        evaluation_key(root),
    )
    parts.reporter.evaluation(step, result.metrics, result.seconds)
    return result.metrics


def _save(
    parts: Parts, state: TrainState, step: int, notes: dict[str, Any], metrics: dict[str, float]
) -> None:
    parts.reporter.phase("saving")
    run = {"stream": parts.stream.state(), "notes": notes}
    parts.checkpointer.save(step, state, run, metrics)
