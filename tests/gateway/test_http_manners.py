"""HTTP as clients really speak it, byte by byte: each row is a request and what must come of it."""

import json
import socket
from collections.abc import Iterator

import pytest
from forebay_shared.settings import GatewaySettings, Secret
from gateway_fakes import ANSWER, MODEL, Api, exchange, running_api
from messages import check_message_error
from patience import PATIENCE_S
from transcripts import check_answer, check_error, check_stream

CHAT = "/v1/chat/completions"
KEY = "authorization: Bearer sk-test"
JSON = "content-type: application/json"
LIMIT = 4096
BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()
STREAM = BODY[:-1] + b', "stream": true}'


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    settings = GatewaySettings(api_key=(Secret("sk-test"),), max_body_bytes=LIMIT)
    with running_api(settings=settings) as api:
        yield api


def request(
    line: str, *headers: str, body: bytes = b"", length: bool = True, version: str = "1.1"
) -> bytes:
    """A raw request that closes its connection, with a length unless told not to send one."""
    lines = [f"{line} HTTP/{version}", "host: x", "connection: close", *headers]
    if length:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def post(*headers: str, path: str = CHAT, body: bytes = BODY, **options: object) -> bytes:
    return request(f"POST {path}", KEY, *headers, body=body, **options)


def get(path: str, *headers: str, **options: object) -> bytes:
    return request(f"GET {path}", KEY, *headers, **options)


