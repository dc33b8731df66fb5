"""Small random batches for the tests of the loss."""

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.core import diagnostics, losses, masks
from grpo_jax.core.batch import Batch, TokenScores

LOGPROBS = ("prev_logprobs", "generation_logprobs", "reference_logprobs")


def random_case(seed=0, rows=4, length=7, support=True, dtype=np.float64):
    """Rows with a prompt, a hole in the response, padding, a fractional and an excluded row.

    With `support` one token of the current policy and one of the previous are −inf.
    """
    rng = np.random.default_rng(seed)
    base = -rng.exponential(1.0, (rows, length)) - 0.05
    near = lambda: base + rng.normal(0, 0.15, (rows, length))  # noqa: E731
    mask = np.zeros((rows, length), bool)
    segments = np.zeros((rows, length), np.int32)
    for row in range(rows):
        end = length - row % 2
        mask[row, 2:end] = True
        segments[row, :end] = 1
    mask[0, 4] = False
    weights = np.ones((rows, 1)) * np.array([1.0, 0.5, 0.0, 1.0])[np.arange(rows) % 4][:, None]
    current, prev = near(), near()
    if support:
        current[0, 3] = -np.inf
        prev[1, 4] = -np.inf
    array = lambda x: jnp.asarray(np.asarray(x, dtype))  # noqa: E731
    whole = lambda x: np.broadcast_to(x, (rows, length))  # noqa: E731
    batch = Batch(
        tokens=jnp.asarray(rng.integers(0, 9, (rows, length)), jnp.int32),
        segment_ids=jnp.asarray(segments),
        positions=jnp.asarray(whole(np.arange(length, dtype=np.int32))),
        token_mask=jnp.asarray(mask),
        sample_weights=array(whole(weights)),
        advantages=array(whole(rng.normal(0, 1, (rows, 1)))),
        generation_logprobs=array(near()),
        prev_logprobs=array(prev),
        reference_logprobs=array(near()),
        rewards=array(whole(np.array([1.0, 0.0, 1.0, 1.0])[np.arange(rows) % 4][:, None])),
    )
    scores = TokenScores(
        logprobs=array(current),
        unfiltered=array(near()),
        entropy=array(rng.uniform(0.1, 2.0, (rows, length))),
        kept_mass=array(rng.uniform(0.5, 1.0, (rows, length))),
    )
    return scores, batch


def evaluate(scores, batch, config, counts=None, **options):
    """Loss, gradients with respect to the scores, and finished metrics."""
    if counts is None:
        counts = masks.count(batch, max_segments=options.get("max_segments", 1))

    def loss_fn(scores):
        return losses.clipped_pg_loss(scores, batch, counts, config, **options)

    (loss, raw), grads = jax.value_and_grad(loss_fn, has_aux=True)(scores)
    return loss, grads, diagnostics.finalize_metrics(raw, counts, config)


SHAPE = (10, 10)


def evaluate_small(scores, batch, config, counts=None, **options):
    """`evaluate` at one padded shape, so that eager operations are compiled once for all tests."""
    rows, length = batch.tokens.shape
    counts = (
        masks.count(batch, max_segments=options.get("max_segments", 1))
        if counts is None
        else counts
    )
    missing = ((0, max(0, SHAPE[0] - rows)), (0, max(0, SHAPE[1] - length)))
    padded = jax.tree.map(lambda x: jnp.pad(x, missing), (scores, batch))
    loss, grads, metrics = evaluate(*padded, config, counts, **options)
    return loss, jax.tree.map(lambda g: g[:rows, :length], grads), metrics


def assert_same(found, wanted, tolerance=1e-12, rows=None, context=""):
    """Loss, every gradient (of `rows`) and every metric agree."""
    np.testing.assert_allclose(found[0], wanted[0], rtol=tolerance, atol=tolerance, err_msg=context)
    for ours, theirs in zip(found[1], wanted[1], strict=True):
        ours = np.asarray(ours) if rows is None else np.asarray(ours)[rows]
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance, err_msg=context)
    assert found[2].keys() == wanted[2].keys()
    for name, value in wanted[2].items():
        np.testing.assert_allclose(
            found[2][name], value, rtol=tolerance, atol=tolerance, err_msg=f"{context} {name}"
        )
