"""Where a careless loss goes wrong: one test for each numbered pitfall of the torch reference.

Wanted values are taken by hand or by a few lines of numpy in double precision.
"""

import ast
import dataclasses
import inspect
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_cases import assert_same, random_case
from loss_cases import evaluate_small as evaluate

from grpo_jax.core import arithmetic, filtering, kl, logprobs, losses, masks
from grpo_jax.core.batch import Batch, Counts, TokenScores
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.loss_config import LossConfig
from grpo_jax.core.policy import Policy

pytestmark = pytest.mark.usefixtures("x64")

OFF = {"reference_policy_kl_penalty": 0.0}
SEQUENCE = {"token_level_loss": False}
GSPO = SEQUENCE | {"sequence_level_importance_ratios": True}
IS = {"use_importance_sampling_correction": True}


def rows(
    current, *, prev=None, gen=None, ref=None, mask=None, weights=None, advantages=1.0, **more
):
    """A batch from lists of rows; what is not given equals the current log-probabilities."""
    c = jnp.asarray(current, jnp.float64)
    wide = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float64), c.shape)  # noqa: E731
    batch = Batch(
        tokens=jnp.zeros(c.shape, jnp.int32),
        segment_ids=jnp.ones(c.shape, jnp.int32),
        positions=jnp.zeros(c.shape, jnp.int32),
        token_mask=jnp.ones(c.shape, bool) if mask is None else jnp.asarray(mask, bool),
        sample_weights=wide(1.0 if weights is None else np.asarray(weights)[:, None]),
        advantages=wide(advantages),
        generation_logprobs=wide(c if gen is None else gen),
        prev_logprobs=wide(c if prev is None else prev),
        reference_logprobs=wide(c if ref is None else ref),
        **{name: wide(value) for name, value in more.items()},
    )
    return TokenScores(c), batch


def test_p01_a_masked_gap_of_300_nats_reaches_nothing():
    """exp(800) is infinite in double precision, and 0 times it is NaN in the backward pass."""
    for gap in (300.0, 800.0, np.inf, np.nan):
        scores, batch = rows([[-1.0, -2.0]], prev=[[-1.0, -2.0 - gap]], mask=[[1, 0]])
        loss, grads, metrics = evaluate(scores, batch, LossConfig(**IS))
        np.testing.assert_allclose(loss, -1.0, rtol=1e-7)
        np.testing.assert_allclose(grads.logprobs, [[-1.0, 0.0]], rtol=1e-7)
        np.testing.assert_allclose(metrics["probs_ratio"], 1.0, rtol=1e-7)
        assert abs(float(metrics["policy_kl_error"])) < 1e-12


def test_p02_an_excluded_row_with_minus_infinity_leaves_every_metric_alone():
    good = rows([[-1.0, -0.5]], prev=[[-1.1, -0.4]], gen=[[-1.2, -0.6]])
    nothing = np.full((1, 2), -np.inf)
    both = rows(
        np.concatenate([good[0].logprobs, nothing]),
        prev=np.concatenate([good[1].prev_logprobs, nothing]),
        gen=np.concatenate([good[1].generation_logprobs, nothing]),
        weights=[1.0, 0.0],
    )
    for options in (IS, GSPO | IS, {"use_cispo": True}):
        config = LossConfig(**options)
        found = evaluate(*both, config)
        wanted = evaluate(*good, config)
        cut = (found[0], (found[1].logprobs[:1],), found[2])
        assert_same(cut, (wanted[0], (wanted[1].logprobs,), wanted[2]), tolerance=1e-12)


