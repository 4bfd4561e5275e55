"""Server-sent events as clients need them: exactly `data: `, JSON, two line feeds.

Some parsers lose every event whose `data:` has no space or whose lines end in CR LF; proxies hold
back what is not marked as unbuffered. It knows no dialect.
"""

from forebay_shared.errors import ForebayError
from litestar.types import Send

from forebay_gateway.api.errors import Headers, envelope

DONE = b"data: [DONE]\n\n"

_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """Writes one event stream. `started` says that the status is out and errors must be events."""

    __slots__ = ("_send", "started")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def write(self, events: bytes) -> None:
        """Sends whole events, in one write; the headers first."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": events, "more_body": False})


def failure(error: ForebayError) -> bytes:
    """An error as the last event of a stream; no finish reason is made up for it."""
    return b"data: " + envelope(error) + b"\n\n"
