r"""Is this answer mathematically equal to the reference answer?

In order, and each only when those before have no say: equal text; exact rational arithmetic
(integers of any size, decimals, `1e3`, `a/b`, `\frac{a}{b}`); math-verify's symbolic comparison.
Rational numbers are never compared through floats: 9007199254740993 ≠ 9007199254740992, and
1/3 ≠ 0.3333 unless a tolerance is asked for. Percent signs and units are dropped: 50% = 50.
"""

import functools
import logging
import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from grpo_jax.rewards import text as texts

if TYPE_CHECKING:
    from grpo_jax.rewards.scoring import Sample

_LONGEST = 2000  # characters that the symbolic parser is given; longer answers are no answers
_DIGITS = 2000  # digits up to which fractions are multiplied out

_INTEGER = re.compile(r"([-+]?)0*(\d+)")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_POWER = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+))(?:\\times|\\cdot|\*|×)10\^\{?([-+]?\d+)\}?")
_FRACTION = re.compile(r"([-+]?)\\[dtc]?frac\{([^{}]*)\}\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"([-+]?)\\[dtc]?frac(\d)(\d)")
_WORDS = re.compile(r"[A-Za-z][A-Za-z '\-]*")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|textit|mbox)\s*\{([^{}]*)\}")
_UNIT = re.compile(
    r"(?<=[\d}])\s*(?:\\?%|\\text\{[^{}]*\}|\\mathrm\{[^{}]*\}|\^\{?\\circ\}?|°|\\degree"
    r"|[a-zA-Z]{2,}(?:\^\{?\d\}?)?)$"
)
_SPACE = re.compile(r"\\[,!;: ]|\\q?quad|~|\{,\}|\s+")
# `1 000` is a thousand; `1 2` is two numbers, and not twelve.
_GAP = re.compile(rf"(?<=\d)(?:{_SPACE.pattern})+(?=\d)(?!\d{{3}}(?!\d))")


def math_reward(
    sample: "Sample", extract: texts.Extract = "boxed", tolerance: float = 0.0
) -> float | None:
    """Score 1 when the extracted answer equals the reference, 0 when not or when there is none.

    Returns None when the reference answer itself cannot be read: there is no verdict then, and the
    sample is left out rather than counted as right or wrong.
    """
    gold = reference_answer(str(sample.example.answer if sample.example.answer is not None else ""))
    if not is_readable(gold):
        return None
    answer = texts.extract_answer(sample.completion, extract)
    return float(answer is not None and is_equal(gold, answer, tolerance))


def warm_up() -> None:
    """Load the symbolic library and let it build its parsers, which takes seconds."""
    is_equal(r"\frac{x}{2}", r"\sqrt{x}")


def reference_answer(gold: str) -> str:
    r"""Return the answer in a reference solution: after `####`, in its last box, or all of it."""
    if "####" in gold:
        return gold.rsplit("####", 1)[1].strip()
    boxed = texts.last_boxed(gold)
    return gold.strip() if boxed is None else boxed


@functools.lru_cache(maxsize=4096)
def is_readable(gold: str) -> bool:
    """Tell whether a reference answer is a number, a plain word, or maths that can be parsed."""
    clean = _clean(gold)
    if not clean:
        return False
    return (
        _number(clean) is not None
        or _WORDS.fullmatch(_plain(gold)) is not None
        or bool(_parse(gold))
    )


def is_equal(gold: str, answer: str, tolerance: float = 0.0) -> bool:
    """Tell whether an answer equals a readable reference.

    Args:
        gold, answer: the bare answers, without the text around them.
        tolerance: relative difference up to which two rational numbers are equal.
    """
    left, right = _clean(gold), _clean(answer)
    if not right:
        return False
    words = _plain(gold).lower()
    if left == right or (words and words == _plain(answer).lower()):
        return True
    a, b = _number(left), _number(right)
    if a is not None and b is not None:
        return _same_number(a, b, tolerance)
    if len(answer) > _LONGEST:
        return False
    parsed = _parse(gold)
    return bool(parsed) and _verify(parsed, _parse(answer))


