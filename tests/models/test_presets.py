"""Model configs refuse what cannot work, and the named ones have the size their names say."""

import pytest

from grpo_jax.models import model_config, presets, transformer


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


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008),
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
    ],
)
def test_parameter_counts_are_the_published_ones(name, count):
    assert transformer.parameter_count(presets.preset(name)) == count
