"""Serve an engine over HTTP, in the dialect that `remote.RemoteEngine` and OpenAI clients speak.

`POST /v1/completions`, `GET /v1/models`, `GET /health`, and, where a loader is given,
`POST /v1/load_weights`. Requests that arrive together and ask for the same sampling are decoded
together.
"""

import asyncio
import concurrent.futures
import hmac
import json
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from grpo_jax.core.policy import Params
from grpo_jax.sampling import dialect
from grpo_jax.sampling.dialect import Asked, Codec, Refused, Served
from grpo_jax.sampling.engine import RolloutEngine
from grpo_jax.sampling.generate import STOP_REASONS, SamplingConfig
from grpo_jax.sampling.serving import ServeConfig

_LINGER = 0.005  # seconds that a batch waits for requests which are on their way


class _Job(NamedTuple):
    """A request on its way to the engine."""

    asked: Asked
    future: concurrent.futures.Future[Served]

    @property
    def shape(self) -> tuple[SamplingConfig, int]:
        """What must be equal for two jobs to be decoded together."""
        return self.asked.sampling, self.asked.n


class Batcher:
    """Decodes requests one batch after another, in a thread of its own."""

    def __init__(self, engine: RolloutEngine, params: Params, limits: ServeConfig):
        """Start the thread; `close` ends it."""
        self._engine, self._limits = engine, limits
        self._weights = (params, 0)
        self._jobs: deque[_Job] = deque()
        self._rows = 0  # completions asked for and not yet returned
        self._seen: set[tuple[SamplingConfig, int]] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="decoding", daemon=True)
        self._thread.start()

    def submit(self, asked: Asked) -> concurrent.futures.Future[Served]:
        """Queue a request; a future that is cancelled before its turn is never decoded.

        Raises:
          Refused: too many completions are waiting, or the sampling is one too many.
        """
        job = _Job(asked, concurrent.futures.Future())
        rows = len(asked.prompts) * asked.n
        with self._changed:
            if self._closed:
                raise Refused(503, "the server is stopping")
            if self._rows + rows > self._limits.max_waiting:
                raise Refused(
                    429,
                    f"{self._rows} completions are waiting and {rows} more exceed the limit of "
                    f"{self._limits.max_waiting}; try again later, or ask for fewer",
                )
            if job.shape not in self._seen and len(self._seen) >= self._limits.max_samplings:
                raise Refused(
                    400,
                    f"this is sampling number {len(self._seen) + 1}, and each compiles a program; "
                    f"the limit is {self._limits.max_samplings}. Use max_tokens, n, temperature "
                    "and filters that were used before",
                )
            self._seen.add(job.shape)
            self._rows += rows
            self._jobs.append(job)
            self._changed.notify()
        job.future.add_done_callback(lambda _: self._forget(rows))
        return job.future

    def load(self, params: Params, version: int) -> None:
        """Sample from other weights, from the next batch on."""
        self._weights = (params, version)

    def close(self) -> None:
        """Finish what is being decoded, and refuse the rest."""
        with self._changed:
            self._closed = True
            left = list(self._jobs)
            self._jobs.clear()
            self._changed.notify()
        for job in left:
            job.future.cancel()
        self._thread.join()

    def _forget(self, rows: int) -> None:
        with self._changed:
            self._rows -= rows

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return
            time.sleep(_LINGER)
            jobs = [job for job in self._take() if job.future.set_running_or_notify_cancel()]
            if not jobs:
                continue
            try:
                served = self._decode([job.asked for job in jobs])
            except Exception as error:  # one batch fails, the server goes on
                for job in jobs:
                    job.future.set_exception(error)
            else:
                for job, answer in zip(jobs, served, strict=True):
                    job.future.set_result(answer)

    def _take(self) -> list[_Job]:
        """The oldest job, and all that can be decoded with it."""
        with self._changed:
            if not self._jobs:
                return []
            shape = self._jobs[0].shape
            chosen = [job for job in self._jobs if job.shape == shape]
            self._jobs = deque(job for job in self._jobs if job.shape != shape)
        return chosen

    def _decode(self, batch: list[Asked]) -> list[Served]:
        params, version = self._weights
        prompts = [prompt for asked in batch for prompt in asked.prompts]
        requests = [_request_id(a.seed, i) for a in batch for i in range(len(a.prompts))]
        rows = self._engine.generate(
            params,
            prompts,
            batch[0].n,
            jax.random.key(0),  # all that is random comes from the request's own seed
            request_ids=requests,
            sampling=batch[0].sampling,
        )
        tokens, logprobs = np.asarray(rows.tokens), np.asarray(rows.logprobs)
        out, first = [], 0
        for asked in batch:
            served = Served([], [], [], version)
            for row in range(first, first + len(asked.prompts) * asked.n):
                start = int(rows.prompt_lengths[row])
                end = start + int(rows.completion_lengths[row])
                served.tokens.append(tokens[row, start:end].tolist())
                served.logprobs.append(logprobs[row, start:end].tolist())
                served.reasons.append(STOP_REASONS[int(rows.stop_reasons[row])])
            first += len(asked.prompts) * asked.n
            out.append(served)
        return out


