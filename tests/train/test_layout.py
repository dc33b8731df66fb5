"""Packing, token budgets and shards: how sequences lie on the devices changes no number."""

import functools

import jax
import numpy as np
import pytest

from grpo_jax import build
from grpo_jax import config as configs
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.losses import LossConfig
from grpo_jax.data import trajectories
from grpo_jax.data.packing import PackingConfig
from grpo_jax.models import transformer
from grpo_jax.models.model_config import ModelConfig
from grpo_jax.scale import rules
from grpo_jax.scale.mesh import MeshConfig, make_mesh
from grpo_jax.train import layout as layouts
from grpo_jax.train import micro_batches, optimizer, state, step
from grpo_jax.train.layout import Layout
from grpo_jax.train.optimizer import OptimizerConfig
from grpo_jax.train.rollout import RolloutConfig
from tests.train.test_step import assert_same

MESH = MeshConfig(data=2, fsdp=2, tensor=2)
WIDTH, VOCABULARY = 12, 24
NO_FILTER = FilterConfig()
CONFIGS = {
    "gspo": LossConfig(sequence_level_importance_ratios=True, token_level_loss=False),
    "token_level": LossConfig(),
    "sequence_level": LossConfig(
        token_level_loss=False,
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="seq-mask-tis",
        truncated_importance_sampling_ratio=1.5,
        truncated_importance_sampling_ratio_min=0.5,
    ),
}
PACKED = PackingConfig(enabled=True, row_length=16, max_sequences=6)


