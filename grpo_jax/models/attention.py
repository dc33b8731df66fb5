"""Causal attention over whole rows: one meaning, three implementations chosen by name.

    mixed_t = sum over s of softmax_s(cap(q_t k_s^T / sqrt(hd))) v_s
    where s <= t, t - s < window, and s belongs to the segment of t

- `dot_product`: `jax.nn.dot_product_attention`, on a GPU in half precision by cuDNN. It knows no
  soft cap; with one, `weigh` below takes its place.
- `blocked`: plain XLA, a block of queries at a time against the keys that the block can see. On a
  CPU the scores of a block stay in the cache, and what lies above the diagonal is not computed.
- `splash`: the Pallas kernel of jax for TPU (blocks in on-chip memory, empty ones skipped);
  interpreted on a CPU, which is for tests.
- `auto`: `blocked` on a CPU, else `dot_product`.

None keeps attention weights for the backward pass: they are computed again there.

Symbols: `B` rows, `T` tokens a row, `S` keys, `H` query heads, `K` key-value heads, `G = H / K`,
`hd` width of a head.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash_kernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as splash_masks,
)
from jax.sharding import PartitionSpec

from grpo_jax.models.model_config import ModelConfig
from grpo_jax.scale import mesh as meshes

# Added to nothing and multiplied with nothing: stands where a score is masked. Finite, so that a
# row without any visible key gives numbers and not NaN.
MASKED = -1e30

BLOCK = 64  # queries a block on a CPU; rows of more than `BLOCK * MOST_BLOCKS` have larger ones
MOST_BLOCKS = 16  # each block is a part of the program of its own
LANES = 128  # tokens a block of the TPU kernel: rows are padded to a multiple

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(query [B, T, H, hd], key, value [B, T, K, hd]) -> [B, T, H, hd] in the dtype of `value`."""


def attend(
    config: ModelConfig,
    segment_ids: jax.Array,
    window: int | None,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
) -> jax.Array:
    """Attend inside whole rows by the implementation that `config.attention` names.

    Args:
      config: names it, and may put another number in the place of hd, and a soft cap on the scores.
      segment_ids: i32[B, T]; tokens of different segments never see each other, and those of one
        stand next to each other. Padding (segment 0) sees padding: no query is without a key.
      window: tokens that each sees, itself among them; None: all before it.
      query: [B, T, H, hd].
      key, value: [B, T, K, hd].

    Returns:
      [B, T, H, hd] in the dtype of `value`.

    Raises:
      ValueError: splash on a mesh whose context axis cuts rows.
    """
    implementation = functools.partial(_IMPLEMENTATIONS[config.attention], config, window)
    if config.attention != "splash":  # the kernel keeps no weights by itself
        implementation = jax.checkpoint(implementation, prevent_cse=False)
    return implementation(segment_ids, query, key, value)


def band(queries: int, keys: int, first: int, window: int | None) -> jax.Array:
    """Say which key each of some queries sees: up to itself, the last `window`.

    Tokens of a segment stand next to each other, so that distance is counted inside the row.

    Args:
      queries, keys: how many.
      first: index of the first query among the keys.
      window: as in `attend`.

    Returns:
      bool[queries, keys], True = visible.
    """
    seen = jnp.tri(queries, keys, k=first, dtype=bool)
    return seen if window is None else seen & ~jnp.tri(queries, keys, k=first - window, dtype=bool)


def _scale(config: ModelConfig, width: int) -> float:
    return (config.query_width or width) ** -0.5


def weigh(
    config: ModelConfig, query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array
) -> jax.Array:
    """Mix values under any mask, without a copy of keys for each group, in plain XLA.

    Args:
      config: as in `attend`.
      query: [B, T, H, hd].
      key, value: [B, K, S, hd].
      mask: bool[B, T, S], True = visible.

    Returns:
      [B, T, H, hd] in the dtype of `value`.
    """
    rows, length, heads, width = query.shape
    kv_heads, groups = key.shape[1], heads // key.shape[1]
    # The G heads of a group stand below each other as rows of one matrix: [B, K, G * T, hd].
    query = query.reshape(rows, length, kv_heads, groups, width).transpose(0, 2, 3, 1, 4)
    query = query.reshape(rows, kv_heads, groups * length, width)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("bkqd,bksd->bkqs", query, key, preferred_element_type=wide)
    scores = soft_cap(scores * _scale(config, width), config.attention_soft_cap)
    scores = scores.reshape(rows, kv_heads, groups, length, -1)
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    weights = weights.reshape(rows, kv_heads, groups * length, -1)
    mixed = jnp.einsum("bkqs,bksd->bkqd", weights, value)
    mixed = mixed.reshape(rows, kv_heads, groups, length, width).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(rows, length, heads, width)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """Keep x inside (-cap, cap): cap tanh(x / cap) (arXiv:2408.00118, section 2)."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def _auto(config: ModelConfig, window, *arrays) -> jax.Array:
    """Choose by the platform that the program is compiled for, which need not be this machine's."""
    blocked, dot_product = (functools.partial(f, config, window) for f in (_blocked, _dot_product))
    return jax.lax.platform_dependent(*arrays, cpu=blocked, default=dot_product)


