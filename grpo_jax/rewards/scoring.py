"""Score completions in worker processes that may raise, hang or die without stopping the run.

Workers are separate programs that never import JAX, each given one completion at a time with a time
limit: a slow reward is interrupted, and a worker that does not come back is killed and replaced.
The limit is in CPU time, so that a busy machine does not change rewards; waiting has a limit of its
own, by the clock.
Components that cannot hang (exact match, length) run in this process.

Symbols: `N` completions.
"""

import collections
import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import Pipe
from multiprocessing import connection as connections
from typing import Any

import numpy as np

from grpo_jax.data.prompts import MASK_SAMPLE, Example
from grpo_jax.rewards import worker
from grpo_jax.rewards.verdicts import TextSpan, Verdict

_LOG = logging.getLogger(__name__)
_INLINE = {"exact_match", "length"}  # linear in the text, when nothing is extracted
_START_LIMIT = 300.0  # seconds for a worker to import its rewards


@dataclasses.dataclass(frozen=True)
class RewardComponent:
    """One term of the reward."""

    kind: str = "verifier"  # verifier, exact_match, format, length, math, or module:function
    name: str = ""  # column in the log; empty = the kind
    weight: float = 1.0  # the total is the weighted sum
    params: dict[str, Any] = dataclasses.field(default_factory=dict)  # keyword arguments

    def __post_init__(self):
        worker.check_kind(self.kind)
        if not np.isfinite(self.weight):
            raise ValueError(
                f"reward component {self.column!r} has weight={self.weight}; use a finite number"
            )

    @property
    def column(self) -> str:
        """Name under which the component is logged."""
        return self.name or self.kind.rpartition(":")[2]


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """What a completion is worth, and how patiently that is found out."""

    components: tuple[RewardComponent, ...] = (RewardComponent(),)  # the terms of the sum
    workers: int = 2  # processes; 0 = score in this process, without time limits
    time_limit: float = 5.0  # seconds of CPU time a completion and component
    clock_limit: float = 20.0  # seconds by the clock, for rewards that wait for something
    memory_limit_mb: int = 8192  # address space of a worker; 0 = no limit

    def __post_init__(self):
        if not self.components:
            raise ValueError("reward.components is empty; name at least one, e.g. kind: verifier")
        columns = [component.column for component in self.components]
        twice = sorted({c for c in columns if columns.count(c) > 1})
        if twice:
            raise ValueError(f"two reward components are called {twice}; give each its own name")
        if self.workers < 0 or self.memory_limit_mb < 0:
            raise ValueError(
                f"reward.workers = {self.workers}, reward.memory_limit_mb = "
                f"{self.memory_limit_mb}: use 0 or more"
            )
        if not 0 < self.time_limit <= self.clock_limit:
            raise ValueError(
                f"reward.time_limit = {self.time_limit} and reward.clock_limit = "
                f"{self.clock_limit}: use 0 < time_limit ≤ clock_limit"
            )


@dataclasses.dataclass(frozen=True)
class Sample:
    """What a reward function is given: the model's text alone, and the task."""

    completion: str
    example: Example
    tokens: int | None = None  # length of the completion in tokens
    truncated: bool = False  # the token limit ended it


@dataclasses.dataclass(frozen=True)
class Scores:
    """Rewards of N completions; what is optimised is what is logged."""

    total: np.ndarray  # f64[N] weighted sum of the components that gave a verdict
    components: dict[str, np.ndarray]  # f64[N] each, unweighted; NaN where a component gave none
    valid: np.ndarray  # bool[N] False where no component gave a verdict: leave the sample out
    problems: dict[str, int]  # "component/raised", "/timed_out", "/died", … -> how many
    masked: np.ndarray  # bool[N] True where the data or a reward asks not to train the completion
    spans: list[tuple[TextSpan, ...]]  # N, flagged stretches of text; later ones win

    def metrics(self) -> dict[str, float]:
        """Return the means over the samples that have a verdict, and the counts of problems."""
        out = {"reward": _mean(self.total[self.valid])}
        out |= {f"reward/{k}": _mean(v[~np.isnan(v)]) for k, v in self.components.items()}
        out["reward/no_verdict"] = float((~self.valid).sum())
        return out | {f"reward/{k}": float(v) for k, v in self.problems.items()}

    def take(self, rows: np.ndarray) -> "Scores":
        """Select completions; the problems stay those of the whole."""
        return dataclasses.replace(
            self,
            total=self.total[rows],
            components={name: column[rows] for name, column in self.components.items()},
            valid=self.valid[rows],
            masked=self.masked[rows],
            spans=[self.spans[i] for i in rows],
        )

    @staticmethod
    def join(parts: Sequence["Scores"]) -> "Scores":
        """Put the completions of several calls below each other."""
        problems: collections.Counter[str] = collections.Counter()
        for part in parts:
            problems.update(part.problems)
        return Scores(
            total=np.concatenate([part.total for part in parts]),
            components={
                name: np.concatenate([part.components[name] for part in parts])
                for name in parts[0].components
            },
            valid=np.concatenate([part.valid for part in parts]),
            problems=dict(problems),
            masked=np.concatenate([part.masked for part in parts]),
            spans=[spans for part in parts for spans in part.spans],
        )


