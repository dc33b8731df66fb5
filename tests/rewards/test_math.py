r"""Maths rewards: a table of verdicts, exact integers, unreadable references."""

import pytest

from grpo_jax.data.prompts import Example
from grpo_jax.rewards import math
from grpo_jax.rewards.scoring import Sample

BIG = 9007199254740993  # 2^53 + 1, which no double can hold
VERDICTS = [  # reference, answer, equal
    ("6", "6", True),
    ("6", "7", False),
    (f"{BIG}", f"{BIG - 1}", False),
    (f"{BIG}", f"{BIG}", True),
    ("1e3", "1000", True),
    ("1000", "1,000", True),
    ("1e3", "1001", False),
    ("1e-3", "0.001", True),
    (r"2\times10^{3}", "2000", True),
    ("1/3", "0.3333", False),  # rational numbers are exact; see the tolerance below
    ("1/3", "2/6", True),
    ("1.5", "3/2", True),
    ("0.1", "1/10", True),
    (r"\frac{1}{2}", "0.5", True),
    (r"\frac{1}{2}", r"\frac12", True),
    (r"-\frac{1}{2}", "-0.5", True),
    (r"\frac{7}{2}", r"3\frac{1}{2}", True),
    ("007", "7", True),
    ("+3", "3", True),
    ("0", "-0", True),
    ("-5", "−5", True),
    ("3.0", "3", True),
    ("12.", "12", True),
    (r"\$12", "12", True),
    ("50", "50%", True),  # a percent sign is a unit
    (r"50\%", "0.5", False),
    ("12", "12 cm", True),
    ("12", r"12 \text{ cm}", True),
    ("90", r"90^\circ", True),
    ("5", "x=5", True),
    ("x=5", "$5$", True),
    (r"\text{Yes}", "yes", True),
    ("A", r"\text{A}", True),
    ("A", "B", False),
    ("Tuesday", "Wednesday", False),
    (r"\sqrt{2}", "2^{1/2}", True),
    (r"\sqrt{2}", r"\frac{2}{\sqrt 2}", True),
    (r"\sqrt{2}", r"\sqrt{3}", False),
    ("x^2+2x+1", "(x+1)^2", True),
    ("a+b", "b+a", True),
    ("a+b", "a-b", False),
    (r"\frac{x}{2}", "0.5x", True),
    ("(1,2)", "(1, 2)", True),
    ("(1,2)", "(2,1)", False),
    ("[1,2)", "[1,2]", False),
    (r"\{1,2\}", r"\{2,1\}", True),
    (r"\{1,2\}", r"\{1,3\}", False),
    ("10", r"\binom{5}{2}", True),
    ("120", "5!", True),
    ("3+4i", "4i+3", True),
    (r"-\infty", r"\infty", False),
    (r"(-\infty, 3]", r"(-\infty,3]", True),
    ("x > 3", r"x \ge 3", False),
    (r"\pi", "3.14", False),
    ("8", "", False),
    ("5", "5, 6", False),
    ("1/0", "1", False),
    ("1,2,3", "3,2,1", True),  # without brackets, a set
    ("12", "1 2", False),  # two numbers
    ("2", "1 2", False),
    ("1000", "1 000", True),
    ("1234567", r"1\,234\,567", True),
    ("12", "1 200", False),
    (r"\$1,234.50", "1234.5", True),
    ("2^{10}", "1024", True),
    (r"\frac{\pi}{2}", r"\pi/2", True),
    ("4", "4 and 5", False),
    ("4", r"\pm 4", False),
    (r"\sin^2 x+\cos^2 x", "1", True),
    (r"\text{no solution}", "No solution", True),
]


def test_the_table_is_long_enough():
    assert len(VERDICTS) >= 40 and len({v[:2] for v in VERDICTS}) == len(VERDICTS)


@pytest.mark.parametrize("gold, answer, equal", VERDICTS)
def test_verdicts(gold, answer, equal):
    assert math.is_readable(gold)
    assert math.is_equal(gold, answer) is equal


def test_a51_integers_are_compared_by_their_digits():
    assert not math.is_equal("9007199254740993", "9007199254740992")
    assert math.is_equal("1e3", "1000")
    assert not math.is_equal("1/3", "0.3333")
    assert math.is_equal("1/3", "0.3333", tolerance=1e-3)
    assert not math.is_equal("1/3", "0.3333", tolerance=1e-6)
    long = "7" * 100_000
    assert math.is_equal(long, "+00" + long) and not math.is_equal(long, long[:-1] + "8")


@pytest.mark.parametrize(
    "gold, reference, readable",
    [
        ("", "", False),
        ("6", "6", True),
        ("so 7*6 = 42\n#### 42", "42", True),
        (r"hence $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}", True),
        ("Tuesday", "Tuesday", True),
        ("???", "???", False),
        ("$", "$", False),
        (r"\frac{1}{", r"\frac{1}{", False),
        ("x +", "x +", False),
    ],
)
def test_a48_references_are_read_or_give_no_verdict(gold, reference, readable):
    assert math.reference_answer(gold) == reference
    assert math.is_readable(reference) is readable
    verdict = math.math_reward(Sample(r"\boxed{13}", Example("q", gold)))
    assert verdict == (0.0 if readable else None)


def test_a_missing_reference_gives_no_verdict():
    assert math.math_reward(Sample(r"\boxed{1}", Example("q", None))) is None


def test_a49_only_the_last_box_counts_and_no_box_scores_nothing():
    example = Example(r"answer in \boxed{}", r"\frac{1}{2}")
    assert math.math_reward(Sample(r"\boxed{1} … \boxed{\frac{1}{2}}", example)) == 1.0
    assert math.math_reward(Sample("0.5", example)) == 0.0
    assert math.math_reward(Sample("it is 0.5", example), extract="last_number") == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "1e999999999",
        "1e-999999999",
        "1/1e999999999",
        r"2\times10^{999999999}",
        "1" * 1_000_000,
        "0." + "3" * 1_000_000,
        "x" * 1_000_000,
        "(" * 100_000,
    ],
)
def test_numbers_of_absurd_size_are_not_written_out(answer):
    assert not math.is_equal("1000", answer)
    assert not math.is_equal("1000", answer, tolerance=1e-3)
    assert not math.is_equal("1/3", answer)
