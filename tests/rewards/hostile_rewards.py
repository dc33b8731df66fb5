"""Rewards that misbehave on demand: the completion says how."""

import os
import signal
import sys
import time


def act(sample, bonus=0.0):
    """Do what the completion asks for; otherwise score its number."""
    return {
        "raise": _raise,
        "hang": _hang,
        "compute outside python": _compute_outside_python,
        "wait outside python": _wait_outside_python,
        "swallow": _swallow,
        "die": lambda: os._exit(3),
        "nan": lambda: float("nan"),
        "inf": lambda: float("inf"),
        "none": lambda: None,
        "text": lambda: "not a number",
        "hog": lambda: bytearray(1 << 40)[0],
        "print": lambda: print("in the way") or 0.5,
        "jax": lambda: float("jax" in sys.modules),
        "zero score": lambda: {"score": 0.0, "reward": 0.7},
        "no score": lambda: {"score": None, "reward": 0.7},
        "recurse": _recurse,
        "slow": lambda: time.sleep(0.2) or 1.0,
    }.get(sample.completion, lambda: float(sample.completion) + bonus)()


def always_one(sample):
    """Score 1."""
    return 1.0


def needs_task(sample, table):
    """Look the answer up."""
    return table[sample.example.answer]


class Counter:
    """A reward with state: built once in each worker."""

    def __init__(self, start):
        self.value = start

    def __call__(self, sample):
        self.value += 1
        return float(self.value)


def _raise():
    raise KeyError("oh no")


def _hang():
    while True:
        pass


def _swallow():
    while True:
        try:
            _hang()  # a broad handler must not swallow the time limit
        except Exception:
            pass


def _compute_outside_python():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
    _hang()


def _wait_outside_python():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
    time.sleep(600)


def _recurse():
    return _recurse()


def flags(sample, advantage):
    """Flag the word "bad", and mask a completion that says so."""
    if sample.completion == "masked":
        return {"mask_sample": True}
    start = sample.completion.find("bad")
    spans = [{"advantage": advantage, "start": start, "end": start + 3}] if start >= 0 else []
    return {"score": float(not spans), "spans": spans}
