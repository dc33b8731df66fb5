"""Serve an engine over HTTP, in the dialect that `remote.RemoteEngine` and OpenAI clients speak.

`POST /v1/completions`, `GET /v1/models`, `GET /health`, and, where a loader is given,
`POST /v1/load_weights`. Requests of the same temperature and filters share one session: they join
it and leave it between bursts. Answers come whole or as a stream, and a client that goes away frees
its slots.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import hmac
import json
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import jax
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.policy import Params
from grpo_jax.sampling import dialect
from grpo_jax.sampling.dialect import Asked, Codec, Refused
from grpo_jax.sampling.engine import NativeEngine
from grpo_jax.sampling.serving import ServeConfig
from grpo_jax.sampling.session import Completion, Progress, Request, Session

_LINGER = 0.005  # seconds that an idle session waits for requests which come together
_ROWS = 32  # completions decoded together, where the engine's configuration does not say
_EVENTS = "text/event-stream"


Tell = Callable[[int, Progress], None]
"""Takes news of a choice, by its number; called from the decoding thread."""


@dataclasses.dataclass(eq=False)
class _Job:
    """A request on its way through the session."""

    asked: Asked
    tell: Tell | None
    future: concurrent.futures.Future[list[Completion]]
    requests: list[Request]
    done: dict[int, Completion]  # by choice

    @property
    def rule(self) -> tuple[FilterConfig, int]:
        """What must be equal for two jobs to be decoded together; programs are compiled for it."""
        return self.asked.sampling.filter, self.asked.sampling.min_new_tokens


class Batcher:
    """Decodes requests together, in a thread of its own; they join and leave between bursts."""

    def __init__(self, engine: NativeEngine, params: Params, limits: ServeConfig):
        """Start the thread; `close` ends it."""
        self._engine, self._limits = engine, limits
        self._weights = (params, 0)
        self._jobs: deque[_Job] = deque()
        self._rows = 0  # completions asked for and not yet returned
        self._seen: set[tuple[FilterConfig, int]] = set()
        self._changed = threading.Condition()
        self._closed = False
        # Of the thread alone:
        self._session: Session | None = None
        self._used = self._weights  # by the session
        self._rule: tuple[FilterConfig, int] | None = None  # of the session
        self._running: dict[Request, tuple[_Job, int]] = {}  # and the number of its first choice
        self._thread = threading.Thread(target=self._work, name="decoding", daemon=True)
        self._thread.start()

    def submit(
        self, asked: Asked, tell: Tell | None = None
    ) -> concurrent.futures.Future[list[Completion]]:
        """Queue a request; cancelling the future ends its decoding.

        Raises:
          Refused: too many completions are waiting, or the sampling is one too many.
        """
        job = _Job(asked, tell, concurrent.futures.Future(), asked.requests(), {})
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
            if job.rule not in self._seen and len(self._seen) >= self._limits.max_samplings:
                raise Refused(
                    400,
                    f"this is sampling number {len(self._seen) + 1}, and each compiles programs; "
                    f"the limit is {self._limits.max_samplings}. Use a temperature, filters and "
                    "min_tokens that were used before",
                )
            self._seen.add(job.rule)
            self._rows += rows
            self._jobs.append(job)
            self._changed.notify()
        job.future.add_done_callback(lambda _: self._forget(rows))
        return job.future

    def load(self, params: Params, version: int) -> None:
        """Sample from other weights, from the next burst on.

        Completions on their way go on with them; each token carries its version.
        """
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
                self._changed.wait_for(lambda: self._jobs or self._running or self._closed)
                if self._closed and not self._running:
                    return
            if not self._running:
                time.sleep(_LINGER)
            try:
                self._decode()
            except Exception as error:  # what runs fails, the server goes on
                self._session = None  # its slots were given to the program that failed
                for job in {job for job, _ in self._running.values()}:
                    if job.future.set_running_or_notify_cancel():
                        job.future.set_exception(error)
                self._running.clear()

    def _decode(self) -> None:
        """Let requests in and out, and decode one burst."""
        weights = self._weights
        if self._session is not None and weights is not self._used:
            self._session.update(self._engine.prepare(weights[0]), weights[1])
        self._used = weights
        while (job := self._next()) is not None:
            self._running |= {r: (job, i * job.asked.n) for i, r in enumerate(job.requests)}
            if self._session is None or job.rule != self._rule:
                self._session, self._rule = self._open(job), job.rule
            for request in job.requests:
                self._session.submit(request)
        if self._session is None:
            return
        for request, (job, _) in list(self._running.items()):
            if job.future.cancelled():
                self._session.cancel(request)
                del self._running[request]
        for news in self._session.advance():
            self._pass_on(news)

    def _next(self) -> _Job | None:
        """The oldest job, if it may join: a session has one sampling, and others wait their turn.

        No later one overtakes it, so that no sampling waits for ever.
        """
        with self._changed:
            if not self._jobs or (self._running and self._jobs[0].rule != self._rule):
                return None
            return self._jobs.popleft()

    def _open(self, job: _Job) -> Session:
        params, version = self._used
        # All that is random comes from the request's own seed.
        key = jax.random.key(0)
        sampling = job.asked.sampling
        return self._engine.open(params, key, rows=_ROWS, sampling=sampling, version=version)

    def _pass_on(self, news: Progress) -> None:
        job, first = self._running[news.request]
        choice = first + news.member
        if job.tell is not None:
            job.tell(choice, news)
        if news.completion is None:
            return
        job.done[choice] = news.completion
        if len(job.done) == len(job.requests) * job.asked.n:
            for request in job.requests:
                del self._running[request]
            if job.future.set_running_or_notify_cancel():
                job.future.set_result([job.done[i] for i in sorted(job.done)])


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
    one_at_a_time = asyncio.Lock()  # of new weights, so that the last to be named are the last

    def allowed(request: HTTPRequest) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token is not None and not hmac.compare_digest(given.encode(), token.encode()):
            raise Refused(401, "the access token is missing or wrong; send Authorization: Bearer …")

    async def body_of(request: HTTPRequest) -> Any:
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > limits.max_body_mb << 20:
                raise Refused(413, f"the request is larger than {limits.max_body_mb} MiB")
        try:
            return json.loads(bytes(data))
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not JSON: {error}") from error

    async def completions(request: HTTPRequest) -> Response:
        allowed(request)
        asked = dialect.read_request(
            await body_of(request), model, codec, context_length, vocabulary
        )
        if asked.stream:
            return StreamingResponse(_stream(batcher, asked, model, codec), media_type=_EVENTS)
        future = batcher.submit(asked)
        waiting = asyncio.wrap_future(future)
        while not waiting.done():
            await asyncio.wait([waiting], timeout=1.0)
            if await request.is_disconnected():
                waiting.cancel()
                raise Refused(499, "the client has gone")
        try:
            done = waiting.result()
        except asyncio.CancelledError:
            raise Refused(503, "the server is stopping") from None
        return JSONResponse(dialect.answer(asked, done, model, codec))

    async def models(request: HTTPRequest) -> JSONResponse:
        allowed(request)
        entry = {"id": model, "object": "model", "created": 0, "owned_by": "grpo_jax"}
        return JSONResponse({"object": "list", "data": [entry | {"max_model_len": context_length}]})

    async def health(request: HTTPRequest) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def load_weights(request: HTTPRequest) -> JSONResponse:
        allowed(request)
        body = await body_of(request)
        if load is None:
            raise Refused(403, "this server keeps its weights; start it with --weights FOLDER")
        if not isinstance(body, dict) or not isinstance(body.get("path"), str):
            raise Refused(400, "send {'path': folder of the weights, 'version': whole number}")
        version = dialect.whole(body, "version", 0, low=0)
        async with one_at_a_time:
            try:
                params = await asyncio.to_thread(load, body["path"])
            except (ValueError, OSError) as error:
                raise Refused(400, f"the weights were not loaded: {error}") from error
            batcher.load(params, version)
        return JSONResponse({"weights_version": version})

    def refused(request: HTTPRequest, error: Exception) -> JSONResponse:
        body = _error(error)
        status = body["error"]["code"]
        headers = {"Retry-After": "1"} if status in (429, 503) else None
        return JSONResponse(body, status_code=status, headers=headers)

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/load_weights", load_weights, methods=["POST"]),
            Route("/health", health),
        ],
        exception_handlers={Refused: refused, Exception: refused},
    )


def _error(error: BaseException) -> dict[str, Any]:
    status = error.status if isinstance(error, Refused) else 500
    kind = "invalid_request_error" if status < 500 else "server_error"
    text = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
    return {"error": {"message": text, "type": kind, "code": status, "param": None}}


def _stream(batcher: Batcher, asked: Asked, model: str, codec: Codec) -> AsyncIterator[str]:
    """Server-sent events: a piece for every burst of a choice, the counts if asked for, the end.

    Raises:
      Refused: at once, before anything is sent.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue()

    def put(item: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody listens
            loop.call_soon_threadsafe(queue.put_nowait, item)

    future = batcher.submit(asked, lambda choice, news: put((choice, news)))
    future.add_done_callback(lambda _: put(None))
    tellers = [dialect.Teller(asked, i, codec) for i in range(len(asked.prompts) * asked.n)]
    frame = dialect.frame(model, [])

    async def events() -> AsyncIterator[str]:
        written = 0
        try:
            while (item := await queue.get()) is not None:
                choice, news = item
                written += len(news.tokens)
                yield _event(frame | {"choices": [tellers[choice].piece(news)]})
            if future.cancelled():
                yield _event(_error(Refused(503, "the server is stopping")))
            elif (error := future.exception()) is not None:
                yield _event(_error(error))
            elif asked.usage:
                yield _event(frame | {"usage": dialect.usage(asked, written)})
            yield "data: [DONE]\n\n"
        finally:
            future.cancel()  # the client has gone, if it was not done

    return events()


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
