"""Where each array lives: rules on parameter paths, as data.

A rule is a regular expression on the path of a parameter (`layers/mlp/up/weight`) and a tuple that
names a mesh axis for each of the parameter's last dimensions. Because it speaks of the last
dimensions, one rule fits a layer and a stack of layers `[L, ...]`. The first rule that matches
decides. What no rule matches is split over `fsdp` and `expert` along its largest dimension that
divides. A config puts rules of its own in front (`mesh.rules`, `table`).

    ("mlp/up", ("tensor", "fsdp"))           # [..., F, D]: F over tensor, D over fsdp
    ("table", ("tensor", ("fsdp", "data")))  # D over two axes
    ("bias", None)                           # every device holds all of it
"""

import logging
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax.scale import mesh as meshes
from grpo_jax.scale import multihost

Axis = str | tuple[str, ...] | None
Spec = tuple[Axis, ...] | None
Rule = tuple[str, Spec] | tuple[str, Spec, int]  # the number: of arrays of so many dimensions only
Rules = Sequence[Rule]
Say = Callable[[str], Any]

_WIDTH = ("fsdp", "expert")  # D of everything but experts: `expert` is more fsdp there
LLAMA_RULES: Rules = (
    (r"(norm|bias)", None),
    (r"embed/table$", ("tensor", _WIDTH)),  # [V, D]
    (r"head/weight$", ("tensor", _WIDTH)),  # [V, D]
    (r"mlp/(gate|up)/weight$", ("expert", "tensor", "fsdp"), 4),  # [L, E, F, D]
    (r"mlp/down/weight$", ("expert", "fsdp", "tensor"), 4),  # [L, E, D, F]
    (r"(query|key|value|gate|up)/weight$", ("tensor", _WIDTH)),  # [out, D]
    (r"(attention/output|mlp/down)/weight$", (_WIDTH, "tensor")),  # [D, in]
    # Adapters lie as the matrices they belong to; their rank stays whole.
    (r"(query|key|value|gate|up)\.weight/a$", (None, _WIDTH)),  # [r, D]
    (r"(query|key|value|gate|up)\.weight/b$", ("tensor", None)),  # [out, r]
    (r"(attention\.output|mlp\.down)\.weight/a$", (None, "tensor")),  # [r, in]
    (r"(attention\.output|mlp\.down)\.weight/b$", (_WIDTH, None)),  # [D, r]
)


def table(config: meshes.MeshConfig) -> Rules:
    """The rules of a config, then our own."""
    own: list[Rule] = [
        (rule.match, tuple(map(_axis, rule.axes)) or None)
        + (() if rule.dimensions is None else (rule.dimensions,))
        for rule in config.rules
    ]
    return (*own, *LLAMA_RULES)


def _axis(name: str | None) -> Axis:
    if name is None:
        return None
    return tuple(name.split("+")) if "+" in name else name


