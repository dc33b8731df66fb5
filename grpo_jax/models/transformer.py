"""The families as one Flax NNX module, and the doors through which other rooms see it.

Outside this package a model is a `Policy` (pure functions) and a plain nested dict of arrays:

    embed.table [V, D] · norm.scale [D] · head.weight [V, D] (only when untied)
    layers: stacked [L, ...]
      attention.{query,key,value,output}.weight [out, in] · .bias [out] (query, key, value; Qwen2)
      attention.{query,key}_norm.scale [hd] (Qwen3, Gemma 3)
      mlp.{gate,up,down}.weight [out, in], with experts [E, out, in] · mlp.router.weight [E, D]
      attention_norm.scale, mlp_norm.scale [D]
      attention_post_norm.scale, mlp_post_norm.scale [D] (Gemma)

Symbols: `B` rows, `T` tokens a row, `D` width, `V` vocabulary, `L` layers, `E` experts.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from grpo_jax.core.policy import Head, Params, Policy
from grpo_jax.models import attention, layers, rope
from grpo_jax.models.model_config import Kind, ModelConfig, is_local


class Embedding(nnx.Module):
    """Rows of a table [V, D]."""

    def __init__(self, config: ModelConfig, rngs):
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        table = config.initializer_range * jax.random.normal(rngs.params(), shape, jnp.float32)
        self.table = nnx.Param(table.astype(config.param_dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return look_up(self.config, self.table[...], tokens)


def look_up(config: ModelConfig, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Read the tokens' rows of the table [V, D], in the compute dtype."""
    # Padding may hold any number: an id outside the table reads the nearest row. `jnp.take`
    # would read NaN there, and a NaN activation poisons gradients even where nobody uses it.
    x = table.at[tokens].get(mode="clip").astype(config.compute_dtype)
    return x * jnp.asarray(config.hidden_size**0.5, x.dtype) if config.scale_embeddings else x


class Transformer(nnx.Module):
    """tokens -> hidden states after the last norm."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config, rngs)
        keys = jax.random.split(rngs.params(), config.num_layers)
        self.layers = nnx.vmap(lambda key: layers.Block(config, nnx.Rngs(params=key)))(keys)
        self.norm = layers.RMSNorm(config)
        if not config.tie_embeddings:
            self.head = layers.Linear(config.hidden_size, config.vocab_size, config, rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array):
        """Return hidden [B, T, D] for i32[B, T] tokens, positions and segment ids."""
        return self.norm(self._walk(tokens, positions, segment_ids, lambda block, x, view: None)[0])

    def expert_counts(self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array):
        """Count the real tokens of each row that each layer sends to each expert: f32[B, L, E]."""
        real = (segment_ids > 0).astype(jnp.float32)

        def look(block: layers.Block, x: jax.Array, view: layers.RowView) -> jax.Array:
            chosen = jax.nn.one_hot(block.chosen_experts(x, view), self.config.num_experts)
            return jnp.einsum("btke,bt->be", chosen, real)

        return self._walk(tokens, positions, segment_ids, look)[1].swapaxes(0, 1)

    def _walk(self, tokens, positions, segment_ids, look: Callable[..., Any]):
        """Return x [B, T, D] after the last layer, and what `look` saw in front of each layer."""
        views = row_views(self.config, positions, segment_ids)
        block, stacked = nnx.split(self.layers)

        def one_layer(x, layer):
            weights, kind = layer
            merged, view = nnx.merge(block, weights), views(kind)
            return merged(x, view)[0], look(merged, x, view)

        one_layer = remat(one_layer, self.config.remat)
        stacked = (stacked, kind_of_layer(self.config))
        return jax.lax.scan(one_layer, self.embed(tokens), stacked)


def kind_of_layer(config: ModelConfig) -> np.ndarray:
    """Return, for each layer, which of `config.kinds` it is: i32[L]."""
    return np.array([config.kinds.index(kind) for kind in config.layer_kinds], np.int32)


def row_views(
    config: ModelConfig, positions: jax.Array, segment_ids: jax.Array
) -> Callable[[jax.Array | int], layers.RowView]:
    """Return which kind of layer -> its view of whole rows [B, T].

    Inside a scan the kind is traced: RoPE's tables are selected, and of the different windows the
    one that is asked for is computed.
    """
    lengths = None
    if config.rope_scaling is not None and config.rope_scaling.kind == "dynamic":
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        lengths = jnp.max(jnp.where(same, positions[:, None, :], 0), axis=-1) + 1
    ropes = tuple(rope.table(positions, config, kind, lengths) for kind in config.kinds)
    windows = tuple(dict.fromkeys(window_of(config, kind) for kind in config.kinds))
    attends = [functools.partial(attention.attend, config, segment_ids, w) for w in windows]
    of_kind = np.array([windows.index(window_of(config, kind)) for kind in config.kinds])

    def view(which: jax.Array | int) -> layers.RowView:
        if len(attends) == 1:
            attend = attends[0]
        elif isinstance(which, int):
            attend = attends[of_kind[which]]
        else:
            attend = functools.partial(jax.lax.switch, jnp.asarray(of_kind)[which], attends)
        return layers.RowView(layers.pick(ropes, which), attend)

    return view


def window_of(config: ModelConfig, kind: Kind) -> int | None:
    """Return how many tokens a layer of this kind sees, itself among them; None: all."""
    return config.window if is_local(kind) else None


def remat(layer, name: str):
    """Wrap one layer so that its backward pass recomputes what the policy `name` does not keep."""
    if name == "none":
        return layer
    policy = None if name == "full" else getattr(jax.checkpoint_policies, name)
    # scan already keeps XLA from merging the two computations: no barrier needed
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Draw fresh parameters; works under `jax.jit` (sharded birth) and `jax.eval_shape`."""
    return nnx.to_pure_dict(nnx.split(Transformer(config, nnx.Rngs(params=key)))[1])


