"""Wrong arrays end in one clear error; too many packed sequences never go unnoticed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_cases import random_case

from grpo_jax import clipped_pg_loss
from grpo_jax.core import masks
from grpo_jax.core.loss_config import LossConfig

CONFIG = LossConfig(reference_policy_kl_penalty=0.0)


def case():
    return random_case(0, support=False, dtype=np.float32)


WRONG = {
    "row": (
        "advantages",
        lambda x: x[:, 0],
        r"batch.advantages has shape \(4,\), but batch.tokens",
    ),
    "column": ("advantages", lambda x: x[:, :1], r"batch.advantages has shape \(4, 1\)"),
    "next": ("prev_logprobs", lambda x: x[:, 1:], "put the score of token t at index t"),
    "more rows": ("generation_logprobs", lambda x: x[:3], "generation_logprobs has shape"),
    "weights": ("sample_weights", lambda x: x[:, 0], "spread a number a row over its tokens"),
    "integers": ("prev_logprobs", lambda x: x.astype(int), "prev_logprobs has type int32; convert"),
    "flags": ("advantages", lambda x: x > 0, "advantages has type bool"),
    "complex": ("advantages", lambda x: x + 0j, "advantages has type complex64"),
    "a list": ("advantages", lambda x: x.tolist(), "batch.advantages is a list"),
    "segments": ("segment_ids", lambda x: x * 1.0, "segment_ids has type float32; it must be"),
    "mask of 2": ("token_mask", lambda x: x * 2.0, r"from 0 to 2; it must lie in \[0, 1\]"),
    "mask of -1": ("token_mask", lambda x: -1.0 * x, "token_mask holds values from -1"),
    "weight": ("sample_weights", lambda x: -x, "sample_weights holds -1; a negative weight"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_array_is_named(name):
    field, change, message = WRONG[name]
    scores, batch = case()
    counts = masks.count(batch)
    changed = batch.replace(**{field: change(getattr(batch, field))})
    with pytest.raises(ValueError, match=message):
        clipped_pg_loss(scores, changed, counts, CONFIG)


def test_wrong_scores_and_counts_are_named():
    scores, batch = case()
    counts = masks.count(batch)
    short = scores._replace(logprobs=scores.logprobs[:, 1:])
    with pytest.raises(ValueError, match=r"scores.logprobs has shape \(4, 6\)"):
        clipped_pg_loss(short, batch, counts, CONFIG)
    whole = scores._replace(logprobs=scores.logprobs.astype(int))
    with pytest.raises(ValueError, match="scores.logprobs has type int32"):
        jax.eval_shape(lambda s: clipped_pg_loss(s, batch, counts, CONFIG), whole)
    per_row = counts._replace(tokens=jnp.ones(4))
    with pytest.raises(ValueError, match=r"counts.tokens has shape \(4,\); it is one number"):
        clipped_pg_loss(scores, batch, per_row, CONFIG)
    flat = jax.tree.map(lambda x: x[0], (scores, batch))
    with pytest.raises(ValueError, match=r"batch.tokens has shape \(7,\); it must be"):
        clipped_pg_loss(*flat, counts, CONFIG)


def test_fractional_token_masks_are_weights():
    scores, batch = case()
    half = batch.replace(token_mask=0.5 * batch.token_mask)
    one, two = (clipped_pg_loss(scores, b, masks.count(b), CONFIG)[0] for b in (batch, half))
    np.testing.assert_allclose(one, two, rtol=1e-5)


@pytest.mark.parametrize("row_block", [None, 2])
def test_too_many_sequences_in_a_row_are_refused_or_make_the_loss_nan(row_block):
    """On the host an error; inside a compiled step a NaN loss and a NaN gradient, never a skip."""
    scores, batch = case()
    second = jnp.where(jnp.arange(7)[None] > 3, 2, 1) * (batch.segment_ids > 0)
    counts = masks.count(batch)

    def loss(scores, ids, slots):
        packed = batch.replace(segment_ids=ids)
        return clipped_pg_loss(
            scores, packed, counts, CONFIG, max_segments=slots, row_block=row_block
        )

    with pytest.raises(ValueError, match="a row holds 2 sequences but max_segments=1"):
        loss(scores, second, 1)
    compiled = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=2)
    (value, metrics), grads = compiled(scores, second, 1)
    assert np.isnan(value) and np.isnan(metrics["loss"]) and np.isnan(grads.logprobs).any()
    with jax.debug_nans(True):
        (value, metrics), grads = compiled(scores, second, 2)
    assert np.isfinite(value) and value == metrics["loss"] and np.isfinite(grads.logprobs).all()
    np.testing.assert_allclose(value, loss(scores, second, 2)[0], rtol=1e-6)
