"""Which tokens count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_cases import random_case

from grpo_jax.core import masks, reductions

pytestmark = pytest.mark.usefixtures("x64")


def test_counts_weight_tokens_and_skip_empty_sequences():
    _, batch = random_case(0, rows=4, length=7)
    # Row weights 1, .5, 0, 1; trained tokens 4, 4, 5, 4. Row 3 then loses its tokens.
    counts = masks.count(batch)
    assert (counts.tokens, counts.sequences, counts.positives) == (10.0, 2.5, 8.0)
    empty = batch.replace(token_mask=batch.token_mask.at[3].set(False))
    counts = masks.count(empty)
    assert (counts.tokens, counts.sequences, counts.positives) == (6.0, 1.5, 4.0)


def test_counts_of_a_packed_batch_are_those_of_its_rows():
    _, batch = random_case(1)
    ids = jnp.where(batch.segment_ids > 0, jnp.asarray([[1], [2], [1], [2]], jnp.int32), 0)
    packed = jax.tree.map(lambda x: x.reshape(2, -1), batch.replace(segment_ids=ids))
    assert masks.count(packed, max_segments=2) == masks.count(batch)


def test_only_negative_infinity_is_outside_the_support():
    odd = jnp.asarray([[-1.0, -jnp.inf, jnp.nan, jnp.inf]])
    fine = jnp.full((1, 4), -1.0)
    for arguments in ((odd, fine, fine), (fine, odd, fine), (fine, fine, odd), (odd, None, fine)):
        np.testing.assert_array_equal(masks.policy_support(*arguments), [[True, False, True, True]])


def test_a_sequence_without_tokens_leaves_when_masks_are_narrowed():
    _, batch = random_case(2)
    rows = reductions.Sequences(batch.segment_ids, 1)
    whole = masks.batch_masks(batch, rows, jnp.dtype(jnp.float64))
    valid = jnp.ones(batch.token_mask.shape, bool).at[0].set(False).at[1, 3].set(False)
    narrow = masks.narrow(whole, valid, rows)
    np.testing.assert_array_equal(narrow.sequences[:, 0], [0, 0.5, 0, 1])
    assert narrow.weights[0].sum() == 0 and narrow.weights[1].sum() == 1.5
    kept = masks.keep_sequences(whole, jnp.asarray([[True], [False], [True], [True]]), rows)
    np.testing.assert_array_equal(kept.sequences[:, 0], [1, 0, 0, 1])
    assert kept.weights[1].sum() == 0
    np.testing.assert_array_equal(kept.tokens, whole.tokens)


def test_garbage_weights_of_padding_do_not_count():
    _, batch = random_case(3)
    padding = batch.segment_ids == 0
    assert padding.any()
    dirty = batch.replace(sample_weights=jnp.where(padding, jnp.nan, batch.sample_weights))
    assert masks.count(dirty) == masks.count(batch)
