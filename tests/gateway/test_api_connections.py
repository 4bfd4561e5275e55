"""Connections: clients that leave, heads too large, the end of the process, the official SDK."""

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from forebay_gateway.api.answers import EARLY_S
from forebay_gateway.server import MAX_HEADERS
from forebay_shared.errors import EngineError, NoWorkerError, OverloadedError
from forebay_shared.settings import GatewaySettings, Secret
from gateway_fakes import ANSWER, MODEL, Api, Play, exchange, request_bytes, running_api, wait_until
from patience import PATIENCE_S, within
from transcripts import check_answer, check_error, check_stream

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Api]:
    with running_api(settings=GatewaySettings(api_key=(Secret("sk-test"),))) as api:
        yield api


@pytest.fixture
def api(server: Api) -> Iterator[Api]:
    server.reset()
    yield server
    wait_until(lambda: not server.backend.running, "no job is left open")
    wait_until(lambda: metric(server, "forebay_open_streams") == 0, "no stream is left open")
    wait_until(lambda: metric(server, "forebay_open_requests") == 1, "but for the scrape itself")


def metric(api: Api, name: str) -> float:
    lines = api.http.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name + " "))


def body(**fields: object) -> bytes:
    message = {"role": "user", "content": "hi"}
    return json.dumps({"model": MODEL, "messages": [message], **fields}).encode()


def chat_bytes(**fields: object) -> bytes:
    key = {"authorization": "Bearer sk-test"}
    return request_bytes("POST", CHAT, JSON | key, body(**fields))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hang_after", [0, 3])
def test_a_client_that_leaves_cancels_its_work_at_once(
    api: Api, stream: bool, hang_after: int, caplog: pytest.LogCaptureFixture
) -> None:
    api.backend.script = lambda job, index: Play(api.backend.answer, hang_after=hang_after)
    host, port = api.url.removeprefix("http://").split(":")

    def leave() -> float:
        api.backend.cancelled.clear()
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(chat_bytes(stream=stream, n=2))
            wait_until(lambda: len(api.backend.running) == 1, "the job runs")
            if stream:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
        left = time.monotonic()
        wait_until(lambda: len(api.backend.cancelled) == 1, "the job is cancelled")
        return time.monotonic() - left

    within(1.0, leave)
    wait_until(lambda: metric(api, "forebay_open_requests") == 1, "the request is over")
    assert not caplog.records  # clients leave all the time


def test_a_client_that_leaves_in_the_middle_of_its_body_starts_nothing(api: Api) -> None:
    host, port = api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(chat_bytes()[:-5])
        wait_until(lambda: metric(api, "forebay_open_requests") == 2, "the request is open")
    wait_until(lambda: metric(api, "forebay_open_requests") == 1, "it is given up")
    assert api.backend.jobs == []


def test_leaving_a_request_with_many_prompts_cancels_every_job(api: Api) -> None:
    api.backend.script = lambda job, index: Play(api.backend.answer, hang_after=1)
    key = {"authorization": "Bearer sk-test"}
    sent = json.dumps({"model": MODEL, "prompt": ["a"] * 20, "stream": True}).encode()
    host, port = api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(request_bytes("POST", "/v1/completions", JSON | key, sent))
        wait_until(lambda: len(api.backend.running) == 20, "all jobs run")
    wait_until(lambda: len(api.backend.cancelled) == 20, "all jobs are cancelled")


def test_the_role_comes_before_the_first_token_of_a_slow_engine(api: Api) -> None:
    api.backend.script = lambda job, index: Play(api.backend.answer, hang_after=0)
    sent = json.loads(body(stream=True))
    with api.http.stream("POST", CHAT, json=sent) as response:
        first = next(response.iter_bytes())
    assert b'"delta":{"role":"assistant","content":""}' in first


