"""Whole equals chunked, masked equals removed, and no gradient leaks through what is excluded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.core import filtering, logprobs
from grpo_jax.core.batch import TokenScores
from grpo_jax.core.filtering import FilterConfig
from grpo_jax.core.policy import Policy, policy_from_apply

NONE = FilterConfig()
ALL = FilterConfig(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01)

ROWS, WIDTH, D, V = 4, 6, 5, 40


@pytest.fixture(autouse=True)
def quick_compilation():
    """Programs that run once: compiling them well would take four times as long."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def bag_policy(row_wise_head=False, head_shards=None):
    """A model small enough to know by heart: the hidden state is an embedding plus a bias."""

    def hidden(params, tokens, positions, segment_ids):
        return params["embed"][tokens] + positions[..., None] * params["drift"][None, None]

    def unembed(head, hidden):
        return jnp.einsum("...d,vd->...v", hidden, head)

    return Policy(
        hidden=hidden,
        head=lambda params: params["head"],
        unembed=unembed,
        row_wise_head=row_wise_head,
        head_shards=head_shards,
    )


def bag_params(dtype=np.float64, vocabulary=V):
    rng = np.random.default_rng(1)
    return {
        "embed": rng.normal(size=(vocabulary, D)).astype(dtype),
        "drift": rng.normal(size=D).astype(dtype) / 3,
        "head": rng.normal(size=(vocabulary, D)).astype(dtype),
    }


def batch():
    """Return tokens, positions, segment ids: padded, packed, full and empty rows."""
    rng = np.random.default_rng(2)
    segments = np.array(
        [[1, 1, 1, 1, 0, 0], [1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1], [0] * 6], np.int32
    )
    positions = np.array(
        [[0, 1, 2, 3, 0, 0], [0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5], [0] * 6], np.int32
    )
    return rng.integers(0, V, (ROWS, WIDTH)).astype(np.int32), positions, segments


STATIC = ("filter", "chunk_size", "lanes", "row_wise_head", "head_shards")


@functools.partial(jax.jit, static_argnames=STATIC)
def scores_and_gradients(
    params, weights, tokens, positions, segments, mask=None, row_wise_head=False, head_shards=None,
    **options,
):  # fmt: skip
    """Return all scores, and the gradient of a weighted sum of everything that carries one."""

    def loss(params):
        scores = logprobs.token_scores(
            bag_policy(row_wise_head, head_shards), params, tokens, positions, segments,
            unfiltered=True, entropy=True, kept_mass=True, mask=mask, **options,
        )  # fmt: skip
        finite = jnp.where(scores.logprobs > -jnp.inf, scores.logprobs, 0.0)
        parts = (finite, scores.unfiltered, scores.entropy, scores.kept_mass)
        return sum(jnp.sum(w * x) for w, x in zip(weights, parts, strict=True)), scores

    return jax.grad(loss, has_aux=True)(params)


WEIGHTS = np.random.default_rng(3).normal(size=(4, ROWS, WIDTH))


@functools.partial(jax.jit, static_argnums=1)
def by_log_softmax(params, filter):
    """The definition, by plain log-softmax over all logits, ranks and automatic gradients."""
    tokens, positions, segments = batch()
    scored = (segments[:, 1:] > 0) & (segments[:, 1:] == segments[:, :-1])

    def loss(params):
        hidden = bag_policy().hidden(params, tokens, positions, segments)[:, :-1]
        z = jnp.einsum("btd,vd->btv", hidden, params["head"]) / filter.temperature
        keep = kept_by_rank(jax.lax.stop_gradient(z), filter)
        log_p = jax.nn.log_softmax(z)
        at_target = jax.nn.one_hot(tokens[:, 1:], V)
        supported = jnp.sum(at_target * keep, -1) > 0
        filtered = jnp.sum(at_target * z, -1) - jax.nn.logsumexp(z, axis=-1, where=keep)
        mass = jax.lax.stop_gradient(jnp.sum(jnp.exp(log_p) * keep, -1))
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1)
        unfiltered = jnp.sum(at_target * log_p, -1)
        values = (jnp.where(supported, filtered, -jnp.inf), unfiltered, entropy, mass)
        values = [jnp.pad(jnp.where(scored, x, 0.0), ((0, 0), (1, 0))) for x in values]
        finite = [jnp.where(values[0] > -jnp.inf, values[0], 0.0), *values[1:]]
        total = sum(jnp.sum(w * x) for w, x in zip(WEIGHTS, finite, strict=True))
        return total, TokenScores(*values)

    return jax.grad(loss, has_aux=True)(params)


