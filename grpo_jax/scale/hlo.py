"""Read a compiled program: its dot products and its collectives, each as often as it runs.

The compiler's own totals count the body of a loop once. Here the computations are walked from the
entry, and a loop's body counts as often as its condition says; where the bound is not a constant,
the caller knows it (the loop over micro-batches ends where the data ends).
"""

import collections
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{[^}]*\})?")


Computations = Mapping[str, Mapping[str, "Instruction"]]


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    type: str
    opcode: str
    operands: list[str]
    arguments: str  # what stands in the brackets
    rest: str  # everything behind them
    root: bool = False  # the result of its computation


class Collective(NamedTuple):
    """All collectives of one kind along the same axes of the mesh."""

    kind: str
    axes: str  # "fsdp", "data+fsdp", …
    times: int  # how often one runs in a step
    bytes: float  # what one chip sends in a step


class Program(NamedTuple):
    """What one device does in one run of the program."""

    flops: float  # of dot products
    bytes: float  # that pass between memory and the chip, an estimate: see `traffic`
    collectives: list[Collective]
    unknown_loops: int  # loops whose number of rounds was taken from the caller


def read(text: str, mesh: Mapping[str, int], *, unknown_trips: Sequence[int] = (1,)) -> Program:
    """Walk a compiled module.

    Args:
      text: `compiled.as_text()`.
      mesh: axis -> size, in the order of the mesh.
      unknown_trips: rounds of an outermost loop whose bound is not a constant, of one inside it, …;
        the last number holds for all that are deeper.
    """
    computations, entry = _parse(text)
    walker = _Walker(computations, mesh)
    walker.visit(entry, 1, unknown_trips, fused=False)
    totals: dict[tuple[str, str], list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for kind, axes, times, sent in walker.seen:
        totals[kind, axes][0] += times
        totals[kind, axes][1] += times * sent
    ranked = sorted(totals.items(), key=lambda item: -item[1][1])
    found = [Collective(kind, axes, int(n), sent) for (kind, axes), (n, sent) in ranked]
    return Program(walker.flops, walker.bytes, found, walker.unknown)


def _parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """Computation -> name -> instruction; and the name of the entry."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None or not line.startswith(" "):
            head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
            if head:
                current = computations.setdefault(head[2], {})
                entry = head[2] if head[1] else entry
            continue
        found = _instruction(line)
        if found is not None:
            current[found.name] = found
    return computations, entry


def _instruction(line: str) -> Instruction | None:
    head = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if head is None:
        return None
    body = line[head.end() :]
    end = _closing(body, 0) if body.startswith("(") else body.index(" ") - 1
    opcode = re.match(r"\s*([\w\-]+)\(", body[end + 1 :])
    if opcode is None:
        return None
    start = end + 1 + opcode.end() - 1
    stop = _closing(body, start)
    operands = re.findall(r"%([\w.\-]+)", body[start:stop])
    inside = body[start + 1 : stop]
    return Instruction(
        head[2], body[: end + 1], opcode[1], operands, inside, body[stop + 1 :], bool(head[1])
    )


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text) - 1


def shapes(type_text: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, dimensions) of every array in a type."""
    found = _SHAPE.findall(type_text)
    return [(kind, tuple(int(d) for d in dims.split(",") if d)) for kind, dims in found]


def size(type_text: str) -> float:
    """Bytes of all arrays in a type."""
    return sum(_width(kind) * math.prod(dims) for kind, dims in shapes(type_text))


def _width(kind: str) -> float:
    """Bytes of one number: s32, bf16, f8e4m3fn and c64 say their bits; pred has one byte."""
    bits = re.match(r"[a-z]+(\d+)", kind)
    return int(bits[1]) / 8 if bits else float(kind == "pred")


class _Walker:
    """Add up a module from its entry on."""

    def __init__(self, computations: Computations, mesh: Mapping[str, int]):
        self._computations, self._mesh = computations, mesh
        self.flops, self.bytes, self.unknown = 0.0, 0.0, 0
        self.seen: list[tuple[str, str, int, float]] = []

    def visit(self, name: str, times: int, trips: Sequence[int], *, fused: bool) -> None:
        """Count a computation that runs `times` times."""
        inside = self._computations.get(name, {})
        for one in inside.values():
            if not fused:
                self.bytes += times * traffic(one, inside, self._computations)
            if one.opcode == "dot":
                self.flops += times * dot_flops(one, inside)
            elif one.opcode == "convolution":
                self.flops += times * convolution_flops(one, inside)
            elif one.opcode == "custom-call":
                self.flops += times * kernel_flops(one, inside, self._mesh.get("expert", 1))
            elif one.opcode.removesuffix("-start") in COLLECTIVES:
                self._collective(one, inside, name, times)
            if one.opcode == "while":
                body = re.search(r"body=%?([\w.\-]+)", one.rest)
                rounds = self._rounds(one, inside)
                if rounds is None:
                    self.unknown += 1
                    rounds, deeper = trips[0], trips[1:] or trips
                else:
                    deeper = trips
                if body:
                    self.visit(body[1], times * rounds, deeper, fused=fused)
            in_fusion = fused or one.opcode == "fusion"
            for callee in self._calls(one):
                self.visit(callee, times, trips, fused=in_fusion)

    def _calls(self, one: Instruction) -> Iterator[str]:
        """Yield the computations that run as part of an instruction."""
        if one.opcode in ("fusion", "call", "custom-call", "async-start", "conditional"):
            for callee in re.findall(
                r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)", one.rest
            ):
                yield callee
            branches = re.search(r"branch_computations=\{([^}]*)\}", one.rest)
            for callee in re.findall(r"%?([\w.\-]+)", branches[1]) if branches else ():
                yield callee

    def _rounds(self, loop: Instruction, inside: Mapping[str, Instruction]) -> int | None:
        """How often a loop runs, where the program says so: (bound − start) / step of its counter.

        The counter is the entry of the loop's tuple that the condition compares with a constant.
        """
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest)
        if known:
            return int(known[1])
        condition, body = (
            self._computations.get(name[1], {}) if name else {}
            for name in (
                re.search(rf"{kind}=%?([\w.\-]+)", loop.rest) for kind in ("condition", "body")
            )
        )
        bounds = [one for one in condition.values() if _is_count(one)]
        places = {
            place
            for one in condition.values()
            if one.opcode == "get-tuple-element" and one.type.startswith(("s32[]", "u32[]"))
            for place in re.findall(r"index=(\d+)", one.rest)
        }
        if len(bounds) != 1 or len(places) != 1:
            return None
        place = int(places.pop())
        start = _entry(inside, inside.get(loop.operands[0]), place)
        end = _entry(body, next((one for one in body.values() if one.root), None), place)
        first, step = _value(inside, start), _step(body, end, place)
        if first is None or not step:
            return None
        return max(-(-(int(bounds[0].arguments) - first) // step), 0)

    def _collective(self, one, inside, name: str, times: int) -> None:
        kind = one.opcode.removesuffix("-start")
        groups = _groups(one.rest, math.prod(self._mesh.values()))
        sizes = [_width(dtype) * math.prod(dims) for dtype, dims in shapes(one.type)]
        both = one.opcode in ("all-gather-start", "collective-permute-start")
        whole = max(sizes) if both else sum(sizes)  # a start's type holds operand and result
        if one.opcode == "reduce-scatter-start":  # n parts and one
            whole /= 1 + (groups.shape[1] if groups is not None else 0)
        if _is_later_piece(one, inside):
            return
        if "all-reduce-scatter" in name:  # how the TPU compiler writes a reduce-scatter
            kind = "reduce-scatter"
        n = groups.shape[1] if groups is not None else 0
        axes = _axes(groups, self._mesh)
        sent = {
            "all-gather": whole * (n - 1) / max(n, 1),
            "all-reduce": 2 * whole * (n - 1) / max(n, 1),
            # Written as a reduction of the whole, or by its result, a part.
            "reduce-scatter": whole * (n - 1) / (max(n, 1) if "scatter" in name else 1),
            "all-to-all": whole * (n - 1) / max(n, 1),
            "collective-permute": whole,
        }[kind]
        if kind != "collective-permute" and n <= 1:
            return
        self.seen.append((kind, axes, times, sent))


_NO_TRAFFIC = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call"}
_NO_TRAFFIC |= {"conditional", "after-all", "partition-id", "iota", "optimization-barrier"}
_SLICES = ("dynamic-slice", "gather", "slice")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # which operand is written into the first


def traffic(one: Instruction, inside: Mapping[str, Instruction], all_: Computations) -> float:
    """Bytes an instruction reads from and writes to memory, if nothing stays on the chip between.

    What is only sliced counts as its slice, what is only updated as its update. Arrays that the TPU
    compiler keeps on the chip (memory space 1) cost nothing.
    """
    if one.opcode in _NO_TRAFFIC or one.opcode.endswith("-done"):
        return 0.0
    if one.opcode in _UPDATES:
        return 2 * _far(inside, one.operands[_UPDATES[one.opcode]])
    if one.opcode in _SLICES:
        return 2 * size(_off_chip(one.type))
    callee = re.search(r"calls=%?([\w.\-]+)", one.rest) if one.opcode == "fusion" else None
    body = all_.get(callee[1], {}) if callee else {}
    if not body:
        return size(_off_chip(one.type)) + sum(_far(inside, name) for name in one.operands)
    parameters = {int(p.arguments): p.name for p in body.values() if p.opcode == "parameter"}
    read = 0.0
    for i, name in enumerate(one.operands):
        uses = [u for u in body.values() if parameters.get(i) in u.operands]
        sliced = [u for u in uses if u.operands[0] == parameters.get(i)]
        if uses and len(sliced) == len(uses):
            if all(u.opcode in _SLICES for u in uses):
                read += min(sum(size(u.type) for u in uses), _far(inside, name))
                continue
            if all(u.opcode in _UPDATES for u in uses):
                continue
        read += _far(inside, name)
    updates = [u for u in body.values() if u.opcode in _UPDATES]
    saved = sum(size(u.type) - size(body[u.operands[_UPDATES[u.opcode]]].type) for u in updates)
    return read + max(size(_off_chip(one.type)) - saved, 0.0)


def _far(inside: Mapping[str, Instruction], name: str) -> float:
    """Bytes of an operand, 0 if it stands on the chip already."""
    return size(_off_chip(inside[name].type)) if name in inside else 0.0


def _off_chip(type_text: str) -> str:
    """A type without the arrays of memory space 1."""
    return re.sub(r"[a-z]\w*\[[\d,]*\]\{[^}]*S\(1\)[^}]*\}", "", type_text)


def _is_count(one: Instruction) -> bool:
    return one.opcode == "constant" and one.arguments.isdigit()


_SAME = ("copy", "bitcast", "convert", "reshape")


def _origin(inside: Mapping[str, Instruction], one: Instruction | None) -> Instruction | None:
    """Look through copies."""
    while one is not None and one.opcode in _SAME:
        one = inside.get(one.operands[0])
    return one


def _entry(
    inside: Mapping[str, Instruction], one: Instruction | None, place: int
) -> Instruction | None:
    """An entry of a tuple that stands in the same computation."""
    one = _origin(inside, one)
    if one is None or one.opcode != "tuple" or place >= len(one.operands):
        return None
    return _origin(inside, inside.get(one.operands[place]))


def _value(inside: Mapping[str, Instruction], one: Instruction | None) -> int | None:
    one = _origin(inside, one)
    return int(one.arguments) if one is not None and _is_count(one) else None


def _step(body: Mapping[str, Instruction], one: Instruction | None, place: int) -> int | None:
    """What a loop's body adds to entry `place` of its tuple, through any number of additions."""
    total = 0
    while one is not None and one.opcode == "add":
        values = [_value(body, body.get(name)) for name in one.operands]
        if (values[0] is None) == (values[1] is None):
            return None
        added = values[0] if values[1] is None else values[1]
        total += added or 0
        one = _origin(body, body.get(one.operands[values.index(None)]))
    if one is None or one.opcode != "get-tuple-element":
        return None
    return total if re.search(rf"index={place}\b", one.rest) else None


def _is_later_piece(one: Instruction, inside: Mapping[str, Instruction]) -> bool:
    """An asynchronous collective of the TPU compiler: named again in each fusion that it passes."""
    targets = [i.rest for i in inside.values() if i.opcode == "custom-call"]
    if any("AsyncCollectiveDone" in rest for rest in targets):
        return True
    started = any("AsyncCollectiveStart" in rest for rest in targets)
    return "async_collective_fusion_config" in one.rest and not started


def dot_flops(one: Instruction, inside: Mapping[str, Instruction]) -> float:
    """2 · |output| · |contracted|."""
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.rest)
    left = shapes(inside[one.operands[0]].type)[0][1]
    output = math.prod(shapes(one.type)[0][1])
    dims = [int(d) for d in contracted[1].split(",") if d] if contracted else []
    return 2.0 * output * math.prod(left[d] for d in dims)


def kernel_flops(one: Instruction, inside: Mapping[str, Instruction], experts: int) -> float:
    """Products of library calls: cuBLAS on NVIDIA, and the ragged product of the TPU compiler.

    A ragged product is given the rows of all `experts` neighbours and does its own, see `flops`.
    """
    out = shapes(one.type)
    if '"__cublas$' in one.rest:
        contracted = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', one.rest)
        left = shapes(inside[one.operands[0]].type)[0][1]
        dims = [int(d) for d in re.findall(r"\d+", contracted[1])] if contracted else []
        return 2.0 * math.prod(out[0][1]) * math.prod(left[d] for d in dims)
    if not one.name.startswith("ragged-dot") or one.type.startswith("("):
        return 0.0
    rows, width = shapes(inside[one.operands[-2]].type)[0][1]
    *_, a, b = out[0][1]
    return 2.0 * rows * (width if len(out[0][1]) == 2 else a) * b / experts


def convolution_flops(one: Instruction, inside: Mapping[str, Instruction]) -> float:
    """The form in which the TPU compiler writes a dot product; batches are spatial dimensions.

    2 · |output without spatial dimensions| · input features of the kernel · for each spatial
    dimension, the pairs of output and kernel positions that meet an element of the input.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.rest)
    assert labels is not None, one.rest
    base, kernel = (shapes(inside[name].type)[0][1] for name in one.operands[:2])
    output = shapes(one.type)[0][1]
    total = 2.0
    for letter, length in zip(labels[3], output, strict=True):
        total *= 1 if letter.isdigit() else length
    total *= kernel[labels[2].index("i")]
    groups = re.search(r"batch_group_count=(\d+)", one.rest)
    total /= int(groups[1]) if groups else 1
    window = re.search(r"window=\{([^}]*)\}", one.rest)
    fields = dict(re.findall(r"(\w+)=(\S+)", window[1])) if window else {}
    for d in range(sum(letter.isdigit() for letter in labels[3])):
        total *= _meetings(
            base[labels[1].index(str(d))], output[labels[3].index(str(d))], _window(fields, d)
        )
    return total


def _window(fields: Mapping[str, str], d: int) -> dict[str, int]:
    """Size, stride, padding and dilations of one spatial dimension."""

    def number(name: str, default: int) -> int:
        return int(fields[name].split("x")[d]) if name in fields else default

    pad = fields["pad"].split("x")[d].split("_")[0] if "pad" in fields else "0"
    return {
        "size": number("size", 1),
        "stride": number("stride", 1),
        "low": int(pad),
        "base": number("lhs_dilate", 1),
        "kernel": number("rhs_dilate", 1),
    }


def _meetings(base: int, output: int, window: Mapping[str, int]) -> int:
    """Pairs (output position, kernel position) that meet an element of the input."""
    places = (
        np.arange(output)[:, None] * window["stride"]
        + np.arange(window["size"])[None] * window["kernel"]
        - window["low"]
    )
    dilated = (base - 1) * window["base"] + 1
    return int(((places >= 0) & (places < dilated) & (places % window["base"] == 0)).sum())


def _groups(rest: str, devices: int) -> np.ndarray | None:
    """Device numbers [groups, members] of a collective; None where they are not written."""
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if iota:
        dims = [int(d) for d in iota[3].split(",")]
        ids = np.arange(math.prod(dims)).reshape(dims)
        if iota[4]:
            ids = ids.transpose([int(d) for d in iota[4].split(",")])
        return ids.reshape(int(iota[1]), int(iota[2]))
    named = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?)?\))?"
        r"\s*\{([^}]*)\}",
        rest,
    )
    if named:
        sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", named[1])}
        over = re.findall(r"'([^']+)'", named[4])
        ids = np.arange(math.prod(sizes.values()))
        if named[2]:
            ids = ids.reshape([int(d) for d in named[2].split(",")])
        if named[3]:
            ids = ids.transpose([int(d) for d in named[3].split(",")])
        ids = ids.reshape(list(sizes.values()))
        moved = [list(sizes).index(name) for name in over]
        kept = [i for i in range(len(sizes)) if i not in moved]
        return ids.transpose(kept + moved).reshape(-1, math.prod(sizes[name] for name in over))
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", rest)
    listed = re.search(r"replica_groups=\{(\{.*?\})\}", rest)
    text = listed[1] if listed else pairs[1] + "}" if pairs else ""
    rows = [[int(i) for i in row.split(",")] for row in re.findall(r"\{([\d,]+)\}", text)]
    if rows and len({len(row) for row in rows}) == 1:
        return np.array(rows)
    return np.arange(devices).reshape(1, -1) if "replica_groups={}" in rest else None


def _axes(groups: np.ndarray | None, mesh: Mapping[str, int]) -> str:
    """Name the mesh axes along which the members of a group differ."""
    if groups is None:
        return "?"
    coordinates = np.stack(np.unravel_index(groups, tuple(mesh.values())))
    differ = (coordinates != coordinates[:, :, :1]).any(axis=(1, 2))
    return "+".join(name for name, d in zip(mesh, differ, strict=True) if d) or "none"
