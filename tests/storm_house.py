"""What stands between a process and its Redis in tests: a proxy that delays, holds, cuts, turns."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


class HeldPort:
    """A port that is kept for one server, also while that does not run.

    It is bound here and never listened on, so neither the kernel nor a neighbour takes it for
    another socket; servers set SO_REUSEADDR and so may listen there.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.number: int = self._socket.getsockname()[1]

    def __enter__(self) -> "HeldPort":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()


class Proxy:
    """A TCP proxy before the Unix socket of a Redis.

    `delay_s` before each piece of a reply; `heard` cleared: replies are held back; `turn` ends all
    connections and leads new ones elsewhere.
    """

    def __init__(self, target: Path) -> None:
        self.delay_s = 0.0
        self.heard = asyncio.Event()
        self.heard.set()
        self.url = ""
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()

    def turn(self, target: Path) -> None:
        self._target = target
        for writer in self._open:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            replies, asked = await asyncio.open_unix_connection(self._target)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, asked}
        asking = asyncio.create_task(self._pass_on(reader, asked, answers=False))
        await self._pass_on(replies, writer, answers=True)
        asking.cancel()
        self._open -= {writer, asked}

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                if answers:
                    await asyncio.sleep(self.delay_s)
                    await self.heard.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def proxied(target: Path) -> AsyncIterator[Proxy]:
    """A proxy on a port of its own."""
    proxy = Proxy(target)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        proxy.heard.set()
        proxy.turn(target)