def abstract_params(config: ModelConfig) -> Params:
    """Return shapes and dtypes of the parameters, computing nothing."""
    return jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))


def parameter_count(config: ModelConfig) -> int:
    """Count the numbers in the parameters; a tied table counts once."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_params(config)))


def module_for(config: ModelConfig, params: Params) -> Transformer:
    """Put a plain parameter tree back into the module."""
    return nnx.merge(_graphs(config)[0], params)


def block_graph(config: ModelConfig) -> Any:
    """Return what `nnx.merge` needs to make one layer out of its parameters."""
    return _graphs(config)[1]


@functools.lru_cache(maxsize=64)
def _graphs(config: ModelConfig) -> tuple[Any, Any]:
    module = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0)))
    return nnx.split(module)[0], nnx.split(module.layers)[0]


def policy_for(config: ModelConfig) -> Policy:
    """Return the model as pure functions of (params, tokens, positions, segment_ids)."""

    def hidden(params: Params, tokens, positions, segment_ids) -> jax.Array:
        return module_for(config, params)(tokens, positions, segment_ids)

    head = functools.partial(head_of, config)

    def expert_counts(params: Params, tokens, positions, segment_ids) -> jax.Array:
        return module_for(config, params).expert_counts(tokens, positions, segment_ids)

    capped = functools.partial(unembed, cap=config.logit_soft_cap)
    return Policy(
        hidden=hidden,
        head=head,
        unembed=unembed if config.logit_soft_cap is None else capped,
        row_wise_head=True,
        expert_counts=expert_counts if config.num_experts else None,
    )


def head_of(config: ModelConfig, params: Params) -> Head:
    """Return the matrix [V, D] that turns hidden states into logits."""
    return params["embed"]["table"] if config.tie_embeddings else params["head"]["weight"]


def final_norm(config: ModelConfig, params: Params, x: jax.Array) -> jax.Array:
    """Apply the norm that stands before the head."""
    return layers.rms_norm(config, x, params["norm"]["scale"])


def unembed(head: Head, hidden: jax.Array, cap: float | None = None) -> jax.Array:
    """logits = hidden head^T, f32[..., V] (or wider), inside a soft cap where there is one."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    head = head.astype(hidden.dtype)
    logits = jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=wide)
    return attention.soft_cap(logits, cap)