def make_batch(rows=16, dtype=np.float32, seed=0):
    """Sequences of very different lengths, two of which have no weight, and a row of padding."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(1, 3, rows)
    completions = np.minimum(rng.geometric(0.3, rows), WIDTH - 2)
    prompts[-1] = completions[-1] = 0
    logprobs = -rng.uniform(1, 4, (rows, WIDTH)).astype(np.float32)
    weights = np.ones(rows)
    weights[:2] = 0, 0.5
    batch = trajectories.collate(
        rng.integers(0, VOCABULARY, (rows, WIDTH)),
        prompts,
        completions,
        logprobs,
        advantages=rng.normal(size=rows),
        sample_weights=weights,
        rewards=rng.normal(size=rows),
        length=WIDTH,
    )

    def near():
        noise = 0.2 * rng.normal(size=logprobs.shape)
        return np.where(batch.token_mask, logprobs + noise, 0).astype(np.float32)

    batch = batch.replace(prev_logprobs=near(), reference_logprobs=near())
    return jax.tree.map(lambda x: x.astype(dtype) if x.dtype == np.float32 else x, batch)


@functools.cache
def model(dtype="float32"):
    config = ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        param_dtype=dtype,
        compute_dtype=dtype,
    )
    rng = np.random.default_rng(0)
    shapes = transformer.abstract_params(config)
    params = jax.tree.map(lambda s: (0.3 * rng.normal(size=s.shape)).astype(dtype), shapes)
    return transformer.policy_for(config), params


def places_of(params, mesh):
    if mesh is None:
        return None
    transform = optimizer.build_optimizer(OptimizerConfig(), 10).transform
    return state.placement(
        state.abstract(params, transform), transform, make_mesh(mesh), say=lambda _: None
    )


def evaluate(
    layout, config, dtype="float32", mesh=None, chunk_size=None, filter=NO_FILTER, batch=None
):
    """Loss, gradient and metrics of the batch in a layout, and its scores back in rows."""
    policy, params = model(dtype)
    batch = make_batch(dtype=dtype) if batch is None else batch
    places, laid = places_of(params, mesh), layout.lay_out(batch)
    placed = laid.batch if places is None else rules.place(laid.batch, places.mesh)
    how = dict(micro_batches=layout.micro_batches, chunk_size=chunk_size, places=places)
    gradient = step.make_gradient_step(
        policy, config, filter, max_segments=layout.max_segments, **how
    )
    score = step.make_score_step(policy, filter, **how)
    found = gradient(params, placed, trajectories.count(batch))
    scores = laid.restore(jax.device_get(score(params, placed)), WIDTH)
    return jax.device_get(found), scores


LAYOUTS = {
    "packed": (Layout(PACKED, micro_rows=1), {}),
    "packed_two_rows_at_once_in_chunks": (Layout(PACKED, micro_rows=2), {"chunk_size": 5}),
    "token_budget": (Layout(micro_tokens=40), {}),
    "packed_in_a_token_budget_on_a_mesh": (
        Layout(PACKED, shards=4, micro_tokens=16),
        {"mesh": MESH, "chunk_size": 3},
    ),
    "token_budget_on_a_mesh": (Layout(shards=4, micro_tokens=30), {"mesh": MESH}),
}
WHOLE = Layout(micro_rows=16)


@functools.cache
def whole(config, dtype):
    return evaluate(WHOLE, CONFIGS[config], dtype)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("packed", "token_level"),
        ("packed", "sequence_level"),
        ("packed", "gspo"),
        ("packed_two_rows_at_once_in_chunks", "token_level"),
        ("token_budget", "gspo"),
        ("packed_in_a_token_budget_on_a_mesh", "sequence_level"),
        ("packed_in_a_token_budget_on_a_mesh", "gspo"),
        ("token_budget_on_a_mesh", "token_level"),
    ],
)
def test_every_layout_gives_the_same_in_double_precision(name, config, x64):
    """Loss, gradients of a real transformer, every metric, and scores back in their rows."""
    layout, how = LAYOUTS[name]
    (loss, grads, metrics), scores = evaluate(layout, CONFIGS[config], "float64", **how)
    (wanted, expected, numbers), rows = whole(config, "float64")
    assert_same((loss, grads, metrics, scores), (wanted, expected, numbers, rows), 1e-10)
    assert max(np.abs(g).max() for g in jax.tree.leaves(grads)) > 1e-3
    assert np.any(scores < 0)


@pytest.mark.parametrize(
    "name",
    ["packed", "token_budget", "packed_in_a_token_budget_on_a_mesh", "token_budget_on_a_mesh"],
)
def test_every_layout_gives_the_same_in_single_precision(name):
    """1e-6 of the loss, 1e-5 of the largest gradient."""
    layout, how = LAYOUTS[name]
    (loss, grads, metrics), _ = evaluate(layout, CONFIGS["token_level"], **how)
    (wanted, expected, numbers), _ = whole("token_level", "float32")
    np.testing.assert_allclose(loss, wanted, rtol=1e-6, atol=1e-7)
    largest = max(np.abs(g).max() for g in jax.tree.leaves(expected))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * largest), grads, expected
    )
    for key, value in numbers.items():
        np.testing.assert_allclose(metrics[key], value, rtol=2e-5, atol=1e-6, err_msg=key)


def lengths_batch(lengths, width=None):
    n, width = len(lengths), width or max(lengths)
    return trajectories.collate(
        np.ones((n, width)),
        np.minimum(lengths, 1),
        np.maximum(np.array(lengths) - 1, 0),
        np.zeros((n, width)),
        advantages=np.ones(n),
        length=width,
    )


def test_shards_hold_about_equal_real_tokens():
    """Longest first to the least loaded: they differ by less than the shortest long sequence."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(np.log(200), 0.9, 256)), 1, 2048).astype(int)
    batch = lengths_batch(lengths, 2048)
    for packed in (PackingConfig(enabled=True), PackingConfig()):
        layout = Layout(packed, shards=8, micro_rows=1)
        laid = layout.lay_out(batch)
        assert laid.shard_tokens.sum() == lengths.sum()
        found = np.asarray(laid.batch.segment_ids).reshape(8, -1)
        assert np.array_equal((found > 0).sum(axis=1), laid.shard_tokens)
        assert laid.shard_tokens.max() / laid.shard_tokens.mean() < 1.02
        numbers = layouts.report([laid])
        assert numbers["packing/imbalance"] < 0.02
        if packed.enabled:
            assert numbers["packing/fill"] > 0.9


def test_no_micro_batch_exceeds_its_tokens_and_padding_comes_last():
    batch = lengths_batch([7, 3, 5, 1, 2, 6, 0, 4], 8)
    for layout in (Layout(micro_tokens=20), Layout(PACKED, shards=2, micro_tokens=33)):
        laid = layout.lay_out(batch)
        rows, width = laid.batch.tokens.shape
        count = layout.micro_batches(rows, width)
        assert rows // count // layout.shards * width <= layout.micro_tokens
        parts = micro_batches.split_rows(laid.batch, count)
        held = np.asarray(parts.segment_ids > 0).any(axis=(1, 2))
        assert held.tolist() == [i < laid.micro_batches for i in range(count)]
        assert int(micro_batches.parts_used(parts)) == laid.micro_batches
        assert laid.restore(laid.batch.token_mask, 8).tolist() == batch.token_mask.tolist()


