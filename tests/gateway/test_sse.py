"""The event stream itself: a silent one says that it lives, a finished one says nothing more."""

import asyncio

import pytest
from forebay_gateway.api.sse import COMMENT, EventStream
from litestar.types import Message
from patience import PATIENCE_S


class Wire:
    """What was sent."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.arrived = asyncio.Condition()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            async with self.arrived:
                self.bodies.append(message["body"])
                self.arrived.notify_all()

    async def has(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S), self.arrived:
            await self.arrived.wait_for(lambda: len(self.bodies) >= count)


@pytest.mark.parametrize("sign", [COMMENT, b"event: ping\n\n"])
async def test_a_silent_stream_gets_signs_of_life_until_it_ends(sign: bytes) -> None:
    wire = Wire()
    async with EventStream(wire.send, sign, keep_alive_s=0.01) as stream:
        await stream.write(b"data: 1\n\n")
        await wire.has(3)
        await stream.end(b"data: 2\n\n")
    assert wire.bodies[0] == b"data: 1\n\n"
    assert set(wire.bodies[1:-1]) == {sign}
    assert wire.bodies[-1] == b"data: 2\n\n"
    assert _open_timers() == []


async def test_nothing_is_said_before_the_status_is_out_and_after_the_stream_is_left() -> None:
    wire = Wire()
    async with EventStream(wire.send, keep_alive_s=0.001) as stream:
        assert not stream.started
        assert _open_timers() == []
        await stream.write(b"data: 1\n\n")
    count = len(wire.bodies)
    assert [task for task in asyncio.all_tasks() if task.get_name() == "keep-alive"] == []
    assert len(wire.bodies) == count


def _open_timers() -> list[object]:
    """Timers of the loop that would call into an event stream."""
    scheduled = getattr(asyncio.get_running_loop(), "_scheduled", [])
    return [t for t in scheduled if not t.cancelled() and "EventStream" in repr(t)]
