"""The train step and the score step: the two compiled programs that touch parameters.

One optimizer update on a whole global batch, cut into micro-batches:

    g = Σ_m ∇ loss_m        each loss_m is a sum over the counts of the *whole* batch, so that
                            micro-batches add up to the full batch and nothing is averaged
    g ← scale · g           only where the loss asks for survivors as denominator
    θ ← θ + optimizer(g)    only if loss and gradient are finite and something is trained

Symbols: `B` rows, `T` tokens a row, `M` micro-batches.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from grpo_jax.core import diagnostics, lanes, logprobs, losses, reductions, single_pass
from grpo_jax.core.batch import Batch, Counts, TokenScores
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.losses import LossConfig
from grpo_jax.core.policy import Grafted, Params, Policy
from grpo_jax.scale import mesh as meshes
from grpo_jax.scale import rules
from grpo_jax.train.micro_batches import Cut, GradientStep, Metrics, mapped, summed_gradient
from grpo_jax.train.optimizer import Optimizer
from grpo_jax.train.state import Placement, TrainState


class Program:
    """A compiled function of (state or parameters, batch, …) that counts its compilations.

    Where `max_segments` is given, a batch whose rows hold more sequences is refused on the host:
    inside the compiled program the sequences beyond would be left out without a word. `frozen`
    stands behind the arguments of every call.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        max_segments: int | None = None,
        frozen: tuple[Params, ...] = (),
        **jit: Any,
    ):
        self.programs = 0
        """How many programs were compiled so far: one a shape of the batch."""
        self.max_segments, self.frozen = max_segments, frozen

        @functools.wraps(function)
        def counted(*arguments: Any) -> Any:
            self.programs += 1  # runs once a trace, never in the compiled program
            return function(*arguments)

        self._jitted = jax.jit(counted, **jit)

    def trace(self, *arguments: Any) -> Any:
        """Trace for these arguments, as `jax.jit(...).trace` does."""
        return self._jitted.trace(*arguments, *self.frozen)

    def lower(self, *arguments: Any) -> Any:
        """Lower for these arguments, as `jax.jit(...).lower` does."""
        return self._jitted.lower(*arguments, *self.frozen)

    def __call__(self, first: Any, batch: Batch, *rest: Any) -> Any:
        if self.max_segments is not None:
            reductions.check_slots(batch.segment_ids, self.max_segments)
        return self._jitted(first, batch, *rest, *self.frozen)


TrainStep = Program  # (state, batch, counts) -> (state, metrics)
ScoreStep = Program  # (params, batch) -> f32[B, T]


def _frozen(policy: Policy | Grafted) -> tuple[Params, ...]:
    """What a program of this policy is given besides its own arguments."""
    return (policy.frozen,) if isinstance(policy, Grafted) else ()


def _bound(policy: Policy | Grafted, frozen: tuple[Params, ...]) -> Policy:
    return policy.bind(*frozen) if isinstance(policy, Grafted) else policy


def make_train_step(
    policy: Policy | Grafted,
    optimizer: Optimizer,
    loss_config: LossConfig,
    filter_config: FilterConfig,
    *,
    micro_batches: Cut = 1,
    chunk_size: lanes.Chunk | None = None,
    max_segments: int = 1,
    entropy: bool = False,
    places: Placement | None = None,
) -> TrainStep:
    """Compile one optimizer update.

    Args:
      policy: the model; a grafted one trains its part and leaves the frozen weights alone.
      optimizer: its transformation sees the gradient of the whole batch, once.
      loss_config: the loss.
      filter_config: temperature and filters, as the sampler used them. A batch with `kept_ids`
        brings the kept sets themselves: they replace top-k, top-p and min-p.
      micro_batches: into how many parts the rows are cut, or a function of (rows, width) that says
        it; bounds the memory, not the result.
      chunk_size: tokens a device turns into logits at one time; "auto" lets `lanes.chunk_length`
        choose, None: all of a micro-batch.
      max_segments: most sequences packed in one row; 1 when rows are not packed.
      entropy: also report the mean entropy; costs a pass over the logits.
      places: `state.placement(...)`; None: everything on one device.

    Returns:
      `(state, batch, counts) -> (state, metrics)`. The state is donated: the one passed in is gone
      afterwards. The batch is not, so that the inputs of a failed update can be written down.
      Metrics are f32[]; beside those of the loss:
        loss; grad_norm (L2 over all parameters, before the clip); update_norm (L2 of the change of
        the parameters, 0 when skipped); param_norm (after the update); learning_rate (of this
        update); tokens, sequences (what the loss divides by); update_applied (1 or 0);
        gradient_scale (1, or batch tokens over survivors where the loss asks for that);
        skipped_empty, skipped_nonfinite (1 or 0: why not); updates_skipped (so far in this run).

    Raises:
      ValueError: when called, if the rows do not divide over micro-batches and devices.
    """
    settings: Any = (
        *(loss_config, filter_config, micro_batches, chunk_size, max_segments, entropy),
        places,
    )

    def step(
        state: TrainState, batch: Batch, counts: Counts, *frozen: Params
    ) -> tuple[TrainState, Metrics]:
        gradient = _gradient(_bound(policy, frozen), *settings)
        loss, grads, metrics = gradient(state.params, batch, counts)
        state, applied = apply_gradient(state, loss, grads, metrics, counts, optimizer)
        return state, metrics | applied

    return compile_step(step, places, max_segments, _frozen(policy))


