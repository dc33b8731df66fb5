"""What a policy says of each token: log-probabilities, entropy, kept mass.

The codebase's single shift by one lives here: entry `t` of a result speaks of `tokens[:, t]`, and
comes from the hidden state of token `t - 1` of the same segment. First tokens of segments and
padding have no predecessor and score 0.

Two paths, one arithmetic. The whole path turns all hidden states into logits `[B, T, V]`. The
chunked path takes a few tokens at a time, recomputes their logits in the backward pass, and adds
up the head's gradient in float32, so that `[B, T, V]` never exists; tokens that nobody asks for
never meet the head at all. Where the head is row-wise (see `core/policy.py`), its gradient is added
up in blocks of vocabulary, so that no second copy of it exists either.

Exclusion comes first: hidden states that score nothing are set to 0 before the head, so whatever
they hold, NaN included, reaches neither a value nor a gradient.

Symbols: `B` rows, `T` tokens a row, `V` vocabulary, `D` width, `S` lanes, `M` tokens a lane,
`C` tokens a chunk; `z` scaled logits, `y` the token.
"""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from grpo_jax.core import filtering
from grpo_jax.core import lanes as moves
from grpo_jax.core.batch import TokenScores
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.policy import Head, Params, Policy, UnembedFn

_VOCABULARY_BLOCK = 4096  # rows of the head's gradient that a device computes at one time, at most


class Spec(NamedTuple):
    """What to score, and with which head; static."""

    unembed: UnembedFn
    row_wise_head: bool
    filter: FilterConfig
    unfiltered: bool
    entropy: bool
    kept_mass: bool
    head_shards: int | None = None


class Ready(NamedTuple):
    """A batch that waits for the head; entry `t` of each array speaks of `tokens[:, t]`."""

    head: Head
    hidden: jax.Array  # [B, T, ...] of the token before; 0 where nothing is scored
    targets: jax.Array  # i32[B, T]
    scored: jax.Array  # bool[B, T]


def token_scores(
    policy: Policy,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    filter: FilterConfig,
    unfiltered: bool = False,
    entropy: bool = False,
    kept_mass: bool = False,
    chunk_size: moves.Chunk | None = None,
    mask: jax.Array | None = None,
    kept_ids: jax.Array | None = None,
    lanes: int = 1,
) -> TokenScores:
    """Score every token of a batch under a policy.

        logprobs[t]   = z_y − log Σ_{v kept} exp z_v     (−inf where y is not kept)
        unfiltered[t] = z_y − log Σ_v exp z_v
        entropy[t]    = −Σ_v p_v log p_v,  p = softmax(z)
        kept_mass[t]  = Σ_{v kept} p_v

    with `z` the logits over the temperature. Log-probabilities and entropy carry gradients, exactly
    zero through a token that is not kept; the kept mass is a constant. A row of logits that holds
    NaN or +inf, or nothing finite, scores NaN: a fault stays visible, and is not taken for a token
    outside the support.

    Args:
      policy: the model.
      params: its parameters.
      tokens: i32[B, T].
      positions: i32[B, T] positions inside each segment.
      segment_ids: i32[B, T]; 0 is padding.
      filter: temperature and filters, as the sampler used them.
      unfiltered: also return the log-probabilities before top-k, top-p and min-p.
      entropy: also return the entropy before top-k, top-p and min-p.
      kept_mass: also return the mass that the filters keep.
      chunk_size: tokens whose logits exist at one time in each lane, or "auto" (see
        `lanes.chunk_length`); None takes the whole path.
      mask: bool[B, T], the tokens to score; the rest score 0. On the chunked path they cost no
        head. None scores everything that has a predecessor.
      kept_ids: i32[B, T, K], the tokens that an engine kept where it drew `tokens[:, t]`, in any
        order; negative entries are padding. They replace top-k, top-p and min-p: a token that is
        not among them has log-probability −inf, repeated ids count once.
      lanes: how many parts the rows are cut into, each with chunks of its own. Where rows are
        sharded over a mesh, the number of shards keeps chunks from mixing devices.

    Returns:
      Scores [B, T] in nats (kept mass: fraction), float32, or float64 where the logits are.

    Raises:
      ValueError: the temperature is 0, chunk_size is not positive, lanes do not divide the rows, or
        kept_ids meet a filter or have another shape.
    """
    filtering.check_trainable(filter)
    if kept_ids is not None:
        check_kept_ids(kept_ids, tokens, filter)
    spec = Spec(
        policy.unembed,
        policy.row_wise_head,
        filter,
        unfiltered,
        entropy,
        kept_mass,
        policy.head_shards,
    )
    ready = prepare(policy, params, tokens, positions, segment_ids, mask)
    return ready_scores(spec, ready, chunk_size, lanes, kept_ids)


