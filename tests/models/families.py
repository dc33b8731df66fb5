"""Tiny models of each family, as fields of `config.json`: together they turn on every switch."""

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # large, so that every part shows in the logits
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Each exercises switches that the others do not.
FAMILIES = {
    "llama": ("llama", {"head_dim": 8, "tie_word_embeddings": True, "rope_theta": 100.0}),
    "llama3": ("llama", {"head_dim": 8, "rope_theta": 500.0, "rope_scaling": _LLAMA3}),
    "linear": (
        "llama",
        {"head_dim": 10, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "mistral": ("mistral", {"head_dim": 8, "sliding_window": None, "num_key_value_heads": 1}),
    "window": ("mistral", {"head_dim": 8, "sliding_window": 5}),
    "qwen3": ("qwen3", {"head_dim": 8, "rope_theta": 500.0}),
    "qwen3 mixed": (
        "qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    # Three kinds of layers: rotated; not rotated and local; the last not in step with a period.
    "smollm3": (
        "smollm3",
        {
            "no_rope_layers": [1, 0, 0],
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    # A window on layers 0 and 2, soft caps, norms around everything.
    "gemma2": (
        "gemma2",
        {
            "head_dim": 8,
            "sliding_window": 6,
            "query_pre_attn_scalar": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 8,
            "num_key_value_heads": 1,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 40,
            "final_logit_softcapping": 4.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "experts": (
        "qwen3_moe",
        {
            "head_dim": 8,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "experts, weights as they are": (
        "qwen3_moe",
        {
            "num_hidden_layers": 2,
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "use_sliding_window": True,
            "sliding_window": 6,
        },
    ),
    "dynamic": (
        "llama",
        {
            "head_dim": 8,
            "max_position_embeddings": 16,
            "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
        },
    ),
    "yarn": (
        "qwen2",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
            },
        },
    ),
}

# Lengths of two rows [2, 40]. In float64, transformers makes NaN of a padding token that sees no
# real one, so padding stays inside each window; and it lets the longest row of a batch decide on
# dynamic RoPE, where here each row decides for itself.
LENGTHS = {name: [40, 40 if name == "dynamic" else 37] for name in FAMILIES}
