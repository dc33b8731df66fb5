"""The train step: how a batch is cut changes nothing, an unsound update changes nothing."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax.core import logprobs, masks
from grpo_jax.core.batch import Batch, Counts
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.losses import LossConfig
from grpo_jax.core.policy import Policy
from grpo_jax.models import transformer
from grpo_jax.models.model_config import ModelConfig
from grpo_jax.scale import flops, hlo, rules
from grpo_jax.scale.mesh import MeshConfig, make_mesh
from grpo_jax.train import micro_batches, optimizer, state, step
from grpo_jax.train.optimizer import OptimizerConfig

V, D, B, T = 12, 8, 16, 6
PLAIN = LossConfig(reference_policy_kl_penalty=0.0, metrics_level="minimal")
KL = LossConfig(metrics_level="minimal")
GSPO = dataclasses.replace(
    PLAIN, sequence_level_importance_ratios=True, token_level_loss=False, ratio_clip_min=0.3
)
MESHES = {
    "fsdp": MeshConfig(),
    "data_fsdp_tensor": MeshConfig(data=2, fsdp=2, tensor=2),
    "context_tensor": MeshConfig(fsdp=1, context=2, tensor=4),
    "fsdp_context": MeshConfig(fsdp=4, context=2),
}


def bigram_policy() -> Policy:
    """A model in which each token sees the one before it."""

    def hidden(params, tokens, positions, segment_ids):
        del positions, segment_ids
        return jnp.tanh(params["embed"]["table"][tokens] @ params["up"]["weight"].T)

    return Policy(
        hidden=hidden,
        head=lambda params: params["head"]["weight"],
        unembed=lambda head, x: x @ head.T,
    )


def make_params(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"embed": {"table": (V, D)}, "up": {"weight": (D, D)}, "head": {"weight": (V, D)}}
    return jax.tree.map(
        lambda s: 0.5 * rng.normal(size=s), shapes, is_leaf=lambda x: type(x) is tuple
    )


def make_batch(rows=B, width=T, seed=0, dtype=np.float32, vocabulary=V) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, width + 1, rows)
    inside = np.arange(width)[None] < lengths[:, None]
    logprobs_ = -rng.uniform(1, 4, (rows, width))
    return Batch(
        tokens=np.where(inside, rng.integers(0, vocabulary, (rows, width)), 0).astype(np.int32),
        segment_ids=inside.astype(np.int32),
        positions=np.where(inside, np.arange(width)[None], 0).astype(np.int32),
        token_mask=inside & (np.arange(width)[None] >= 2),
        sample_weights=np.broadcast_to(rng.integers(0, 3, (rows, 1)) / 2, (rows, width)).astype(
            dtype
        ),
        advantages=np.broadcast_to(rng.normal(size=(rows, 1)), (rows, width)).astype(dtype),
        generation_logprobs=logprobs_.astype(dtype),
        prev_logprobs=(logprobs_ + 0.1 * rng.normal(size=(rows, width))).astype(dtype),
        reference_logprobs=(logprobs_ + 0.1 * rng.normal(size=(rows, width))).astype(dtype),
    )


def make_optimizer(**settings):
    return optimizer.build_optimizer(OptimizerConfig(**({"lr": 0.01} | settings)), 100)


@functools.cache
def train_step(config=PLAIN, micro_batches=1, mesh=None, chunk_size=None, **settings):
    """The step of a bigram model, compiled once a test run, and what makes its first state."""
    opt, places = make_optimizer(**settings), None
    if mesh is not None:
        shapes = state.abstract(make_params(), opt.transform)
        places = state.placement(shapes, opt.transform, make_mesh(mesh), say=lambda text: None)
    train = step.make_train_step(
        bigram_policy(),
        opt,
        config,
        FilterConfig(),
        micro_batches=micro_batches,
        places=places,
        chunk_size=chunk_size,
    )
    return train, lambda params: state.create(params, opt.transform, places)


def run(batch, config=PLAIN, *, steps=2, params=None, **how):
    """Some updates on one batch: the last state, and the metrics of each."""
    train, create = train_step(config, **how)
    now = create(make_params() if params is None else params)
    counts, history = masks.count(batch), []
    for _ in range(steps):
        now, metrics = train(now, batch, counts)
        history.append(metrics)
    return jax.device_get(now), jax.device_get(history)


def assert_same(a, b, tolerance):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b
    )


# --- cuts of the batch ----------------------------------------------------------------------------


def test_micro_batches_add_up_to_the_batch_in_double_precision(x64):
    batch, config = make_batch(dtype=np.float64), LossConfig()
    counts = masks.count(batch)
    params = jax.tree.map(jnp.asarray, make_params())
    whole, cut = (
        step.make_gradient_step(bigram_policy(), config, FilterConfig(), micro_batches=m)(
            params, batch, counts
        )
        for m in (1, 4)
    )
    assert_same(whole, cut, 1e-10)  # loss, gradients and every metric, extrema among them
    assert whole[2]["probs_ratio_min"] < 1 < whole[2]["probs_ratio_max"]
    assert max(np.abs(g).max() for g in jax.tree.leaves(whole[1])) > 1e-3


@pytest.mark.parametrize(
    ("config", "mesh", "micro_batches", "chunk_size"),
    [
        (KL, "fsdp", 1, None),
        (KL, "data_fsdp_tensor", 2, 3),  # in a single pass
        (GSPO, "data_fsdp_tensor", 2, 3),  # in two
        (KL, "context_tensor", 2, 3),
        (GSPO, "fsdp_context", 2, 3),
    ],
)
def test_a_mesh_changes_nothing_in_double_precision(config, mesh, micro_batches, chunk_size, x64):
    batch = make_batch(dtype=np.float64)
    one = run(batch, config)
    many = run(batch, config, mesh=MESHES[mesh], micro_batches=micro_batches, chunk_size=chunk_size)
    # metrics are reported in float32, so they carry its rounding; the state does not
    assert_same(one[0], many[0], 1e-10)
    assert_same(one[1], many[1], 1e-6)


def test_filters_on_a_mesh_change_nothing_in_double_precision(x64):
    """Sequences with Dr. GRPO's constant: on the mesh in a single pass, though tokens leave."""
    kept = FilterConfig(temperature=0.9, top_k=6, top_p=0.95)
    config = LossConfig(token_level_loss=False, loss_normalizer=4.0, entropy_bonus=0.1)
    batch, params, transform = make_batch(dtype=np.float64), make_params(), make_optimizer()
    found = []
    for mesh, options in [(None, {}), (MESHES["data_fsdp_tensor"], {"chunk_size": 3})]:
        places, placed = None, batch
        if mesh is not None:
            mesh = make_mesh(mesh)
            shapes = state.abstract(params, transform.transform)
            places = state.placement(shapes, transform.transform, mesh, say=lambda text: None)
            placed, options = rules.place(batch, mesh), options | {"micro_batches": 2}
        gradient = step.make_gradient_step(bigram_policy(), config, kept, places=places, **options)
        found.append(jax.device_get(gradient(params, placed, masks.count(batch))))
    assert_same(*found, 1e-10)
    assert found[0][2]["policy_support_excluded_tokens"] > 0
    assert max(np.abs(g).max() for g in jax.tree.leaves(found[0][1])) > 1e-3


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"batch of 16 rows does not divide over 3 micro-batches"):
        run(make_batch(), micro_batches=3)
    with pytest.raises(ValueError, match=r"4 micro-batches × data×fsdp = 8; use a multiple of 32"):
        run(make_batch(), micro_batches=4, mesh=MESHES["fsdp"])


