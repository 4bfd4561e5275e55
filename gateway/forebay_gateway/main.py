"""`forebay gateway`: one gateway process, from its settings to its exit code.

It binds, connects, serves and drains. It knows no routes and no Redis command.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvloop
from forebay_shared import collector
from forebay_shared.logs import configure_logging
from forebay_shared.settings import GatewaySettings
from forebay_shared.tracing import opened

from forebay_gateway.app import create_app
from forebay_gateway.backend import Backend, connect
from forebay_gateway.server import Config, Protocol, Server

if TYPE_CHECKING:
    from forebay_shared.tracing.spans import Tracing

KEEP_ALIVE_S = 75
BACKLOG = 2048
SEND_BUFFER = 131_072
"""Bytes, which Linux doubles: else the kernel takes up to 4 MB from us for one slow client."""
_PROBES = {
    "TCP_KEEPIDLE": 30,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 60_000,
}
"""Seconds of silence, then of each probe, how many; milliseconds for what was sent to be taken."""
OPEN_S = 2.0
"""A socket that others hand on has clients already: so long they wait, rather than get a 503."""


def run(settings: GatewaySettings) -> int:
    """Serves until SIGTERM or SIGINT; the process's exit code. An error at start is one line."""
    configure_logging(settings.log_level, "gateway")
    # Texts are encoded one at a time: the tokenizer's own threads would cost 30 us of CPU and 60 to
    # 140 us of waiting for each.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    server_log = logging.getLogger("uvicorn.error")
    server_log.setLevel(logging.ERROR)  # anybody can make it warn, once per bad request
    server_log.addFilter(_is_news)
    try:
        listener = listen(settings)
    except OSError as error:
        reason = error.strerror or "no such address"
        where = f"{settings.host}:{settings.port}" if settings.fd < 0 else f"fd {settings.fd}"
        print(f"forebay gateway: cannot listen on {where}: {reason}", file=sys.stderr)
        return 1
    try:
        with (
            opened(settings.otlp_traces_endpoint, "forebay-gateway") as tracing,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            return runner.run(_serve(settings, listener, tracing))
    except KeyboardInterrupt:  # before it served
        return 130


def listen(settings: GatewaySettings) -> socket.socket:
    """The inherited socket, or one of our own. Raises OSError."""
    if settings.fd >= 0:
        listener = socket.socket(fileno=settings.fd)
    else:
        family, *_, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server(address, family=family, backlog=BACKLOG)
    if listener.family != socket.AF_UNIX:
        _watch_peers(listener)
    return listener


def _watch_peers(listener: socket.socket) -> None:
    """What its connections inherit: a peer that is gone without a word is found within a minute,
    and one that does not read holds little of the kernel's memory."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):  # not every kernel has all of them
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _serve(
    settings: GatewaySettings, listener: socket.socket, tracing: "Tracing | None"
) -> int:
    async with connect(settings) as backend:
        server: Server | None = None
        app = create_app(
            settings, backend, lambda: server is not None and server.draining, tracing=tracing
        )
        server = Server(server_config(app, settings, backend.telemetry.http.slow_clients.inc))
        collector.calm()
        await backend.opened(OPEN_S)
        return await _until_failure(server, listener, backend)


async def _until_failure(server: Server, listener: socket.socket, backend: Backend) -> int:
    """Serves to the end. A gateway whose reader or publisher has crashed ends too, with a 1: it
    could only make clients wait, and whoever supervises it starts a sound one."""

    def end(_: asyncio.Future[None]) -> None:
        server.should_exit = True

    failure = asyncio.create_task(backend.failure(), name="gateway.failure")
    failure.add_done_callback(end)
    await server.serve(sockets=[listener])
    await backend.tasks.finish(server.drain_left_s)
    if failure.done() and failure.exception() is not None:
        return 1
    failure.cancel()
    return 0


def server_config(
    app: Callable[..., object], settings: GatewaySettings, stalled: Callable[[], None]
) -> Config:
    """uvicorn's settings: no lifespan, no WebSockets, no access log, no proxy headers."""
    return Config(
        app,
        stall_timeout_s=settings.slow_client_timeout_s,
        stalled=stalled,
        max_body_bytes=settings.max_body_bytes,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(settings.drain_timeout_s)),
    )


def _is_news(record: logging.LogRecord) -> bool:
    """Whether uvicorn's record is worth a line: requests cut off by the drain time are not."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
