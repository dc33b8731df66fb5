"""A rollout engine behind HTTP: any server of OpenAI-style completions that returns token ids.

The dialect is vLLM's (`POST {url}/completions` with `return_token_ids`); `grpo-jax serve` speaks it
too. What training needs and text servers often leave out is insisted on: the ids that were sampled,
never ids made again from text, and the log-probability of each under the distribution it was drawn
from.

Symbols: `P` prompts, `G` completions a prompt.
"""

import concurrent.futures
import dataclasses
import hashlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import httpx
import jax
import numpy as np

from grpo_jax.core.policy import Params
from grpo_jax.sampling.engine import RemoteConfig, check_budget, check_request, lay_out
from grpo_jax.sampling.generate import BUDGET, LENGTH, STOP, Generation, SamplingConfig
from grpo_jax.sampling.http_client import EngineError, make_client, post
from grpo_jax.sampling.session import Completion, Request, check_context, check_left
from grpo_jax.scale import multihost

Publish = Callable[[Params, int], None]
_PLACEHOLDER = "token_id:"  # how the dialect writes an id where it would write its text


class Row(NamedTuple):
    """One completion as the server reports it."""

    tokens: list[int]  # its end token included
    logprobs: list[float]  # nats, as many as tokens
    reason: int  # index into `generate.STOP_REASONS`
    stop_string: str | None = None  # that ended it


