"""The compiled loss in single precision: nothing that the masks leave out reaches any number.

One program for each configuration, vmapped over batches: clean ones, the same with garbage in every
slot that carries no weight, one trained token, rows and batches without any. `jax_debug_nans` is on
throughout, so that a NaN in any output of the program is an error. What is equal in exact
arithmetic is compared at 1e-6: the same sums, and only a lane's order may differ.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_cases import evaluate, random_case

from grpo_jax.core import diagnostics, losses, masks
from grpo_jax.core.batch import Counts, TokenScores
from grpo_jax.core.loss_config import LossConfig

pytestmark = pytest.mark.slow  # a program is compiled for each configuration: some 30 s

SEQUENCE = {"token_level_loss": False}
IS = {"use_importance_sampling_correction": True}
OBJECTIVES = {
    "ppo": {},
    "dual": {"ratio_clip_c": 1.2},
    "reinforce": {"disable_ppo_ratio": True},
    "on_policy": {"force_on_policy_ratio": True},
    "cispo": {"use_cispo": True},
    "gspo": SEQUENCE | {"sequence_level_importance_ratios": True},
    "sapo": {"objective": "sapo"},
    "gmpo": SEQUENCE | {"objective": "gmpo"},
    "dr_grpo": SEQUENCE | {"loss_normalizer": 5.0},
    "checked": {
        "force_on_policy_ratio": True,
        "seq_logprob_error_in_loss": True,
        "seq_logprob_error_threshold": 1.4,
    },
}


def truncated(kind):
    return IS | {
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio_min": 0.9,
        "truncated_importance_sampling_ratio": 1.2,
    }


CORRECTIONS = {
    "none": {},
    "weights": IS,
    "tis": truncated("tis"),
    "icepop": truncated("icepop"),
    "seq-mask-tis": truncated("seq-mask-tis"),
    "geo-rs": truncated("geo-rs"),
    "product-rs": truncated("product-rs"),
    "veto": IS | {"token_veto_threshold": 0.8},
}
KLS = ("k1", "k2", "k3")
# The correction and the estimator rotate; no clamps at all with every other configuration.
TURNS = dict(
    ppo="seq-mask-tis", dual="tis", reinforce="icepop", on_policy="product-rs", cispo="weights",
    gspo="icepop", sapo="geo-rs", gmpo="veto", dr_grpo="none", checked="tis",
)  # fmt: skip


def configuration(index, objective):
    options = OBJECTIVES[objective] | CORRECTIONS[TURNS[objective]]
    options |= {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": KLS[index % 3]}
    options |= {"use_on_policy_kl_approximation": index % 2 == 0, "entropy_bonus": 0.02}
    if index % 2:
        options |= {"kl_input_clamp_value": None, "kl_output_clamp_value": None}
    if objective != "checked":
        options |= {"positive_example_nll_weight": 0.1}
    return LossConfig(**options)


CONFIGS = {name: configuration(i, name) for i, name in enumerate(OBJECTIVES)}
each = pytest.mark.parametrize("name", CONFIGS)


def test_every_correction_and_estimator_has_its_turn():
    assert set(TURNS.values()) == set(CORRECTIONS)
    assert {config.reference_policy_kl_type for config in CONFIGS.values()} == set(KLS)


GARBAGE = (np.nan, np.inf, -np.inf, 1e30, -1e30)
FLOATS = ("advantages", "generation_logprobs", "prev_logprobs", "reference_logprobs", "rewards")


def poisoned(case, value):
    """The same with `value` in every slot without weight."""
    scores, batch = case
    dead = (batch.token_mask == 0) | (batch.sample_weights == 0)
    hit = lambda x: jnp.where(dead, jnp.asarray(value, x.dtype), x)  # noqa: E731
    changed = {name: hit(getattr(batch, name)) for name in FLOATS}
    return TokenScores(*map(hit, scores)), batch.replace(**changed)


def batches(support=True):
    """name -> (scores, batch); the first of each kind is clean, its likes hold garbage."""
    scores, batch = random_case(3, support=support, dtype=np.float32)
    none = jnp.zeros_like(batch.token_mask)
    kinds = {
        "whole": batch,
        "rows": batch.replace(token_mask=batch.token_mask.at[:2].set(False)),
        "one": batch.replace(token_mask=none.at[3, 5].set(True)),
        "empty": batch.replace(token_mask=none),
        "weightless": batch.replace(sample_weights=jnp.zeros_like(batch.sample_weights)),
    }
    found = {}
    for kind, changed in kinds.items():
        found[kind, None] = clean = (scores, changed)
        for value in GARBAGE if kind == "whole" else (np.nan, 1e30):
            found[kind, value] = poisoned(clean, value)
    return found


def narrow(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x, tree)


@functools.lru_cache
def evaluated(name, dtype):
    """(kind, garbage) -> loss, gradients, finished metrics; all from one compiled program."""
    cases = batches()
    config = CONFIGS[name]

    def one(scores, batch, counts):
        return evaluate(scores, batch, config, counts, filtering_on=True)

    stacked = narrow(jax.tree.map(lambda *x: jnp.stack(x), *cases.values()), dtype)
    counts = masks.count(random_case(3, dtype=np.float32)[1])
    with jax.debug_nans(True):
        results = jax.jit(jax.vmap(one, in_axes=(0, 0, None)))(*stacked, counts)
    take = lambda i: jax.tree.map(lambda x: np.asarray(x[i], np.float32), results)  # noqa: E731
    return {key: take(i) for i, key in enumerate(cases)}


IN_BFLOAT16 = [(name, jnp.bfloat16) for name in list(CONFIGS)[1::2]]


@pytest.mark.parametrize(("name", "dtype"), [(name, jnp.float32) for name in CONFIGS] + IN_BFLOAT16)
def test_garbage_outside_the_masks_changes_nothing(name, dtype):
    found = evaluated(name, dtype)
    assert len(found) == 6 + 4 * 3
    for (kind, value), (loss, grads, metrics) in found.items():
        wanted = found[kind, None]
        note = f"{kind} {value}"
        assert np.isfinite(loss), note
        for ours, theirs in zip(grads, wanted[1], strict=True):
            assert np.isfinite(ours).all(), note
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-9, err_msg=note)
        np.testing.assert_allclose(loss, wanted[0], rtol=1e-6, atol=1e-9, err_msg=note)
        for metric, number in metrics.items():
            np.testing.assert_allclose(
                number, wanted[2][metric], rtol=1e-6, atol=1e-9, err_msg=f"{note} {metric}"
            )


@each
def test_nothing_trained_is_exactly_nothing(name):
    """Loss and gradients are 0, every metric is finite but the extrema of nothing."""
    found = evaluated(name, jnp.float32)
    for kind in ("empty", "weightless"):
        loss, grads, metrics = found[kind, None]
        assert loss == 0 and not any(g.any() for g in grads)
        for metric, number in metrics.items():
            if metric.endswith(("_min", "_max")):
                assert number == (np.inf if metric.endswith("_min") else -np.inf), metric
            else:
                assert np.isfinite(number), metric
        assert metrics["gradient_scale"] in (0.0, 1.0)  # 1: the other rows of the step are there


@each
def test_one_trained_token_is_the_only_one_with_a_gradient(name):
    _, grads, metrics = evaluated(name, jnp.float32)["one", None]
    assert metrics["retained_tokens"] == 1
    at = np.zeros(grads.logprobs.shape, bool)
    at[3, 5] = True
    assert not grads.logprobs[~at].any() and not grads.unfiltered[~at].any()
    assert grads.logprobs[at] != 0 or grads.unfiltered[at] != 0


def test_micro_batches_without_rows_or_with_one_column():
    """No row at all, and a single token that has no predecessor."""
    scores, batch = random_case(3, support=False, dtype=np.float32)
    counts = Counts(jnp.float32(3.0), jnp.float32(2.0), jnp.float32(1.0))
    cuts = (np.s_[:0], np.s_[:1, :1])
    for cut in cuts:
        part = jax.tree.map(lambda x, c=cut: x[c], (scores, batch))
        for name in ("ppo", "gspo", "gmpo", "checked"):
            loss, grads, metrics = evaluate(*part, CONFIGS[name], counts, filtering_on=True)
            assert loss == 0 and not any(g.any() for g in grads)
            assert not any(np.isnan(x) for x in metrics.values())


NUMBERS = (
    "ratio_clip_min",
    "ratio_clip_max",
    "ratio_clip_c",
    "reference_policy_kl_penalty",
    "kl_input_clamp_value",
    "kl_output_clamp_value",
    "truncated_importance_sampling_ratio",
    "truncated_importance_sampling_ratio_min",
    "positive_example_nll_weight",
    "seq_logprob_error_threshold",
    "loss_normalizer",
    "sapo_temperature_positive",
    "sapo_temperature_negative",
    "token_veto_threshold",
    "entropy_bonus",
    "log_ratio_cap",
)


def test_every_number_of_the_config_is_in_the_list():
    assert set(NUMBERS) == {
        field.name for field in dataclasses.fields(LossConfig) if "float" in str(field.type)
    }


def numbers_of(config):
    return {n: float(v) for n in NUMBERS if (v := getattr(config, n)) is not None and v}


@each
def test_vmap_over_every_hyperparameter_at_once(name):
    """Two values of each number; both lanes equal the loss of ordinary numbers."""
    config, (scores, batch) = CONFIGS[name], random_case(3, dtype=np.float32)
    if name == "checked":  # legal only while the NLL is off, which a traced weight would not be
        assert config.positive_example_nll_weight == 0
    counts = masks.count(batch)
    plain = numbers_of(config)
    lanes = [plain, {n: v * (0.9 if n in ("log_ratio_cap",) else 1.05) for n, v in plain.items()}]

    def of(numbers):
        used = dataclasses.replace(config, **numbers)

        def loss_fn(s):
            return losses.clipped_pg_loss(s, batch, counts, used, filtering_on=True)[0]

        return jax.value_and_grad(loss_fn)(scores)

    mapped = jax.vmap(of)({n: jnp.asarray([lane[n] for lane in lanes]) for n in plain})
    for i, lane in enumerate(lanes):
        loss, grads = of(lane)
        np.testing.assert_allclose(mapped[0][i], loss, rtol=2e-6)
        for ours, theirs in zip(mapped[1], grads, strict=True):
            np.testing.assert_allclose(ours[i], theirs, rtol=2e-5, atol=1e-8)
    assert mapped[0][0] != mapped[0][1]


@pytest.mark.parametrize("name", list(CONFIGS)[::2])
def test_shards_under_checkpoint_add_up_to_the_whole(name):
    """`shard_map` over two devices with rematerialisation inside, garbage included."""
    config = CONFIGS[name]
    whole = evaluated(name, jnp.float32)["whole", None]
    scores, batch = poisoned(random_case(3, dtype=np.float32), np.nan)
    counts = masks.count(batch)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")

    @jax.checkpoint
    def local(scores, batch):
        loss, raw = losses.clipped_pg_loss(scores, batch, counts, config, filtering_on=True)
        return jax.tree.map(lambda x: x[None], (loss, raw))

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(rows, rows), out_specs=rows)

    def total(scores, batch):
        loss, raw = sharded(scores, batch)
        return jnp.sum(loss), diagnostics.sum_metrics(raw)

    # Placed first: JAX slices an array for its devices with operations that debug_nans looks at.
    placed = jax.device_put((scores, batch), jax.sharding.NamedSharding(mesh, rows))
    with jax.debug_nans(True):
        (loss, raw), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(*placed)
    np.testing.assert_allclose(loss, whole[0], rtol=2e-6, atol=1e-8)
    for ours, theirs in zip(grads, whole[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-8)
    metrics = diagnostics.finalize_metrics(raw, counts, config)
    for metric, number in whole[2].items():
        np.testing.assert_allclose(metrics[metric], number, rtol=1e-5, atol=1e-7, err_msg=metric)
