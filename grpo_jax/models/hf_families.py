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
        defaults={"sliding_window": 4096, "max_position_embeddings": 131_072},
    ),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2, _qwen_fields, reads=_QWEN_READS),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _qwen3,
        _qwen_fields,
        reads=_QWEN_READS,
        defaults={"head_dim": 128},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _smollm3,
        _smollm3_fields,
        reads="no_rope_layers no_rope_layer_interval layer_types use_sliding_window sliding_window",
        defaults={"rope_theta": 2_000_000.0, "tie_word_embeddings": True},
    ),
}
