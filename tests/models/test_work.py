"""FLOPs of a trained token, by hand, and against the products of a traced gradient."""

import jax
import jax.numpy as jnp
import pytest

from grpo_jax.models import lora, presets, transformer, work
from grpo_jax.models.lora import LoraConfig
from grpo_jax.models.model_config import ModelConfig
from grpo_jax.scale import flops

DENSE = presets.preset("tiny")  # D 64, F 160, 4 heads and 2 of keys of width 16, 2 layers, V 264
ROUTED = ModelConfig(
    vocab_size=264,
    hidden_size=64,
    intermediate_size=160,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_experts=8,
    experts_per_token=2,
    expert_size=32,
    family="qwen3_moe",
    tie_embeddings=False,
)
ATTENTION = 64 * 64 + 2 * 64 * 32 + 64 * 64  # query, key and value, output
MLP = 3 * 64 * 160
EXPERTS, ROUTER = 2 * 3 * 64 * 32, 8 * 64  # two of eight, and a product with each of their rows
HEAD = 264 * 64


def shapes(config: ModelConfig):
    return transformer.abstract_params(config)


def test_a_dense_model_has_six_for_each_weight_that_is_multiplied():
    """Two forward, two for the inputs' gradient, two for the weights'; a table is only read."""
    found = work.of_training(DENSE, shapes(DENSE))
    assert found == work.Work(token=6.0 * 2 * (ATTENTION + MLP), scored=6.0 * HEAD)
    assert found.total(tokens=100, scored=30) == 6.0 * (100 * 2 * (ATTENTION + MLP) + 30 * HEAD)


def test_of_routed_experts_those_of_a_token_count():
    found = work.of_training(ROUTED, shapes(ROUTED))
    assert found.token == 6.0 * 2 * (ATTENTION + EXPERTS + ROUTER)
    assert found.scored == 6.0 * HEAD  # the head of its own; its table is only read
    held = sum(x.size for x in jax.tree.leaves(shapes(ROUTED)))
    assert found.token + found.scored < 6 * held / 2


def test_a_frozen_router_has_no_gradient_of_its_weights():
    frozen = ModelConfig(**(vars(ROUTED) | {"freeze_router": True}))
    found = work.of_training(frozen, shapes(frozen))
    assert found.token == 2 * (6.0 * (ATTENTION + EXPERTS) + 4.0 * ROUTER)


def adapter_of(config: ModelConfig, **settings):
    chosen = LoraConfig(rank=4, **settings)
    base = transformer.init_params(config, jax.random.key(0))
    return base, lora.init_adapter(base, chosen, jax.random.key(1)), chosen


def test_the_base_of_an_adapter_has_no_gradient_of_its_weights():
    """4 for the base, 6 for A and B: rank 4 on all seven matrices of a layer."""
    base, adapter, _ = adapter_of(DENSE)
    inputs_and_outputs = 2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 160)
    found = work.of_training(DENSE, base, adapter)
    assert found.token == 2 * (4.0 * (ATTENTION + MLP) + 6.0 * 4 * inputs_and_outputs)
    assert found.scored == 4.0 * HEAD


def test_a_trunk_has_no_head():
    trunk = {name: x for name, x in shapes(ROUTED).items() if name != "head"}
    assert work.of_trunk(ROUTED, trunk).scored == 0
    assert work.of_trunk(ROUTED, trunk).token == work.of_training(ROUTED, shapes(ROUTED)).token


@pytest.mark.parametrize("kind", ["dense", "routed", "adapter"])
def test_the_products_of_a_traced_gradient_are_these_and_those_of_attention(kind):
    """One row of 16 tokens, every one scored, nothing recomputed but attention's own scores.

    Attention has 2 products of T · T · hd a head forward and 5 backward, RoPE's angles one, and a
    token's experts are added up by their weights: k · D, three times.
    """
    config = ROUTED if kind == "routed" else DENSE
    policy, width = transformer.policy_for(config), 16
    base, adapter, chosen = adapter_of(config, targets=("attention/(query|key|value|output)/",))
    ids = jnp.zeros((1, width), jnp.int32)

    def loss(trained, frozen):
        found = policy if kind != "adapter" else lora.adapt(policy, frozen, chosen.scale)
        hidden = found.hidden(trained, ids, jnp.arange(width)[None], ids + 1)
        return jnp.sum(jax.nn.logsumexp(found.unembed(found.head(trained), hidden), axis=-1))

    trained = adapter if kind == "adapter" else base
    traced = jax.make_jaxpr(jax.grad(loss))(trained, base)
    attention = 2 * 7 * 2 * width * width * 4 * 16
    angles = 2 * width * 16 / 2
    mixing = 3 * 2 * 2 * width * 2 * 64 if kind == "routed" else 0
    expected = work.of_training(config, base, adapter if kind == "adapter" else None)
    assert flops.count(traced) == expected.total(width, width) + attention + angles + mixing