def compile_step(
    step: Callable[..., Any],
    places: Placement | None,
    max_segments: int | None = None,
    frozen: tuple[Params, ...] = (),
) -> TrainStep:
    """Compile `(state, batch, counts, *frozen) -> (state, metrics)`, giving the state away."""
    if places is None:
        return Program(step, max_segments, frozen, donate_argnums=0)
    whole = rules.replicated(places.mesh)
    return Program(
        step,
        max_segments,
        frozen,
        donate_argnums=0,
        in_shardings=(
            *(places.state, rules.batch_sharding(places.mesh), whole),
            *(None for _ in frozen),  # where they lie
        ),
        # Left free, the compiler may return a parameter in another layout than it came in, and the
        # next call would compile again.
        out_shardings=(places.state, whole),
    )


def make_gradient_step(
    policy: Policy,
    loss_config: LossConfig,
    filter_config: FilterConfig,
    *,
    micro_batches: Cut = 1,
    chunk_size: lanes.Chunk | None = None,
    max_segments: int = 1,
    entropy: bool = False,
    places: Placement | None = None,
) -> GradientStep:
    """Compile what the train step differentiates, without the update; for looking into a failure.

    Returns:
      `(params, batch, counts) -> (loss f32[], gradient like params, metrics)`.
    """
    gradient = _gradient(
        policy, loss_config, filter_config, micro_batches, chunk_size, max_segments, entropy, places
    )
    if places is None:
        return Program(gradient, max_segments)
    whole = rules.replicated(places.mesh)
    rows = rules.batch_sharding(places.mesh)
    return Program(
        gradient,
        max_segments,
        in_shardings=(places.state.params, rows, whole),
        out_shardings=(whole, places.state.params, whole),
    )


def make_score_step(
    policy: Policy | Grafted,
    filter_config: FilterConfig,
    *,
    unfiltered: bool = False,
    micro_batches: Cut = 1,
    chunk_size: lanes.Chunk | None = None,
    places: Placement | None = None,
) -> ScoreStep:
    """Compile log-probabilities of a batch under given parameters, without gradients.

    Args:
      policy: the model.
      filter_config: temperature and filters, as the sampler used them; the batch's `kept_ids`
        replace top-k, top-p and min-p.
      unfiltered: keep the temperature and drop top-k, top-p, min-p and the kept ids: what
        `reference_logprobs` wants. Without it: what `prev_logprobs` wants.
      micro_batches: into how many parts the rows are cut.
      chunk_size: tokens a device turns into logits at one time; "auto" lets `lanes.chunk_length`
        choose, None: all of a micro-batch.
      places: `state.placement(...)`, of which the parameters' part is used.

    Returns:
      `(params, batch) -> f32[B, T]` in nats; 0 where `token_mask` is False.
    """
    mesh = None if places is None else places.mesh
    kept = filter_config.whole if unfiltered else filter_config

    def score_one(params: Params, batch: Batch, *frozen: Params) -> jax.Array:
        scores_of = _scorer(_bound(policy, frozen), kept, chunk_size, mesh)
        return scores_of(params, batch.replace(kept_ids=None) if unfiltered else batch).logprobs

    return compile_score(score_one, micro_batches, places, _frozen(policy))


def compile_score(
    score_one: Callable[..., Any],
    micro_batches: Cut,
    places: Placement | None,
    frozen: tuple[Params, ...] = (),
) -> ScoreStep:
    """Compile `(params, batch) -> [B, T]` arrays, a micro-batch at a time."""
    mesh = None if places is None else places.mesh

    def score(params: Params, batch: Batch, *frozen: Params) -> Any:
        def one(params: Params, part: Batch) -> Any:
            return score_one(params, part, *frozen)

        return mapped(one, params, batch, micro_batches, mesh)

    if places is None:
        return Program(score, frozen=frozen)
    rows = rules.batch_sharding(places.mesh)
    places_in = (places.state.params, rows, *(None for _ in frozen))
    return Program(score, frozen=frozen, in_shardings=places_in, out_shardings=rows)


