"""The dialect of `POST /v1/completions`: requests into sampling, completions into answers.

An answer is one object, or a stream of pieces; both say the same of a choice.

OpenAI's fields, and vLLM's for token ids and log-probabilities. What a field asks for is done or
refused by name, never ignored.
"""

import secrets
import time
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from grpo_jax.core.filtering import FilterConfig
from grpo_jax.sampling.engine import check_request
from grpo_jax.sampling.generate import STOP_REASONS, SamplingConfig
from grpo_jax.sampling.session import Completion, Progress, Request


class Codec(Protocol):
    """What the server needs of a tokenizer."""

    stop_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...


class Refused(Exception):
    """A request that is not served: HTTP status and what to tell the client."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Asked(NamedTuple):
    """One validated completion request."""

    prompts: list[np.ndarray]  # i32[length] each
    n: int  # completions a prompt
    seed: int
    sampling: SamplingConfig
    logprobs: bool
    ids: bool  # return token ids
    tokens_as_ids: bool  # write `token_id:17` where a token's text stands
    skip_special: bool
    keep_stop: bool  # the text ends with the stop string, and not before it
    stream: bool
    usage: bool  # a stream ends with the counts of tokens

    @property
    def members(self) -> tuple[int, ...]:
        """Completions of each prompt."""
        return tuple(range(self.n))

    def requests(self) -> list[Request]:
        """What a session is asked; choice `i * n + m` is member m of request i."""
        return [
            Request(
                prompt,
                _request_id(self.seed, i),
                self.members,
                self.sampling.max_new_tokens,
                self.sampling.stop_strings,
            )
            for i, prompt in enumerate(self.prompts)
        ]


def _request_id(seed: int, place: int) -> int:
    """31 bits for a prompt of a request: prompts of one request draw on their own."""
    return zlib.crc32(f"{seed} {place}".encode()) & 0x7FFFFFFF


# Fields that change the answer and are not offered: the values that leave it as it is.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "ignore_eos": (None, False),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "prompt_logprobs": (None,),
    "repetition_penalty": (None, 1),
    "suffix": (None, ""),
}
_UNDERSTOOD = {
    "include_stop_str_in_output",
    "logprobs",
    "max_tokens",
    "min_p",
    "min_tokens",
    "model",
    "n",
    "prompt",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "stream",
    "stream_options",
    "temperature",
    "top_k",
    "top_p",
    "user",
}


def read_request(
    body: Any, model: str, codec: Codec, context_length: int | None, vocabulary: int | None = None
) -> Asked:
    """Validate the JSON of a completion request.

    `vocabulary` is how many ids the tokenizer knows: others are neither read nor drawn.

    Raises:
      Refused: a field that is unknown, out of range, or asks for what is not offered.
    """
    if not isinstance(body, dict):
        raise Refused(400, f"the body is {type(body).__name__}; send a JSON object")
    for name, value in body.items():
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise Refused(400, f"{name} = {value!r} is not offered here; leave it out")
        elif name not in _UNDERSTOOD:
            raise Refused(
                400, f"unknown field {name!r}; there are {', '.join(sorted(_UNDERSTOOD))}"
            )
    if body.get("model") not in (None, model):
        raise Refused(404, f"model {body['model']!r} is not served here; {model!r} is")
    stop_ids = body.get("stop_token_ids")
    if stop_ids is not None and not (isinstance(stop_ids, list) and all(map(_is_id, stop_ids))):
        raise Refused(400, f"stop_token_ids = {stop_ids!r} must be a list of token ids")
    if stop_ids and not set(stop_ids) <= set(codec.stop_ids):
        raise Refused(
            400, f"stop_token_ids = {stop_ids}; this model always stops at {list(codec.stop_ids)}"
        )
    count = whole(body, "logprobs", -1, low=0, high=1)
    prompts = [np.asarray(ids, np.int32) for ids in _prompts(body.get("prompt"), codec)]
    for ids in prompts:
        if vocabulary is not None and ids.max(initial=0) >= vocabulary:
            raise Refused(400, f"token id {ids.max()} is not below the vocabulary of {vocabulary}")
    n = whole(body, "n", 1, low=1)
    try:
        sampling = SamplingConfig(
            max_new_tokens=whole(body, "max_tokens", 16, low=1),
            min_new_tokens=whole(body, "min_tokens", 0, low=0),
            filter=FilterConfig(
                temperature=_number(body, "temperature", 1.0),
                top_k=whole(body, "top_k", -1, low=-1),
                top_p=_number(body, "top_p", 1.0),
                min_p=_number(body, "min_p", 0.0),
                vocabulary=vocabulary,
            ),
            stop_strings=_stop_strings(body.get("stop")),
        )
        check_request(prompts, np.arange(len(prompts)), n, sampling, context_length)
    except ValueError as error:
        raise Refused(400, str(error)) from error
    seed = body.get("seed")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or not options.keys() <= {"include_usage"}:
        raise Refused(400, f"stream_options = {options!r} may only hold include_usage")
    return Asked(
        prompts,
        n,
        secrets.randbits(31) if seed is None else whole(body, "seed", 0),
        sampling,
        logprobs=count >= 0,
        ids=bool(body.get("return_token_ids")),
        tokens_as_ids=bool(body.get("return_tokens_as_token_ids")),
        skip_special=bool(body.get("skip_special_tokens", True)),
        keep_stop=bool(body.get("include_stop_str_in_output")),
        stream=bool(body.get("stream")),
        usage=bool(options.get("include_usage")),
    )


def _prompts(prompt: Any, codec: Codec) -> list[list[int]]:
    """One prompt or several, each text or ids."""
    if isinstance(prompt, str):
        return [codec.encode(prompt)]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return [codec.encode(item) for item in prompt]
        if all(_is_id(item) for item in prompt):
            return [prompt]
        if all(isinstance(item, list) and all(map(_is_id, item)) for item in prompt):
            return prompt
    raise Refused(400, "prompt must be a text, a list of token ids, or a list of either")


def _stop_strings(stop: Any) -> tuple[str, ...]:
    """One string or several; none from null, and from an empty text, which is how some say none."""
    strings = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise Refused(400, f"stop = {stop!r} must be a text or a list of texts")
    return tuple(dict.fromkeys(text for text in strings if text))


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 31


def _number(body: dict[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        raise Refused(400, f"{name} = {value!r} must be a number")
    return float(value)


def whole(
    body: dict[str, Any], name: str, default: int, low: int | None = None, high: int | None = None
) -> int:
    """A whole number between limits; null and nothing give the default."""
    value = body.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refused(400, f"{name} = {value!r} must be a whole number")
    if body.get(name) is not None:
        if low is not None and value < low:
            raise Refused(400, f"{name} = {value} must be at least {low}")
        if high is not None and value > high:
            raise Refused(400, f"{name} = {value} must be at most {high}")
    return value


def answer(
    asked: Asked, completions: Sequence[Completion], model: str, codec: Codec
) -> dict[str, Any]:
    """The JSON of a completion response; completions in the order of the choices."""
    choices = []
    for i, c in enumerate(completions):
        text = _text(asked, c.tokens, c.stop_string, codec)
        choice = _choice(asked, i, c.tokens, c.logprobs, text, c, codec)
        if asked.ids:
            choice["prompt_token_ids"] = asked.prompts[i // asked.n].tolist()
            choice["weights_versions"] = c.versions.tolist()
        choices.append(choice)
    return frame(model, choices) | {
        "usage": usage(asked, sum(len(c.tokens) for c in completions)),
        "logprobs_mode": "processed_logprobs",  # after temperature and filters
        # The oldest: where weights changed on the way, no token is from older ones.
        "weights_version": min(int(c.versions.min()) for c in completions),
    }


class Teller:
    """The pieces of a streamed choice, out of the progress of its completion."""

    def __init__(self, asked: Asked, index: int, codec: Codec):
        self._asked, self._index, self._codec = asked, index, codec
        self._tokens: list[int] = []
        self._sent = 0  # characters

    def piece(self, news: Progress) -> dict[str, Any]:
        """The choice of the next piece; text that may still change waits for a later one."""
        self._tokens += news.tokens
        done = news.completion
        string = None if done is None else done.stop_string
        text = _text(self._asked, self._tokens, string, self._codec)
        if done is None:
            text = text[: _settled(text, self._asked.sampling.stop_strings)]
        new, self._sent = text[self._sent :], max(self._sent, len(text))
        return _choice(self._asked, self._index, news.tokens, news.logprobs, new, done, self._codec)


def frame(model: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """What stands around choices."""
    return {
        "id": f"cmpl-{secrets.token_hex(8)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
    }


def usage(asked: Asked, written: int) -> dict[str, int]:
    """Counts of tokens."""
    read = sum(len(prompt) for prompt in asked.prompts)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
    }


def _choice(
    asked: Asked,
    index: int,
    tokens: Sequence[int] | np.ndarray,
    logprobs: Sequence[float] | np.ndarray,
    text: str,
    done: Completion | None,
    codec: Codec,
) -> dict[str, Any]:
    """One choice, or a piece of it; `done` once it has ended."""
    ids = [int(t) for t in tokens]
    choice: dict[str, Any] = {
        "index": index,
        "text": text,
        "finish_reason": None if done is None else STOP_REASONS[done.reason],
        "stop_reason": None if done is None else done.stop_string,
        "logprobs": None,
    }
    if asked.logprobs:
        texts = [
            f"token_id:{t}" if asked.tokens_as_ids else codec.decode([t], skip_special=False)
            for t in ids
        ]
        choice["logprobs"] = {
            "tokens": texts,
            "token_logprobs": [float(v) for v in logprobs],
            "top_logprobs": None,
            "text_offset": [],
        }
    if asked.ids:
        choice["token_ids"] = ids
    return choice


def _text(
    asked: Asked, tokens: Sequence[int] | np.ndarray, stop_string: str | None, codec: Codec
) -> str:
    text = codec.decode([int(t) for t in tokens], skip_special=asked.skip_special)
    place = -1 if stop_string is None else text.find(stop_string)
    if stop_string is None or place < 0:
        return text
    return text[: place + len(stop_string) * asked.keep_stop]


def _settled(text: str, stop_strings: tuple[str, ...]) -> int:
    """How much of a growing text will not change.

    What does not: all but half a character at its end, and the beginning of a stop string.
    """
    end = len(text.rstrip("\ufffd"))
    begun = (
        size
        for string in stop_strings
        for size in range(len(string))
        if text[:end].endswith(string[:size])
    )
    return end - max(begun, default=0)