def test_p03_an_impossible_token_is_not_a_certain_one():
    """Two tokens, the first outside the support: −1 and [0, −1], not a row ratio of e^0.35."""
    half = [[-np.log(2), -np.log(2)]]
    scores, batch = rows([[-np.inf, -np.log(2)]], prev=half, gen=half)
    loss, grads, metrics = evaluate(scores, batch, LossConfig(**GSPO, **OFF), filtering_on=True)
    np.testing.assert_allclose(loss, -1.0, rtol=1e-7)
    np.testing.assert_allclose(grads.logprobs, [[0.0, -1.0]], rtol=1e-7)
    assert metrics["policy_support_excluded_tokens"] == 1
    far = rows([[-np.inf, -1.0, -1.0]], gen=[[-5.0, -1.0, -1.0]])
    for options in (IS, IS | {"force_on_policy_ratio": True}, IS | GSPO):
        loss, _, metrics = evaluate(*far, LossConfig(**options, **OFF), filtering_on=True)
        # two tokens of three are left; a mean inside the row divides by those two
        np.testing.assert_allclose(loss, -1.0 if "token_level_loss" in options else -2 / 3)
        np.testing.assert_allclose(metrics["token_mult_prob_error"], 2 / 3)


def test_p04_the_divergence_of_two_impossible_looking_tokens_is_finite():
    """log(½ e^p + ½ e^g) underflows below −104 in float32; the true value is ½ log cosh-like."""
    for p, g in ((-110.0, -111.0), (-800.0, -801.0), (-2.0, -3.0)):
        scores, batch = rows([[p]], gen=[[g]])
        found = evaluate(scores, batch, LossConfig())[2]["js_divergence_error"]
        mix = np.logaddexp(p, g) - np.log(2)
        k3 = lambda x, m=mix: np.expm1(x - m) - (x - m)  # noqa: E731
        np.testing.assert_allclose(found, 0.5 * k3(p) + 0.5 * k3(g), rtol=1e-7)