def _request_id(seed: int, place: int) -> int:
    """31 bits for a prompt of a request: prompts of one request draw on their own."""
    return zlib.crc32(f"{seed} {place}".encode()) & 0x7FFFFFFF


def make_app(
    batcher: Batcher,
    codec: Codec,
    *,
    model: str,
    context_length: int | None = None,
    vocabulary: int | None = None,
    token: str | None = None,
    limits: ServeConfig | None = None,
    load: Callable[[str], Params] | None = None,
) -> Starlette:
    """The HTTP application.

    Args:
      batcher: decodes.
      codec: the model's tokenizer.
      model: the name it is served under.
      context_length: positions the model was made for.
      vocabulary: ids that the tokenizer knows; None takes all of the model's.
      token: what clients must send as `Authorization: Bearer …`; None lets everybody in.
      limits: what is taken on.
      load: reads weights from a folder that a client names; None refuses new weights.
    """
    limits = limits or ServeConfig()

    def allowed(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token is not None and not hmac.compare_digest(given.encode(), token.encode()):
            raise Refused(401, "the access token is missing or wrong; send Authorization: Bearer …")

    async def body_of(request: Request) -> Any:
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > limits.max_body_mb << 20:
                raise Refused(413, f"the request is larger than {limits.max_body_mb} MiB")
        try:
            return json.loads(bytes(data))
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not JSON: {error}") from error

    async def completions(request: Request) -> JSONResponse:
        allowed(request)
        asked = dialect.read_request(
            await body_of(request), model, codec, context_length, vocabulary
        )
        future = batcher.submit(asked)
        waiting = asyncio.wrap_future(future)
        while not waiting.done():
            await asyncio.wait([waiting], timeout=1.0)
            if await request.is_disconnected():
                waiting.cancel()
                raise Refused(499, "the client has gone")
        try:
            served = waiting.result()
        except asyncio.CancelledError:
            raise Refused(503, "the server is stopping") from None
        return JSONResponse(dialect.answer(asked, served, model, codec))

    async def models(request: Request) -> JSONResponse:
        allowed(request)
        entry = {"id": model, "object": "model", "created": 0, "owned_by": "grpo_jax"}
        return JSONResponse({"object": "list", "data": [entry | {"max_model_len": context_length}]})

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def load_weights(request: Request) -> JSONResponse:
        allowed(request)
        body = await body_of(request)
        if load is None:
            raise Refused(403, "this server keeps its weights; start it with --weights FOLDER")
        if not isinstance(body, dict) or not isinstance(body.get("path"), str):
            raise Refused(400, "send {'path': folder of the weights, 'version': whole number}")
        version = dialect.whole(body, "version", 0, low=0)
        try:
            params = await asyncio.to_thread(load, body["path"])
        except (ValueError, OSError) as error:
            raise Refused(400, f"the weights were not loaded: {error}") from error
        batcher.load(params, version)
        return JSONResponse({"weights_version": version})

    def refused(request: Request, error: Exception) -> JSONResponse:
        status = error.status if isinstance(error, Refused) else 500
        kind = "invalid_request_error" if status < 500 else "server_error"
        text = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
        detail = {"message": text, "type": kind, "code": status, "param": None}
        headers = {"Retry-After": "1"} if status in (429, 503) else None
        return JSONResponse({"error": detail}, status_code=status, headers=headers)

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/load_weights", load_weights, methods=["POST"]),
            Route("/health", health),
        ],
        exception_handlers={Refused: refused, Exception: refused},
    )
