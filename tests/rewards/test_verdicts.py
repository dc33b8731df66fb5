"""What a reward function may return, and what is refused with a reason."""

from pathlib import Path

import numpy as np
import pytest

from grpo_jax.data.prompts import Example
from grpo_jax.rewards import verdicts
from grpo_jax.rewards.scoring import RewardComponent, RewardConfig, Scorer
from grpo_jax.rewards.verdicts import TextSpan, Verdict

FLAGS = f"{Path(__file__).parent / 'hostile_rewards.py'}:flags"


@pytest.mark.parametrize(
    ("returned", "verdict"),
    [
        (0.5, Verdict(0.5)),
        (np.float32(0.5), Verdict(0.5)),
        (True, Verdict(1.0)),
        (None, Verdict(None)),
        ({"score": 0.0, "reward": 0.7}, Verdict(0.0)),
        ({"score": None, "reward": 0.7}, Verdict(0.7)),
        ({"score": 1, "extracted": "4"}, Verdict(1.0)),  # other keys are the function's own
        ({"score": 1, "mask_sample": np.bool_(True)}, Verdict(1.0, True)),
        ({"mask_sample": True}, Verdict(None, True)),
        ({"score": 1, "mask_sample": None, "spans": None}, Verdict(1.0)),
        (
            {"score": 1, "spans": [{"advantage": -1}, dict(advantage=2, start=0, end=3, name="x")]},
            Verdict(1.0, False, (TextSpan(-1.0), TextSpan(2.0, 0, 3, "x"))),
        ),
    ],
)
def test_forms(returned, verdict):
    assert verdicts.read(returned, 3) == verdict


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"score": 1, "mask_sample": "no"}, "mask_sample = 'no' is not true or false"),
        ({"score": 1, "mask_sample": 1}, "mask_sample = 1 is not true or false"),
        ({"score": 1, "spans": "all"}, "spans = 'all' is not a list"),
        ({"score": 1, "spans": {"advantage": 1}}, "is not a list; give a list of mappings"),
        ({"score": 1, "spans": [(0, 3, 1.0)]}, "must be a mapping with the key 'advantage'"),
        ({"score": 1, "spans": [{"start": 0, "end": 1}]}, "with the key 'advantage'"),
        ({"score": 1, "spans": [{"advantage": 1, "stop": 1}]}, "and of 'start', 'end' and 'name'"),
        ({"score": 1, "spans": [{"advantage": float("nan")}]}, "not finite"),
        ({"score": 1, "spans": [{"advantage": 1, "start": 0}]}, "both start and end, or neither"),
        ({"score": 1, "spans": [dict(advantage=1, start=0, end=4)]}, "0 <= start <= end <= 3"),
        ({"score": 1, "spans": [dict(advantage=1, start=-1, end=2)]}, "0 <= start"),
        ({"score": 1, "spans": [dict(advantage=1, start=0.5, end=2)]}, "whole numbers"),
    ],
)
def test_refused(returned, message):
    with pytest.raises(ValueError, match=message):
        verdicts.read(returned, 3)


@pytest.mark.parametrize("workers", [0, 1])
def test_flags_of_several_components_arrive_in_their_order(workers, caplog):
    components = (
        RewardComponent(FLAGS, "second", params={"advantage": -2.0}),
        RewardComponent(FLAGS, "first", params={"advantage": -1.0}),
    )
    with Scorer(RewardConfig(components, workers=workers)) as scorer:
        examples = [Example("q"), Example("q"), Example("q", metadata={"mask_sample": True})]
        scores = scorer.score(examples, ["a bad end", "masked", "fine"])
    assert scores.spans == [
        (TextSpan(-2.0, 2, 5, "second"), TextSpan(-1.0, 2, 5, "first")),
        (),
        (),
    ]
    assert scores.masked.tolist() == [False, True, True]
    assert scores.valid.tolist() == [True, False, True]
    assert scores.total.tolist() == [0.0, 0.0, 2.0]
    assert scores.problems == {}  # to mask without a score is no problem

    rows = np.array([1, 0])
    taken = scores.take(rows)
    assert taken.spans == [(), scores.spans[0]] and taken.masked.tolist() == [True, False]
    both = scores.join([taken, scores])
    assert both.spans == taken.spans + scores.spans
    assert both.masked.tolist() == [True, False, False, True, True]
