"""The event stream itself: a silent one says that it lives, a finished one says nothing more."""

import asyncio
from functools import partial

import httpx
import pytest
from forebay_gateway.api import answers
from forebay_gateway.api.sse import COMMENT, EventStream
from forebay_shared.settings import GatewaySettings
from gateway_fakes import ANSWER, MODEL, Api, Play, running_api
from litestar.types import Message
from patience import PATIENCE_S
from response_transcripts import check_events
from responses_house import responding
from transcripts import check_stream


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
    async with EventStream(wire.send, lambda: sign, keep_alive_s=0.01) as stream:
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


SIGNED = GatewaySettings(stream_keep_alive="event")
HI = [{"role": "user", "content": "hi"}]


def silent(
    api: Api, monkeypatch: pytest.MonkeyPatch, sign: bytes, path: str, **body: object
) -> bytes:
    """A stream that says nothing in the middle of an answer until it has given three signs."""
    monkeypatch.setattr(answers, "EventStream", partial(EventStream, keep_alive_s=0.01))
    pause = [3]
    api.backend.script = lambda job, index: Play(
        api.backend.answer, pause_at=pause if index == job.n - 1 else ()
    )
    raw, said = b"", -1
    with api.http.stream("POST", path, json={"model": MODEL, "stream": True, **body}) as response:
        assert response.status_code == httpx.codes.OK
        for piece in response.iter_bytes():
            raw += piece
            said = raw.count(sign) if said < 0 else said
            if raw.count(sign) >= said + 3:
                pause.clear()
    return raw


@pytest.mark.parametrize("n", [1, 3])
def test_a_silent_chat_may_say_so_in_chunks(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """A watchdog that hears no comments ends a stream which is alive."""
    with running_api(settings=SIGNED) as api:
        raw = silent(
            api, monkeypatch, b'"delta":{}', "/v1/chat/completions", messages=HI, n=n,
            stream_options={"include_usage": True},
        )  # fmt: skip
        assert COMMENT not in raw
        found = check_stream(raw, model=MODEL, n=n, include_usage=True)
        assert found.texts == dict.fromkeys(range(n), ANSWER)


def test_a_silent_completion_may_say_so_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_api(settings=SIGNED) as api:
        raw = silent(api, monkeypatch, b'"text":""', "/v1/completions", prompt="hi", max_tokens=64)
        assert COMMENT not in raw
        assert check_stream(raw, model=MODEL, chat=False).texts == {0: ANSWER}


def test_a_silent_response_may_say_so_in_events(
    monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    with responding(redis_url, SIGNED) as api:
        sign = b"event: response.in_progress"
        raw = silent(api, monkeypatch, sign, "/v1/responses", input="hi")
        assert COMMENT not in raw
        assert check_events(raw)["output"][0]["content"][0]["text"] == ANSWER


def test_signs_are_comments_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_api() as api:
        raw = silent(api, monkeypatch, COMMENT, "/v1/chat/completions", messages=HI)
        assert raw.count(b'"delta":{}') == 1
