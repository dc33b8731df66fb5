"""The dialect of `POST /v1/completions`: requests into sampling, completions into answers.

OpenAI's fields, and vLLM's for token ids and log-probabilities. What a field asks for is done or
refused by name, never ignored.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from grpo_jax.core.filtering import FilterConfig
from grpo_jax.sampling.engine import check_request
from grpo_jax.sampling.generate import SamplingConfig


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


class Served(NamedTuple):
    """The completions of one request."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    reasons: list[str]
    version: int  # of the weights they were drawn from


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
    "stop": (None, [], ""),
    "stream": (None, False),
    "stream_options": (None,),
    "suffix": (None, ""),
}
_UNDERSTOOD = {
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
    "stop_token_ids",
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
        )
        check_request(prompts, np.arange(len(prompts)), n, sampling, context_length)
    except ValueError as error:
        raise Refused(400, str(error)) from error
    seed = body.get("seed")
    return Asked(
        prompts,
        n,
        secrets.randbits(31) if seed is None else whole(body, "seed", 0),
        sampling,
        logprobs=count >= 0,
        ids=bool(body.get("return_token_ids")),
        tokens_as_ids=bool(body.get("return_tokens_as_token_ids")),
        skip_special=bool(body.get("skip_special_tokens", True)),
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


def answer(asked: Asked, served: Served, model: str, codec: Codec) -> dict[str, Any]:
    """The JSON of a completion response."""
    choices = []
    for i, (tokens, logprobs, reason) in enumerate(
        zip(served.tokens, served.logprobs, served.reasons, strict=True)
    ):
        choice: dict[str, Any] = {
            "index": i,
            "text": codec.decode(tokens, skip_special=asked.skip_special),
            "finish_reason": reason,
            "stop_reason": None,
            "logprobs": None,
        }
        if asked.logprobs:
            texts = [
                f"token_id:{t}" if asked.tokens_as_ids else codec.decode([t], skip_special=False)
                for t in tokens
            ]
            choice["logprobs"] = {
                "tokens": texts,
                "token_logprobs": logprobs,
                "top_logprobs": None,
                "text_offset": [],
            }
        if asked.ids:
            choice["token_ids"] = tokens
            choice["prompt_token_ids"] = asked.prompts[i // asked.n].tolist()
        choices.append(choice)
    read = sum(len(prompt) for prompt in asked.prompts)
    written = sum(len(tokens) for tokens in served.tokens)
    return {
        "id": f"cmpl-{secrets.token_hex(8)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
        },
        "logprobs_mode": "processed_logprobs",  # after temperature and filters
        "weights_version": served.version,
    }