def test_a_stream_that_waits_for_a_lost_worker_in_vain_is_a_plain_503(api: Api) -> None:
    wait = [0]
    error = NoWorkerError("No worker came back.", retry_after_s=1.0)
    api.backend.script = lambda job, index: Play([], pause_at=wait, error=error)
    api.backend.ready = False
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: api.chat(stream=True))
        time.sleep(2 * EARLY_S)  # the very time in question
        wait.clear()
        response = answer.result()
    assert response.status_code == 503
    assert check_error(response.content)["code"] == "no_worker"


def test_what_no_worker_has_taken_in_yet_may_still_be_a_plain_refusal(api: Api) -> None:
    wait = [0]
    error = OverloadedError("The worker's queue is full.", retry_after_s=3.0)
    api.backend.script = lambda job, index: Play([], pause_at=wait, error=error)
    api.backend.takes = False
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: api.chat(stream=True))
        time.sleep(2 * EARLY_S)  # the very time in question
        wait.clear()
        response = answer.result()
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
    assert check_error(response.content)["code"] == "overloaded"


def test_a_stream_begins_when_its_request_has_a_place_in_a_queue(api: Api) -> None:
    api.backend.script = lambda job, index: Play(api.backend.answer, hang_after=0)
    api.backend.takes = False
    began = time.monotonic()
    threading.Timer(2 * EARLY_S, lambda: setattr(api.backend, "takes", True)).start()
    with api.http.stream("POST", CHAT, json=json.loads(body(stream=True))) as response:
        first = next(response.iter_bytes())
    assert b'"delta":{"role":"assistant","content":""}' in first
    assert time.monotonic() - began >= 2 * EARLY_S


def test_a_request_in_pieces_is_one_request(api: Api) -> None:
    sent = chat_bytes()
    host, port = api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        for at in range(0, len(sent), 7):
            connection.sendall(sent[at : at + 7])
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    check_answer(received.split(b"\r\n\r\n", 1)[1], model=MODEL)


def test_every_write_of_a_stream_holds_whole_events(api: Api) -> None:
    api.backend.script = lambda job, index: Play(api.backend.answer, group=3)
    status, head, rest = exchange(api.url, chat_bytes(stream=True, n=2))
    assert (status, b"transfer-encoding: chunked" in head) == (200, True)
    written = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        written.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    *events, last = written
    assert last == b""
    assert all(piece.startswith(b"data: ") and piece.endswith(b"\n\n") for piece in events)
    assert check_stream(b"".join(events), model=MODEL, n=2).texts == {0: ANSWER, 1: ANSWER}
    # All that is ready together goes out together: a write per round of both sequences at most.
    assert len(events) <= len(api.backend.answer) // 3 + 2


@pytest.mark.parametrize(
    "headers",
    [
        {"x-long": "x" * 70_000},
        {f"x-{number}": "1" for number in range(MAX_HEADERS + 1)},
        {"x-" + "n" * 40_000: "1"},
    ],
    ids=["long value", "many", "long name"],
)
def test_heads_that_are_too_large_are_a_431_in_the_envelope(
    api: Api, headers: dict[str, str]
) -> None:
    status, head, answer = exchange(api.url, request_bytes("GET", "/health", headers))
    assert status == 431
    assert b"connection: close" in head
    assert check_error(answer)["code"] == "headers_too_large"


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
    ids=["no request", "no colon", "signed length", "two lengths", "long path"],
)
def test_what_is_no_http_is_refused_in_the_envelope(api: Api, sent: bytes) -> None:
    status, _, answer = exchange(api.url, sent)
    assert status in (400, 431)
    check_error(answer)


def test_after_sigterm_open_streams_finish_and_the_gateway_is_not_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forebay_gateway.server.LAME_DUCK_S", 3600.0)
    with running_api() as api, ThreadPoolExecutor(1) as pool:
        go_on = [3]
        answer = api.backend.answer

        def script(job: object, index: int) -> Play:
            return Play(answer, pause_at=go_on)

        api.backend.script = script
        done = pool.submit(lambda: api.http.post(CHAT, json=json.loads(body(stream=True))))
        wait_until(lambda: len(api.backend.running) == 1, "the stream is open")
        api.server.handle_exit(signal.SIGTERM, None)
        assert exchange(api.url, request_bytes("GET", "/ready", {}))[0] == 503
        assert exchange(api.url, request_bytes("GET", "/health", {}))[0] == 200
        api.server._stop_at = 0.0  # its grace is over
        go_on.clear()
        assert check_stream(done.result().content, model=MODEL).texts == {0: ANSWER}


