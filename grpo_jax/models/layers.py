"""The layers that the transformers of this package are made of, as Flax NNX modules.

Symbols: `B` rows, `T` tokens a row, `S` cached positions, `D` width, `F` width of the MLP, `H`
query heads, `K` key-value heads, `G = H / K`, `hd` width of a head, `E` experts, `k`
experts a token.

Matrices are stored as [out, in], as Hugging Face stores them: `x @ W^T` is the fast form on a CPU
for the forward and for both gradients, and a checkpoint is loaded and saved without a transpose.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from grpo_jax.models import experts, low_rank
from grpo_jax.models.attention import Attend, weigh
from grpo_jax.models.model_config import ModelConfig
from grpo_jax.models.rope import Rope, rotate

Tree = TypeVar("Tree")  # arrays in any container


class View(NamedTuple):
    """What a layer needs to know about where one token a row stands, when it is decoded."""

    rope: Rope
    mask: jax.Array  # bool[B, T, S], True = visible; bool[N, S] for one token a row


def pick(views: tuple[Tree, ...], which: jax.Array | int) -> Tree:
    """Choose what belongs to one layer; inside a scan `which` is traced, and costs one select."""
    if len(views) == 1 or isinstance(which, int):
        return views[which if isinstance(which, int) else 0]
    return jax.tree.map(lambda *options: jax.lax.select_n(which, *options), *views)


class RowView(NamedTuple):
    """What a layer needs to know about whole rows: where the tokens stand, and whom they see."""

    rope: Rope
    attend: Attend


class Linear(nnx.Module):
    """y = x W^T + b."""

    def __init__(
        self, inputs: int, outputs: int, config: ModelConfig, rngs, bias=False, frozen=False
    ):
        self.compute_dtype = config.compute_dtype
        self.frozen = frozen
        weight = jax.random.normal(rngs.params(), (outputs, inputs), jnp.float32)
        self.weight = nnx.Param((config.initializer_range * weight).astype(config.param_dtype))
        self.bias = nnx.Param(jnp.zeros((outputs,), config.param_dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = low_rank.product(x, self._weight())
        return y if self.bias is None else _add_bias(y, self.bias[...])

    def rows(self, x: jax.Array) -> jax.Array:
        """Do the same for x [B, in] with B small, in the form that a CPU does fast."""
        y = low_rank.rows_product(x, self._weight())
        return y if self.bias is None else _add_bias(y, self.bias[...])

    def _weight(self) -> low_rank.Weight:
        weight = self.weight[...].astype(self.compute_dtype)
        return jax.lax.stop_gradient(weight) if self.frozen else weight


Apply = Callable[[Linear, jax.Array], jax.Array]  # Linear.__call__ or Linear.rows


def _add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    return y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)


class RMSNorm(nnx.Module):
    """y = scale * x / sqrt(mean(x^2) + epsilon), in float32 or wider (arXiv:1910.07467).

    With `centered_norms` the factor is 1 + scale, and it too is applied in float32 or wider.
    """

    def __init__(self, config: ModelConfig, width: int | None = None):
        self.config = config
        born = jnp.zeros if config.centered_norms else jnp.ones
        self.scale = nnx.Param(born((width or config.hidden_size,), config.param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(self.config, x, self.scale[...])


def rms_norm(config: ModelConfig, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Compute `RMSNorm` of the last dimension."""
    wide = x.astype(_at_least_float32(x))
    power = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(power + config.norm_epsilon)
    if config.centered_norms:
        factor = 1.0 + scale.astype(normed.dtype)
        return (normed * jnp.broadcast_to(factor, x.shape)).astype(x.dtype)
    return normed.astype(x.dtype) * jnp.broadcast_to(scale.astype(x.dtype), x.shape)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class MLP(nnx.Module):
    """y = down(act(gate(x)) * up(x)), act one of silu and gelu (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, rngs):
        self.activation = ACTIVATIONS[config.activation]
        self.gate = Linear(config.hidden_size, config.intermediate_size, config, rngs)
        self.up = Linear(config.hidden_size, config.intermediate_size, config, rngs)
        self.down = Linear(config.intermediate_size, config.hidden_size, config, rngs)

    def __call__(self, x: jax.Array, linear: Apply = Linear.__call__) -> jax.Array:
        return linear(self.down, self.activation(linear(self.gate, x)) * linear(self.up, x))


class ExpertLinear(nnx.Module):
    """The matrices of all experts: y = x W_e^T, each token with that of its own."""

    def __init__(self, inputs: int, outputs: int, config: ModelConfig, rngs):
        self.compute_dtype = config.compute_dtype
        shape = (config.num_experts, outputs, inputs)
        weight = config.initializer_range * jax.random.normal(rngs.params(), shape, jnp.float32)
        self.weight = nnx.Param(weight.astype(config.param_dtype))

    def cast(self) -> jax.Array:
        """Return the matrices [E, out, in] in the compute dtype."""
        return self.weight[...].astype(self.compute_dtype)


class Experts(nnx.Module):
    """Routed experts, each an MLP, behind the same door as `MLP` (arXiv:1701.06538).

        p = softmax(router(x))                       in float32 or wider
        y = sum over the k largest p_e of w_e mlp_e(x),   w_e = p_e, or p_e / their sum

    No token is dropped, so what a token gets depends on that token alone; see `experts`.
    """

    def __init__(self, config: ModelConfig, rngs):
        self.config = config
        width, inner, frozen = config.hidden_size, config.expert_size, config.freeze_router
        self.router = Linear(width, config.num_experts, config, rngs, frozen=frozen)
        self.gate = ExpertLinear(width, inner, config, rngs)
        self.up = ExpertLinear(width, inner, config, rngs)
        self.down = ExpertLinear(inner, width, config, rngs)

    def __call__(self, x: jax.Array, linear: Apply = Linear.__call__) -> jax.Array:
        weights, chosen = self.route(x, linear)
        matrices = self.gate.cast(), self.up.cast(), self.down.cast()
        return experts.mix(x, weights, chosen, matrices, ACTIVATIONS[self.config.activation])

    def route(self, x: jax.Array, linear: Apply = Linear.__call__) -> tuple[jax.Array, jax.Array]:
        """Return the weights [..., k] in the dtype of x, and the chosen experts i32[..., k]."""
        logits = linear(self.router, x)
        chances = jax.nn.softmax(logits.astype(_at_least_float32(x)), axis=-1)
        weights, chosen = jax.lax.top_k(chances, self.config.experts_per_token)
        if self.config.normalize_experts:
            weights = weights / weights.sum(-1, keepdims=True)
        return weights.astype(x.dtype), chosen


class Attention(nnx.Module):
    """Causal attention in which G query heads share one key-value head (arXiv:2305.13245)."""

    def __init__(self, config: ModelConfig, rngs):
        self.config = config
        self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
        width, bias = config.head_dim, config.qkv_bias
        self.query = Linear(config.hidden_size, self.heads * width, config, rngs, bias)
        self.key = Linear(config.hidden_size, self.kv_heads * width, config, rngs, bias)
        self.value = Linear(config.hidden_size, self.kv_heads * width, config, rngs, bias)
        self.output = Linear(self.heads * width, config.hidden_size, config, rngs)
        self.query_norm = RMSNorm(config, width) if config.qk_norm else None
        self.key_norm = RMSNorm(config, width) if config.qk_norm else None

    def project(self, x: jax.Array, rope: Rope, linear: Apply = Linear.__call__):
        """Return rotated queries [..., H, hd], rotated keys and values [..., K, hd]."""
        query = _split_heads(linear(self.query, x), self.heads)
        key = _split_heads(linear(self.key, x), self.kv_heads)
        value = _split_heads(linear(self.value, x), self.kv_heads)
        query = query if self.query_norm is None else self.query_norm(query)
        key = key if self.key_norm is None else self.key_norm(key)
        return rotate(query, rope), rotate(key, rope), value

    def __call__(self, x: jax.Array, view: RowView):
        """Return what is added to x [B, T, D], and this layer's keys and values [B, T, K, hd]."""
        query, key, value = self.project(x, view.rope)
        return self.output(_merge_heads(view.attend(query, key, value))), (key, value)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); what is added may have a norm as well."""

    def __init__(self, config: ModelConfig, rngs):
        self.config = config
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config)
        self.mlp = Experts(config, rngs) if config.num_experts else MLP(config, rngs)
        self.attention_post_norm = RMSNorm(config) if config.sandwich_norms else None
        self.mlp_post_norm = RMSNorm(config) if config.sandwich_norms else None

    def __call__(self, x: jax.Array, view: RowView):
        mixed, keys_values = self.attention(self.attention_norm(x), view)
        return self._finish(x, mixed), keys_values

    def chosen_experts(self, x: jax.Array, view: RowView) -> jax.Array:
        """Return which experts the tokens x [B, T, D] go to: i32[B, T, k]."""
        assert isinstance(self.mlp, Experts)
        mixed, _ = self.attention(self.attention_norm(x), view)
        return self.mlp.route(self.mlp_norm(self._add_attention(x, mixed)))[1]

    def _add_attention(self, x: jax.Array, mixed: jax.Array) -> jax.Array:
        return x + (mixed if self.attention_post_norm is None else self.attention_post_norm(mixed))

    def _finish(self, x: jax.Array, mixed: jax.Array, linear: Apply = Linear.__call__) -> jax.Array:
        x = self._add_attention(x, mixed)
        y = self.mlp(self.mlp_norm(x), linear)
        return x + (y if self.mlp_post_norm is None else self.mlp_post_norm(y))

    def step_project(self, x: jax.Array, rope: Rope, linear: Apply):
        """Return query [N, H, hd], key and value [N, K, hd] of one token a row, x [N, D]."""
        return self.attention.project(self.attention_norm(x), rope, linear)

    def step_mix(self, x, query, key, value, mask, linear: Apply) -> jax.Array:
        """Finish the block, given cached key and value [N, K, S, hd] and mask bool[N, S]."""
        mixed = weigh(self.config, query[:, None], key, value, mask[:, None])[:, 0]
        return self._finish(x, linear(self.attention.output, _merge_heads(mixed)), linear)


def _at_least_float32(x: jax.Array):
    return jnp.promote_types(x.dtype, jnp.float32)


def _split_heads(x: jax.Array, heads: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], heads, -1)


def _merge_heads(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-2], -1)
