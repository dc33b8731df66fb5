"""Slots: rows of a cache that decode together, and the compiled programs that move them on.

Five programs, all pure and of static shapes. Slots are given away and written in place, except
where their shape changes:

    empty   slots that hold nothing
    read    prompts -> what their tokens left in a cache of their own, and the logits after them
    seat    put rows of what was read into slots, and draw the first token of each
    burst   up to so many tokens for every running slot
    arrange other slots out of these: fewer or more of them, or longer ones

A prompt is read once, however many completions it gets: seating copies its part of the cache.
A slot's random numbers belong to the completion that sits in it: the key is folded with the number
of the request, with the place among its completions, and with the place of the token. So no token
depends on the slot, on what else runs, or on how many slots there are.

Symbols: `N` slots, `S` positions a slot, `M` prompts read together, `L` width of the prompts,
`K` completions seated together, `C` tokens of a burst at most, `V` vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.policy import Cache, Decoder, Params
from grpo_jax.sampling.generate import draw, without_stops
from grpo_jax.scale import rules

POSITIONS = -2
"""The axis of a cache's leaves that counts positions; rows are axis 0 (see `models/cache.py`)."""


class State(NamedTuple):
    """Slots between two tokens."""

    cache: Cache  # rows in front, positions second to last
    last: jax.Array  # i32[N] the newest token; the cache does not hold it yet
    position: jax.Array  # i32[N] where it stands in its row
    drawn: jax.Array  # i32[N] tokens of the completion so far
    limit: jax.Array  # i32[N] tokens the completion may have
    running: jax.Array  # bool[N]
    keys: jax.Array  # key[N] of the completions

    @property
    def length(self) -> int:
        """Positions a slot has."""
        return jax.tree.leaves(self.cache)[0].shape[POSITIONS]


class Read(NamedTuple):
    """Prompts that have been read."""

    cache: Cache  # M rows of L positions
    logits: jax.Array  # f32[M, V] after the last token of each
    lengths: jax.Array  # i32[M]


class Seats(NamedTuple):
    """Who sits down where; host arrays. A slot N is nowhere: such an entry only fills the shape."""

    slot: np.ndarray  # i32[K]
    source: np.ndarray  # i32[K] row of the `Read`
    request: np.ndarray  # i32[K] the number of the request …
    member: np.ndarray  # i32[K] … and the place among its completions
    drawn: np.ndarray  # i32[K] tokens of the completion that the prompt already holds
    limit: np.ndarray  # i32[K] tokens the completion may have, those included


class Drawn(NamedTuple):
    """The tokens of one program; a slot's are the first of its column."""

    tokens: jax.Array  # i32[C, N]
    logprobs: jax.Array  # f32[C, N] nats, after temperature and filters
    drawn: jax.Array  # i32[N] tokens of each completion, all in all
    running: jax.Array  # bool[N]


@dataclasses.dataclass(frozen=True)
class Rule:
    """What is the same for all slots, and compiled in.

    Attributes:
      filter: temperature and filters.
      stop_ids: a completion ends with, and includes, the first of these that is drawn.
      min_new_tokens: a stop token cannot be drawn among the first so many tokens.
    """

    filter: FilterConfig = FilterConfig()
    stop_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0


