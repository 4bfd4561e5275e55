"""One connection, as hostile and clumsy clients use it: bytes that no HTTP library would send."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from forebay_gateway.chunks import ChunkSizes
from forebay_gateway.main import SEND_BUFFER, listen
from forebay_shared.settings import GatewaySettings, Secret
from gateway_fakes import ANSWER, MODEL, Api, Play, exchange, request_bytes, running_api, wait_until
from patience import PATIENCE_S, within
from transcripts import check_answer, check_error, check_stream

CHAT = "/v1/chat/completions"
KEY = {"authorization": "Bearer sk-test"}
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


def body(**fields: object) -> bytes:
    message = {"role": "user", "content": "hi"}
    return json.dumps({"model": MODEL, "messages": [message], **fields}).encode()


def chat_bytes(headers: dict[str, str] | None = None, **fields: object) -> bytes:
    lines = KEY | JSON | {"connection": "keep-alive"} | (headers or {})
    return request_bytes("POST", CHAT, lines, body(**fields))


def connect(api: Api) -> socket.socket:
    host, port = api.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_with_a_second_request_behind_the_first_cancels_its_work(
    api: Api, stream: bool
) -> None:
    api.backend.script = lambda job, index: Play(api.backend.answer, hang_after=0)

    def leave() -> float:
        api.backend.cancelled.clear()
        api.backend.jobs.clear()
        with connect(api) as connection:
            connection.sendall(chat_bytes(stream=stream) * 2)
            wait_until(lambda: len(api.backend.running) == 1, "the first job runs")
        left = time.monotonic()
        wait_until(lambda: len(api.backend.cancelled) == 1, "it is cancelled")
        assert len(api.backend.jobs) == 1
        return time.monotonic() - left

    within(1.0, leave)


@pytest.mark.parametrize("behind", [chat_bytes(), b"\x00 no HTTP\r\n\r\n"], ids=["request", "junk"])
def test_what_follows_a_request_stays_out_of_its_answer_and_ends_the_connection(
    api: Api, behind: bytes
) -> None:
    go_on = [1]
    api.backend.script = lambda job, index: Play(api.backend.answer, pause_at=go_on)
    with connect(api) as connection:
        connection.sendall(chat_bytes(stream=True))
        received = connection.recv(65536)
        connection.sendall(behind)
        assert exchange(api.url, request_bytes("GET", "/health", {}))[0] == 200
        go_on.clear()
        received += b"".join(iter(lambda: connection.recv(65536), b""))
    assert received.count(b"HTTP/1.1") == 1
    events = b"".join(line + b"\n\n" for line in received.split(b"\n") if line.startswith(b"data"))
    assert check_stream(events, model=MODEL).texts == {0: ANSWER}


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_who_asks_for_another_protocol_gets_a_plain_answer_on_a_sound_connection(
    api: Api, protocol: str
) -> None:
    asked = chat_bytes({"connection": "Upgrade, HTTP2-Settings", "upgrade": protocol})
    with connect(api) as connection:
        for _ in range(2):
            connection.sendall(asked[:-9])
            connection.sendall(asked[-9:])
            received = connection.recv(65536)
            check_answer(received.split(b"\r\n\r\n", 1)[1], model=MODEL)


def test_a_trailer_is_no_header(api: Api) -> None:
    head = {"transfer-encoding": "chunked", "connection": "close"} | JSON
    sent = request_bytes("POST", CHAT, head).replace(b"content-length: 0\r\n", b"")
    sent += b"%x\r\n%s\r\n0\r\nauthorization: Bearer sk-test\r\n\r\n" % (len(body()), body())
    status, _, answer = exchange(api.url, sent)
    assert status == 401
    check_error(answer)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (request_bytes("GET", "/health", {"connection": "keep-alive"}), b"\r\n"),
        (request_bytes("POST", CHAT, {"connection": "keep-alive", "content-length": "9"}), b"x"),
    ],
    ids=["a blank line", "a piece of a body that was refused"],
)
def test_a_connection_that_asks_nothing_more_is_closed(
    api: Api, monkeypatch: pytest.MonkeyPatch, first: bytes, then: bytes
) -> None:
    monkeypatch.setattr(api.server.config, "timeout_keep_alive", 1.0)
    with connect(api) as connection:
        connection.sendall(first)
        assert connection.recv(65536).startswith(b"HTTP/1.1")
        with suppress(ConnectionError):  # where this took longer than that second
            connection.sendall(then)
            assert connection.recv(65536) == b""


def test_a_client_that_stops_reading_is_cut_off(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.server.config, "stall_timeout_s", 0.3)
    api.backend.script = lambda job, index: Play(api.backend.answer * 500)
    host, port = api.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(chat_bytes(stream=True, n=128, max_tokens=500))  # 13 MB of events
        wait_until(lambda: len(api.backend.cancelled) == 1, "its work is cancelled")
    assert api.backend.telemetry.registry.get_sample_value("forebay_slow_clients_total") == 1


def test_connections_are_probed_and_hold_little_of_the_kernels_memory() -> None:
    listener = listen(GatewaySettings(port=0))
    with listener, socket.create_connection(listener.getsockname()) as client:
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * SEND_BUFFER
            probes = [
                accepted.getsockopt(socket.IPPROTO_TCP, name)
                for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            ]
            assert probes[0] + probes[1] * probes[2] == 60
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
        assert client.recv(1) == b""


@pytest.mark.parametrize("cut", range(1, 110))
def test_the_sizes_of_chunks_are_read_whatever_pieces_they_come_in(cut: int) -> None:
    head = b"\r\nPOST /12 HTTP/1.1\r\nfe: 3\r\nx: 4;5\r\n\r\n"
    body = b"000003;name=value\r\na\r\n\r\n1A\r\n" + b"b" * 26 + b"\r\n0\r\nx-fe: 1\r\n\r\n"
    sent = head + body
    sizes = ChunkSizes()
    for piece in (sent[:cut], sent[cut : cut + 2], sent[cut + 2 :]):
        sizes.push(piece)
    assert sizes.announced == 3 + 26


def test_a_chunk_that_announces_too_much_is_refused_before_any_of_it_comes(api: Api) -> None:
    lines = KEY | JSON | {"transfer-encoding": "chunked"}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    sent = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{head}\r\n7fffffff\r\n".encode()
    for cut in range(len(sent) - 14, len(sent)):
        with connect(api) as connection:
            connection.sendall(sent[:cut])
            connection.sendall(sent[cut:])
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert answer.lower().count(b"connection: close") == 1
        assert check_error(answer.partition(b"\r\n\r\n")[2])["code"] == "payload_too_large"
