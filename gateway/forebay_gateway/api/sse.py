"""Server-sent events as clients need them: exactly `data: `, JSON, two line feeds.

Some parsers lose every event whose `data:` has no space or whose lines end in CR LF; proxies hold
back what is not marked as unbuffered, and cut what is silent for a minute. It knows no dialect.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from forebay_shared.errors import ForebayError
from litestar.types import Send

from forebay_gateway.api.errors import Headers, envelope

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE_S = 15.0
COMMENT = b": keep-alive\n\n"
"""What every parser skips: how a dialect without an event for it says that a stream lives, unless
its clients are to see an event."""

_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """Writes one event stream. `started` says that the status is out and errors must be events.

    Use it as an async context manager. While it is open and nothing was written for `keep_alive_s`,
    it writes what `sign` says then, which no client takes for an answer.
    """

    __slots__ = (
        "_keep_alive_s",
        "_loop",
        "_send",
        "_sign",
        "_signing",
        "_timer",
        "_written",
        "started",
    )

    def __init__(
        self,
        send: Send,
        sign: Callable[[], bytes] = lambda: COMMENT,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self._send = send
        self._sign = sign
        self._keep_alive_s = keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._written = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._signing: asyncio.Task[None] | None = None
        self.started = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._quiet()

    async def write(self, events: bytes) -> None:
        """Sends whole events, in one write; the headers first."""
        self._written = self._loop.time()
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            self._timer = self._loop.call_later(self._keep_alive_s, self._check)
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes = b"") -> None:
        self._quiet()
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    def _check(self) -> None:
        """One timer for the whole stream: it looks when the last write will have been too long ago.

        A client that does not read holds the sign back: there is one at a time.
        """
        due = self._written + self._keep_alive_s
        if self._loop.time() >= due:
            if self._signing is None or self._signing.done():
                self._signing = self._loop.create_task(self._live(), name="keep-alive")
            due = self._loop.time() + self._keep_alive_s
        self._timer = self._loop.call_at(due, self._check)

    async def _live(self) -> None:
        """Signs may be numbered: what is said is made as it is sent."""
        await self.write(self._sign())

    def _quiet(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._signing is not None:
            self._signing.cancel()


def failure(error: ForebayError) -> bytes:
    """An error as the last event of a stream; no finish reason is made up for it."""
    return b"data: " + envelope(error) + b"\n\n"