def ready_scores(
    spec: Spec,
    ready: Ready,
    chunk_size: moves.Chunk | None,
    lanes: int = 1,
    kept_ids: jax.Array | None = None,
) -> TokenScores:
    """Score what `prepare` returned; arguments and result as in `token_scores`."""
    head, hidden, targets, scored = ready
    if chunk_size is None:
        scores = _score(spec, spec.unembed(head, hidden), targets, kept_ids)
    else:
        scores = _score_in_chunks(spec, head, hidden, targets, kept_ids, scored, chunk_size, lanes)
    # A token that is not scored has hidden state 0: its score is finite, and dropped here.
    return jax.tree.map(lambda x: jnp.where(scored, x, 0), scores)


def prepare(
    policy: Policy,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    mask: jax.Array | None = None,
) -> Ready:
    """Run the model up to its head; arguments as in `token_scores`."""
    chex.assert_equal_shape([tokens, positions, segment_ids])
    scored = has_predecessor(segment_ids)
    if mask is not None:
        chex.assert_equal_shape([tokens, mask])
        scored = scored & (mask != 0)
    hidden = policy.hidden(params, tokens, positions, segment_ids)
    hidden = previous(hidden)  # entry t: what came before token t
    hidden = jnp.where(scored.reshape(*scored.shape, *[1] * (hidden.ndim - 2)), hidden, 0)
    return Ready(policy.head(params), hidden, jnp.where(scored, tokens, 0), scored)


def has_predecessor(segment_ids: jax.Array) -> jax.Array:
    """Mark tokens whose left neighbour belongs to the same segment, bool[B, T]; no padding."""
    before = jnp.pad(segment_ids, ((0, 0), (1, 0)))[:, :-1]
    return (segment_ids != 0) & (segment_ids == before)


def check_kept_ids(kept_ids: jax.Array, tokens: jax.Array, filter: FilterConfig) -> None:
    """Refuse kept ids [B, T, K] of another shape than the tokens [B, T], or beside a filter."""
    if filter.active:
        raise ValueError(
            f"kept_ids are the kept set already, and {filter} would cut it again; turn top_k, "
            "top_p and min_p off, or leave kept_ids out"
        )
    if kept_ids.ndim != 3 or kept_ids.shape[:2] != tokens.shape:
        raise ValueError(
            f"kept_ids{list(kept_ids.shape)} must be [B, T, K] for tokens{list(tokens.shape)}; "
            "pad each token's list with -1"
        )


def previous(x: jax.Array) -> jax.Array:
    """Shift [B, T, ...] by one: entry t holds entry t - 1, entry 0 holds zeros."""
    return jnp.pad(x, [(0, 0), (1, 0)] + [(0, 0)] * (x.ndim - 2))[:, :-1]


# --- one block of logits -------------------------------------------------------------------------


class _Saved(NamedTuple):
    """What the backward pass of a block of logits needs besides the logits."""

    log_total: jax.Array  # f32[...] log Σ_v exp z_v
    log_kept: jax.Array  # f32[...] log Σ_{v kept} exp z_v
    support: filtering.Support | None
    kept_ids: jax.Array | None  # i32[..., K]
    supported: jax.Array  # bool[...] the token is kept
    entropy: jax.Array | None  # f32[...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score(
    spec: Spec, logits: jax.Array, targets: jax.Array, kept_ids: jax.Array | None = None
) -> TokenScores:
    """Score targets [...] under logits [..., V]; kept_ids [..., K] replace the filters."""
    return score_forward(spec, logits, targets, kept_ids)[0]