class Programs:
    """The programs of one decoder, compiled as they are needed, and counted."""

    def __init__(self, decoder: Decoder, mesh: Mesh | None = None, place: Any = None):
        """Hold a decoder.

        Args:
          decoder: the model.
          mesh: the devices; rows of a cache are split over its row axes, heads over `tensor`.
          place: prepared parameters -> their shardings; None leaves them where they are.
        """
        self.compiled = 0
        """How many programs were compiled so far."""
        self._decoder, self._mesh, self._place = decoder, mesh, place
        in_place = functools.partial(jax.jit, donate_argnums=0)
        self.empty: Callable[..., State] = jax.jit(
            self._counted(self._empty), static_argnames=("rows", "length")
        )
        self.read: Callable[..., Read] = jax.jit(self._counted(self._read))
        self.seat: Callable[..., tuple[State, Drawn]] = in_place(
            self._counted(self._seat), static_argnames=("rule",)
        )
        self.burst: Callable[..., tuple[State, Drawn]] = in_place(
            self._counted(self._burst), static_argnames=("rule", "steps")
        )
        self.arrange: Callable[..., State] = jax.jit(
            self._counted(self._arrange), static_argnames=("length",)
        )

    def prepare(self, params: Params) -> Params:
        """Bring parameters into the layout that the decoder wants; once a version."""
        prepared = self._decoder.prepare(params)
        return prepared if self._place is None else jax.device_put(prepared, self._place(prepared))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*arguments, **options):
            self.compiled += 1  # runs once a trace, never in the compiled program
            return function(*arguments, **options)

        return counted

    def _empty(self, key: jax.Array, *, rows: int, length: int) -> State:
        zeros = jnp.zeros(rows, jnp.int32)
        return self._pin(
            State(
                cache=self._decoder.init_cache(rows, length),
                last=zeros,
                position=zeros,
                drawn=zeros,
                limit=zeros,
                running=jnp.zeros(rows, bool),
                keys=jnp.broadcast_to(key, (rows,)),
            )
        )

    def _read(self, params: Params, prompts: jax.Array, lengths: jax.Array) -> Read:
        """Read right-padded prompts i32[M, L]; a length of 0 fills the shape."""
        rows, width = prompts.shape
        cache = self._pin(self._decoder.init_cache(rows, width))
        logits, cache = self._decoder.prefill(params, prompts, jnp.maximum(lengths, 1), cache)
        return self._pin(Read(cache, logits, jnp.asarray(lengths)))

    def _seat(
        self, state: State, read: Read, seats: Seats, key: jax.Array, *, rule: Rule
    ) -> tuple[State, Drawn]:
        """Seat rows of `read`; `Drawn` is [1, K], by seat and not by slot."""
        source, slot = seats.source, seats.slot
        keys = jax.vmap(lambda request, member: _fold(key, request, member))(
            jnp.asarray(seats.request), jnp.asarray(seats.member)
        )
        token, logprob = _draw(read.logits[source], keys, jnp.asarray(seats.drawn), rule)
        drawn = jnp.asarray(seats.drawn) + 1
        running = _goes_on(token, drawn, jnp.asarray(seats.limit), rule)

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[slot].set(new, mode="drop")

        def put_row(old: jax.Array, new: jax.Array) -> jax.Array:
            room = old.shape[POSITIONS]
            rows = jax.lax.slice_in_dim(new[source], 0, min(room, new.shape[POSITIONS]), axis=-2)
            return old.at[slot, ..., : rows.shape[POSITIONS], :].set(rows, mode="drop")

        seated = State(
            cache=jax.tree.map(put_row, state.cache, read.cache),
            last=put(state.last, token),
            position=put(state.position, read.lengths[source]),
            drawn=put(state.drawn, drawn),
            limit=put(state.limit, jnp.asarray(seats.limit)),
            running=put(state.running, running),
            keys=put(state.keys, keys),
        )
        return self._pin(seated), Drawn(token[None], logprob[None], drawn, running)

    def _burst(
        self, state: State, params: Params, least: jax.Array, *, rule: Rule, steps: int
    ) -> tuple[State, Drawn]:
        """Draw up to `steps` tokens a slot, as long as at least `least` slots run."""
        rows = state.last.shape[0]

        def goes_on(carry: tuple[jax.Array, State, jax.Array, jax.Array]) -> jax.Array:
            return (carry[0] < steps) & (jnp.sum(carry[1].running) >= least)

        def one_token(carry):
            step, state, tokens, logprobs = carry
            logits, cache = self._decoder.step(params, state.last, state.position, state.cache)
            token, logprob = _draw(logits, state.keys, state.drawn, rule)
            runs = state.running  # slots that do not run go through all this, and stay as they are
            drawn = state.drawn + runs
            return (
                step + 1,
                self._pin(
                    state._replace(
                        cache=cache,
                        last=jnp.where(runs, token, state.last),
                        position=state.position + runs,
                        drawn=drawn,
                        running=runs & _goes_on(token, drawn, state.limit, rule),
                    )
                ),
                tokens.at[step].set(token),
                logprobs.at[step].set(logprob),
            )

        start = (
            jnp.int32(0),
            state,
            jnp.zeros((steps, rows), jnp.int32),
            jnp.zeros((steps, rows), jnp.float32),
        )
        _, state, tokens, logprobs = jax.lax.while_loop(goes_on, one_token, start)
        # Arrays of their own: the state is given to the next program, these are read after it.
        return state, Drawn(tokens, logprobs, state.drawn + 0, state.running & True)

    def _arrange(self, state: State, source: jax.Array, *, length: int) -> State:
        """Slots out of the `source`s, i32[N'], of these; -1 makes an empty one."""
        there = jnp.asarray(source) >= 0
        chosen = jnp.maximum(jnp.asarray(source), 0)

        def moved(x: jax.Array) -> jax.Array:
            rows = x[chosen]
            room = length - rows.shape[POSITIONS]
            if room <= 0:
                return jax.lax.slice_in_dim(rows, 0, length, axis=POSITIONS)
            pads = [(0, 0)] * rows.ndim
            pads[POSITIONS] = (0, room)
            return jnp.pad(rows, pads)

        others = state._replace(cache=())
        others = jax.tree.map(lambda x: x[chosen], others)
        others = others._replace(running=others.running & there)
        return self._pin(others._replace(cache=jax.tree.map(moved, state.cache)))

    def _pin(self, tree: Any) -> Any:
        """Keep a cache in its place on the mesh, and small arrays on every device."""
        if self._mesh is None:
            return tree
        mesh = self._mesh

        def one(x: jax.Array) -> jax.Array:
            place = rules.cache_sharding(x, mesh) if x.ndim >= 4 else rules.replicated(mesh)
            return jax.lax.with_sharding_constraint(x, place)

        return jax.tree.map(one, tree)


def _fold(key: jax.Array, request: jax.Array, member: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(key, request), member)


def _draw(
    logits: jax.Array, keys: jax.Array, place: jax.Array, rule: Rule
) -> tuple[jax.Array, jax.Array]:
    """Draw the token at `place` of each completion."""
    logits = without_stops(logits, place, rule.stop_ids, rule.min_new_tokens)
    uniform = jax.vmap(lambda k, i: jax.random.uniform(jax.random.fold_in(k, i)))(keys, place)
    return draw(logits, uniform, rule.filter)


def _goes_on(token: jax.Array, drawn: jax.Array, limit: jax.Array, rule: Rule) -> jax.Array:
    """Whether a completion has a next token."""
    return ~jnp.isin(token, jnp.asarray(rule.stop_ids, jnp.int32)) & (drawn < limit)
