"""What must not change the loss, its gradient or any metric, whatever the options.

The matrix is surrogate × reduction × correction.

Everything is in double precision; 1e-12 leaves room for another order of summation only. Each case
has tokens outside the policy support, a fractional sequence, an excluded one, and a hole in a
response; KL, entropy bonus and positive-example terms are on.
"""

import dataclasses
import functools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from loss_cases import assert_same, evaluate, random_case  # noqa: E402

from grpo_jax.core import diagnostics, losses, masks  # noqa: E402
from grpo_jax.core.batch import Batch, TokenScores  # noqa: E402
from grpo_jax.core.loss_config import LossConfig  # noqa: E402

pytestmark = pytest.mark.usefixtures("x64")

SURROGATES = {
    "ppo": {"ratio_clip_min": 0.1, "ratio_clip_max": 0.15},
    "dual": {"ratio_clip_c": 1.1},
    "on_policy": {"force_on_policy_ratio": True},
    "reinforce": {"disable_ppo_ratio": True},
    "cispo": {"use_cispo": True},
    "gspo": {"sequence_level_importance_ratios": True, "ratio_clip_min": 0.02},
    "sapo": {"objective": "sapo"},
    "gmpo": {"objective": "gmpo", "ratio_clip_max": 0.1},
}
REDUCTIONS = {
    "token": {},
    "sequence": {"token_level_loss": False},
    "dr_grpo": {"token_level_loss": False, "loss_normalizer": 5.0},
}


def _truncated(kind, low, high):
    return {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio_min": low,
        "truncated_importance_sampling_ratio": high,
    }


CORRECTIONS = {
    "none": {},
    "is": {"use_importance_sampling_correction": True, "use_on_policy_kl_approximation": True},
    "tis": _truncated("tis", 0.9, 1.1),
    "icepop": _truncated("icepop", 0.9, 1.1),
    "seq-mask-tis": _truncated("seq-mask-tis", 0.97, 1.2),
    "geo-rs": _truncated("geo-rs", 0.97, 1.2),
    "product-rs": _truncated("product-rs", 0.9, 1.4),
    "veto": {"use_importance_sampling_correction": True, "token_veto_threshold": 0.85},
}
TERMS = {
    "reference_policy_kl_penalty": 0.1,
    "entropy_bonus": 0.02,
    "positive_example_nll_weight": 0.1,
}


def combinations():
    """Every surrogate with every reduction; the correction rotates, so that each is met."""
    wanted = []
    for i, surrogate in enumerate(SURROGATES):
        for j, reduction in enumerate(REDUCTIONS):
            wanted.append((surrogate, reduction, list(CORRECTIONS)[(i + 3 * j) % len(CORRECTIONS)]))
    found = {}
    for names in wanted:
        options = SURROGATES[names[0]] | REDUCTIONS[names[1]] | CORRECTIONS[names[2]] | TERMS
        try:
            found["-".join(names)] = LossConfig(**options)
        except ValueError:
            continue  # an illegal combination, see test_loss_config.py
    return found


CASES = combinations()
every_case = pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())


def test_the_matrix_meets_every_switch():
    names = {part for name in CASES for part in name.split("-", 2)}
    assert {*SURROGATES, *REDUCTIONS, *CORRECTIONS} <= names
    assert len(CASES) >= 18


def take(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


@functools.lru_cache
def base_case(config):
    scores, batch = random_case(3)
    counts = masks.count(batch)
    return scores, batch, counts, evaluate(scores, batch, config, counts, filtering_on=True)


@every_case
def test_rows_can_be_removed_padded_and_permuted(config):
    scores, batch, counts, wanted = base_case(config)
    assert np.isfinite(wanted[0]) and float(jnp.abs(wanted[1].logprobs).max()) > 0
    # Row 2 has sample weight 0 and is removed, the others move, a row of padding is added.
    order = np.array([3, 0, 1])
    moved = jax.tree.map(lambda x: jnp.pad(x[order], ((0, 1), (0, 0))), (scores, batch))
    found = evaluate(*moved, config, counts, filtering_on=True)
    grads = TokenScores(*(g[:3] for g in found[1]))
    expected = TokenScores(*(g[order] for g in wanted[1]))
    assert_same((found[0], grads, found[2]), (wanted[0], expected, wanted[2]))
    assert float(jnp.abs(wanted[1].logprobs[2]).max()) == 0


@every_case
def test_micro_batches_add_up(config):
    scores, batch, counts, wanted = base_case(config)
    total, raw, grads = 0.0, None, []
    for part in (slice(0, 2), slice(2, 4)):

        def loss_fn(scores, part=part):
            rows = take(batch, part)
            return losses.clipped_pg_loss(scores, rows, counts, config, filtering_on=True)

        (loss, metrics), grad = jax.value_and_grad(loss_fn, has_aux=True)(take(scores, part))
        total += loss
        grads.append(grad)
        raw = metrics if raw is None else diagnostics.merge_metrics(raw, metrics)
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *grads)
    finished = diagnostics.finalize_metrics(raw, counts, config)
    assert_same((total, joined, finished), wanted)


