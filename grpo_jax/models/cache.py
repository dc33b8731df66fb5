"""Cached decoding: the prompt is read once, then one token a row and step.

A cache holds keys and values [N, K, S, hd] of each layer; every leaf has the rows (slots) in front.
`step` writes one position of each row. Inside a `while_loop` whose carry holds the cache, or under
`jit` with the cache donated, the write happens in place and nothing of the cache is copied.

Two layouts, chosen by the backend. On a CPU the layers are unrolled: each has weights and a cache
of its own, since slicing a layer out of a stack would copy it at every token. Elsewhere the layers
stay stacked under `lax.scan`, with the cache as its carry, and compile time does not grow with
depth.

Keys and values are held in the compute dtype, in bfloat16, or in int8 with one scale a position and
head. They are read back into the compute dtype, a layer at a time.

What stands in the cache beyond a row's own position is garbage: `step` writes a position before
anything may see it.

Symbols: `N` rows (slots), `P` tokens of a padded prompt, `S` positions of the cache, `L` layers,
`K` key-value heads, `hd` width of a head, `D` width, `V` vocabulary.
"""

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from grpo_jax.core.policy import CacheDtype, Decoder, Params
from grpo_jax.models import attention, layers, rope, transformer
from grpo_jax.models.model_config import Kind, ModelConfig


class Int8(NamedTuple):
    """Numbers as whole multiples of a scale."""

    values: jax.Array  # i8[..., S, hd]
    scale: jax.Array  # f32[..., S, 1]


class Slots(NamedTuple):
    """Keys and values of one layer [N, K, S, hd], or of all of them [N, L, K, S, hd]."""

    key: jax.Array | Int8
    value: jax.Array | Int8


Cache = tuple[Slots, ...] | Slots  # one a layer (unrolled), or one for all layers (stacked)


def decoder_for(
    config: ModelConfig, *, unroll: bool | None = None, dtype: CacheDtype = "model"
) -> Decoder:
    """Return the cached form of the model.

    Args:
      config: the model.
      unroll: one program part a layer (see the top of this file); None: on a CPU only.
      dtype: of the cache; "model" is the compute dtype. docs/numerics.md has the errors of others.
    """
    unroll = jax.default_backend() == "cpu" if unroll is None else unroll
    bind = functools.partial
    return Decoder(
        init_cache=bind(init_cache, config, unroll, dtype),
        prefill=bind(prefill, config, unroll),
        step=bind(step, config, unroll),
        prepare=bind(prepare, config, unroll),
    )


def init_cache(
    config: ModelConfig, unroll: bool, dtype: CacheDtype, slots: int, length: int
) -> Cache:
    """Make room for `length` positions of `slots` rows.

    Raises:
      ValueError: RoPE is scaled dynamically and `length` goes beyond the model's own: keys already
        in the cache would have to be rotated anew with every token.
    """
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "dynamic" and length > config.max_length:
        raise ValueError(
            f"a cache of {length} positions is longer than the model's {config.max_length}, and its"
            " dynamic RoPE changes with the length; sample shorter rows, or use yarn"
        )
    kv, width = config.num_kv_heads, config.head_dim
    shape = (slots, kv, length, width) if unroll else (slots, config.num_layers, kv, length, width)

    def empty() -> jax.Array | Int8:
        if dtype == "int8":
            return Int8(jnp.zeros(shape, jnp.int8), jnp.zeros((*shape[:-1], 1), jnp.float32))
        return jnp.zeros(shape, config.compute_dtype if dtype == "model" else jnp.dtype(dtype))

    layers_apart = config.num_layers if unroll else 1
    parts = tuple(Slots(empty(), empty()) for _ in range(layers_apart))
    return parts if unroll else parts[0]