def score_forward(spec: Spec, logits, targets, kept_ids=None):
    """Score targets [...] under logits [..., V]; also return what `score_backward` wants."""
    z = filtering.scale(logits, spec.filter)
    peak = jnp.max(z, axis=-1)
    shifted = z - peak[..., None]
    total = jnp.sum(jnp.exp(shifted), axis=-1)
    log_total = peak + jnp.log(total)
    if spec.head_shards is None:
        z_target = jnp.take_along_axis(z, targets[..., None], axis=-1).squeeze(-1)
    else:  # a sum stays on the devices that share a row, where a gather may collect the row first
        z_target = jnp.sum(jnp.where(_at(targets, z), z, 0.0), axis=-1)
    # NaN or +inf in a row, or nothing finite, must not look like a token outside the support.
    sound = jnp.isfinite(peak)
    unfiltered = jnp.where(sound, z_target - log_total, jnp.nan)
    entropy = None
    if spec.entropy:
        # H = log Σ exp z − Σ p z, with 0 · (−inf) = 0
        weighted = jnp.where(shifted > -jnp.inf, jnp.exp(shifted) * shifted, 0.0)
        entropy = jnp.log(total) - jnp.sum(weighted, axis=-1) / total
    support = None
    if spec.filter.active:
        support = filtering.support(z, spec.filter, spread=spec.head_shards is not None)
    inside = _inside(z, support, kept_ids)
    if inside is None:
        log_kept, logprobs, supported = log_total, unfiltered, True
    else:
        log_kept = peak + jnp.log(jnp.sum(jnp.where(inside, jnp.exp(shifted), 0.0), axis=-1))
        if support is None:
            supported = jnp.any(kept_ids == targets[..., None], axis=-1)
        else:
            supported = (z_target > support.threshold) | (
                (z_target == support.threshold) & (targets <= support.last_id)
            )
        logprobs = jnp.where(supported, z_target - log_kept, -jnp.inf)
        logprobs = jnp.where(sound, logprobs, jnp.nan)
    scores = TokenScores(
        logprobs=logprobs,
        unfiltered=unfiltered if spec.unfiltered else None,
        entropy=entropy,
        kept_mass=jnp.exp(log_kept - log_total) if spec.kept_mass else None,
    )
    supported = supported & (z_target > -jnp.inf)
    saved = _Saved(log_total, log_kept, support, kept_ids, supported, entropy)
    return scores, (logits, targets, saved)


def _at(targets: jax.Array, z: jax.Array) -> jax.Array:
    """Mark each row's target, bool[..., V]."""
    return jax.lax.broadcasted_iota(targets.dtype, z.shape, z.ndim - 1) == targets[..., None]


def _inside(
    z: jax.Array, support: filtering.Support | None, kept_ids: jax.Array | None
) -> jax.Array | None:
    """Spell the kept set out as bool[..., V]; None where everything is kept."""
    if support is not None:
        return filtering.kept(z, support)
    if kept_ids is None:
        return None
    vocabulary = z.shape[-1]

    def mark(ids: jax.Array) -> jax.Array:
        ids = jnp.where(ids < 0, vocabulary, ids)  # negative ids would count from the end
        return jnp.zeros(vocabulary, bool).at[ids].set(True, mode="drop")

    for _ in kept_ids.shape[:-1]:
        mark = jax.vmap(mark)
    return mark(kept_ids) & (z > -jnp.inf)


