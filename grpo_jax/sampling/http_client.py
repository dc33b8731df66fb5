"""One HTTP request to a server, again where the failure may pass."""

import os
import threading
from typing import Any

import httpx
import tenacity

from grpo_jax.sampling.engine import RemoteConfig

_LONGEST_PAUSE = 60.0  # seconds between two attempts
_PASSING = (408, 425, 429, 500, 502, 503, 504)  # statuses that may be gone at the next attempt


class EngineError(RuntimeError):
    """The server could not be reached, or answered with what must not be trained on."""


def make_client(config: RemoteConfig) -> httpx.Client:
    """An HTTP client with the server's address, the token and the time limit."""
    token = os.environ.get(config.token_variable)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.Client(
        base_url=str(config.url).rstrip("/"),
        headers=headers,
        timeout=httpx.Timeout(config.timeout, connect=min(config.timeout, 30.0)),
        limits=httpx.Limits(max_connections=config.concurrency),
    )


def post(
    client: httpx.Client,
    config: RemoteConfig,
    path: str,
    body: dict[str, Any] | None,
    over: threading.Event | None = None,
) -> dict[str, Any]:
    """Send one request (GET without a body), again where the failure may pass.

    Once `over` is set, nothing more is sent.

    Returns:
      The JSON object of the answer.

    Raises:
      EngineError: refused, not JSON, still failing after `config.retries` further attempts, or
        `over` was set.
    """
    over = over or threading.Event()

    def once() -> httpx.Response:
        if over.is_set():  # a pause that it cut short ends in one more attempt
            raise EngineError(f"{config.url}{path} was given up: another request failed")
        response = client.get(path) if body is None else client.post(path, json=body)
        if response.status_code in _PASSING:
            response.raise_for_status()
        return response

    attempts = tenacity.Retrying(
        sleep=tenacity.sleep_using_event(over),
        retry=tenacity.retry_if_exception_type((httpx.TransportError, httpx.HTTPStatusError)),
        stop=tenacity.stop_after_attempt(config.retries + 1) | tenacity.stop_when_event_set(over),
        wait=tenacity.wait_exponential(config.backoff, _LONGEST_PAUSE)
        + tenacity.wait_random(0, config.backoff),
        reraise=True,
    )
    try:
        response = attempts(once)
    except (httpx.TransportError, httpx.HTTPStatusError) as error:
        said = error.response.text[:200] if isinstance(error, httpx.HTTPStatusError) else error
        raise EngineError(
            f"{config.url}{path} failed {config.retries + 1} times, the last time with "
            f"{type(error).__name__}: {said}; see engine.remote.retries and engine.remote.timeout "
            f"({config.timeout:g} s)"
        ) from error
    if response.status_code != 200:
        raise EngineError(
            f"{config.url}{path} refused the request with status {response.status_code}: "
            f"{response.text[:500]}"
        )
    try:
        answer = response.json()
    except ValueError as error:
        raise EngineError(f"{config.url}{path} did not answer with JSON: {error}") from error
    if not isinstance(answer, dict):
        raise EngineError(
            f"{config.url}{path} answered with {type(answer).__name__}, not an object"
        )
    return answer
