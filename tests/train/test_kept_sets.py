"""Kept sets that an engine reports replace the filters, from the sampler to the gradient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.core import filtering, logprobs
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.losses import LossConfig
from grpo_jax.data import trajectories
from grpo_jax.sampling.generate import Generation
from grpo_jax.train import prepare, rollout, step
from grpo_jax.train.layout import Layout
from tests.train.test_layout import (
    CONFIGS,
    LAYOUTS,
    MESH,
    PACKED,
    WHOLE,
    evaluate,
    make_batch,
    model,
)
from tests.train.test_prepare import CONFIG, rules
from tests.train.test_prepare import rollout as sampled
from tests.train.test_step import assert_same

FILTER = FilterConfig(temperature=0.8, top_k=15, top_p=0.9, min_p=0.01, vocabulary=23)
PACKED_ON_A_MESH = (Layout(PACKED, shards=4, micro_rows=1), {"mesh": MESH, "chunk_size": 3})


@functools.cache
def filtered_batch(dtype):
    """A batch under filters, and the same with the ids that they keep, in falling order."""
    batch, (policy, params) = make_batch(dtype=dtype), model(dtype)
    params = jax.tree.map(jnp.asarray, params)
    ready = logprobs.prepare(policy, params, batch.tokens, batch.positions, batch.segment_ids)
    z = filtering.scale(policy.unembed(ready.head, ready.hidden), FILTER)
    inside = np.asarray(filtering.kept(z, filtering.support(z, FILTER)))
    ids = np.sort(np.where(inside, np.arange(z.shape[-1]), -1))[..., ::-1][..., :15]
    return batch, batch.replace(kept_ids=np.where(batch.token_mask[..., None], ids, -1))


@functools.cache
def filtered(config, dtype):
    batch, _ = filtered_batch(dtype)
    return evaluate(WHOLE, CONFIGS[config], dtype, filter=FILTER, batch=batch)


CHUNKS = LAYOUTS["packed_two_rows_at_once_in_chunks"]


@pytest.mark.parametrize(
    ("place", "config", "replay"),
    [
        ((WHOLE, {}), "token_level", True),
        (CHUNKS, "token_level", False),  # single pass
        (CHUNKS, "token_level", True),
        (PACKED_ON_A_MESH, "token_level", False),  # single pass
        (PACKED_ON_A_MESH, "token_level", True),
        (PACKED_ON_A_MESH, "gspo", False),  # scores first
        (PACKED_ON_A_MESH, "gspo", True),
    ],
    ids=["whole_ids", "packed", "packed_ids", "mesh", "mesh_ids", "mesh_gspo", "mesh_gspo_ids"],
)
def test_report_a09_filters_and_replayed_sets_train_the_same_in_every_layout(
    place, config, replay, x64
):
    """Packing, chunks, the single pass, a mesh, filters or their kept ids: 1e-10 in float64."""
    layout, how = place
    batch = filtered_batch("float64")[replay]
    # Without filters beside them, ignored sets would show; the whole layout has both.
    filter = FILTER.whole if replay and how else FILTER
    found = evaluate(layout, CONFIGS[config], "float64", filter=filter, batch=batch, **how)
    wanted = filtered(config, "float64")
    assert_same(found, wanted, 1e-10)
    (loss, grads, metrics), scores = found
    assert metrics["policy_support_excluded_tokens"] > 0 and np.isneginf(scores).any()
    assert max(np.abs(g).max() for g in jax.tree.leaves(grads)) > 1e-3


@pytest.mark.parametrize("replay", [False, True], ids=["filters", "kept_ids"])
def test_filters_in_packed_chunks_on_a_mesh_in_single_precision(replay):
    """1e-6 of the loss, 1e-5 of the largest gradient."""
    layout, how = PACKED_ON_A_MESH
    batch = filtered_batch("float32")[replay]
    filter = FILTER.whole if replay else FILTER
    (loss, grads, _), _ = evaluate(
        layout, CONFIGS["token_level"], filter=filter, batch=batch, **how
    )
    (wanted, expected, _), _ = filtered("token_level", "float32")
    np.testing.assert_allclose(loss, wanted, rtol=1e-6, atol=1e-7)
    largest = max(np.abs(g).max() for g in jax.tree.leaves(expected))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * largest), grads, expected
    )


def test_kept_sets_decide_also_where_no_filter_is_configured():
    """The loss reads what it reads under filters, and the reference policy sees no set at all."""
    policy, params = model()
    _, batch = filtered_batch("float32")
    unfiltered = FilterConfig(temperature=FILTER.temperature, vocabulary=FILTER.vocabulary)
    read = [
        step.make_full_score_step(policy, LossConfig(), filter)(params, given)
        for filter, given in ((FILTER, filtered_batch("float32")[0]), (unfiltered, batch))
    ]
    assert read[0].unfiltered is not None and read[0].kept_mass is not None
    assert_same(read[1], read[0], 1e-5)
    reference = [
        step.make_score_step(policy, FILTER, unfiltered=True, chunk_size=7)(params, given)
        for given in (batch, batch.replace(kept_ids=None))
    ]
    np.testing.assert_array_equal(*reference)
    known = batch.tokens < FILTER.vocabulary
    assert np.all(np.isfinite(reference[0][known])) and np.isneginf(read[1].logprobs[known]).any()


def with_kept_ids(run, ids):
    return run._replace(rows=run.rows._replace(kept_ids=np.asarray(ids, np.int32)))


def test_kept_sets_come_from_the_engine_into_the_batch():
    """They follow their tokens through joins, selections and padding; K goes up in few steps."""
    one = with_kept_ids(sampled(), np.arange(4 * 6 * 5).reshape(4, 6, 5))
    two = with_kept_ids(sampled(), 1000 + np.arange(4 * 6 * 3).reshape(4, 6, 3))
    both = prepare.join([one, two])
    assert both.rows.kept_ids.shape == (8, 6, 5)
    chosen = prepare.take(both, np.array([4, 1, 2, 3]))
    batch = prepare.collate(chosen, prepare.weigh(chosen, rules()), CONFIG)
    assert batch.kept_ids.shape == (4, 8, 6) and batch.kept_ids.dtype == np.int32
    assert batch.kept_ids[0, 2].tolist() == [1006, 1007, 1008, -1, -1, -1]
    assert batch.kept_ids[2, 4].tolist() == [80, 81, 82, 83, 84, -1]
    assert np.all(batch.kept_ids[~np.asarray(batch.token_mask)] == -1)
    padded = trajectories.pad_rows(batch, 6)
    assert padded.kept_ids.shape == (6, 8, 6)
    parts = trajectories.split_rows(batch, 3)
    assert [part.kept_ids.shape for part in parts] == [(3, 8, 6)] * 2
    assert prepare.collate(sampled(), prepare.weigh(sampled(), rules()), CONFIG).kept_ids is None


def test_the_sequence_filter_knows_that_a_kept_set_may_leave_a_token_out():
    """Without that knowledge the −inf of the trainer would be an infinite error of its row."""
    run = with_kept_ids(sampled(), np.zeros((4, 6, 1)))
    config = dataclasses.replace(rules().filters, seq_logprob_error_threshold=2.0)
    weighed = prepare.weigh(run, rules(config))
    batch = prepare.collate(run, weighed, CONFIG)
    previous = np.array(batch.generation_logprobs)
    previous[1, 3] = -np.inf
    batch = batch.replace(prev_logprobs=previous)
    for given, dropped in ((batch, None), (batch.replace(kept_ids=None), "sequence_error")):
        prepared = prepare.finish(run, weighed, given, rules(config))
        assert prepared.dropped == [None, dropped, None, None]


def test_an_engine_that_contradicts_itself_is_refused():
    rows = sampled().rows
    kept = np.stack([np.asarray(rows.tokens), np.full((4, 6), -1)], axis=-1)
    rollout.check(rows._replace(kept_ids=kept), 2, 2)
    with pytest.raises(ValueError, match=r"kept_ids\[4, 5, 2\] for tokens\[4, 6\]"):
        rollout.check(rows._replace(kept_ids=kept[:, :5]), 2, 2)
    kept[2, 3] = 5, 6
    token = int(rows.tokens[2, 3])
    with pytest.raises(ValueError, match=f"drew token {token} at column 3 of row 2.* the 2 that"):
        rollout.check(rows._replace(kept_ids=kept), 2, 2)


def test_generation_is_a_tree_with_and_without_kept_sets():
    rows = sampled().rows
    assert len(jax.tree.leaves(rows)) == 5
    full = rows._replace(kept_ids=jnp.zeros((4, 6, 1), jnp.int32))
    assert isinstance(jax.tree.map(np.asarray, full), Generation)
