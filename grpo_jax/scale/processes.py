"""What several processes of one run tell each other on the host: plain values, gathered by all.

A step's numbers are small (one a row, at most), so one operation is enough: everybody gets
everybody's value, in the order of the processes, and works out sums and extrema in the same way.
Functions that need it take a `Gather`; `alone` is the one of a single process, and of tests.
"""

import functools
import pickle
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

Gather = Callable[[Any], list[Any]]
"""Every process calls it at the same place with its own value; all get the list of all values."""


def alone(value: Any) -> list[Any]:
    """The gather of a run of one process."""
    return [value]


def gather(value: Any) -> list[Any]:
    """The gather of this run, however many processes it has.

    Values travel as bytes: JAX would round double precision to float32 on the way.
    """
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(data.size))
    padded = np.pad(data, (0, int(np.max(sizes)) - data.size))
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [pickle.loads(row[:n].tobytes()) for row, n in zip(rows, sizes, strict=True)]


def all_sum(collect: Gather) -> Callable[[np.ndarray], np.ndarray]:
    """Add arrays over the processes of a gather; always in their order."""
    return lambda x: functools.reduce(np.add, collect(np.asarray(x)))


def all_max(collect: Gather) -> Callable[[np.ndarray], np.ndarray]:
    """The elementwise maximum over the processes of a gather."""
    return lambda x: functools.reduce(np.maximum, collect(np.asarray(x)))
