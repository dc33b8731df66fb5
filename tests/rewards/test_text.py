"""Text rewards: what counts as the answer, and the verdicts on it."""

import pytest

from grpo_jax.data.prompts import Example, PromptConfig, load_examples
from grpo_jax.rewards import text
from grpo_jax.rewards.scoring import Sample


def sample(completion, answer=None, tokens=None, **metadata):
    return Sample(completion, Example("q", answer, metadata), tokens)


@pytest.mark.parametrize(
    "completion, how, answer",
    [
        ("  42\n", "none", "42"),
        (r"so \boxed{1} or \boxed{\frac{1}{2}}", "boxed", r"\frac{1}{2}"),
        (r"\fbox{42}", "boxed", "42"),
        (r"\boxed {7}", "boxed", "7"),
        (r"\boxed{1} then \boxed{2", "boxed", "1"),
        (r"\boxed{a \{ b}", "boxed", r"a \{ b"),
        (r"\boxed{unclosed \boxed{3}", "boxed", "3"),
        ("42", "boxed", None),
        ("}} {{", "boxed", None),
        ("<answer>1</answer> no, <answer>\n2 </answer>", "answer_tag", "2"),
        ("<answer>1", "answer_tag", None),
        ("3 and 1,234.5 apples", "last_number", "1234.5"),
        ("7-3 = -4", "last_number", "-4"),
        ("it is 7-3", "last_number", "3"),
        ("about .5e-3.", "last_number", ".5e-3"),
        ("none", "last_number", None),
        ("one\ntwo\n", "last_line", "two"),
        ("", "last_line", None),
    ],
)
def test_answers_are_found(completion, how, answer):
    assert text.extract_answer(completion, how) == answer


def test_a49_no_box_in_the_completion_is_no_answer():
    """The instruction's own box is in the prompt, which no reward ever reads."""
    example = Example(r"answer in \boxed{}", "42")
    assert text.exact_match(Sample("42", example), extract="boxed") == 0.0
    assert text.exact_match(Sample(r"\fbox{42}", example), extract="boxed") == 1.0
    assert text.last_boxed(r"\boxed{1} … \boxed{\frac{1}{2}}") == r"\frac{1}{2}"


def test_boxes_are_found_in_linear_time():
    assert text.last_boxed(r"\boxed{" * 200_000) is None
    assert text.last_boxed("{" * 200_000 + r"\boxed{1}") == "1"


def test_an_unknown_way_to_extract_is_named():
    with pytest.raises(ValueError, match="extract='box' is unknown; use none, boxed"):
        text.extract_answer("x", "box")  # pyright: ignore[reportArgumentType]


def test_exact_match_and_format():
    assert text.exact_match(sample(" 4 ", 4)) == 1.0
    assert text.exact_match(sample("Yes", "yes")) == 0.0
    assert text.exact_match(sample("Yes", "yes"), ignore_case=True) == 1.0
    assert text.exact_match(sample("4", None)) is None  # nothing to compare with: no verdict
    assert text.format_match(sample("<think>a\nb</think>"), r"<think>.*</think>") == 1.0
    assert text.format_match(sample("x <think></think>"), "<think></think>", full=True) == 0.0


def test_length_is_a_tent_around_its_target():
    found = [text.length(sample("", tokens=n), 10) for n in (0, 5, 10, 15, 20, 99)]
    assert found == [0, 0.5, 1, 0.5, 0, 0]
    assert text.length(sample("abcde"), 5, unit="characters") == 1
    with pytest.raises(ValueError, match="token counts were not given"):
        text.length(sample("abc"), 10)
    with pytest.raises(ValueError, match="target=0 must be at least 1"):
        text.length(sample("abc", tokens=1), 0)


def test_the_verifier_is_the_tasks_own():
    config = PromptConfig(name="chain_sum", size=3, eval_size=0, seed=1)
    (example, *_), _ = load_examples(config)
    assert text.verifier(Sample(f" {example.answer}\n", example)) == 1.0
    assert text.verifier(Sample("nothing", example)) == 0.0
    tagged = Sample(f"<answer>{example.answer}</answer>", example)
    assert text.verifier(tagged, extract="answer_tag") == 1.0
    assert text.verifier(Sample("", example), extract="answer_tag") == 0.0
    with pytest.raises(ValueError, match="needs prompts of source reasoning_gym"):
        text.verifier(sample("4", "4"))


def test_a47_every_sample_keeps_its_own_answer():
    responses = [r"\boxed{1}", "no answer", r"\boxed{3}"]
    assert [text.extract_answer(r, "boxed") for r in responses] == ["1", None, "3"]
