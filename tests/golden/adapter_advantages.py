"""Our advantages and the sequence filter behind the interface of the conformance checker."""

import jax
import numpy as np

from grpo_jax.core import advantages, estimators_group
from grpo_jax.core.advantages import AdvantageConfig, AdvantageInputs
from grpo_jax.train import filters

NAMES = {"raw_reward": "raw"}


def setup(dtype):
    """Switch the precision of the process."""
    jax.config.update("jax_enable_x64", dtype == "float64")


def baseline_std(inputs, config):
    """Group baseline and standard deviation, with the reference's row-by-row rules."""
    stats = estimators_group.group_statistics(
        inputs["rewards"],
        group_ids(inputs["prompts"]),
        leave_one_out=config["leave_one_out_baseline"],
        valid=inputs.get("valid_mask"),
        std_rewards=inputs.get("std_rewards"),
        reference_std=True,
    )
    return {"baseline": stats.baseline, "std": stats.std}


def advantage(kind, inputs, config):
    """Compute one estimator; per-sequence advantages are spread over the columns."""
    rows, width = inputs["mask"].shape
    rewards = inputs.get("rewards", np.zeros(rows))
    components = {k: v for k, v in inputs.items() if k.startswith("reward/")}
    prompts = inputs.get("prompt_ids", np.zeros((rows, 1), int))
    out = advantages.compute(
        advantage_config(NAMES.get(kind, kind), config),
        AdvantageInputs(
            rewards=rewards,
            groups=group_ids(prompts),
            mask=inputs["mask"],
            components=components or None,
            policy_logprobs=inputs.get("logprobs_policy", inputs.get("prev_logprobs")),
            reference_logprobs=inputs.get("logprobs_reference"),
            teacher_logprobs=inputs.get("teacher_logprobs"),
            values=inputs.get("values"),
        ),
    )
    values = out.advantages
    if values.ndim == 1:
        values = np.broadcast_to(values[:, None], (rows, width))
    return {
        "advantages": values,
        "returns": out.returns,
        "baseline": None if out.statistics is None else out.statistics.baseline,
        "std": None if out.statistics is None else out.statistics.std,
        "metrics": {name.split("/")[-1]: value for name, value in out.metrics.items()},
    }


def advantage_config(estimator, config):
    """Translate the reference's keys; the KL coefficient counts only where it is switched on."""
    kl_on = config.get("use_kl_in_reward", False)
    weights = config.get("reward_weights")
    known = {f for f in AdvantageConfig.__dataclass_fields__} - {"reward_weights"}
    return AdvantageConfig(
        estimator=estimator,
        reward_weights=None if weights is None else tuple(weights),
        kl_in_reward=config["reference_policy_kl_penalty"] if kl_on else 0.0,
        kl_in_reward_type=config.get("reference_policy_kl_type", "k3"),
        # The reference decides row by row under leave-one-out; ours decides group by group.
        reference_leave_one_out_std=True,
        **{name: value for name, value in config.items() if name in known},
    )


def group_ids(prompts):
    """Rows whose ids all agree are one prompt."""
    return np.unique(prompts, axis=0, return_inverse=True)[1].reshape(-1)


def seq_error_filter(inputs, params):
    """Sequence filter on the log-probability mismatch of sampler and trainer."""
    weights, report = filters.sequence_error(
        token_mask=inputs["token_mask"],
        sample_weights=inputs["sample_mask"],
        prev_logprobs=inputs["prev_logprobs"],
        generation_logprobs=inputs["generation_logprobs"],
        correct=filters.is_correct(inputs["rewards"], 1.0),
        threshold=params["seq_logprob_error_threshold"],
        filtering_on=params["filtering_on"],
    )
    metrics = {
        **report.extra,
        "num_masked_seqs": int(report.removed_weight),
        "masked_correct_pct": report.metrics()["filters/sequence_error/removed_correct_share"],
    }
    return {"sample_mask": weights, "metrics": metrics}


def advantage_clip(inputs, config):
    """Clamp of the advantages."""
    low, high = config["advantage_clip_low"], config["advantage_clip_high"]
    return {"advantages": advantages.clip(inputs["advantages"], low, high)}


def check_gdpo_config(config):
    """Raise unless there are two components or more, and one weight for each."""
    rewards = {name: np.zeros(2) for name in config["components"]}
    estimators_group.weigh_components(rewards, config["reward_weights"])


def check_opd_config(config):
    """Raise unless student and teacher log-probabilities are both there."""
    names = {"teacher_logprobs": "teacher_logprobs", "prev_logprobs": "policy_logprobs"}
    missing = {names[name] for name, value in config.items() if value is None}
    given = {name: np.zeros((1, 2)) for name in names.values() if name not in missing}
    inputs = AdvantageInputs(np.zeros(1), np.zeros(1, int), mask=np.ones((1, 2)), **given)
    advantages.compute(AdvantageConfig(estimator="opd"), inputs)


def check_config(kind, config):
    """Raise for the configurations of this room that must be rejected."""
    checks = {"gdpo_config": check_gdpo_config, "opd_config": check_opd_config}
    if kind not in checks:
        raise NotImplementedError(kind)
    checks[kind](config)
