"""Hugging Face's config.json to our `ModelConfig`, and back.

Every field is either understood, known to change nothing, or refused by name: a model that would
silently compute something else than `transformers` does is worse than none.
"""

import json
from pathlib import Path
from typing import Any

from grpo_jax.models.presets import ModelConfig, RopeScaling

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
}

# Fields that say nothing about the numbers a causal language model computes in evaluation.
_HARMLESS = frozenset(
    "attention_dropout chunk_size_feed_forward id2label is_decoder is_encoder_decoder label2id"
    " max_window_layers name_or_path output_attentions output_hidden_states pretraining_tp"
    " problem_type return_dict sliding_window transformers_version transformers.js_config use_cache"
    " unsloth_fixed unsloth_version is_llama_config torchscript use_bfloat16".split()
)
# Fields that change the numbers, with the only value that is implemented.
_FIXED: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "quantization_config": None,
    "use_mrope": False,
    "add_cross_attention": False,
}
_READ = frozenset(
    "architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers"
    " num_attention_heads num_key_value_heads head_dim max_position_embeddings rope_theta"
    " rope_scaling rope_parameters rms_norm_eps tie_word_embeddings bos_token_id eos_token_id"
    " pad_token_id initializer_range dtype torch_dtype layer_types".split()
)
_NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def read_config(folder: str | Path) -> ModelConfig:
    """Read the folder's config.json; both dtypes are the one that the file names.

    Raises:
      FileNotFoundError: the folder, or its config.json, is not there.
      ValueError: config.json is damaged, or describes a model that is not implemented.
    """
    path = Path(folder) / "config.json"
    if not Path(folder).exists():
        raise FileNotFoundError(f"model folder {folder} does not exist")
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a model folder: it has no config.json")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    try:
        return config_from_fields(fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def config_from_fields(fields: dict[str, Any]) -> ModelConfig:
    """Translate the fields of a config.json; raise ValueError for what is not implemented."""
    family = _family(fields)
    _refuse_what_is_not_implemented(fields, family)
    missing = [name for name in _NEEDED if name not in fields]
    if missing:
        raise ValueError(f"the field {missing[0]!r} is missing")
    heads = fields["num_attention_heads"]
    theta, scaling = _rope(fields)
    dtype = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    dtype = "float32" if dtype == "float16" else dtype  # exact; the range of float16 is a trap
    eos = fields.get("eos_token_id")
    return ModelConfig(
        vocab_size=fields["vocab_size"],
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["intermediate_size"],
        num_layers=fields["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
        max_length=fields.get("max_position_embeddings", 2048),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_epsilon=fields.get("rms_norm_eps", 1e-6),
        tie_embeddings=fields.get("tie_word_embeddings", False),
        qkv_bias=family == "qwen2",
        family=family,
        bos_token_id=fields.get("bos_token_id"),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        pad_token_id=fields.get("pad_token_id"),
        initializer_range=fields.get("initializer_range", 0.02),
        param_dtype=dtype,
        compute_dtype=dtype,
    )


def _family(fields: dict[str, Any]) -> str:
    known = ", ".join(ARCHITECTURES)
    names = fields.get("architectures") or []
    if len(names) == 1:
        if names[0] not in ARCHITECTURES:
            raise ValueError(f"architecture {names[0]!r} is not supported; these are: {known}")
        return ARCHITECTURES[names[0]]
    family = str(fields.get("model_type"))
    if names or family not in ARCHITECTURES.values():
        raise ValueError(
            f"architectures={names} with model_type={family!r} is not supported; these are: {known}"
        )
    return family


def _refuse_what_is_not_implemented(fields: dict[str, Any], family: str) -> None:
    for name, value in fields.items():
        if name in _FIXED:
            if value is not None and value != _FIXED[name]:
                raise ValueError(
                    f"{name}={value!r} is not supported: only {_FIXED[name]!r} is implemented"
                )
        elif name not in _READ and name not in _HARMLESS and not name.startswith("_"):
            raise ValueError(f"the field {name!r} (= {value!r}) is not supported")
    others = sorted(set(fields.get("layer_types") or []) - {"full_attention"})
    if others:
        raise ValueError(f"layer_types with {others[0]!r} is not supported: only full_attention is")
    # Qwen2 has a switch of its own for the window, checked above.
    if family == "mistral" and fields.get("sliding_window") is not None:
        raise ValueError(
            f"sliding_window={fields['sliding_window']} is not supported: only null is implemented"
        )


def _rope(fields: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Read theta and scaling from `rope_parameters` (transformers 5) or the two older fields."""
    rope = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
    theta = float(rope.pop("rope_theta", None) or fields.get("rope_theta") or 10_000.0)
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if float(rope.pop("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("rope: partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", factor=float(rope["factor"]))
    if kind == "llama3":
        original = rope.get("original_max_position_embeddings")
        return theta, RopeScaling(
            "llama3",
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_length=int(original or fields.get("max_position_embeddings", 2048)),
        )
    raise ValueError(f"rope_type={kind!r} is not supported; these are: default, linear, llama3")


def config_to_fields(config: ModelConfig) -> dict[str, Any]:
    """Write the fields of a config.json that transformers 4 and 5 both read."""
    architecture = {family: name for name, family in ARCHITECTURES.items()}[config.family]
    eos = list(config.eos_token_ids)
    fields: dict[str, Any] = {
        "architectures": [architecture],
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "dtype": config.param_dtype,
        "eos_token_id": eos if len(eos) > 1 else eos[0] if eos else None,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_length,
        "model_type": config.family,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.norm_epsilon,
        "rope_scaling": _scaling_fields(config.rope_scaling),
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": config.param_dtype,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }
    if config.family == "llama":
        fields |= {"attention_bias": False, "mlp_bias": False}
    if config.family == "mistral":
        fields["sliding_window"] = None
    return fields


def _scaling_fields(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_length,
    }