def make_count_step(
    policy: Policy | Grafted, *, micro_batches: Cut = 1, places: Placement | None = None
) -> ScoreStep | None:
    """Compile `(params, batch) -> f32[B, layers, experts]`, tokens a row; None without experts."""
    frozen = _frozen(policy)
    if _bound(policy, frozen).expert_counts is None:
        return None

    def count(params: Params, batch: Batch, *frozen: Params) -> jax.Array:
        counts: Any = _bound(policy, frozen).expert_counts
        return counts(params, batch.tokens, batch.positions, batch.segment_ids)

    return compile_score(count, micro_batches, places, frozen)


def make_full_score_step(
    policy: Policy | Grafted,
    loss_config: LossConfig,
    filter_config: FilterConfig,
    *,
    entropy: bool = False,
    micro_batches: Cut = 1,
    chunk_size: lanes.Chunk | None = None,
    places: Placement | None = None,
) -> Program:
    """Compile all that the loss is given of one forward pass, for dumps.

    Returns:
      `(params, batch) -> TokenScores` with exactly what the train step of these configs asks for.
    """
    mesh = None if places is None else places.mesh
    reads = functools.partial(_loss_reads, loss_config, entropy)

    def score_one(params: Params, batch: Batch, *frozen: Params) -> TokenScores:
        scores_of = _scorer(_bound(policy, frozen), filter_config, chunk_size, mesh, reads)
        return scores_of(params, batch)

    return compile_score(score_one, micro_batches, places, _frozen(policy))


def _loss_reads(loss_config: LossConfig, entropy: bool, filtering_on: bool) -> dict[str, bool]:
    """What the loss and its metrics read of a forward pass besides the log-probabilities."""
    return {
        "unfiltered": filtering_on and loss_config.kl_on,
        "entropy": entropy or loss_config.entropy_bonus_on,
        "kept_mass": filtering_on and loss_config.metrics_level == "full",
    }


def filtering_on(filter_config: FilterConfig, batch: Batch) -> bool:
    """Say whether a token of this batch may lie outside of what the sampler kept."""
    return filter_config.active or batch.kept_ids is not None


def _filter_of(filter_config: FilterConfig, batch: Batch) -> FilterConfig:
    """The filters to apply: none where the batch brings the kept sets themselves."""
    return filter_config if batch.kept_ids is None else filter_config.whole


def _scorer(
    policy: Policy,
    filter_config: FilterConfig,
    chunk_size: lanes.Chunk | None,
    mesh: jax.sharding.Mesh | None,
    reads: Callable[[bool], dict[str, bool]] = lambda filtering_on: {},
) -> Callable[[Params, Batch], TokenScores]:
    """Build (params, batch) -> scores of the trained tokens.

    `reads` says, for filters that are on or off, what is wanted beside the log-probabilities.
    """
    policy = rows_stay(policy, mesh)

    def score(params: Params, batch: Batch) -> TokenScores:
        return logprobs.token_scores(
            policy,
            params,
            batch.tokens,
            batch.positions,
            batch.segment_ids,
            filter=_filter_of(filter_config, batch),
            chunk_size=chunk_size,
            mask=batch.token_mask,
            kept_ids=batch.kept_ids,
            lanes=_lanes(mesh),
            **reads(filtering_on(filter_config, batch)),
        )

    return score


def rows_stay(policy: Policy, mesh: jax.sharding.Mesh | None) -> Policy:
    """Pin hidden states to the devices that hold their rows, and a row-wise head to `tensor`.

    Left free, the partitioner guesses: it inserts all-to-alls, and on a mesh of 2 × 2 × 2 with a
    chunked head jax 0.10.2 computed a wrong gradient. A head that is also cut over `fsdp` is
    collected over `fsdp` here, once, and not for every chunk.
    """
    if mesh is None:
        return policy
    rows = rules.batch_sharding(mesh)

    def hidden(*arguments: Any) -> jax.Array:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # routed experts look for it
            return jax.lax.with_sharding_constraint(policy.hidden(*arguments), rows)

    def head(params: Params) -> Any:
        weights = policy.head(params)
        if not policy.row_wise_head:
            return weights
        return jax.lax.with_sharding_constraint(weights, jax.tree.map(vocabulary_split, weights))

    shards = mesh.shape.get("tensor", 1)

    def vocabulary_split(weight: jax.Array) -> jax.sharding.NamedSharding:
        axis = "tensor" if shards > 1 and weight.shape[0] % shards == 0 else None
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis))

    return policy._replace(hidden=hidden, head=head, head_shards=shards)


