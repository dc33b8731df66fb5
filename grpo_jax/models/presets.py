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


_LLAMA3_SCALING = RopeScaling("llama3", factor=32.0, original_length=8192)

PRESETS: dict[str, ModelConfig] = {
    # For tests and examples: 256 bytes and a few special tokens, milliseconds a step.
    "tiny": ModelConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=160,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_length=512,
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": ModelConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope_theta=100_000.0,
        bos_token_id=1,
        eos_token_ids=(2,),
        pad_token_id=2,
    ),
    "HuggingFaceTB/SmolLM2-360M-Instruct": ModelConfig(
        vocab_size=49_152,
        hidden_size=960,
        intermediate_size=2560,
        num_layers=32,
        num_heads=15,
        num_kv_heads=5,
        head_dim=64,
        rope_theta=100_000.0,
        bos_token_id=1,
        eos_token_ids=(2,),
        pad_token_id=2,
    ),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": ModelConfig(
        vocab_size=49_152,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=24,
        num_heads=32,
        num_kv_heads=32,
        head_dim=64,
        rope_theta=130_000.0,
        bos_token_id=1,
        eos_token_ids=(2,),
        pad_token_id=2,
    ),
    "meta-llama/Llama-3.2-1B-Instruct": ModelConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_length=131_072,
        rope_theta=500_000.0,
        rope_scaling=_LLAMA3_SCALING,
        bos_token_id=128_000,
        eos_token_ids=(128_001, 128_008, 128_009),
    ),
    "meta-llama/Llama-3.1-8B-Instruct": ModelConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_length=131_072,
        rope_theta=500_000.0,
        rope_scaling=dataclasses.replace(_LLAMA3_SCALING, factor=8.0),
        tie_embeddings=False,
        bos_token_id=128_000,
        eos_token_ids=(128_001, 128_008, 128_009),
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": ModelConfig(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        max_length=32_768,
        rope_theta=1_000_000.0,
        norm_epsilon=1e-6,
        qkv_bias=True,
        family="qwen2",
        bos_token_id=151_643,
        eos_token_ids=(151_645, 151_643),
    ),
}