def test_rows_come_back_in_order():
    x = jnp.arange(24).reshape(12, 2)
    parts = micro_batches.split_rows(x, 3)
    np.testing.assert_array_equal(parts[1], x[1::3])
    np.testing.assert_array_equal(micro_batches.join_rows(parts), x)


@pytest.mark.parametrize("name", ["fsdp_context"])  # others: tests/scale/test_meshes.py
def test_our_own_model_on_a_mesh(name):
    config = ModelConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
    )
    batch, transform = make_batch(rows=8, vocabulary=32), make_optimizer().transform
    policy, rng = transformer.policy_for(config), np.random.default_rng(0)
    shapes = transformer.abstract_params(config)
    params = jax.tree.map(lambda s: 0.3 * rng.normal(size=s.shape).astype(s.dtype), shapes)
    found = []
    for mesh in [None, make_mesh(MESHES[name])]:
        places, placed = None, batch
        if mesh is not None:
            shapes = state.abstract(params, transform)
            places = state.placement(shapes, transform, mesh, say=lambda text: None)
            placed = rules.place(batch, mesh)
        gradient = step.make_gradient_step(policy, PLAIN, FilterConfig(), places=places)
        found.append(jax.device_get(gradient(params, placed, masks.count(batch))[:2]))
    # float32 rounding of sums in another order, relative to gradients of up to 0.1
    assert_same(*found, 1e-5)
    spec = places.state.params["layers"]["mlp"]["up"]["weight"].spec
    assert spec == jax.sharding.PartitionSpec(None, "tensor", "fsdp")