def kept_by_rank(z, filter):
    """Spell out top-k, top-p and min-p by sorting; no ties."""
    rank = jnp.argsort(jnp.argsort(-z, axis=-1), axis=-1)
    keep = rank < (filter.top_k or V)
    p = jnp.where(keep, jnp.exp(z), 0.0)
    above = rank[..., :, None] > rank[..., None, :]
    mass_above = jnp.sum(jnp.where(above, p[..., None, :], 0.0), axis=-1)
    keep &= mass_above < filter.top_p * jnp.sum(p, axis=-1, keepdims=True)
    return keep & (jnp.exp(z - jnp.max(z, axis=-1, keepdims=True)) >= filter.min_p)


@pytest.fixture
def inputs(x64):
    tokens, positions, segments = batch()
    return bag_params(), WEIGHTS, tokens, positions, segments


@pytest.mark.parametrize("filter", [NONE, ALL], ids=["off", "all"])
def test_scores_and_gradients_are_those_of_the_definition(filter, inputs):
    wanted = by_log_softmax(inputs[0], filter)
    assert filter is NONE or np.isneginf(wanted[1].logprobs).any()  # the case is not vacuous
    found = scores_and_gradients(*inputs, filter=filter, chunk_size=None)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11), found, wanted
    )


@pytest.mark.parametrize(
    ("filter", "chunk_size", "lanes"), [(NONE, 1, 1), (NONE, 7, 2), (ALL, 5, 1), (ALL, 100, 4)]
)
def test_chunked_equals_whole(filter, chunk_size, lanes, inputs):
    whole = scores_and_gradients(*inputs, filter=filter, chunk_size=None)
    chunked = scores_and_gradients(*inputs, filter=filter, chunk_size=chunk_size, lanes=lanes)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), chunked, whole
    )


def test_a_row_wise_head_in_blocks_gives_the_same_gradient(inputs, monkeypatch):
    whole = scores_and_gradients(*inputs, filter=ALL, chunk_size=None)
    monkeypatch.setattr(logprobs, "_VOCABULARY_BLOCK", 16)
    for shards in (None, 2, 3):  # 40 = 4 blocks of 10 = 2 blocks of 2 · 10; 3 do not divide it
        blocks = scores_and_gradients(
            *inputs, filter=ALL, chunk_size=5, lanes=2, row_wise_head=True, head_shards=shards
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), blocks, whole
        )


@pytest.mark.parametrize("row_wise_head", [False, True])
def test_a_soft_cap_of_the_logits_is_differentiated_in_chunks_too(
    row_wise_head, inputs, monkeypatch
):
    monkeypatch.setattr(logprobs, "_VOCABULARY_BLOCK", 16)
    params, weights, *rest = inputs
    plain = bag_policy(row_wise_head)
    capped = plain._replace(unembed=lambda w, h: 3.0 * jnp.tanh(plain.unembed(w, h) / 3.0))

    def loss(params, chunk_size):
        scores = logprobs.token_scores(
            capped, params, *rest, filter=NONE, entropy=True, chunk_size=chunk_size
        )
        return jnp.sum(weights[0] * scores.logprobs + weights[1] * scores.entropy)

    whole, chunked = jax.jit(lambda p: [jax.value_and_grad(loss)(p, n) for n in (None, 5)])(params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), chunked, whole
    )


