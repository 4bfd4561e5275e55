"""uvicorn as this gateway needs it: bounded headers, errors in the envelope, a graceful end.

It knows no route; the app behind it is any ASGI app.
"""

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import httptools
import uvicorn
from forebay_shared.errors import ForebayError, HeadersTooLargeError, InvalidRequestError
from uvicorn._types import (
    ASGI3Application,
    ASGIReceiveCallable,
    ASGISendCallable,
    ASGISendEvent,
    Scope,
)
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import HANDLED_SIGNALS

from forebay_gateway.api.body import too_large
from forebay_gateway.api.dialects import written
from forebay_gateway.api.errors import error_headers
from forebay_gateway.api.request_ids import new_request_id
from forebay_gateway.chunks import ChunkSizes

MAX_HEADER_BYTES = 32_768
MAX_HEADERS = 128
HEAD_TIMEOUT_S = 15.0
"""A client that has not sent a whole head by then is cut off."""
FIRST_HEAD_S = 1.0
"""A gateway that leaves waits so long for the first request of who has just connected."""
LAME_DUCK_S = 1.0
"""After SIGTERM new connections are served for so long, until balancers saw /ready fail."""


class Config(uvicorn.Config):
    """uvicorn's, and what a connection does with a client that does not read, or sends too much.

    `stall_timeout_s`: one that reads so little for so long that 48 KiB do not drain is cut off,
    and `stalled` is told. `max_body_bytes`: chunks that announce more are refused unread.
    """

    def __init__(
        self,
        app: Callable[..., Any],
        *,
        stall_timeout_s: float,
        stalled: Callable[[], None],
        max_body_bytes: int,
        **options: Any,
    ) -> None:
        super().__init__(app, **options)
        self.stall_timeout_s = stall_timeout_s
        self.stalled = stalled
        self.max_body_bytes = max_body_bytes


class Protocol(HttpToolsProtocol):
    """One connection. The parser has no limits; bytes, count and time are bounded here.

    What a client sends behind a request that is being answered is not read, and the connection ends
    with that answer. Requests in a row would have to be held back, and while a connection is held
    back nobody notices that its client has left.
    """

    url = b""
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    """Runs from the first byte to the end of a head."""
    _stall_timer: asyncio.TimerHandle | None = None
    """Runs while what was written is not read."""
    _chunks: ChunkSizes | None = None
    """Of the request that is coming, unless its body comes in no chunks."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Ends the connection behind the answer that is under way, or at once. One whose first
        request has not come yet may have it on its way: a cut would be an error to its client."""
        if not self.cycle and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = self.loop.call_later(FIRST_HEAD_S, self.transport.close)
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")
        else:
            self._watch_chunks(data)
        if self._head_timer is None and not self._answering and not self.transport.is_closing():
            # Blank lines, or the rest of a body that was refused: nobody waits for the client.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _watch_chunks(self, data: bytes) -> None:
        """Ends a request whose chunks announce more than a body may have."""
        if self._chunks is None:
            return
        self._chunks.push(data)
        assert isinstance(self.config, Config)
        if self._chunks.announced > self.config.max_body_bytes:
            self._chunks = None
            if not self.cycle.response_started:
                self._refuse(too_large(self.config.max_body_bytes))

    def pause_writing(self) -> None:
        super().pause_writing()
        assert isinstance(self.config, Config)
        self._stall_timer = self.loop.call_later(self.config.stall_timeout_s, self._cut_off)

    def _cut_off(self) -> None:
        assert isinstance(self.config, Config)
        self.config.stalled()
        self.transport.abort()

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def on_message_begin(self) -> None:
        if self._answering:
            raise ValueError("a request behind another one")  # a parse error, like any in callbacks
        super().on_message_begin()
        self._chunks = ChunkSizes()
        self._head_bytes = 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_timer is not None:  # else a trailer, which must not pass for a header
            super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        if self._upgrades():
            return
        self._stop_head_timer()
        if all(name != b"transfer-encoding" for name, _ in self.headers):
            self._chunks = None
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = _without_chunks(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        self._chunks = None
        if not self._upgrades():
            super().on_message_complete()

    @property
    def _answering(self) -> bool:
        return bool(self.cycle) and not self.cycle.response_complete  # None before a first request

    def _upgrades(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _decline_upgrade(self, rest: bytes) -> None:
        """Reads the request again as if it had not asked for HTTP/2 or a WebSocket.

        The parser takes what follows such a head for another protocol; but a server that stays with
        HTTP/1.1 owes a plain answer, and Java's client asks for h2c with every first request.
        """
        if not self._upgrades():
            self.cycle.keep_alive = False
            return
        kept = [(name, value) for name, value in self.headers if name != b"upgrade"]
        head = [b"%s %s HTTP/1.1\r\n" % (self.parser.get_method(), self.url)]
        head += [b"%s: %s\r\n" % header for header in kept]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join(head) + b"\r\n" + rest)

    def send_400_response(self, msg: str) -> None:
        if self._answering and not self.cycle.more_body:
            self.cycle.keep_alive = False  # what is wrong is behind the request
        elif self._head_bytes > MAX_HEADER_BYTES or len(self.headers or ()) > MAX_HEADERS:
            self._refuse(HeadersTooLargeError("The request's headers are too large."))
        else:
            self._refuse(InvalidRequestError("The request is not valid HTTP."))

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEADER_BYTES or len(self.headers) > MAX_HEADERS:
            raise ValueError("headers too large")  # the parser turns it into a parse error

    def _refuse(self, error: ForebayError) -> None:
        request_id = new_request_id()
        path = self.url.decode("latin-1").partition("?")[0]
        status, body = written(error, path, self.headers or (), request_id)
        head = [b"HTTP/1.1 %d \r\nx-request-id: %b\r\n" % (status, request_id)]
        head += [
            name + b": " + value + b"\r\n"
            for name, value in error_headers(error)
            if name != b"connection"
        ]
        head.append(b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body))
        self.transport.write(b"".join(head) + body)
        self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


def _without_chunks(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """The app for an HTTP/1.0 client, which knows no chunks: what has no length ends with the
    connection."""

    async def run(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        unknown = False

        async def send_plain(message: ASGISendEvent) -> None:
            nonlocal unknown
            if message["type"] == "http.response.start":
                names = [name for name, _ in message.get("headers", ())]
                unknown = b"content-length" not in names
                cycle.chunked_encoding = False if unknown else None
            elif message["type"] == "http.response.body" and unknown:
                cycle.expected_content_length = len(message["body"])
            await send(message)

        await app(scope, receive, send_plain)

    return run


class Server(uvicorn.Server):
    """Ends in two steps: /ready fails at once; soon no new connections, and open ones finish."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stop_at = 0.0
        self.draining = False
        self._drained_at = 0.0

    @property
    def drain_left_s(self) -> float:
        """What is left of the drain time once a signal has come."""
        return max(0.0, self._drained_at - time.monotonic())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.draining:
            self._drained_at = time.monotonic() + (self.config.timeout_graceful_shutdown or 0)
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

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """First takes in who is connected and was not accepted yet: closing would cut them off."""
        await asyncio.sleep(0)
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) and time.monotonic() >= self._stop_at
