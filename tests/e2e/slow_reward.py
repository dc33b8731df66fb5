"""A reward for short completions that can be made slow, so that a test can hit a given step."""

import os
import time


def score(sample):
    """Minus the distance of the completion's length from four characters."""
    time.sleep(float(os.environ.get("REWARD_SECONDS", "0")))
    return -float(abs(len(sample.completion) - 4))
