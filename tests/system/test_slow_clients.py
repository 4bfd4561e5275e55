"""Clients that do not read, over real sockets: nobody waits for them, they hold little memory."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest
from patience import PATIENCE_S
from serve_house import Serve, starting, until

pytestmark = [pytest.mark.system, pytest.mark.chaos]

STALLED = 200
TOKENS = 500
"""With 20 alternatives each, half a megabyte of events, however many of them are joined."""
PER_CLIENT = 1_000_000
"""Bytes: its socket's buffer, its waiting tokens and what else a stream takes."""


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    """An echo engine that takes 5 ms per step; clients that do not read are cut off after 5 s."""
    with starting() as start:
        yield start(
            "--engine", "echo", "--echo-delay-ms", "5", "--slow-client-timeout-s", "5"
        ).wait_ready()


def test_two_hundred_clients_that_do_not_read_hold_nobody_up(server: Serve) -> None:
    gateway = server.children("gateway")[0]
    with server.client(timeout=PATIENCE_S) as client, ExitStack() as stack:
        _ask(client, server.model)
        before = _resident(gateway)
        for _ in range(STALLED):
            stack.enter_context(_stalled(server))
        most = 0
        while server.metric("forebay_slow_clients_total") < STALLED:  # ends by the test's time-out
            _ask(client, server.model)
            most = max(most, _resident(gateway))
        assert most - before < STALLED * PER_CLIENT
        until(lambda: server.metric("forebay_open_generations") == 0)
        until(lambda: server.metric("vllm:num_requests_running") == 0)


def _ask(client, model: str) -> None:
    answer = client.completions.create(model=model, prompt="abc", max_tokens=30)
    assert answer.choices[0].text == "abc" * 10


def _stalled(server: Serve) -> socket.socket:
    """A connection that asks for a long stream and reads none of it."""
    host, _, port = server.url.removeprefix("http://").removesuffix("/v1").partition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    message = {"role": "user", "content": "abcdefgh"}
    body = {"model": server.model, "messages": [message], "max_tokens": TOKENS, "stream": True}
    large = {"logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    sent = json.dumps({**body, **large}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {server.key}\r\ncontent-length: {len(sent)}\r\n\r\n"
    )
    connection.sendall(head.encode() + sent)
    return connection


def _resident(process: psutil.Process) -> int:
    return process.memory_info().rss