def path_name(path: Any) -> str:
    """Spell a tree path as `layers/mlp/up/weight`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def partition(tree: Any, mesh: Mesh, rules: Rules = LLAMA_RULES, *, say: Say | None = None) -> Any:
    """Give every array of a tree its sharding.

    Args:
      tree: arrays, or `jax.ShapeDtypeStruct`s.
      mesh: the devices.
      rules: the first whose expression is found in a parameter's path decides.
      say: called once, with one line, where a rule asks for a split that does not divide; such a
        dimension stays whole on every device. Default: a warning of this module's logger.

    Returns:
      A tree of `NamedSharding` of the same structure.

    Raises:
      ValueError: a rule names an axis that the mesh lacks, puts two dimensions on one axis, or has
        more dimensions than the parameter.
    """
    kept_whole: list[str] = []

    def one(path: Any, leaf: Any) -> NamedSharding:
        name = path_name(path)
        for pattern, spec, *ranks in rules:
            if re.search(pattern, name) and ranks in ([], [leaf.ndim]):
                where = f"rule {pattern!r} for {name} {list(leaf.shape)}"
                full = _full_spec(spec, leaf.ndim, mesh, where)
                return NamedSharding(mesh, _dividing(full, leaf.shape, mesh, where, kept_whole))
        return NamedSharding(mesh, largest_dimension(leaf.shape, mesh))

    shardings = jax.tree_util.tree_map_with_path(one, tree)
    if kept_whole:
        (say or logging.getLogger(__name__).warning)(
            "kept whole on every device, because the split does not divide: "
            + "; ".join(kept_whole)
        )
    return shardings


def _full_spec(spec: Spec, ndim: int, mesh: Mesh, where: str) -> tuple[Axis, ...]:
    """Check a rule against the mesh, and pad it on the left to all dimensions."""
    spec = spec or ()
    if len(spec) > ndim:
        raise ValueError(
            f"{where}: {len(spec)} axes {spec} for {ndim} dimensions; shorten the rule"
        )
    names = [name for axis in spec for name in _names(axis)]
    for name in names:
        if name not in mesh.shape:
            raise ValueError(
                f"{where}: unknown mesh axis {name!r}; the mesh has {', '.join(mesh.shape)}"
            )
        if names.count(name) > 1:
            raise ValueError(
                f"{where}: mesh axis {name!r} stands twice in {spec}; an array can be split "
                "over it along one dimension only"
            )
    return (None,) * (ndim - len(spec)) + tuple(spec)


def _names(axis: Axis) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else tuple(axis or ())


def _dividing(
    spec: tuple[Axis, ...], shape: tuple[int, ...], mesh: Mesh, where: str, kept_whole: list[str]
) -> PartitionSpec:
    """Drop the axes that do not divide their dimension, noting each."""
    axes: list[Axis] = []
    for dimension, (axis, size) in enumerate(zip(spec, shape, strict=True)):
        parts = 1
        for part in _names(axis):
            parts *= mesh.shape[part]
        if size % parts:
            named = "+".join(_names(axis))
            kept_whole.append(f"{where}, dimension {dimension} of {size} over {named} = {parts}")
            axis = None
        axes.append(_shortest(axis, mesh))
    return PartitionSpec(*axes)


def _shortest(axis: Axis, mesh: Mesh) -> Axis:
    """Leave out of several axes those with a single device."""
    if not isinstance(axis, tuple):
        return axis
    split = [name for name in axis if mesh.shape[name] > 1] or list(axis[:1])
    return tuple(split) if len(split) > 1 else split[0]


def largest_dimension(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Split the largest dimension that divides over `fsdp` and `expert`.

    Vectors and scalars stay whole.
    """
    names = [name for name in _WIDTH if mesh.shape.get(name, 1) > 1]
    parts = math.prod(mesh.shape[name] for name in names)
    dividing = [i for i, size in enumerate(shape) if size % parts == 0 and size >= parts]
    if len(shape) < 2 or parts == 1 or not dividing:
        return PartitionSpec()
    best = max(dividing, key=lambda i: shape[i])
    axis = tuple(names) if len(names) > 1 else names[0]
    return PartitionSpec(*(axis if i == best else None for i in range(len(shape))))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds all of it."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over `data`, `fsdp` and `expert`, the tokens of a row over `context`."""
    tokens = ("context",) if mesh.shape.get("context", 1) > 1 else ()
    return NamedSharding(mesh, PartitionSpec(*row_sharding(mesh).spec, *tokens))


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over `data`, `fsdp` and `expert`, and nothing else."""
    return NamedSharding(mesh, PartitionSpec(_row_axes(mesh)))


def cache_sharding(x: Any, mesh: Mesh) -> NamedSharding:
    """A decoder's cache [N, (L,) K, S, hd]: slots over the row axes, heads over `tensor`.

    What does not divide stays whole on every device.
    """
    slots = meshes.ROW_AXES if x.shape[0] % meshes.row_shards(mesh) == 0 else None
    heads = "tensor" if x.shape[-3] % mesh.shape["tensor"] == 0 else None
    between = (None,) * (x.ndim - 4)
    return NamedSharding(mesh, PartitionSpec(slots, *between, heads))


def _row_axes(mesh: Mesh | None) -> tuple[str, ...]:
    """The mesh's axes that rows are split over; `expert` only where it has several devices."""
    shape = {"data": 1, "fsdp": 1} if mesh is None else mesh.shape
    least = {"expert": 2}
    return tuple(name for name in meshes.ROW_AXES if shape.get(name, 0) >= least.get(name, 1))


def check_rows(rows: int, mesh: Mesh | None, micro_batches: int = 1) -> None:
    """Refuse a number of rows that does not split evenly.

    Raises:
      ValueError: the rows do not divide by micro-batches × row shards.
    """
    shards = 1 if mesh is None else meshes.row_shards(mesh)
    if micro_batches < 1:
        raise ValueError(f"micro_batches = {micro_batches} must be at least 1")
    unit = micro_batches * shards
    if rows % unit or rows == 0:
        raise ValueError(
            f"batch of {rows} rows does not divide over {micro_batches} micro-batches × "
            f"{'×'.join(_row_axes(mesh))} = {shards}; use a multiple of {unit}"
        )


def check_width(width: int, mesh: Mesh | None) -> None:
    """Refuse rows whose tokens do not split evenly.

    Raises:
      ValueError: the width does not divide by the context axis.
    """
    parts = 1 if mesh is None else mesh.shape.get("context", 1)
    if width % parts:
        raise ValueError(
            f"rows of {width} tokens do not divide over mesh.context = {parts}; use a multiple of "
            f"{parts} for rollout.length_multiple, or for packing.row_length"
        )


def place(batch: Any, mesh: Mesh) -> Any:
    """Put a tree of host arrays [B, ...], the same in every process, on the mesh, rows split.

    Raises:
      ValueError: the rows, or their tokens, do not divide over the mesh.
    """
    leaves = jax.tree.leaves(batch)
    check_rows(leaves[0].shape[0], mesh)
    check_width(leaves[0].shape[1], mesh)
    return multihost.place(batch, batch_sharding(mesh))
