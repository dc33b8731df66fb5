"""A session: requests come and go, slots are refilled, completions come out as they end.

    waiting ─ read (prompts of one bucket together) ─ seat ─ burst ─ burst ─ … ─ completion
                                 ▲                          │
                                 └────── a slot is free ────┘

Everything here is bookkeeping on the host, between two compiled programs (`slots.py`). Slots get
longer as their completions do, and where few of these are left they move into fewer slots; which
shapes there are says `shapes.py`.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from grpo_jax.core.policy import Params
from grpo_jax.sampling.generate import (
    BUDGET,
    CANCELLED,
    LENGTH,
    STOP,
    Array,
    SamplingConfig,
)
from grpo_jax.sampling.shapes import Shapes
from grpo_jax.sampling.slots import Drawn, Programs, Read, Rule, Seats, State
from grpo_jax.scale import multihost

_SEATED = 32  # completions that one program seats at most


def check_context(prompt: int, max_new_tokens: int, context_length: int | None) -> None:
    """Refuse a prompt of so many tokens that exceeds the context with its completion."""
    if context_length is not None and prompt + max_new_tokens > context_length:
        raise ValueError(
            f"a prompt of {prompt} tokens with max_new_tokens={max_new_tokens} "
            f"exceeds the model's context of {context_length}; shorten the prompt or "
            "lower max_new_tokens"
        )


class Completion(NamedTuple):
    """What was drawn for one completion."""

    request: "Request"
    member: int  # the place among its completions
    tokens: np.ndarray  # i32[n] the stop token included
    logprobs: np.ndarray  # f32[n] nats, as sampled
    versions: np.ndarray  # i32[n] of the weights that each token was drawn with
    reason: int  # index into `generate.STOP_REASONS`
    stop_string: str | None = None  # that ended it; the tokens hold it


class Progress(NamedTuple):
    """The newest tokens of one completion."""

    request: "Request"
    member: int
    tokens: list[int]
    logprobs: list[float]  # nats
    completion: Completion | None  # all of it, once it has ended


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A prompt to complete.

    Attributes:
      prompt: i32[length].
      id: with the session's key and a member's number it determines the draws.
      members: which completions to draw; each has random numbers of its own.
      max_new_tokens: tokens a completion may have; None: as many as the session's sampling says.
      stop_strings: a completion ends with the token that completes one of these in its text; None:
        those of the session's sampling.
      begun: what there is of the members already, in their order, to be continued; empty: nothing.
        Draws go on as if there had been no break.

    Raises:
      ValueError: the prompt is empty, there are no members, or what has begun does not fit them.
    """

    prompt: np.ndarray
    id: int = 0
    members: tuple[int, ...] = (0,)
    max_new_tokens: int | None = None
    stop_strings: tuple[str, ...] | None = None
    begun: tuple[Completion, ...] = ()

    def __post_init__(self):
        prompt = np.asarray(self.prompt, np.int32)
        object.__setattr__(self, "prompt", prompt)
        if prompt.ndim != 1 or len(prompt) == 0:
            raise ValueError(
                f"prompt {self.id} has shape {prompt.shape}; a prompt is a list of at least one "
                "token"
            )
        if not self.members:
            raise ValueError(f"request {self.id} has no members; ask for at least one completion")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if "" in (self.stop_strings or ()):
            raise ValueError(
                f"request {self.id} has an empty stop string, which every text contains; leave it "
                "out"
            )
        if self.begun and tuple(c.member for c in self.begun) != self.members:
            raise ValueError(
                f"request {self.id} asks for members {self.members} and brings what has begun of "
                f"{tuple(c.member for c in self.begun)}; bring one for each, in the same order"
            )
        for c in self.begun:
            if c.reason in (STOP, LENGTH):
                raise ValueError(
                    f"completion {c.member} of request {self.id} has ended; continue only what was "
                    "cancelled or ran into a budget"
                )


