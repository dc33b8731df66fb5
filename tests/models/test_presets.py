"""Model configs refuse what cannot work, and the named ones have the size their names say."""

import pytest

from grpo_jax.models import hf_config, model_config, presets, transformer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers=0 must be at least 1"),
        ({"num_heads": 3}, "num_heads=3 must be a multiple of num_kv_heads=2"),
        ({"num_kv_heads": 0}, "num_heads=4 must be a multiple of num_kv_heads=0"),
        ({"head_dim": 15}, "head_dim=15 must be even"),
        ({"remat": "dots"}, "remat='dots' is not known; choose one of none, full, dots_saveable"),
        ({"param_dtype": "float16"}, "param_dtype='float16' is not known"),
        ({"compute_dtype": "int8"}, "compute_dtype='int8' is not known"),
        ({"family": "gpt2"}, "family='gpt2' is not known; choose one of llama, mistral, qwen2"),
        ({"pattern": ()}, r"pattern=\(\) names no kind of layer"),
        ({"pattern": ("all",)}, "pattern='all' is not known; choose one of global, local"),
        ({"pattern": ("local",)}, "window=None: local layers need one of at least 1 token"),
        ({"window": 8}, "window=8 has no local layer in pattern"),
        ({"activation": "relu"}, "activation='relu' is not known; choose one of silu, gelu_tanh"),
        ({"logit_soft_cap": 0.0}, "logit_soft_cap=0.0 must be positive, or null"),
        ({"num_experts": 4, "expert_size": 8}, "experts_per_token=0 must be from 1 to num_exp"),
        ({"num_experts": 4, "experts_per_token": 5}, "experts_per_token=5 must be from 1 to num"),
        ({"num_experts": 4, "experts_per_token": 2}, "expert_size=0 must be at least 1"),
        ({"freeze_router": True}, "freeze_router=True needs routed experts, and num_experts=0"),
    ],
)
def test_what_cannot_work_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        presets.preset("tiny", **changes)


@pytest.mark.parametrize(
    ("kind", "factor", "message"),
    [
        ("longrope", 2.0, "rope_scaling.kind='longrope' is not known; choose one of linear, dyn"),
        ("yarn", 0.5, "rope_scaling.factor=0.5 must be at least 1"),
    ],
)
def test_a_scaling_that_cannot_work_is_refused(kind, factor, message):
    with pytest.raises(ValueError, match=message):
        model_config.RopeScaling(kind, factor)


def test_unknown_preset_lists_the_known():
    with pytest.raises(ValueError, match="preset='small' is not known; choose one of tiny, "):
        presets.preset("small")


# As the model pages give them; a tied table counts once.
COUNTS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "mistralai/Mistral-7B-Instruct-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "google/gemma-2-2b-it": 2_614_341_888,
    "google/gemma-2-9b-it": 9_241_705_984,
    "google/gemma-3-270m-it": 268_098_176,
    "google/gemma-3-1b-it": 999_885_952,
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_are_the_published_ones(name):
    config = presets.preset(name)
    assert transformer.parameter_count(config) == COUNTS[name]
    fields = hf_config.config_to_fields(config)  # refuses a switch that its family does not have
    assert hf_config.config_from_fields(fields).layer_kinds == config.layer_kinds


def test_every_named_model_is_counted():
    assert {"tiny", *COUNTS} == set(presets.PRESETS)
