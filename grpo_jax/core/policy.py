"""A model is a NamedTuple of pure functions.

Symbols: `B` rows, `T` tokens a row, `V` vocabulary, `D` width, `N` slots of a decoder, `S` cache
length.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax

Params = Any  # any pytree of arrays
Head = Any  # the part of `Params` that turns hidden states into logits: any pytree of arrays
Cache = Any  # a decoder's own pytree

HiddenFn = Callable[[Params, jax.Array, jax.Array, jax.Array], jax.Array]
"""(params, tokens i32[B, T], positions i32[B, T], segment_ids i32[B, T]) -> hidden [B, T, D].

Causal inside a segment; tokens of different segments never see each other; segment 0 is padding.
"""

HeadFn = Callable[[Params], Head]
"""params -> the sub-tree that `unembed` needs (for tied embeddings: the embedding table)."""

UnembedFn = Callable[[Head, jax.Array], jax.Array]
"""(head, hidden [..., D]) -> logits f32[..., V], before temperature, after any soft cap."""


class Policy(NamedTuple):
    """A language model, as three pure functions.

    The head is a function of its own, so that the chunked log-probabilities can differentiate a
    chunk of logits with respect to the head alone, and never touch the rest of the parameters.

    A head is row-wise when every one of its arrays has the vocabulary in front, and some of their
    rows give the logits of just those tokens: `unembed(head[a:b], h) = unembed(head, h)[..., a:b]`.
    Saying so lets the head's gradient be written block by block, without a second copy of it.
    `head_shards` says that the arrays live on a mesh, and into how many parts it cuts those rows: a
    block then takes a part of each, and filters use nothing but sums over rows. None: one device.

    A model with routed experts may say where tokens go: `expert_counts`, with the arguments of
    `hidden`, returns f32[B, layers, experts], the real tokens of each row that went to each expert.
    """

    hidden: HiddenFn
    head: HeadFn
    unembed: UnembedFn
    row_wise_head: bool = False
    head_shards: int | None = None
    expert_counts: HiddenFn | None = None


class Grafted(NamedTuple):
    """A policy of a small trained part, over weights that stay as they are.

    A compiled step takes the frozen weights as an argument of their own: a program that closed over
    them would hold them as constants. They are never given away, so others may read them too.

    Attributes:
      bind: frozen weights -> the policy of the trained part.
      frozen: the weights.
    """

    bind: Callable[[Params], Policy]
    frozen: Params


CacheDtype = Literal["model", "bfloat16", "int8"]
"""What a cache holds keys and values in: the compute dtype, or something smaller."""


class Decoder(NamedTuple):
    """Cached decoding for one model, as pure functions over a slot-indexed cache.

    Every leaf of a cache has at least four axes: the slots in front, and the positions second to
    last, so that rows of one cache can be put into another that is longer.

    Attributes:
      init_cache: (slots: int, length: int) -> cache holding `length` positions for each of `slots`
        rows.
      prefill: (params, tokens i32[N, P] right-padded, lengths i32[N], cache) -> (logits f32[N, V]
        of each row's last real token, cache with positions [0, lengths) filled). P <= cache length.
      step: (params, tokens i32[N], positions i32[N], cache) -> (logits f32[N, V], cache). Each
        row's token is written at its own position and sees positions <= its own.
      prepare: params -> the layout that `prefill` and `step` want (casts, a layer's own arrays);
        called once per weight version, outside jit or inside.
    """

    init_cache: Callable[[int, int], Cache]
    prefill: Callable[[Params, jax.Array, jax.Array, Cache], tuple[jax.Array, Cache]]
    step: Callable[[Params, jax.Array, jax.Array, Cache], tuple[jax.Array, Cache]]
    prepare: Callable[[Params], Params]


ApplyFn = Callable[[Params, jax.Array, jax.Array, jax.Array], jax.Array]
"""(params, tokens i32[B, T], positions i32[B, T], segment_ids i32[B, T]) -> logits [B, T, V]."""


def policy_from_apply(apply_fn: ApplyFn) -> Policy:
    """Put any function that returns whole logits behind the same door.

    The "hidden state" of such a policy is its logits, so `[B, T, V]` does exist.
    """

    def head(params: Params) -> Head:
        del params  # the logits are already there
        return ()

    def unembed(head: Head, hidden: jax.Array) -> jax.Array:
        del head  # empty
        return hidden.astype("float32")

    return Policy(hidden=apply_fn, head=head, unembed=unembed)
