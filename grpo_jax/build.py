"""Config -> built objects: model, engine, state, steps, and everything the loop needs."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax

from grpo_jax import engines, loading
from grpo_jax.config import Config, ConfigError
from grpo_jax.core.batch import Batch, Counts, TokenScores
from grpo_jax.core.loss_config import LossConfig
from grpo_jax.core.policy import Params, Policy
from grpo_jax.data import prompts as prompting
from grpo_jax.data import tokenizer as tokenizers
from grpo_jax.data import trajectories
from grpo_jax.models import hf, hub, transformer, work
from grpo_jax.rewards.scoring import Scorer
from grpo_jax.scale import mesh as meshes
from grpo_jax.scale import multihost, processes, rules
from grpo_jax.train import checkpoint as checkpointing
from grpo_jax.train import critic as critics
from grpo_jax.train import dump, loop, optimizer, prepare, reporting
from grpo_jax.train import state as states
from grpo_jax.train import step as steps
from grpo_jax.train.layout import Layout
from grpo_jax.train.state import TrainState

_MICRO_ROWS = 8  # rows a device sees at one time, where neither rows nor tokens are set


class Teacher(NamedTuple):
    """The model that is distilled: its own weights, at their own places."""

    score: steps.ScoreStep
    params: Params


def load_teacher(config: Config, model: loading.Model) -> Teacher | None:
    """Load the teacher where the estimator asks for one; `check` has looked at its folder.

    It scores without top-k and top-p, at the sampler's temperature, as the reference policy does.
    """
    if not config.advantage.needs_teacher:
        return None
    loaded = hf.load_model(
        str(config.teacher.path),
        compute_dtype=config.teacher.compute_dtype or config.model.compute_dtype,
        place=lambda shapes: rules.partition(shapes, model.mesh, model.rules, say=loading.quiet),
    )
    places = model.places(loaded.params, optax.identity())
    score = steps.make_score_step(
        loaded.policy,
        model.sampling.filter,
        unfiltered=True,
        micro_batches=build_layout(config, model).micro_batches,
        chunk_size=config.rollout.head_chunk,
        places=places,
    )
    return Teacher(score, jax.device_put(loaded.params, places.state.params))


def on_policy(loss: LossConfig, updates: int) -> LossConfig:
    """Use the current forward pass as the previous one where the two are the same numbers.

    With one update a rollout the ratio is exactly 1 in value, with the gradient of the current
    log-probabilities; a separate pass would compute the same at the price of another forward.
    """
    if updates > 1:
        return loss
    try:
        return dataclasses.replace(loss, force_on_policy_ratio=True)
    except ValueError:  # CISPO keeps its own ratio
        return loss


def check(config: Config, model: loading.Model, data: prompting.PromptSets) -> None:
    """Refuse what would only fail in the middle of a run.

    Raises:
      ConfigError: a prompt that does not fit the context with its completion, a teacher that
        does not fit the policy, or no held-out prompts to evaluate.
      ValueError: a warm-up longer than the run, or rows that do not divide over the devices.
    """
    updates = config.run.steps * config.rollout.updates
    optimizer.build_schedule(config.optimizer, updates)
    if config.advantage.needs_values:
        optimizer.build_schedule(config.critic.optimizer, updates)
    layout = build_layout(config, model)
    evaluates = config.evaluate.at_start or config.evaluate.at_end or config.evaluate.every
    if evaluates and not data.held_out:
        raise ConfigError(
            f"data.eval_size = {config.data.eval_size} leaves no held-out prompts to evaluate; "
            "raise it, or set evaluate.at_start and evaluate.at_end to false"
        )
    longest = max(len(prompt.ids) for prompt in [*data.train, *data.held_out])
    new = max(config.sampling.max_new_tokens, config.evaluate.max_new_tokens or 0)
    if longest + new > model.loaded.config.max_length:
        raise ConfigError(
            f"the longest prompt has {longest} tokens, and with {new} new ones it exceeds the "
            f"model's context of {model.loaded.config.max_length}; lower data.max_prompt_tokens "
            "or sampling.max_new_tokens"
        )
    _check_widths(
        config, layout, max(len(p.ids) for p in data.train) + config.sampling.max_new_tokens
    )
    engines.check_trainable(config)
    if config.teacher.path is not None:
        _check_teacher(config.teacher.path, model, longest + new)


def _check_teacher(path: str, model: loading.Model, longest: int) -> None:
    """Refuse a teacher that reads other token ids, or less than the policy writes."""
    theirs, vocabulary = hf.hf_config.read_config(path), model.loaded.config.vocab_size
    if theirs.vocab_size < vocabulary:
        raise ConfigError(
            f"teacher.path = {path!r} knows {theirs.vocab_size} token ids, and the policy writes "
            f"{vocabulary}; use models that share one tokenizer"
        )
    if theirs.max_length < longest:
        raise ConfigError(
            f"teacher.path = {path!r} has a context of {theirs.max_length} tokens, and prompt and "
            f"completion may have {longest}; lower data.max_prompt_tokens or "
            "sampling.max_new_tokens"
        )
    try:
        tokenizers.check_same_ids(model.tokenizer, hub.local_folder(path), "teacher.path")
    except ValueError as error:
        raise ConfigError(str(error)) from error


def build_optimizer(config: Config) -> optimizer.Optimizer:
    """The policy's optimizer, over all updates of the run; a frozen router does not decay."""
    settings = config.optimizer
    if config.model.freeze_router:
        settings = dataclasses.replace(settings, no_decay=(*settings.no_decay, "mlp/router/"))
    return optimizer.build_optimizer(settings, config.run.steps * config.rollout.updates)


