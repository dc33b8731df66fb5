"""LoRA: an adapter beside frozen weights, in the layers, merged, and as a `peft` folder."""

import dataclasses
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models import cache, hf, lora, presets, transformer
from grpo_jax.models.lora import LoraConfig
from grpo_jax.models.low_rank import LowRank

SHAPE = presets.preset(
    "tiny",
    num_layers=2,
    hidden_size=32,
    intermediate_size=48,
    vocab_size=67,
    qkv_bias=True,
    family="qwen2",
)
CONFIG = LoraConfig(rank=3, alpha=12.0)
POLICY = transformer.policy_for(SHAPE)
RNG = np.random.default_rng(0)
TOKENS = jnp.asarray(RNG.integers(0, 67, (2, 7)), jnp.int32)
POSITIONS = jnp.tile(jnp.arange(7, dtype=jnp.int32), (2, 1))
ONES = jnp.ones((2, 7), jnp.int32)


@pytest.fixture(scope="module")
def base(draw):
    return draw(SHAPE)


@pytest.fixture(scope="module")
def trained(base):
    """An adapter as it is after some training: no matrix of it is 0."""
    adapter = lora.init_adapter(base, CONFIG, jax.random.key(0))
    return jax.tree.map(lambda x: x + 0.05 * RNG.normal(size=x.shape).astype(x.dtype), adapter)


def logits(policy, params):
    return policy.unembed(policy.head(params), policy.hidden(params, TOKENS, POSITIONS, ONES))


def test_a_new_adapter_changes_nothing_and_has_the_shapes_of_the_paper(base):
    adapter = lora.init_adapter(base, CONFIG, jax.random.key(0))
    assert len(adapter) == 7
    up = adapter["layers.mlp.up.weight"]
    assert up["a"].shape == (2, 3, 32) and up["b"].shape == (2, 48, 3)
    assert not np.any(up["b"]) and 0.9 < np.abs(up["a"]).max() * 32**0.5 <= 1
    policy = lora.adapt(POLICY, base, CONFIG.scale)
    np.testing.assert_array_equal(logits(policy, adapter), logits(POLICY, base))


def test_beside_the_weights_equals_merged_in_value_and_gradient(base, trained):
    """float32: the two add the same numbers up in another order."""
    beside = lora.adapt(POLICY, base, CONFIG.scale)
    inside = lora.adapt(POLICY, base, CONFIG.scale, merged=True)
    found, expected = logits(beside, trained), logits(inside, trained)
    assert np.abs(expected - logits(POLICY, base)).max() > 0.1  # it does change something
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())
    np.testing.assert_array_equal(expected, logits(POLICY, lora.merge(base, trained, CONFIG.scale)))
    weights = jnp.asarray(RNG.normal(size=found.shape), jnp.float32)
    slopes = [
        jax.grad(lambda p, policy=policy: (logits(policy, p) * weights).sum())(trained)
        for policy in (beside, inside)
    ]
    for name in trained:
        for part in "ab":
            ours, theirs = (np.asarray(s[name][part]) for s in slopes)
            assert np.abs(theirs).max() > 0, (name, part)
            np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())


@pytest.mark.parametrize("unroll", [True, False])
def test_the_decoder_reads_an_adapter_beside_the_weights(base, trained, unroll):
    decoder = cache.decoder_for(SHAPE, unroll=unroll)
    params = decoder.prepare(lora.attach(base, trained, CONFIG.scale))
    lengths = jnp.array([6, 6])
    _, slots = decoder.prefill(params, TOKENS[:, :6], lengths, decoder.init_cache(2, 8))
    last, _ = decoder.step(params, TOKENS[:, 6], lengths, slots)
    expected = logits(lora.adapt(POLICY, base, CONFIG.scale), trained)[:, 6]
    np.testing.assert_allclose(last, expected, atol=2e-5 * np.abs(expected).max())


def test_attaching_copies_nothing(base, trained):
    whole = lora.attach(base, trained, CONFIG.scale)
    held = {id(x) for x in jax.tree.leaves(whole)}
    assert held == {id(x) for x in jax.tree.leaves((base, trained))}
    merged = lora.merge(base, trained, CONFIG.scale)
    assert merged["embed"]["table"] is base["embed"]["table"]  # no adapter, no copy


def test_a_low_rank_weight_is_taken_whole_only():
    weight = LowRank(jnp.ones((2, 2)), jnp.ones((1, 2)), jnp.ones((2, 1)), 1.0)
    with pytest.raises(TypeError, match="has no part 0"):
        weight[0]


def test_targets_are_patterns(base):
    only = dataclasses.replace(CONFIG, targets=("query/", "layers/mlp/down"))
    assert lora.target_names(base, only) == [
        "layers.attention.query.weight",
        "layers.mlp.down.weight",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": ("q_proj",)}, "'q_proj' matches no weight; paths look like embed/table"),
        ({"targets": ("embed",)}, r"embed/table \(67, 32\) is not the matrix of a linear layer"),
        ({"targets": ("norm",)}, r"scale \(.*\) is not the matrix of a linear layer"),
        ({"rank": 33}, r"lora.rank = 33 is more than .* has; use 32 or less"),
    ],
)
def test_targets_and_ranks_that_do_not_fit_are_named(base, changes, message):
    with pytest.raises(ValueError, match=message):
        lora.target_names(base, dataclasses.replace(CONFIG, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": -1}, "rank = -1 is negative"),
        ({"alpha": 0.0}, "alpha = 0.0 must be positive"),
        ({"targets": ()}, "names no matrix"),
        ({"targets": ("(",)}, "no regular expression"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LoraConfig(**{"rank": 2, **changes})


def test_peft_loads_the_adapter_and_its_merged_model_equals_ours(base, trained, tmp_path):
    """The folders alone, in torch: base + adapter, and the merged export, and our own logits."""
    pytest.importorskip("torch")
    pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what importing them says is not ours
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        hf.save_model(tmp_path / "base", SHAPE, base)
        lora.save_adapter(tmp_path / "adapter", SHAPE, trained, CONFIG, str(tmp_path / "base"))
        hf.save_model(tmp_path / "merged", SHAPE, lora.merge(base, trained, CONFIG.scale))
        module = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        adapted = PeftModel.from_pretrained(module, str(tmp_path / "adapter")).eval()
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokens = torch.tensor(np.asarray(TOKENS)).long()
    with torch.no_grad():
        theirs = adapted(tokens).logits.numpy()
        exported = merged(tokens).logits.numpy()
    ours = logits(lora.adapt(POLICY, base, CONFIG.scale), trained)
    scale = np.abs(ours).max()
    np.testing.assert_allclose(theirs, ours, atol=2e-5 * scale)
    np.testing.assert_allclose(theirs, exported, atol=2e-5 * scale)


def test_an_adapter_folder_replaces_an_adapter_and_nothing_else(base, trained, tmp_path):
    where = tmp_path / "adapter"
    for _ in range(2):
        lora.save_adapter(where, SHAPE, trained, CONFIG, "base")
    assert sorted(p.name for p in where.iterdir()) == [lora.CONFIG, lora.WEIGHTS]
    assert json.loads((where / lora.CONFIG).read_text())["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    (where / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds notes.txt, which no adapter export writes"):
        lora.save_adapter(where, SHAPE, trained, CONFIG, "base")
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]
