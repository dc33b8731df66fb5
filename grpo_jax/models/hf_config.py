"""Hugging Face's config.json to our `ModelConfig`, and back.

Every field is either understood, known to change nothing, or refused by name: a model that would
silently compute something else than `transformers` does is worse than none.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from grpo_jax.models import hub
from grpo_jax.models.hf_families import FAMILIES, Family, Fields
from grpo_jax.models.model_config import ModelConfig, RopeScaling

ARCHITECTURES = {family.architecture: name for name, family in FAMILIES.items()}

# Fields that say nothing about the numbers a causal language model computes in evaluation.
_HARMLESS = frozenset(
    "attention_dropout cache_implementation chunk_size_feed_forward id2label is_decoder"
    " is_encoder_decoder label2id max_window_layers name_or_path output_attentions"
    " output_hidden_states pretraining_tp problem_type return_dict sliding_window"
    " transformers_version transformers.js_config use_cache unsloth_fixed unsloth_version"
    " output_router_logits router_aux_loss_coef"
    " is_llama_config torchscript use_bfloat16"
    " _name_or_path _commit_hash _attn_implementation _attn_implementation_autoset"
    " _experts_implementation _flash_attn_2_enabled".split()
)
# Fields that change the numbers, with the only value that is implemented. A family that reads one
# of them, or fixes it to something else, goes first.
_FIXED: Fields = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "layer_types": None,
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
    " pad_token_id initializer_range dtype torch_dtype".split()
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

    `folder` may be a name of the hub (`hub.local_folder`).

    Raises:
      FileNotFoundError: the folder, or its config.json, is not there.
      ValueError: config.json is damaged, or describes a model that is not implemented.
    """
    place = hub.local_folder(folder)
    path = place / "config.json"
    if not place.exists():
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


def config_from_fields(fields: Fields) -> ModelConfig:
    """Translate the fields of a config.json; raise ValueError for what is not implemented."""
    family = FAMILIES[_family(fields)]
    fields = family.usual(fields)
    _refuse_what_is_not_implemented(fields, family)
    missing = [name for name in _NEEDED if name not in fields]
    if missing:
        raise ValueError(f"the field {missing[0]!r} is missing")
    fields = {"max_position_embeddings": 32_768, **family.defaults, **fields}
    fields["model_type"] = ARCHITECTURES[family.architecture]
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
        max_length=fields["max_position_embeddings"],
        rope_theta=theta,
        rope_scaling=scaling,
        norm_epsilon=fields.get("rms_norm_eps", 1e-6),
        tie_embeddings=fields.get("tie_word_embeddings", False),
        family=fields["model_type"],
        bos_token_id=fields.get("bos_token_id"),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        pad_token_id=fields.get("pad_token_id"),
        initializer_range=fields.get("initializer_range", 0.02),
        param_dtype=dtype,
        compute_dtype=dtype,
        **family.switches(fields),
    )


def _family(fields: Fields) -> str:
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


def _refuse_what_is_not_implemented(fields: Fields, family: Family) -> None:
    reads = family.reads.split()
    fixed = {name: value for name, value in _FIXED.items() if name not in reads} | family.fixed
    for name, value in fields.items():
        if name in fixed:
            if value is not None and value != fixed[name] and not _full(name, value):
                raise ValueError(
                    f"{name}={value!r} is not supported: only {fixed[name]!r} is implemented"
                )
        elif name in reads or name in _READ or name in _HARMLESS:
            continue
        else:
            raise ValueError(f"the field {name!r} (= {value!r}) is not supported")


def _full(name: str, value: Any) -> bool:
    """Say whether this is the list of layer types that changes nothing."""
    return name == "layer_types" and set(value) == {"full_attention"}


def _rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Read theta and scaling from `rope_parameters` (transformers 5) or the two older fields."""
    rope = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
    theta = float(rope.pop("rope_theta", None) or fields.get("rope_theta") or 10_000.0)
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if float(rope.pop("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("rope: partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return theta, None
    if kind not in _ROPE_FIELDS:
        known = ", ".join(("default", *_ROPE_FIELDS))
        raise ValueError(f"rope_type={kind!r} is not supported; these are: {known}")
    rope = {name: value for name, value in rope.items() if value is not None}
    rope.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
    known = _ROPE_FIELDS[kind]
    strange = [name for name in rope if name not in known and name not in _ROPE_UNUSED]
    if strange:
        raise ValueError(f"rope: the field {strange[0]!r} of {kind!r} is not supported")
    if "factor" not in rope:
        raise ValueError(f"rope: the field 'factor' of {kind!r} is missing")
    return theta, RopeScaling(
        kind, **{known[name]: value for name, value in rope.items() if name in known}
    )


# Hugging Face's name -> ours, of what each kind of scaling reads.
_ROPE_FIELDS: dict[Any, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_length",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_length",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "truncate": "truncate",
    },
}
_ROPE_UNUSED = ("original_max_position_embeddings",)  # linear and dynamic know only max_position


def config_to_fields(config: ModelConfig) -> Fields:
    """Write the fields of a config.json that transformers 4 and 5 both read.

    Raises:
      ValueError: the model has a switch on that its family does not know.
    """
    family = FAMILIES[config.family]
    eos = list(config.eos_token_ids)
    fields: Fields = {
        "architectures": [family.architecture],
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
    } | family.fields(config)
    _check_read_back(config, fields)
    return fields


def _check_read_back(config: ModelConfig, fields: Fields) -> None:
    """Refuse a switch that the family has no field for: the folder would be another model."""
    again = config_from_fields(fields)
    for field in dataclasses.fields(ModelConfig):
        ours, theirs = getattr(config, field.name), getattr(again, field.name)
        if field.name == "pattern":  # which may be written in more than one way
            ours, theirs = config.layer_kinds, again.layer_kinds
        if ours != theirs and field.name not in ("compute_dtype", "remat", "freeze_router"):
            raise ValueError(
                f"{field.name}={ours!r} cannot be written for family={config.family!r},"
                f" which always has {theirs!r}"
            )


def _scaling_fields(scaling: RopeScaling | None) -> Fields | None:
    if scaling is None:
        return None
    names = _ROPE_FIELDS[scaling.kind]
    values = {theirs: getattr(scaling, ours) for theirs, ours in names.items()}
    return {"rope_type": scaling.kind} | {k: v for k, v in values.items() if v is not None}
