"""Temperature, top-k, top-p and min-p: one implementation, shared by the sampler and the trainer.

The order is the reference's: temperature, then top-k, then top-p on what top-k left, then min-p.
Everything runs in float32, or in float64 where the logits are float64.

Whatever the filters, the tokens they keep are a prefix of one ranking: larger logit first, and
smaller token id first among equal logits. So a kept set is two numbers a row, `Support(threshold,
last_id)`, and no sorted copy of the vocabulary ever exists:

    kept(v)  =  z_v > threshold  or  (z_v = threshold and v <= last_id)

Ties. Top-k and min-p keep every token whose logit equals the cut. Top-p keeps, among the tokens
whose logit equals the cut, those with the smallest ids, and just as many as it needs.

Symbols: `V` vocabulary, `z` scaled logits, `...` any leading shape.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

_FEW = 1024  # up to so many values `lax.top_k` beats a search on CPU
_NUCLEUS = 256  # tokens that most nuclei of a language model stay below
_GUESSES = 4  # interpolations, and as many halvings, before a search walks the bits
_BLOCK = 256  # ids a block in the two-level search for a running sum


@dataclasses.dataclass(frozen=True)
class FilterConfig:
    """Which tokens may be drawn, and how sharply.

    Attributes:
      temperature: the logits are divided by it; 0 means greedy, and is legal in sampling only.
      top_k: keep the k most likely tokens, and all that tie with the last; None, 0 and -1 are off,
        more than the vocabulary keeps everything.
      top_p: keep the smallest set of most likely tokens whose mass reaches p (fraction); None, 1
        and more are off, 0 and less keep exactly one token.
      min_p: keep the tokens at least this likely (fraction) compared with the most likely one; 0 is
        off.
      vocabulary: how many ids the tokenizer knows; logits of the ids from there on, which pad a
        model's matrix, count as -inf. None: all of the model's.

    Raises:
      ValueError: a value is out of range, or is not a number.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = 1.0
    min_p: float = 0.0
    vocabulary: int | None = None

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"temperature={self.temperature} must be finite and not negative; "
                "use 1.0 to sample from the model as it is, 0.0 for greedy decoding"
            )
        if self.top_k is not None and (
            isinstance(self.top_k, bool) or self.top_k != int(self.top_k)
        ):
            raise ValueError(
                f"top_k={self.top_k} must be a whole number of tokens, or None for off"
            )
        if self.top_k is not None and self.top_k < -1:
            raise ValueError(f"top_k={self.top_k} must be positive; None, 0 and -1 turn it off")
        if self.top_p is not None and math.isnan(self.top_p):
            raise ValueError("top_p=nan must be a fraction of probability mass; 1.0 turns it off")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p={self.min_p} must lie between 0.0 (off) and 1.0")
        if self.vocabulary is not None and self.vocabulary < 1:
            raise ValueError(
                f"vocabulary={self.vocabulary} must be at least 1, or None for the model's own"
            )

    @property
    def uses_top_k(self) -> bool:
        """Say whether top-k is on."""
        return self.top_k is not None and self.top_k > 0

    @property
    def uses_top_p(self) -> bool:
        """Say whether top-p is on."""
        return self.top_p is not None and self.top_p < 1.0

    @property
    def active(self) -> bool:
        """Say whether any token can be left out; temperature alone does not count."""
        return self.uses_top_k or self.uses_top_p or self.min_p > 0.0

    @property
    def whole(self) -> "FilterConfig":
        """The same temperature and vocabulary without top-k, top-p and min-p."""
        return dataclasses.replace(self, top_k=None, top_p=1.0, min_p=0.0)

    @property
    def greedy(self) -> bool:
        """Say whether the most likely token is taken without drawing."""
        return self.temperature == 0.0


class Support(NamedTuple):
    """The kept set of each row: a value, and the last id kept among the logits equal to it."""

    threshold: jax.Array  # f32[...]
    last_id: jax.Array  # i32[...]


def check_trainable(config: FilterConfig) -> None:
    """Refuse a filter whose log-probabilities cannot be trained on.

    Raises:
      ValueError: the temperature is 0.
    """
    if config.greedy:
        raise ValueError(
            "temperature=0.0 is greedy decoding: its distribution has no log-probabilities to "
            "train on; use a temperature above 0.0 (1.0 is the usual choice)"
        )


