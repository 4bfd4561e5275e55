"""The http engine against an upstream that does whatever goes wrong."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from forebay_shared.asked import AskedCall, AskedFunction, AskedMessage, Chat, Prompt
from forebay_shared.sampling import Grammar, SamplingParams
from forebay_shared.settings import StartError, WorkerSettings
from forebay_shared.wire import Done, Embedded, Encode, Failed, Reply, Started, TextDelta
from forebay_worker.conformance.driver import GATEWAY, Driven
from forebay_worker.engines.base import Measured
from forebay_worker.engines.http.breaker import TRIP_AT
from forebay_worker.engines.http.engine import HttpEngine
from gateway_fakes import wait_until
from patience import PATIENCE_S
from prometheus_client import CollectorRegistry, generate_latest
from upstream_fakes import Call, Upstream, upstream

HI = Chat(messages=(AskedMessage("user", "hi"),))
PLAIN = SamplingParams()
KEY = "sk-upstream-secret"


@pytest.fixture
def far() -> Iterator[Upstream]:
    with upstream() as server:
        yield server


@contextmanager
def engine(far: Upstream, **settings: object) -> Iterator[Driven]:
    fields = {"engine": "http", "upstream_url": (far.url,), **settings}
    driven = Driven(HttpEngine(WorkerSettings(**fields)))
    try:
        yield driven
    finally:
        driven.stop()


def told(replies: list[Reply]) -> str:
    return "".join(reply.content for reply in replies if isinstance(reply, TextDelta))


def failure(replies: list[Reply]) -> Failed:
    assert isinstance(replies[-1], Failed), replies
    return replies[-1]


def test_an_answer_comes_as_text_with_the_upstreams_usage(far: Upstream) -> None:
    with engine(far) as driven:
        replies = driven.ended(driven.submit_text(HI, PLAIN))
    assert [type(reply) for reply in replies] == [Started, TextDelta, TextDelta, Done]
    assert told(replies) == "Hello"
    usage = replies[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.estimated) == (7, 2, False)
    assert far.calls[0].path == "/v1/chat/completions"
    assert far.calls[0].json == {
        "model": "far",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "messages": [{"role": "user", "content": "hi"}],
    }, "what the client did not ask for is the upstream's to choose"


def test_what_was_asked_for_is_in_the_call(far: Upstream) -> None:
    asked = Chat(
        messages=(
            AskedMessage("assistant", "", calls=(AskedCall("c1", "look", '{"a":1}'),)),
            AskedMessage("tool", "seen", call_id="c1"),
        ),
        functions=(AskedFunction("look", '{"type":"object"}', "Looks."),),
        required=True,
        forced="look",
        template={"enable_thinking": False},
        reasoning_effort="low",
    )
    sampling = SamplingParams(
        max_tokens=9,
        temperature=0.5,
        seed=5,
        logprobs=2,
        grammar=Grammar("json_schema", '{"type":"object"}'),
    )
    with engine(far) as driven:
        given = ("max_tokens", "temperature", "seed")
        driven.ended(driven.submit_text(asked, sampling, *given, indexes=(0, 3)), 2)
    bodies = sorted((call.json for call in far.calls), key=lambda body: body["seed"])
    assert [body["seed"] for body in bodies] == [5, 8], "an answer each, with a seed of its own"
    body = bodies[0]
    assert (body["max_tokens"], body["temperature"]) == (9, 0.5)
    assert (body["logprobs"], body["top_logprobs"]) == (True, 2)
    assert body["tools"][0]["function"]["parameters"] == {"type": "object"}
    assert body["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert body["messages"][0]["tool_calls"][0]["function"]["arguments"] == '{"a":1}'
    assert body["messages"][1]["tool_call_id"] == "c1"
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_calls_thinking_and_logprobs_are_told(far: Upstream) -> None:
    async def play(call: Call) -> None:
        await call.begin()
        await call.say("", reasoning_content="Hm")
        part = {"index": 0, "id": "c1", "function": {"name": "look", "arguments": '{"a"'}}
        await call.say("", tool_calls=[part])
        await call.say("", tool_calls=[{"index": 0, "function": {"arguments": ":1}"}}])
        token = {"token": "é", "logprob": -0.5, "bytes": [195], "top_logprobs": []}
        choice = {"delta": {"content": "é"}, "logprobs": {"content": [token]}}
        await call.event(choices=[choice | {"finish_reason": "tool_calls"}])
        await call.done()

    far.handler = play
    with engine(far) as driven:
        replies = driven.ended(driven.submit_text(HI, PLAIN))
    deltas = [reply for reply in replies if isinstance(reply, TextDelta)]
    assert deltas[0].reasoning == "Hm"
    assert [call.arguments for delta in deltas for call in delta.calls] == ['{"a"', ":1}"]
    assert deltas[-1].logprobs[0].token == b"\xc3"
    assert replies[-1].finish_reason == "stop"
    assert replies[-1].usage.estimated, "the upstream told no usage"
    assert replies[-1].usage.completion_tokens == len(deltas)


def test_a_text_completion_goes_to_its_own_route(far: Upstream) -> None:
    async def play(call: Call) -> None:
        await call.begin()
        await call.event(choices=[{"text": " world", "finish_reason": "length"}])
        await call.done()

    far.handler = play
    with engine(far) as driven:
        sampling = SamplingParams(max_tokens=3)
        replies = driven.ended(driven.submit_text(Prompt("hello"), sampling, "max_tokens"))
    assert told(replies) == " world"
    assert replies[-1].finish_reason == "length"
    assert far.calls[0].path == "/v1/completions"
    assert far.calls[0].json["prompt"] == "hello"


@pytest.mark.parametrize(
    ("status", "body", "code", "retryable"),
    [
        (400, {"error": {"message": "top_p is bad", "param": "top_p"}}, "invalid_value", False),
        (400, {"error": {"message": {"a": 1}, "param": 5, "code": []}}, "invalid_value", False),
        (400, {"detail": [{"loc": ["body"], "msg": "bad"}]}, "invalid_value", False),
        (400, {"object": "error", "message": "no", "code": 40001}, "invalid_value", False),
        *(
            (400, {"error": {"message": message, "code": 400}}, "context_length_exceeded", False)
            for message in (
                "This model's maximum context length is 8 tokens. However, you requested 9.",
                "the request exceeds the available context size, try increasing it",
                "The input (9 tokens) is longer than the model's context length (8 tokens).",
                "prompt is too long: 9 tokens > 8 maximum",
                "Input exceeds the context window of this model.",
            )
        ),
        (400, {"error": {"message": "long", "code": "context_length_exceeded"}},
         "context_length_exceeded", False),
        (422, {"detail": "bad"}, "invalid_value", False),
        (400, b"<html>", "invalid_value", False),
        (401, {"error": {"message": f"bad key {KEY}"}}, "upstream_error", True),
        (403, {}, "upstream_error", True),
        (404, {}, "upstream_error", True),
        (302, {}, "upstream_error", True),
        (429, {}, "rate_limit_exceeded", False),
        (500, {"error": {"message": "stack trace"}}, "upstream_error", True),
        (503, {}, "overloaded", True),
    ],
)  # fmt: skip
def test_a_refusal_is_translated(
    far: Upstream, status: int, body: object, code: str, retryable: bool
) -> None:
    async def play(call: Call) -> None:
        await call.answer(status, body, retry_after="17", location=far.url)

    far.handler = play
    with engine(far) as driven:
        failed = failure(driven.ended(driven.submit_text(HI, PLAIN)))
    assert (failed.code, failed.retryable) == (code, retryable)
    assert KEY not in failed.message
    assert "stack" not in failed.message
    assert failed.retry_after_s == (17 if status in (429, 503) else None)
    assert len(far.calls) == 1, "no redirect is followed, and nothing is tried again here"
    if status == 400 and body == {"error": {"message": "top_p is bad", "param": "top_p"}}:
        assert (failed.message, failed.param) == ("top_p is bad", "top_p")


def test_a_message_that_quotes_the_key_does_not_show_it(far: Upstream, tmp_path: Path) -> None:
    async def play(call: Call) -> None:
        await call.answer(400, {"error": {"message": f"you sent {KEY}"}})

    far.handler = play
    (tmp_path / "key").write_text(f"{KEY}\n")
    with engine(far, upstream_key_file=str(tmp_path / "key")) as driven:
        failed = failure(driven.ended(driven.submit_text(HI, PLAIN)))
    assert failed.message == "you sent ***"
    assert far.calls[0].headers["authorization"] == f"Bearer {KEY}"


def test_the_key_is_in_no_log(
    far: Upstream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(call: Call) -> None:
        call.writer.transport.abort()

    caplog.set_level(logging.DEBUG)
    far.handler = play
    (tmp_path / "key").write_text(KEY)
    with engine(far, upstream_key_file=str(tmp_path / "key")) as driven:
        assert failure(driven.ended(driven.submit_text(HI, PLAIN))).code == "upstream_error"
        assert KEY not in repr(driven.engine.__dict__)
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    ("reason", "sentinel", "ended"),
    [
        ("stop", True, "stop"),
        ("eos", False, "stop"),
        ("model_length", True, "length"),
        (None, True, "stop"),
        ("", True, "stop"),
        (None, False, None),
        ("None", False, None),
        ("abort", True, None),
        ("error", False, None),
    ],
)
def test_an_answer_ends_by_its_reason_or_by_the_streams_own_end(
    far: Upstream, reason: str | None, sentinel: bool, ended: str | None
) -> None:
    async def play(call: Call) -> None:
        await call.begin()
        await call.say("Hello", reason)
        if sentinel:
            await call.send(b"data: [DONE]\n\n")
        call.writer.close()

    far.handler = play
    with engine(far) as driven:
        replies = driven.ended(driven.submit_text(HI, PLAIN))
    assert told(replies) == "Hello"
    if ended is None:
        assert failure(replies).code == "upstream_error"
    else:
        assert replies[-1].finish_reason == ended


@pytest.mark.parametrize("after", [0, 1])
def test_a_broken_connection_is_an_error_that_another_worker_may_mend(
    far: Upstream, after: int
) -> None:
    async def play(call: Call) -> None:
        if after:
            await call.begin()
            await call.say("Hel")
        call.writer.transport.abort()

    far.handler = play
    with engine(far) as driven:
        failed = failure(driven.ended(driven.submit_text(HI, PLAIN)))
    assert (failed.code, failed.retryable) == ("upstream_error", True)
    assert "127.0.0.1" not in failed.message


@pytest.mark.parametrize(
    "sent",
    [
        b"data: {garbage\n\n",
        b"data: \xff\xfe\n\n",
        b'data: {"error": {"message": "out of memory"}}\n\n',
        b'data: {"choices": 5}\n\n',
        b"<html>not a stream</html>",
        b"",
        b"data: [DONE]\n\n",
    ],
)
def test_garbage_is_no_answer(far: Upstream, sent: bytes) -> None:
    async def play(call: Call) -> None:
        await call.begin()
        await call.send(sent)
        call.writer.close()

    far.handler = play
    with engine(far) as driven:
        assert failure(driven.ended(driven.submit_text(HI, PLAIN))).code == "upstream_error"
        far.handler = type(far)().handler
        assert told(driven.ended(driven.submit_text(HI, PLAIN))) == "Hello"


def test_an_event_without_end_is_bounded(far: Upstream) -> None:
    async def play(call: Call) -> None:
        await call.begin()
        await call.send(b"data: ")
        for _ in range(100):
            await call.send(b"x" * 2**20)

    far.handler = play
    with engine(far) as driven:
        failed = failure(driven.ended(driven.submit_text(HI, PLAIN)))
    assert "too long" in failed.message


@pytest.mark.parametrize("begun", [False, True])
def test_an_upstream_that_hangs_is_given_up(far: Upstream, begun: bool) -> None:
    async def play(call: Call) -> None:
        if begun:
            await call.begin()
            await call.say("Hel")
        await call.left()

    far.handler = play
    times = {"upstream_first_token_timeout_s": 2.0, "upstream_idle_timeout_s": 2.0}
    with engine(far, **times) as driven:
        failed = failure(driven.ended(driven.submit_text(HI, PLAIN)))
        assert failed.code == "deadline_exceeded"
        assert far.calls[0].gone.wait(PATIENCE_S), "its connection is closed"


def test_a_cancel_closes_the_connection(far: Upstream) -> None:
    async def play(call: Call) -> None:
        await call.begin()
        await call.say("Hel")
        await call.left()

    far.handler = play
    with engine(far) as driven:
        request_id = driven.submit_text(HI, PLAIN)
        driven.wait_tokens(request_id)
        driven.engine.cancel(request_id, 1)
        (done,) = [r for r in driven.ended(request_id) if isinstance(r, Done)]
        assert done.finish_reason == "abort"
        assert (done.usage.completion_tokens, done.usage.estimated) == (1, True)
        assert far.calls[0].gone.wait(PATIENCE_S)


def test_connections_are_used_again(far: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay_worker.engines.http.upstream.END_S", PATIENCE_S)

    async def play(call: Call) -> None:
        event = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n'
        body = event + b"data: [DONE]\n\n"
        await call.send(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
            % (len(body), body)
        )

    far.handler = play
    with engine(far) as driven:
        for _ in range(9):
            assert told(driven.ended(driven.submit_text(HI, PLAIN))) == "x"
    assert len({id(call.writer) for call in far.calls}) <= 2, "a probe may have had the first"


def test_so_many_calls_are_open_at_once_and_no_more(far: Upstream) -> None:
    together = threading.Semaphore(0)

    async def play(call: Call) -> None:
        together.release()
        await call.begin()
        await call.say("x")
        await call.left()

    far.handler = play
    with engine(far, max_num_seqs=2, max_num_queued_reqs=1) as driven:
        running = [driven.submit_text(HI, PLAIN) for _ in range(2)]
        for request_id in running:
            driven.wait_tokens(request_id)
        waiting = driven.submit_text(HI, PLAIN)
        wait_until(lambda: driven.load().waiting == 1, "one waits")
        refused = failure(driven.ended(driven.submit_text(HI, PLAIN)))
        assert refused.code == "overloaded"
        assert len(far.calls) == 2
        driven.engine.cancel(running[0], 1)
        driven.wait_tokens(waiting)
        assert len(far.calls) == 3


def test_the_worker_takes_nothing_while_the_upstream_is_away(
    far: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay_worker.engines.http.engine.PROBE_S", 0.05)
    with engine(far) as driven:
        assert driven.engine.available
        far.status = 503
        wait_until(lambda: not driven.engine.available, "it is seen to be away")
        far.status = 401
        wait_until(lambda: driven.engine.available, "who refuses is there")
        far.close()
        wait_until(lambda: not driven.engine.available, "it is seen to be gone")
        far.open_again()
        wait_until(lambda: driven.engine.available, "it is seen to be back")
        assert told(driven.ended(driven.submit_text(HI, PLAIN))) == "Hello"


def test_calls_go_where_they_work(far: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay_worker.engines.http.breaker.ASIDE_S", 60.0)

    async def broken(call: Call) -> None:
        await call.answer(500, {})

    with upstream() as other:
        other.handler = broken
        with engine(far, upstream_url=(other.url, far.url)) as driven:
            outcomes = [driven.ended(driven.submit_text(HI, PLAIN))[-1] for _ in range(12)]
        assert len(other.calls) == TRIP_AT, "then it is set aside"
    assert sum(isinstance(reply, Done) for reply in outcomes) == 12 - TRIP_AT


def figures(driven: Driven) -> dict[str, float]:
    """The upstream's metrics that are not 0, without the engine's name."""
    registry = CollectorRegistry()
    assert isinstance(driven.engine, Measured)
    driven.engine.measure(registry, "w")
    text = generate_latest(registry).decode()
    lines = [line.split() for line in text.splitlines() if line.startswith("forebay_")]
    return {name.replace('engine="w",', ""): float(value) for name, value in lines if float(value)}


@pytest.mark.parametrize("reason", ["status", "unreachable", "timeout", "answer"])
def test_what_sets_a_replica_aside_is_counted(
    far: Upstream, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay_worker.engines.http.engine.PROBE_S", 600)
    monkeypatch.setattr("forebay_worker.engines.http.breaker.ASIDE_S", 60.0)
    first_s = 0.5 if reason == "timeout" else PATIENCE_S

    async def play(call: Call) -> None:
        if reason == "status":
            await call.answer(500, {})
        elif reason == "unreachable":
            call.writer.transport.abort()
        elif reason == "timeout":
            await call.left()
        else:
            await call.begin()
            await call.send(b"data: garbage\n\n")

    with (
        upstream() as other,
        engine(
            far, upstream_url=(other.url, far.url), upstream_first_token_timeout_s=first_s
        ) as driven,
    ):
        wait_until(lambda: len(figures(driven)) == 4, "each has been asked whether it is there")
        fine = figures(driven)
        assert fine == {
            'forebay_upstream_up{replica="0"}': 1,
            'forebay_upstream_up{replica="1"}': 1,
            'forebay_upstream_probes_total{replica="0",result="ok"}': 1,
            'forebay_upstream_probes_total{replica="1",result="ok"}': 1,
        }
        other.handler = play
        for _ in range(TRIP_AT + 3):
            driven.ended(driven.submit_text(HI, PLAIN))
        assert figures(driven) == fine | {
            'forebay_upstream_aside{replica="0"}': 1,
            f'forebay_upstream_trips_total{{reason="{reason}",replica="0"}}': 1,
        }


def test_probes_are_counted_by_what_came(far: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay_worker.engines.http.engine.PROBE_S", 0.01)

    def count(result: str) -> float:
        name = f'forebay_upstream_probes_total{{replica="0",result="{result}"}}'
        return figures(driven).get(name, 0)

    with engine(far) as driven:
        wait_until(lambda: count("ok") > 1, "it answers")
        far.status = 401
        wait_until(lambda: count("refused") > 1, "who refuses is there")
        assert 'forebay_upstream_up{replica="0"}' in figures(driven)
        far.close()
        wait_until(lambda: count("failed") > 1, "nobody is there")
        assert 'forebay_upstream_up{replica="0"}' not in figures(driven)


@pytest.mark.parametrize("numbered", [True, False])
def test_embeddings_come_from_the_upstream(far: Upstream, numbered: bool) -> None:
    async def play(call: Call) -> None:
        inputs = call.json["input"]
        data = [{"index": i, "embedding": [3.0, 4.0 + i]} for i in range(len(inputs))]
        if numbered:
            data.reverse()
        else:
            data = [{"embedding": each["embedding"]} for each in data]
        await call.answer(200, {"data": data, "usage": {"prompt_tokens": 11}})

    far.handler = play
    with engine(far, runner="pooling") as driven:
        assert driven.card.embedding.size == 2
        assert driven.card.capabilities == {"embed", "text"}
        request_id = driven.name(GATEWAY)
        driven.engine.encode(
            Encode(
                request_id=request_id,
                attempt=1,
                gateway=GATEWAY,
                inputs=(),
                texts=("a", "b"),
                normalize=True,
            )
        )
        (embedded,) = driven.ended(request_id)
    assert isinstance(embedded, Embedded)
    assert len(embedded.vectors) == 2
    assert embedded.vectors[0] == b"\x9a\x99\x19?\xcd\xccL?", "0.6 and 0.8"
    assert embedded.usage.prompt_tokens == 11


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"upstream_url": ()}, "--upstream-url"),
        ({"upstream_url": ("ftp://x",)}, "--upstream-url"),
        ({"upstream_url": ("http://user:pass@x/v1",)}, "--upstream-key-file"),
        ({"upstream_key_file": "/nowhere"}, "--upstream-key-file"),
    ],
)
def test_what_is_configured_wrongly_is_told_at_once(settings: dict, said: str) -> None:
    fields = {"upstream_url": ("http://127.0.0.1:9/v1",), **settings}
    with pytest.raises(StartError, match=said) as error:
        HttpEngine(WorkerSettings(engine="http", **fields))
    assert "pass" not in str(error.value)


def test_the_upstream_says_what_it_serves(far: Upstream) -> None:
    far.models = {"data": [{"id": "a", "owned_by": "llamacpp", "meta": {"n_ctx_train": 2048}},
                           {"id": "b"}]}  # fmt: skip
    with pytest.raises(StartError, match="--upstream-model: which one"):
        HttpEngine(WorkerSettings(engine="http", upstream_url=(far.url,)))
    with engine(far, upstream_model="a", served_model_name=("mine",)) as driven:
        assert driven.card.names == ("mine",)
        assert driven.card.max_model_len == 2048
        assert driven.card.family == "llama-cpp"
        assert "top_k" in driven.card.parameters
    far.status = 401
    with pytest.raises(StartError, match="--upstream-key-file: the upstream refuses"):
        HttpEngine(WorkerSettings(engine="http", upstream_url=(far.url,)))


def test_a_worker_waits_for_an_upstream_that_is_not_up_yet(far: Upstream) -> None:
    far.status = 503
    made = threading.Event()
    engines: list[HttpEngine] = []

    def make() -> None:
        engines.append(HttpEngine(WorkerSettings(engine="http", upstream_url=(far.url,))))
        made.set()

    threading.Thread(target=make, daemon=True).start()
    assert not made.wait(0.2)
    far.status = 200
    assert made.wait(PATIENCE_S)
    assert engines[0].card.name == "far"