class Scorer:
    """Keep worker processes and score batches with them; use as a context manager or `close()`.

    Constructing it returns at once: workers import their rewards while the caller compiles.

    Args:
      config: the components and their limits.
      watch: given what is about to happen, a context around each reward that runs inside this
        process, where nothing else interrupts one that hangs.
    """

    def __init__(
        self,
        config: RewardConfig,
        watch: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ):
        self._config, self._watch = config, watch
        self._warned: set[tuple[int, str]] = set()
        outside = [i for i, c in enumerate(config.components) if self._leaves(c)]
        self._local = {
            i: worker.bind(c.kind, c.params)
            for i, c in enumerate(config.components)
            if i not in outside
        }
        self._workers = [_Worker(config) for _ in range(config.workers)] if outside else []

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes."""
        for process in self._workers:
            process.kill()
        self._workers = []

    def wait_ready(self) -> None:
        """Block until every worker has imported its rewards.

        Raises:
            ValueError: a component cannot be imported, with the worker's traceback.
        """
        for process in self._workers:
            process.wait_ready()

    def score(
        self,
        examples: Sequence[Example],
        completions: Sequence[str],
        *,
        tokens: Sequence[int] | np.ndarray | None = None,
        truncated: Sequence[bool] | np.ndarray | None = None,
    ) -> Scores:
        """Score N completions, in order: row i of every result belongs to completion i."""
        if len(examples) != len(completions):
            raise ValueError(
                f"{len(examples)} examples for {len(completions)} completions; repeat each example "
                "once for each of its completions"
            )
        samples = [
            Sample(
                completion,
                example,
                None if tokens is None else int(tokens[i]),
                truncated is not None and bool(truncated[i]),
            )
            for i, (example, completion) in enumerate(zip(examples, completions, strict=True))
        ]
        values = np.full((len(self._config.components), len(samples)), np.nan)
        problems: collections.Counter[str] = collections.Counter()
        masked = np.array([bool(e.metadata.get(MASK_SAMPLE)) for e in examples], bool)
        spans: dict[tuple[int, int], tuple[TextSpan, ...]] = {}
        for component, row, status, result in self._evaluate(samples):
            values[component, row] = self._settle(component, status, result, samples[row], problems)
            if isinstance(result, Verdict):
                masked[row] |= result.masked
                if result.spans:
                    column = self._config.components[component].column
                    spans[row, component] = tuple(
                        span._replace(name=span.name or column) for span in result.spans
                    )
        by_row: list[tuple[TextSpan, ...]] = [()] * len(samples)
        for row, component in sorted(spans):  # in the order of the components
            by_row[row] += spans[row, component]
        return self._combine(values, problems, masked, by_row)

    def _leaves(self, component: RewardComponent) -> bool:
        inline = component.kind in _INLINE and "extract" not in component.params
        return self._config.workers > 0 and not inline

    def _evaluate(self, samples: list[Sample]) -> Iterable[tuple[int, int, str, Any]]:
        """Yield (component, row, status, result) once for each component and sample."""
        outside = [i for i in range(len(self._config.components)) if i not in self._local]
        jobs = collections.deque((i, row) for row in range(len(samples)) for i in outside)
        if jobs:
            for process in self._workers:
                if process.job:  # left behind by a call that was interrupted
                    process.replace()
            self.wait_ready()
            for process in self._workers:
                process.take(jobs, samples)
        for i, function in self._local.items():
            for row, sample in enumerate(samples):
                with self._watch(f"reward {self._config.components[i].column!r}"):
                    answer = worker.evaluate(function, sample, None)
                yield i, row, *answer
        while any(process.job for process in self._workers):
            for process in self._finished():
                assert process.job is not None
                component, row = process.job
                status, value = process.result()
                process.take(jobs, samples)
                yield component, row, status, value

    def _finished(self) -> list["_Worker"]:
        """Wait until at least one busy worker has answered, died, or run out of time."""
        busy = [process for process in self._workers if process.job]
        wait = max(0.0, min(process.deadline for process in busy) - time.monotonic())
        ready = connections.wait([process.connection for process in busy], wait)
        now = time.monotonic()
        return [p for p in busy if p.connection in ready or p.deadline <= now]

    def _settle(
        self,
        component: int,
        status: str,
        result: Any,
        sample: Sample,
        problems: collections.Counter[str],
    ) -> float:
        """Return a component's value: its own, NaN for no verdict, 0 for anything that failed."""
        if status == worker.SCORED:
            return result.value
        if status == worker.SKIPPED and result.masked:  # asked for, not a problem
            return np.nan
        column = self._config.components[component].column
        problems[f"{column}/{status}"] += 1
        if (component, status) not in self._warned:
            self._warned.add((component, status))
            outcome = "gives no verdict" if status == worker.SKIPPED else "scores 0"
            _LOG.warning(
                "reward %r: %s, so the completion %s; the first is of row %d of the data, whose "
                "reference answer is %.200r (said once; the count is in the metrics)%s",
                column,
                status.replace("_", " "),
                outcome,
                sample.example.index,
                sample.example.answer,
                "" if result is None or isinstance(result, Verdict) else f"\n{result}",
            )
        return np.nan if status == worker.SKIPPED else 0.0

    def _combine(
        self,
        values: np.ndarray,
        problems: collections.Counter[str],
        masked: np.ndarray,
        spans: list[tuple[TextSpan, ...]],
    ) -> Scores:
        """total[n] = Σ over components c with a verdict of weight[c] · value[c, n]."""
        components = self._config.components
        verdict = ~np.isnan(values)
        weights = np.array([c.weight for c in components])
        total = (weights[:, None] * np.where(verdict, values, 0.0)).sum(axis=0)
        columns = {c.column: values[i] for i, c in enumerate(components)}
        valid = np.asarray(verdict.any(axis=0))
        return Scores(total, columns, valid, dict(problems), masked, spans)