def prepare(config: ModelConfig, unroll: bool, params: Params) -> Params:
    """Cast to the compute dtype and, unrolled, give each layer arrays of its own.

    On one CPU these are views into the stack: copies would take a second, and the memory again.
    """
    if not unroll:
        return _cast(config, params)
    leaves = jax.tree.leaves(params["layers"])
    cut = _views if all(_viewable(config, x) for x in leaves) else _slices
    stacks, structure = jax.tree.flatten(_cast(config, params)["layers"])
    parts = zip(*(cut(x) for x in stacks), strict=True)
    return {
        **_cast(config, {name: x for name, x in params.items() if name != "layers"}),
        "layers": tuple(jax.tree.unflatten(structure, part) for part in parts),
    }


def _cast(config: ModelConfig, params: Params) -> Params:
    def one(x: jax.Array) -> jax.Array:
        # Passed on here where nothing is to be done: a compiled program would copy it.
        return x if x.dtype == config.compute_dtype else _astype(x, config.compute_dtype)

    return jax.tree.map(one, params)


@functools.partial(jax.jit, static_argnums=1)
def _astype(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    return x.astype(dtype)


@jax.jit
def _slices(stack: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(stack[i] for i in range(stack.shape[0]))


def _views(stack: jax.Array) -> list[jax.Array]:
    # Not `np.asarray`: the array would keep that view for as long as it lives, and could then no
    # longer be given away in place.
    whole = np.from_dlpack(cast(Any, stack))
    device = next(iter(stack.devices()))
    return [jax.device_put(part, device, may_alias=True) for part in whole]


def _viewable(config: ModelConfig, x: Any) -> bool:
    return (
        isinstance(x, jax.Array)
        and not isinstance(x, Tracer)
        and x.dtype == config.compute_dtype == jnp.float32
        and len(x.devices()) == 1
        and next(iter(x.devices())).platform == "cpu"
    )


def prefill(
    config: ModelConfig,
    unroll: bool,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
) -> tuple[jax.Array, Cache]:
    """Read right-padded prompts [N, P]; return the last tokens' logits f32[N, V], and the cache."""
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length))
    segment_ids = (positions < lengths[:, None]).astype(jnp.int32)
    views = transformer.row_views(config, positions, segment_ids)

    def one_layer(block: layers.Block, x, slots: Slots, layer: jax.Array | None, kind):
        x, (key, value) = block(x, views(kind))
        return x, Slots(
            _write_prompt(slots.key, key, layer), _write_prompt(slots.value, value, layer)
        )

    x = _embed(config, params, tokens)
    x, cache = _run_layers(config, unroll, one_layer, params["layers"], x, cache)
    last = jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1, mode="clip")[:, 0]
    return _logits(config, unroll, params, last), cache


def step(
    config: ModelConfig,
    unroll: bool,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    cache: Cache,
) -> tuple[jax.Array, Cache]:
    """Read one token a row, i32[N], at its own position; return logits f32[N, V], and the cache."""
    views = step_views(config, positions, jax.tree.leaves(cache)[0].shape[-2])
    linear = layers.Linear.rows if unroll else layers.Linear.__call__

    def one_layer(block: layers.Block, x, slots: Slots, layer: jax.Array | None, kind):
        view = layers.pick(views, kind)
        query, key, value = block.step_project(x, view.rope, linear)
        slots = Slots(
            _write_token(slots.key, key, positions, layer),
            _write_token(slots.value, value, positions, layer),
        )
        seen = slots if layer is None else jax.tree.map(lambda a: _layer(a, layer), slots)
        key, value = _read(seen.key, query.dtype), _read(seen.value, query.dtype)
        return block.step_mix(x, query, key, value, view.mask, linear), slots

    x = _embed(config, params, tokens)
    x, cache = _run_layers(config, unroll, one_layer, params["layers"], x, cache)
    return _logits(config, unroll, params, x), cache


