"""FLOPs that training needs for a token, which MFU divides by time and peak.

    a weight that is trained    2 forward + 2 for the gradient of its input + 2 for its own = 6
    a weight that is frozen     2 forward + 2 for the gradient of its input                = 4

A token meets every matrix of the layers, and of routed experts k of E. The head is met where a
log-probability is trained. The table of embeddings is read, not multiplied. Attention over the row
and everything that is computed again are left out, so that runs compare (arXiv:2204.02311).
"""

from typing import NamedTuple

import jax

from grpo_jax.core.policy import Params
from grpo_jax.models.model_config import ModelConfig
from grpo_jax.scale import rules

_TRAINED, _FROZEN = 6.0, 4.0  # FLOPs a weight, for one token


class Work(NamedTuple):
    """FLOPs of an update, for one token."""

    token: float  # of every real token
    scored: float  # besides, of a token whose log-probability is trained

    def total(self, tokens: float, scored: float) -> float:
        """FLOPs for so many real tokens, of which so many are scored."""
        return tokens * self.token + scored * self.scored


def of_training(config: ModelConfig, params: Params, adapter: Params | None = None) -> Work:
    """Count a model that is trained, or one that stays as it is beside an adapter.

    Args:
      config: of the model.
      params: its weights, or their shapes.
      adapter: what is trained in their place; see `lora`.
    """
    each = _TRAINED if adapter is None else _FROZEN
    beside = 0 if adapter is None else sum(x.size for x in jax.tree.leaves(adapter))
    head = params["embed"]["table"] if config.tie_embeddings else params["head"]["weight"]
    layers = _layers(config, params["layers"], each)
    return Work(layers + _TRAINED * beside, each * head.size)


def of_trunk(config: ModelConfig, params: Params) -> Work:
    """Count a trained model without a head, as a critic's; its value head is left out."""
    return Work(_layers(config, params["layers"], _TRAINED), 0.0)


def _layers(config: ModelConfig, stacked: Params, each: float) -> float:
    """FLOPs of a token in all layers, at `each` FLOPs a weight that it meets."""
    total = 0.0
    for path, x in jax.tree_util.tree_leaves_with_path(stacked):
        name = rules.path_name(path)
        if not name.endswith("/weight"):  # norms and biases are no products
            continue
        routed = config.num_experts > 0 and x.ndim == 4  # [L, E, out, in]
        met = x.size * config.experts_per_token / config.num_experts if routed else x.size
        frozen = config.freeze_router and name == "mlp/router/weight"
        total += (_FROZEN if frozen else each) * met
    return total