@pytest.mark.parametrize(
    ("vocabulary", "block"), [(49_152, 4096), (151_936, 2374), (4093 * 3, 4093), (49_157, 49_157)]
)
def test_blocks_divide_the_vocabulary_or_are_all_of_it(vocabulary, block):
    assert logprobs._block_size(vocabulary) == block


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_tokens_outside_the_mask_score_zero_and_change_nothing(chunk_size, inputs):
    mask = np.random.default_rng(4).random((ROWS, WIDTH)) < 0.5
    params, weights, *rest = inputs
    full, _ = scores_and_gradients(params, weights * mask, *rest, filter=ALL, chunk_size=chunk_size)
    _, all_scores = scores_and_gradients(*inputs, filter=ALL, chunk_size=chunk_size)
    gradient, scores = scores_and_gradients(*inputs, mask, filter=ALL, chunk_size=chunk_size)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, np.where(mask, b, 0), atol=1e-12),
        scores,
        all_scores,
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), gradient, full)


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_nothing_that_padding_holds_reaches_a_value_or_a_gradient(poison, chunk_size, inputs):
    params, weights, tokens, positions, segments = inputs
    clean = scores_and_gradients(*inputs, filter=ALL, chunk_size=chunk_size)
    # A row of the embedding that only padding uses, and padding targets that do not exist.
    unused = next(v for v in range(V) if v not in tokens[segments > 0])
    params = {**params, "embed": params["embed"].copy()}
    params["embed"][unused] = poison
    tokens = np.where(segments > 0, tokens, unused)
    dirty = scores_and_gradients(
        params, weights, tokens, positions, segments, filter=ALL, chunk_size=chunk_size
    )
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    assert np.all(np.isfinite(dirty[0]["head"]))


def test_a_batch_with_nothing_to_score_runs_no_chunk_and_gives_zeros(inputs):
    params, weights, tokens, positions, segments = inputs
    gradient, scores = scores_and_gradients(
        params, weights, tokens, positions, 0 * segments, filter=NONE, chunk_size=3
    )
    assert all(np.all(x == 0) for x in jax.tree.leaves((gradient, scores)))


def replay():
    """Kept ids [B, T, K] in no order, with repeats and padding; some lists miss their token."""
    rng = np.random.default_rng(5)
    tokens, *_ = batch()
    ids = rng.integers(0, V, (ROWS, WIDTH, 9)).astype(np.int32)
    ids[..., 1] = ids[..., 4]
    ids[..., 2] = np.where(rng.random((ROWS, WIDTH)) < 0.7, tokens, -1)
    ids[..., 6:] = np.where(rng.random((ROWS, WIDTH, 3)) < 0.5, -1, ids[..., 6:])
    return ids


def by_hand(params, kept_ids, temperature):
    """Score and differentiate in numpy, a token at a time; weights as in scores_and_gradients."""
    tokens, positions, segments = batch()
    values, gradient = np.zeros((4, ROWS, WIDTH)), np.zeros_like(params["head"])
    for b, t in np.ndindex(ROWS, WIDTH):
        if t == 0 or segments[b, t] == 0 or segments[b, t] != segments[b, t - 1]:
            continue
        h = params["embed"][tokens[b, t - 1]] + positions[b, t - 1] * params["drift"]
        z = params["head"] @ h / temperature
        log_p = z - np.log(np.sum(np.exp(z)))
        p, entropy = np.exp(log_p), -np.sum(np.exp(log_p) * log_p)
        kept = np.zeros(V, bool)
        kept[[v for v in kept_ids[b, t] if v >= 0]] = True
        y, w = np.eye(V)[tokens[b, t]], WEIGHTS[:, b, t]
        q = np.where(kept, p, 0) / np.sum(p[kept])
        supported = kept[tokens[b, t]]
        values[:, b, t] = np.log(q[tokens[b, t]]) if supported else -np.inf, log_p @ y, entropy, 0
        values[3, b, t] = np.sum(p[kept])
        dz = w[0] * supported * (y - q) + w[1] * (y - p) - w[2] * p * (log_p + entropy)
        gradient += np.outer(dz, h) / temperature
    return values, gradient


