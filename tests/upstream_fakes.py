"""An upstream that misbehaves on purpose, over real HTTP, as no real server does when it is asked.

Good behaviour is tested against real servers; here a test says what comes over the wire.
"""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from patience import PATIENCE_S
from storm_house import HeldPort

Handler = Callable[["Call"], Awaitable[None]]


@dataclass
class Call:
    """One request that came, and the connection to answer it on."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader
    gone: threading.Event = field(default_factory=threading.Event)
    """The client closed the connection."""

    @property
    def json(self) -> dict:
        return json.loads(self.body)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, status: int, body: object, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = {"content-type": "application/json", "content-length": str(len(data))} | headers
        head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
        await self.send(f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + data)

    async def begin(self) -> None:
        """The head of an event stream, which ends with its connection."""
        await self.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
        )

    async def event(self, **chunk: object) -> None:
        await self.send(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    async def say(self, text: str, reason: str | None = None, **more: object) -> None:
        choice = {"index": 0, "delta": {"content": text, **more}, "finish_reason": reason}
        await self.event(choices=[choice])

    async def done(self) -> None:
        await self.send(b"data: [DONE]\n\n")
        self.writer.close()

    async def left(self) -> None:
        """Waits until the client has closed the connection."""
        while await self.reader.read(4096):
            pass
        self.gone.set()


class Upstream:
    """The server. Change `handler` to change what a POST gets."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.handler: Handler = hello
        self.models: object = {"data": [{"id": "far", "owned_by": "vllm", "max_model_len": 4096}]}
        self.status = 200
        self._held = HeldPort()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._held.number}/v1"

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.listen(), self._loop).result(PATIENCE_S)

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._held.number)

    def close(self) -> None:
        """No connection is taken any more, and those that are open are cut."""

        async def closed() -> None:
            assert self._server is not None
            self._server.close()
            for writer in self._writers:
                writer.transport.abort()

        asyncio.run_coroutine_threadsafe(closed(), self._loop).result(PATIENCE_S)

    def open_again(self) -> None:
        asyncio.run_coroutine_threadsafe(self.listen(), self._loop).result(PATIENCE_S)

    def end(self) -> None:
        self.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._held.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._take(head, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _take(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        first, *lines = head.decode().strip().split("\r\n")
        method, path, _ = first.split()
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        call = Call(method, path, headers, body, writer, reader)
        if method == "GET":
            await call.answer(self.status, self.models)
            return
        self.calls.append(call)
        await self.handler(call)


async def hello(call: Call) -> None:
    """A good answer."""
    await call.begin()
    await call.say("Hel")
    await call.say("lo", "stop")
    await call.event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 2})
    await call.done()


@contextmanager
def upstream() -> Iterator[Upstream]:
    server = Upstream()
    server.start()
    try:
        yield server
    finally:
        server.end()
