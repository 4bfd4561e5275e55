"""A link that gives up: nothing of what it had not sent yet is done later."""

import socket
from collections.abc import Iterator

import pytest
from forebay_shared.link import LINK_ERRORS, Link
from patience import PATIENCE_S
from redis_house import RedisServer, WaitUntil, redis_running

MUCH = 64 << 20
"""Bytes: more than the kernel keeps of what is sent and not read."""


@pytest.fixture
def over_tcp() -> Iterator[tuple[RedisServer, str]]:
    """A server and its address; over a Unix socket nothing is ever on its way."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with redis_running() as server:
        server.kill()
        server.start("--port", str(port))
        yield server, f"redis://127.0.0.1:{port}"


async def test_what_a_hung_server_had_not_taken_is_not_done_when_it_goes_on(
    over_tcp: tuple[RedisServer, str], wait_until: WaitUntil
) -> None:
    server, url = over_tcp
    link = Link(url)
    await link.run([("CLIENT", "SETNAME", "late")], PATIENCE_S)
    server.pause()
    with pytest.raises(LINK_ERRORS):
        await link.run([("SET", "given-up", b"x" * MUCH)], 0.2)
    assert not link.connected
    server.go_on()
    assert await link.run([("SET", "since", "y")], PATIENCE_S) == [b"OK"]
    await wait_until(lambda: all(one["name"] != "late" for one in server.client.client_list()))
    assert server.client.keys() == [b"since"]
    await link.close()


async def test_a_link_that_is_closed_may_be_closed_and_used_again(
    over_tcp: tuple[RedisServer, str],
) -> None:
    server, url = over_tcp
    link = Link(url)
    await link.run([("PING",)], PATIENCE_S)
    server.kill()
    for _ in range(2):
        with pytest.raises(LINK_ERRORS):
            await link.run([("PING",)], PATIENCE_S)
        await link.close()
    server.start("--port", url.rpartition(":")[2])
    assert await link.run([("PING",)], PATIENCE_S) == [b"PONG"]
    await link.close()