@pytest.mark.parametrize(
    ("chunk_size", "lanes", "temperature"),
    [(None, 1, 1.0), (None, 1, 0.7), (5, 1, 0.7), (3, 2, 1.0)],
)
def test_replayed_kept_ids_give_the_distribution_that_the_engine_drew_from(
    chunk_size, lanes, temperature, inputs
):
    ids = replay()
    with np.errstate(divide="ignore"):
        values, d_head = by_hand(inputs[0], ids, temperature)
    assert np.isneginf(values[0]).any()
    gradient, scores = scores_and_gradients(
        *inputs, filter=FilterConfig(temperature=temperature), kept_ids=ids,
        chunk_size=chunk_size, lanes=lanes,
    )  # fmt: skip
    for found, wanted in zip(scores, values, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(gradient["head"], d_head, rtol=1e-10, atol=1e-10)


def test_replaying_what_the_filters_keep_equals_filtering(inputs):
    """Report A09 across engines: the kept set is the same, whoever names it."""
    params, _, tokens, positions, segments = inputs
    filtered = scores_and_gradients(*inputs, filter=ALL, chunk_size=None)
    before = np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
    places = np.pad(positions, ((0, 0), (1, 0)))[:, :-1]
    hidden = params["embed"][before] + places[..., None] * params["drift"]
    z = filtering.scale(jnp.asarray(hidden @ params["head"].T), ALL)
    inside = np.asarray(filtering.kept(z, filtering.support(z, ALL)))
    ids = np.where(inside, np.arange(V), -1).astype(np.int32)
    replayed = scores_and_gradients(
        *inputs, filter=FilterConfig(temperature=ALL.temperature), kept_ids=ids, chunk_size=5
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), replayed, filtered
    )


@pytest.mark.parametrize(
    ("filter", "shape", "message"),
    [
        (FilterConfig(top_p=0.9), (ROWS, WIDTH, 2), "top_p=0.9.* would cut it again"),
        (NONE, (ROWS, WIDTH), r"kept_ids\[4, 6\] must be \[B, T, K\]"),
        (NONE, (ROWS, WIDTH + 1, 2), r"kept_ids\[4, 7, 2\] must be"),
    ],
)
def test_kept_ids_that_cannot_be_meant_are_refused(filter, shape, message):
    tokens, positions, segments = batch()
    with pytest.raises(ValueError, match=message):
        logprobs.token_scores(
            bag_policy(), bag_params(np.float32), tokens, positions, segments,
            filter=filter, kept_ids=jnp.zeros(shape, jnp.int32),
        )  # fmt: skip


@pytest.mark.parametrize(
    "filter", [FilterConfig(vocabulary=V), FilterConfig(0.8, 20, 0.9, 0.01, V)]
)
def test_rows_that_pad_the_head_change_nothing(filter, inputs):
    params, *rest = inputs
    wanted = scores_and_gradients(*inputs, filter=filter, chunk_size=None)
    padded = {**params, "head": np.concatenate([params["head"], np.full((8, D), 3.0)])}
    for chunk_size in (None, 5):
        gradient, scores = scores_and_gradients(padded, *rest, filter=filter, chunk_size=chunk_size)
        np.testing.assert_array_equal(gradient["head"][V:], 0)
        gradient["head"] = gradient["head"][:V]
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12),
            (gradient, scores),
            wanted,
        )


def logits_policy():
    """A policy whose parameters are its logits [B, T, V]."""
    return policy_from_apply(lambda logits, tokens, positions, segments: logits)


def score_logits(logits, targets, filter, chunk_size=None, **options):
    """Score a tuple of targets under one row of logits each, as f32[T]."""
    tokens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.asarray(targets, jnp.int32)])[None]
    logits = jnp.concatenate([logits, logits[-1:]])[None]
    scores = logprobs.token_scores(
        logits_policy(), logits, tokens, jnp.arange(tokens.size)[None], jnp.ones_like(tokens),
        filter=filter, chunk_size=chunk_size, **options,
    )  # fmt: skip
    return jax.tree.map(lambda x: x[0, 1:], scores)


