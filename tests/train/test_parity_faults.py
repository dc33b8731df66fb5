"""Whole steps with one real mistake each: the parity tool names that mistake and no other.

Two trainers share logits up to rounding. One is what the file holds, the other ("theirs") is
written here in numpy, loss and gradient, and makes the mistake itself; no number is bent by hand.
"""

import json

import numpy as np
import pytest

from grpo_jax.train import dump, parity

B, T, V = 6, 40, 30
FIRST, LAST = 6, 34  # trained columns of the longest row
CONFIG = dict(reference_policy_kl_penalty=0.0)
CAUSES = ("temperature", "support", "shift by one", "mask", "denominator")


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def top_k(z, k):
    """Logits with everything below the k-th at −inf."""
    return np.where(z >= np.sort(z, -1)[..., -k, None], z, -np.inf)


class World:
    """Logits of a step, tokens drawn from them as `sample` says, and masks of unequal length."""

    def __init__(self, sample=lambda z: z):
        rng = np.random.default_rng(0)
        self.logits = 2.0 * rng.standard_normal((B, T, V))
        p = np.exp(log_softmax(sample(self.logits)))
        self.tokens = (p.cumsum(-1) > rng.random((B, T, 1))).argmax(-1)
        self.mask = np.zeros((B, T), np.int64)
        for row in range(B):
            self.mask[row, FIRST : LAST - 3 * row] = 1
        self.advantages = np.repeat(rng.standard_normal((B, 1)), T, 1)
        rounding = lambda: 1e-3 * rng.standard_normal(self.logits.shape)  # noqa: E731
        self.trainer, self.sampler = self.logits + rounding(), self.logits + rounding()

    def score(self, logits):
        """Log-probabilities of the tokens that were drawn."""
        found = np.take_along_axis(log_softmax(logits), self.tokens[..., None], -1)[..., 0]
        return np.where(np.arange(T) > 0, found, 0.0)

    def file(self, path, generation=None, current=None, **more):
        scored = self.score(self.trainer) if current is None else current
        arrays = dict(
            config=json.dumps(CONFIG),
            next_token_logprobs=scored[:, 1:],
            prev_logprobs=scored,
            generation_logprobs=self.score(self.sampler) if generation is None else generation,
            advantages=self.advantages,
            token_mask=self.mask,
            tokens=self.tokens,
        )
        np.savez(path, **(arrays | more))
        return path

    def theirs(self, mask=None, total=None, by_row=False):
        """Loss and gradient of the on-policy step: −A at every trained token, over a count."""
        mask = self.mask if mask is None else mask
        weights = mask / mask.sum(1, keepdims=True) if by_row else mask.astype(float)
        total = weights.sum() if total is None else total
        grad = -self.advantages * weights / total
        return dict(theirs_loss=grad.sum(), theirs_grad=grad[:, 1:])


def wide_mask(world):
    mask = world.mask.copy()
    mask[:, 2:FIRST] = 1  # the end of the prompt is trained too
    return mask


def cold(z):
    return z / 0.6