def test_who_has_connected_when_the_gateway_leaves_is_answered_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forebay_gateway.server.FIRST_HEAD_S", 3600.0)
    with running_api() as api:
        host, port = api.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            wait_until(lambda: len(api.server.server_state.connections) == 1, "it is accepted")
            api.server.handle_exit(signal.SIGINT, None)
            wait_until(lambda: not api.server.servers[0].is_serving(), "nobody new comes in")
            connection.sendall(request_bytes("GET", "/health", {}))
            assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_a_stream_that_outlives_the_drain_time_ends_with_an_error() -> None:
    with running_api(settings=GatewaySettings(drain_timeout_s=1.0)) as api:
        api.backend.script = lambda job, index: Play(api.backend.answer, hang_after=2)
        with api.http.stream("POST", CHAT, json=json.loads(body(stream=True))) as response:
            api.server.handle_exit(signal.SIGINT, None)
            raw = b"".join(response.iter_bytes())
        assert check_stream(raw, model=MODEL).error["code"] == "overloaded"
        wait_until(lambda: len(api.backend.cancelled) == 1, "the job is cancelled")


def test_a_whole_answer_that_outlives_the_drain_time_is_a_503() -> None:
    with (
        running_api(settings=GatewaySettings(drain_timeout_s=1.0)) as api,
        ThreadPoolExecutor(1) as pool,
    ):
        api.backend.script = lambda job, index: Play(api.backend.answer, hang_after=2)
        answer = pool.submit(api.chat)
        wait_until(lambda: len(api.backend.running) == 1, "the job runs")
        api.server.handle_exit(signal.SIGINT, None)
        assert answer.result().status_code == 503
        assert check_error(answer.result().content)["code"] == "overloaded"


class TestOpenAISdk:
    """The official client, unchanged."""

    @pytest.fixture
    def client(self, api: Api) -> Iterator[openai.OpenAI]:
        with openai.OpenAI(base_url=f"{api.url}/v1", api_key="sk-test", max_retries=0) as client:
            yield client

    def test_chat(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], n=2
        )
        assert [choice.message.content for choice in answer.choices] == [ANSWER] * 2
        assert answer.usage.total_tokens > answer.usage.prompt_tokens > 0
        assert answer._request_id

    def test_streamed_chat_and_its_accumulating_helper(self, client: openai.OpenAI) -> None:
        chunks = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        found = list(chunks)
        assert "".join(c.choices[0].delta.content or "" for c in found if c.choices) == ANSWER
        assert found[-1].usage.completion_tokens > 0
        with client.chat.completions.stream(
            model=MODEL, messages=[{"role": "user", "content": "hi"}]
        ) as stream:
            assert stream.get_final_completion().choices[0].message.content == ANSWER

    def test_completions_and_models(self, client: openai.OpenAI) -> None:
        answer = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=2)
        assert len(answer.choices) == 2
        assert [model.id for model in client.models.list()] == [MODEL, "scripted"]
        assert client.models.retrieve(MODEL).created == 1_700_000_000

    def test_errors_are_the_sdks_own(self, client: openai.OpenAI, api: Api) -> None:
        message = [{"role": "user", "content": "hi"}]
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="gpt-9", messages=message)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model=MODEL, messages=message, temperature=9)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="no").models.list()
        error = EngineError("The engine failed.")
        api.backend.script = lambda job, index: Play(api.backend.answer, error=error, error_after=2)
        with pytest.raises(openai.APIError, match="The engine failed"):
            list(client.chat.completions.create(model=MODEL, messages=message, stream=True))