class _Worker:
    """One process, at most one job at a time; replaced by a fresh one when it is lost."""

    def __init__(self, config: RewardConfig):
        self._config = config
        self.job: tuple[int, int] | None = None
        self.deadline = 0.0
        self._start()

    def _start(self) -> None:
        self.connection, theirs = Pipe(duplex=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", worker.__name__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # Its own session: Ctrl-C is for the run, which then closes its workers in order.
            start_new_session=True,
            # One core each, and whatever a reward imports stays off the accelerator.
            env=os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        config = self._config
        kinds = [(c.kind, c.params) for c in config.components]
        path = [entry or os.getcwd() for entry in sys.path]
        self.connection.send((path, kinds, config.time_limit, config.memory_limit_mb))
        self._ready = False

    def wait_ready(self) -> None:
        """Block until the process has imported its rewards."""
        if self._ready:
            return
        try:
            if not self.connection.poll(_START_LIMIT):
                raise EOFError
            status, problem = self.connection.recv()
        except (EOFError, ConnectionError) as error:
            self.kill()
            raise RuntimeError(
                "a reward worker ended before it was ready; its own message is above, and "
                "reward.workers=0 runs the rewards in this process to find out more"
            ) from error
        if status == "error":
            self.kill()
            raise ValueError(f"reward components cannot be set up:\n{problem}")
        self._ready = True

    def take(self, jobs: collections.deque[tuple[int, int]], samples: list[Sample]) -> None:
        """Start on the next job, if there is one."""
        if not jobs:
            self.job = None
            return
        self.wait_ready()
        self.job = jobs.popleft()
        component, row = self.job
        self.deadline = time.monotonic() + self._config.clock_limit
        try:
            self.connection.send((component, samples[row]))
        except (ConnectionError, OSError):
            pass  # it died while idle: reading the result says so

    def result(self) -> tuple[str, Any]:
        """Return the answer to the job; a process that did not answer is replaced."""
        try:
            if self.connection.poll(0):
                return self.connection.recv()
            status = worker.TIMED_OUT
        except (EOFError, ConnectionError):
            slow = self._process.wait() == -signal.SIGXCPU  # it was out of CPU time
            status = worker.TIMED_OUT if slow else "died"
        self.replace()
        return status, None

    def replace(self) -> None:
        """End the process, drop its job, and start another."""
        self.kill()
        self.job = None
        self._start()

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()
        self.connection.close()


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else float("nan")
