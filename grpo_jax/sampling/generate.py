"""What is sampled, and how one token is drawn.

Symbols: `N` rows, `W` width of the rows, `V` vocabulary.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.core import filtering
from grpo_jax.core.filtering import FilterConfig

UNUSED, STOP, LENGTH, CANCELLED, BUDGET = 0, 1, 2, 3, 4
STOP_REASONS = ("unused", "stop", "length", "cancelled", "budget")
"""Names of the codes in `Generation.stop_reasons`.

"stop": a stop token or a stop string · "length": the completion may have no more tokens ·
"cancelled", "budget": it was ended from outside and may be continued (see `session.py`) ·
"unused": nothing was drawn.
"""


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How completions are drawn.

    Attributes:
      max_new_tokens: tokens a completion may have, its stop token included.
      min_new_tokens: a stop token cannot be drawn among the first so many tokens. The recorded
        log-probabilities are those of the distribution without stop tokens, so there a trainer
        that scores with the full distribution sees a slightly different value.
      filter: temperature (0 is greedy) and filters.
      stop_strings: a completion ends with the token that completes the first of these in its text.

    Raises:
      ValueError: a length is out of range, or a stop string is empty.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    filter: FilterConfig = FilterConfig()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} must lie between 0 and "
                f"max_new_tokens={self.max_new_tokens}"
            )
        if "" in self.stop_strings:
            raise ValueError(
                "stop_strings holds an empty text, which every completion contains; leave it out"
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


def without_stops(
    logits: jax.Array, place: jax.Array, stop_ids: tuple[int, ...], min_new_tokens: int
) -> jax.Array:
    """Rule stop tokens out while a completion is too short.

    Args:
      logits: [N, V].
      place: i32[N] tokens of the completion so far.
      stop_ids: tokens that end a completion.
      min_new_tokens: the last of so many tokens may itself be the stop token.
    """
    if min_new_tokens <= 1 or not stop_ids:
        return logits
    stops = jnp.isin(jnp.arange(logits.shape[-1]), jnp.asarray(stop_ids, jnp.int32))
    short = jnp.asarray(place) + 1 < min_new_tokens
    return jnp.where(stops[None] & short[:, None], -jnp.inf, logits)