def _clean(answer: str) -> str:
    r"""Take away what does not change the meaning: `$`, spaces, `x =`, units, a final full stop."""
    out = answer.strip().strip("$").removeprefix(r"\(").removesuffix(r"\)").strip()
    out = out.removeprefix(r"\$").rstrip(".").replace(r"\left", "").replace(r"\right", "")
    out = re.sub(r"^[a-zA-Z]\s*=\s*(?=[^=]+$)", "", out[: _LONGEST + 1]) + out[_LONGEST + 1 :]
    if len(out) <= _LONGEST:
        out = _UNIT.sub("", out)
    if len(out) <= _LONGEST:
        out = _GAP.sub("⎵", out)  # stays, and no number has it
    return _SPACE.sub("", out).replace("−", "-").replace(r"\%", "").rstrip("%")


def _plain(answer: str) -> str:
    r"""Return the words of an answer: `\text{Yes}` and `yes.` are the same word."""
    if len(answer) > _LONGEST:
        return ""
    return _TEXT.sub(r"\1", answer).strip().strip("$.").strip()


def _number(clean: str) -> str | Decimal | Fraction | None:
    """Read a rational number: digits for an integer of any size, else an exact value."""
    if _GROUPED.fullmatch(clean):
        clean = clean.replace(",", "")
    integer = _INTEGER.fullmatch(clean)
    if integer:
        digits = integer[2].lstrip("0") or "0"
        return ("-" if integer[1] == "-" and digits != "0" else "") + digits
    if len(clean) > _DIGITS:
        return None
    power = _POWER.fullmatch(clean)
    if power:
        clean = f"{power[1]}e{power[2]}"
    if _DECIMAL.fullmatch(clean):
        try:
            return Decimal(clean)
        except InvalidOperation:  # an exponent beyond every limit
            return None
    return _fraction(clean)


def _fraction(clean: str) -> Fraction | None:
    r"""Read `a/b`, `\frac{a}{b}` or `\frac12` with decimal a and b."""
    latex = _FRACTION.fullmatch(clean) or _SHORT_FRACTION.fullmatch(clean)
    sign, above, below = latex.groups() if latex else ("", *(clean.split("/") + ["", "", ""])[:2])
    if not (_DECIMAL.fullmatch(above) and _DECIMAL.fullmatch(below)):
        return None
    if not latex and clean.count("/") != 1:
        return None
    numerator, denominator = _small(Decimal(above)), _small(Decimal(below))
    if numerator is None or not denominator:
        return None
    value = numerator / denominator
    return -value if sign == "-" else value


def _small(value: Decimal) -> Fraction | None:
    """Return a decimal as a fraction, unless writing it out would take too many digits."""
    return Fraction(value) if abs(value.adjusted()) < _DIGITS else None


def _same_number(a: Any, b: Any, tolerance: float) -> bool:
    """Compare two rational numbers exactly, or within |a - b| ≤ tolerance · |a|."""
    if isinstance(a, str) and isinstance(b, str) and tolerance == 0:
        return a == b  # integers: no limit on their size, and linear in it
    if any(isinstance(x, str) and len(x) > _DIGITS for x in (a, b)):
        return False
    left, right = (Decimal(x) if isinstance(x, str) else x for x in (a, b))
    if tolerance == 0 and isinstance(left, Decimal) and isinstance(right, Decimal):
        return left == right  # exact, and does not write an exponent out
    exact = [_small(x) if isinstance(x, Decimal) else x for x in (left, right)]
    if exact[0] is None or exact[1] is None:
        return False
    return abs(exact[0] - exact[1]) <= Fraction(tolerance) * abs(exact[0])


def _parse(answer: str) -> list[Any]:
    """Return what math-verify makes of an answer; empty when it makes nothing of it."""
    if len(answer) > _LONGEST:
        return []
    library = _library()
    bare = answer.strip().strip("$")
    # The time limit is the worker's: the library's own uses signals, which only one can have.
    return library.parse(f"${bare}$", fallback_mode="no_fallback", parsing_timeout=None)


def _verify(gold: list[Any], answer: list[Any]) -> bool:
    return bool(answer) and bool(_library().verify(gold, answer, timeout_seconds=None))


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    import math_verify  # here: importing sympy takes a second

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # it would warn of every bad answer
    return math_verify
