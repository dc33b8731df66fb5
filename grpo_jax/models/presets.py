"""The named models that people ask for, under their Hugging Face names."""

import dataclasses

from grpo_jax.models.model_config import ModelConfig, RopeScaling, check_name


def preset(name: str, **changes) -> ModelConfig:
    """Return the model of this name, with `changes` to its fields.

    Raises:
      ValueError: the name is unknown; the message lists those that are known.
    """
    check_name("preset", name, tuple(PRESETS))
    return dataclasses.replace(PRESETS[name], **changes)


def _sizes(width: int, inner: int, layers: int, heads: int, kv_heads: int, head: int) -> dict:
    """Name the six numbers in which the models of one family differ."""
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head,
    }


_SMOLLM2 = ModelConfig(
    **_sizes(576, 1536, 30, 9, 3, 64),
    vocab_size=49_152,
    rope_theta=100_000.0,
    bos_token_id=1,
    eos_token_ids=(2,),
    pad_token_id=2,
)
_SMOLLM3 = ModelConfig(
    **_sizes(2048, 11_008, 36, 16, 4, 128),
    vocab_size=128_256,
    max_length=65_536,
    rope_theta=5_000_000.0,
    norm_epsilon=1e-6,
    pattern=("global", "global", "global", "global_nope"),
    family="smollm3",
    bos_token_id=128_000,
    eos_token_ids=(128_012,),
    pad_token_id=128_004,
)
_LLAMA3 = ModelConfig(
    **_sizes(2048, 8192, 16, 32, 8, 64),
    vocab_size=128_256,
    max_length=131_072,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling("llama3", factor=32.0, original_length=8192),
    bos_token_id=128_000,
    eos_token_ids=(128_001, 128_008, 128_009),
)
_LLAMA31 = dataclasses.replace(
    _LLAMA3,
    rope_scaling=RopeScaling("llama3", factor=8.0, original_length=8192),
    tie_embeddings=False,
)
_QWEN25 = ModelConfig(
    **_sizes(896, 4864, 24, 14, 2, 64),
    vocab_size=151_936,
    max_length=32_768,
    rope_theta=1_000_000.0,
    norm_epsilon=1e-6,
    qkv_bias=True,
    family="qwen2",
    bos_token_id=151_643,
    eos_token_ids=(151_645, 151_643),
)
_QWEN25_UNTIED = dataclasses.replace(_QWEN25, vocab_size=152_064, tie_embeddings=False)
_QWEN3 = dataclasses.replace(
    _QWEN25,
    **_sizes(1024, 3072, 28, 16, 8, 128),
    max_length=40_960,
    qkv_bias=False,
    qk_norm=True,
    family="qwen3",
)
_QWEN3_UNTIED = dataclasses.replace(_QWEN3, tie_embeddings=False)
_MISTRAL = ModelConfig(
    **_sizes(4096, 14_336, 32, 32, 8, 128),
    vocab_size=32_000,
    max_length=32_768,
    tie_embeddings=False,
    family="mistral",
    bos_token_id=1,
    eos_token_ids=(2,),
)
_GEMMA2 = ModelConfig(
    **_sizes(2304, 9216, 26, 8, 4, 256),
    vocab_size=256_000,
    norm_epsilon=1e-6,
    activation="gelu_tanh",
    sandwich_norms=True,
    centered_norms=True,
    scale_embeddings=True,
    query_width=256,
    attention_soft_cap=50.0,
    logit_soft_cap=30.0,
    pattern=("local", "global"),
    window=4096,
    family="gemma2",
    bos_token_id=2,
    eos_token_ids=(1, 107),
    pad_token_id=0,
)
_GEMMA3 = dataclasses.replace(
    _GEMMA2,
    **_sizes(1152, 6912, 26, 4, 1, 256),
    vocab_size=262_144,
    max_length=32_768,
    qk_norm=True,
    attention_soft_cap=None,
    logit_soft_cap=None,
    rope_theta=1_000_000.0,
    local_rope_theta=10_000.0,
    pattern=("local", "local", "local", "local", "local", "global"),
    window=512,
    family="gemma3_text",
    eos_token_ids=(1, 106),
)

