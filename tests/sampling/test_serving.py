"""The server and its clients over real HTTP: our own engine behind the dialect, on loopback."""

import asyncio
import contextlib
import dataclasses
import json
import threading
import time

import jax
import numpy as np
import pytest

httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")
starlette = pytest.importorskip("starlette.applications")

from starlette.responses import JSONResponse, PlainTextResponse  # noqa: E402
from starlette.routing import Route  # noqa: E402

from grpo_jax import cli  # noqa: E402
from grpo_jax.core.filtering import FilterConfig  # noqa: E402
from grpo_jax.models import cache, presets, transformer  # noqa: E402
from grpo_jax.sampling.dialect import _settled, read_request  # noqa: E402
from grpo_jax.sampling.engine import EngineConfig, NativeEngine, RemoteConfig  # noqa: E402
from grpo_jax.sampling.generate import BUDGET, STOP_REASONS, SamplingConfig  # noqa: E402
from grpo_jax.sampling.http_client import EngineError  # noqa: E402
from grpo_jax.sampling.remote import RemoteEngine  # noqa: E402
from grpo_jax.sampling.server import Batcher, make_app  # noqa: E402
from grpo_jax.sampling.serving import ServeConfig  # noqa: E402
from grpo_jax.sampling.session import Request  # noqa: E402

CONFIG = presets.preset("tiny", num_layers=1, hidden_size=16, intermediate_size=32, vocab_size=40)
STOP = 7
PROMPTS = [np.array([1, 2, 3]), np.array([4, 5]), np.array([9, 8, 6, 1])]
SAMPLING = SamplingConfig(6, filter=FilterConfig(temperature=0.7, top_k=20))


class Letters:
    """A tokenizer of 40 letters."""

    stop_ids = (STOP,)

    def encode(self, text):
        return [ord(c) - 48 for c in text]

    def decode(self, ids, skip_special=True):
        return "".join(chr(48 + i) for i in ids if not (skip_special and i == STOP))


def params(seed=0):
    return transformer.init_params(CONFIG, jax.random.key(seed))


def native(rows=8):
    decoder = cache.decoder_for(CONFIG)
    return NativeEngine(
        decoder,
        SAMPLING,
        stop_ids=[STOP],
        context_length=24,
        config=EngineConfig(prompt_bucket=4, rows=rows, burst=4),
        decode=Letters().decode,
    )


