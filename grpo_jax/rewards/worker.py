"""The process in which rewards run: no JAX, one sample at a time, and it may be killed.

Started as `python -m grpo_jax.rewards.worker FD`; speaks pickles over the socket FD. The first
message carries the import path and the components; it answers `("ready", None)` or
`("error", traceback)`. Then every `(component, sample)` is answered by `(status, result)`, where
the result is a `verdicts.Verdict`, or says what went wrong.
"""

import contextlib
import importlib
import importlib.util
import inspect
import math
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from grpo_jax.rewards import verdicts

SCORED, SKIPPED, NON_FINITE = "scored", "skipped", "non_finite"
RAISED, TIMED_OUT = "raised", "timed_out"
KINDS = {  # kind -> where its function lives; anything else is a user's `module:function`
    "verifier": "grpo_jax.rewards.text:verifier",
    "exact_match": "grpo_jax.rewards.text:exact_match",
    "format": "grpo_jax.rewards.text:format_match",
    "length": "grpo_jax.rewards.text:length",
    "math": "grpo_jax.rewards.math:math_reward",
}

_WARM_UP = {  # run before "ready", so that no sample pays for an import out of its time limit
    "verifier": "grpo_jax.rewards.text:warm_up",
    "math": "grpo_jax.rewards.math:warm_up",
}


class RewardTimeout(BaseException):
    """Raised inside a reward that is too slow; not an `Exception`, so that it is rarely caught."""


def check_kind(kind: str) -> None:
    """Refuse a kind that is neither ours nor of the form `module:function`."""
    if kind not in KINDS and not all(kind.rpartition(":")):
        raise ValueError(
            f"reward kind {kind!r} is unknown; use one of {', '.join(KINDS)}, or your own "
            "module:function"
        )


def resolve(kind: str) -> Callable[..., Any]:
    """Return the function behind a kind, a `module:function` or a `file.py:function`.

    Raises:
        ValueError: no such kind, module or function.
    """
    check_kind(kind)
    module_name, _, function = KINDS.get(kind, kind).rpartition(":")
    if kind not in KINDS and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        if module_name.endswith(".py"):
            module = _load_file(module_name)
        else:
            module = importlib.import_module(module_name)
        return getattr(module, function)
    except (ImportError, AttributeError, OSError) as error:
        raise ValueError(
            f"reward {kind!r} cannot be imported: {error}; the module must be importable from the "
            "folder in which the run starts"
        ) from error


def bind(kind: str, params: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return `sample -> value`; a class takes the params once, a function each time.

    Raises:
        ValueError: the function does not take these params.
    """
    target = resolve(kind)
    if isinstance(target, type):
        return target(**params)
    try:
        inspect.signature(target).bind(None, **params)
    except TypeError as error:
        raise ValueError(
            f"reward {kind!r} cannot be called with params {dict(params)}: {error}; it is "
            f"{target.__name__}{inspect.signature(target)}"
        ) from error
    return lambda sample: target(sample, **params)


def evaluate(
    function: Callable[[Any], Any], sample: Any, time_limit: float | None
) -> tuple[str, Any]:
    """Run one reward; return its status with a verdict, a number that is not finite, or the text
    of a traceback.
    """
    try:
        with _alarm(time_limit):
            verdict = verdicts.read(function(sample), len(sample.completion))
    except RewardTimeout:
        return TIMED_OUT, None
    except Exception:
        return RAISED, traceback.format_exc(limit=-8)
    if verdict.value is None:
        return SKIPPED, verdict
    return (SCORED, verdict) if math.isfinite(verdict.value) else (NON_FINITE, verdict.value)


def main(descriptor: int) -> None:
    """Serve until the other end closes."""
    connection = Connection(descriptor)
    os.dup2(2, 1)  # what a reward prints must not disturb the run's own display
    sys.path[:], components, time_limit, memory_limit_mb = connection.recv()
    if memory_limit_mb:
        limit = memory_limit_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        functions = [bind(kind, params) for kind, params in components]
        for kind in {kind for kind, _ in components} & set(_WARM_UP):
            module, _, function = _WARM_UP[kind].partition(":")
            getattr(importlib.import_module(module), function)()
    except Exception:
        connection.send(("error", traceback.format_exc()))
        return
    connection.send(("ready", None))
    while True:
        try:
            component, sample = connection.recv()
        except (EOFError, ConnectionError):
            return
        connection.send(evaluate(functions[component], sample, time_limit))


@contextlib.contextmanager
def _alarm(seconds: float | None) -> Iterator[None]:
    """Interrupt Python code after `seconds` of CPU time, so that a busy machine changes no verdict.

    Code that does not return to Python is ended by the kernel about a second later.
    """

    def interrupt(signum: int, frame: Any) -> None:
        raise RewardTimeout

    if seconds is None:
        yield
        return
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    last = math.ceil(time.process_time() + seconds + 1)  # the limit is in whole seconds
    resource.setrlimit(resource.RLIMIT_CPU, (last, hard))
    previous = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def _load_file(path: str) -> Any:
    name = "grpo_jax_user_" + Path(path).stem
    if name in sys.modules and sys.modules[name].__file__ == str(Path(path).resolve()):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, Path(path).resolve())
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(int(sys.argv[1]))