def _run_layers(config, unroll: bool, one_layer, weights, x: jax.Array, cache: Cache):
    """Carry x and the cache through all layers, by a Python loop or by a scan."""
    block = transformer.block_graph(config)
    kinds = transformer.kind_of_layer(config)
    if unroll:
        filled = []
        for layer_weights, slots, kind in zip(weights, cache, kinds.tolist(), strict=True):
            x, slots = one_layer(nnx.merge(block, layer_weights), x, slots, None, kind)
            filled.append(slots)
        return x, tuple(filled)

    def body(carry, inputs):
        layer_weights, layer, kind = inputs
        return one_layer(nnx.merge(block, layer_weights), *carry, layer, kind), None

    inputs = (weights, jnp.arange(config.num_layers), kinds)
    return jax.lax.scan(body, (x, cache), inputs)[0]


def step_views(config: ModelConfig, positions: jax.Array, length: int) -> tuple[layers.View, ...]:
    """Return RoPE's tables and the mask bool[N, S] of one token a row, for each of the kinds."""
    age = positions[:, None] - jnp.arange(length)[None]

    def view(kind: Kind) -> layers.View:
        window = transformer.window_of(config, kind)
        mask = (age >= 0) if window is None else (age >= 0) & (age < window)
        return layers.View(rope.table(positions, config, kind), mask)

    return tuple(view(kind) for kind in config.kinds)


def _layer(stacked: jax.Array, layer: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stacked, layer, axis=1, keepdims=False)


def _write_prompt(
    old: jax.Array | Int8, new: jax.Array, layer: jax.Array | None
) -> jax.Array | Int8:
    """Write [N, P, K, hd] to positions 0 .. P - 1 of one layer."""

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        if layer is None:
            return jax.lax.dynamic_update_slice(old, new, (0, 0, 0, 0))
        return jax.lax.dynamic_update_slice(old, new[:, None], (0, layer, 0, 0, 0))

    return jax.tree.map(write, old, _as_held(new.swapaxes(1, 2), old))


def _write_token(
    old: jax.Array | Int8, new: jax.Array, positions: jax.Array, layer: jax.Array | None
) -> jax.Array | Int8:
    """Write [N, K, hd] to each row's position of one layer; beyond the cache, write nothing."""
    rows = jnp.arange(new.shape[0])

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        place = old.at[rows, :, positions] if layer is None else old.at[rows, layer, :, positions]
        return place.set(new, mode="drop", unique_indices=True)

    return jax.tree.map(write, old, _as_held(new, old))


def _as_held(new: jax.Array, old: jax.Array | Int8) -> jax.Array | Int8:
    """Numbers [..., hd] in the form that a cache holds them in."""
    if isinstance(old, jax.Array):
        return new.astype(old.dtype)
    # scale = max |x| / 127 over a head, values = round(x / scale): off by scale / 2 at most
    new = new.astype(jnp.float32)
    scale = jnp.max(jnp.abs(new), axis=-1, keepdims=True) / 127
    return Int8(jnp.round(new / jnp.where(scale > 0, scale, 1)).astype(jnp.int8), scale)


def _read(held: jax.Array | Int8, dtype: jnp.dtype) -> jax.Array:
    """What a cache holds, in the dtype of the computation."""
    if isinstance(held, jax.Array):
        return held.astype(dtype)
    return held.values.astype(dtype) * held.scale.astype(dtype)


def _embed(config: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    return transformer.look_up(config, params["embed"]["table"], tokens)


def _logits(config: ModelConfig, unroll: bool, params: Params, x: jax.Array) -> jax.Array:
    """Apply the last norm and the head to x [N, D]."""
    x = transformer.final_norm(config, params, x)
    head = transformer.head_of(config, params)
    if not unroll:
        return transformer.unembed(head, x, config.logit_soft_cap)
    # With the table on the left, and a barrier that keeps the transpose out of the dot: several
    # times faster on a CPU.
    wide = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.einsum("vd,dn->vn", head, x.T, preferred_element_type=wide)
    return attention.soft_cap(jax.lax.optimization_barrier(logits).T, config.logit_soft_cap)
