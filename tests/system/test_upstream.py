"""`forebay serve --engine http`: every dialect over another server, good or bad."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import anthropic
import httpx
import pytest
from patience import PATIENCE_S
from serve_house import Serve, starting, until
from upstream_fakes import Call, Upstream, hello, upstream

pytestmark = pytest.mark.system

TEXT = "Grüße, 東京! 👋 one two three"
MESSAGES = [{"role": "user", "content": TEXT}]
KEY = "sk-upstream"


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A forebay whose model is another forebay's, which echoes."""
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text(f"{KEY}\n")
    with starting() as start:
        echo = start("--engine", "echo", "--echo-delay-ms", "2", "--api-key", KEY).wait_ready()
        yield start(
            "--engine", "http", "--upstream-url", echo.url, "--upstream-key-file", str(key),
            "--served-model-name", "far",
        ).wait_ready()  # fmt: skip


def test_the_sdk_gets_chats_plain_and_streamed(far: Serve) -> None:
    with far.client() as client:
        plain = client.chat.completions.create(model="far", messages=MESSAGES, n=2)
        chunks = list(
            client.chat.completions.create(
                model="far", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            )
        )
    assert [choice.message.content for choice in plain.choices] == [TEXT, TEXT]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    usage = chunks[-1].usage
    assert usage.completion_tokens == len(TEXT.encode()) + 1, "as it counts, with its end token"
    assert plain.usage.prompt_tokens == usage.prompt_tokens
    assert plain.usage.completion_tokens == 2 * usage.completion_tokens


def test_stop_strings_end_an_answer_and_are_told(far: Serve) -> None:
    with far.client() as client:
        stopped = client.chat.completions.create(model="far", messages=MESSAGES, stop=["two"])
        kept = client.chat.completions.create(
            model="far",
            messages=MESSAGES,
            stop=["two"],
            extra_body={"include_stop_str_in_output": True},
        )
    assert stopped.choices[0].message.content == TEXT[: TEXT.index("two")]
    assert kept.choices[0].message.content == TEXT[: TEXT.index("two") + 3]
    assert stopped.choices[0].finish_reason == "stop"


def test_completions_and_their_logprobs(far: Serve) -> None:
    with far.client() as client:
        answer = client.completions.create(
            model="far", prompt=["abc", "xyz"], max_tokens=4, logprobs=1, best_of=2
        )
    assert [choice.text for choice in answer.choices] == ["abca", "xyzx"]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.choices[0].logprobs.tokens == ["a", "b", "c", "a"]
    assert answer.choices[0].logprobs.top_logprobs[0] == {"a": 0.0}
    assert answer.usage.prompt_tokens == 6


def test_responses_and_a_conversation_by_id(far: Serve) -> None:
    with far.client() as client:
        first = client.responses.create(model="far", input=TEXT)
        events = list(client.responses.create(
            model="far", input="and then", previous_response_id=first.id, stream=True,
            include=["message.output_text.logprobs"],
        ))  # fmt: skip
    assert first.output_text == TEXT
    assert events[-1].response.output_text == TEXT, "an echo says again what it heard first"
    assert events[-1].response.output[0].content[0].logprobs


def test_messages_in_anthropics_dialect(far: Serve) -> None:
    client = anthropic.Anthropic(
        base_url=far.url.removesuffix("/v1"), api_key=far.key, max_retries=0
    )
    with client:
        answer = client.messages.create(
            model="far", max_tokens=100, messages=MESSAGES, stop_sequences=["three"]
        )
        assert answer.content[0].text == TEXT.removesuffix("three")
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "three")
        with pytest.raises(anthropic.BadRequestError, match="not known here"):
            client.messages.count_tokens(model="far", messages=MESSAGES)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"bad_words": ["x"]}, "bad_words"),
        ("chat/completions", {"documents": [{"text": "x"}]}, "documents"),
        ("chat/completions", {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ("chat/completions", {"logit_bias": {"1": 1}}, "logit_bias"),
        ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
        ("completions", {"prompt": [1, 2]}, "prompt"),
        ("completions", {"prompt_logprobs": 1}, "prompt_logprobs"),
        ("completions", {"return_token_ids": True}, "return_token_ids"),
        ("embeddings", {"input": "x"}, "model"),
    ],
)
def test_what_the_upstream_cannot_take_is_refused_by_name(
    far: Serve, path: str, fields: dict, param: str
) -> None:
    body: dict[str, object] = {"model": "far"}
    body |= {"messages": MESSAGES} if path == "chat/completions" else {"prompt": "x"}
    body |= fields
    answer = httpx.post(f"{far.url}/{path}", json=body, headers=_bearer(far), timeout=PATIENCE_S)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}, "tools": [], "logprobs": False},
        {"parallel_tool_calls": True, "ignore_eos": False, "min_tokens": 0, "top_p": 0.5},
    ],
)
def test_what_asks_for_nothing_is_fine(far: Serve, fields: dict) -> None:
    body = {"model": "far", "messages": MESSAGES, **fields}
    answer = httpx.post(
        f"{far.url}/chat/completions", json=body, headers=_bearer(far), timeout=PATIENCE_S
    )
    assert answer.status_code == 200, answer.text


class Bad(NamedTuple):
    """A server whose upstream does what the test says."""

    server: Serve
    upstream: Upstream


@pytest.fixture(scope="module")
def house() -> Iterator[Bad]:
    with upstream() as server, starting() as start:
        serve = start("--engine", "http", "--upstream-url", server.url, "--gateways", "1")
        yield Bad(serve.wait_ready(), server)


