"""A dumped step comes back as it was, and `parity` says what is wrong with a faulty one."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

from grpo_jax.core.batch import Batch, Counts, TokenScores
from grpo_jax.core.loss_config import LossConfig
from grpo_jax.train import dump, parity

B, T = 4, 24


def make_file(path, **changes):
    """A file as a torch trainer writes it; `changes` replace or (None) remove arrays."""
    rng = np.random.default_rng(0)
    current = -rng.exponential(1.0, (B, T)).astype(np.float32)
    near = lambda s: current + s * rng.standard_normal((B, T)).astype(np.float32)  # noqa: E731
    mask = np.zeros((B, T), np.int64)
    mask[:, 5:20] = 1
    arrays = dict(
        config=json.dumps(dict(reference_policy_kl_penalty=0.1, ratio_clip_max=0.28)),
        next_token_logprobs=current[:, 1:],
        prev_logprobs=near(0.05),
        generation_logprobs=near(0.05),
        reference_policy_logprobs=near(0.3),
        advantages=np.repeat(rng.standard_normal((B, 1)).astype(np.float32), T, 1),
        token_mask=mask,
        sample_mask=np.ones(B, np.float32),
        tokens=rng.integers(0, 99, (B, T)),
    )
    arrays = {k: v for k, v in (arrays | changes).items() if v is not None}
    np.savez(path, **arrays)
    return path


def evaluated(path):
    return parity.evaluate(dump.load_dump(path), "float64")


def printed(path, worst=5):
    stream = io.StringIO()
    console = rich.console.Console(file=stream, width=200, color_system=None)
    code = parity.main_parity(path, worst=worst, console=console)
    return code, stream.getvalue()


def test_a_sound_file_agrees(tmp_path):
    path = make_file(tmp_path / "a.npz")
    right = evaluated(path)
    theirs = dict(
        theirs_loss=right.loss,
        theirs_grad=right.grad[:, 1:].astype(np.float32),
        theirs_metrics=json.dumps(dict(probs_ratio=right.metrics["probs_ratio"])),
    )
    code, text = printed(make_file(tmp_path / "b.npz", **theirs))
    assert code == 0
    assert "likely cause: none" in text and "agrees" in text
    assert "probs_ratio" in text and "gradient norm" in text


def test_a_packed_batch_of_ours_comes_back_the_same(tmp_path):
    rng = np.random.default_rng(1)
    draw = lambda: jnp.asarray(-rng.exponential(1.0, (2, 8)).astype(np.float32))  # noqa: E731
    segments = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0, 0, 0]], jnp.int32)
    batch = Batch(
        tokens=jnp.arange(16, dtype=jnp.int32).reshape(2, 8),
        segment_ids=segments,
        positions=jnp.asarray([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 0, 0, 0]], jnp.int32),
        token_mask=jnp.asarray([[0, 0, 1, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 0, 0, 0]], bool),
        sample_weights=jnp.where(segments == 2, 0.5, jnp.where(segments == 0, 0.0, 1.0)),
        advantages=draw(),
        generation_logprobs=draw().at[0, 2].set(-jnp.inf),
        prev_logprobs=draw(),
    )
    scores = TokenScores(draw().astype(jnp.bfloat16), unfiltered=draw(), entropy=-draw())
    counts = Counts(jnp.float32(9.0), jnp.float32(4.0))
    config = LossConfig(token_level_loss=False, reference_policy_kl_penalty=0.0)
    path = tmp_path / "deep" / "step.npz"
    assert dump.dump_step(path, batch, counts, scores, config, filtering_on=True) == path
    assert [p.name for p in path.parent.iterdir()] == ["step.npz"]
    back = dump.load_dump(path)
    assert back.config == config and back.filtering_on and back.max_segments == 2
    assert not back.notes
    for a, b in zip(jax.tree.leaves(batch), jax.tree.leaves(back.batch), strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)
    np.testing.assert_array_equal(np.asarray(scores.logprobs, np.float32), back.scores.logprobs)
    assert float(back.counts.tokens) == 9 and float(back.counts.sequences) == 4
    assert np.isfinite(parity.evaluate(back, "float32").loss)


def test_without_scores_the_previous_log_probabilities_stand_in(tmp_path):
    whole = dump.load_dump(make_file(tmp_path / "a.npz"))
    path = dump.dump_step(tmp_path / "b.npz", whole.batch, whole.counts, None, whole.config)
    back = dump.load_dump(path)
    np.testing.assert_array_equal(back.scores.logprobs, whole.batch.prev_logprobs)
    _, text = printed(path)
    assert "the previous ones stand in" in text


def test_a_non_finite_step_is_reported_and_its_token_comes_first(tmp_path):
    fine = dump.load_dump(make_file(tmp_path / "a.npz"))
    broken = np.asarray(fine.scores.logprobs).copy()
    broken[2, 9] = np.nan
    code, text = printed(make_file(tmp_path / "b.npz", next_token_logprobs=broken[:, 1:]))
    assert code == 1 and "DIFFERS" in text
    worst = parity.compare(dump.load_dump(tmp_path / "b.npz"), worst=3).tokens[0]
    assert (worst["row"], worst["column"]) == (2, 9)


def test_the_support_mask_means_minus_infinity(tmp_path):
    mask = np.ones((B, T - 1), bool)
    mask[1, 8] = False
    back = dump.load_dump(make_file(tmp_path / "a.npz", policy_support_mask=mask))
    assert back.filtering_on
    assert np.isneginf(back.scores.logprobs[1, 9]) and np.isneginf(back.scores.logprobs).sum() == 1


@pytest.mark.parametrize(
    "fault,said",
    [
        ("shift", "shift by one: generation fits prev"),
        ("temperature", "temperature: generation grows"),
        ("support", "support: 1 trained tokens are outside the top-k/top-p set of current only"),
        ("mask", "mask: they have a gradient at 4 tokens that are not trained here"),
        ("denominator", "as if they divided by 4 = global sequences"),
        ("reduction", "one side averages inside each sequence first"),
    ],
)
def test_each_synthetic_fault_is_named(tmp_path, fault, said):
    path = make_file(tmp_path / "a.npz")
    good, right = dump.load_dump(path), evaluated(path)
    generation, grad = good.batch.generation_logprobs, right.grad.copy()
    changes = {}
    if fault == "shift":
        changes["generation_logprobs"] = np.roll(generation, 1, axis=1)
    elif fault == "temperature":
        changes["generation_logprobs"] = 1.5 * generation
    elif fault == "support":
        current = good.scores.logprobs[:, 1:].copy()
        current[0, 7] = -np.inf
        changes |= dict(next_token_logprobs=current, filtering_on=np.asarray(True))
        changes |= dict(curr_logprobs_unfiltered=good.scores.logprobs[:, 1:])
    elif fault == "mask":
        grad[:, 4] = grad[:, 6]
        changes["theirs_grad"] = grad
    elif fault == "denominator":
        changes |= dict(theirs_grad=grad * 60 / 4, theirs_loss=right.loss * 60 / 4)
    elif fault == "reduction":
        changes["theirs_grad"] = grad * np.array([[0.5], [1.0], [2.0], [3.0]])
    code, text = printed(make_file(tmp_path / "b.npz", **changes))
    assert said in text
    assert code == (0 if fault in ("shift", "temperature", "support") else 1)


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(config=None), "config .JSON text. is missing"),
        (dict(token_mask=None), "token_mask .B, T. is missing"),
        (dict(token_mask=np.ones(B)), "token_mask has shape .4,., not"),
        (dict(advantages=None), "advantages .B, T. is missing"),
        (
            dict(advantages=np.ones((B, T - 1))),
            r"advantages has shape \(4, 23\), must be \(4, 24\)",
        ),
        (dict(next_token_logprobs=None, prev_logprobs=None), "prev_logprobs .B, T. is missing"),
        (dict(advantage=np.ones((B, T))), "unknown arrays .'advantage'."),
        (dict(config=json.dumps(dict(ratio_clip=1))), "unknown loss key 'ratio_clip'"),
    ],
)
def test_an_unusable_file_says_what_is_wrong(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        dump.load_dump(make_file(tmp_path / "a.npz", **changes))


def test_a_dump_must_be_an_npz(tmp_path):
    step = dump.load_dump(make_file(tmp_path / "a.npz"))
    with pytest.raises(ValueError, match="must end in .npz"):
        dump.dump_step(tmp_path / "a.npy", step.batch, step.counts, None, step.config)