PRESETS: dict[str, ModelConfig] = {
    # For tests and examples: 256 bytes and a few special tokens, milliseconds a step.
    "tiny": ModelConfig(**_sizes(64, 160, 2, 4, 2, 16), vocab_size=264, max_length=512),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2,
    "HuggingFaceTB/SmolLM2-360M-Instruct": dataclasses.replace(
        _SMOLLM2, **_sizes(960, 2560, 32, 15, 5, 64)
    ),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": dataclasses.replace(
        _SMOLLM2, **_sizes(2048, 8192, 24, 32, 32, 64), rope_theta=130_000.0
    ),
    "HuggingFaceTB/SmolLM3-3B": _SMOLLM3,
    "meta-llama/Llama-3.2-1B-Instruct": _LLAMA3,
    "meta-llama/Llama-3.2-3B-Instruct": dataclasses.replace(
        _LLAMA3, **_sizes(3072, 8192, 28, 24, 8, 128)
    ),
    "meta-llama/Llama-3.1-8B-Instruct": dataclasses.replace(
        _LLAMA31, **_sizes(4096, 14_336, 32, 32, 8, 128)
    ),
    "meta-llama/Llama-3.1-70B-Instruct": dataclasses.replace(
        _LLAMA31, **_sizes(8192, 28_672, 80, 64, 8, 128)
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": _QWEN25,
    "Qwen/Qwen2.5-1.5B-Instruct": dataclasses.replace(
        _QWEN25, **_sizes(1536, 8960, 28, 12, 2, 128)
    ),
    "Qwen/Qwen2.5-3B-Instruct": dataclasses.replace(
        _QWEN25, **_sizes(2048, 11_008, 36, 16, 2, 128)
    ),
    "Qwen/Qwen2.5-7B-Instruct": dataclasses.replace(
        _QWEN25_UNTIED, **_sizes(3584, 18_944, 28, 28, 4, 128)
    ),
    "Qwen/Qwen3-0.6B": _QWEN3,
    "Qwen/Qwen3-1.7B": dataclasses.replace(_QWEN3, **_sizes(2048, 6144, 28, 16, 8, 128)),
    "Qwen/Qwen3-4B": dataclasses.replace(_QWEN3, **_sizes(2560, 9728, 36, 32, 8, 128)),
    "Qwen/Qwen3-8B": dataclasses.replace(_QWEN3_UNTIED, **_sizes(4096, 12_288, 36, 32, 8, 128)),
    "Qwen/Qwen3-14B": dataclasses.replace(_QWEN3_UNTIED, **_sizes(5120, 17_408, 40, 40, 8, 128)),
    "Qwen/Qwen3-32B": dataclasses.replace(_QWEN3_UNTIED, **_sizes(5120, 25_600, 64, 64, 8, 128)),
    "Qwen/Qwen3-30B-A3B": dataclasses.replace(
        _QWEN3_UNTIED,
        **_sizes(2048, 6144, 48, 32, 4, 128),
        num_experts=128,
        experts_per_token=8,
        expert_size=768,
        normalize_experts=True,
        family="qwen3_moe",
    ),
    "mistralai/Mistral-7B-Instruct-v0.1": dataclasses.replace(
        _MISTRAL, pattern=("local",), window=4096
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": dataclasses.replace(
        _MISTRAL, vocab_size=32_768, rope_theta=1_000_000.0
    ),
    "google/gemma-2-2b-it": _GEMMA2,
    "google/gemma-2-9b-it": dataclasses.replace(_GEMMA2, **_sizes(3584, 14_336, 42, 16, 8, 256)),
    "google/gemma-3-270m-it": dataclasses.replace(_GEMMA3, **_sizes(640, 2048, 18, 4, 1, 256)),
    "google/gemma-3-1b-it": _GEMMA3,
}
