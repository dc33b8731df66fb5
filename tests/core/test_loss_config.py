"""Every illegal combination says which key, which value, and what to do instead."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from grpo_jax.core.loss_config import LossConfig

IS = {"use_importance_sampling_correction": True}
TYPE, HIGH, LOW = (
    "truncated_importance_sampling_type",
    "truncated_importance_sampling_ratio",
    "truncated_importance_sampling_ratio_min",
)
IN_LOSS = {
    "seq_logprob_error_in_loss": True,
    "seq_logprob_error_threshold": 2.0,
    "force_on_policy_ratio": True,
}
GSPO = {"sequence_level_importance_ratios": True, "token_level_loss": False}

ILLEGAL = [
    ({"sequence_level_importance_ratios": True}, "needs token_level_loss=False"),
    ({"use_cispo": True, "disable_ppo_ratio": True}, "does not combine with disable_ppo_ratio"),
    ({"use_cispo": True, "force_on_policy_ratio": True}, "with force_on_policy_ratio=True"),
    ({"use_cispo": True, **GSPO}, "with sequence_level_importance_ratios=True"),
    ({"use_cispo": True, "ratio_clip_c": 3.0}, "with ratio_clip_c=3.0"),
    ({"use_cispo": True, "token_level_loss": False}, "with token_level_loss=False"),
    ({TYPE: "tis", HIGH: 2.0}, "needs use_importance_sampling_correction=True"),
    ({**IS, TYPE: "clip", HIGH: 2.0}, "'clip' is unknown; use one of None, 'tis'"),
    ({**IS, TYPE: "tis"}, "needs truncated_importance_sampling_ratio above 0, got None"),
    ({**IS, TYPE: "tis", HIGH: 0.0}, "above 0, got 0.0"),
    ({**IS, TYPE: "tis", HIGH: 1.0, LOW: 1.5}, "=1.5 is above .*=1.0; swap them"),
    ({**IS, TYPE: "icepop", HIGH: 2.0}, "needs truncated_importance_sampling_ratio_min"),
    ({**IS, TYPE: "geo-rs", HIGH: 2.0}, "needs truncated_importance_sampling_ratio_min"),
    ({**IS, **GSPO, TYPE: "seq-mask-tis", HIGH: 2.0, LOW: 1.0}, "use tis or icepop"),
    ({**IS, HIGH: 2.0}, "is set but truncated_importance_sampling_type is null"),
    ({"ratio_clip_c": 1.0}, "ratio_clip_c=1.0 must be above 1.0; use null"),
    ({"ratio_clip_min": -0.1}, "ratio_clip_min=-0.1 must be at least 0"),
    ({"reference_policy_kl_type": "k4"}, "'k4' is unknown; use one of 'k1', 'k2', 'k3'"),
    ({"reference_policy_kl_penalty": -0.1}, "must be at least 0.0; use 0 to switch"),
    ({"reference_policy_kl_penalty": float("nan")}, "is not finite"),
    ({"ratio_clip_max": float("inf")}, "is not finite"),
    ({"kl_input_clamp_value": 0.0}, "must be above 0.0; use null"),
    ({"ratio_clip_min": "wide"}, "ratio_clip_min='wide' is not a number"),
    ({"ratio_clip_min": None}, "ratio_clip_min=None is not a number; the default is 0.2"),
    ({"token_level_loss": "maybe"}, "token_level_loss='maybe' is not a boolean"),
    ({**IN_LOSS, "seq_logprob_error_threshold": None}, "seq_logprob_error_threshold=None"),
    ({**IN_LOSS, "force_on_policy_ratio": False}, "with force_on_policy_ratio=False"),
    ({**IN_LOSS, "token_level_loss": False}, "with token_level_loss=False"),
    ({**IN_LOSS, "positive_example_nll_weight": 0.1}, "positive_example_nll_weight=0.1"),
    ({"seq_logprob_error_threshold": 2.0}, "has no effect without seq_logprob_error_in_loss"),
    ({**IN_LOSS, "seq_logprob_error_threshold": 0.5}, "the error of perfect agreement is 1"),
    ({"objective": "sapo", "use_cispo": True}, "objective='sapo' does not combine with use_cispo"),
    ({"objective": "sapo", "ratio_clip_c": 3.0}, "has no dual clip"),
    ({"objective": "gmpo"}, "set token_level_loss=False"),
    ({"objective": "gmpo", "token_level_loss": False, "ratio_clip_min": 1.0}, "must be below 1"),
    ({"objective": "dapo"}, "use one of None, 'sapo', 'gmpo'"),
    ({"loss_normalizer": 100.0}, "set token_level_loss=False"),
    ({"loss_normalizer": 0.0, "token_level_loss": False}, "must be above 0.0; use null"),
    ({"token_veto_threshold": 1e-4}, "needs use_importance_sampling_correction=True"),
    ({**IS, **GSPO, "token_veto_threshold": 1e-4}, "reads token-level weights"),
    ({"metrics_level": "some"}, "use one of 'full', 'minimal'"),
    ({"truncated_is_normalization": "kept"}, "use one of 'batch', 'survivors'"),
    ({"entropy_bonus": -1.0}, "entropy_bonus=-1.0 must be at least 0"),
    ({"log_ratio_cap": 0.0}, "log_ratio_cap=0.0 must be above 0"),
    ({"log_ratio_cap": 41.0}, "log_ratio_cap=41.0 must be at most 40: float32 ends at e.88"),
]


@pytest.mark.parametrize(("options", "message"), ILLEGAL, ids=[m[:40] for _, m in ILLEGAL])
def test_illegal_combinations_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**options)


LEGAL = [
    {},
    {"disable_ppo_ratio": True, "ratio_clip_c": 2.0},
    {"disable_ppo_ratio": True, "force_on_policy_ratio": True},
    {**IS, TYPE: "tis", HIGH: 1, LOW: 1},
    {LOW: 0.5},
    {**GSPO, **IS, TYPE: "icepop", HIGH: 2.0, LOW: 0.5},
    {"use_cispo": True, **IS, TYPE: "icepop", HIGH: 5.0, LOW: 0.5},
    {"kl_input_clamp_value": None, "kl_output_clamp_value": None},
    {"ratio_clip_min": 0, "ratio_clip_max": 0.0},
    IN_LOSS,
]


@pytest.mark.parametrize("options", LEGAL)
def test_legal_combinations_are_accepted(options):
    assert LossConfig.from_dict(options) == LossConfig(**options)


def test_unknown_keys_are_refused_with_the_closest_known_one():
    with pytest.raises(ValueError, match="'ratio_clip_mim'; did you mean 'ratio_clip_min'"):
        LossConfig.from_dict({"ratio_clip_mim": 0.2})
    with pytest.raises(ValueError, match="unknown loss key 'zzz'; known keys"):
        LossConfig.from_dict({"zzz": 1})
    with pytest.raises(TypeError, match="zzz"):
        LossConfig(**{"zzz": 1})


def test_traced_numbers_are_not_checked_and_count_as_switched_on():
    def built(beta):
        config = dataclasses.replace(LossConfig(), reference_policy_kl_penalty=beta)
        assert config.kl_on
        return beta

    jax.jit(built)(jnp.asarray(0.0))
    assert not LossConfig(reference_policy_kl_penalty=0.0).kl_on
    assert not LossConfig(use_kl_in_reward=True).kl_on


def test_the_switches_select_the_surrogate():
    assert LossConfig().surrogate == "ppo"
    assert LossConfig(disable_ppo_ratio=True).surrogate == "reinforce"
    assert LossConfig(disable_ppo_ratio=True, force_on_policy_ratio=True).surrogate == "on_policy"
    assert LossConfig(use_cispo=True).surrogate == "cispo"
    assert LossConfig(objective="sapo").surrogate == "sapo"
