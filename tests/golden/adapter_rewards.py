"""Our reward scaling and shaping behind the interface of the conformance checker."""

import numpy as np

from grpo_jax.rewards import shaping


def reward_shaping(inputs, config):
    """Return the shaped rewards, and the unshaped ones where shaping is on."""
    config = shaping.ShapingConfig(**config, stop_properly_scales_negative=True)
    out = shaping.shape_rewards(
        np.asarray(inputs["total_reward"]),
        config,
        lengths=inputs.get("response_token_lengths"),
        truncated=inputs.get("truncated"),
    )
    return {"total_reward": out.total, "unshaped_total_reward": out.unshaped}


def reward_scaling(inputs, config):
    """Return every input column scaled."""
    config = shaping.ScalingConfig(**config)
    return {k: shaping.scale(np.asarray(v), config) for k, v in inputs.items()}


def check_reward_shaping_config(config):
    """Raise where a reward-shaping configuration must be rejected."""
    shaping.ShapingConfig(**config)