def test_a_run_of_different_lengths_compiles_few_programs_and_skips_padding():
    """Ten packed batches of 1 to 20 rows: one program for each of five shapes, at most."""
    policy, params = model()
    layout = Layout(PACKED, micro_rows=1)
    score = step.make_score_step(policy, FilterConfig(), micro_batches=layout.micro_batches)
    for n in (1, 2, 3, 4, 5, 6, 7, 8):
        laid = layout.lay_out(lengths_batch([12] * n))
        assert laid.micro_batches == n
        score(params, laid.batch)
    assert score.programs == 6  # 1, 2, 3, 4, 6 and 8 rows


def test_buckets_are_few():
    widths = {trajectories.bucket_length(n, 64) for n in range(1, 2049)}
    assert sorted(w // 64 for w in widths) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert all(trajectories.bucket_length(n, 64) >= n for n in range(1, 2049))


def test_an_empty_batch_trains_nothing():
    batch = jax.tree.map(np.zeros_like, make_batch())
    policy, params = model()
    for layout in (Layout(PACKED, micro_rows=1), Layout(micro_rows=8)):
        laid = layout.lay_out(batch)
        assert laid.micro_batches == 0 and layouts.report([laid])["packing/fill"] == 0
        gradient = step.make_gradient_step(
            policy, LossConfig(), FilterConfig(), micro_batches=layout.micro_batches,
            max_segments=layout.max_segments,
        )  # fmt: skip
        loss, grads, metrics = gradient(params, laid.batch, trajectories.count(batch))
        assert loss == 0 and metrics["gradient_scale"] == 0
        assert all(np.all(g == 0) for g in jax.tree.leaves(grads))


def test_what_does_not_fit_is_refused():
    batch = lengths_batch([17, 3])
    with pytest.raises(ValueError, match="sequence 0 has 17 tokens, more than the 16"):
        Layout(PACKED, micro_rows=1).lay_out(batch)
    with pytest.raises(ValueError, match="17 tokens does not fit rollout.micro_batch_tokens = 16"):
        Layout(micro_tokens=16).lay_out(batch)
    with pytest.raises(ValueError, match="give one of the two"):
        Layout(micro_rows=1, micro_tokens=4)


def test_more_sequences_than_slots_open_another_row_and_too_few_slots_are_refused():
    """Inside a compiled program a sequence beyond the slots would leave the sums in silence."""
    packed = PackingConfig(enabled=True, row_length=16, max_sequences=2)
    laid = Layout(packed, micro_rows=1).lay_out(lengths_batch([3, 3, 3, 3, 3]))
    assert laid.used_rows == 3 and laid.batch.segment_ids.max() == 2
    policy, params = model()
    gradient = step.make_gradient_step(policy, LossConfig(), FilterConfig())
    with pytest.raises(ValueError, match="a row holds 2 sequences but max_segments=1"):
        gradient(params, laid.batch, trajectories.count(laid.batch))


def test_one_bound_of_a_micro_batch_is_enough():
    with pytest.raises(ValueError, match="= 2 and micro_batch_tokens = 64 both bound"):
        RolloutConfig(micro_batch_size=2, micro_batch_tokens=64)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"packing": {"enabled": True, "row_length": 64}}, "more than packing.row_length = 64"),
        ({"rollout": {"micro_batch_tokens": 100}}, "a row of 128 tokens does not fit rollout.mic"),
        (
            {"packing": {"enabled": True}, "rollout": {"micro_batch_tokens": 512}},
            "a row of 2048 tokens does not fit",
        ),
    ],
)
def test_what_can_not_fit_is_refused_before_the_run(sections, message):
    """A prompt with its completion of 70 tokens, in rows of multiples of 64."""
    config = configs.from_dict(sections)
    build._check_widths(configs.from_dict({}), Layout(micro_rows=8), 70)
    budget = config.rollout.micro_batch_tokens
    layout = Layout(config.packing, micro_rows=None if budget else 1, micro_tokens=budget)
    with pytest.raises(configs.ConfigError, match=message):
        build._check_widths(config, layout, 70)
