"""Folders that leave here, opened by transformers and peft: our logits on random prompts.

A tiny model of each family; the real SmolLM2 is in test_smollm2.py.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models import hf, lora
from tests.models.families import FAMILIES

pytestmark = pytest.mark.torch
PROMPTS = np.random.default_rng(0).integers(3, 97, (100, 20)).astype(np.int32)
CONFIG = lora.LoraConfig(rank=3, alpha=6.0)
# Routed experts are no linear layers (`lora.target_names` says so): their attention has adapters.
ATTENTION = lora.LoraConfig(rank=3, alpha=6.0, targets=("attention/(query|key|value|output)/",))


def ours(model, params):
    """Logits f32[100, 20, 97]."""
    tokens = jnp.asarray(PROMPTS)
    positions = jnp.broadcast_to(jnp.arange(20, dtype=jnp.int32), tokens.shape)

    @jax.jit
    def logits(params):
        hidden = model.policy.hidden(params, tokens, positions, jnp.ones_like(tokens))
        return model.policy.unembed(model.policy.head(params), hidden)

    return np.asarray(logits(params))


def theirs(module):
    import torch

    with torch.no_grad():
        return module.eval()(torch.tensor(PROMPTS).long()).logits.numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_and_an_adapter_give_our_logits_elsewhere(family, torch_models, tmp_path):
    """Merged in the export, beside the weights in peft: 2e-4, the project's float32 target."""
    pytest.importorskip("peft")
    model = hf.load_model(torch_models(family, "float32").folder)
    config = ATTENTION if model.config.num_experts else CONFIG
    rng = np.random.default_rng(1)
    adapter = jax.tree.map(
        lambda x: x + 0.05 * rng.normal(size=x.shape).astype(np.float32),
        lora.init_adapter(model.params, config, jax.random.key(0)),
    )
    beside = lora.attach(model.params, adapter, config.scale)
    folders = {name: tmp_path / name for name in ("base", "merged", "adapter")}
    hf.save_model(folders["base"], model.config, model.params, max_shard_bytes=20_000)
    hf.save_model(folders["merged"], model.config, beside)
    lora.save_adapter(folders["adapter"], model.config, adapter, config, str(folders["base"]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what importing them says is not ours
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base, merged = (
            AutoModelForCausalLM.from_pretrained(folders[name], attn_implementation="eager")
            for name in ("base", "merged")
        )
        plain, expected = ours(model, model.params), ours(model, beside)
        np.testing.assert_allclose(theirs(base), plain, rtol=0, atol=2e-4)
        adapted = PeftModel.from_pretrained(base, str(folders["adapter"]))
    assert np.abs(expected - plain).max() > 0.1
    for module in (merged, adapted):
        np.testing.assert_allclose(theirs(module), expected, rtol=0, atol=2e-4)