def score_backward(spec: Spec, residuals, cotangents: TokenScores):
    """Apply d logp/dz_v = 1[v = y] − p_v and dH/dz_v = −p_v (log p_v + H), over the temperature."""
    logits, targets, saved = residuals
    z = filtering.scale(logits, spec.filter)
    inside = _inside(z, saved.support, saved.kept_ids)
    # −inf in value: no gradient, whatever arrives from above.
    d_kept = jnp.where(saved.supported, cotangents.logprobs, 0.0)
    d_total = jnp.zeros_like(d_kept) if cotangents.unfiltered is None else cotangents.unfiltered
    d_target = d_total + d_kept
    if inside is None:
        d_total = d_target
    used = d_kept != 0
    dz = jnp.zeros_like(z)
    if inside is not None:
        p_kept = jnp.where(inside, jnp.exp(z - saved.log_kept[..., None]), 0.0)
        dz = dz - d_kept[..., None] * p_kept
    if inside is None or spec.unfiltered or spec.entropy:
        log_p = z - saved.log_total[..., None]
        p = jnp.exp(log_p)
        used = used | (d_total != 0)
        dz = dz - d_total[..., None] * p
        if cotangents.entropy is not None and saved.entropy is not None:
            used = used | (cotangents.entropy != 0)
            inner = jnp.where(log_p > -jnp.inf, p * (log_p + saved.entropy[..., None]), 0.0)
            dz = dz - cotangents.entropy[..., None] * inner
    dz = dz + jnp.where(_at(targets, z), d_target[..., None], 0.0)
    if spec.filter.temperature != 1.0:
        dz = dz / spec.filter.temperature
    # A row that nothing depends on gives exactly 0, also where its logits are NaN.
    return jnp.where(used[..., None], dz, 0.0).astype(logits.dtype), None, None


_score.defvjp(score_forward, score_backward)


# --- chunks --------------------------------------------------------------------------------------


def _score_in_chunks(
    spec: Spec,
    head: Head,
    hidden: jax.Array,
    targets: jax.Array,
    kept_ids: jax.Array | None,
    scored: jax.Array,
    chunk_size: moves.Chunk,
    lanes: int,
) -> TokenScores:
    """Move the scored tokens of each lane to its front, score them in chunks, move them back."""
    order, chunk, chunks = moves.lane_order(scored, chunk_size, lanes)
    in_front = jax.tree.map(
        lambda x: moves.take(moves.to_lanes(x, lanes), order), (hidden, targets, kept_ids)
    )
    scores = _chunked(spec, chunk, head, *in_front, chunks)

    def back(x: jax.Array) -> jax.Array:
        empty = jnp.zeros_like(moves.to_lanes(targets, lanes), x.dtype)
        return moves.put(empty, order, x).reshape(targets.shape)

    return jax.tree.map(back, scores)


def _slices(tree, start: jax.Array, size: int):
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis=1), tree)