def check_vocabulary(config: FilterConfig, vocabulary: int) -> None:
    """Refuse, where a run is put together, what the model's vocabulary cannot fill.

    The filters themselves keep everything then; in a configuration it is a slip.

    Raises:
      ValueError: top_k exceeds the vocabulary, or `config.vocabulary` exceeds what is there.
    """
    if config.vocabulary is not None:
        if config.vocabulary > vocabulary:
            raise ValueError(
                f"vocabulary={config.vocabulary} is more than the {vocabulary} tokens there are; "
                "lower it, or use None for all of them"
            )
        vocabulary = config.vocabulary
    if config.uses_top_k and config.top_k is not None and config.top_k > vocabulary:
        raise ValueError(
            f"top_k={config.top_k} is more than the vocabulary of {vocabulary} tokens; "
            "lower it, or turn it off with None"
        )


def scale(logits: jax.Array, config: FilterConfig) -> jax.Array:
    """Divide logits [..., V] by the temperature, and rule out ids beyond the vocabulary.

    Returns:
      f32[..., V], or float64 where the logits are; a temperature of 0 leaves them as they are.
    """
    z = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if config.temperature not in (0.0, 1.0):
        z = z / config.temperature
    if config.vocabulary is None or config.vocabulary >= z.shape[-1]:
        return z
    ids = jax.lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1)
    return jnp.where(ids < config.vocabulary, z, -jnp.inf)


def support(z: jax.Array, config: FilterConfig, *, spread: bool = False) -> Support:
    """Find the tokens that top-k, then top-p, then min-p keep.

    There are two ways to the same set. A search by sums over whole rows is all that accelerators
    and meshes see: there `lax.top_k` sorts the vocabulary, or collects it on every device. On a
    CPU rows are walked one by one, so that the passes of a search stay in cache, and `lax.top_k`
    looks among the most likely tokens first.

    Args:
      z: f32[..., V] scaled logits; -inf entries are never kept.
      config: the filters; the temperature is not read.
      spread: the rows or their vocabulary are spread over a mesh.

    Returns:
      The kept set of each row.
    """
    if spread:
        return _support(z, config, few=False)

    def row_by_row(z: jax.Array) -> Support:
        found = jax.lax.map(lambda row: _support(row, config, few=True), z.reshape(-1, z.shape[-1]))
        return jax.tree.map(lambda x: x.reshape(z.shape[:-1]), found)

    return jax.lax.platform_dependent(
        z, cpu=row_by_row, default=lambda z: _support(z, config, few=False)
    )


def _support(z: jax.Array, config: FilterConfig, few: bool) -> Support:
    """Apply the filters in their order; `few`: with the help of `lax.top_k`."""
    vocabulary = z.shape[-1]
    peak = jnp.max(z, axis=-1)
    found = Support(
        threshold=jnp.full(peak.shape, -jnp.inf, z.dtype),
        last_id=jnp.full(peak.shape, vocabulary - 1, jnp.int32),
    )
    largest = None
    if config.uses_top_k and config.top_k is not None and config.top_k < vocabulary:
        if few and config.top_k <= _FEW:
            largest = _few_largest(z, int(config.top_k))
        kth = largest[..., -1] if largest is not None else _kth_largest(z, peak, config.top_k)
        found = found._replace(threshold=kth)
    if config.uses_top_p and config.top_p is not None:
        if few and largest is None:
            largest = _few_largest(z, min(_NUCLEUS, vocabulary))
        found = _top_p(z, peak, found, largest, float(config.top_p))
    if config.min_p > 0.0:
        # p_v >= min_p · p_max  ⇔  z_v >= z_max + log(min_p)
        floor = peak + math.log(config.min_p)
        raised = floor > found.threshold
        found = Support(
            threshold=jnp.where(raised, floor, found.threshold),
            last_id=jnp.where(raised, vocabulary - 1, found.last_id),
        )
    return found


def kept(z: jax.Array, found: Support) -> jax.Array:
    """Spell a kept set out as bool[..., V]."""
    threshold, last_id = found.threshold[..., None], found.last_id[..., None]
    ids = jax.lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1)
    inside = (z > threshold) | ((z == threshold) & (ids <= last_id))
    return inside & (z > -jnp.inf)


def apply_filters(logits: jax.Array, config: FilterConfig) -> jax.Array:
    """Scale logits and set what the filters leave out to -inf.

    Args:
      logits: [..., V] in any float type.
      config: temperature and filters.

    Returns:
      f32[..., V].
    """
    z = scale(logits, config)
    if not config.active:
        return z
    return jnp.where(kept(z, support(z, config)), z, -jnp.inf)