def build_layout(config: Config, model: loading.Model) -> Layout:
    """How batches lie on the devices.

    Raises:
      ConfigError: unpacked rows that do not divide over micro-batches and devices.
      ValueError: rows whose tokens do not divide over the context axis.
    """
    rollout, shards = config.rollout, meshes.row_shards(model.mesh)
    packed, multiple = config.packing.enabled, config.rollout.length_multiple
    rules.check_width(config.packing.row_length if packed else multiple, model.mesh)
    micro = rollout.micro_batch_size
    if rollout.micro_batch_tokens is not None:
        return Layout(config.packing, shards, micro_tokens=rollout.micro_batch_tokens)
    if config.packing.enabled:
        return Layout(config.packing, shards, micro_rows=micro or 1)
    rows, micro = rollout.rows // rollout.updates_per_rollout, micro or _MICRO_ROWS
    if rows % (micro * shards):
        raise ConfigError(
            f"the {rows} rows of an update do not divide over rollout.micro_batch_size = "
            f"{micro} rows × {shards} devices; use a multiple of {micro * shards}"
        )
    return Layout(config.packing, shards, micro_rows=micro)


def _check_widths(config: Config, layout: Layout, longest: int) -> None:
    """Refuse sequences that would not fit a packed row, and rows that would not fit the budget."""
    width = trajectories.bucket_length(longest, config.rollout.length_multiple)
    if config.packing.enabled:
        width, multiple = config.packing.row_length, config.packing.length_multiple
        if trajectories.padded_length(longest, multiple) > width:
            raise ConfigError(
                f"prompt and completion may have {longest} tokens, more than packing.row_length = "
                f"{width}; raise it, or lower data.max_prompt_tokens or sampling.max_new_tokens"
            )
    try:
        layout.rows_at_once(width)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def build_stream(
    config: Config, data: prompting.PromptSets
) -> prompting.PromptStream[prompting.Prompt]:
    """Training prompts in the order that the seed decides."""
    return prompting.PromptStream(
        data.train,
        int(config.rollout.prompts_per_step * config.filters.batch_multiplier),
        seed=config.data.seed,
        remainder=config.data.remainder,
    )


class Critic(NamedTuple):
    """What a critic begins with, and where it lives."""

    trunk: Policy
    params: Params  # at their places already
    optimizer: optimizer.Optimizer
    shapes: TrainState
    places: states.Placement
    work: work.Work


def build_critic(config: Config, model: loading.Model) -> Critic | None:
    """The policy's trunk, without a head of its own, and a value head; where gae asks for one."""
    if not config.advantage.needs_values:
        return None
    # A trunk has no use for an untied head: [V, D] with two moments that nobody would ever read.
    shape = dataclasses.replace(model.loaded.config, tie_embeddings=True, freeze_router=False)
    trunk = {name: part for name, part in model.loaded.params.items() if name != "head"}
    params = critics.init_params(trunk, shape.hidden_size)
    updates = config.run.steps * config.rollout.updates
    opt = optimizer.build_optimizer(config.critic.optimizer, updates)
    shapes = states.abstract(params, opt.transform)
    places = model.places(params, opt.transform, say=loading.quiet)
    return Critic(
        *(transformer.policy_for(shape), params, opt, shapes, places),
        work=work.of_trunk(shape, trunk),
    )


def initial_state(
    model: loading.Model,
    opt: optimizer.Optimizer,
    critic: Critic | None,
    checkpointer: checkpointing.Checkpointer | None,
) -> tuple[TrainState, states.Placement, checkpointing.Restored | None]:
    """The state to begin with, the policy's shardings, and what was restored, if anything was."""
    shapes = states.abstract(model.trained, opt.transform)
    places = model.places(model.trained, opt.transform)
    if checkpointer is not None:
        target = states.targets(shapes, places)
        if critic is not None:
            beside = states.targets(critic.shapes, critic.places)
            target = dataclasses.replace(target, critic=beside)
        restored = checkpointer.restore(target)
        if restored is not None:
            return restored.state, places, restored
    state = states.create(model.trained, opt.transform, places)
    if critic is not None:
        beside = states.create(critic.params, critic.optimizer.transform, critic.places)
        state = dataclasses.replace(state, critic=beside)
    return state, places, None


