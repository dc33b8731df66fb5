"""A matrix with a low-rank change beside it, which the layers multiply with as with any other.

    y = x W^T + scale · (x A^T) B^T        W [out, in], A [r, in], B [out, r]

W + scale · B A is never built, so that a forward pass costs r (in + out) more multiplications a
token and a backward pass that does not ask for W builds no [out, in] gradient either.
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank:
    """Stands where a matrix stands; leading axes (layers) are in front of all three."""

    base: jax.Array  # W
    a: jax.Array
    b: jax.Array
    scale: float = dataclasses.field(metadata={"static": True})

    def __getitem__(self, index) -> "LowRank":
        """All of it: what `variable[...]` asks for."""
        if index is not Ellipsis:
            raise TypeError(f"a low-rank weight has no part {index!r}; only [...]")
        return self

    def astype(self, dtype) -> "LowRank":
        """Cast the three matrices."""
        base, a, b = (x.astype(dtype) for x in (self.base, self.a, self.b))
        return LowRank(base, a, b, self.scale)

    def merged(self) -> jax.Array:
        """W + scale · B A, added up in the adapter's dtype, in W's."""
        change = self.scale * jnp.matmul(self.b, self.a, precision="highest")
        return (self.base.astype(change.dtype) + change).astype(self.base.dtype)


Weight = jax.Array | LowRank


def product(x: jax.Array, weight: Weight) -> jax.Array:
    """x W^T for x [..., in]."""
    if not isinstance(weight, LowRank):
        return jnp.einsum("...i,oi->...o", x, weight)
    return product(x, weight.base) + _change(x, weight)


def rows_product(x: jax.Array, weight: Weight) -> jax.Array:
    """x W^T for x [B, in] with B small, where a CPU wants W on the left.

    The barrier keeps XLA from folding the transposes into a dot that misses its fast path.
    """
    if not isinstance(weight, LowRank):
        return jax.lax.optimization_barrier(weight @ x.T).T
    return rows_product(x, weight.base) + _change(x, weight)


def _change(x: jax.Array, weight: LowRank) -> jax.Array:
    return weight.scale * product(product(x, weight.a), weight.b)