LADDER = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)


def test_report_a07_every_path_divides_by_the_temperature():
    filter = FilterConfig(temperature=0.5)
    scores, chunked = jax.jit(
        lambda z: [score_logits(z, (1,), filter, n, unfiltered=True) for n in (None, 1)]
    )(LADDER)
    for value in (scores.logprobs, scores.unfiltered, chunked.logprobs, chunked.unfiltered):
        np.testing.assert_allclose(value, [-2.1450779], atol=1e-6)
    assert jnp.exp(scores.logprobs - chunked.logprobs) == 1.0


def test_report_a07_temperature_zero_is_refused():
    with pytest.raises(ValueError, match="temperature=0.0 is greedy decoding"):
        score_logits(LADDER, (1,), FilterConfig(temperature=0.0))


def test_report_a09_the_trainer_normalises_over_the_kept_tokens():
    def one(logits):
        scores = score_logits(logits, (1,), FilterConfig(top_k=2), kept_mass=True)
        return scores.logprobs[0], scores.kept_mass

    (value, mass), gradient = jax.jit(jax.value_and_grad(one, has_aux=True))(LADDER)
    np.testing.assert_allclose(value, -1.3132617, atol=1e-6)
    np.testing.assert_allclose(gradient, [[-0.7310586, 0.7310586, 0, 0]], atol=1e-6)
    np.testing.assert_allclose(mass, [0.8807971], atol=1e-6)


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 5, 7])
def test_report_a38_every_chunk_size_gives_the_gradient_of_the_whole(chunk_size):
    logits = np.repeat(LADDER, 5, axis=0)

    def total(logits):
        return jnp.sum(score_logits(logits, (1,) * 5, NONE, chunk_size).logprobs)

    gradient = jax.jit(jax.grad(total))(logits)
    wanted = [-0.6439143, 0.7631172, -0.0871443, -0.0320586]
    np.testing.assert_allclose(gradient, np.broadcast_to(wanted, (5, 4)), atol=1e-6)


@pytest.mark.parametrize("chunk_size", [None, 1])
def test_report_a36_a_tied_table_gets_both_of_its_gradients(chunk_size):
    policy = Policy(
        hidden=lambda table, tokens, positions, segments: table[tokens],
        head=lambda table: table,
        unembed=lambda head, hidden: jnp.einsum("...d,vd->...v", hidden, head),
    )
    tokens = jnp.array([[0, 1]])

    def one(table):
        return logprobs.token_scores(
            policy, table, tokens, jnp.array([[0, 1]]), jnp.ones_like(tokens),
            filter=NONE, chunk_size=chunk_size,
        ).logprobs[0, 1]  # fmt: skip

    value, gradient = jax.jit(jax.value_and_grad(one))(jnp.eye(2))
    np.testing.assert_allclose(value, -1.3132617, atol=1e-6)
    np.testing.assert_allclose(gradient, [[-1.4621172, 0.7310586], [0.7310586, 0.0]], atol=1e-6)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_an_unsupported_token_is_minus_infinity_with_exactly_no_gradient(chunk_size):
    def total(logits, upstream):
        values = score_logits(
            logits,
            (
                1,
                3,
            ),
            FilterConfig(top_k=2),
            chunk_size,
        ).logprobs
        return jnp.sum(upstream * values), values

    logits = np.repeat(LADDER, 2, axis=0)
    # An upstream gradient that is not zero, as a careless loss would send.
    gradient, values = jax.jit(jax.grad(total, has_aux=True))(logits, jnp.ones(2))
    assert np.isneginf(values[1]) and np.isfinite(values[0])
    np.testing.assert_array_equal(gradient[1], np.zeros(4))
    np.testing.assert_allclose(gradient[0], [-0.7310586, 0.7310586, 0, 0], atol=1e-6)