class PolicySteps(NamedTuple):
    """The programs of the policy, each compiled at its first call."""

    train: steps.TrainStep
    previous: steps.ScoreStep | None  # None where nobody reads it
    reference: steps.ScoreStep | None
    current: steps.Program  # all that the loss is given, for dumps


def policy_steps(
    config: Config, model: loading.Model, opt: optimizer.Optimizer, places: states.Placement
) -> PolicySteps:
    """The programs that a config asks for; of a model only its functions and its mesh are read."""
    loss = on_policy(config.loss_fn, config.rollout.updates)
    needs_previous = (
        not loss.force_on_policy_ratio
        or config.filters.seq_logprob_error_threshold is not None
        or config.advantage.needs_policy_logprobs
    )
    layout, policy = build_layout(config, model), model.policy
    shared: Any = {
        "micro_batches": layout.micro_batches,
        "chunk_size": config.rollout.head_chunk,
    }
    base = places if model.adapter is None else _frozen_places(model)
    filters = model.sampling.filter

    return PolicySteps(
        train=steps.make_train_step(
            policy, opt, loss, filters, max_segments=layout.max_segments, places=places, **shared
        ),
        previous=steps.make_score_step(policy, filters, places=places, **shared)
        if needs_previous
        else None,
        reference=steps.make_score_step(
            model.loaded.policy, filters, unfiltered=True, places=base, **shared
        )
        if loss.kl_on or config.advantage.needs_reference
        else None,
        current=steps.make_full_score_step(policy, loss, filters, places=places, **shared),
    )


def build_parts(
    config: Config,
    model: loading.Model,
    data: prompting.PromptSets,
    scorer: Scorer,
    stream: prompting.PromptStream[prompting.Prompt],
    opt: optimizer.Optimizer,
    places: states.Placement,
    critic: Critic | None,
    checkpointer: checkpointing.Checkpointer,
    reporter: reporting.Reporter,
) -> loop.Parts:
    """Compile-ready steps and everything around them."""
    loss = on_policy(config.loss_fn, config.rollout.updates)
    teacher = load_teacher(config, model)
    filter_config = model.sampling.filter
    layout = build_layout(config, model)
    compiled = policy_steps(config, model, opt, places)
    return loop.Parts(
        engine=engines.make_engine(config, model),
        sampling=model.sampling,
        tokenizer=model.tokenizer,
        scorer=scorer,
        stream=stream,
        held_out=data.held_out,
        rollout=config.rollout,
        evaluate=config.evaluate,
        layout=layout,
        rules=prepare.Rules(config.shaping, config.filters, config.advantage, filter_config.active),
        train_step=compiled.train,
        work=work.of_training(model.loaded.config, model.loaded.params, model.adapter),
        score_previous=compiled.previous,
        score_reference=compiled.reference,
        count_experts=steps.make_count_step(
            model.policy, micro_batches=layout.micro_batches, places=places
        ),
        score_teacher=None if teacher is None else teacher.score,
        score_current=compiled.current,
        reference=None if compiled.reference is None else model.loaded.params,
        # Bound methods would keep the loaded weights: the state has a copy of them.
        whole=_itself if model.adapter is None else model.whole,
        teacher=None if teacher is None else teacher.params,
        critic=None if critic is None else _critic_steps(config, critic, layout),
        place=lambda batch: rules.place(batch, places.mesh),
        dump=lambda path, batch, counts, current: _dump(
            path, batch, counts, current, loss, filter_config.active
        ),
        gather=processes.alone,  # every process holds the whole rollout
        checkpointer=checkpointer,
        reporter=reporter,
    )


def _itself(trained: Params) -> Params:
    """All weights, where all are trained."""
    return trained


def _dump(
    path: Path,
    batch: Batch,
    counts: Counts,
    current: TokenScores,
    loss: LossConfig,
    filtering_on: bool,
) -> Path:
    """Write the inputs of a loss; all processes bring the scores together, one writes."""
    current = multihost.fetch(current)
    if not multihost.is_main():
        return path
    filtering_on = filtering_on or batch.kept_ids is not None
    return dump.dump_step(path, batch, counts, current, loss, filtering_on=filtering_on)


def _frozen_places(model: loading.Model) -> states.Placement:
    """Where the weights below an adapter lie, for the reference policy, which is they."""
    return model.places(model.loaded.params, optax.identity(), say=loading.quiet)


def _critic_steps(config: Config, critic: Critic, layout: Layout) -> critics.Critic:
    """Compile-ready steps of a critic, cut into micro-batches as the policy's are."""
    return critics.Critic(
        score=critics.make_value_step(
            critic.trunk, micro_batches=layout.micro_batches, places=critic.places
        ),
        step=critics.make_critic_step(
            critic.trunk,
            critic.optimizer,
            config.critic.value_loss,
            micro_batches=layout.micro_batches,
            places=critic.places,
        ),
        work=critic.work,
        warmup_steps=config.critic.warmup_steps,
    )
