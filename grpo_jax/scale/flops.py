"""Count the multiplications of a traced program: exact, and the same on every device.

    FLOPs = Σ over dot products of 2 · |output| · |contracted| · (how often the dot runs)

A scan runs as often as its length says. A `while` loop does not say; the caller does, one number
for each depth of nesting. Everything that is not a dot product is left out: on these chips it is
not what the matrix units do.

A ragged product runs each row with one matrix. Along the mesh axis `expert` a device collects the
rows of its e neighbours and multiplies those that its own experts were chosen for: an e-th of them
on average, and that is what is counted.
"""

import math
from collections.abc import Sequence
from typing import Any

Jaxpr = Any


def count(closed: Any, *, while_trips: Sequence[int] = (1,)) -> float:
    """FLOPs of a closed jaxpr over all devices together.

    Args:
      closed: what `jax.make_jaxpr` returns, or `jitted.trace(...).jaxpr`.
      while_trips: how often the body of an outermost `while` loop runs, of one inside it, …; the
        last number holds for all that are deeper.
    """
    return _count(closed.jaxpr, while_trips)


def _count(jaxpr: Jaxpr, trips: Sequence[int], parts: int = 1) -> float:
    return sum(_one(eqn, trips, parts) for eqn in jaxpr.eqns)


def _one(eqn: Any, trips: Sequence[int], parts: int) -> float:
    name, params = eqn.primitive.name, eqn.params
    if name == "ragged_dot_general":
        return _ragged(eqn) / parts
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[d] for d in contracted)
    if name == "while":
        return trips[0] * _count(params["body_jaxpr"].jaxpr, trips[1:] or trips, parts)
    if name == "cond":
        return max(_count(branch.jaxpr, trips, parts) for branch in params["branches"])
    times = params["length"] if name == "scan" else 1
    if name == "shard_map":  # inside, the shapes are those of one device
        sizes = {axis: params["mesh"].shape[axis] for axis in params["newly_manual_axes"]}
        times, parts = math.prod(sizes.values()), sizes.get("expert", 1)
    return times * sum(_count(jaxpr, trips, parts) for jaxpr in _inner(params))


def _ragged(eqn: Any) -> float:
    """2 · rows · in · out: over experts of the right side, or, in a gradient, of the result."""
    dimensions = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = dimensions.dot_dimension_numbers
    shape, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    products = 2.0 * math.prod(out) * math.prod(shape[d] for d in contracted)
    return products if dimensions.rhs_group_dimensions else products / out[0]


def _inner(params: dict[str, Any]) -> list[Jaxpr]:
    """Every program among the parameters of an equation."""
    found = []
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                found.append(item)
    return found