@every_case
def test_packed_equals_unpacked(config):
    scores, batch, counts, wanted = base_case(config)
    width = batch.tokens.shape[1]

    def pack(x):
        # Rows 0 and 1 share a row with padding between them; rows 2 and 3 likewise.
        return x.reshape(2, 2 * width)

    second = jnp.where(batch.segment_ids > 0, jnp.asarray([[1], [2], [1], [2]], jnp.int32), 0)
    packed = jax.tree.map(pack, (scores, batch.replace(segment_ids=second)))
    found = evaluate(*packed, config, counts, filtering_on=True, max_segments=3)
    grads = TokenScores(*(g.reshape(4, width) for g in found[1]))
    assert_same((found[0], grads, found[2]), wanted)


POISONS = (np.nan, np.inf, -np.inf, 1e30, -1e30)


def poisoned(scores, batch, value, mask_dtype):
    """The same batch with `value` in every slot that carries no weight."""
    dead = ~np.asarray((batch.token_mask != 0) & (batch.sample_weights != 0))
    hit = lambda x: jnp.where(dead, value, x)  # noqa: E731
    floats = ("advantages", "generation_logprobs", "prev_logprobs", "reference_logprobs", "rewards")
    changed = {name: hit(getattr(batch, name)) for name in floats}
    padding = np.asarray(batch.segment_ids) == 0
    weights = jnp.where(padding, value, batch.sample_weights)
    batch = batch.replace(
        **changed, sample_weights=weights, token_mask=batch.token_mask.astype(mask_dtype)
    )
    return TokenScores(*(hit(x) for x in scores)), batch


@every_case
def test_what_stands_outside_the_mask_does_not_matter(config):
    scores, batch, counts, wanted = base_case(config)
    cases = [poisoned(scores, batch, value, float) for value in POISONS]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *cases)
    one = jax.vmap(lambda s, b: evaluate(s, b, config, counts, filtering_on=True))
    found = one(*stacked)
    for index, value in enumerate(POISONS):
        assert_same(take(found, index), wanted, tolerance=1e-14, context=f"poison {value}")


@pytest.mark.parametrize("name", list(CASES)[::4])
def test_a_boolean_mask_is_as_safe_as_a_float_one(name):
    scores, batch, counts, wanted = base_case(CASES[name])
    dirty = poisoned(scores, batch, np.nan, bool)
    found = evaluate(*dirty, CASES[name], counts, filtering_on=True)
    assert_same(found, wanted, tolerance=1e-14)


@pytest.mark.parametrize("name", ["on_policy-token-tis", "gmpo-dr_grpo-geo-rs"])
def test_columns_of_padding_change_nothing(name):
    config = CASES[name]
    scores, batch, counts, wanted = base_case(config)
    wide = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 3))), (scores, batch))
    found = evaluate(*wide, config, counts, filtering_on=True)
    grads = TokenScores(*(g[:, :-3] for g in found[1]))
    assert_same((found[0], grads, found[2]), wanted)


@pytest.mark.parametrize("name", list(CASES)[::7])
def test_jit_changes_nothing(name):
    config = CASES[name]
    scores, batch, counts, wanted = base_case(config)
    jitted = jax.jit(lambda s, b: evaluate(s, b, config, counts, filtering_on=True))
    assert_same(jitted(scores, batch), wanted)


