"""The product of routed experts, on one device and on a mesh (arXiv:1701.06538).

    y = sum over the k experts e of a token of w_e down_e(act(gate_e(x)) * up_e(x))

No token is dropped: copies of tokens are sorted by expert, and one ragged product gives each expert
its own. The product is a kernel on TPU and GPU; on a CPU it is a masked one over all experts, right
but E / k times the work.

On a mesh every device sorts the tokens of its own rows: the partitioner, left alone, would collect
the tokens of all. Along the axis `expert` a device holds E / e experts and does their part for the
rows of its e neighbours: their tokens are gathered before, and the parts are added up and scattered
after. Matrices are collected over `fsdp`; their width stays split over `tensor`.

Symbols: `B` rows, `T` tokens a row, `D` width, `F` width of an expert, `E` experts, `k` experts a
token, `e` devices along the axis `expert`, `n` tokens at hand.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from grpo_jax.scale import mesh as meshes

Matrices = tuple[jax.Array, jax.Array, jax.Array]  # gate, up [E, F, D], down [E, D, F]
Activation = Callable[[jax.Array], jax.Array]

# x [M, in], sorted by expert, times W [E, out, in].
_BY_EXPERT = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(0,),
)


def mix(
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    matrices: Matrices,
    activation: Activation,
) -> jax.Array:
    """Add up what the chosen experts make of each token.

    Args:
      x: [..., D]; [B, T, D] on a mesh.
      weights: [..., k] of the experts' results.
      chosen: i32[..., k].
      matrices: gate, up and down of all experts.
      activation: of the gate.

    Returns:
      Like x. Under a mesh that the context names (`jax.sharding.use_abstract_mesh`), rows over its
      axes for rows and tokens over `context`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or x.ndim != 3 or not set(meshes.AXES) <= set(mesh.axis_names):
        return _local(x, weights, chosen, matrices, activation)
    rows = PartitionSpec(meshes.ROW_AXES, "context")
    inner = "tensor" if matrices[0].shape[1] % mesh.shape["tensor"] == 0 else None
    if matrices[0].shape[0] % mesh.shape["expert"]:
        raise ValueError(
            f"mesh.expert = {mesh.shape['expert']} does not divide the {matrices[0].shape[0]} "
            "experts of the model; use a divisor"
        )
    wide, narrow = PartitionSpec("expert", inner), PartitionSpec("expert", None, inner)

    def one(x: Any, weights: Any, chosen: Any, *matrices: Any) -> jax.Array:
        return _shard(x, weights, chosen, matrices, activation, mesh.shape["expert"], inner)

    return jax.shard_map(
        one, mesh=mesh, in_specs=(rows, rows, rows, wide, wide, narrow), out_specs=rows
    )(x, weights, chosen, *matrices)


def _shard(
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    matrices: Any,
    activation: Activation,
    parts: int,
    inner: str | None,
) -> jax.Array:
    """What one device does: x [b, t, D] are its own tokens, `matrices` those of its experts."""
    if parts > 1:
        x, weights, chosen = (
            jax.lax.all_gather(a, "expert", axis=0, tiled=True) for a in (x, weights, chosen)
        )
        chosen = chosen - jax.lax.axis_index("expert") * matrices[0].shape[0]
    y = _local(x, weights, chosen, matrices, activation)
    if inner is not None:
        y = jax.lax.psum(y, inner)
    return jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True) if parts > 1 else y


def _local(
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    matrices: Matrices,
    activation: Activation,
) -> jax.Array:
    """Add up what the experts at hand make of tokens; experts outside 0 .. E - 1 give nothing."""
    gate, up, down = matrices
    experts, k = gate.shape[0], chosen.shape[-1]
    tokens, picked = x.reshape(-1, x.shape[-1]), chosen.reshape(-1)
    # Experts that are not here come last, behind the rows that any product reads.
    here = (picked >= 0) & (picked < experts)
    picked = jnp.where(here, picked, experts)
    order = jnp.argsort(picked, stable=True)
    counts = jnp.sum(jax.nn.one_hot(picked, experts, dtype=jnp.int32), axis=0)
    # Rows outside every group may hold anything after a product, NaN too: none goes in or out.
    inside = here[order][:, None]
    copies = jnp.where(inside, tokens[order // k], 0)
    wide = jnp.where(inside, activation(_product(copies, gate, counts)), 0)
    wide = wide * jnp.where(inside, _product(copies, up, counts), 0)
    parts = jnp.where(inside, _product(wide, down, counts), 0)[jnp.argsort(order)]
    parts = parts.reshape(*chosen.shape, -1)
    return jnp.einsum("...kd,...k->...d", parts, weights).reshape(x.shape)


def _product(x: jax.Array, weight: jax.Array, counts: jax.Array) -> jax.Array:
    """Multiply x [M, in], sorted by expert, with W [E, out, in]; each gets `counts` of its rows."""
    return jax.lax.ragged_dot_general(x, weight, counts, _BY_EXPERT)
