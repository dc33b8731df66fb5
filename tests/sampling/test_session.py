"""Sessions: refilled slots, streams, ends from outside, continuations, meshes, what is compiled."""

import contextlib
import dataclasses
import functools

import jax
import numpy as np
import pytest

from grpo_jax.core.filtering import FilterConfig
from grpo_jax.models import cache, model_config, presets, transformer
from grpo_jax.sampling.engine import EngineConfig, NativeEngine
from grpo_jax.sampling.generate import BUDGET, CANCELLED, LENGTH, STOP, SamplingConfig
from grpo_jax.sampling.session import Request
from grpo_jax.sampling.shapes import Shapes
from grpo_jax.scale import mesh as meshes
from grpo_jax.scale import rules

MODEL = presets.preset(
    "tiny", num_layers=2, hidden_size=16, intermediate_size=32, num_heads=4, num_kv_heads=2,
    head_dim=8, vocab_size=48, initializer_range=0.25,
)  # fmt: skip
SAMPLING = SamplingConfig(24, filter=FilterConfig(temperature=0.9, top_k=30))
KEY = jax.random.key(5)
LIMITS = (24, 2, 9, 1, 14, 3, 5, 20, 2)


@functools.cache
def params(seed=0):
    return transformer.init_params(MODEL, jax.random.key(seed))


def decode(tokens):
    return "".join(chr(ord("A") + t) for t in tokens)


def engine(stop_ids=(), decode=decode, **config):
    shapes = EngineConfig(**({"prompt_bucket": 8, "burst": 4} | config))
    return NativeEngine(
        cache.decoder_for(MODEL), SAMPLING, stop_ids=stop_ids, config=shapes, decode=decode
    )


def requests(**options):
    """Nine prompts of 1 to 9 tokens with two completions each, of very different lengths."""
    return [
        Request(np.arange(1, 2 + i), id=i, members=(0, 1), max_new_tokens=limit, **options)
        for i, limit in enumerate(LIMITS)
    ]


def found(completions):
    return {(c.request.id, c.member): c for c in completions}


@functools.cache
def wanted():
    """Everything at one time, in slots that never change."""
    used = engine(prompt_bucket=64, prefill=16, burst=32)
    return found(used.complete(params(), requests(), KEY))


def same(completions, expected=None):
    completions, expected = found(completions), expected or wanted()
    assert completions.keys() == expected.keys()
    for name, c in completions.items():
        assert c.tokens.tolist() == expected[name].tokens.tolist()
        # float32 sums in another order: 1e-5 nats
        np.testing.assert_allclose(c.logprobs, expected[name].logprobs, atol=1e-5)
        assert c.reason == expected[name].reason