def _dot_product(config: ModelConfig, window, segment_ids, query, key, value) -> jax.Array:
    length = query.shape[1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    mask = same & band(length, length, 0, window)[None]
    if config.attention_soft_cap is not None:
        return weigh(config, query, key.swapaxes(1, 2), value.swapaxes(1, 2), mask)
    # cuDNN knows half precision only, and can be traced only where it is installed: a program that
    # is compiled on a CPU for a GPU that is not there has the plain form.
    half = query.dtype in (jnp.bfloat16, jnp.float16)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask[:, None],
        scale=_scale(config, query.shape[-1]),
        implementation="cudnn" if half and jax.default_backend() == "gpu" else "xla",
    )


def _blocked(config: ModelConfig, window, segment_ids, query, key, value) -> jax.Array:
    length = query.shape[1]
    size = max(BLOCK, -(-length // (MOST_BLOCKS * BLOCK)) * BLOCK)
    key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
    parts = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        begin = 0 if window is None else max(0, start + 1 - window)
        mask = segment_ids[:, start:stop, None] == segment_ids[:, None, begin:stop]
        mask &= band(stop - start, stop - begin, start - begin, window)[None]
        seen = (key[:, :, begin:stop], value[:, :, begin:stop])
        parts.append(weigh(config, query[:, start:stop], *seen, mask))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _splash(config: ModelConfig, window, segment_ids, query, key, value) -> jax.Array:
    """On a mesh that the context names, each device runs the kernel on its own rows and heads."""
    one = functools.partial(_splash_rows, config, window)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not set(meshes.AXES) <= set(mesh.axis_names):
        return one(segment_ids, query, key, value)
    if mesh.shape["context"] > 1:
        raise ValueError(
            f"model.attention = splash keeps rows whole, and mesh.context = "
            f"{mesh.shape['context']} cuts them; use dot_product, or mesh.context = 1"
        )
    heads = "tensor" if key.shape[2] % mesh.shape["tensor"] == 0 else None
    ids, whole = PartitionSpec(meshes.ROW_AXES), PartitionSpec(meshes.ROW_AXES, None, heads)
    return jax.shard_map(
        one, mesh=mesh, in_specs=(ids, whole, whole, whole), out_specs=whole, check_vma=False
    )(segment_ids, query, key, value)


def _splash_rows(config: ModelConfig, window, segment_ids, query, key, value) -> jax.Array:
    """Run the kernel on [B, T, ...] of one device; T is padded to a multiple of its blocks."""
    length, width = query.shape[1], query.shape[-1]
    more = -length % LANES
    pad = lambda x: jnp.pad(x, ((0, 0), (0, more)) + ((0, 0),) * (x.ndim - 2))  # noqa: E731
    segment_ids, query, key, value = map(pad, (segment_ids, query, key, value))
    shape, groups = (length + more, length + more), query.shape[2] // key.shape[2]
    mask = splash_masks.CausalMask(shape)
    if window is not None:
        mask = splash_masks.LocalMask(shape, window_size=(window - 1, 0), offset=0)
    make = functools.partial(
        splash_kernel.make_splash_mqa_single_device,
        mask=splash_masks.MultiHeadMask([mask] * groups),
        block_sizes=_block_sizes(length + more),
        attn_logits_soft_cap=config.attention_soft_cap,
    )
    query = (query * _scale(config, width)).astype(query.dtype)
    query = query.reshape(*query.shape[:2], key.shape[2], groups, width).transpose(0, 2, 3, 1, 4)
    key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)

    def run(interpret: bool, segment_ids, query, key, value):
        kernel: Any = make(interpret=interpret)

        def of_row(ids, query, key, value):  # [T], [K, G, T, hd], [K, T, hd]
            ids = splash_kernel.SegmentIds(ids, ids)
            return jax.vmap(lambda q, k, v: kernel(q, k, v, segment_ids=ids))(query, key, value)

        return jax.vmap(of_row)(segment_ids, query, key, value)  # [B, K, G, T, hd]

    compiled, interpreted = (functools.partial(run, flag) for flag in (False, True))
    mixed = jax.lax.platform_dependent(
        segment_ids, query, key, value, cpu=interpreted, default=compiled
    )
    mixed = mixed.transpose(0, 3, 1, 2, 4).reshape(mixed.shape[0], length + more, -1, width)
    return mixed[:, :length].astype(value.dtype)


def _block_sizes(length: int) -> splash_kernel.BlockSizes:
    """The largest blocks of up to 512 tokens that divide the row."""
    size = next(s for s in (512, 384, 256, LANES) if length % s == 0)
    names = ("block_q", "block_kv", "block_kv_compute")
    backward = ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq")
    sizes: dict[str, Any] = dict.fromkeys((*names, *backward), size)
    return splash_kernel.BlockSizes(**sizes)


_IMPLEMENTATIONS = {
    "auto": _auto,
    "dot_product": _dot_product,
    "blocked": _blocked,
    "splash": _splash,
}