@pytest.mark.parametrize("filter", [NONE, FilterConfig(top_k=2), FilterConfig(top_p=0.9)])
@pytest.mark.parametrize("fault", [np.nan, np.inf])
def test_a_fault_in_the_logits_is_not_taken_for_a_token_outside_the_support(fault, filter):
    logits = np.repeat(LADDER, 2, axis=0)
    logits[0, 2] = fault
    scores = jax.jit(lambda z: score_logits(z, (1, 1), filter, unfiltered=True))(logits)
    assert np.isnan(scores.logprobs[0]) and np.isnan(scores.unfiltered[0])
    assert np.isfinite(scores.logprobs[1])


def test_impossible_tokens_leave_entropy_and_gradients_finite():
    logits = np.array([[1.0, -np.inf, 0.0, -np.inf]], np.float32)

    def total(logits):
        scores = score_logits(logits, (0,), NONE, entropy=True)
        return scores.logprobs[0] + scores.entropy[0], scores

    gradient, scores = jax.jit(jax.grad(total, has_aux=True))(logits)
    p = np.exp(1.0) / (np.exp(1.0) + 1)
    entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p))
    np.testing.assert_allclose(scores.entropy, [entropy], rtol=1e-6)
    assert np.all(np.isfinite(gradient)) and np.all(gradient[0, [1, 3]] == 0)


def test_bfloat16_models_get_float32_scores_and_a_float32_sum_over_chunks():
    tokens, positions, segments = (np.tile(x, (1, 8)) for x in batch())
    positions = np.zeros_like(positions)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), bag_params(np.float32))

    def total(params, chunk_size):
        scores = logprobs.token_scores(
            bag_policy(), params, tokens, positions, segments, filter=NONE, chunk_size=chunk_size
        )
        assert scores.logprobs.dtype == jnp.float32
        return jnp.sum(scores.logprobs)

    chunked, whole = jax.jit(lambda p: [jax.grad(total)(p, n)["head"] for n in (4, None)])(params)
    assert chunked.dtype == jnp.bfloat16
    # one rounding of each chunk's part and one of the sum, 2^-9 each, of a gradient of order 10
    np.testing.assert_allclose(chunked.astype("f4"), whole.astype("f4"), atol=0.15, rtol=0.02)


def test_the_chunked_head_never_holds_the_logits():
    rows, width, d, vocabulary = 4, 256, 32, 8192
    full = rows * width * vocabulary * 4
    head = vocabulary * d * 4
    tokens = jax.ShapeDtypeStruct((rows, width), jnp.int32)
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
        {
            "embed": np.zeros((vocabulary, d), np.float32),
            "drift": np.zeros(d, np.float32),
            "head": np.zeros((vocabulary, d), np.float32),
        },
    )

    def temporaries(chunk_size, filter):
        def loss(params, tokens, positions, segments):
            scores = logprobs.token_scores(
                bag_policy(), params, tokens, positions, segments,
                filter=filter, unfiltered=True, entropy=True, chunk_size=chunk_size,
            )  # fmt: skip
            return sum(jnp.sum(x) for x in scores if x is not None)

        compiled = jax.jit(jax.grad(loss)).lower(params, tokens, tokens, tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(None, NONE) > full  # what the chunks are for
    for filter in (NONE, ALL):
        # A few copies of a chunk's logits (1/16 of the whole), and two of the head's gradient.
        assert temporaries(64, filter) < 0.35 * full + 2 * head, filter


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_size": 0}, "chunk_size=0 must be at least 1 token"),
        ({"chunk_size": 4, "lanes": 3}, "lanes=3 must divide the 4 rows"),
        ({"chunk_size": 4, "lanes": 0}, "lanes=0 must divide"),
    ],
)
def test_impossible_chunks_are_refused(options, message):
    tokens, positions, segments = batch()
    with pytest.raises(ValueError, match=message):
        logprobs.token_scores(
            bag_policy(), bag_params(np.float32), tokens, positions, segments,
            filter=NONE, **options,
        )  # fmt: skip