@contextlib.contextmanager
def listening(app):
    """Serve an application on a free port of this machine; yields the root of its API."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def serving(limits=None, **options):
    """Our own engine, served; yields the root of its API."""
    batcher = Batcher(native(), params(), limits or ServeConfig())
    app = make_app(
        batcher,
        Letters(),
        model="letters",
        context_length=24,
        vocabulary=39,
        limits=limits,
        **options,
    )
    try:
        with listening(app) as url:
            yield url
    finally:
        batcher.close()


@pytest.fixture(scope="module")
def url():
    with serving() as root:
        yield root


def remote(url, publish=None, sampling=SAMPLING, **settings):
    settings = {"retries": 2, "backoff": 0.01, "timeout": 120.0} | settings
    return RemoteEngine(
        RemoteConfig(url=url, **settings),
        sampling,
        stop_ids=[STOP],
        pad_id=39,
        context_length=24,
        publish=publish,
    )


def rows_of(out):
    ends = out.prompt_lengths + out.completion_lengths
    return [
        (tokens[start:end].tolist(), logprobs[start:end])
        for tokens, logprobs, start, end in zip(
            out.tokens, out.logprobs, out.prompt_lengths, ends, strict=True
        )
    ]


def post(url, body, **headers):
    return httpx.post(f"{url}/completions", json=body, headers=headers, timeout=120)


def test_rows_from_a_server_are_those_the_engine_drew(url):
    out = remote(url).generate(params(), PROMPTS, 3, jax.random.key(5))
    assert out.tokens.shape[0] == 9
    for i, (tokens, logprobs) in enumerate(rows_of(out)):
        assert out.tokens[i, : out.prompt_lengths[i]].tolist() == PROMPTS[i // 3].tolist()
        stopped = STOP_REASONS[out.stop_reasons[i]] == "stop"
        assert stopped == (tokens[-1] == STOP)
        assert stopped or len(tokens) == 6
        assert np.all(np.isfinite(logprobs)) and np.all(logprobs < 0)
    for i in range(9):  # the log-probabilities are those of the filtered distribution
        row = out.tokens[i, : out.prompt_lengths[i] + out.completion_lengths[i]]
        expected = scored(row)[out.prompt_lengths[i] :]
        np.testing.assert_allclose(rows_of(out)[i][1], expected, atol=1e-4)


def scored(row):
    """Filtered log-probabilities of a row, computed from the full forward pass."""
    from grpo_jax.core import logprobs

    policy = transformer.policy_for(CONFIG)
    tokens = np.asarray(row)[None]
    positions, segments = np.arange(tokens.shape[1])[None], np.ones_like(tokens)
    chosen = dataclasses.replace(SAMPLING.filter, vocabulary=39)
    scores = logprobs.token_scores(
        policy, params(), tokens, positions=positions, segment_ids=segments, filter=chosen
    )
    return np.asarray(scores.logprobs)[0]


def test_the_key_and_the_request_decide_the_draws_and_neighbours_do_not(url):
    engine = remote(url)
    wanted = rows_of(engine.generate(params(), PROMPTS, 2, jax.random.key(5)))
    alone = engine.generate(params(), PROMPTS[1:2], 2, jax.random.key(5), request_ids=[1])
    assert [row[0] for row in rows_of(alone)] == [row[0] for row in wanted[2:4]]
    other = rows_of(engine.generate(params(), PROMPTS, 2, jax.random.key(6)))
    assert [row[0] for row in other] != [row[0] for row in wanted]


def test_the_openai_client_understands_the_server(url):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=url, api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["letters"]
        answer = client.completions.create(
            model="letters", prompt="12", n=2, max_tokens=4, temperature=0, logprobs=1
        )
        assert len(answer.choices) == 2
        first = answer.choices[0]
        assert first.finish_reason in ("stop", "length")
        assert len(first.logprobs.tokens) == len(first.logprobs.token_logprobs)
        assert "".join(first.logprobs.tokens).startswith(first.text)
        with pytest.raises(openai.BadRequestError, match="frequency_penalty = 1.0 is not offered"):
            client.completions.create(model="letters", prompt="12", frequency_penalty=1.0)
        with pytest.raises(openai.NotFoundError, match="'gpt' is not served"):
            client.completions.create(model="gpt", prompt="12")


KEY = jax.random.key(9)
ASKED = {"model": "letters", "prompt": "12", "seed": 8, "max_tokens": 11, "logprobs": 1}


def test_a_stream_says_what_a_whole_answer_says(url):
    openai = pytest.importorskip("openai")
    extra = {"extra_body": {"return_token_ids": True}}
    with openai.OpenAI(base_url=url, api_key="none") as client:
        whole = client.completions.create(**ASKED, n=2, **extra)
        pieces = list(
            client.completions.create(
                **ASKED, n=2, stream=True, stream_options={"include_usage": True}, **extra
            )
        )
    assert pieces[-1].usage == whole.usage and not pieces[-1].choices
    assert len(pieces) > 1 + 2 * 2  # 11 tokens in bursts of 4, unless a completion stops
    for choice in whole.choices:
        mine = [c for piece in pieces for c in piece.choices if c.index == choice.index]
        assert "".join(c.text for c in mine) == choice.text
        assert [t for c in mine for t in c.token_ids] == choice.token_ids
        values = [v for c in mine for v in c.logprobs.token_logprobs]
        np.testing.assert_allclose(values, choice.logprobs.token_logprobs, atol=1e-5)
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_stop_strings_end_the_text_before_them_and_the_tokens_after(url, stream, keep):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=url, api_key="none") as client:
        text = client.completions.create(**ASKED).choices[0].text
        assert len(text) > 7
        # Its beginning comes with the first burst, its end with the second: no half of it is told.
        stop = text[3:7]
        extra = {"return_token_ids": True, "include_stop_str_in_output": keep}
        answer = client.completions.create(
            **ASKED, stop=[stop, "no such"], stream=stream, extra_body=extra
        )
        choices = [p.choices[0] for p in answer] if stream else answer.choices
    end = text.index(stop)
    assert "".join(c.text for c in choices) == text[: end + len(stop) * keep]
    assert sum(len(c.token_ids) for c in choices) == end + len(stop)
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", stop)


def test_what_may_still_become_a_stop_string_or_a_letter_is_held_back():
    assert _settled("abcXY", ("XYZ", "cQ")) == 3
    assert _settled("abc", ("cQ", "bcd")) == 1
    assert _settled("abc\ufffd", ()) == 3
    assert _settled("abc", ()) == 3


def test_rows_that_a_stop_string_ended_can_be_trained_on(url):
    plain = remote(url).generate(params(), PROMPTS[:1], 1, jax.random.key(5))
    ((tokens, logprobs),) = rows_of(plain)
    sampling = dataclasses.replace(SAMPLING, stop_strings=(Letters().decode(tokens[2:4]),))
    out = remote(url, sampling=sampling).generate(params(), PROMPTS[:1], 1, jax.random.key(5))
    ((same, close),) = rows_of(out)
    assert same == tokens[:4] and STOP_REASONS[out.stop_reasons[0]] == "stop"
    np.testing.assert_allclose(close, logprobs[:4], atol=1e-5)


def test_completions_come_from_a_server_one_by_one_and_continue_where_they_were_left(url):
    engine = remote(url)
    asked = [Request(p, id=i, members=(0, 1, 2)) for i, p in enumerate(PROMPTS)]
    done = list(engine.complete(params(), asked, jax.random.key(5), version=2))
    wanted = rows_of(engine.generate(params(), PROMPTS, 3, jax.random.key(5)))
    assert len(done) == 9
    for c in done:
        tokens, logprobs = wanted[3 * c.request.id + c.member]
        assert c.tokens.tolist() == tokens and c.versions.tolist() == [2] * len(tokens)
        np.testing.assert_allclose(c.logprobs, logprobs, atol=1e-5)

    parts = list(remote(url, concurrency=1).complete(params(), asked, KEY, token_budget=1))
    assert len(parts) == 9
    left = [c for c in parts if STOP_REASONS[c.reason] == "budget"]
    assert len(left) == 6 and not any(len(c.tokens) for c in left)

    full = next(c for c in done if len(c.tokens) > 3)
    half = full._replace(
        reason=BUDGET,
        tokens=full.tokens[:2],
        logprobs=full.logprobs[:2],
        versions=full.versions[:2],
    )
    again = Request(half.request.prompt, members=(half.member,), begun=(half,))
    (whole,) = engine.complete(params(), [again], KEY, version=3)
    assert whole.tokens[:2].tolist() == full.tokens[:2].tolist()
    assert whole.versions.tolist() == [2, 2] + [3] * (len(whole.tokens) - 2)
    row = np.concatenate([half.request.prompt, whole.tokens])
    np.testing.assert_allclose(
        whole.logprobs[2:], scored(row)[len(half.request.prompt) + 2 :], atol=1e-4
    )
    with pytest.raises(ValueError, match="exceeds the model's context of 24"):
        engine.complete(params(), [Request([1], max_new_tokens=24)], KEY)


def test_a_request_joins_what_is_being_decoded_and_leaves_before_it():
    used = NativeEngine(
        cache.decoder_for(CONFIG),
        SAMPLING,
        stop_ids=[],
        config=EngineConfig(prompt_bucket=4, rows=2, burst=2),
    )
    batcher = Batcher(used, params(), ServeConfig())
    order, begun, go_on = [], threading.Event(), threading.Event()

    def tell(choice, news):
        del choice, news
        begun.set()
        assert go_on.wait(60)

    try:
        asked = read({"prompt": [1, 2], "max_tokens": 200})
        long = batcher.submit(asked, tell)
        long.add_done_callback(lambda _: order.append("long"))
        assert begun.wait(60)  # the long one is on its way, and held up
        short = batcher.submit(read({"prompt": [3], "max_tokens": 3, "temperature": 1.0}))
        short.add_done_callback(lambda _: order.append("short"))
        go_on.set()
        assert len(short.result(60)[0].tokens) == 3
        assert len(long.result(60)[0].tokens) == 200
    finally:
        batcher.close()
    assert order == ["short", "long"]


def read(body):
    return read_request(body, "letters", Letters(), None)


def test_a_client_that_goes_away_frees_its_slots():
    used = NativeEngine(
        cache.decoder_for(CONFIG),
        SAMPLING,
        stop_ids=[],
        config=EngineConfig(prompt_bucket=4, rows=1, burst=2),
    )
    batcher = Batcher(used, params(), ServeConfig())
    app = make_app(batcher, Letters(), model="letters")
    endless = {"prompt": [1], "max_tokens": 1_000_000, "stream": True}
    try:
        with listening(app) as url:
            with httpx.stream("POST", f"{url}/completions", json=endless, timeout=60) as answer:
                assert next(answer.iter_lines()).startswith("data: ")
            # the one slot there is serves somebody else
            assert post(url, {"prompt": [2], "max_tokens": 2}).status_code == 200
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/completions", json=endless | {"stream": False}, timeout=1.0)
            assert post(url, {"prompt": [2], "max_tokens": 2}).status_code == 200
    finally:
        batcher.close()


def test_other_samplings_wait_their_turn_and_a_failure_hurts_only_who_runs():
    batcher = Batcher(native(), params(), ServeConfig())
    try:
        asked = [
            read({"prompt": [1, 2], "seed": 1, "temperature": t, "max_tokens": 5})
            for t in (0.0, 1.0, 0.0, 1.0)
        ]
        results = [future.result(60)[0] for future in [batcher.submit(a) for a in asked]]
        assert results[0].tokens.tolist() == results[2].tokens.tolist()
        assert results[1].tokens.tolist() == results[3].tokens.tolist()
        batcher.load({"nonsense": np.zeros(3)}, 1)
        with pytest.raises(Exception, match="layers"):
            batcher.submit(asked[0]).result(60)
        batcher.load(params(), 2)
        again = batcher.submit(asked[0]).result(60)[0]
        assert again.tokens.tolist() == results[0].tokens.tolist()
        assert set(again.versions.tolist()) == {2}
    finally:
        batcher.close()


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"prompt": "12", "stop": [3]}, 400, "stop = [3] must be a text or a list of texts"),
        ({"prompt": "12", "stream_options": {"x": 1}}, 400, "may only hold include_usage"),
        ({"prompt": "12", "top_q": 1}, 400, "unknown field 'top_q'"),
        ({"prompt": "12", "top_p": "much"}, 400, "top_p = 'much' must be a number"),
        ({"prompt": "12", "n": 0}, 400, "n = 0 must be at least 1"),
        ({"prompt": "12", "logprobs": 5}, 400, "logprobs = 5 must be at most 1"),
        ({"prompt": "12", "temperature": -1}, 400, "temperature=-1.0 must be finite"),
        ({"prompt": "12", "max_tokens": 40}, 400, "exceeds the model's context of 24"),
        ({"prompt": []}, 400, "prompt must be a text"),
        ({"prompt": [1, 39]}, 400, "token id 39 is not below the vocabulary of 39"),
        ({"prompt": [1], "stop_token_ids": [3]}, 400, "always stops at"),
        ({"prompt": [1], "stop_token_ids": 5}, 400, "must be a list of token ids"),
        ({"prompt": [1], "temperature": 10**400}, 400, "must be a number"),
        ([1], 400, "send a JSON object"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(url, body, status, message):
    answer = post(url, body)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


def test_a_body_that_is_not_json_is_refused(url):
    answer = httpx.post(f"{url}/completions", content=b"{nonsense")
    assert answer.status_code == 400
    assert "not JSON" in answer.json()["error"]["message"]


def test_limits_on_size_waiting_and_programs():
    limits = ServeConfig(max_body_mb=1, max_waiting=3, max_samplings=1)
    with serving(limits) as url:
        assert post(url, {"prompt": "1" * (2 << 20)}).status_code == 413
        full = post(url, {"prompt": "12", "n": 4})
        assert full.status_code == 429 and full.headers["retry-after"] == "1"
        assert post(url, {"prompt": "12", "max_tokens": 2}).status_code == 200
        assert post(url, {"prompt": "12", "n": 2}).status_code == 200
        other = post(url, {"prompt": "12", "temperature": 0.5})
        assert "sampling number 2" in other.json()["error"]["message"]


def test_a_token_is_asked_for(monkeypatch):
    with serving(token="secret") as url:
        assert post(url, {"prompt": "12"}).status_code == 401
        assert post(url, {"prompt": "12"}, Authorization="Bearer wrong").status_code == 401
        with pytest.raises(EngineError, match="status 401: .*access token is missing or wrong"):
            remote(url).generate(params(), PROMPTS, 1, jax.random.key(0))
        monkeypatch.setenv("GRPO_JAX_SERVE_TOKEN", "secret")
        out = remote(url).generate(params(), PROMPTS[:1], 1, jax.random.key(0))
        assert out.tokens.shape[0] == 1


def test_a_door_to_the_outside_needs_a_token(monkeypatch):
    monkeypatch.delenv("GRPO_JAX_SERVE_TOKEN", raising=False)
    with pytest.raises(ValueError, match="can be reached from outside"):
        ServeConfig(host="0.0.0.0").token()
    assert ServeConfig(host="::1").token() is None
    monkeypatch.setenv("GRPO_JAX_SERVE_TOKEN", "secret")
    assert ServeConfig(host="0.0.0.0").token() == "secret"


def test_new_weights_are_handed_over_once_and_answers_name_their_version():
    versions = {0: params(0), 1: params(1)}
    with serving(load=lambda path: versions[int(path)]) as url:
        told = []

        def publish(_, version):
            told.append(version)
            answer = httpx.post(
                f"{url}/load_weights", json={"path": str(version % 2), "version": version}
            )
            answer.raise_for_status()

        engine = remote(url, publish)
        one, other = params(1), params(0)
        first = rows_of(engine.generate(one, PROMPTS, 2, jax.random.key(5)))
        again = rows_of(engine.generate(one, PROMPTS, 2, jax.random.key(5)))
        assert told == [1] and [r[0] for r in first] == [r[0] for r in again]
        second = rows_of(engine.generate(other, PROMPTS, 2, jax.random.key(5)))
        assert told == [1, 2] and [r[0] for r in second] != [r[0] for r in first]
        httpx.post(f"{url}/load_weights", json={"path": "0", "version": 9})
        with pytest.raises(EngineError, match="weights version 9 after version 2 was published"):
            engine.generate(other, PROMPTS, 2, jax.random.key(5))


def test_a_server_that_keeps_its_weights_says_so(url):
    answer = httpx.post(f"{url}/load_weights", json={"path": "x", "version": 1})
    assert answer.status_code == 403 and "--weights" in answer.json()["error"]["message"]


def scripted(change, fail=0):
    """A server whose answers are changed before they are sent, after `fail` failures."""
    calls = []

    async def completions(request):
        body = await request.json()
        calls.append(body)
        if len(calls) <= fail:
            return PlainTextResponse("busy", 503)
        rows = [
            {
                "index": i,
                "text": "?",
                "finish_reason": "length",
                "token_ids": [1, 2],
                "prompt_token_ids": body["prompt"][0],
                "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0]},
            }
            for i in range(body["n"])
        ]
        answer = {"choices": rows, "logprobs_mode": "processed_logprobs"}
        change(answer)
        return JSONResponse(answer)

    app = starlette.Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])])
    return app, calls


def first(change):
    return lambda answer: change(answer["choices"][0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (first(lambda c: c.pop("logprobs")), "2 tokens and none log-probabilities"),
        (
            first(lambda c: c["logprobs"].update(token_logprobs=[-1.0, None])),
            "2 tokens and 1 log-probabilities",
        ),
        (first(lambda c: c.pop("token_ids")), "holds text and no token ids"),
        (first(lambda c: c.update(prompt_token_ids=[5])), "re-tokenised the prompt"),
        (first(lambda c: c.update(finish_reason="abort")), "finish_reason 'abort'"),
        (first(lambda c: c.update(finish_reason="stop")), "its last token 2 is none of"),
        (
            first(
                lambda c: (
                    c.update(finish_reason="stop", token_ids=None)
                    or c["logprobs"].update(tokens=["token_id:1", "token_id:2"])
                )
            ),
            "its last token 2 is none of",
        ),
        (lambda a: a["choices"].pop(), "returned 1 choices for 1 prompts with n = 2"),
    ],
)
def test_answers_that_must_not_be_trained_on_are_refused(change, message):
    app, _ = scripted(change)
    with listening(app) as url, pytest.raises(EngineError, match=message):
        remote(url, model="m").generate({}, PROMPTS[:1], 2, jax.random.key(0))


def test_the_first_failure_ends_the_attempts_of_the_other_requests():
    """One prompt is refused; the other's server is busy for ever, and is not asked for ever."""
    tried = []

    async def completions(request):
        if (await request.json())["prompt"][0] == [4, 5]:
            while not tried:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # the other one is between two attempts now
            return PlainTextResponse("no such prompt", 400)
        tried.append(request)
        return PlainTextResponse("busy", 503)

    app = starlette.Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])])
    with listening(app) as url, pytest.raises(EngineError, match="no such prompt"):
        remote(url, model="m", retries=1000, backoff=30).generate(
            {}, PROMPTS[:2], 1, jax.random.key(0)
        )
        time.sleep(0.3)  # a further attempt would arrive by now
    assert len(tried) == 1