def test_the_context_axis_shares_out_the_products_of_the_layers():
    """Each of two devices computes half of the queries of a row; keys and values are collected."""
    config = ModelConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
    )
    mesh = make_mesh(MeshConfig(fsdp=1, context=2), jax.devices()[:2])
    ids = jax.ShapeDtypeStruct((2, 16), jnp.int32, sharding=rules.batch_sharding(mesh))
    hidden = jax.jit(transformer.policy_for(config).hidden)
    traced = hidden.trace(transformer.abstract_params(config), ids, ids, ids)
    read = hlo.read(traced.lower().compile().as_text(), dict(mesh.shape))
    assert read.flops == pytest.approx(flops.count(traced.jaxpr) / 2, rel=0.02)
    assert ("all-gather", "context") in {(c.kind, c.axes) for c in read.collectives}


@pytest.mark.parametrize(
    ("config", "kept", "products"),
    [
        (PLAIN, FilterConfig(), 3),
        (GSPO, FilterConfig(), 4),
        (dataclasses.replace(KL, token_level_loss=False), FilterConfig(top_k=9), 4),
    ],
)
def test_the_head_is_met_three_times_where_one_token_decides(config, kept, products):
    """The compiler counts the body of a loop once; all that is no head is 0.4 of a product."""
    size, width, chunk = 4096, 64, 32
    rng = np.random.default_rng(0)
    shapes = {"embed": {"table": (size, width)}, "up": {"weight": (width, width)}}
    shapes["head"] = {"weight": (size, width)}
    params = jax.tree.map(
        lambda s: rng.normal(size=s).astype("f4"), shapes, is_leaf=lambda x: type(x) is tuple
    )
    batch = make_batch(rows=8, width=16, vocabulary=size)
    gradient = step.make_gradient_step(bigram_policy(), config, kept, chunk_size=chunk)
    compiled = gradient.lower(params, batch, masks.count(batch)).compile()
    filters = 1.0 if kept.active else 0.0  # passes over the logits that are no products
    found = compiled.cost_analysis()["flops"] / (2 * chunk * size * width)
    assert products <= found < products + 0.6 + filters


@pytest.mark.parametrize("kept", [FilterConfig(), FilterConfig(top_k=5)])
@pytest.mark.parametrize("config", [PLAIN, KL, dataclasses.replace(KL, entropy_bonus=0.1)])
def test_a_dump_holds_exactly_what_the_loss_reads(config, kept):
    asked = step.make_full_score_step(bigram_policy(), config, kept)
    scores = jax.eval_shape(asked, make_params(), make_batch())
    assert (scores.unfiltered is not None) == (kept.active and config.kl_on)
    assert (scores.entropy is not None) == config.entropy_bonus_on
    assert scores.kept_mass is None  # these configs ask for the minimal metrics


# --- compilation and memory -----------------------------------------------------------------------


def test_the_second_step_compiles_nothing_and_keeps_its_places():
    opt, batch, params = make_optimizer(), make_batch(), make_params()
    shapes, mesh = state.abstract(params, opt.transform), make_mesh(MESHES["fsdp"])
    places = state.placement(shapes, opt.transform, mesh, say=lambda text: None)
    now = state.create(params, opt.transform, places)
    chex.clear_trace_counter()
    policy = bigram_policy()
    traced = policy._replace(hidden=chex.assert_max_traces(policy.hidden, n=1))
    train = step.make_train_step(traced, opt, PLAIN, FilterConfig(), places=places)
    counts = masks.count(batch)
    for _ in range(3):
        before, (now, _) = now, train(now, batch, counts)
        assert all(x.is_deleted() for x in jax.tree.leaves(before))  # donated
    assert train.programs == 1
    jax.tree.map(lambda x, p: np.testing.assert_(x.sharding == p), now, places.state)


def test_the_batch_survives_the_step():
    batch = jax.tree.map(jnp.asarray, make_batch())
    train, create = train_step()
    now = create(make_params())
    for _ in range(2):
        now, _ = train(now, batch, masks.count(batch))
    assert train.programs <= 2  # one for arrays of the host, one for those of the device
    assert not any(x.is_deleted() for x in jax.tree.leaves(batch))


# --- the update -----------------------------------------------------------------------------------


