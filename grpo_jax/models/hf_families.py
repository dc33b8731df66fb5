"""What sets the families apart in config.json: one row of a table each.

A row says how the fields that only some families know become switches of `ModelConfig`, and back.
What all families share stands in hf_config.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from grpo_jax.models.model_config import Kind, ModelConfig, has_rope, is_local

Fields = dict[str, Any]  # of a config.json


class Family(NamedTuple):
    """How one `model_type` spells its switches."""

    architecture: str
    switches: Callable[[Fields], Fields]  # config.json -> arguments of ModelConfig
    fields: Callable[[ModelConfig], Fields]  # and back, what is not shared by all
    reads: str = ""  # names of the fields that `switches` reads
    fixed: Fields = {}  # fields that change the numbers, and the one value that is implemented
    defaults: Fields = {}  # what transformers takes where config.json leaves a field out
    usual: Callable[[Fields], Fields] = lambda fields: fields  # other spellings -> the usual one


def _llama(fields: Fields) -> Fields:
    return {}


def _llama_fields(config: ModelConfig) -> Fields:
    return {"attention_bias": False, "mlp_bias": False}


def _mistral(fields: Fields) -> Fields:
    return _layers(fields["num_hidden_layers"], fields.get("sliding_window"), lambda i: True)


def _mistral_fields(config: ModelConfig) -> Fields:
    return {"sliding_window": config.window}


def _qwen(fields: Fields) -> Fields:
    window = fields.get("sliding_window", 4096) if fields.get("use_sliding_window") else None
    begin = fields.get("max_window_layers", 28)
    return _layers(fields["num_hidden_layers"], window, _listed(fields) or (lambda i: i >= begin))


def _qwen2(fields: Fields) -> Fields:
    return {"qkv_bias": True, **_qwen(fields)}


def _qwen3(fields: Fields) -> Fields:
    return {"qk_norm": True, **_qwen(fields)}


def _qwen_fields(config: ModelConfig) -> Fields:
    return {
        "attention_bias": False,
        "layer_types": _layer_types(config),
        "max_window_layers": config.num_layers,
        "sliding_window": config.window,
        "use_sliding_window": config.window is not None,
    }


def _smollm3(fields: Fields) -> Fields:
    count = fields["num_hidden_layers"]
    interval = fields.get("no_rope_layer_interval") or 4
    rotates = fields.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(count)]
    if len(rotates) < count:
        raise ValueError(f"no_rope_layers has {len(rotates)} entries for {count} layers")
    window = fields.get("sliding_window") if fields.get("use_sliding_window") else None
    local = _listed(fields) or (lambda i: not rotates[i])
    return _layers(count, window, local, lambda i: bool(rotates[i]))


def _smollm3_fields(config: ModelConfig) -> Fields:
    return {
        "attention_bias": False,
        "layer_types": _layer_types(config),
        "mlp_bias": False,
        "no_rope_layers": [int(has_rope(kind)) for kind in config.layer_kinds],
        "sliding_window": config.window,
        "use_sliding_window": config.window is not None,
    }


def _qwen3_moe(fields: Fields) -> Fields:
    window = fields["sliding_window"] if fields.get("use_sliding_window") else None
    return {
        "qk_norm": True,
        "num_experts": fields["num_experts"],
        "experts_per_token": fields["num_experts_per_tok"],
        "expert_size": fields["moe_intermediate_size"],
        "normalize_experts": fields["norm_topk_prob"],
        **_layers(fields["num_hidden_layers"], window, lambda i: True),
    }


def _qwen3_moe_fields(config: ModelConfig) -> Fields:
    return {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": config.expert_size,
        "norm_topk_prob": config.normalize_experts,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "sliding_window": config.window,
        "use_sliding_window": config.window is not None,
    }


def _qwen3_moe_usual(fields: Fields) -> Fields:
    """Read `num_local_experts`, as transformers 5 writes it, under its older name."""
    fields = dict(fields)
    if "num_local_experts" in fields:
        fields["num_experts"] = fields.pop("num_local_experts")
    return fields


def _gemma(fields: Fields) -> Fields:
    period = 2 if fields["model_type"] == "gemma2" else fields.get("sliding_window_pattern") or 6
    local = _listed(fields) or (lambda i: (i + 1) % period != 0)
    return {
        "activation": "gelu_tanh",
        "sandwich_norms": True,
        "centered_norms": True,
        "scale_embeddings": True,
        "query_width": fields["query_pre_attn_scalar"],
        "attention_soft_cap": fields["attn_logit_softcapping"],
        "logit_soft_cap": fields["final_logit_softcapping"],
        **_layers(fields["num_hidden_layers"], fields["sliding_window"], local),
    }


def _gemma3(fields: Fields) -> Fields:
    theta = float(fields["rope_local_base_freq"])
    return {"qk_norm": True, "local_rope_theta": theta, **_gemma(fields)}


def _gemma_fields(config: ModelConfig) -> Fields:
    return {
        "attention_bias": False,
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": _layer_types(config),
        "query_pre_attn_scalar": config.query_width,
        "sliding_window": config.window,
        "use_bidirectional_attention": False,
    }


def _gemma3_fields(config: ModelConfig) -> Fields:
    return {**_gemma_fields(config), "rope_local_base_freq": config.local_rope_theta}


def _gemma2_usual(fields: Fields) -> Fields:
    """Read `sliding_window` once where it is written twice."""
    fields = dict(fields)
    again, window = fields.pop("sliding_window_size", None), fields.get("sliding_window")
    if again is not None and again != window:
        raise ValueError(
            f"sliding_window_size={again} beside sliding_window={window} is not supported"
        )
    return fields


def _gemma3_usual(fields: Fields) -> Fields:
    """Bring the newer spellings of the pattern, and of RoPE by kind of layer, into the older."""
    fields = dict(fields)
    if "_sliding_window_pattern" in fields:
        fields.setdefault("sliding_window_pattern", fields.pop("_sliding_window_pattern"))
    rope = fields.get("rope_parameters")
    if rope is None or not {"full_attention", "sliding_attention"} & rope.keys():
        return fields
    local = {"rope_type": "default", **(rope.get("sliding_attention") or {})}
    strange = [k for k, v in local.items() if k != "rope_theta" and (k, v) not in _PLAIN_ROPE]
    if strange:
        raise ValueError(
            f"rope_parameters: {strange[0]}={local[strange[0]]!r} of sliding_attention"
            " is not supported: local layers are never stretched"
        )
    theta = local.get("rope_theta") or fields.get("rope_local_base_freq")
    fields = {**fields, "rope_parameters": rope.get("full_attention") or {}}
    return fields if theta is None else {**fields, "rope_local_base_freq": theta}


_PLAIN_ROPE = (("rope_type", "default"), ("type", "default"), ("partial_rotary_factor", 1.0))


def _listed(fields: Fields) -> Callable[[int], bool] | None:
    """Read `layer_types`, where it is given: is layer i local?"""
    types = fields.get("layer_types")
    if types is None:
        return None
    others = sorted(set(types) - {"full_attention", "sliding_attention"})
    if others:
        raise ValueError(
            f"layer_types with {others[0]!r} is not supported;"
            " these are: full_attention, sliding_attention"
        )
    if len(types) != fields["num_hidden_layers"]:
        raise ValueError(
            f"layer_types has {len(types)} entries for {fields['num_hidden_layers']} layers"
        )
    return lambda i: types[i] == "sliding_attention"


def _layers(
    count: int,
    window: int | None,
    local: Callable[[int], bool],
    rotates: Callable[[int], bool] = lambda i: True,
) -> Fields:
    """Make `pattern` and `window` of what is said of each layer; without a window none is local."""
    kinds: list[Kind] = []
    for i in range(count):
        if window is not None and local(i):
            kinds.append("local" if rotates(i) else "local_nope")
        else:
            kinds.append("global" if rotates(i) else "global_nope")
    period = next(n for n in range(1, count + 1) if kinds == (kinds[:n] * count)[:count])
    some = any(is_local(kind) for kind in kinds)
    return {"pattern": tuple(kinds[:period]), "window": window if some else None}


def _layer_types(config: ModelConfig) -> list[str]:
    names = {True: "sliding_attention", False: "full_attention"}
    return [names[is_local(kind)] for kind in config.layer_kinds]


_GEMMA_READS = (
    "layer_types sliding_window query_pre_attn_scalar attn_logit_softcapping"
    " final_logit_softcapping"
)
_GEMMA_FIXED = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": False,
}
_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_QWEN_READS = "use_sliding_window sliding_window max_window_layers layer_types"

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM", _llama, _llama_fields, defaults={"max_position_embeddings": 2048}
    ),
    "mistral": Family(
        "MistralForCausalLM",
        _mistral,
        _mistral_fields,
        reads="sliding_window",
        defaults={
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "max_position_embeddings": 131_072,
        },
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _qwen2,
        _qwen_fields,
        reads=_QWEN_READS,
        defaults={"num_key_value_heads": 32},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _qwen3,
        _qwen_fields,
        reads=_QWEN_READS,
        defaults={"head_dim": 128, "num_key_value_heads": 32},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _smollm3,
        _smollm3_fields,
        reads="no_rope_layers no_rope_layer_interval layer_types use_sliding_window sliding_window",
        defaults={
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _gemma,
        _gemma_fields,
        reads=_GEMMA_READS,
        fixed=_GEMMA_FIXED,
        defaults={
            **_GEMMA_DEFAULTS,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        usual=_gemma2_usual,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _gemma3,
        _gemma3_fields,
        reads=_GEMMA_READS + " rope_local_base_freq sliding_window_pattern",
        # transformers reads this soft cap for Gemma 3, and never applies it.
        fixed={**_GEMMA_FIXED, "attn_logit_softcapping": None},
        defaults={
            **_GEMMA_DEFAULTS,
            "max_position_embeddings": 131_072,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        usual=_gemma3_usual,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _qwen3_moe,
        _qwen3_moe_fields,
        reads="use_sliding_window sliding_window num_experts num_experts_per_tok"
        " moe_intermediate_size norm_topk_prob",
        fixed={"decoder_sparse_step": 1, "mlp_only_layers": []},
        defaults={
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
        usual=_qwen3_moe_usual,
    ),
}
