"""uvicorn as this gateway needs it: bounded headers, errors in the envelope, a graceful end.

It knows no route; the app behind it is any ASGI app.
"""

import asyncio
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from forebay_shared.errors import ForebayError, HeadersTooLargeError, InvalidRequestError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import HANDLED_SIGNALS

from forebay_gateway.api.errors import envelope, error_headers

MAX_HEADER_BYTES = 32_768
MAX_HEADERS = 128
HEAD_TIMEOUT_S = 15.0
"""A client that has not sent a whole head by then is cut off."""
LAME_DUCK_S = 1.0
"""After SIGTERM new connections are served for so long, until balancers saw /ready fail."""


class Protocol(HttpToolsProtocol):
    """One connection. The parser has no limits; bytes, count and time are bounded here."""

    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        if self._head_bytes > MAX_HEADER_BYTES or len(self.headers or ()) > MAX_HEADERS:
            self._refuse(HeadersTooLargeError("The request's headers are too large."))
        else:
            self._refuse(InvalidRequestError("The request is not valid HTTP."))

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEADER_BYTES or len(self.headers) > MAX_HEADERS:
            raise ValueError("headers too large")  # the parser turns it into a parse error

    def _refuse(self, error: ForebayError) -> None:
        body = envelope(error)
        head = [b"HTTP/1.1 %d \r\n" % error.status]
        head += [name + b": " + value + b"\r\n" for name, value in error_headers(error)]
        head.append(b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body))
        self.transport.write(b"".join(head) + body)
        self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class Server(uvicorn.Server):
    """Ends in two steps: /ready fails at once; soon no new connections, and open ones finish."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stop_at = 0.0
        self.draining = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.draining and sig == signal.SIGTERM and self.server_state.tasks:
            self._stop_at = time.monotonic() + LAME_DUCK_S
        else:
            self._stop_at = 0.0
        self.draining = True
        super().handle_exit(sig, frame)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Takes the signals while it serves; unlike uvicorn, it does not raise them again after:
        the process still has a farewell to say, and ends with its own exit code."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in HANDLED_SIGNALS}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) and time.monotonic() >= self._stop_at