def test_p05_sequence_weights_are_averaged_over_sequences():
    """Σ v_i m_s,i / N_seq, whatever the micro-batch; a masked row is not in it."""
    gen = [[-1.5, -1.0], [-1.0, -0.8], [-9.0, -9.0]]
    scores, batch = rows([[-1.0, -1.0]] * 3, gen=gen, weights=[1.0, 1.0, 0.0])
    config, counts = LossConfig(**GSPO, **IS), Counts(jnp.float64(4), jnp.float64(2))
    wanted = (np.exp(0.5) + np.exp(-0.2)) / 2
    whole = evaluate(scores, batch, config, counts)[2]["sampling_importance_ratio"]
    single = [
        evaluate(*jax.tree.map(lambda x, i=i: x[i : i + 1], (scores, batch)), config, counts)[2]
        for i in range(3)
    ]
    np.testing.assert_allclose(whole, wanted, rtol=1e-7)
    np.testing.assert_allclose(
        sum(m["sampling_importance_ratio"] for m in single), wanted, rtol=1e-7
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(
    "options", [{}, SEQUENCE, GSPO, {"ratio_clip_c": 3.0}, {"use_cispo": True}]
)
def test_p06_a_log_ratio_that_overflows_on_a_trained_token(options, advantage, dtype):
    """The clip wins where A > 0; where A < 0 the ratio stands at e^20 without a gradient."""
    scores, batch = rows([[-1.0, -1.0]], prev=[[-1.0, -1e5]], advantages=advantage)
    narrow = lambda x: x.astype(dtype) if x.dtype == jnp.float64 else x  # noqa: E731
    scores, batch = jax.tree.map(narrow, (scores, batch))
    loss, grads, _ = evaluate(scores, batch, LossConfig(**options, **OFF))
    assert np.isfinite(loss) and np.isfinite(grads.logprobs).all()
    if "use_cispo" in options:  # −A · 1.2 · log p
        wanted, slope = (1.0 + 1.2) / 2 * advantage, -1.2 / 2 * advantage
        np.testing.assert_allclose(grads.logprobs[0, 1], slope, rtol=1e-6)
    elif "sequence_level_importance_ratios" in options:
        wanted = -1.2 if advantage > 0 else np.exp(20.0)
        np.testing.assert_allclose(grads.logprobs, 0.0)
    else:
        large = 3.0 if "ratio_clip_c" in options else np.exp(20.0)
        wanted = -(1 + 1.2) / 2 if advantage > 0 else (1 + large) / 2
        assert grads.logprobs[0, 1] == 0
    np.testing.assert_allclose(loss, wanted, rtol=2e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_p07_an_overflowing_kl_weight_is_zero_with_zero_gradient(kind):
    options = {"use_on_policy_kl_approximation": True, "reference_policy_kl_type": kind}
    config = LossConfig(reference_policy_kl_penalty=1.0, **options)
    scores, batch = rows([[-1.0, -1.0]], gen=[[-1.0, -1000.0]], ref=[[-1.5, -1.5]], advantages=0.0)
    loss, grads, metrics = evaluate(scores, batch, config)
    value = {"k1": 0.5, "k2": 0.125, "k3": np.exp(-0.5) - 0.5}[kind]
    np.testing.assert_allclose(loss, value / 2, rtol=1e-7)
    np.testing.assert_allclose(metrics["kl_penalty"], value / 2, rtol=1e-7)
    assert grads.logprobs[0, 1] == 0 and np.isfinite(grads.logprobs).all()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_p07_the_largest_exponent_of_float32_is_over_or_finite_but_never_infinite(kind):
    """log of the largest float32 rounds up, so e to that very number is infinite."""
    edge = np.float32(np.log(np.finfo(np.float32).max))
    near = [edge, np.nextafter(edge, np.float32(0)), np.nextafter(edge, np.float32(100))]
    options = {"use_on_policy_kl_approximation": True, "reference_policy_kl_type": kind}
    single = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    for clamps in ((20.0, 10.0), (None, 10.0), (0.3, 10.0)):
        bounds = dict(zip(("kl_input_clamp_value", "kl_output_clamp_value"), clamps, strict=True))
        config = LossConfig(reference_policy_kl_penalty=1.0, **options, **bounds)
        for gap in (*near, edge - np.float32(1e-4)):
            scores, batch = rows([[0.0]], gen=[[-gap]], ref=[[-0.5]], advantages=0.0)
            cast = lambda x: single(x) if x.dtype == jnp.float64 else x  # noqa: E731
            loss, grads, _ = evaluate(*jax.tree.map(cast, (scores, batch)), config)
            assert np.isfinite(loss) and np.isfinite(grads.logprobs).all()


def test_p07_a_huge_kl_weight_at_a_token_where_the_policies_agree():
    """KL 0 times a weight of e^88: the derivative of the KL is 0, that of the product infinite."""
    scores, batch = rows([[-1.0]], gen=[[-89.0]], ref=[[-1.0]], advantages=0.0)
    cast = lambda x: x.astype(jnp.float32) if x.dtype == jnp.float64 else x  # noqa: E731
    for kind in ("k1", "k2", "k3"):
        config = LossConfig(
            reference_policy_kl_penalty=50.0,
            reference_policy_kl_type=kind,
            use_on_policy_kl_approximation=True,
        )
        loss, grads, _ = evaluate(*jax.tree.map(cast, (scores, batch)), config)
        assert loss == 0 and np.isfinite(grads.logprobs).all()


def test_p08_an_extreme_weight_is_dropped_or_truncated_and_counted():
    scores, batch = rows([[-1.0, -1.0]], gen=[[-1.0, -1000.0]])
    tis = IS | OFF | {
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 2.0,
    }  # fmt: skip
    for choice, wanted in (("drop", -0.5), ("truncate", -1.5)):
        config = LossConfig(importance_weight_overflow=choice, **tis)
        loss, _, metrics = evaluate(scores, batch, config)
        np.testing.assert_allclose(loss, wanted, rtol=1e-7)
        assert metrics["is_weight_overflow_tokens"] == 1


def test_p09_the_kl_metric_is_the_kl_and_a_negative_weight_is_refused():
    scores, batch = rows([[-1.0]], ref=[[-1.5]])
    for beta in (0.01, 3.0):
        metrics = evaluate(scores, batch, LossConfig(reference_policy_kl_penalty=beta))[2]
        np.testing.assert_allclose(metrics["kl_penalty"], np.exp(-0.5) - 0.5, rtol=1e-7)
    bad = batch.replace(reference_logprobs=jnp.full((1, 1), jnp.nan))
    assert np.isnan(evaluate(scores, bad, LossConfig())[2]["kl_penalty"])
    with pytest.raises(ValueError, match="reference_policy_kl_penalty=-0.1 must be at least 0"):
        LossConfig(reference_policy_kl_penalty=-0.1)


def test_p17_ties_of_top_p_go_to_the_smallest_ids_every_time():
    logits = jnp.asarray([1.0, 1.0, 1.0, 1.0])
    for dtype in (jnp.float32, jnp.bfloat16):
        kept = filtering.apply_filters(logits.astype(dtype), FilterConfig(top_p=0.5))
        np.testing.assert_array_equal(jnp.isfinite(kept), [True, True, False, False])


def test_p18_low_precision_logits_are_filtered_in_float32():
    """Near the cut, bfloat16 sums would keep another token than the float32 pass over them."""
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 3, (64, 97)), jnp.bfloat16)
    for options in ({"top_p": 0.7}, {"top_k": 5}, {"top_p": 0.9, "temperature": 0.7}):
        config = FilterConfig(**options)
        low = filtering.apply_filters(logits, config)
        wide = filtering.apply_filters(logits.astype(jnp.float32), config)
        assert low.dtype == jnp.float32
        np.testing.assert_array_equal(low, wide)


