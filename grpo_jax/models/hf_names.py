"""Our parameter paths, and the names that Hugging Face gives to the same tensors."""

from typing import Any

from grpo_jax.models.model_config import ModelConfig

_OUTSIDE_LAYERS = {
    "embed.table": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_INSIDE_LAYERS = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_SANDWICH = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "mlp.router": "mlp.gate",
    "mlp.gate": "mlp.experts.{e}.gate_proj",
    "mlp.up": "mlp.experts.{e}.up_proj",
    "mlp.down": "mlp.experts.{e}.down_proj",
}


def file_names(
    path: Any, shape: tuple[int, ...], config: ModelConfig
) -> tuple[list[str], tuple[int, ...]]:
    """Name the file's tensors that make up one of our arrays, stacked in this order.

    Args:
      path: of the array in the parameter tree.
      shape: of the array; inside the layers L comes first, then E for experts.
      config: the model.

    Returns:
      The names, and the shape of each of their tensors.
    """
    ours = ".".join(key.key for key in path)
    inside = {**_INSIDE_LAYERS, **(_SANDWICH if config.sandwich_norms else {})}
    inside |= _EXPERTS if config.num_experts else {}
    if not ours.startswith("layers."):
        return [_OUTSIDE_LAYERS[ours]], shape
    module, _, kind = ours.removeprefix("layers.").rpartition(".")
    kind = "bias" if kind == "bias" else "weight"
    name = f"{inside[module]}.{kind}"
    names = [f"model.layers.{i}.{name}" for i in range(config.num_layers)]
    if "{e}" not in name:
        return names, shape[1:]
    experts = range(config.num_experts)
    return [name.replace("{e}", str(e)) for name in names for e in experts], shape[2:]