def fault(name, path):
    """A file with one mistake in it, and the sentence that is to be found."""
    match name:
        case "none":
            world = World()
            return world.file(path, **world.theirs()), None
        case "temperature of the trainer":  # sampled at 0.6, scored at 1
            world = World(cold)
            found = world.file(path, generation=world.score(cold(world.sampler)), **world.theirs())
            return found, "generation grows"
        case "temperature of one pass":  # previous at 0.6 like the sampler, current at 1
            world = World(cold)
            sampled, right = world.score(cold(world.sampler)), world.score(cold(world.trainer))
            return world.file(path, generation=sampled, prev_logprobs=right), "current grows"
        case "support of the trainer":  # sampled from the 8 likeliest tokens, scored over all
            world = World(lambda z: top_k(z, 8))
            sampled = world.score(top_k(world.logits, 8))
            return world.file(path, generation=sampled, **world.theirs()), "generation looks renorm"
        case "support of the sampler":  # the trainer filters with other logits than the sampler
            world = World(lambda z: top_k(z, 8))
            sampled = world.score(top_k(world.logits, 8))
            scored = world.score(top_k(world.logits + 0.3 * np.sin(np.arange(V)), 8))
            found = world.file(path, generation=sampled, current=scored, filtering_on=np.True_)
            return found, "outside the top-k/top-p set of prev only"
        case "shift of the sampler":  # its scores start at the first token, not at the second
            world = World()
            late = np.roll(world.score(world.sampler), -1, axis=1)
            return world.file(path, generation=late, **world.theirs()), "read one token earlier"
        case "shift of the trainer":
            world = World()
            early = np.roll(world.score(world.trainer), 1, axis=1)
            return world.file(path, current=early), "shift by one: generation fits prev"
        case "mask over the prompt":
            world = World()
            total = world.mask.sum()  # else the count differs as well
            theirs = world.theirs(mask=wide_mask(world), total=total)
            return world.file(path, **theirs), f"at {4 * B} tokens that are not trained here"
        case "mask without the last token":
            world = World()
            short = world.mask * np.roll(world.mask, -1, axis=1)
            theirs = world.theirs(mask=short, total=world.mask.sum())
            return world.file(path, **theirs), f"and none at {B} tokens that are"
        case "mask over the prompt in the file":
            world = World()
            silent = np.where(world.mask != 0, world.score(world.sampler), 0.0)
            world.mask = wide_mask(world)
            return world.file(path, generation=silent), "does the mask cover the prompt"
        case "denominator of the micro-batch":  # the step is three times as large as the file
            world = World()
            n = world.mask.sum()
            found = world.file(path, global_valid_toks=3.0 * n, **world.theirs())
            return found, f"divided by {n} = trained tokens of this file and not by {3 * n} ="
        case "denominator of the padded batch":
            world = World()
            theirs = world.theirs(total=B * (T - 1))
            return world.file(path, **theirs), f"divided by {B * (T - 1)} = rows x (columns - 1)"
        case "denominator left out":
            world = World()
            return world.file(path, **world.theirs(total=1.0)), "divided by 1 = 1 (no division)"
        case "denominator of each row":
            world = World()
            return world.file(path, **world.theirs(by_row=True)), "averages inside each"
    raise AssertionError(name)


FAULTS = (
    "temperature of the trainer",
    "temperature of one pass",
    "support of the trainer",
    "support of the sampler",
    "shift of the sampler",
    "shift of the trainer",
    "mask over the prompt",
    "mask without the last token",
    "mask over the prompt in the file",
    "denominator of the micro-batch",
    "denominator of the padded batch",
    "denominator left out",
    "denominator of each row",
)


def kind(said):
    return next(cause for cause in CAUSES if said.startswith(cause))


@pytest.mark.parametrize("name", FAULTS)
def test_the_mistake_is_named_and_no_other(tmp_path, name):
    path, said = fault(name, tmp_path / "step.npz")
    report = parity.compare(dump.load_dump(path))
    assert report.causes
    assert {kind(cause) for cause in report.causes} == {kind(name.replace("shift", "shift by one"))}
    assert any(said in cause for cause in report.causes), report.causes
    with np.load(path) as file:
        has_gradient = "theirs_grad" in file
    if has_gradient and name.startswith(("mask", "denominator")):
        assert not report.agrees


def test_two_trainers_without_a_mistake_agree_and_nothing_is_named(tmp_path):
    path, _ = fault("none", tmp_path / "step.npz")
    report = parity.compare(dump.load_dump(path))
    assert report.agrees and not report.causes
    assert max(token["gap"] for token in report.tokens) < 1e-7  # the on-policy loss, in float64


def test_the_worst_token_comes_first(tmp_path):
    """One token with another advantage on their side."""
    world = World()
    theirs = world.theirs()
    theirs["theirs_grad"][2, 10 - 1] *= -3
    world.file(tmp_path / "step.npz", **theirs)
    worst = parity.compare(dump.load_dump(tmp_path / "step.npz"), worst=3).tokens
    assert (worst[0]["row"], worst[0]["column"]) == (2, 10) and worst[0]["gap"] > 0