@contextlib.contextmanager
def compilations():
    """Count what XLA compiles or takes from its cache on disk."""
    names = []

    def listen(name, duration, **rest):
        del duration
        if name.endswith("backend_compile_duration"):
            names.append(rest.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(
    "config",
    [
        {"rows": 1},
        {"rows": 3, "burst": 1, "prefill": 1},
        {"rows": 4, "prompt_bucket": 4},
        {"rows": 16, "burst": 32, "prefill": 3},
        {},  # 18 slots: a last few completions move into four
    ],
    ids=str,
)
def test_a_completion_does_not_depend_on_slots_refills_or_neighbours(config):
    same(engine(**config).complete(params(), requests(), KEY))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_smaller_cache_depends_on_slots_and_refills_as_little(dtype):
    def sampled(**config):
        shapes = EngineConfig(prompt_bucket=8, burst=4, **config)
        decoder = cache.decoder_for(MODEL, dtype=dtype)
        used = NativeEngine(decoder, SAMPLING, stop_ids=(), config=shapes)
        return found(used.complete(params(), requests(), KEY))

    together, apart = sampled(), sampled(rows=3)
    assert [c.tokens.tolist() for c in together.values()] != [
        c.tokens.tolist() for c in wanted().values()
    ]
    for name, c in apart.items():
        assert c.tokens.tolist() == together[name].tokens.tolist()
        np.testing.assert_allclose(c.logprobs, together[name].logprobs, atol=0.02)


def test_completions_leave_as_they_end_and_a_long_one_holds_nobody():
    order = [c.request.id for c in engine(rows=2).complete(params(), requests(), KEY)]
    assert set(order[-2:]) != {0}  # the two of 24 tokens came first and have left before the last
    long = Request([1], id=0, max_new_tokens=24)
    short = [Request([1], id=i, max_new_tokens=2) for i in range(1, 8)]
    order = [c.request.id for c in engine(rows=2).complete(params(), [long, *short], KEY)]
    assert order == [*range(1, 8), 0]


def test_one_burst_is_cut_short_only_for_who_waits():
    """Without anybody waiting a burst goes on to its end though a slot is free."""
    session = engine(rows=2, burst=8).open(params(), KEY, rows=2)
    session.submit(Request([1], id=0, max_new_tokens=20))
    session.submit(Request([1], id=1, max_new_tokens=3))
    first = {p.request.id: len(p.tokens) for p in session.advance()}
    assert first == {0: 9, 1: 3}
    for i in (2, 3):
        session.submit(Request([1], id=i, max_new_tokens=3))
    second = {p.request.id: len(p.tokens) for p in session.advance()}
    assert second == {0: 2, 2: 3}


def test_tokens_are_told_as_they_are_drawn():
    session = engine(rows=4).open(params(), KEY, rows=4)
    for request in requests():
        session.submit(request)
    told, logprobs, ended = {}, {}, []
    while session.waiting or session.running:
        for news in session.advance():
            name = news.request.id, news.member
            assert len(news.tokens) <= 1 + 4  # the first token, and a burst
            told.setdefault(name, []).extend(news.tokens)
            logprobs.setdefault(name, []).extend(news.logprobs)
            if news.completion is not None:
                ended.append(news.completion)
                assert news.completion.tokens.tolist() == told[name]
                np.testing.assert_array_equal(news.completion.logprobs, np.float32(logprobs[name]))
    same(ended)


def test_a_cancelled_request_leaves_at_once_and_others_do_not_notice():
    session = engine(rows=4).open(params(), KEY, rows=4)
    asked = requests()
    for request in asked:
        session.submit(request)
    session.advance()
    parts = session.cancel(asked[0]) + session.cancel(asked[7], member=1)
    assert [(c.request.id, c.member, c.reason) for c in parts] == [
        (0, 0, CANCELLED), (0, 1, CANCELLED), (7, 1, CANCELLED),
    ]  # fmt: skip
    for c in parts[:2]:  # they were running, and hold what they had
        assert 0 < len(c.tokens) < 24
        assert c.tokens.tolist() == wanted()[0, c.member].tokens[: len(c.tokens)].tolist()
    assert len(parts[2].tokens) == 0  # it still waited
    rest = []
    while session.waiting or session.running:
        rest += [p.completion for p in session.advance() if p.completion is not None]
    gone = {(0, 0), (0, 1), (7, 1)}
    # one of the two that came with request 1 had left before the cancellation, or leaves now
    expected = {name: c for name, c in wanted().items() if name not in gone}
    missing = expected.keys() - found(rest).keys()
    assert missing <= {(1, 0), (1, 1)}
    same(rest, {name: c for name, c in expected.items() if name not in missing})
    assert session.cancel(asked[0]) == []


def continued(parts, weights, version, **options):
    by_request = {}
    for c in parts:
        by_request.setdefault(c.request.id, []).append(c)
    again = []
    for number, some in by_request.items():
        some = tuple(sorted(some, key=lambda c: c.member))
        members = tuple(c.member for c in some)
        old = some[0].request
        again.append(dataclasses.replace(old, members=members, begun=some))
        assert old.id == number
    return list(engine(**options).complete(weights, again, KEY, version=version))


def test_a_budget_stops_partial_rollouts_and_they_continue_as_if_nothing_had_been():
    done = list(engine(rows=5).complete(params(), requests(), KEY, version=3, token_budget=40))
    drawn = sum(len(c.tokens) for c in done)
    assert 40 <= drawn < 40 + 5 * 5  # it is looked at after a burst
    halves = [c for c in done if c.reason == BUDGET]
    assert halves and any(len(c.tokens) for c in halves) and any(not len(c.tokens) for c in halves)
    ended = [c for c in done if c.reason != BUDGET]
    later = continued(halves, params(), version=4, rows=4)
    same(ended + later)
    for c in later:
        begun = len(
            next(h for h in halves if (h.request.id, h.member) == (c.request.id, c.member)).tokens
        )
        assert c.versions.tolist() == [3] * begun + [4] * (len(c.tokens) - begun)


def test_the_second_part_of_a_rollout_has_the_log_probabilities_of_its_own_weights():
    request = Request(np.arange(1, 6), max_new_tokens=12)
    (half,) = engine().complete(params(0), [request], KEY, version=0, token_budget=4)
    (whole,) = continued([half], params(1), version=1)
    first = len(half.tokens)
    assert 0 < first < 12 and whole.tokens[:first].tolist() == half.tokens.tolist()
    np.testing.assert_array_equal(whole.logprobs[:first], half.logprobs)
    row = np.concatenate([request.prompt, whole.tokens])
    np.testing.assert_allclose(
        whole.logprobs[first:], scored(row, params(1))[5 + first :], atol=1e-5
    )
    np.testing.assert_allclose(half.logprobs, scored(row, params(0))[5 : 5 + first], atol=1e-5)


def scored(row, weights):
    """Filtered log-probabilities of a row, from the full forward pass."""
    from grpo_jax.core import logprobs

    tokens = np.asarray(row)[None]
    return np.asarray(
        logprobs.token_scores(
            transformer.policy_for(MODEL), weights, tokens,
            positions=np.arange(tokens.shape[1])[None], segment_ids=np.ones_like(tokens),
            filter=SAMPLING.filter,
        ).logprobs
    )[0]  # fmt: skip


def test_new_weights_in_the_middle_of_a_session():
    used = engine(rows=1)
    session = used.open(params(0), KEY, rows=1, version=0)
    first, second = (Request(np.arange(1, 4), id=i, max_new_tokens=9) for i in range(2))
    session.submit(first)
    session.submit(second)
    session.advance()
    session.update(used.prepare(params(1)), version=1)
    ended = []
    while session.waiting or session.running:
        ended += [p.completion for p in session.advance() if p.completion is not None]
    assert ended[0].versions.tolist() == [0] * 5 + [1] * 4
    assert ended[1].versions.tolist() == [1] * 9
    same([ended[1]], found(engine().complete(params(1), [second], KEY)))


def test_stop_strings_end_a_completion_with_the_token_that_completes_them():
    full = wanted()[0, 0]
    text = decode(full.tokens)
    late = text[10:13]  # in the middle of a burst; two tokens before it are part of it
    assert late not in text[:12]
    session_wide = dataclasses.replace(SAMPLING, stop_strings=("~", late))
    (done,) = engine().complete(
        params(), [dataclasses.replace(requests()[0], members=(0,))], KEY, sampling=session_wide
    )
    assert done.tokens.tolist() == full.tokens[:13].tolist()
    assert (done.reason, done.stop_string) == (STOP, late)
    np.testing.assert_allclose(done.logprobs, full.logprobs[:13], atol=1e-5)
    assert len(done.versions) == 13


def test_a_stop_string_of_one_request_leaves_the_others_alone():
    asked = requests()
    first = decode(wanted()[0, 0].tokens)[0]
    asked[0] = dataclasses.replace(asked[0], stop_strings=(first,))
    done = found(engine(rows=4).complete(params(), asked, KEY))
    assert len(done[0, 0].tokens) == 1 and done[0, 0].reason == STOP
    rest = {name: c for name, c in wanted().items() if name[0] != 0}
    same([c for name, c in done.items() if name[0] != 0], rest)


def test_no_stop_string_among_the_first_tokens():
    full = wanted()[0, 0]
    sampling = dataclasses.replace(
        SAMPLING, min_new_tokens=7, stop_strings=(decode(full.tokens[1:2]),)
    )
    request = dataclasses.replace(requests()[0], members=(0,))
    (done,) = engine(burst=3).complete(params(), [request], KEY, sampling=sampling)
    assert done.tokens.tolist() == full.tokens[:7].tolist()


@pytest.mark.parametrize("shape", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_a_mesh_changes_no_token(shape):
    mesh = meshes.make_mesh(meshes.MeshConfig(**shape))
    table = rules.LLAMA_RULES

    def place(prepared):
        return rules.partition(prepared, mesh, table, say=lambda text: None)

    weights = jax.device_put(params(), place(params()))
    used = NativeEngine(
        cache.decoder_for(MODEL), SAMPLING, stop_ids=(), mesh=mesh, place=place,
        config=EngineConfig(prompt_bucket=8, burst=4, rows=8),
    )  # fmt: skip
    same(used.complete(weights, requests(), KEY))
    # weights that live on one device are brought over
    same(used.complete(params(), requests(), KEY))


def test_what_was_compiled_is_what_is_reported_and_nothing_is_compiled_again():
    used = engine(rows=4)
    jax.random.fold_in(KEY, 1)
    used.prepare(params())
    with compilations() as names:
        list(used.complete(params(), requests(), KEY))
    ours = {f"jit(_{name})" for name in ("empty", "read", "seat", "burst", "arrange")}
    assert sum(name in ours for name in names) == used.programs, names
    with compilations() as names:
        list(used.complete(params(), requests(), KEY))
    assert not ours & set(names), names


def test_a_burst_and_a_seat_hold_one_cache_and_no_copy_of_it():
    """In the compiled program the cache is an alias of its input, and temporaries are smaller."""
    from grpo_jax.sampling.slots import Programs, Rule, Seats

    rows, length = 16, 512
    programs = Programs(cache.decoder_for(MODEL))
    prepared = jax.eval_shape(programs.prepare, params())
    state = jax.eval_shape(functools.partial(programs._empty, rows=rows, length=length), KEY)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache))
    rule = Rule(SAMPLING.filter)
    burst = programs.burst.lower(state, prepared, np.int32(1), rule=rule, steps=32)
    read = jax.eval_shape(
        programs._read, prepared, np.zeros((2, 16), np.int32), np.zeros(2, np.int32)
    )
    seats = Seats(*np.zeros((6, rows), np.int32))
    seat = programs.seat.lower(state, read, seats, KEY, rule=rule)
    for program in (burst, seat):
        memory = program.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= held
        assert memory.temp_size_in_bytes < held / 2, (memory, held)


