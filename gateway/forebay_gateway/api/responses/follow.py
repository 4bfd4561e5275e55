"""Streams the events of a background response, from any gateway and from any of its events on.

A client that leaves and comes back misses nothing, and the response goes on meanwhile.
"""

import asyncio

from litestar.types import Receive, Scope, Send

from forebay_gateway.api.connection import WhileConnected
from forebay_gateway.api.errors import ClientGoneError, foreseen
from forebay_gateway.api.responses.composer import error_event, lifecycle_event
from forebay_gateway.api.responses.runs import NEWS_S, BackgroundRuns
from forebay_gateway.api.responses.shapes import ENDED
from forebay_gateway.api.responses.store import ResponseStore, Stored
from forebay_gateway.api.sse import EventStream

BATCH = 256
LOOK_S = 1.0
"""How long a stream may be silent before the response itself is asked how it is."""

_LAST = tuple(
    b"event: %b\n" % name
    for name in (b"response.completed", b"response.incomplete", b"response.failed", b"error")
)


class FollowedEvents:
    """An ASGI app: the events of one response from number `first` on, to the last."""

    def __init__(
        self, store: ResponseStore, runs: BackgroundRuns, team: str, response_id: str, first: int
    ) -> None:
        self._store = store
        self._runs = runs
        self._team = team
        self._id = response_id
        self._next = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with EventStream(send) as stream:
            await self._run(stream, receive)

    async def _run(self, stream: EventStream, receive: Receive) -> None:
        try:
            async with WhileConnected(receive):
                await self._follow(stream)
        except ClientGoneError:
            if not stream.started:
                raise
        except Exception as error:
            if not stream.started:
                raise
            ours = foreseen(error)[0]
            await stream.end(error_event(self._next, ours.code, ours.message))

    async def _follow(self, stream: EventStream) -> None:
        loop = asyncio.get_running_loop()
        look_at = loop.time() + LOOK_S
        ended: Stored | None = None
        while True:
            news = self._runs.news(self._id)
            events = await self._store.events(self._team, self._id, self._next, BATCH)
            if events:
                self._next += len(events)
                await stream.write(b"".join(events))
                look_at = loop.time() + LOOK_S
                if _ends(events):
                    await stream.end()
                    return
            elif ended:
                kept = await self._store.events(self._team, self._id, -1, 1)
                # A client that has had the last event gets no other one.
                await stream.write(b"" if _ends(kept) else _last(ended, self._next))
                await stream.end()
                return
            elif loop.time() >= look_at:
                look_at = loop.time() + LOOK_S
                stored = await self._store.read(self._team, self._id)
                # Its last events may have come just now: so look for them once more.
                ended = stored if stored.status in ENDED else None
            else:
                await _wait(news)


def _ends(events: list[bytes]) -> bool:
    return bool(events) and events[-1].startswith(_LAST)


async def _wait(news: asyncio.Event | None) -> None:
    if news is None:
        await asyncio.sleep(NEWS_S)
        return
    try:
        async with asyncio.timeout(LOOK_S):
            await news.wait()
    except TimeoutError:
        pass


def _last(stored: Stored, sequence: int) -> bytes:
    """What ends a stream whose last event is not kept: its gateway died, or it was cancelled."""
    if stored.status == "cancelled":
        return error_event(sequence, "response_cancelled", "The response was cancelled.")
    return lifecycle_event(stored.status, sequence, stored.response)