def _put(x: jax.Array, update: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, update.astype(x.dtype), start, axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(
    spec: Spec,
    chunk: int,
    head: Head,
    hidden: jax.Array,
    targets: jax.Array,
    kept_ids: jax.Array | None,
    chunks: jax.Array,
) -> TokenScores:
    """Score targets [S, M] in `chunks` slices of the M axis; tokens beyond them score 0."""

    def one(start: jax.Array) -> TokenScores:
        h, y, ids = _slices((hidden, targets, kept_ids), start, chunk)
        return _score(spec, spec.unembed(head, h), y, ids)

    def body(i: jax.Array, scores: TokenScores) -> TokenScores:
        start = i * chunk
        return jax.tree.map(lambda x, new: _put(x, new, start), scores, one(start))

    shapes = jax.eval_shape(one, jnp.zeros((), chunks.dtype))
    empty = jax.tree.map(lambda s: jnp.zeros(targets.shape, s.dtype), shapes)
    return jax.lax.fori_loop(0, chunks, body, empty)


def _chunked_forward(spec, chunk, head, hidden, targets, kept_ids, chunks):
    scores = _chunked(spec, chunk, head, hidden, targets, kept_ids, chunks)
    return scores, (head, hidden, targets, kept_ids, chunks)


def _chunked_backward(spec, chunk, residuals, cotangents):
    """Recompute each chunk's logits, and add up the head's gradient over chunks and lanes."""
    head, hidden, targets, kept_ids, chunks = residuals
    lanes = targets.shape[0]

    def body(i: jax.Array, carry):
        d_head, d_hidden = carry
        start = i * chunk
        per_token = (hidden, targets, kept_ids, cotangents)
        h, y, ids, upstream = _slices(per_token, start, chunk)
        _, block = score_forward(spec, spec.unembed(head, h), y, ids)
        d_logits = score_backward(spec, block, upstream)[0]
        d_head, d_h = pull_back(spec, head, h, d_logits, d_head)
        return d_head, _put(d_hidden, d_h, start)

    start = (head_sums(head, lanes), jnp.zeros_like(hidden))
    d_head, d_hidden = jax.lax.fori_loop(0, chunks, body, start)
    return lanes_together(d_head, head), d_hidden, None, None, None


def head_sums(head: Head, lanes: int) -> Head:
    """Zeros to add the head's gradient up in, one sum a lane: on a mesh they meet once, after."""
    return jax.tree.map(lambda w: jnp.zeros((lanes, *w.shape), _wide(w)), head)


def lanes_together(d_head: Head, head: Head) -> Head:
    """Add the lanes' sums up, in the head's own number type."""
    return jax.tree.map(lambda g, w: jnp.sum(g, axis=0).astype(w.dtype), d_head, head)


def _wide(x: jax.Array):
    return jnp.promote_types(x.dtype, jnp.float32)


def pull_back(
    spec: Spec, head: Head, h: jax.Array, d_logits: jax.Array, d_head: Head
) -> tuple[Head, jax.Array]:
    """Take gradients [S, C, V] back through the head: add to its gradient, return d hidden."""

    def lane(head: Head, h: jax.Array, d_logits: jax.Array) -> tuple[Head, jax.Array]:
        return jax.vjp(spec.unembed, head, h)[1](d_logits)

    over_lanes = jax.vmap(lane, in_axes=(None, 0, 0))
    vocabulary = d_logits.shape[-1]
    # A block takes the same part of every shard, so that all devices walk theirs at once.
    shards = spec.head_shards or 1
    stripes = 1 if vocabulary % shards else shards
    block = _block_size(vocabulary // stripes) if spec.row_wise_head else vocabulary // stripes
    if stripes * block == vocabulary:
        part, d_h = over_lanes(head, h, d_logits)
        return jax.tree.map(lambda total, new: total + new.astype(total.dtype), d_head, part), d_h

    # The vocabulary as [shard, rows of a shard]; blocks are slices, because a third dimension
    # would make an accelerator copy the whole head into another layout.
    def split(x: jax.Array, axis: int) -> jax.Array:
        return x.reshape(*x.shape[:axis], stripes, -1, *x.shape[axis + 1 :])

    def take(x: jax.Array, i: jax.Array, axis: int) -> jax.Array:
        x = jax.lax.dynamic_slice_in_dim(x, i * block, block, axis + 1)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    def add(total: jax.Array, new: jax.Array, i: jax.Array) -> jax.Array:
        new = new.reshape(new.shape[0], stripes, block, *new.shape[2:])
        new = new + jax.lax.dynamic_slice_in_dim(total, i * block, block, 2)
        return jax.lax.dynamic_update_slice_in_dim(total, new, i * block, 2)

    by_shard = jax.tree.map(lambda w: split(w, 0), head)
    d_by_shard = split(d_logits, d_logits.ndim - 1)

    def body(i: jax.Array, carry):
        d_head, d_h = carry
        rows = jax.tree.map(lambda w: take(w, i, 0), by_shard)
        part, d_h_part = over_lanes(rows, h, take(d_by_shard, i, d_logits.ndim - 1))
        return jax.tree.map(lambda total, new: add(total, new, i), d_head, part), d_h + d_h_part

    total = jax.tree.map(lambda x: split(x, 1), d_head)
    start = (total, jnp.zeros(h.shape, _wide(h)))
    total, d_h = jax.lax.fori_loop(0, vocabulary // (stripes * block), body, start)
    return jax.tree.map(lambda x, like: x.reshape(like.shape), total, d_head), d_h.astype(h.dtype)


def _block_size(vocabulary: int) -> int:
    """Return the largest divisor of the vocabulary up to a block; all of it if that is tiny."""
    divisors = (n for n in range(_VOCABULARY_BLOCK, 0, -1) if vocabulary % n == 0)
    block = next(divisors)
    return block if block >= _VOCABULARY_BLOCK // 16 else vocabulary


_chunked.defvjp(_chunked_forward, _chunked_backward)
