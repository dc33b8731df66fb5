"""From flagged text to flagged tokens."""

import numpy as np
import pytest

from grpo_jax.data.tokenizer import ByteTokenizer
from grpo_jax.rewards.verdicts import TextSpan
from grpo_jax.train.rollout import Override, overrides

IDS = np.array([*"é bad".encode(), 259])  # é is two tokens; 259 ends the turn


@pytest.mark.parametrize(
    ("span", "tokens"),
    [
        (TextSpan(-1.0, 2, 5, "x"), (3, 6)),
        (TextSpan(-1.0, 0, 1, "x"), (0, 2)),  # every token that spells part of it
        (TextSpan(-1.0, 4, 5, "x"), (5, 6)),
        (TextSpan(-1.0, 0, 5, "x"), (0, 6)),  # the text alone …
        (TextSpan(-1.0, None, None, "x"), (0, 7)),  # … and the message with its end token
        (TextSpan(-1.0, 3, 3, "x"), None),  # nothing
    ],
)
def test_a_span_of_text_becomes_tokens(span, tokens):
    found = overrides(ByteTokenizer(), IDS, [span])
    assert found == (() if tokens is None else (Override("x", *tokens, -1.0),))


def test_order_is_kept_and_no_completion_has_no_tokens():
    spans = [TextSpan(1.0, 0, 1, "b"), TextSpan(2.0, 0, 1, "a")]
    assert [o.name for o in overrides(ByteTokenizer(), IDS, spans)] == ["b", "a"]
    assert overrides(ByteTokenizer(), np.array([], int), [TextSpan(1.0)]) == ()