@pytest.mark.parametrize("name", list(CASES)[1::7])
def test_row_blocks_change_nothing(name):
    config = CASES[name]
    scores, batch, counts, wanted = base_case(config)
    found = evaluate(scores, batch, config, counts, filtering_on=True, row_block=2)
    assert_same(found, wanted)


@pytest.mark.parametrize("name", list(CASES)[2::7])
def test_bfloat16_inputs_are_computed_in_float32(name):
    """Equal to float32 on the rounded inputs; the gradient is then rounded to 8 bits: 2^-8."""
    config = CASES[name]
    scores, batch = random_case(3, dtype=np.float32)
    narrow = lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x  # noqa: E731
    low = jax.tree.map(narrow, (scores, batch))
    widened = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, low)
    counts = masks.count(batch)
    found = evaluate(*low, config, counts, filtering_on=True)
    wanted = evaluate(*widened, config, counts, filtering_on=True)
    assert found[0].dtype == jnp.float32 and found[1].logprobs.dtype == jnp.bfloat16
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6, atol=1e-7)
    for ours, theirs in zip(found[1], wanted[1], strict=True):
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs, rtol=2**-8, atol=1e-7)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_on_policy_the_ratio_is_one_and_the_gradient_is_reinforce(reduction):
    scores, batch = random_case(5, support=False)
    batch = batch.replace(prev_logprobs=scores.logprobs)
    options = REDUCTIONS[reduction] | {"reference_policy_kl_penalty": 0.0}
    wanted = evaluate(scores, batch, LossConfig(disable_ppo_ratio=True, **options))[1]
    for switches in ({}, {"force_on_policy_ratio": True}, {"objective": "sapo"}):
        _, grads, metrics = evaluate(scores, batch, LossConfig(**switches, **options))
        np.testing.assert_allclose(grads.logprobs, wanted.logprobs, rtol=1e-14, atol=0)
        assert metrics["probs_ratio_min"] == metrics["probs_ratio_max"] == 1.0


def test_hyperparameters_can_be_mapped_over():
    scores, batch = random_case(3)
    base, counts = CASES["ppo-sequence-icepop"], masks.count(batch)
    bounds = jnp.asarray([0.05, 0.3])

    def loss_of(bound, row_block):
        config = dataclasses.replace(
            base,
            ratio_clip_max=bound,
            reference_policy_kl_penalty=bound,
            kl_input_clamp_value=bound,
        )
        loss_fn = lambda s: losses.clipped_pg_loss(  # noqa: E731
            s, batch, counts, config, filtering_on=True, row_block=row_block
        )[0]
        return jax.value_and_grad(loss_fn)(scores)

    for row_block in (None, 2):
        found = jax.vmap(lambda b, r=row_block: loss_of(b, r))(bounds)
        for index in range(2):
            loss, grads = loss_of(float(bounds[index]), None)
            np.testing.assert_allclose(found[0][index], loss, rtol=1e-12)
            np.testing.assert_allclose(found[1].logprobs[index], grads.logprobs, rtol=1e-11)


@pytest.mark.parametrize("row_block", [None, 1])
def test_shards_and_rematerialisation_change_nothing(row_block):
    config = CASES["on_policy-token-tis"]
    scores, batch, counts, wanted = base_case(config)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")

    @jax.checkpoint
    def local(scores, batch):
        return losses.clipped_pg_loss(
            scores, batch, counts, config, filtering_on=True, row_block=row_block
        )[0][None]

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(rows, rows), out_specs=rows)
    loss, grads = jax.jit(jax.value_and_grad(lambda s: jnp.sum(sharded(s, batch))))(scores)
    np.testing.assert_allclose(loss, wanted[0], rtol=1e-12)
    np.testing.assert_allclose(grads.logprobs, wanted[1].logprobs, rtol=1e-11, atol=1e-15)


def test_debug_nans_stays_quiet_on_masked_garbage():
    config = CASES["on_policy-token-tis"]
    scores, batch, counts, wanted = base_case(config)
    dirty = poisoned(scores, batch, np.nan, bool)
    with jax.debug_nans(True):
        found = evaluate(*dirty, config, counts, filtering_on=True)
    assert_same(found, wanted)
    assert isinstance(batch, Batch)