@pytest.mark.parametrize("chunk", [None, 2])
def test_p19_the_fused_head_divides_logits_by_the_temperature_and_not_log_probabilities(chunk):
    """log softmax(z / T), value and gradient, at T ≠ 1; dividing log softmax(z) by T is not it."""
    rng = np.random.default_rng(0)
    table, hidden = jnp.asarray(rng.normal(size=(7, 3))), jnp.asarray(rng.normal(size=(1, 5, 3)))
    tokens = jnp.asarray([[1, 4, 0, 6, 2]], jnp.int32)
    head = Policy(
        hidden=lambda params, tokens, positions, segments: hidden,
        head=lambda params: params,
        unembed=lambda head, hidden: hidden @ head.T,
    )

    def ours(table):
        scores = logprobs.token_scores(
            head, table, tokens, jnp.arange(5, dtype=jnp.int32)[None], jnp.ones_like(tokens),
            filter=FilterConfig(temperature=0.7), chunk_size=chunk,
        )  # fmt: skip
        return jnp.sum(scores.logprobs), scores.logprobs

    def wanted(table):
        z = hidden[0, :-1] @ table.T / 0.7
        return jnp.sum((z - jax.nn.logsumexp(z, -1, keepdims=True))[jnp.arange(4), tokens[0, 1:]])

    (total, found), grad = jax.value_and_grad(ours, has_aux=True)(table)
    np.testing.assert_allclose(total, wanted(table), rtol=1e-6)
    np.testing.assert_allclose(grad, jax.grad(wanted)(table), rtol=1e-5, atol=1e-6)
    z = hidden[0, :-1] @ table.T
    wrong = (z - jax.nn.logsumexp(z, -1, keepdims=True))[jnp.arange(4), tokens[0, 1:]] / 0.7
    assert float(jnp.abs(found[0, 1:] - wrong).max()) > 0.1


def test_p20_top_k_above_the_vocabulary_keeps_everything():
    logits = jnp.asarray([[0.3, -1.0, 2.0]])
    kept = filtering.apply_filters(logits, FilterConfig(top_k=100))
    np.testing.assert_allclose(kept, logits)


