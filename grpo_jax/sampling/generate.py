"""Sample completions: compiled prefill and decode on a key-value cache, in one program.

The prompt is prefilled once and shared by its `G` completions. The decode loop ends as soon as
every row has stopped. A row's randomness belongs to the request and to the place in the completion,
so its tokens do not depend on the batch, the slot or the padding it ran with.

Symbols: `P` prompts, `G` completions a prompt, `N = P·G` rows (row `i·G + g` is completion `g` of
prompt `i`), `L` width of the prompts, `R` new tokens at most, `W = L + R`, `V` vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.core import filtering
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.policy import Cache, Decoder, Params

UNUSED, STOP, LENGTH = 0, 1, 2
STOP_REASONS = ("unused", "stop", "length")
"""Names of the codes in `Generation.stop_reasons`; "unused" marks rows that only fill a batch."""


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How completions are drawn.

    Attributes:
      max_new_tokens: tokens a completion may have, its stop token included.
      min_new_tokens: a stop token cannot be drawn among the first so many tokens. The recorded
        log-probabilities are those of the distribution without stop tokens, so there a trainer
        that scores with the full distribution sees a slightly different value.
      filter: temperature (0 is greedy) and filters.

    Raises:
      ValueError: a length is out of range.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    filter: FilterConfig = FilterConfig()

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} must lie between 0 and "
                f"max_new_tokens={self.max_new_tokens}"
            )


Array = jax.Array | np.ndarray  # on the device, or brought to the host by an engine


class Generation(NamedTuple):
    """Sampled rows: prompt, completion right behind it, padding."""

    tokens: Array  # i32[N, W]
    prompt_lengths: Array  # i32[N]
    completion_lengths: Array  # i32[N] the stop token counts
    logprobs: Array  # f32[N, W] nats, as sampled; aligned with tokens, 0 on prompt and padding
    stop_reasons: Array  # i8[N] index into STOP_REASONS
    # i32[N, W, K] the tokens that were left to choose from at each place, negative = none. For an
    # engine whose filters are not ours: the trainer then normalises over these, and filters nothing
    kept_ids: Array | None = None


class _State(NamedTuple):
    """The decode loop between two tokens."""

    step: jax.Array  # i32[] tokens drawn so far in each running row
    last: jax.Array  # i32[N] the newest token
    done: jax.Array  # bool[N]
    tokens: jax.Array  # i32[N, W]
    logprobs: jax.Array  # f32[N, W]
    completion_lengths: jax.Array  # i32[N]
    stop_reasons: jax.Array  # i8[N]
    cache: Cache


def generate(
    decoder: Decoder,
    params: Params,
    prompts: jax.Array,
    lengths: jax.Array,
    request_ids: jax.Array,
    key: jax.Array,
    *,
    config: SamplingConfig,
    group_size: int = 1,
    stop_ids: jax.Array | Sequence[int] = (),
    pad_id: jax.Array | int = 0,
) -> Generation:
    """Draw `group_size` completions of every prompt.

    Args:
      decoder: the model.
      params: its parameters; `decoder.prepare` is applied here.
      prompts: i32[P, L] right-padded.
      lengths: i32[P] in [1, L]; 0 marks a row that only fills the batch.
      request_ids: i32[P]; with the key they determine the draws of a prompt's completions.
      key: the key is read, not consumed: the same key and ids give the same draws.
      config: static.
      group_size: static.
      stop_ids: i32[K]; a completion ends with, and includes, the first of these that is drawn.
      pad_id: fills the rest of a row; may equal a stop token.

    Returns:
      The sampled rows on the device.
    """
    chex.assert_rank([prompts, lengths, request_ids], [2, 1, 1])
    count, width = prompts.shape
    stop_ids = jnp.asarray(stop_ids, jnp.int32)
    params = decoder.prepare(params)
    cache = decoder.init_cache(count, width + config.max_new_tokens)
    logits, cache = decoder.prefill(params, prompts, jnp.maximum(lengths, 1), cache)
    cache = decoder.repeat(cache, group_size)
    prompts, lengths, logits = (
        jnp.repeat(x, group_size, axis=0) for x in (prompts, lengths, logits)
    )
    keys = _row_keys(key, request_ids, group_size)

    def draw_next(state: _State, logits: jax.Array) -> _State:
        logits = _without_stops(logits, state.step, stop_ids, config.min_new_tokens)
        uniform = jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, state.step)))(keys)
        token, logprob = draw(logits, uniform, config.filter)
        return _record(state, token, logprob, lengths, stop_ids, config.max_new_tokens)

    def unfinished(state: _State) -> jax.Array:
        return (state.step < config.max_new_tokens) & ~jnp.all(state.done)

    def advance(state: _State) -> _State:
        # The token at place `step - 1` of the completion stands at this position of the row.
        positions = lengths + state.step - 1
        logits, cache = decoder.step(params, state.last, positions, state.cache)
        return draw_next(state._replace(cache=cache), logits)

    start = _initial_state(prompts, lengths, cache, config.max_new_tokens, pad_id)
    state = jax.lax.while_loop(unfinished, advance, draw_next(start, logits))
    return Generation(
        tokens=state.tokens,
        prompt_lengths=lengths,
        completion_lengths=state.completion_lengths,
        logprobs=state.logprobs,
        stop_reasons=state.stop_reasons,
    )


def draw(
    logits: jax.Array, uniform: jax.Array, filter: FilterConfig
) -> tuple[jax.Array, jax.Array]:
    """Draw one token a row by inverting the cumulative distribution of the kept tokens.

    One uniform number a row instead of one a row and token. Greedy decoding takes the most likely
    token (the smallest id on a tie), and reports its log-probability at temperature 1, unfiltered.

    Args:
      logits: [N, V].
      uniform: f32[N] in [0, 1).
      filter: temperature and filters.

    Returns:
      i32[N] tokens, and f32[N] log-probabilities in nats after temperature and filters; NaN where
      the logits hold NaN or +inf.
    """
    z = filtering.scale(logits, filter)
    peak = jnp.max(z, axis=-1, keepdims=True)
    weight = jnp.exp(z - peak)
    if filter.active and not filter.greedy:
        weight = jnp.where(filtering.kept(z, filtering.support(z, filter)), weight, 0.0)
    total = jnp.sum(weight, axis=-1)
    if filter.greedy:
        token = filtering.argmax(z)
    else:
        token = filtering.invert_running_sum(weight, uniform.astype(z.dtype) * total)
    token = jnp.minimum(token, z.shape[-1] - 1)  # only a row of NaN can point past the vocabulary
    z_token = jnp.take_along_axis(z, token[:, None], axis=-1).squeeze(-1)
    return token, (z_token - (peak.squeeze(-1) + jnp.log(total))).astype(jnp.float32)


def _row_keys(key: jax.Array, request_ids: jax.Array, group_size: int) -> jax.Array:
    """Give every completion a key of its own, [N]."""
    members = jnp.arange(group_size)
    of_request = jax.vmap(lambda i: jax.random.fold_in(key, i))(request_ids)
    of_member = jax.vmap(lambda k: jax.vmap(lambda g: jax.random.fold_in(k, g))(members))
    return of_member(of_request).reshape(-1)


def _without_stops(
    logits: jax.Array, step: jax.Array, stop_ids: jax.Array, min_new_tokens: int
) -> jax.Array:
    """Rule stop tokens out while the completion is too short."""
    # The last of `min_new_tokens` may itself be the stop token.
    if min_new_tokens <= 1:
        return logits
    stops = jnp.isin(jnp.arange(logits.shape[-1]), stop_ids)
    return jnp.where(stops[None] & (step + 1 < min_new_tokens), -jnp.inf, logits)


def _initial_state(
    prompts: jax.Array, lengths: jax.Array, cache: Cache, new_tokens: int, pad_id: jax.Array | int
) -> _State:
    rows, width = prompts.shape
    inside = jnp.arange(width)[None, :] < lengths[:, None]
    room = ((0, 0), (0, new_tokens))
    return _State(
        step=jnp.int32(0),
        last=jnp.full(rows, pad_id, jnp.int32),
        done=lengths == 0,
        tokens=jnp.pad(jnp.where(inside, prompts, pad_id), room, constant_values=pad_id),
        logprobs=jnp.zeros((rows, width + new_tokens), jnp.float32),
        completion_lengths=jnp.zeros(rows, jnp.int32),
        stop_reasons=jnp.full(rows, UNUSED, jnp.int8),
        cache=cache,
    )


def _record(
    state: _State,
    token: jax.Array,
    logprob: jax.Array,
    lengths: jax.Array,
    stop_ids: jax.Array,
    max_new_tokens: int,
) -> _State:
    """Write one new token into every running row and see which rows end with it."""
    running = ~state.done
    rows, column = jnp.arange(token.shape[0]), lengths + state.step
    # Rows that are done write what stands there already.
    tokens = state.tokens.at[rows, column].set(
        jnp.where(running, token, state.tokens[rows, column]), unique_indices=True
    )
    logprobs = state.logprobs.at[rows, column].set(
        jnp.where(running, logprob, state.logprobs[rows, column]), unique_indices=True
    )
    stopped = running & jnp.isin(token, stop_ids)
    ended = running & ~stopped & (state.step + 1 >= max_new_tokens)
    reason = jnp.where(stopped, STOP, jnp.where(ended, LENGTH, state.stop_reasons))
    return _State(
        step=state.step + 1,
        last=jnp.where(running, token, state.last),
        done=state.done | stopped | ended,
        tokens=tokens,
        logprobs=logprobs,
        completion_lengths=state.completion_lengths + running,
        stop_reasons=reason.astype(jnp.int8),
        cache=state.cache,
    )
