"""Where completions come from: the protocol of a rollout engine, and the native one.

An engine takes ragged prompts on the host and returns rectangular rows on the host. The native
engine rounds prompt lengths up to buckets and fills calls up to a fixed number of rows, so a run
compiles a handful of programs; it counts them.

Symbols: `P` prompts, `G` completions a prompt, `N = P·G` rows, `W` width of the rows.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.core.policy import Decoder, Params
from grpo_jax.sampling import generate as generating
from grpo_jax.sampling.generate import Generation, SamplingConfig
from grpo_jax.scale import multihost


class RolloutEngine(Protocol):
    """Anything that completes prompts with the current weights."""

    programs: int
    """How many programs were compiled here so far."""

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
      rows: rows decoded at one time; None decodes all prompts of a call together.
      remote: a serving stack that samples instead.

    Raises:
      ValueError: a number is not positive.
    """

    prompt_bucket: int = 64
    rows: int | None = None
    remote: RemoteConfig = RemoteConfig()

    def __post_init__(self):
        if self.prompt_bucket < 1:
            raise ValueError(f"prompt_bucket={self.prompt_bucket} must be at least 1 token")
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"rows={self.rows} must be at least 1, or None for no limit")


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
    ):
        """Hold a decoder and how to use it.

        Args:
          decoder: the model.
          sampling: used where a call brings no configuration of its own.
          stop_ids: tokens that end a completion.
          pad_id: fills rows; it may equal a stop token.
          context_length: positions the model was made for; None does not check.
          config: static shapes.
        """
        self.sampling = sampling
        self.config = config or EngineConfig()
        self.context_length = context_length
        self.pad_id = pad_id
        self.programs = 0
        """How many programs were compiled so far."""
        self._stop_ids = tuple(int(i) for i in dict.fromkeys(stop_ids))

        def counted(params, prompts, lengths, request_ids, key, config, group_size):
            self.programs += 1  # runs once a trace, never in the compiled program
            return generating.generate(
                decoder,
                params,
                prompts,
                lengths,
                request_ids,
                key,
                config=config,
                group_size=group_size,
                stop_ids=self._stop_ids,
                pad_id=pad_id,
            )

        self._generate = jax.jit(counted, static_argnames=("config", "group_size"))

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
        per_call = len(prompts)
        if self.config.rows is not None:
            per_call = max(1, self.config.rows // group_size)
        # Neighbours in length share a call, so that short prompts do not pay for long ones.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        parts, places = [], []
        for start in range(0, len(order), per_call):
            chosen = order[start : start + per_call]
            table, lengths, requests = self._lay_out(
                [prompts[i] for i in chosen], ids[chosen], per_call
            )
            part = self._generate(params, table, lengths, requests, key, sampling, group_size)
            used = len(chosen) * group_size
            parts.append(jax.tree.map(lambda x, n=used: multihost.fetch(x)[:n], part))
            places += [i * group_size + g for i in chosen for g in range(group_size)]
        return _gather(parts, np.asarray(places), self.pad_id)

    def _lay_out(
        self, prompts: list[np.ndarray], ids: np.ndarray, count: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Right-pad prompts to a bucket and fill up to `count` rows of length 0."""
        bucket = self.config.prompt_bucket
        width = -(-max(len(p) for p in prompts) // bucket) * bucket
        table = np.full((count, width), self.pad_id, np.int32)
        lengths, requests = np.zeros((2, count), np.int32)
        for i, prompt in enumerate(prompts):
            table[i, : len(prompt)] = prompt
            lengths[i] = len(prompt)
        requests[: len(ids)] = ids
        return jnp.asarray(table), jnp.asarray(lengths), jnp.asarray(requests)


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
    longest = max(len(p) for p in prompts)
    if context_length is not None and longest + sampling.max_new_tokens > context_length:
        raise ValueError(
            f"a prompt of {longest} tokens with max_new_tokens={sampling.max_new_tokens} "
            f"exceeds the model's context of {context_length}; shorten the prompt or "
            "lower max_new_tokens"
        )


def _gather(parts: list[Generation], places: np.ndarray, pad_id: int) -> Generation:
    """Join the calls of one request list, in the order of the list."""
    width = max(part.tokens.shape[1] for part in parts)

    def join(arrays: Sequence[np.ndarray], fill: int = 0) -> np.ndarray:
        if arrays[0].ndim == 2:
            missing = [((0, 0), (0, width - a.shape[1])) for a in arrays]
            arrays = [
                np.pad(a, m, constant_values=fill) for a, m in zip(arrays, missing, strict=True)
            ]
        joined = np.concatenate(arrays)
        ordered = np.empty_like(joined)
        ordered[places] = joined
        return ordered

    joined = jax.tree.map(lambda *columns: join([np.asarray(c) for c in columns]), *parts)
    return joined._replace(tokens=join([np.asarray(part.tokens) for part in parts], pad_id))