def test_p21_the_positive_term_keeps_its_scale_in_any_cut():
    """NLL 2 and 3 of positive tokens: 2.5 in one call or two; without rewards it is refused."""
    scores, batch = rows([[-2.0], [-3.0], [-7.0]], rewards=[[1.0], [1.0], [0.0]], advantages=0.0)
    config = LossConfig(positive_example_nll_weight=1.0, **OFF)
    counts = masks.count(batch)
    parts = [
        evaluate(*jax.tree.map(lambda x, s=s: x[s], (scores, batch)), config, counts)
        for s in (slice(0, 1), slice(1, 3))
    ]
    np.testing.assert_allclose(evaluate(scores, batch, config, counts)[0], 2.5, rtol=1e-7)
    np.testing.assert_allclose(sum(part[0] for part in parts), 2.5, rtol=1e-7)
    local = dataclasses.replace(config, positive_nll_local_count=True)
    cut = jax.tree.map(lambda x: x[:1], (scores, batch))
    np.testing.assert_allclose(evaluate(*cut, local, counts)[0], 2.0, rtol=1e-7)
    with pytest.raises(ValueError, match="batch.rewards"):
        evaluate(scores, batch.replace(rewards=None), config, counts)


def test_p22_counts_of_micro_batches_add_up():
    scores, batch = random_case(0, rows=4)
    whole = masks.count(batch)
    parts = [masks.count(jax.tree.map(lambda x, i=i: x[i : i + 1], batch)) for i in range(4)]
    for name in ("tokens", "sequences", "positives"):
        assert sum(float(getattr(part, name)) for part in parts) == float(getattr(whole, name))
    del scores


@pytest.mark.parametrize("kind", ["icepop", "seq-mask-tis"])
def test_p27_bounds_are_inside_and_what_is_dropped_stays_in_the_denominator(kind):
    """Weights e^0.2 and 1: the bound e^0.2 itself is kept, 1e-7 below it drops the first row."""
    scores, batch = rows([[-1.0], [-1.0]], gen=[[-1.2], [-1.0]])
    edge = float(np.exp(np.float64(-1.0) - np.float64(-1.2)))
    for high, kept, oob in ((edge, edge + 1, 0.0), (edge * (1 - 1e-7), 1.0, 0.5)):
        gate = {
            "truncated_importance_sampling_type": kind,
            "truncated_importance_sampling_ratio": high,
            "truncated_importance_sampling_ratio_min": 1.0,
        }
        loss, _, metrics = evaluate(scores, batch, LossConfig(**IS, **OFF, **gate))
        np.testing.assert_allclose(loss, -kept / 2, rtol=1e-7)
        np.testing.assert_allclose(metrics["is_oob_ratio"], oob)
        survivors = LossConfig(truncated_is_normalization="survivors", **IS, **OFF, **gate)
        left = evaluate(scores, batch, survivors)[2]
        np.testing.assert_allclose(left["loss"], -kept / 2 if oob == 0 else -1.0, rtol=1e-7)


def test_p28_a_product_of_weights_over_a_long_response_stays_finite():
    """2,000 tokens that differ by half a nat: e^1000 and e^−1000, dropped and counted."""
    for gap, weight, over in ((0.5, 0.0, 1), (-0.5, 0.0, 0)):
        c = np.full((1, 2000), -1.0)
        scores, batch = rows(c, gen=c - gap)
        loss, grads, metrics = evaluate(scores, batch, LossConfig(**GSPO, **IS, **OFF))
        np.testing.assert_allclose(loss, -weight)
        assert np.isfinite(grads.logprobs).all()
        assert (metrics["is_weight_overflow_tokens"] > 0) == bool(over)


def test_p29_gradients_on_a_boundary_are_torch_s():
    """A clip has derivative 1 on its bound, and equal branches of a maximum share the gradient."""
    slope = jax.grad(lambda x: arithmetic.clip_through(x, 0.8, 1.2))
    assert [float(slope(x)) for x in (0.8, 1.0, 1.2, 1.2000001, 0.7999)] == [1, 1, 1, 0, 0]
    kls = jax.grad(
        lambda x: kl.calculate_kl(x, jnp.float64(-1.0), "k1", input_clamp=1.0, output_clamp=None)
    )
    assert float(kls(jnp.float64(0.0))) == 1.0  # the log-ratio is exactly the clamp
    c = jnp.log(jnp.float64(1.2))
    scores, batch = rows([[0.0]], prev=[[-float(c)]])
    grads = evaluate(scores, batch, LossConfig(**OFF))[1]
    np.testing.assert_allclose(grads.logprobs, [[-1.2]], rtol=1e-7)


