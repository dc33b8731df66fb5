"""The composed loss: the reference's worked example, denominators, and what is beyond it."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_cases import assert_same, random_case
from loss_cases import evaluate_small as evaluate

from grpo_jax.core import diagnostics, losses, masks
from grpo_jax.core.batch import Batch, Counts, TokenScores
from grpo_jax.core.loss_config import LossConfig

pytestmark = pytest.mark.usefixtures("x64")

IS = {"use_importance_sampling_correction": True}
OFF = {"reference_policy_kl_penalty": 0.0}


def example():
    """Three responses of at most four tokens; the third has sample weight 0."""
    wide = lambda rows: jnp.asarray(rows, jnp.float64)  # noqa: E731
    current = [[0, -0.5, -1.2, -0.3, -2.0], [0, -0.7, -0.1, -1.5, -0.4], [0, -1, -0.6, -0.2, -0.9]]
    prev = [[0, -0.6, -1, -0.3, -2.5], [0, -0.7, -0.3, -1.1, -0.4], [0, -1.3, -0.6, -0.25, -0.9]]
    gen = [
        [0, -0.62, -1.05, -0.31, -2.4],
        [0, -0.7, -0.28, -1.2, -0.41],
        [0, -1.2, -0.65, -0.2, -0.95],
    ]
    ref = [[0, -0.9, -1, -0.5, -1.5], [0, -0.8, -0.2, -1, -0.6], [0, -1.1, -0.5, -0.4, -1]]
    mask = np.array([[0, 0, 1, 1, 1], [0, 1, 1, 1, 0], [0, 1, 1, 1, 1]], bool)
    rows = lambda x: jnp.broadcast_to(wide(x)[:, None], (3, 5))  # noqa: E731
    batch = Batch(
        tokens=jnp.zeros((3, 5), jnp.int32),
        segment_ids=jnp.ones((3, 5), jnp.int32),
        positions=jnp.broadcast_to(jnp.arange(5, dtype=jnp.int32)[None], (3, 5)),
        token_mask=jnp.asarray(mask),
        sample_weights=rows([1, 1, 0]),
        advantages=rows([1.5, -0.8, 0.3]),
        generation_logprobs=wide(gen),
        prev_logprobs=wide(prev),
        reference_logprobs=wide(ref),
        rewards=rows([1, 0, 1]),
    )
    return TokenScores(wide(current)), batch


def truncated(kind, low, high):
    return IS | {
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio_min": low,
        "truncated_importance_sampling_ratio": high,
    }


SEQUENCE = {"token_level_loss": False}
GSPO = SEQUENCE | {"sequence_level_importance_ratios": True}
EXAMPLE = {
    "ppo": (OFF, -0.35182896, [0, -0.20468268, -0.25, 0, 0.13333334, 0.16285372, 0, 0]),
    "kl": (
        {},
        -0.35125020,
        [0, -0.20501600, -0.24966666, -0.00083333, 0.1335, 0.16302039, -0.00083333, 0],
    ),
    "kl-on-policy": (
        {
            "reference_policy_kl_penalty": 0.1,
            "reference_policy_kl_type": "k2",
            "use_on_policy_kl_approximation": True,
        },
        -0.34637094,
        [0, -0.20726480, -0.24629650, -0.00932391, 0.13508333, 0.16494884, -0.00463011, 0],
    ),
    "sequence": (
        SEQUENCE | {"reference_policy_kl_penalty": 0.1},
        -0.34604147,
        [0, -0.20801601, -0.24666667, -0.00833333, 0.13500002, 0.16452040, -0.00833333, 0],
    ),
    "gspo": (GSPO | OFF, -0.45467535, [0, *[-0.27629271] * 3, *[0.12473428] * 3, 0]),
    "gspo-is": (GSPO | IS | OFF, -0.39100829, [0, *[-0.26545915] * 3, *[0.13512303] * 3, 0]),
    "dual": (
        OFF | {"ratio_clip_c": 1.05},
        -0.37468269,
        [0, -0.20468268, -0.25, 0, 0.13333334, 0, 0, 0],
    ),
    "cispo": (
        OFF | {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 0.1},
        0.62855536,
        [0, -0.20468268, -0.25, -0.27500004, 0.13333334, 0.14666668, 0.08937600, 0],
    ),
    "reinforce": (
        OFF | {"disable_ppo_ratio": True},
        0.56833333,
        [0, -0.25, -0.25, -0.25, *[0.13333334] * 3, 0],
    ),
    "on-policy-is": (
        OFF | IS | {"force_on_policy_ratio": True},
        -0.44890758,
        [0, -0.21517697, -0.25251254, -0.37295622, 0.13333334, 0.15962899, 0.09877577, 0],
    ),
    "tis": (
        OFF | truncated("tis", None, 1.0),
        -0.32650492,
        [0, -0.20468268, -0.25, 0, 0.13333334, 0.15962900, 0, 0],
    ),
    "icepop": (
        OFF | truncated("icepop", 0.95, 1.05),
        0.04044979,
        [0, 0, -0.25251254, 0, 0.13333334, 0.15962900, 0, 0],
    ),
    "seq-mask-tis": (
        OFF | truncated("seq-mask-tis", 0.98, 1.02),
        -0.73914075,
        [0, -0.21517698, -0.25251254, 0, 0, 0, 0, 0],
    ),
    "vapo": (
        OFF | {"positive_example_nll_weight": 0.1},
        -0.23516229,
        [0, -0.23801601, -0.28333333, -0.03333334, 0.13333334, 0.16285372, 0, 0],
    ),
}


@pytest.mark.parametrize("name", EXAMPLE)
def test_the_worked_example(name):
    """Values of the torch reference, which were printed in float32: 1e-6."""
    options, loss, grad = EXAMPLE[name]
    found = evaluate(*example(), LossConfig(**options))
    np.testing.assert_allclose(found[0], loss, atol=1e-7, rtol=1e-6)
    wanted = np.array([*grad, 0, 0, 0, 0]).reshape(3, 4)
    np.testing.assert_allclose(found[1].logprobs[:, 1:], wanted, atol=1e-7, rtol=1e-6)
    assert not found[1].logprobs[:, 0].any()


def test_everything_masked_gives_zero_and_asks_to_skip():
    scores, batch = example()
    empty = batch.replace(sample_weights=jnp.zeros((3, 5)))
    loss, grads, metrics = evaluate(scores, empty, LossConfig(**IS))
    assert loss == 0 and not grads.logprobs.any()
    assert metrics["probs_ratio_min"] == np.inf and metrics["probs_ratio_max"] == -np.inf
    assert metrics["gradient_scale"] == 0 and metrics["num_valid_samples"] == 0
    assert np.isfinite([v for k, v in metrics.items() if not k.endswith(("_min", "_max"))]).all()


def test_dr_grpo_divides_by_its_constant_and_by_counted_sequences():
    """Σ_i m_s Σ_t loss / (L · N_seq), from numpy."""
    scores, batch = random_case(0, support=False)
    config = LossConfig(token_level_loss=False, loss_normalizer=11.0, disable_ppo_ratio=True, **OFF)
    loss, grads, _ = evaluate(scores, batch, config)
    m = np.asarray(batch.token_mask) * np.asarray(batch.sample_weights)
    wanted = -(np.asarray(batch.advantages) * np.asarray(scores.logprobs) * m).sum() / (11.0 * 2.5)
    np.testing.assert_allclose(loss, wanted, rtol=1e-7)
    np.testing.assert_allclose(
        grads.logprobs, -np.asarray(batch.advantages) * m / (11.0 * 2.5), rtol=1e-7
    )


def test_the_entropy_bonus_is_the_mean_entropy_with_its_gradient():
    scores, batch = random_case(0, support=False)
    plain = evaluate(scores, batch, LossConfig(**OFF))
    bonus = evaluate(scores, batch, LossConfig(entropy_bonus=0.3, **OFF))
    m = np.asarray(batch.token_mask) * np.asarray(batch.sample_weights)
    mean = (np.asarray(scores.entropy) * m).sum() / m.sum()
    np.testing.assert_allclose(bonus[0], plain[0] - 0.3 * mean, rtol=1e-7)
    np.testing.assert_allclose(bonus[1].entropy, -0.3 * m / m.sum(), rtol=1e-7)
    np.testing.assert_allclose(bonus[2]["entropy"], mean, rtol=1e-7)


def test_the_positive_term_does_not_depend_on_the_cut():
    scores, batch = random_case(0, support=False)
    config = LossConfig(positive_example_nll_weight=0.5, **OFF)
    counts = masks.count(batch)
    whole = evaluate(scores, batch, config, counts)[0]
    parts = [
        evaluate(*jax.tree.map(lambda x, r=r: x[r], (scores, batch)), config, counts)[0]
        for r in (slice(0, 2), slice(2, 4))
    ]
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-12)
    m = np.asarray(batch.token_mask) * np.asarray(batch.sample_weights)
    m = m * (np.asarray(batch.rewards) > 0)
    nll = -(np.asarray(scores.logprobs) * m).sum() / m.sum()
    np.testing.assert_allclose(evaluate(scores, batch, config)[2]["positive_nll_loss"], nll)


# Denominators known only after filtering.


def test_survivors_of_the_worked_example():
    config = LossConfig(
        truncated_is_normalization="survivors", **OFF, **truncated("seq-mask-tis", 0.98, 1.02)
    )
    loss, grads, metrics = evaluate(*example(), config)
    scale = metrics["gradient_scale"]
    np.testing.assert_allclose(scale, 2.0, rtol=1e-7)
    np.testing.assert_allclose(loss * scale, -1.47828150, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], -1.47828150, rtol=1e-6)
    np.testing.assert_allclose(grads.logprobs[0, 3] * scale, -0.50502508, rtol=1e-6)
    np.testing.assert_allclose(metrics["is_oob_ratio"], 0.5)
    np.testing.assert_allclose(metrics["is_oob_token_ratio"], 0.5)
    assert metrics["survivor_tokens"] == 3 and metrics["survivor_sequences"] == 1


@pytest.mark.parametrize("reduction", [{}, SEQUENCE])
def test_survivors_with_kl_leave_the_kl_alone(reduction):
    """Equal to filtering the dropped sequence out of the actor beforehand, KL as before."""
    scores, batch = example()
    gate = truncated("seq-mask-tis", 0.98, 1.02) | reduction
    beta = {"reference_policy_kl_penalty": 0.1}
    config = LossConfig(truncated_is_normalization="survivors", **beta, **gate)
    counts = masks.count(batch)
    with pytest.raises(ValueError, match="add survivor_counts over the micro-batches"):
        evaluate(scores, batch, config, counts)
    left = losses.survivor_counts(None, batch, config)
    assert left.actor == (3 if not reduction else 1) and left.rest == (6 if not reduction else 2)
    given = evaluate(scores, batch, config, counts._replace(survivors=left))
    no_kl = LossConfig(truncated_is_normalization="survivors", **OFF, **gate)
    actor = evaluate(scores, batch, no_kl, counts)
    kl_only = evaluate(scores, batch.replace(advantages=jnp.zeros((3, 5))), LossConfig(
        **beta, **reduction), counts)  # fmt: skip
    scale = actor[2]["gradient_scale"]
    np.testing.assert_allclose(given[0], actor[0] * scale + kl_only[0], rtol=1e-7)
    np.testing.assert_allclose(
        given[1].logprobs, actor[1].logprobs * scale + kl_only[1].logprobs, atol=1e-9
    )
    assert given[2]["gradient_scale"] == 1


def test_icepop_survivors_count_tokens_or_sequences_with_a_token_left():
    scores, batch = example()
    for reduction, wanted in (({}, 3.0), (SEQUENCE, 2.0)):
        config = LossConfig(
            truncated_is_normalization="survivors",
            **OFF, **truncated("icepop", 0.95, 1.05), **reduction,
        )  # fmt: skip
        assert losses.survivor_counts(None, batch, config).actor == wanted
    del scores


def test_no_survivor_means_skip():
    config = LossConfig(
        truncated_is_normalization="survivors", **OFF, **truncated("seq-mask-tis", 5.0, 6.0)
    )
    loss, grads, metrics = evaluate(*example(), config)
    assert loss == 0 and not grads.logprobs.any() and metrics["gradient_scale"] == 0
    batch_mode = dataclasses.replace(config, truncated_is_normalization="batch")
    assert evaluate(*example(), batch_mode)[2]["gradient_scale"] == 0
    with_kl = dataclasses.replace(batch_mode, reference_policy_kl_penalty=0.1)
    assert evaluate(*example(), with_kl)[2]["gradient_scale"] == 1


def test_survivor_counts_wants_scores_where_the_gate_depends_on_them():
    config = LossConfig(force_on_policy_ratio=True, **truncated("seq-mask-tis", 0.9, 1.1))
    with pytest.raises(ValueError, match="pass the scores of a forward pass"):
        losses.survivor_counts(None, example()[1], config)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_the_check_inside_the_loss_equals_filtering_before_it(beta):
    """Loss, gradient and metrics, with unsupported tokens and fractional weights about."""
    scores, batch = random_case(4)
    broken = batch.generation_logprobs.at[1, 3].add(-2.0)
    batch = batch.replace(generation_logprobs=broken)
    options = {"force_on_policy_ratio": True, "reference_policy_kl_penalty": beta, **IS}
    inside = LossConfig(seq_logprob_error_in_loss=True, seq_logprob_error_threshold=1.3, **options)
    found = evaluate(scores, batch, inside, filtering_on=True)
    before = batch.replace(sample_weights=batch.sample_weights.at[1].set(0))
    wanted = evaluate(scores, before, LossConfig(**options), filtering_on=True)
    scale = found[2]["gradient_scale"]
    assert scale > 1.05 and found[2]["num_masked_seqs_by_logprob_error"] == 0.5
    np.testing.assert_allclose(found[0] * scale, wanted[0], rtol=1e-7)
    np.testing.assert_allclose(found[1].logprobs * scale, wanted[1].logprobs, atol=1e-9)
    np.testing.assert_allclose(found[1].unfiltered * scale, wanted[1].unfiltered, atol=1e-9)
    for name in wanted[2].keys() - {"gradient_scale", "batch_tokens", "batch_sequences"}:
        np.testing.assert_allclose(found[2][name], wanted[2][name], rtol=1e-7, err_msg=name)


def test_the_check_rejects_nan_and_unfiltered_infinity():
    scores, batch = random_case(4, support=False)
    config = LossConfig(
        seq_logprob_error_in_loss=True,
        seq_logprob_error_threshold=2.0,
        force_on_policy_ratio=True,
        **OFF,
    )
    for bad, filtering_on, rejected in (
        (-np.inf, True, 0),
        (-np.inf, False, 1),
        (np.inf, True, 1),
        (np.inf, False, 1),
        (np.nan, True, 1),
        (np.nan, False, 1),
    ):
        dirty = batch.replace(generation_logprobs=batch.generation_logprobs.at[0, 3].set(bad))
        loss, grads, metrics = evaluate(scores, dirty, config, filtering_on=filtering_on)
        assert metrics["num_masked_seqs_by_logprob_error"] == rejected
        assert np.isfinite(loss) and np.isfinite(grads.logprobs).all()
        assert bool(grads.logprobs[0].any()) != bool(rejected)


# Doors.


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"prev_logprobs": None}, {}, "batch.prev_logprobs: run a score pass"),
        ({"generation_logprobs": None}, {}, "batch.generation_logprobs: have the sampler"),
        ({"reference_logprobs": None}, {}, "batch.reference_logprobs: run a reference pass"),
        ({"rewards": None}, {"positive_example_nll_weight": 0.1}, "batch.rewards"),
    ],
)
def test_missing_arrays_are_named(change, options, message):
    scores, batch = example()
    with pytest.raises(ValueError, match=message):
        evaluate(scores, batch.replace(**change), LossConfig(**options))


def test_missing_scores_and_counts_are_named():
    scores, batch = example()
    with pytest.raises(ValueError, match="scores.unfiltered: the KL term"):
        evaluate(scores, batch, LossConfig(), filtering_on=True)
    with pytest.raises(ValueError, match="scores.entropy: entropy_bonus"):
        evaluate(scores, batch, LossConfig(entropy_bonus=0.1))
    counts = Counts(jnp.asarray(6.0), jnp.asarray(2.0))
    with pytest.raises(ValueError, match="counts.positives"):
        evaluate(scores, batch, LossConfig(positive_example_nll_weight=0.1), counts)
    with pytest.raises(ValueError, match="row_block=0 must be at least 1"):
        evaluate(scores, batch, LossConfig(), row_block=0)


def test_minimal_metrics_change_no_gradient():
    scores, batch = random_case(2)
    options = {"filtering_on": True}
    full = evaluate(scores, batch, LossConfig(**IS), **options)
    small = evaluate(scores, batch, LossConfig(metrics_level="minimal", **IS), **options)
    shared = {name: full[2][name] for name in small[2]}
    assert_same((small[0], small[1], small[2]), (full[0], full[1], shared))
    assert "probs_ratio" not in small[2] and "policy_support_excluded_tokens" in small[2]


def test_every_metric_is_in_the_table():
    scores, batch = random_case(2)
    config = LossConfig(
        seq_logprob_error_in_loss=True,
        seq_logprob_error_threshold=2.0,
        force_on_policy_ratio=True,
        **truncated("tis", None, 2.0),
    )
    _, raw = losses.clipped_pg_loss(scores, batch, masks.count(batch), config, filtering_on=True)
    assert raw.keys() == diagnostics.TABLE.keys()


def test_importing_the_package_loads_nothing_heavy():
    code = """
import sys
from grpo_jax import Batch, Counts, LossConfig, Policy, clipped_pg_loss, policy_from_apply
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(found.stdout.split())
    assert {"jax", "flax"} <= loaded
    heavy = {"optax", "orbax", "transformers", "torch", "tyro", "safetensors", "tokenizers"}
    assert not heavy & loaded, heavy & loaded