def test_one_update_is_gradient_clip_and_adamw():
    batch = make_batch()
    opt, (train, create) = make_optimizer(max_grad_norm=0.01), train_step(max_grad_norm=0.01)
    before = create(make_params())
    gradient = step.make_gradient_step(bigram_policy(), PLAIN, FilterConfig())
    loss, grads, _ = gradient(before.params, batch, masks.count(batch))
    updates, _ = jax.jit(opt.transform.update)(grads, before.opt_state, before.params)
    expected = jax.tree.map(np.add, before.params, updates)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(jax.device_get(grads))))
    after, metrics = train(before, batch, masks.count(batch))
    assert_same(after.params, expected, 1e-6)
    assert norm > 0.01
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)  # before the clip
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["update_norm"], optax.tree.norm(updates), rtol=1e-5)
    np.testing.assert_allclose(metrics["param_norm"], optax.tree.norm(expected), rtol=1e-5)
    np.testing.assert_allclose(metrics["tokens"], np.sum(batch.token_mask * batch.sample_weights))
    assert metrics["update_applied"] == 1 and metrics["updates_skipped"] == 0
    assert int(after.step) == 1


def test_training_raises_what_was_rewarded():
    batch = make_batch()
    batch = batch.replace(
        advantages=np.where(batch.tokens == 3, 1.0, -0.1).astype(np.float32),
        sample_weights=np.ones_like(batch.sample_weights),
    )
    after, _ = run(on_policy(batch), steps=30)
    score = step.make_score_step(bigram_policy(), FilterConfig())
    old, new = score(make_params(), batch), score(after.params, batch)
    threes = batch.token_mask & (batch.tokens == 3)
    assert threes.any() and np.all((new - old)[threes] > 0.15)


def scores_of(params, batch, kept):
    return logprobs.token_scores(
        bigram_policy(), params, batch.tokens, batch.positions, batch.segment_ids, filter=kept
    ).logprobs


@pytest.mark.parametrize(
    ("mesh", "unfiltered"), [(None, False), (None, True), (MESHES["data_fsdp_tensor"], False)]
)
def test_score_step_scores_the_trained_tokens(mesh, unfiltered):
    batch, kept = make_batch(), FilterConfig(temperature=0.7, top_k=5)
    params, places = jax.tree.map(jnp.float32, make_params()), None
    if mesh is not None:
        transform = make_optimizer().transform
        shapes = state.abstract(params, transform)
        places = state.placement(shapes, transform, make_mesh(mesh), say=lambda text: None)
    score = step.make_score_step(
        bigram_policy(), kept, unfiltered=unfiltered, micro_batches=2, places=places, chunk_size=7
    )
    expected = scores_of(params, batch, FilterConfig(temperature=0.7) if unfiltered else kept)
    expected = np.where(batch.token_mask, expected, 0)
    assert np.isneginf(expected).any() != unfiltered
    np.testing.assert_allclose(score(params, batch), expected, rtol=1e-5, atol=1e-6)


def test_a_reference_score_makes_the_first_ratio_exactly_one():
    batch = make_batch()
    params = jax.tree.map(jnp.float32, make_params())
    previous = step.make_score_step(bigram_policy(), FilterConfig())(params, batch)
    config = dataclasses.replace(PLAIN, metrics_level="full")
    batch = batch.replace(prev_logprobs=np.asarray(previous))
    gradient = step.make_gradient_step(bigram_policy(), config, FilterConfig())
    _, _, metrics = gradient(params, batch, masks.count(batch))
    assert metrics["probs_ratio_min"] == metrics["probs_ratio_max"] == 1.0


# --- updates that must not happen -----------------------------------------------------------------


def on_policy(batch):
    """A batch whose ratios start at 1, so that no token is clipped."""
    scores = scores_of(jax.tree.map(jnp.float32, make_params()), batch, FilterConfig())
    return batch.replace(prev_logprobs=np.asarray(scores))


def poisoned(batch, value):
    advantages = np.array(batch.advantages)
    row = np.flatnonzero((batch.token_mask.sum(1) > 0) & (batch.sample_weights[:, 0] > 0))[0]
    advantages[row] = value
    return batch.replace(advantages=advantages)


def assert_unchanged(after, before):
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    jax.tree.map(np.testing.assert_array_equal, after.opt_state, before.opt_state)


