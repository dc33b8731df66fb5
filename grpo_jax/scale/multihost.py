"""Several processes as one job: how they find each other, and how they talk on the host.

Every process runs the same program and holds the same host data. Devices talk through the mesh;
on the host there are three verbs: `everyone` exchanges one object a process, `from_main` asks
process 0, `fetch` brings an array of the mesh to every host. All three must be called by all
processes in the same order.

A process that dies is noticed by JAX's coordination service after `heartbeat_limit` seconds (or at
once, where the collective itself fails), and one that does not arrive at an exchange after
`wait_limit`; either way every process of the job ends with a message. A reward that hangs inside a
process is noticed there, after `hang_limit`: that process ends, and the others notice its death.
"""

import contextlib
import dataclasses
import itertools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NoReturn, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.scale import processes

T = TypeVar("T")
Cluster = Literal["auto", "none", "addresses", "slurm", "tpu", "kubernetes"]
ADDRESSES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_SHUTDOWN_LIMIT = 10  # seconds that a process which is done waits for the others at the very end


@dataclasses.dataclass(frozen=True)
class ProcessesConfig:
    """How the processes of a job find each other, and how long they wait for one another."""

    # where the processes are listed: addresses = JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    # JAX_PROCESS_ID; slurm, tpu, kubernetes = that platform's own variables; auto = the first of
    # these that the environment shows; none = this process is alone
    cluster: Cluster = "auto"
    start_limit: float = 300.0  # seconds until all processes must have arrived
    heartbeat_limit: float = 20.0  # seconds of silence after which a process counts as dead
    # seconds that one reward may take inside a process of a job (reward.workers = 0; workers have
    # reward.clock_limit); together with heartbeat_limit the time until a job that hangs has ended
    hang_limit: float = 35.0
    wait_limit: float = 600.0  # seconds to wait for another process, its rewards included

    def __post_init__(self):
        for name in ("start_limit", "heartbeat_limit", "hang_limit", "wait_limit"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1 second")


def detect(config: ProcessesConfig, environment: Mapping[str, str], on_tpu_vm: bool) -> Cluster:
    """Say which list of processes the environment shows; nothing is contacted.

    Raises:
      ValueError: the chosen list is not there, or is incomplete.
    """
    present = {
        "addresses": any(name in environment for name in ADDRESSES[1:]),
        # Only `srun` sets the step's variables; a batch script itself is one process.
        "slurm": int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1,
        "tpu": on_tpu_vm and "TPU_SKIP_MDS_QUERY" not in environment,
        "kubernetes": {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= set(environment),
    }
    chosen: Any = config.cluster
    if chosen == "auto":
        chosen = next((name for name, there in present.items() if there), "none")
    elif chosen != "none" and not present[chosen]:
        raise ValueError(
            f"processes.cluster = {chosen!r}, and the environment shows no such cluster; launch "
            "with it (see docs/pods.md), or set processes.cluster to auto or none"
        )
    missing = [name for name in ADDRESSES if name not in environment]
    if chosen == "addresses" and missing:
        raise ValueError(
            f"{' and '.join(missing)} not set beside the other addresses of the job; set all of "
            f"{', '.join(ADDRESSES)}"
        )
    return chosen


@contextlib.contextmanager
def job(config: ProcessesConfig) -> Iterator[None]:
    """Join the job that the environment describes, and leave it in order.

    Must come before anything asks JAX for devices. On the way out of an error the others are not
    waited for; `abandon` ends the process.

    Raises:
      RuntimeError: the job cannot be joined, or another process was lost.
    """
    from jax._src.cloud_tpu_init import running_in_cloud_tpu_vm

    cluster = detect(config, os.environ, bool(running_in_cloud_tpu_vm))
    if cluster != "none" and not jax.distributed.is_initialized():
        _join(cluster, config)
    _LIMIT[0], _HANG[0] = config.wait_limit, config.hang_limit
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if not jax.distributed.is_initialized() or not _LOST.search(str(error)):
            raise
        raise RuntimeError(
            f"a message to or from another process failed ({_first_line(error)}); most likely "
            "another process of the job has ended, and its own message says why"
        ) from error
    if jax.distributed.is_initialized():
        # Process 0 may write an export for hours; if it dies, the heartbeat tells.
        everyone(None, "the end of the run", limit=86_400.0)
        jax.distributed.shutdown()


def _join(cluster: Cluster, config: ProcessesConfig) -> None:
    """Connect to the coordinator, which process 0 runs."""
    arguments: dict[str, Any] = {}
    if cluster == "addresses":
        address, count, index = (os.environ[name] for name in ADDRESSES)
        arguments = {
            "coordinator_address": address,
            "num_processes": int(count),
            "process_id": int(index),
            "cluster_detection_method": "deactivate",
        }
    elif cluster != "tpu":  # on Cloud TPU, JAX itself tells virtual machines from Kubernetes
        arguments = {"cluster_detection_method": "k8s" if cluster == "kubernetes" else cluster}
    try:
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=int(config.start_limit),
            heartbeat_timeout_seconds=int(config.heartbeat_limit),
            shutdown_timeout_seconds=_SHUTDOWN_LIMIT,
        )
    except Exception as error:
        raise RuntimeError(
            f"this process could not join its job (processes.cluster: {cluster}) within "
            f"processes.start_limit = {config.start_limit:.0f} s: {_first_line(error)}. All "
            "processes must be launched, and reach process 0 by network"
        ) from error


def index() -> int:
    """This process's number, 0 for the one that writes what all share."""
    return jax.process_index()


def count() -> int:
    """How many processes the job has."""
    return jax.process_count()


def is_main() -> bool:
    """Say whether this is the process that logs and writes what all share."""
    return index() == 0


# What JAX says when the other end is gone; the type of the error differs from place to place.
_LOST = re.compile(r"Gloo|NCCL|heartbeat|Connection (reset|closed|refused)|CoordinationService")
_NUMBERS = itertools.count()
_LIMIT, _HANG = [ProcessesConfig.wait_limit], [ProcessesConfig.hang_limit]


def everyone(value: T, what: str, limit: float = 0.0) -> list[T]:
    """Exchange one object a process.

    Args:
      value: anything that can be pickled.
      what: names the exchange in errors.
      limit: seconds to wait, where that is longer than `wait_limit`.

    Returns:
      The objects of all processes, in their order.

    Raises:
      RuntimeError: a process did not come in time.
    """
    if count() == 1:
        return [value]
    _meet(what, max(limit, _LIMIT[0]))
    return processes.gather(value)


def _meet(what: str, limit: float) -> None:
    """Wait for all processes, but not for ever: a collective would."""
    from jax._src import distributed  # its barrier is the only one that can time out

    client = distributed.global_state.client
    assert client is not None
    try:
        client.wait_at_barrier(f"grpo_jax_{next(_NUMBERS)}", int(limit * 1000))
    except Exception as error:
        raise RuntimeError(
            f"process {index()} of {count()} waited for the others at {what}: {_who(error, limit)}"
        ) from error


def _who(error: Exception, limit: float) -> str:
    """What the coordination service says of those who are missing, in one line."""
    text = str(error)
    if "DEADLINE_EXCEEDED" not in text:
        return _first_line(error)
    names = text.partition("timed out task names:")[2].partition("RPC:")[0].split()
    return (
        f"process {', '.join(names) or '?'} did not arrive within {limit:.0f} s "
        "(processes.wait_limit); it hangs, or needs a higher limit"
    )


class _Failure:
    """An error of one process on its way to the others."""

    def __init__(self, error: Exception):
        self.kind, self.text = type(error).__name__, str(error)


@contextlib.contextmanager
def watched(what: str) -> Iterator[None]:
    """End this process of a job, with a message, if what happens inside exceeds `hang_limit`.

    The others notice that it is gone. A process that is alone may take its time.
    """
    if count() == 1:
        yield
        return
    timer = threading.Timer(_HANG[0], _hung, (what,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _hung(what: str) -> NoReturn:
    print(
        f"grpo-jax: process {index()} of {count()}: {what} takes longer than processes.hang_limit "
        f"= {_HANG[0]:.0f} s, so this job ends; reward.workers > 0 interrupts such a reward and "
        "goes on, a higher limit waits longer",
        file=sys.stderr,
    )
    _end(1)


def all_succeed(make: Callable[[], T], what: str, limit: float = 0.0) -> list[T]:
    """Run `make` in every process and exchange the results; one error is the error of all.

    `limit` is that of `everyone`.

    Raises:
      Exception: what `make` raised here; or RuntimeError, naming the process where it did.
    """
    if count() == 1:
        return [make()]
    try:
        mine: Any = make()
    except Exception as error:
        everyone(_Failure(error), what, limit)
        raise
    results = everyone(mine, what, limit)
    _raise_failures(results, what)
    return results


def from_main(make: Callable[[], T], what: str) -> T:
    """Run `make` in process 0 alone and give every process its result, or its error."""
    return all_succeed(lambda: make() if is_main() else None, what)[0]  # type: ignore[return-value]


def _raise_failures(results: list[Any], what: str) -> None:
    for number, result in enumerate(results):
        if isinstance(result, _Failure):
            # Wrong input is wrong for all: the same exit status everywhere.
            kind = ValueError if result.kind.endswith(("ValueError", "ConfigError")) else None
            raise (kind or RuntimeError)(f"process {number}, {what}: {result.text}")


def anyone(flag: bool, what: str) -> bool:
    """Say whether the flag is set in any process."""
    return any(everyone(flag, what))


def my_share(items: int) -> slice:
    """Which of `items` things in a row this process looks after; shares differ by one at most."""
    return slice(items * index() // count(), items * (index() + 1) // count())


def fetch(tree: Any) -> Any:
    """Bring a tree of arrays, wherever they lie, to every process as numpy arrays."""
    return jax.tree.map(_whole, tree)


def _itself(x: jax.Array) -> jax.Array:
    return x


def _whole(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        assert isinstance(x.sharding, NamedSharding)
        everywhere = NamedSharding(x.sharding.mesh, PartitionSpec())
        x = jax.jit(_itself, out_shardings=everywhere)(x)  # one function, so one trace a shape
    return np.asarray(x)


def place(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """Put host arrays that every process holds onto a mesh; each process fills its own devices."""
    if count() == 1:
        return jax.device_put(tree, sharding)

    def one(x: Any) -> jax.Array:
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda part: host[part])

    return jax.tree.map(one, tree)


def explain(error: BaseException) -> str:
    """One line about an error, for a job of several processes too."""
    if not jax.distributed.is_initialized():
        return str(error)
    return f"process {index()} of {count()}: {error}"


def abandon(status: int) -> None:
    """End this process at once if it belongs to a job; the others are told by the coordinator.

    The orderly way out waits for processes that may be gone.
    """
    if jax.distributed.is_initialized():
        _end(status)


def _end(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