@dataclasses.dataclass(eq=False)
class _Prompt:
    """Tokens to read, and what reading them left; shared by the members of a request."""

    tokens: np.ndarray
    read: Read | None = None
    row: int = 0


@dataclasses.dataclass(eq=False)
class _Row:
    """A completion on its way."""

    request: Request
    member: int
    prompt: _Prompt  # ends with what had begun
    limit: int  # tokens the completion may have
    begun: int  # tokens it had when it came
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    told: int  # tokens that were reported
    stop_strings: tuple[str, ...]
    stop_string: str | None = None  # that was found

    @property
    def end(self) -> int:
        """Positions of the prompt and of what is known of the completion."""
        return len(self.prompt.tokens) + len(self.tokens) - self.begun

    @property
    def last(self) -> int:
        """Positions it can need at most."""
        return len(self.prompt.tokens) + self.limit - self.begun

    def completion(self, reason: int) -> Completion:
        return Completion(
            self.request,
            self.member,
            np.array(self.tokens, np.int32),
            np.array(self.logprobs, np.float32),
            np.array(self.versions, np.int32),
            reason,
            self.stop_string,
        )


class Session:
    """Requests that decode together, in slots."""

    def __init__(
        self,
        programs: Programs,
        prepared: Params,
        key: jax.Array,
        sampling: SamplingConfig,
        shapes: Shapes,
        *,
        stop_ids: Sequence[int] = (),
        version: int = 0,
        decode: Callable[[list[int]], str] | None = None,
    ):
        """Open a session without requests.

        Args:
          programs: of the decoder.
          prepared: its parameters, as `programs.prepare` returns them.
          key: root of the draws.
          sampling: how tokens are drawn.
          shapes: of the slots.
          stop_ids: tokens that end a completion.
          version: of the parameters.
          decode: tokens -> text; needed for stop strings only.
        """
        self.version = version
        self._programs, self._prepared, self._key = programs, prepared, key
        self._sampling, self._shapes, self._decode = sampling, shapes, decode
        self._rule = Rule(sampling.filter, tuple(stop_ids), sampling.min_new_tokens)
        self._waiting: deque[_Row] = deque()
        self._slots: list[_Row | None] = []
        self._state: State | None = None
        self._longest = 0  # positions that any request so far can need, rounded

    @property
    def waiting(self) -> int:
        """Completions that have no slot yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Completions that sit in slots."""
        return sum(row is not None for row in self._slots)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
          ValueError: the prompt does not fit the context with its completion, what has begun
            leaves no token to draw, or there are stop strings and the session has no `decode`.
        """
        limit = request.max_new_tokens or self._sampling.max_new_tokens
        check_context(len(request.prompt), limit, self._shapes.context)
        strings = request.stop_strings
        strings = self._sampling.stop_strings if strings is None else strings
        if strings and self._decode is None:
            raise ValueError(
                f"stop_strings={strings!r} are looked for in text, and this engine was not given "
                "its tokenizer's `decode`"
            )
        shared = _Prompt(request.prompt)
        for i, member in enumerate(request.members):
            old = request.begun[i] if request.begun else None
            begun = 0 if old is None else len(old.tokens)
            check_left(request, member, begun, limit)
            prompt = shared
            if old is not None and begun:
                prompt = _Prompt(np.concatenate([request.prompt, old.tokens.astype(np.int32)]))
            self._waiting.append(
                _Row(
                    request,
                    member,
                    prompt,
                    limit,
                    begun,
                    [] if old is None else old.tokens.tolist(),
                    [] if old is None else old.logprobs.tolist(),
                    [] if old is None else old.versions.tolist(),
                    begun,
                    strings,
                )
            )
            end = self._shapes.width(len(request.prompt)) + limit
            self._longest = max(self._longest, end)

    def update(self, prepared: Params, version: int) -> None:
        """Draw from now on with other parameters.

        Completions that have begun go on: what they have read so far stays as the old parameters
        left it, and their tokens carry the version that each was drawn with.
        """
        self._prepared, self.version = prepared, version
        for row in self._waiting:  # what nobody has built on yet is read anew
            row.prompt.read = None

    def cancel(self, request: Request, member: int | None = None) -> list[Completion]:
        """End the completions of a request, or one of them; return them as far as they came."""
        return self._end(
            lambda row: row.request is request and member in (None, row.member), CANCELLED
        )

    def stop(self, reason: int = BUDGET) -> list[Completion]:
        """End everything; return it as far as it came."""
        return self._end(lambda row: True, reason)

    def advance(self) -> list[Progress]:
        """Fill free slots, decode for one burst, and say what is new.

        Slots are looked at again as soon as one of them is free and somebody waits.
        """
        coming = self._next_rows()
        if not coming and not self.running:
            return []
        self._make_room(coming)
        seated = self._seat(coming)
        # Whoever waits gets the first slot that is free; else the burst goes on to its end, or
        # until so few are left that they fit into fewer slots.
        least = self.running if self._waiting else self._shapes.fewer(len(self._slots)) + 1
        self._state, drawn = self._programs.burst(
            self._state,
            self._prepared,
            np.int32(least),
            rule=self._rule,
            steps=self._shapes.burst,
        )
        firsts, found = multihost.fetch(([part for _, part in seated], drawn))
        for (rows, _), part in zip(seated, firsts, strict=True):
            for i, row in enumerate(rows):
                self._take(row, part.tokens[:1, i], part.logprobs[:1, i])
        return self._collect(found)

    def _next_rows(self) -> list[_Row]:
        free = self._shapes.ladder[0] - self.running
        return [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]

    def _make_room(self, coming: list[_Row]) -> None:
        """Let there be slots enough, and long enough, for the next burst."""
        here = [row for row in self._slots if row is not None]
        steps = self._shapes.burst + 1  # the first token of those who come is drawn before it
        needed = max(min(row.end + steps, row.last) for row in here + coming)
        rows = self._shapes.slots(len(here) + len(coming))
        length = self._shapes.length(needed, self._longest)
        held = 0 if self._state is None else self._state.length
        length = max(length, held) if here else length
        if (rows, length) == (len(self._slots), held):
            return
        if self._state is None or not here:
            self._state = self._programs.empty(self._key, rows=rows, length=length)
            self._slots = [None] * rows
            return
        chosen = [i for i, row in enumerate(self._slots) if row is not None]
        chosen += [-1] * (rows - len(chosen))
        self._state = self._programs.arrange(self._state, np.array(chosen, np.int32), length=length)
        self._slots = [None if i < 0 else self._slots[i] for i in chosen]

    def _seat(self, coming: list[_Row]) -> list[tuple[list[_Row], Drawn]]:
        """Read the prompts of new rows and seat them; return their first tokens."""
        self._read({id(row.prompt): row.prompt for row in coming if row.prompt.read is None})
        by_read: dict[int, list[_Row]] = {}
        for row in coming:
            by_read.setdefault(id(row.prompt.read), []).append(row)
        most = min(len(self._slots), _SEATED)
        seated = []
        for rows in by_read.values():
            for start in range(0, len(rows), most):
                part = rows[start : start + most]
                seats = self._seats(part, most)
                self._state, drawn = self._programs.seat(
                    self._state, part[0].prompt.read, seats, self._key, rule=self._rule
                )
                seated.append((part, drawn))
        return seated

    def _seats(self, rows: list[_Row], size: int) -> Seats:
        """Give each of these rows a free slot."""
        free = (i for i, row in enumerate(self._slots) if row is None)
        table = np.zeros((6, size), np.int32)
        table[0] = len(self._slots)
        for i, row in enumerate(rows):
            slot = next(free)
            self._slots[slot] = row
            number = int(np.int64(row.request.id).astype(np.int32))  # its lower 32 bits
            table[:, i] = (slot, row.prompt.row, number, row.member, row.begun, row.limit)
        return Seats(*table)

    def _read(self, prompts: dict[int, _Prompt]) -> None:
        """Read prompts, those of one width together."""
        by_width: dict[int, list[_Prompt]] = {}
        for prompt in prompts.values():
            by_width.setdefault(self._shapes.width(len(prompt.tokens)), []).append(prompt)
        for width, some in by_width.items():
            for count in self._shapes.reads(len(some)):
                part, some = some[:count], some[count:]
                table, lengths = np.zeros((count, width), np.int32), np.zeros(count, np.int32)
                for i, prompt in enumerate(part):
                    table[i, : len(prompt.tokens)] = prompt.tokens
                    lengths[i] = len(prompt.tokens)
                read = self._programs.read(self._prepared, table, lengths)
                for i, prompt in enumerate(part):
                    prompt.read, prompt.row = read, i

    def _take(self, row: _Row, tokens: Array, logprobs: Array) -> None:
        row.tokens += tokens.tolist()
        row.logprobs += logprobs.tolist()
        row.versions += [self.version] * len(tokens)

    def _collect(self, found: Drawn) -> list[Progress]:
        """Hand the tokens of a burst to their rows, and let those leave that have ended."""
        news, halted = [], []
        for slot, row in enumerate(self._slots):
            if row is None:
                continue
            fresh = int(found.drawn[slot]) - len(row.tokens)
            self._take(row, found.tokens[:fresh, slot], found.logprobs[:fresh, slot])
            reason = None
            if not found.running[slot]:
                reason = STOP if row.tokens[-1] in self._rule.stop_ids else LENGTH
            end = self._end_of_text(row)
            if end is not None:
                del row.tokens[end:], row.logprobs[end:], row.versions[end:]
                reason = STOP
                halted.append(slot)
            if reason is not None:
                self._slots[slot] = None
            news.append(_progress(row, reason))
        self._halt(halted)
        return news

    def _end_of_text(self, row: _Row) -> int | None:
        """How many tokens a completion has when the first stop string is in its text.

        Not fewer than `min_new_tokens`.
        """
        if not row.stop_strings:
            return None

        counts = range(max(row.told + 1, self._rule.min_new_tokens), len(row.tokens) + 1)

        def found(count: int) -> str | None:
            assert self._decode is not None  # `submit` has seen to it
            text = self._decode(row.tokens[:count])
            return next((string for string in row.stop_strings if string in text), None)

        if not counts or found(counts[-1]) is None:
            return None
        end = next(count for count in counts if found(count) is not None)
        row.stop_string = found(end)
        return end

    def _end(self, which: Callable[[_Row], bool], reason: int) -> list[Completion]:
        ended = [row for row in self._waiting if which(row)]
        self._waiting = deque(row for row in self._waiting if not which(row))
        slots = [i for i, row in enumerate(self._slots) if row is not None and which(row)]
        ended = [row for i in slots if (row := self._slots[i]) is not None] + ended
        for i in slots:
            self._slots[i] = None
        self._halt(slots)
        return [row.completion(reason) for row in ended]

    def _halt(self, slots: Iterable[int]) -> None:
        """Let slots run no further."""
        slots = list(slots)
        if slots and self._state is not None:
            goes_on = np.ones(len(self._slots), bool)
            goes_on[slots] = False
            self._state = self._state._replace(running=self._state.running & goes_on)


def check_left(request: Request, member: int, begun: int, limit: int) -> None:
    """Refuse to continue a completion that may have no more tokens."""
    if begun >= limit:
        raise ValueError(
            f"completion {member} of request {request.id} has {begun} tokens and may have "
            f"max_new_tokens={limit}; raise the limit, or do not continue it"
        )


def _progress(row: _Row, reason: int | None) -> Progress:
    new = slice(row.told, None)
    row.told = len(row.tokens)
    return Progress(
        row.request,
        row.member,
        row.tokens[new],
        row.logprobs[new],
        None if reason is None else row.completion(reason),
    )