ANSWERED = {
    "a plain call": post(JSON),
    "a trailing slash": post(JSON, path=f"{CHAT}/"),
    "doubled slashes": post(JSON, path="//v1//chat///completions"),
    "percent-encoded letters": post(JSON, path="/v1/%63hat/completions"),
    "a percent-encoded slash": post(JSON, path="/v1/chat%2Fcompletions"),
    "a query": post(JSON, path=f"{CHAT}?api-version=1"),
    "an absolute URL": post(JSON, path=f"http://x{CHAT}"),
    "a charset": post("content-type: application/json; charset=utf-8"),
    "a charset in quotes": post('Content-Type: APPLICATION/JSON; Charset="UTF-8"'),
    "a byte order mark": post(JSON, body=b"\xef\xbb\xbf" + BODY),
    "a key that comes twice": post(JSON, body=b'{"model": "nope", ' + BODY[1:]),
    "space around the body": post(JSON, body=b"\r\n " + BODY + b"\n\n"),
    "identity as encoding": post(JSON, "content-encoding: identity"),
    "what it accepts": post(JSON, "accept: text/html", "accept-encoding: gzip, br"),
    "HTTP/1.0": post(JSON, version="1.0"),
    "chunks": post(
        JSON, "transfer-encoding: chunked", length=False,
        body=b"5\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERED)
def test_a_spelling_that_means_the_same_is_answered_the_same(api: Api, name: str) -> None:
    status, head, body = exchange(api.url, ANSWERED[name])
    assert status == 200, body
    assert b"location:" not in head
    assert b"\r\nx-request-id: req_" in head
    check_answer(body, model=MODEL)


REFUSED = {
    "no key": (request(f"POST {CHAT}", JSON, body=BODY), 401, b"www-authenticate: bearer"),
    "no such path": (get("/v1/nope"), 404, b""),
    "an escaped path": (get("/v1/models/../../etc/passwd"), 404, b""),
    "another method": (get(CHAT), 405, b"allow: options, post"),
    "a body on GET of another path": (get("/v1/nope", JSON, body=BODY), 404, b""),
    "no length and no body": (post(JSON, body=b"", length=False), 400, b""),
    "an empty body": (post(JSON, body=b""), 400, b""),
    "a declared body that is too long": (
        post(JSON, f"content-length: {LIMIT + 1}", length=False), 413, b"connection: close",
    ),
    "chunks that are too long": (
        post(JSON, "transfer-encoding: chunked", length=False, body=b"2000\r\n" + b" " * 0x2000),
        413, b"connection: close",
    ),
    "a chunk that announces too much": (
        post(JSON, "transfer-encoding: chunked", length=False, body=b"FFFFFFFFF\r\n{"),
        413, b"connection: close",
    ),
    "a later chunk that announces too much": (
        post(JSON, "transfer-encoding: chunked", length=False, body=b"1;x=y\r\n{\r\n1000\r\n"),
        413, b"connection: close",
    ),
    "no content type": (post(), 415, b""),
    "a form, as curl sends": (post("content-type: application/x-www-form-urlencoded"), 415, b""),
    "another charset": (post("content-type: application/json; charset=latin-1"), 415, b""),
    "a gzip body": (post(JSON, "content-encoding: gzip", body=b"\x1f\x8b"), 415, b""),
    "too large a head": (get("/health", "x: " + "x" * 40_000), 431, b"connection: close"),
    "bytes that are no UTF-8": (post(JSON, body=b'{"model": "\xff"}'), 400, b""),
    "a length that is no number": (post(JSON, "content-length: x", length=False), 400, b""),
}  # fmt: skip


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_has_its_status_and_the_envelope(api: Api, name: str, dialect: str) -> None:
    sent, expected, header = REFUSED[name]
    if dialect == "anthropic":
        sent = sent.replace(CHAT.encode(), b"/v1/messages").replace(b"/v1/nope", b"/v1/messages/x")
    status, head, body = exchange(api.url, sent)
    assert status == expected, body
    assert header in head
    assert b"content-type: application/json" in head
    assert b"\r\nx-request-id: req_" in head
    assert b"\r\nx-should-retry: false" in head
    if dialect == "anthropic" and b" /v1/messages" in sent:
        check_message_error(body)
    else:
        check_error(body)


def test_a_stream_to_an_http_1_0_client_has_no_chunks_and_ends_with_the_connection(
    api: Api,
) -> None:
    status, head, body = exchange(api.url, post(JSON, body=STREAM, version="1.0"))
    assert status == 200
    assert b"transfer-encoding" not in head
    assert b"content-length" not in head
    assert check_stream(body, model=MODEL).texts == {0: ANSWER}


def test_a_body_on_get_is_not_looked_at(api: Api) -> None:
    status, _, body = exchange(api.url, get("/v1/models", JSON, body=b"{" * 100))
    assert (status, json.loads(body)["object"]) == (200, "list")


@pytest.mark.parametrize("path", ["/v1/models", f"/v1/models/{MODEL}", "/health", "/version"])
def test_head_is_get_without_its_body(api: Api, path: str) -> None:
    found = exchange(api.url, get(path))
    status, head, body = exchange(api.url, request(f"HEAD {path}", KEY))
    assert (status, body) == (found[0], b"")
    assert b"content-length: %d\r\n" % len(found[2]) in head


def test_options_asks_for_no_key_and_says_what_may_be_done(api: Api) -> None:
    for path in (CHAT, "/v1/messages", "/v1/nope"):
        status, head, body = exchange(api.url, request(f"OPTIONS {path}", "origin: https://x"))
        assert (status, body) == (204, b"")
        assert b"allow: get, head, post" in head
        assert b"access-control" not in head  # off unless configured


@pytest.mark.parametrize(
    ("headers", "expected"),
    [([KEY, JSON], b"HTTP/1.1 100 "), ([JSON], b"HTTP/1.1 401 "), ([KEY], b"HTTP/1.1 415 ")],
)
def test_who_asks_before_sending_a_body_is_told_at_once(
    api: Api, headers: list[str], expected: bytes
) -> None:
    head = request(f"POST {CHAT}", *headers, "expect: 100-continue", body=BODY)[: -len(BODY)]
    host, port = api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        connection.sendall(head)
        assert connection.recv(13) == expected
        if b"100" in expected:
            connection.sendall(BODY)
            rest = b"".join(iter(lambda: connection.recv(65536), b""))
            assert b"HTTP/1.1 200 " in rest
            check_answer(rest.rpartition(b"\r\n\r\n")[2], model=MODEL)