def _lanes(mesh: jax.sharding.Mesh | None) -> int:
    return 1 if mesh is None else meshes.row_shards(mesh)


def _gradient(
    policy: Policy,
    loss_config: LossConfig,
    filter_config: FilterConfig,
    micro_batches: Cut,
    chunk_size: lanes.Chunk | None,
    max_segments: int,
    entropy: bool,
    places: Placement | None,
) -> GradientStep:
    """Build (params, batch, counts) -> (loss, gradient, finished metrics), micro-batches summed."""
    mesh = None if places is None else places.mesh
    loss_of = _loss(policy, loss_config, filter_config, chunk_size, max_segments, mesh, entropy)
    gradient = summed_gradient(loss_of, micro_batches, places, diagnostics.sum_metrics)

    def survivors(params: Params, batch: Batch) -> losses.Survivors:
        """Count what the filters will leave, by a forward pass where the policy decides it."""
        on, scores = filtering_on(filter_config, batch), None
        if loss_config.gates_read_policy(on):
            score = _scorer(policy, filter_config, chunk_size, mesh)
            scores = mapped(score, jax.lax.stop_gradient(params), batch, micro_batches, mesh)
        return losses.survivor_counts(
            scores, batch, loss_config, filtering_on=on, max_segments=max_segments
        )

    def finished(params: Params, batch: Batch, counts: Counts):
        if loss_config.survivors_first:
            counts = counts._replace(survivors=survivors(params, batch))
        loss, grads, metrics = gradient(params, batch, counts)
        scale = diagnostics.gradient_scale(metrics, counts, loss_config)
        grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        return loss * scale, grads, diagnostics.finalize_metrics(metrics, counts, loss_config)

    return finished


def _loss(
    policy: Policy,
    loss_config: LossConfig,
    filter_config: FilterConfig,
    chunk_size: lanes.Chunk | None,
    max_segments: int,
    mesh: jax.sharding.Mesh | None,
    entropy: bool,
) -> Callable[[Params, Batch, Counts], tuple[jax.Array, Metrics]]:
    """Build (params, batch, counts) -> (loss, raw metrics), in a single pass where that exists."""
    reads = functools.partial(_loss_reads, loss_config, entropy)
    scores_of = _scorer(policy, filter_config, chunk_size, mesh, reads)

    def loss_of(params: Params, batch: Batch, counts: Counts) -> tuple[jax.Array, Metrics]:
        on = filtering_on(filter_config, batch)
        if chunk_size is not None and single_pass.separable(loss_config, on):
            return single_pass.policy_loss(
                rows_stay(policy, mesh),
                params,
                batch,
                counts,
                loss_config,
                filter=_filter_of(filter_config, batch),
                chunk_size=chunk_size,
                lanes=_lanes(mesh),
                max_segments=max_segments,
                entropy=reads(on)["entropy"],
                kept_mass=reads(on)["kept_mass"],
            )
        return losses.clipped_pg_loss(
            scores_of(params, batch),
            batch,
            counts,
            loss_config,
            filtering_on=on,
            max_segments=max_segments,
        )

    return loss_of


def apply_gradient(
    state: TrainState,
    loss: jax.Array,
    grads: Params,
    metrics: Metrics,
    counts: Counts,
    optimizer: Optimizer,
) -> tuple[TrainState, Metrics]:
    """Update the parameters, or change nothing but the counters when the update is unsound.

    An update is unsound when the loss or any gradient is not finite, when the gradient's norm
    overflows, or when nothing is trained: then even a zero gradient would move parameters, by
    momentum and by weight decay.
    """
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    empty = (counts.tokens <= 0) | (metrics["gradient_scale"] <= 0)  # the latter: no survivors
    sound = finite & ~empty
    updates, opt_state = optimizer.transform.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)

    def keep(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(sound, a, b), new, old)

    after = TrainState(
        step=state.step + 1,
        skipped=state.skipped + jnp.where(sound, 0, 1).astype(jnp.int32),
        params=keep(params, state.params),
        opt_state=keep(opt_state, state.opt_state),
    )
    numbers = {
        "loss": loss,
        "grad_norm": grad_norm,
        "update_norm": jnp.where(sound, optax.tree.norm(updates), 0.0),
        "param_norm": optax.tree.norm(after.params),
        "learning_rate": optimizer.schedule(state.updates),
        "tokens": counts.tokens,
        "sequences": counts.sequences,
        "update_applied": sound,
        "skipped_empty": empty,
        "skipped_nonfinite": ~finite,
        "updates_skipped": after.skipped,
    }
    return after, {name: jnp.asarray(x, jnp.float32) for name, x in numbers.items()}
