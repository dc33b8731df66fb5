"""What a reward function may return, read into one form.

    0.5                                     the value
    None                                    no verdict: the row is left out of this component
    {"score": 0.5}                          the value, with more to say:
    {"score": 0.5, "mask_sample": True}     … and do not train this completion
    {"score": 0.5, "spans": [               … and give these characters an advantage of their own
        {"advantage": -1.0, "start": 10, "end": 42, "name": "bad_call"},
        {"advantage": -0.5}]}               without start and end: the whole message

`score` may be called `reward`. Other keys are the function's own and are not read.
"""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class TextSpan(NamedTuple):
    """A flagged stretch of a completion, and the advantage that its tokens get."""

    advantage: float
    start: int | None = None  # first character; None = the whole message, end token included
    end: int | None = None  # one past the last character
    name: str = ""  # under which it is counted in the log; empty = the component's


class Verdict(NamedTuple):
    """What one component says of one completion."""

    value: float | None
    masked: bool = False  # do not train this completion
    spans: tuple[TextSpan, ...] = ()  # later ones win


def read(returned: Any, length: int) -> Verdict:
    """Read what a reward function returned for a completion of `length` characters.

    Raises:
      TypeError, ValueError: it is none of the forms above.
    """
    if not isinstance(returned, Mapping):
        return Verdict(None if returned is None else float(returned))
    score = returned.get("score")
    score = returned.get("reward") if score is None else score
    masked = returned.get("mask_sample")
    if masked is not None and type(masked).__name__ not in ("bool", "bool_"):
        raise ValueError(f"mask_sample = {masked!r} is not true or false")
    spans = returned.get("spans")
    if spans is not None and (isinstance(spans, str | Mapping) or not isinstance(spans, Sequence)):
        raise ValueError(f"spans = {spans!r} is not a list; give a list of mappings")
    return Verdict(
        None if score is None else float(score),
        bool(masked),
        tuple(_span(span, length) for span in spans or ()),
    )


def _span(span: Any, length: int) -> TextSpan:
    """One entry of `spans`."""
    keys = set(TextSpan._fields)
    if not isinstance(span, Mapping) or "advantage" not in span or not set(span) <= keys:
        raise ValueError(
            f"span {span!r} must be a mapping with the key 'advantage', and of 'start', 'end' and "
            "'name' those that are needed"
        )
    advantage, start, end = float(span["advantage"]), span.get("start"), span.get("end")
    if not math.isfinite(advantage):
        raise ValueError(f"span {span!r} has an advantage that is not finite")
    if (start is None) != (end is None):
        raise ValueError(f"span {span!r} needs both start and end, or neither (the whole message)")
    if start is not None and end is not None:
        whole = all(isinstance(x, numbers.Integral) for x in (start, end))
        if not (whole and 0 <= start <= end <= length):
            raise ValueError(
                f"span {span!r} is outside the completion; use whole numbers with "
                f"0 <= start <= end <= {length}, its length in characters"
            )
        start, end = int(start), int(end)
    return TextSpan(advantage, start, end, str(span.get("name", "")))
