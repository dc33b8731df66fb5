"""Rewards that read text: exact match, format, length, and a task's own verifier.

Every reward is `f(sample, **params) -> float | None`; None means that the sample has no verdict.
"""

import functools
import json
import re
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from grpo_jax.rewards.scoring import Sample

Extract = Literal["none", "boxed", "answer_tag", "last_number", "last_line"]

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(
    r"(?:(?<![\w)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
)
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


def exact_match(
    sample: "Sample", extract: Extract = "none", ignore_case: bool = False
) -> float | None:
    """Score 1 when the extracted answer equals the reference answer, spaces at the ends aside.

    None, no verdict, for a task without a reference answer.
    """
    if sample.example.answer is None:
        return None
    found = extract_answer(sample.completion, extract)
    wanted = str(sample.example.answer).strip()
    if found is not None and ignore_case:
        found, wanted = found.lower(), wanted.lower()
    return float(found == wanted)


def format_match(sample: "Sample", pattern: str, full: bool = False) -> float:
    """Score 1 when the regular expression is found in the completion (or matches all of it)."""
    compiled = _compile(pattern)
    found = compiled.fullmatch(sample.completion) if full else compiled.search(sample.completion)
    return float(found is not None)


def length(
    sample: "Sample", target: int, unit: Literal["tokens", "characters"] = "tokens"
) -> float:
    """Score 1 at the target length, falling linearly to 0 at zero and at twice the target.

    r = max(0, 1 - |L - target| / target)
    """
    if target < 1:
        raise ValueError(f"length reward: target={target} must be at least 1 {unit}")
    measured = sample.tokens if unit == "tokens" else len(sample.completion)
    if measured is None:
        raise ValueError("length reward: token counts were not given; use unit: characters")
    return max(0.0, 1.0 - abs(measured - target) / target)


def verifier(sample: "Sample", extract: Extract = "none") -> float:
    """Score with the reasoning-gym task's own `score_answer` for this very entry."""
    metadata = sample.example.metadata
    if "task" not in metadata or "entry" not in metadata:
        raise ValueError(
            "the verifier reward needs prompts of source reasoning_gym; for other data use "
            "exact_match, math, or your own module:function"
        )
    found = extract_answer(sample.completion, extract)
    if found is None:
        return 0.0
    dataset = _dataset(metadata["task"], json.dumps(metadata["params"], sort_keys=True))
    return float(dataset.score_answer(found, metadata["entry"]))


def warm_up() -> None:
    """Load what the verifier needs."""
    import reasoning_gym  # noqa: F401


def extract_answer(completion: str, how: Extract = "none") -> str | None:
    """Return the answer inside a completion, or None when there is none.

    Only the completion is read, never the prompt, so a box in the instruction is not an answer.
    """
    if how == "none":
        return completion.strip()
    if how == "boxed":
        return last_boxed(completion)
    if how == "answer_tag":
        tags = _ANSWER_TAG.findall(completion)
        return tags[-1].strip() if tags else None
    if how == "last_number":
        numbers = _NUMBER.findall(completion)
        return numbers[-1].replace(",", "") if numbers else None
    if how == "last_line":
        lines = completion.strip().splitlines()
        return lines[-1].strip() if lines else None
    raise ValueError(
        f"extract={how!r} is unknown; use none, boxed, answer_tag, last_number or last_line"
    )


def last_boxed(text: str) -> str | None:
    r"""Return what stands in the last `\boxed{…}` or `\fbox{…}` to close, braces balanced.

    One pass, so linear in the length of the text whatever is nested or left open in it.
    """
    found: str | None = None
    opened: list[int | None] = []  # where the content of a box starts; None for any other brace
    for match in _BRACE.finditer(text):
        token = match.group()
        if token == "}":
            start = opened.pop() if opened else None
            if start is not None:
                found = text[start : match.start()].strip()
        elif token == "{":
            opened.append(None)
        elif len(token) > 2:
            opened.append(match.end())
    return found


@functools.lru_cache(maxsize=64)
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


@functools.lru_cache(maxsize=64)
def _dataset(task: str, params: str) -> Any:
    import reasoning_gym  # here: importing it takes seconds

    return reasoning_gym.create_dataset(task, size=1, seed=0, **json.loads(params))