def invert_running_sum(weights: jax.Array, target: jax.Array) -> jax.Array:
    """Find the first id at which the running sum of non-negative weights exceeds a target.

    Two levels, so that a row of `V` weights costs one pass and two short scans: first the block of
    ids, then the id within the block. The answer always has a positive weight, also where rounding
    leaves the whole sum just below the target.

    Args:
      weights: f32[..., V], at least one positive in each row.
      target: f32[...].

    Returns:
      i32[...] ids.
    """
    vocabulary = weights.shape[-1]
    blocks = -(-vocabulary // _BLOCK)
    padding = [(0, 0)] * (weights.ndim - 1) + [(0, blocks * _BLOCK - vocabulary)]
    table = jnp.pad(weights, padding).reshape(*weights.shape[:-1], blocks, _BLOCK)
    sums = jnp.sum(table, axis=-1)
    block, before = _first_beyond(sums, target)
    row = jnp.take_along_axis(table, block[..., None, None], axis=-2).squeeze(-2)
    within, _ = _first_beyond(row, target - before)
    return (block * _BLOCK + within).astype(jnp.int32)


def argmax(z: jax.Array) -> jax.Array:
    """Find the smallest id of the largest logit, i32[...]; a row with NaN gives an arbitrary id."""
    # XLA's argmax reduces pairs, several times slower on CPU than a maximum and a search for it.
    best = (z == jnp.max(z, axis=-1, keepdims=True)).astype(jnp.float32)
    return jnp.minimum(invert_running_sum(best, jnp.zeros(z.shape[:-1])), z.shape[-1] - 1)


def _first_beyond(weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the first index whose running sum exceeds the target, and the sum before it."""
    running = jnp.cumsum(weights, axis=-1)
    # `weights > 0` guards against running sums that rounding leaves not quite monotone.
    beyond = (running > target[..., None]) & (weights > 0)
    last_positive = weights.shape[-1] - 1 - jnp.argmax(weights[..., ::-1] > 0, axis=-1)
    index = jnp.where(jnp.any(beyond, axis=-1), jnp.argmax(beyond, axis=-1), last_positive)
    at = jnp.take_along_axis(running - weights, index[..., None], axis=-1).squeeze(-1)
    return index, at


def _kth_largest(z: jax.Array, peak: jax.Array, k: int) -> jax.Array:
    """Return the k-th largest value of each row, -inf where fewer are finite."""
    finite = z > -jnp.inf
    smallest = jnp.min(jnp.where(finite, z, jnp.inf), axis=-1)

    def above(threshold: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(z > threshold[..., None], 1.0, 0.0).astype(z.dtype), axis=-1)

    goal = jnp.full(peak.shape, k, z.dtype)
    found = _first_below(above, goal, holding=peak, failing=jnp.nextafter(smallest, -jnp.inf))
    return jnp.where(jnp.sum(finite, axis=-1) < k, -jnp.inf, found)


def _few_largest(z: jax.Array, k: int) -> jax.Array:
    """Return the k largest values of each row in falling order, [..., k]."""
    # Without the barrier, taking one of the values turns the call into a full sort.
    return jax.lax.optimization_barrier(jax.lax.top_k(z, k)[0])


def _top_p(
    z: jax.Array, peak: jax.Array, found: Support, largest: jax.Array | None, p: float
) -> Support:
    """Narrow a kept set (without ties cut) to its most likely tokens of mass p.

    A token stays while the mass ranked before it is below p, so the token that crosses p stays and
    the first always does.
    """
    weight = jnp.where(z >= found.threshold[..., None], jnp.exp(z - peak[..., None]), 0.0)
    goal = p * jnp.sum(weight, axis=-1)

    def mass_above(threshold: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(z > threshold[..., None], weight, 0.0), axis=-1)

    def search() -> jax.Array:
        # Tokens of weight up to (1 - p)/V together hold at most 1 - p, so the cut lies above them.
        floor = peak + (math.log(max(1.0 - p, 1e-30) / z.shape[-1]) - 0.5)
        below = jnp.maximum(floor, jnp.nextafter(found.threshold, -jnp.inf))
        return _first_below(mass_above, goal, holding=peak, failing=below)

    if largest is None:
        cut = search()
    else:
        cut, covered = _cut_among(largest, peak, goal)
        # A row's answer must not depend on its neighbours, so covered rows never take the search's.
        far = jax.lax.cond(jnp.all(covered), lambda: cut, search)
        cut = jnp.where(covered, cut, far)
    return Support(cut, _last_tie(z, peak, cut, goal - mass_above(cut)))


def _cut_among(largest: jax.Array, peak: jax.Array, goal: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the smallest of these values ranked before the goal, and whether they reach it."""
    running = jnp.cumsum(jnp.exp(largest - peak[..., None]), axis=-1)
    # The first is ranked before any goal, the next while the sum before it is below the goal.
    stays = jnp.sum(running[..., :-1] < goal[..., None], axis=-1)
    cut = jnp.take_along_axis(largest, stays[..., None], axis=-1).squeeze(-1)
    return cut, running[..., -1] >= goal


def _last_tie(z: jax.Array, peak: jax.Array, cut: jax.Array, missing: jax.Array) -> jax.Array:
    """Return the last id to keep among the logits equal to the cut, smallest ids first."""
    vocabulary = z.shape[-1]
    ties = z == cut[..., None]
    ids = jax.lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1)
    wanted = jnp.clip(jnp.ceil(missing / jnp.exp(cut - peak)), 1.0, None)
    everything = jnp.full(cut.shape, vocabulary - 1, jnp.int32)

    def halve(_, ends):
        too_few, enough = ends
        middle = too_few + (enough - too_few) // 2
        count = jnp.sum(ties & (ids <= middle[..., None]), axis=-1)
        good = count >= wanted
        return jnp.where(good, too_few, middle), jnp.where(good, middle, enough)

    def search() -> jax.Array:
        start = (jnp.full_like(everything, -1), everything)
        return jax.lax.fori_loop(0, vocabulary.bit_length(), halve, start)[1]

    return jax.lax.cond(jnp.any(wanted < jnp.sum(ties, axis=-1)), search, lambda: everything)


def _first_below(
    above: Callable[[jax.Array], jax.Array], goal: jax.Array, holding: jax.Array, failing: jax.Array
) -> jax.Array:
    """Return the smallest float at which a falling function of it is below a goal.

    A few interpolations with halvings between come close; then the bit patterns are halved. Every
    float between the ends is a candidate, so the answer is exact: where the function counts or
    weighs the entries above a value, it is an entry of that row.

    Args:
      above: f[...] -> f[...], falling.
      goal: f[...].
      holding: a value where `above` is below the goal, f[...].
      failing: a smaller one where it is not, f[...].
    """

    def narrow(i: jax.Array, state):
        near, far, at_near, at_far = state
        share = (goal - at_near) / (at_far - at_near)
        share = jnp.where(i % 2 == 0, jnp.clip(share, 0.02, 0.98), 0.5)
        middle = near + share * (far - near)
        # The ends may be the same float; a row of NaN may give anything that ends.
        middle = jnp.clip(middle, far, near)
        value = above(middle)
        good = value < goal
        return (
            jnp.where(good, middle, near),
            jnp.where(good, far, middle),
            jnp.where(good, value, at_near),
            jnp.where(good, at_far, value),
        )

    start = (holding, failing, above(holding), above(failing))
    near, far, *_ = jax.lax.fori_loop(0, 2 * _GUESSES, narrow, start)
    return _bisect(lambda t: above(t) < goal, failing=far, holding=near)


def _bisect(holds, failing: jax.Array, holding: jax.Array) -> jax.Array:
    """Halve the bit patterns of floats between two ends, to the last one where a test holds."""

    def halve(ends):
        near, far = ends
        # The mean of two integers, rounded down, without overflow.
        middle = (near & far) + ((near ^ far) >> 1)
        good = holds(_from_order(middle, holding.dtype))
        return jnp.where(good, middle, near), jnp.where(good, far, middle)

    def unfinished(ends):
        near, far = ends
        # Integers next to each other, whichever is larger; equal ends are finished as well.
        return jnp.any((near & far) + ((near ^ far) >> 1) != jnp.minimum(near, far))

    near, _ = jax.lax.while_loop(unfinished, halve, (_to_order(holding), _to_order(failing)))
    return _from_order(near, holding.dtype)


def _to_order(x: jax.Array) -> jax.Array:
    """Map floats to integers that sort in the same order."""
    integer = jnp.int64 if x.dtype == jnp.float64 else jnp.int32
    bits = jax.lax.bitcast_convert_type(x, integer)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(integer).max, bits)


def _from_order(key: jax.Array, dtype) -> jax.Array:
    """Undo `_to_order`."""
    bits = jnp.where(key < 0, key ^ jnp.iinfo(key.dtype).max, key)
    return jax.lax.bitcast_convert_type(bits, dtype)
