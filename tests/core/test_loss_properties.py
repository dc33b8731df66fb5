"""Random options times random inputs: the loss equals the torch mirror, and nothing is non-finite.

A draw of options meets `GROUP` draws of inputs, which share one eager, vmapped evaluation at one
small shape: nothing compiles. That makes 200 pairs in the ordinary profile and 2,000 with
`HYPOTHESIS_PROFILE=nightly`.
"""

import importlib.util
import itertools
import os
import pathlib

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.core import diagnostics, losses
from grpo_jax.core.batch import Batch, Counts, TokenScores

GROUP, ROWS, WIDTH = 4, 3, 6
TOLERANCE = 1e-9  # relative to the largest entry: float64 sums of 18 terms, exp of at most 4

# No shrinking: a draw is small already, and evaluating thousands of smaller ones takes minutes.
shared = dict(
    deadline=None,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)
hypothesis.settings.register_profile(
    "ordinary", max_examples=200 // GROUP, derandomize=True, **shared
)
hypothesis.settings.register_profile(
    "nightly", max_examples=2000 // GROUP, print_blob=True, **shared
)
PROFILE = hypothesis.settings.get_profile(
    "nightly" if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else "ordinary"
)
QUARTER = hypothesis.settings(PROFILE, max_examples=PROFILE.max_examples // 4)


def _mirror():
    pytest.importorskip("torch")
    path = pathlib.Path(__file__).parent.parent / "reference" / "torch_loss.py"
    spec = importlib.util.spec_from_file_location("torch_loss", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OBJECTIVES = {
    "ppo": {},
    "asymmetric": dict(ratio_clip_min=0.1, ratio_clip_max=0.5),
    "dual": dict(ratio_clip_c=1.25),
    "reinforce": dict(disable_ppo_ratio=True),
    "reinforce_dual": dict(disable_ppo_ratio=True, ratio_clip_c=1.25),
    "reinforce_gspo": dict(disable_ppo_ratio=True, sequence_level_importance_ratios=True),
    "on_policy": dict(force_on_policy_ratio=True),
    "on_policy_reinforce": dict(force_on_policy_ratio=True, disable_ppo_ratio=True),
    "on_policy_gspo": dict(force_on_policy_ratio=True, sequence_level_importance_ratios=True),
    "cispo": dict(use_cispo=True, ratio_clip_min=1.0, ratio_clip_max=0.3),
    "gspo": dict(sequence_level_importance_ratios=True, ratio_clip_min=0.1, ratio_clip_max=0.2),
    "gspo_dual": dict(sequence_level_importance_ratios=True, ratio_clip_c=1.1),
    "sapo": dict(objective="sapo"),
    "gmpo": dict(objective="gmpo", ratio_clip_min=0.3, ratio_clip_max=0.4),
}
TOKEN_ONLY = {"cispo"}
GSPO = {name for name in OBJECTIVES if "gspo" in name}  # weights are products over a response
SEQUENCE_ONLY = GSPO | {"gmpo"}


def _truncation(kind, high, low=None):
    return dict(
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type=kind,
        truncated_importance_sampling_ratio=high,
        truncated_importance_sampling_ratio_min=low,
    )


CORRECTIONS = {
    "none": {},
    "weights": dict(use_importance_sampling_correction=True),
    "tis": _truncation("tis", 1.2),
    "tis_both": _truncation("tis", 1.2, 0.8),
    "icepop": _truncation("icepop", 1.3, 0.7),
    "seq-mask-tis": _truncation("seq-mask-tis", 1.1, 0.9),
    "geo-rs": _truncation("geo-rs", 1.1, 0.9),
    "product-rs": _truncation("product-rs", 1.5, 0.6),
}


SEQUENCE_GATES = ("seq-mask-tis", "geo-rs", "product-rs")


@st.composite
def options(draw):
    """Any legal combination of switches."""
    objective = draw(st.sampled_from(sorted(OBJECTIVES)))
    gspo = objective in GSPO
    choices = ["none", "weights", "tis", "tis_both", "icepop"] if gspo else sorted(CORRECTIONS)
    correction = draw(st.sampled_from(choices))
    token_level = objective in TOKEN_ONLY
    if objective not in TOKEN_ONLY | SEQUENCE_ONLY:
        token_level = draw(st.booleans())
    config = OBJECTIVES[objective] | CORRECTIONS[correction] | dict(token_level_loss=token_level)
    if not token_level and draw(st.booleans()):
        config |= dict(loss_normalizer=7.0)
    if correction != "none" and not gspo and draw(st.booleans()):
        config |= dict(token_veto_threshold=0.7)
    config |= dict(
        reference_policy_kl_penalty=draw(st.sampled_from([0.0, 0.01, 0.7])),
        reference_policy_kl_type=draw(st.sampled_from(["k1", "k2", "k3"])),
        kl_input_clamp_value=draw(st.sampled_from([20.0, None, 0.3])),
        kl_output_clamp_value=draw(st.sampled_from([10.0, None, 0.05])),
        use_kl_in_reward=draw(st.sampled_from([False, False, True])),
        use_on_policy_kl_approximation=draw(st.booleans()),
        positive_example_nll_weight=draw(st.sampled_from([0.0, 0.3])),
        entropy_bonus=draw(st.sampled_from([0.0, 0.02])),
        metrics_level=draw(st.sampled_from(["full", "full", "minimal"])),
    )
    if objective == "on_policy" and token_level and draw(st.booleans()):
        config |= dict(seq_logprob_error_in_loss=True, seq_logprob_error_threshold=1.3)
        config |= dict(positive_example_nll_weight=0.0)
    return config


def inputs(seed, filtering):
    """Arrays in the mirror's layout, with every kind of trouble in about half of the draws."""
    rng = np.random.default_rng(seed)
    coin = lambda: bool(rng.integers(2))  # noqa: E731
    current = -rng.exponential(1.0, (ROWS, WIDTH))

    def near(scale):
        return np.minimum(current + scale * rng.standard_normal(current.shape), -1e-3)

    data = dict(
        current=current,
        prev_logprobs=near(rng.choice([0.0, 0.1, 0.6])),
        generation_logprobs=near(rng.choice([0.0, 0.1, 0.6])),
        reference_policy_logprobs=near(0.5),
        unfiltered=near(0.2),
        entropy=rng.exponential(1.0, current.shape),
        advantages=np.repeat(rng.standard_normal((ROWS, 1)), WIDTH, 1),
        token_mask=(rng.random(current.shape) < 0.7).astype(np.float64),
        sample_mask=rng.choice([0.0, 1.0, 1.0], ROWS),
        rewards=rng.choice([-1.0, 0.0, 1.0], ROWS),
    )
    if coin():  # fractional weights
        data["sample_mask"] = data["sample_mask"] * rng.choice([0.25, 0.5, 1.0], ROWS)
    if coin():  # advantages that differ inside a row, some of them exactly 0
        data["advantages"] = rng.choice([-1.5, 0.0, 0.3, 2.0], current.shape)
    if coin():  # an empty row
        data["token_mask"][rng.integers(ROWS)] = 0
    if filtering:
        for name in ("current", "prev_logprobs", "generation_logprobs"):
            data[name] = np.where(rng.random(current.shape) < 0.2, -np.inf, data[name])
    data["token_mask"][:, 0] = 0
    if coin():
        _poison(data, rng)
    weights = data["token_mask"] * data["sample_mask"][:, None]
    counts = dict(
        global_valid_toks=weights.sum() + rng.choice([1e-3, 5.0]),
        global_valid_seqs=data["sample_mask"].sum() + rng.choice([1e-3, 2.0]),
        global_positive_toks=(weights * (data["rewards"] > 0)[:, None]).sum() + 2.0,
    )
    return data | {k: np.float64(v) for k, v in counts.items()}


def _poison(data, rng):
    """Garbage wherever the masks are 0; column 0 included."""
    dead = (data["token_mask"] * data["sample_mask"][:, None]) == 0
    for name, values in data.items():
        if values.shape == dead.shape and name != "token_mask":
            garbage = rng.choice([np.nan, np.inf, -np.inf, 1e30, -1e30], dead.shape)
            data[name] = np.where(dead, garbage, values)


def _theirs(torch_loss, config, data, filtering):
    arrays = {k: v.copy() for k, v in data.items() if k not in ("current", "unfiltered")}
    arrays["next_token_logprobs"] = data["current"][:, 1:].copy()
    if filtering:
        arrays["curr_logprobs_unfiltered"] = data["unfiltered"][:, 1:].copy()
        arrays["policy_support_mask"] = ~np.isneginf(data["current"][:, 1:])
    return torch_loss.loss_and_grad(arrays, config)


def _ours(config, stacked, filtering):
    """Loss, gradients and metrics of each draw of a group, evaluated together."""

    def one(data):
        spread = lambda x: jnp.broadcast_to(x[:, None], (ROWS, WIDTH))  # noqa: E731
        batch = Batch(
            tokens=jnp.zeros((ROWS, WIDTH), jnp.int32),
            segment_ids=jnp.ones((ROWS, WIDTH), jnp.int32),
            positions=jnp.zeros((ROWS, WIDTH), jnp.int32),
            token_mask=data["token_mask"] != 0,
            sample_weights=spread(data["sample_mask"]),
            advantages=data["advantages"],
            generation_logprobs=data["generation_logprobs"],
            prev_logprobs=data["prev_logprobs"],
            reference_logprobs=data["reference_policy_logprobs"],
            rewards=spread(data["rewards"]),
        )
        names = ("global_valid_toks", "global_valid_seqs", "global_positive_toks")
        counts = Counts(*(data[name] for name in names))
        unfiltered = data["unfiltered"] if filtering else None
        scores = TokenScores(data["current"], unfiltered, data["entropy"])

        def loss(scores):
            return losses.clipped_pg_loss(scores, batch, counts, config, filtering_on=filtering)

        (value, raw), grads = jax.value_and_grad(loss, has_aux=True)(scores)
        return value, grads, diagnostics.finalize_metrics(raw, counts, config, rescale=False)

    return jax.vmap(one)(jax.tree.map(jnp.asarray, stacked))


def _close(got, want, name):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    scale = max(1.0, np.abs(want[np.isfinite(want)]).max(initial=0.0))
    with np.errstate(invalid="ignore"):
        both = (got == want) | (np.abs(got - want) <= TOLERANCE * scale)
    assert both.all(), f"{name}: {got} is not {want}"


def _draw(draws, dtype):
    config, filtering = draws.draw(options()), draws.draw(st.booleans())
    seed = draws.draw(st.integers(0, 2**32 - 1))
    group = [inputs(seed + i, filtering) for i in range(GROUP)]
    stack = lambda group: {k: np.stack([d[k] for d in group]).astype(dtype) for k in group[0]}  # noqa: E731
    return config, filtering, group, stack, seed


@hypothesis.settings(PROFILE)
@hypothesis.given(st.data())
def test_the_loss_equals_the_torch_mirror(draws):
    """Value, gradients and every metric that the mirror has, in double precision."""
    torch_loss = _mirror()
    config, filtering, group, stack, _ = _draw(draws, np.float64)
    with jax.enable_x64(True):
        ours = _ours(losses.LossConfig(**config), stack(group), filtering)
    for i, data in enumerate(group):
        want = _theirs(torch_loss, config, data, filtering)
        value, grads, metrics = jax.tree.map(lambda x, i=i: np.asarray(x)[i], ours)
        assert np.isfinite(value)
        _close(value, want["loss"], "loss")
        wanted = {k: np.pad(v, ((0, 0), (1, 0))) for k, v in want["grads"].items()}
        _close(grads.logprobs, wanted["next_token_logprobs"], "d loss / d logprobs")
        if filtering:
            _close(grads.unfiltered, wanted["curr_logprobs_unfiltered"], "d loss / d unfiltered")
        _close(grads.entropy, want["grads"]["entropy"], "d loss / d entropy")
        for name in want["metrics"].keys() & metrics.keys():
            if name == "is_oob_ratio" and "token_veto_threshold" in config:
                continue  # a vetoed sequence is out of bounds here, the mirror has no opinion
            _close(metrics[name], want["metrics"][name], name)


NEAR = (-0.0, -1e-6, -1.5, -20.5, -45.0, -66.0, -73.0, -80.0, -88.5, -95.0)
FAR = (*NEAR, -1e4, -1e9, -1e30, -3e38)
SIZES = (1.0, -1.0, 1e-30, -3e38, 3e38, 1e9, -1e12, 0.0)


def extreme(seed, choices):
    """Log-probabilities out of `choices`, and advantages up to the end of float32, all trained."""
    rng = np.random.default_rng(seed)
    data = inputs(seed, False)
    for name in ("current", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
        data[name] = rng.choice(choices, data[name].shape)
    data["entropy"] = rng.exponential(1.0, data["current"].shape)
    data["advantages"] = rng.choice(SIZES, data["current"].shape)
    data["token_mask"] = np.ones_like(data["token_mask"])
    data["token_mask"][:, 0] = 0
    data["sample_mask"] = np.ones(ROWS)
    return data


EXTREMES = {
    f"{objective}-{correction}": OBJECTIVES[objective]
    | CORRECTIONS[correction]
    | dict(token_level_loss=objective not in SEQUENCE_ONLY)
    | dict(zip(("kl_input_clamp_value", "kl_output_clamp_value"), clamps, strict=True))
    | dict(use_on_policy_kl_approximation=i % 2 == 1, reference_policy_kl_type=f"k{1 + i % 3}")
    for i, (objective, correction) in enumerate(itertools.product(OBJECTIVES, CORRECTIONS))
    for clamps in [((20.0, 10.0), (None, None), (None, 10.0), (20.0, None))[i // 2 % 4]]
    if not (objective in GSPO and correction in SEQUENCE_GATES)
}


@pytest.mark.parametrize("name", EXTREMES)
def test_products_of_extreme_factors_stay_finite(name):
    """Ratio times weight times advantage, and weight times KL, in float32; the mirror agrees."""
    torch_loss, config = _mirror(), EXTREMES[name] | dict(positive_example_nll_weight=0.1)
    group = [extreme(seed, NEAR if seed < 4 else FAR) for seed in range(8)]
    stacked = {k: np.stack([d[k] for d in group]).astype(np.float32) for k in group[0]}
    value, grads, metrics = _ours(losses.LossConfig(**config), stacked, False)
    assert np.isfinite(value).all() and np.isfinite(grads.logprobs).all()
    for metric, numbers in metrics.items():
        assert np.isfinite(numbers).all(), metric
    for i in range(4):  # means of 1e9 nats cancel in float32, whoever takes them
        want = _theirs(torch_loss, config, {k: v[i] for k, v in stacked.items()}, False)
        # e^95 from a difference of rounded log-probabilities is good to 1e-5.
        wanted = np.pad(want["grads"]["next_token_logprobs"], ((0, 0), (1, 0)))
        scale = max(1.0, abs(want["loss"]), np.abs(wanted).max())
        np.testing.assert_allclose(value[i] / scale, want["loss"] / scale, atol=1e-4)
        np.testing.assert_allclose(grads.logprobs[i] / scale, wanted / scale, atol=1e-4)


@hypothesis.settings(QUARTER)
@hypothesis.given(st.data())
def test_no_finite_input_gives_a_non_finite_loss_or_gradient(draws):
    """Log-ratios of hundreds of nats at trained tokens, in single precision."""
    config, filtering, group, stack, seed = _draw(draws, np.float32)
    rng = np.random.default_rng(seed)
    for data in group:
        for name in ("current", "prev_logprobs", "generation_logprobs", "unfiltered"):
            far = -(10.0 ** rng.uniform(1, 4, data[name].shape))
            data[name] = np.where(rng.random(far.shape) < 0.3, far, data[name])
    value, grads, _ = _ours(losses.LossConfig(**config), stack(group), filtering)
    assert np.isfinite(value).all()
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
