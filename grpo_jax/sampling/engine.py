"""Where completions come from: the protocol of a rollout engine, and the native one.

An engine takes ragged prompts on the host and returns rectangular rows on the host. The native
engine decodes in slots that are refilled as completions end (`session.py`), with a handful of
compiled programs; it counts them.

Symbols: `P` prompts, `G` completions a prompt, `N = P·G` rows, `W` width of the rows.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, get_args

import jax
import numpy as np
from jax.sharding import Mesh

from grpo_jax.core.policy import CacheDtype, Decoder, Params
from grpo_jax.sampling.generate import Generation, SamplingConfig
from grpo_jax.sampling.session import Completion, Request, Session, check_context
from grpo_jax.sampling.shapes import Shapes
from grpo_jax.sampling.slots import Programs
from grpo_jax.scale import mesh as meshes


class Drawn(Protocol):
    """A completion, as far as rows are concerned."""

    @property
    def tokens(self) -> Sequence[int] | np.ndarray: ...

    @property
    def logprobs(self) -> Sequence[float] | np.ndarray: ...

    @property
    def reason(self) -> int: ...


class RolloutEngine(Protocol):
    """Anything that completes prompts with the current weights."""

    @property
    def programs(self) -> int:
        """How many programs were compiled here so far."""
        ...

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
        """Yield the completions of requests as they end; closing the iterator ends the rest.

        Args:
          params: the weights to sample from.
          requests: what to complete.
          key: root of the draws.
          sampling: replaces the engine's own configuration.
          version: of the weights; every token carries it.
          token_budget: once so many tokens were drawn, the rest comes out as it is, with the
            reason "budget", some of it empty; `Request.begun` continues it. None: no end.
        """
        ...

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
        """Draw `group_size` completions of every prompt.

        Args:
          params: the weights to sample from.
          prompts: P arrays i32[length].
          group_size: completions a prompt.
          key: root of the draws.
          request_ids: one number a prompt; with the key it determines the prompt's completions,
            whatever else runs beside it. Places in the list when left out.
          sampling: replaces the engine's own configuration for this call.

        Returns:
          Host arrays; row `i * group_size + g` is completion `g` of prompt `i`.
        """
        ...


@dataclasses.dataclass(frozen=True)
class RemoteConfig:
    """A server that samples in place of the native engine; see docs/serving.md.

    Raises:
      ValueError: a number is out of range, or the url is not one.
    """

    url: str | None = None  # root of its API, as in http://127.0.0.1:8000/v1; null = native engine
    model: str | None = None  # its name for the model; null = the only one it serves
    token_variable: str = "GRPO_JAX_SERVE_TOKEN"  # environment variable that holds the access token
    # prompts sent together; a server gives all of them one seed, so more than 1 ties their draws
    prompts_per_request: int = 1
    concurrency: int = 32  # requests on their way at one time
    timeout: float = 600.0  # seconds for one attempt
    retries: int = 5  # further attempts after a failure that may pass
    backoff: float = 1.0  # seconds before the second attempt; doubles each time, with jitter
    # the server reports log-probabilities after temperature and filters (vLLM: started with
    # --logprobs-mode processed_logprobs); a server that says so itself does not need this
    processed: bool = False
    # folder that the server can read: new weights are written there and POST {url}/load_weights
    # names it; null = the server keeps its weights, and training is refused
    weights: str | None = None

    def __post_init__(self):
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url={self.url!r} must start with http:// or https://")
        for name in ("prompts_per_request", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.retries < 0 or self.backoff < 0 or self.timeout <= 0:
            raise ValueError(
                f"retries={self.retries} and backoff={self.backoff} must not be negative, and "
                f"timeout={self.timeout} must be positive"
            )


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Static shapes of the native engine, or the server in its place.

    Attributes:
      prompt_bucket: prompt widths are rounded up to a multiple of this (tokens).
      rows: slots, completions decoded at one time; None decodes all of a call together.
      prefill: prompts read together, at most.
      burst: tokens a completion gets between two looks at which have ended, at most.
      cache_dtype: what keys and values are held in: "model" (the compute dtype), "bfloat16", or
        "int8" with a scale a position and head. Tokens are drawn, and their log-probabilities
        recorded, under what was read back: the trainer's differ by what docs/numerics.md says.
      remote: a serving stack that samples instead.

    Raises:
      ValueError: a number is not positive.
    """

    prompt_bucket: int = 64
    rows: int | None = None
    prefill: int = 8
    burst: int = 32
    cache_dtype: CacheDtype = "model"
    remote: RemoteConfig = RemoteConfig()

    def __post_init__(self):
        if self.prompt_bucket < 1:
            raise ValueError(f"prompt_bucket={self.prompt_bucket} must be at least 1 token")
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"rows={self.rows} must be at least 1, or None for no limit")
        if self.cache_dtype not in get_args(CacheDtype):
            raise ValueError(
                f"cache_dtype={self.cache_dtype!r} must be one of {', '.join(get_args(CacheDtype))}"
            )
        for name in ("prefill", "burst"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


class NativeEngine:
    """Samples with a `Decoder` on the devices that hold the weights."""

    def __init__(
        self,
        decoder: Decoder,
        sampling: SamplingConfig,
        *,
        stop_ids: Sequence[int],
        pad_id: int = 0,
        context_length: int | None = None,
        config: EngineConfig | None = None,
        mesh: Mesh | None = None,
        place: Callable[[Params], Any] | None = None,
        decode: Callable[[list[int]], str] | None = None,
    ):
        """Hold a decoder and how to use it.

        Args:
          decoder: the model.
          sampling: used where a call brings no configuration of its own.
          stop_ids: tokens that end a completion.
          pad_id: fills rows; it may equal a stop token.
          context_length: positions the model was made for; None does not check.
          config: static shapes.
          mesh: the devices; slots are split over its row axes, heads of the cache over `tensor`.
          place: prepared weights -> their shardings; None leaves them where the decoder's `prepare`
            put them. Weights of another mesh are brought over so.
          decode: tokens -> text, for stop strings.
        """
        self.sampling = sampling
        self.config = config or EngineConfig()
        self.context_length = context_length
        self.pad_id = pad_id
        self._stop_ids = tuple(int(i) for i in dict.fromkeys(stop_ids))
        self._programs = Programs(decoder, mesh, place)
        self._multiple = 1 if mesh is None else meshes.row_shards(mesh)
        self._decode = decode

    @property
    def programs(self) -> int:
        """How many programs were compiled so far."""
        return self._programs.compiled

    def prepare(self, params: Params) -> Params:
        """Bring weights into the layout that a session reads; once a version."""
        return self._programs.prepare(params)

    def open(
        self,
        params: Params,
        key: jax.Array,
        *,
        rows: int,
        sampling: SamplingConfig | None = None,
        version: int = 0,
    ) -> Session:
        """Open a session: slots that requests come to and leave one by one.

        Args:
          params: the weights; `Session.update` takes others later, prepared by `prepare`.
          key: root of the draws.
          rows: slots, where the configuration sets none.
          sampling: replaces the engine's own configuration.
          version: of the weights.
        """
        config = self.config
        shapes = Shapes(
            rows=config.rows or rows,
            bucket=config.prompt_bucket,
            prefill=config.prefill,
            burst=config.burst,
            multiple=self._multiple,
            context=self.context_length,
        )
        return Session(
            self._programs,
            self.prepare(params),
            key,
            sampling or self.sampling,
            shapes,
            stop_ids=self._stop_ids,
            version=version,
            decode=self._decode,
        )

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
        """Yield the completions of requests as they end; see `RolloutEngine.complete`.

        Raises:
          ValueError: a request cannot be served, or the budget is below 1.
        """
        sampling = sampling or self.sampling
        check_budget(token_budget)
        rows = sum(len(r.members) for r in requests)
        session = self.open(params, key, rows=max(rows, 1), sampling=sampling, version=version)
        for request in requests:
            session.submit(request)
        return _run(session, token_budget)

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

        Raises:
          ValueError: no prompts, an empty prompt, a prompt that does not fit the context with its
            completion, request ids that do not match, or a group size below 1.
        """
        sampling = sampling or self.sampling
        prompts = [np.asarray(p, np.int32) for p in prompts]
        ids = np.arange(len(prompts)) if request_ids is None else np.asarray(request_ids)
        check_request(prompts, ids, group_size, sampling, self.context_length)
        # Neighbours in length are read together, so that short prompts do not pay for long ones.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        members = tuple(range(group_size))
        requests = {Request(prompts[i], int(ids[i]), members): i for i in order}
        rows: dict[tuple[int, int], Completion] = {}
        for done in self.complete(params, list(requests), key, sampling=sampling):
            rows[requests[done.request], done.member] = done
        return lay_out(prompts, [row for _, row in sorted(rows.items())], self.pad_id)


def _run(session: Session, token_budget: int | None) -> Iterator[Completion]:
    left = token_budget
    while session.waiting or session.running:
        news = session.advance()
        yield from (new.completion for new in news if new.completion is not None)
        if left is not None:
            left -= sum(len(new.tokens) for new in news)
            if left <= 0:
                yield from session.stop()


def check_budget(token_budget: int | None) -> None:
    """Refuse a budget without tokens."""
    if token_budget is not None and token_budget < 1:
        raise ValueError(f"token_budget={token_budget} must be at least 1 token, or None")


def check_request(
    prompts: Sequence[np.ndarray],
    ids: np.ndarray,
    group_size: int,
    sampling: SamplingConfig,
    context_length: int | None,
) -> None:
    """Refuse requests that no engine can serve.

    Raises:
      ValueError: no prompts, an empty prompt, a prompt that does not fit the context with its
        completion, request ids that do not match, or a group size below 1.
    """
    if not prompts:
        raise ValueError("there are no prompts to complete; pass at least one")
    if group_size < 1:
        raise ValueError(f"group_size={group_size} must be at least 1 completion a prompt")
    if len(ids) != len(prompts):
        raise ValueError(f"{len(ids)} request ids for {len(prompts)} prompts; pass one for each")
    for i, prompt in enumerate(prompts):
        if prompt.ndim != 1 or len(prompt) == 0:
            raise ValueError(
                f"prompt {i} has shape {prompt.shape}; a prompt is a list of at least one token"
            )
    check_context(max(len(p) for p in prompts), sampling.max_new_tokens, context_length)


def lay_out(prompts: Sequence[np.ndarray], completions: Sequence[Drawn], pad_id: int) -> Generation:
    """Write prompts and completions, those of a prompt next to each other, into rows."""
    group_size = len(completions) // len(prompts)
    starts = np.repeat([len(prompt) for prompt in prompts], group_size).astype(np.int32)
    lengths = np.array([len(row.tokens) for row in completions], np.int32)
    shape = (len(completions), int((starts + lengths).max()))
    tokens, logprobs = np.full(shape, pad_id, np.int32), np.zeros(shape, np.float32)
    for i, row in enumerate(completions):
        end = starts[i] + lengths[i]
        tokens[i, : starts[i]] = prompts[i // group_size]
        tokens[i, starts[i] : end] = row.tokens
        logprobs[i, starts[i] : end] = row.logprobs
    reasons = np.array([row.reason for row in completions], np.int8)
    return Generation(tokens, starts, lengths, logprobs, reasons)