@pytest.fixture
def bad(house: Bad) -> Bad:
    house.upstream.handler = hello
    house.upstream.calls.clear()
    return house


def _bearer(server: Serve) -> dict[str, str]:
    return {"authorization": f"Bearer {server.key}"}


def _chat(bad: Bad, **fields: object) -> httpx.Response:
    body = {"model": "far", "messages": MESSAGES, **fields}
    return httpx.post(
        f"{bad.server.url}/chat/completions",
        json=body,
        headers=_bearer(bad.server),
        timeout=PATIENCE_S,
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "ours", "calls"),
    [(400, 400, 1), (401, 502, 3), (429, 429, 1), (500, 502, 3), (503, 503, 1)],
)
def test_a_refusal_is_the_clients_own_status(
    bad: Bad, status: int, ours: int, calls: int, stream: bool
) -> None:
    async def play(call: Call) -> None:
        await call.answer(status, {"error": {"message": "no such luck"}}, retry_after="7")

    bad.upstream.handler = play
    answer = _chat(bad, stream=stream)
    assert answer.status_code == ours, answer.text
    assert ("no such luck" in answer.text) == (status == 400)
    assert (answer.headers.get("retry-after") == "7") == (status in (429, 503))
    assert len(bad.upstream.calls) == calls


def test_an_upstream_that_fails_once_is_asked_again(bad: Bad) -> None:
    async def play(call: Call) -> None:
        bad.upstream.handler = hello
        call.writer.transport.abort()

    bad.upstream.handler = play
    answer = _chat(bad)
    assert answer.json()["choices"][0]["message"]["content"] == "Hello"
    assert answer.json()["usage"]["total_tokens"] == 9
    assert len(bad.upstream.calls) == 2


def test_a_stream_that_has_begun_is_not_begun_again(bad: Bad) -> None:
    async def play(call: Call) -> None:
        await call.begin()
        await call.say("Hel")
        call.writer.transport.abort()

    bad.upstream.handler = play
    lines = [line for line in _chat(bad, stream=True).text.split("\n\n") if line]
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "upstream_error"
    assert len(bad.upstream.calls) == 1
    assert _chat(bad).status_code == 502


def test_a_client_that_leaves_closes_the_upstreams_call(bad: Bad) -> None:
    async def play(call: Call) -> None:
        await call.begin()
        await call.say("Hel")
        await call.left()

    bad.upstream.handler = play
    with (
        bad.server.client() as client,
        client.chat.completions.create(model="far", messages=MESSAGES, stream=True) as stream,
    ):
        assert next(iter(stream)).choices
        until(lambda: bool(bad.upstream.calls))
    assert bad.upstream.calls[0].gone.wait(PATIENCE_S)
    until(lambda: bad.server.metric("vllm:num_requests_running") == 0)


def test_tool_calls_and_thinking_come_through(bad: Bad) -> None:
    async def play(call: Call) -> None:
        await call.begin()
        await call.say("", reasoning="Hm, ")
        await call.say("Looking.")
        for number, name in enumerate(("look", "see")):
            head = {"index": number, "id": f"call_{number}", "function": {"name": name}}
            await call.say("", tool_calls=[head])
            await call.say("", tool_calls=[{"index": number, "function": {"arguments": '{"a":'}}])
            await call.say("", tool_calls=[{"index": number, "function": {"arguments": "1}"}}])
        await call.say("", "tool_calls")
        details = {"reasoning_tokens": 2}
        usage = {"prompt_tokens": 5, "completion_tokens": 9, "completion_tokens_details": details}
        await call.event(choices=[], usage=usage)
        await call.done()

    bad.upstream.handler = play
    look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    see = {"type": "function", "function": {"name": "see"}}
    answer = _chat(bad, tools=[look, see]).json()
    message = answer["choices"][0]["message"]
    assert message["content"] == "Looking."
    assert message["reasoning"] == "Hm, "
    calls = [(c["id"], c["function"]["name"], c["function"]["arguments"])
             for c in message["tool_calls"]]  # fmt: skip
    assert calls == [("call_0", "look", '{"a":1}'), ("call_1", "see", '{"a":1}')]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    sent = bad.upstream.calls[0].json
    assert [tool["function"]["name"] for tool in sent["tools"]] == ["look", "see"]
    one = _chat(bad, tools=[look, see], parallel_tool_calls=False).json()
    assert len(one["choices"][0]["message"]["tool_calls"]) == 1, "wherever the upstream stops"
    client = anthropic.Anthropic(
        base_url=bad.server.url.removesuffix("/v1"), api_key=bad.server.key, max_retries=0
    )
    with client:
        said = client.messages.create(
            model="far",
            max_tokens=100,
            messages=MESSAGES,
            tools=[{"name": "look", "input_schema": {"type": "object"}}],
        )
    assert [block.type for block in said.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert said.stop_reason == "tool_use"


def test_a_model_whose_upstream_is_away_gets_a_503_and_comes_back(bad: Bad) -> None:
    bad.upstream.status = 500
    try:
        until(lambda: _chat(bad).status_code == 503)
        until(lambda: bad.server.metric("forebay_upstream_up") == 0)
    finally:
        bad.upstream.status = 200
    until(lambda: _chat(bad).status_code == 200)
    until(lambda: bad.server.metric("forebay_upstream_up") == 1)


def test_many_calls_at_once_leave_nothing_behind(bad: Bad) -> None:
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: _chat(bad).status_code, range(100)))
    assert answers == [200] * 100
    until(lambda: bad.server.metric("vllm:num_requests_running") == 0)
    until(lambda: bad.server.metric("forebay_open_generations") == 0)