def test_a_prompt_that_fills_the_context_of_a_model_with_dynamic_rope():
    """The cache is never longer than the model, though buckets are."""
    scaling = model_config.RopeScaling(kind="dynamic", factor=2.0)
    shape = dataclasses.replace(MODEL, max_length=10, rope_scaling=scaling)
    used = NativeEngine(
        cache.decoder_for(shape), SAMPLING, stop_ids=(), context_length=10,
        config=EngineConfig(prompt_bucket=8),
    )  # fmt: skip
    out = used.generate(
        params(),
        [np.arange(1, 10)],
        1,
        KEY,
        sampling=dataclasses.replace(SAMPLING, max_new_tokens=1),
    )
    assert out.tokens.shape == (1, 10) and out.stop_reasons.tolist() == [LENGTH]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "a prompt is a list of at least one token"),
        ({"members": ()}, "request 0 has no members"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"stop_strings": ("",)}, "empty stop string"),
    ],
)
def test_requests_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Request(**({"prompt": [1]} | change))


def test_what_cannot_be_continued_is_refused():
    done = wanted()[3, 0]
    with pytest.raises(ValueError, match="has ended; continue only"):
        Request([1], begun=(done._replace(member=0),))
    half = done._replace(reason=BUDGET)
    with pytest.raises(ValueError, match="asks for members"):
        Request([1], members=(0, 1), begun=(half,))
    with pytest.raises(ValueError, match="has 1 tokens and may have max_new_tokens=1"):
        list(engine().complete(params(), [Request([1], max_new_tokens=1, begun=(half,))], KEY))
    with pytest.raises(ValueError, match="exceeds the model's context of 8"):
        NativeEngine(cache.decoder_for(MODEL), SAMPLING, stop_ids=(), context_length=8).open(
            params(), KEY, rows=1
        ).submit(Request([1]))
    with pytest.raises(ValueError, match="was not given its tokenizer's `decode`"):
        bare = engine(decode=None).open(params(), KEY, rows=1)
        bare.submit(Request([1], stop_strings=("A",)))
    with pytest.raises(ValueError, match="token_budget=0 must be at least 1"):
        engine().complete(params(), requests(), KEY, token_budget=0)


def test_shapes_come_from_short_ladders():
    shapes = Shapes(rows=64, bucket=64, prefill=8, burst=32, context=4000)
    assert shapes.ladder == [64, 16, 4]
    assert (shapes.slots(3), shapes.slots(17), shapes.fewer(64), shapes.fewer(4)) == (4, 64, 16, 0)
    assert sorted({shapes.width(n) for n in range(1, 4001)}) == [
        64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4000,
    ]  # fmt: skip
    assert shapes.length(65, 10_000) == 128 and shapes.length(3000, 10_000) == 4000
    assert (shapes.reads(3), shapes.reads(5), shapes.reads(17)) == ([1] * 3, [8], [8, 8, 1])
    split = dataclasses.replace(shapes, rows=6, multiple=4)
    assert split.ladder == [8] and split.reads(1) == [4]
