"""Collating: which tokens are trained, what is counted, and parts of static shape that add up."""

import jax
import numpy as np
import pytest

from grpo_jax.core import masks
from grpo_jax.data import trajectories
from grpo_jax.data.packing import PackingConfig, pack_batch
from grpo_jax.data.trajectories import collate, count

EOS = 2


def rows(n=5, width=12, seed=0):
    """Random rows whose padding equals the end token, with garbage log-probabilities there."""
    rng = np.random.default_rng(seed)
    prompts, completions = rng.integers(1, 5, n), rng.integers(1, width - 5, n)
    tokens = rng.integers(3, 50, (n, width))
    for i in range(n):
        tokens[i, prompts[i] + completions[i] - 1 :] = EOS
    inside = np.arange(width) < (prompts + completions)[:, None]
    logprobs = np.where(inside, rng.normal(size=(n, width)), np.nan)
    return tokens, prompts, completions, logprobs


def batch(n=5, width=12, seed=0, **options):
    rng = np.random.default_rng(seed + 1)
    options.setdefault("advantages", rng.normal(size=n))
    return collate(*rows(n, width, seed), **options)


def same(a, b):
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_exactly_the_generated_tokens_are_trained_with_their_advantage():
    tokens, prompts, completions, logprobs = rows()
    advantages = np.arange(1.0, 6.0)
    out = collate(tokens, prompts, completions, logprobs, advantages=advantages)
    for i in range(5):
        start, end = prompts[i], prompts[i] + completions[i]
        assert np.flatnonzero(out.token_mask[i]).tolist() == list(range(start, end))
        assert out.advantages[i].tolist() == [
            advantages[i] if start <= t < end else 0 for t in range(out.tokens.shape[1])
        ]
        assert out.generation_logprobs[i, start:end] == pytest.approx(logprobs[i, start:end])
        assert out.segment_ids[i].tolist() == [int(t < end) for t in range(out.tokens.shape[1])]
        assert out.positions[i, :end].tolist() == list(range(end))
    assert np.isfinite(out.generation_logprobs).all()  # NaN outside the completion is not read
    assert out.tokens.shape[1] == (prompts + completions).max()


def test_the_end_token_is_trained_where_padding_has_the_same_id():
    tokens = np.array([[5, 6, 7, EOS, EOS, EOS]])
    out = collate(tokens, [2], [2], np.zeros((1, 6)), advantages=[1.0], length=6)
    assert out.token_mask.tolist() == [[False, False, True, True, False, False]]
    assert out.tokens[0, 3] == EOS


def test_the_first_token_of_a_sequence_is_never_trained():
    out = collate(np.ones((1, 3)), [0], [3], np.zeros((1, 3)), advantages=[1.0])
    assert out.token_mask.tolist() == [[False, True, True]]


def test_spans_that_the_policy_did_not_write_are_left_out():
    # a b T T c of the public report: two tool tokens inside the completion
    trained = np.array([[True, True, True, False, False, True]])
    out = collate(np.ones((1, 6)), [1], [5], np.zeros((1, 6)), advantages=[1.0], trained=trained)
    assert out.token_mask.tolist() == [[False, True, True, False, False, True]]
    assert count(out).tokens == 3


def test_widths_are_static_and_rows_that_do_not_fit_are_refused():
    assert batch(length_multiple=8).tokens.shape[1] % 8 == 0
    wide, narrow = batch(length=32), batch()
    assert wide.tokens.shape[1] == 32
    width = narrow.tokens.shape[1]
    assert same(jax.tree.map(lambda x: x[:, :width], wide), narrow)
    with pytest.raises(ValueError, match="does not fit length=3; raise length"):
        batch(length=3)
    with pytest.raises(ValueError, match="claims 9 tokens but the arrays are 4 wide"):
        collate(np.ones((1, 4)), [4], [5], np.zeros((1, 4)), advantages=[0.0])
    with pytest.raises(ValueError, match="length_multiple=0 is not positive"):
        batch(length_multiple=0)


def test_counts_follow_the_formula_with_fractional_weights():
    weights, rewards = np.array([1.0, 0.0, 0.25, 1.0, 0.5]), np.array([1.0, 1.0, 0.0, -1.0, 2.0])
    _, _, completions, _ = rows()
    counts = count(batch(sample_weights=weights, rewards=rewards))
    assert counts.tokens == np.float32((weights * completions).sum())
    assert counts.sequences == np.float32(weights.sum())
    assert counts.positives == np.float32((weights * completions)[rewards > 0].sum())
    assert count(batch()).positives is None


def test_counts_above_two_to_the_24_are_rounded_once():
    """A running float32 sum would lose every single token above 2^24."""
    weights = np.array([2.0**24, 1, 1, 1, 1])
    assert np.float32(2**24) + np.float32(1) == np.float32(2**24)
    assert count(batch(sample_weights=weights)).sequences == 2**24 + 4


def test_a02_a_sequence_without_a_trained_token_does_not_count():
    trained = np.ones((5, 12), bool)
    trained[2] = False
    assert count(batch(trained=trained)).sequences == 4


def test_the_hosts_counts_equal_the_devices():
    options = {"sample_weights": np.array([1, 0, 0.25, 1, 0.5]), "rewards": np.arange(5.0) - 1}
    whole = batch(**options)
    for part, slots in ((whole, 1), (pack_batch(whole, PackingConfig(row_length=24))[0], 5)):
        device = masks.count(part, max_segments=slots)
        for host, other in zip(count(part), device, strict=True):
            assert host == other or (host is None and other is None)


def test_counts_of_an_empty_batch_are_zero():
    counts = count(batch(sample_weights=np.zeros(5)))
    assert counts.tokens == 0 and counts.sequences == 0


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_parts_have_one_shape_and_add_up_to_the_whole(size):
    whole = batch(sample_weights=np.array([1, 0, 0.25, 1, 0.5]), rewards=np.ones(5))
    parts = trajectories.split_rows(whole, size)
    assert {part.tokens.shape[0] for part in parts} == {size}
    sums = jax.tree.map(lambda *x: np.sum(x, dtype=np.float32), *map(count, parts))
    assert sums == count(whole)
    joined = jax.tree.map(lambda *x: np.concatenate(x)[:5], *parts)
    assert same(joined, whole)
    padding = jax.tree.map(lambda *x: np.concatenate(x)[5:], *parts)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(padding))


def test_parts_of_no_rows_and_too_few_rows_are_refused():
    with pytest.raises(ValueError, match="rows=0 is not positive"):
        trajectories.split_rows(batch(), 0)
    with pytest.raises(ValueError, match="5 rows, more than rows=4"):
        trajectories.pad_rows(batch(), 4)


def test_row_order_changes_nothing_but_the_order():
    tokens, prompts, completions, logprobs = rows()
    order, advantages = np.array([3, 0, 4, 1, 2]), np.arange(5.0)
    a = collate(tokens, prompts, completions, logprobs, advantages=advantages)
    b = collate(
        tokens[order], prompts[order], completions[order], logprobs[order],
        advantages=advantages[order],
    )  # fmt: skip
    assert same(trajectories.take_rows(a, order), b)
    assert count(a) == count(b)