@pytest.mark.parametrize("value", [np.nan, np.inf, "large weights"])
def test_a_non_finite_update_changes_nothing_but_the_counters(value):
    good = on_policy(make_batch())
    config = dataclasses.replace(PLAIN, use_importance_sampling_correction=True)
    if value == "large weights":  # e^60: the loss is finite, the norm of its gradient overflows
        bad = good.replace(generation_logprobs=good.generation_logprobs - 60)
    else:
        bad = poisoned(good, value)
    train, create = train_step(config, 4, warmup_steps=10, weight_decay=0.1)
    now, first = train(create(make_params()), good, masks.count(good))
    before = jax.device_get(now)
    now, skipped = train(now, bad, masks.count(bad))
    assert_unchanged(jax.device_get(now), before)
    assert (int(now.step), int(now.skipped), int(now.updates)) == (2, 1, 1)
    assert skipped["update_applied"] == 0 and skipped["skipped_nonfinite"] == 1
    assert skipped["skipped_empty"] == 0 and skipped["updates_skipped"] == 1
    assert skipped["update_norm"] == 0
    now, third = train(now, good, masks.count(good))
    assert third["update_applied"] == 1 and np.isfinite(third["loss"])
    # the schedule stood still while the update was skipped
    assert first["learning_rate"] < skipped["learning_rate"] == third["learning_rate"]


def test_parameters_that_are_not_finite_are_noticed():
    params = make_params()
    params["up"]["weight"][0, 0] = np.nan
    after, history = run(make_batch(), PLAIN, params=params)
    assert [m["update_applied"] for m in history] == [0, 0] and after.skipped == 2


def test_p23_an_empty_batch_moves_nothing_though_momentum_and_decay_would():
    good = make_batch()
    empty = good.replace(sample_weights=np.zeros_like(good.sample_weights))
    train, create = train_step(PLAIN, 4, warmup_steps=10, weight_decay=0.1)
    now, _ = train(create(make_params()), good, masks.count(good))
    before = jax.device_get(now)
    now, metrics = train(now, empty, masks.count(empty))
    assert_unchanged(jax.device_get(now), before)
    assert metrics["skipped_empty"] == 1 and metrics["skipped_nonfinite"] == 0
    assert metrics["update_applied"] == 0 and int(now.skipped) == 1


def masked_by_sequence(kept_rows, rows=B):
    """A batch whose sampler agrees with the trainer on some rows only."""
    batch = make_batch()
    ones = np.ones_like(batch.sample_weights)
    off = np.where(np.arange(rows) < kept_rows, 0.0, 1.0)[:, None].astype(np.float32)
    previous = np.array(batch.prev_logprobs)
    return batch.replace(sample_weights=ones, generation_logprobs=previous - off)


SURVIVORS = dataclasses.replace(
    PLAIN,
    use_importance_sampling_correction=True,
    truncated_importance_sampling_type="seq-mask-tis",
    truncated_importance_sampling_ratio=1.01,
    truncated_importance_sampling_ratio_min=0.99,
    truncated_is_normalization="survivors",
)


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_survivors_as_denominator_equal_a_batch_of_survivors(beta):
    batch = masked_by_sequence(6)
    alone = batch.replace(
        sample_weights=np.where(np.arange(B)[:, None] < 6, batch.sample_weights, 0)
    )
    config = dataclasses.replace(SURVIVORS, reference_policy_kl_penalty=beta)
    gradient = step.make_gradient_step(bigram_policy(), config, FilterConfig(), micro_batches=4)
    params = jax.tree.map(jnp.float32, make_params())
    rejected = gradient(params, batch, masks.count(batch))
    removed = gradient(params, alone, masks.count(alone))
    if beta == 0:  # the rejected rows keep their KL, so only then the two are equal
        assert_same(rejected[:2], removed[:2], 1e-6)
    np.testing.assert_allclose(rejected[2]["actor_loss"], removed[2]["actor_loss"], rtol=1e-5)


def test_no_survivors_means_no_update():
    batch = masked_by_sequence(0)
    train, create = train_step(SURVIVORS, 2)
    before = create(make_params())
    copy = jax.device_get(before)
    after, metrics = train(before, batch, masks.count(batch))
    assert_unchanged(jax.device_get(after), copy)
    assert metrics["skipped_empty"] == 1 and metrics["gradient_scale"] == 0


def test_counts_of_the_whole_batch_are_used_for_each_part():
    batch, params = make_batch(), jax.tree.map(jnp.float32, make_params())
    gradient = step.make_gradient_step(bigram_policy(), PLAIN, FilterConfig())
    counts = masks.count(batch)
    twice = Counts(2 * counts.tokens, 2 * counts.sequences, counts.positives)
    np.testing.assert_allclose(
        gradient(params, batch, counts)[0], 2 * gradient(params, batch, twice)[0], rtol=1e-6
    )