def test_ids_written_as_tokens_are_read():
    def as_tokens(choice):
        choice.pop("token_ids")
        choice["logprobs"]["tokens"] = ["token_id:11", "token_id:12"]

    app, _ = scripted(first(as_tokens))
    with listening(app) as url:
        out = remote(url, model="m").generate({}, PROMPTS[:1], 2, jax.random.key(0))
    assert rows_of(out)[0][0] == [11, 12] and rows_of(out)[1][0] == [1, 2]


def test_logprobs_from_before_the_filters_are_refused_unless_the_server_is_vouched_for():
    app, _ = scripted(lambda answer: answer.pop("logprobs_mode"))
    with listening(app) as url:
        with pytest.raises(ValueError, match="--logprobs-mode processed_logprobs"):
            remote(url, model="m").generate({}, PROMPTS[:1], 2, jax.random.key(0))
        plain = SamplingConfig(6)
        remote(url, model="m", sampling=plain).generate({}, PROMPTS[:1], 2, jax.random.key(0))
        remote(url, model="m", processed=True).generate({}, PROMPTS[:1], 2, jax.random.key(0))


def test_failures_that_pass_are_tried_again_and_others_end_with_the_reason():
    app, calls = scripted(lambda answer: None, fail=2)
    with listening(app) as url:
        remote(url, model="m").generate({}, PROMPTS[:1], 2, jax.random.key(0))
        assert len(calls) == 3
    app, calls = scripted(lambda answer: None, fail=9)
    with listening(app) as url:
        with pytest.raises(EngineError, match="failed 3 times, the last time with .*busy"):
            remote(url, model="m").generate({}, PROMPTS[:1], 2, jax.random.key(0))
        assert len(calls) == 3
    with pytest.raises(EngineError, match="failed 3 times, the last time with ConnectError"):
        remote(url, model="m").generate({}, PROMPTS[:1], 2, jax.random.key(0))


def test_prompts_may_share_a_request():
    app, calls = scripted(lambda answer: [c.pop("prompt_token_ids") for c in answer["choices"]])
    with listening(app) as url, pytest.raises(EngineError, match="2 choices for 2 prompts"):
        remote(url, model="m", prompts_per_request=2).generate({}, PROMPTS, 2, jax.random.key(0))
    assert sorted(len(body["prompt"]) for body in calls) in ([1, 2], [2])


@pytest.mark.parametrize(
    "values", [{"url": "ftp://x"}, {"retries": -1}, {"timeout": 0}, {"concurrency": 0}]
)
def test_settings_out_of_range_are_refused(values):
    with pytest.raises(ValueError, match="must"):
        RemoteConfig(**values)


def test_the_command_explains_itself(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    assert "max-waiting" in capsys.readouterr().out


def test_json_numbers_survive_the_way(url):
    answer = post(url, {"prompt": [1, 2], "max_tokens": 2, "seed": 3, "logprobs": 1})
    again = post(url, {"prompt": [1, 2], "max_tokens": 2, "seed": 3, "logprobs": 1})
    assert answer.json()["choices"] == again.json()["choices"]
    assert json.loads(answer.text)["usage"]["prompt_tokens"] == 2