class RemoteEngine:
    """Samples on a server; behind the same door as `NativeEngine`."""

    def __init__(
        self,
        config: RemoteConfig,
        sampling: SamplingConfig,
        *,
        stop_ids: Sequence[int],
        pad_id: int = 0,
        context_length: int | None = None,
        publish: Publish | None = None,
    ):
        """Hold an address and how to ask.

        Args:
          config: where the server is, and how patiently it is asked.
          sampling: used where a call brings no configuration of its own.
          stop_ids: tokens that end a completion.
          pad_id: fills rows.
          context_length: positions the model was made for; None does not check.
          publish: gives the server new weights and their version, and returns once it samples from
            them; None leaves the server with the weights it has.

        Raises:
          ValueError: no url.
        """
        if config.url is None:
            raise ValueError("engine.remote.url is not set; name the root of the server's API")
        self.config, self.sampling = config, sampling
        self.programs = 0
        """Programs compiled here: none, the server has its own."""
        self.version = 0
        """How often weights were published; the server's present weights."""
        self._stop_ids = tuple(int(i) for i in dict.fromkeys(stop_ids))
        self._pad_id, self._context_length = pad_id, context_length
        self._publish = publish
        self._published: weakref.ref[Any] | None = None  # a leaf of the weights the server has

    def generate(
        self,
        params: Params,
        prompts: Sequence[np.ndarray],
        group_size: int,
        key: jax.Array,
        *,
        request_ids: Sequence[int] | None = None,
        sampling: SamplingConfig | None = None,
    ) -> Generation:
        """Draw `group_size` completions of every prompt; see `RolloutEngine.generate`.

        `key` and a prompt's request id decide the seed that is sent with it. With several processes
        each asks for its share of the prompts, and all receive the whole.

        Raises:
          ValueError: the request cannot be served, or its log-probabilities would be those of
            another distribution.
          EngineError: the server is out of reach, or its answer must not be trained on.
        """
        sampling = sampling or self.sampling
        prompts = [np.asarray(p, np.int32) for p in prompts]
        ids = np.arange(len(prompts)) if request_ids is None else np.asarray(request_ids)
        check_request(prompts, ids, group_size, sampling, self._context_length)
        self._hand_over(params)
        seeds = [_seed(key, int(i)) for i in ids]
        mine, size = multihost.my_share(len(prompts)), self.config.prompts_per_request

        def ask() -> list[list[Row]]:
            starts = range(mine.start, mine.stop, size)
            cuts = [slice(start, min(start + size, mine.stop)) for start in starts]
            requests = [(prompts[cut], seeds[cut.start]) for cut in cuts]
            with make_client(self.config) as client:
                return self._ask_all(client, requests, group_size, sampling)

        # As long as another process may try: a wait that ends before would hide what went wrong.
        tries = self.config.retries + 1
        patience = tries * (self.config.timeout + self.config.backoff * 2**self.config.retries)
        parts = multihost.all_succeed(ask, "the serving engine", limit=patience)
        groups = [group for part in parts for group in part]
        return lay_out(prompts, [row for group in groups for row in group], self._pad_id)

    def complete(
        self,
        params: Params,
        requests: Sequence[Request],
        key: jax.Array,
        *,
        sampling: SamplingConfig | None = None,
        version: int = 0,
        token_budget: int | None = None,
    ) -> Iterator[Completion]:
        """Yield completions as the server ends them; see `RolloutEngine.complete`.

        A budget, and an iterator that is closed, hang up on what is on its way: nothing of it is
        kept. What is continued is sent as a prompt, with a seed of its own. This process asks for
        all of it.

        Raises:
          ValueError: a request cannot be served, the budget is below 1, or log-probabilities would
            be those of another distribution.
          EngineError: the server is out of reach, or its answer must not be trained on.
        """
        sampling = sampling or self.sampling
        check_budget(token_budget)
        for r in requests:
            limit = r.max_new_tokens or sampling.max_new_tokens
            check_context(len(r.prompt), limit, self._context_length)
        self._hand_over(params)
        calls = [call for r in requests for call in _calls(r, sampling, key)]
        return self._as_they_end(calls, version, token_budget)

    def _as_they_end(
        self, calls: "Sequence[_Call]", version: int, token_budget: int | None
    ) -> Iterator[Completion]:
        over, left = threading.Event(), math.inf if token_budget is None else token_budget
        client = make_client(self.config)
        pool = concurrent.futures.ThreadPoolExecutor(self.config.concurrency)
        try:
            asked = {
                pool.submit(
                    self._ask, client, over, [c.prompt], c.seed, len(c.members), c.sampling
                ): c
                for c in calls
            }
            for future in concurrent.futures.as_completed(list(asked)):
                call = asked.pop(future)
                (rows,) = future.result()
                left -= sum(len(row.tokens) for row in rows)
                yield from call.completions(rows, version)
                if left <= 0:
                    break
            for call in asked.values():
                yield from call.completions([Row([], [], BUDGET)] * len(call.members), version)
        finally:
            over.set()
            client.close()  # hangs up
            pool.shutdown(wait=False, cancel_futures=True)

    def _hand_over(self, params: Params) -> None:
        """Publish weights that the server does not have yet."""
        if self._publish is None:
            return
        leaf = jax.tree.leaves(params)[0]
        if self._published is not None and self._published() is leaf:
            return
        self._publish(params, self.version + 1)
        self.version += 1
        self._published = weakref.ref(leaf)

    def _ask_all(
        self,
        client: httpx.Client,
        requests: Sequence[tuple[list[np.ndarray], int]],
        group_size: int,
        sampling: SamplingConfig,
    ) -> list[list[Row]]:
        """Send requests side by side; after the first failure none is sent, or sent again."""
        over = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(self.config.concurrency) as pool:
            asked = [
                pool.submit(self._ask, client, over, prompts, seed, group_size, sampling)
                for prompts, seed in requests
            ]
            try:
                done, _ = concurrent.futures.wait(
                    asked, return_when=concurrent.futures.FIRST_EXCEPTION
                )
                for future in done:
                    future.result()  # raises what ended the wait early
                return [group for future in asked for group in future.result()]
            finally:
                over.set()
                pool.shutdown(wait=False, cancel_futures=True)

    def _ask(
        self,
        client: httpx.Client,
        over: threading.Event,
        prompts: list[np.ndarray],
        seed: int,
        group_size: int,
        sampling: SamplingConfig,
    ) -> list[list[Row]]:
        """Complete the prompts of one request; returns a group for each."""
        body = {"model": self._model_name(client)} | self._body(prompts, seed, group_size, sampling)
        answer = post(client, self.config, "/completions", body, over)
        if self._publish is not None and answer.get("weights_version", self.version) != (
            self.version
        ):
            raise EngineError(
                f"{self.config.url} sampled with weights version {answer['weights_version']} after "
                f"version {self.version} was published; is another run using the same server?"
            )
        self._check_mode(answer.get("logprobs_mode"), sampling)
        choices = answer.get("choices")
        wanted = len(prompts) * group_size
        if not isinstance(choices, list) or len(choices) != wanted:
            found = len(choices) if isinstance(choices, list) else "no"
            raise EngineError(
                f"{self.config.url} returned {found} choices for {len(prompts)} prompts with "
                f"n = {group_size}; {wanted} were asked for"
            )
        ordered = sorted(choices, key=lambda choice: choice.get("index", 0))
        rows = [
            self._read(choice, prompts[i // group_size], sampling)
            for i, choice in enumerate(ordered)
        ]
        return [rows[i : i + group_size] for i in range(0, wanted, group_size)]

    def _body(
        self, prompts: list[np.ndarray], seed: int, group_size: int, sampling: SamplingConfig
    ) -> dict[str, Any]:
        chosen = sampling.filter
        return {
            "prompt": [prompt.tolist() for prompt in prompts],
            "n": group_size,
            "seed": seed,
            "max_tokens": sampling.max_new_tokens,
            "min_tokens": sampling.min_new_tokens,
            "temperature": chosen.temperature,
            "top_p": min(chosen.top_p, 1.0) if chosen.top_p is not None else 1.0,
            "top_k": int(chosen.top_k) if chosen.top_k is not None and chosen.uses_top_k else -1,
            "min_p": chosen.min_p,
            "stop_token_ids": list(self._stop_ids),
            "stop": list(sampling.stop_strings),
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # for servers that know only this one
            "skip_special_tokens": False,
        }

    def _model_name(self, client: httpx.Client) -> str:
        if self.config.model is not None:
            return self.config.model
        served = post(client, self.config, "/models", None).get("data", [])
        if len(served) != 1:
            raise EngineError(
                f"{self.config.url} serves {len(served)} models "
                f"({', '.join(str(m.get('id')) for m in served)}); name one in engine.remote.model"
            )
        self.config = dataclasses.replace(self.config, model=served[0]["id"])
        return served[0]["id"]

    def _check_mode(self, mode: str | None, sampling: SamplingConfig) -> None:
        """Refuse log-probabilities of another distribution than the tokens were drawn from."""
        processed = mode == "processed_logprobs" or (mode is None and self.config.processed)
        plain = sampling.filter.temperature == 1.0 and not sampling.filter.active
        if not (processed or plain or sampling.filter.greedy):
            raise ValueError(
                f"temperature={sampling.filter.temperature}, top_k={sampling.filter.top_k}, "
                f"top_p={sampling.filter.top_p}, min_p={sampling.filter.min_p}: the server reports "
                "log-probabilities from before temperature and filters, and the tokens were drawn "
                "after them. Start it with --logprobs-mode processed_logprobs and set "
                "engine.remote.processed to true, or sample with temperature 1 and no filter"
            )

    def _read(self, choice: dict[str, Any], prompt: np.ndarray, sampling: SamplingConfig) -> Row:
        """Take one choice apart, and refuse what must not be trained on."""
        where = f"choice {choice.get('index')} of {self.config.url}"
        echoed = choice.get("prompt_token_ids")
        if echoed is not None and list(echoed) != prompt.tolist():
            raise EngineError(
                f"{where} completed other prompt tokens than were sent (first of them "
                f"{echoed[:8]}, sent {prompt[:8].tolist()}); the server re-tokenised the prompt"
            )
        logprobs = choice.get("logprobs") or {}
        values = logprobs.get("token_logprobs")
        tokens = choice.get("token_ids") or _ids_in(logprobs.get("tokens"))
        if tokens is None:
            raise EngineError(
                f"{where} holds text and no token ids; text made into tokens again is not what was "
                "sampled. Use a server that understands return_token_ids or "
                "return_tokens_as_token_ids (vLLM does)"
            )
        known = [v for v in values or () if v is not None and math.isfinite(v)]
        if values is None or not len(known) == len(values) == len(tokens):
            missing = "none" if values is None else f"{len(known)}"
            raise EngineError(
                f"{where} has {len(tokens)} tokens and {missing} log-probabilities; each token "
                "needs the one it was sampled with, and 0 in its place would bias the update"
            )
        limit = sampling.filter.vocabulary
        if limit is not None and max(tokens, default=0) >= limit:
            raise EngineError(
                f"{where} holds the token id {max(tokens)}, and the tokenizer knows {limit}; the "
                "server runs another model, or draws from the padding of its vocabulary"
            )
        string = choice.get("stop_reason")
        return Row(
            list(tokens),
            [float(v) for v in values],
            self._reason(choice, tokens, where),
            string if isinstance(string, str) else None,
        )

    def _reason(self, choice: dict[str, Any], tokens: Sequence[int], where: str) -> int:
        reason = choice.get("finish_reason")
        if reason == "length":
            return LENGTH
        if reason != "stop":
            raise EngineError(
                f"{where} ended with finish_reason {reason!r}, neither stop nor length"
            )
        by_string = isinstance(choice.get("stop_reason"), str)
        last = tokens[-1] if tokens else None
        if not by_string and last not in self._stop_ids:
            raise EngineError(
                f"{where} ended with finish_reason 'stop', and its last token {last} is none of "
                f"the stop tokens {list(self._stop_ids)}; the end token belongs to the completion, "
                "and without it the model is never trained to stop"
            )
        return STOP


class _Call(NamedTuple):
    """Members of a request that are asked for together."""

    request: Request
    members: tuple[int, ...]
    begun: Completion | None  # of the one member
    prompt: np.ndarray
    seed: int
    sampling: SamplingConfig

    def completions(self, rows: Sequence[Row], version: int) -> list[Completion]:
        """What the server drew, behind what had begun."""
        return [
            Completion(
                self.request,
                member,
                _behind(self.begun and self.begun.tokens, row.tokens, np.int32),
                _behind(self.begun and self.begun.logprobs, row.logprobs, np.float32),
                _behind(self.begun and self.begun.versions, [version] * len(row.tokens), np.int32),
                row.reason,
                row.stop_string,
            )
            for member, row in zip(self.members, rows, strict=True)
        ]


def _calls(request: Request, sampling: SamplingConfig, key: jax.Array) -> list[_Call]:
    """A call for all members, if they are the first ones and begin; else one for each."""
    strings = sampling.stop_strings if request.stop_strings is None else request.stop_strings
    limit = request.max_new_tokens or sampling.max_new_tokens
    sampling = dataclasses.replace(
        sampling,
        max_new_tokens=limit,
        min_new_tokens=min(sampling.min_new_tokens, limit),
        stop_strings=strings,
    )
    if not request.begun and request.members == tuple(range(len(request.members))):
        seed = _seed(key, request.id)
        return [_Call(request, request.members, None, request.prompt, seed, sampling)]
    calls = []
    for i, member in enumerate(request.members):
        begun = request.begun[i] if request.begun else None
        old = np.zeros(0, np.int32) if begun is None else begun.tokens
        check_left(request, member, len(old), limit)
        rest = dataclasses.replace(
            sampling,
            max_new_tokens=limit - len(old),
            min_new_tokens=max(sampling.min_new_tokens - len(old), 0),
        )
        # Not the random numbers of the tokens before it, which the prompt depends on.
        seed = _seed(jax.random.fold_in(jax.random.fold_in(key, member), len(old)), request.id)
        prompt = np.concatenate([request.prompt, old.astype(np.int32)])
        calls.append(_Call(request, (member,), begun, prompt, seed, rest))
    return calls


def _behind(old: np.ndarray | None, new: Sequence[Any], dtype: Any) -> np.ndarray:
    fresh = np.asarray(new, dtype)
    return fresh if old is None else np.concatenate([old, fresh])


def _seed(key: jax.Array, request_id: int) -> int:
    """A seed of 31 bits for one prompt: another one for every key and request id."""
    root = np.asarray(jax.random.key_data(key)).tobytes()
    digest = hashlib.blake2b(root + request_id.to_bytes(8, "little", signed=True), digest_size=4)
    return int.from_bytes(digest.digest(), "little") & 0x7FFFFFFF


def _ids_in(tokens: Sequence[str] | None) -> list[int] | None:
    """Read ids from tokens written as `token_id:17`; None where they are written otherwise."""
    if not tokens or not all(token.startswith(_PLACEHOLDER) for token in tokens):
        return None
    return [int(token.removeprefix(_PLACEHOLDER)) for token in tokens]
