"""The loss of a policy, with the head's gradient taken while each chunk's logits are there.

A loss of log-probabilities that is differentiated afterwards meets the head four times: scores,
the same logits once more, the gradient of the head, the gradient of the hidden states. Where the
derivative of the loss with respect to a token's scores depends on that token's scores alone, and
on what is known before the forward pass, it is known as soon as the chunk is scored:

    ∂L/∂z_t = ∂L/∂s_t · ∂s_t/∂z_t        z_t logits, s_t scores of token t

so the second meeting falls away. The loss is `losses.clipped_pg_loss`, for the derivative in each
chunk as for value and metrics at the end; nothing of it is written twice. In a chunk it sees the
whole batch, with scores of 0 where none are known yet, and only the chunk's part of the derivative
is read: elementwise work on [B, T], next to [C, V] of logits.

The idea is that of Liger kernel's fused linear losses (Hsu et al. 2024, arXiv:2410.10989).

Symbols: `B` rows, `T` tokens a row, `C` tokens a chunk, `V` vocabulary.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from grpo_jax.core import corrections, filtering, logprobs, losses, row_blocks
from grpo_jax.core import lanes as moves
from grpo_jax.core.batch import Batch, Counts, TokenScores
from grpo_jax.core.diagnostics import Metrics
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.loss_config import LossConfig
from grpo_jax.core.policy import Head, Params, Policy


def separable(config: LossConfig, filtering_on: bool) -> bool:
    """Say whether each token's derivative depends on that token's scores alone.

    It does not, where the current log-probabilities of a whole sequence decide:
      - one ratio a response: GSPO, GMPO;
      - gates on whole sequences, and the check inside the loss, where they read the current policy:
        in place of the previous one (`force_on_policy_ratio`), or because a token that it cannot
        draw (−inf under the filters) leaves the sequence's mean, product and veto;
      - the mean over a response, and the local count of the positive NLL, where such a token
        leaves their denominators. Dr. GRPO's constant is no such denominator.
    """
    if config.sequence_level_importance_ratios or config.surrogate == "gmpo":
        return False
    if config.seq_logprob_error_in_loss:
        return False
    if corrections.gates_sequences(config) and config.gates_read_policy(filtering_on):
        return False
    if not filtering_on:
        return True
    response_mean = not config.token_level_loss and config.loss_normalizer is None
    return not response_mean and not (config.positive_nll_on and config.positive_nll_local_count)


def policy_loss(
    policy: Policy,
    params: Params,
    batch: Batch,
    counts: Counts,
    config: LossConfig,
    *,
    filter: FilterConfig,
    chunk_size: moves.Chunk,
    entropy: bool = False,
    kept_mass: bool = False,
    lanes: int = 1,
    max_segments: int = 1,
) -> tuple[Float[Array, ""], Metrics]:
    """`clipped_pg_loss` of the policy's own scores; equal in value, gradient and metrics.

    First derivatives only; the metrics carry none.

    Args:
      policy, params: the model.
      batch, counts, config, max_segments: as in `losses.clipped_pg_loss`; `batch.kept_ids`, where
        they are given, replace top-k, top-p and min-p, which must be off then.
      filter, chunk_size, lanes: as in `logprobs.token_scores`.
      entropy: also score the entropy, for the metrics; the entropy bonus does so by itself.
      kept_mass: also score the kept mass, for the metrics.

    Returns:
      The loss as a partial sum over `counts`, and raw metrics.

    Raises:
      ValueError: the config is not `separable` under these filters, or as `clipped_pg_loss` and
        `token_scores`.
    """
    filtering_on = filter.active or batch.kept_ids is not None
    if not separable(config, filtering_on):
        raise ValueError(
            f"{config} under {filter}{'' if batch.kept_ids is None else ' and kept ids'} needs "
            "the scores of whole sequences for its derivative; differentiate clipped_pg_loss of "
            "token_scores instead"
        )
    filtering.check_trainable(filter)
    if batch.kept_ids is not None:
        logprobs.check_kept_ids(batch.kept_ids, batch.tokens, filter)
    spec = logprobs.Spec(
        unembed=policy.unembed,
        row_wise_head=policy.row_wise_head,
        filter=filter,
        unfiltered=filtering_on and config.kl_on,
        entropy=entropy or config.entropy_bonus_on,
        kept_mass=kept_mass,
        head_shards=policy.head_shards,
    )
    fixed, numbers = row_blocks.without_tracers(config)

    def loss_of(scores: TokenScores, given) -> tuple[Array, Metrics]:
        batch, counts, numbers = given
        return losses.clipped_pg_loss(
            scores,
            batch,
            counts,
            dataclasses.replace(fixed, **numbers),
            filtering_on=filtering_on,
            max_segments=max_segments,
        )

    def with_gradient(differentiable, fixed_arrays):
        ready, given = logprobs.Ready(*differentiable, *fixed_arrays[0]), fixed_arrays[1]

        def derivative(scores: TokenScores) -> TokenScores:
            return jax.grad(lambda s: loss_of(s, given)[0])(scores)

        scores, gradient = _scores_and_gradient(
            spec, ready, derivative, chunk_size, lanes, given[0].kept_ids
        )
        return loss_of(scores, given), gradient

    @jax.custom_vjp
    def total(differentiable, fixed_arrays):
        ready, given = logprobs.Ready(*differentiable, *fixed_arrays[0]), fixed_arrays[1]
        kept_ids = given[0].kept_ids
        return loss_of(logprobs.ready_scores(spec, ready, chunk_size, lanes, kept_ids), given)

    def backward(gradient, cotangents):
        loss_cotangent, _ = cotangents  # metrics carry no gradient
        return jax.tree.map(lambda g: (g * loss_cotangent).astype(g.dtype), gradient), None

    total.defvjp(with_gradient, backward)
    ready = logprobs.prepare(
        policy, params, batch.tokens, batch.positions, batch.segment_ids, batch.token_mask
    )
    differentiable, rest = (ready.head, ready.hidden), (ready.targets, ready.scored)
    return total(differentiable, (rest, (batch, counts, numbers)))


def _scores_and_gradient(
    spec: logprobs.Spec,
    ready: logprobs.Ready,
    derivative: Callable[[TokenScores], TokenScores],
    chunk_size: moves.Chunk,
    lanes: int = 1,
    kept_ids: jax.Array | None = None,
) -> tuple[TokenScores, tuple[Head, jax.Array]]:
    """Score in chunks, and take each chunk's gradient while its logits are there.

    Three products with the head a chunk, where scores that are differentiated later need four:
    nothing is computed again. An `unembed` that is not linear repeats its product for its own
    derivative.

    Args:
      spec, ready: what to score.
      derivative: scores [B, T] -> what the gradient of each score is to be multiplied by, [B, T].
        Entry `t` may depend on the scores of entry `t` alone: scores of later chunks are still 0.
      chunk_size, lanes, kept_ids: as in `token_scores`.

    Returns:
      The scores [B, T], 0 where nothing is scored; and the gradients of head and hidden states.
    """
    head, hidden, targets, scored = ready
    order, chunk, chunks = moves.lane_order(scored, chunk_size, lanes)

    def lanes_of(x: jax.Array) -> jax.Array:
        return moves.to_lanes(x, lanes)

    def to_rows(x: jax.Array) -> jax.Array:
        return x.reshape(*targets.shape, *x.shape[2:])

    # Moved once, outside the loop: a mesh that shares hidden states out by width would otherwise
    # collect all of them for every chunk.
    in_order = jax.tree.map(
        lambda x: moves.take(lanes_of(x), order), (hidden, targets, scored, kept_ids)
    )

    def forward(start: jax.Array | int):
        at, h, y, on, ids = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, start, chunk, axis=1), (order, *in_order)
        )
        scores, residuals = logprobs.score_forward(spec, spec.unembed(head, h), y, ids)
        return at, h, on, scores, residuals

    def body(i: jax.Array, carry):
        scores, d_head, d_hidden = carry
        start = i * chunk
        at, h, on, new, residuals = forward(start)
        scores = jax.tree.map(lambda x, s: moves.put(x, at, jnp.where(on, s, 0)), scores, new)
        upstream = derivative(jax.tree.map(to_rows, scores))
        upstream = jax.tree.map(lambda g: jnp.where(on, moves.take(lanes_of(g), at), 0), upstream)
        d_logits = logprobs.score_backward(spec, residuals, upstream)[0]
        d_head, d_h = logprobs.pull_back(spec, head, h, d_logits, d_head)
        d_hidden = jax.lax.dynamic_update_slice_in_dim(d_hidden, d_h, start, axis=1)
        return scores, d_head, d_hidden

    shapes = jax.eval_shape(lambda: forward(0)[3])
    scores = jax.tree.map(lambda s: jnp.zeros_like(lanes_of(targets), s.dtype), shapes)
    nothing = (scores, logprobs.head_sums(head, lanes), jnp.zeros_like(in_order[0]))
    scores, d_head, d_hidden = jax.lax.fori_loop(0, chunks, body, nothing)
    d_hidden = to_rows(moves.put(jnp.zeros_like(lanes_of(hidden)), order, d_hidden))
    return jax.tree.map(to_rows, scores), (logprobs.lanes_together(d_head, head), d_hidden)