def test_p34_counts_go_on_above_two_to_the_24():
    width = (1 << 24) + 3
    ones = jnp.ones((1, width), jnp.float32)
    small = jnp.ones((1, width), jnp.int8)
    batch = Batch(
        tokens=small, segment_ids=small, positions=small, token_mask=small.astype(bool),
        sample_weights=ones, advantages=ones, generation_logprobs=ones,
    )  # fmt: skip
    # float32 holds even numbers here: 2^24 + 4 is the nearest to 2^24 + 3, a running sum gives 2^24
    assert float(masks.count(batch).tokens) == (1 << 24) + 4


REFERENCE_DEFAULTS = {
    "disable_ppo_ratio": False,
    "token_level_loss": True,
    "sequence_level_importance_ratios": False,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "reference_policy_kl_penalty": 0.01,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "use_kl_in_reward": False,
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "use_on_policy_kl_approximation": False,
    "force_on_policy_ratio": False,
    "use_cispo": False,
    "positive_example_nll_weight": 0.0,
    "seq_logprob_error_in_loss": False,
}


def test_p35_keys_and_defaults_are_the_reference_s_and_unknown_keys_are_refused():
    fields = {field.name: field.default for field in dataclasses.fields(LossConfig)}
    assert {name: fields[name] for name in REFERENCE_DEFAULTS} == REFERENCE_DEFAULTS
    assert LossConfig.from_dict(REFERENCE_DEFAULTS) == LossConfig()
    with pytest.raises(ValueError, match="did you mean 'ratio_clip_min'"):
        LossConfig.from_dict({"ratio_clip_mim": 0.2})


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, np.float32])
def test_numbers_that_come_as_arrays_are_checked_as_numbers(kind):
    assert LossConfig(ratio_clip_max=kind(0.25)).ratio_clip_max == 0.25
    assert hash(LossConfig(ratio_clip_max=kind(0.25))) == hash(LossConfig(ratio_clip_max=0.25))
    assert not LossConfig(reference_policy_kl_penalty=kind(0.0)).kl_on
    for key, value in (("ratio_clip_c", 1.0), ("ratio_clip_min", -0.5), ("ratio_clip_max", np.nan)):
        with pytest.raises(ValueError, match=key):
            LossConfig(**{key: kind(value)})
    if kind is not np.float32:
        with pytest.raises(
            ValueError, match=r"ratio_clip_max=.* has shape \(2,\); give one number"
        ):
            LossConfig(ratio_clip_max=kind([0.2, 0.3]))


def test_counts_of_more_sequences_than_slots_are_refused_or_nan():
    scores, batch = random_case(0, support=False)
    ids = batch.segment_ids.at[:, -1].set(2)
    packed, config = batch.replace(segment_ids=ids), LossConfig(**OFF)
    functions = (
        lambda b: masks.count(b),
        lambda b: losses.survivor_counts(scores, b, config),
    )
    for function in functions:
        with pytest.raises(ValueError, match="holds 2 sequences but max_segments=1"):
            function(packed)
        assert all(np.isnan(x) for x in jax.tree.leaves(jax.jit(function)(packed)))
        assert all(np.isfinite(x) for x in jax.tree.leaves(jax.jit(function)(batch)))


def test_no_function_of_the_loss_is_longer_than_forty_lines():
    """Signature and docstring included: a new surrogate is a function and a line in a table."""
    tree = ast.parse(pathlib.Path(inspect.getfile(losses)).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 40, node.name
