"""The sending half of the bus: one publisher per process, many commands per round trip.

Packets go to streams with NOMKSTREAM, so nothing can revive the stream of a dead process: its owner
makes it (`reader.py`). Redis 7.0 commands only. It knows no engine, no request and no HTTP.
"""

import asyncio
import contextlib
import logging
from collections import deque

from redis.exceptions import NoScriptError, ResponseError

from forebay_shared.errors import BusError
from forebay_shared.link import (
    LINK_ERRORS,
    PACKET_FIELD,
    ROUND_TRIP_S,
    Answer,
    Argument,
    Backoff,
    Command,
    Link,
    Value,
)

log = logging.getLogger(__name__)

MAX_PIPELINE = 256


class Publisher:
    """Sends commands through one task and one connection; what is queued goes in one round trip.

    Every call returns a future at once. Cancelling it, or whoever awaits it, touches neither the
    command nor the connection. While Redis is away a command waits `patience_s`, then its future
    gets a BusError; it may be sent twice when the connection broke in between, so receivers drop
    duplicates. Commands keep their order.
    """

    def __init__(self, url: str, *, patience_s: float = 5.0, max_queued: int = 65_536) -> None:
        self._link = Link(url)
        self._patience_s = patience_s
        self._max_queued = max_queued
        self._queue: deque[_Call] = deque()
        self._wake = asyncio.Event()
        self._down_since: float | None = None
        self.reconnects = 0

    @property
    def connected(self) -> bool:
        return self._down_since is None

    def publish(self, stream: str, packet: bytes, maxlen: int) -> asyncio.Future[Value]:
        """Appends a packet. The future holds the entry's id; None: there is no such stream."""
        return self.call(
            "XADD", stream, "NOMKSTREAM", "MAXLEN", "~", maxlen, "*", PACKET_FIELD, packet
        )

    def announce(self, stream: str, packet: bytes, maxlen: int) -> asyncio.Future[Value]:
        """Appends a packet to a stream that nobody owns; makes the stream if need be."""
        return self.call("XADD", stream, "MAXLEN", "~", maxlen, "*", PACKET_FIELD, packet)

    def call(self, *command: Argument, instead: Command | None = None) -> asyncio.Future[Value]:
        """Sends any command. The future raises BusError when Redis is away, full or refuses it.

        `instead` is sent when Redis does not know the script that `command` names.
        """
        loop = asyncio.get_running_loop()
        call = _Call(command, loop.create_future(), loop.time(), instead)
        if len(self._queue) >= self._max_queued or self._given_up(call.since):
            call.fail()
        else:
            self._queue.append(call)
            self._wake.set()
        return call.future

    async def run(self) -> None:
        """Drains the queue until it is cancelled; then what is queued fails."""
        backoff = Backoff()
        try:
            while True:
                if not self._queue:
                    self._wake.clear()
                    await self._wake.wait()
                if await self._flush():
                    backoff.reset()
                else:
                    await backoff.wait()
                    self._expire()
        finally:
            await self._link.close()
            for call in self._queue:
                call.fail()
            self._queue.clear()

    async def drain(self) -> None:
        """Waits until all that was queued before is answered; `run` must be running."""
        with contextlib.suppress(BusError):
            await self.call("PING")

    async def _flush(self) -> bool:
        """One round trip for the head of the queue, which stays queued when the trip fails."""
        queue = self._queue
        batch = [queue.popleft() for _ in range(min(len(queue), MAX_PIPELINE))]
        try:
            answers = await self._link.run([call.command for call in batch], ROUND_TRIP_S)
        except LINK_ERRORS as error:
            queue.extendleft(reversed(batch))
            self._lost(error)
            return False
        except asyncio.CancelledError:
            queue.extendleft(reversed(batch))
            raise
        if self._down_since is not None:
            self._down_since = None
            self.reconnects += 1
            log.info("publisher connected again")
        for call, answer in zip(batch, answers, strict=True):
            if isinstance(answer, NoScriptError) and call.retry():
                queue.append(call)
            else:
                call.answer(answer)
        return True

    def _lost(self, error: BaseException) -> None:
        if self._down_since is None:
            self._down_since = asyncio.get_running_loop().time()
            log.warning("publisher lost redis: %s", type(error).__name__)

    def _given_up(self, now: float) -> bool:
        return self._down_since is not None and now - self._down_since > self._patience_s

    def _expire(self) -> None:
        deadline = asyncio.get_running_loop().time() - self._patience_s
        while self._queue and self._queue[0].since < deadline:
            self._queue.popleft().fail()


class _Call:
    """A command and the future of its answer."""

    __slots__ = ("command", "future", "instead", "since")

    def __init__(
        self,
        command: Command,
        future: asyncio.Future[Value],
        since: float,
        instead: Command | None = None,
    ) -> None:
        self.command = command
        self.instead = instead
        self.future = future
        self.since = since

    def retry(self) -> bool:
        """Turns to the other command, where there is one and somebody still waits."""
        if self.instead is None or self.future.done():
            return False
        self.command, self.instead = self.instead, None
        return True

    def answer(self, answer: Answer) -> None:
        if self.future.done():
            return
        if isinstance(answer, ResponseError):
            log.warning("redis refused %s: %s", self.command[0], str(answer).split(" ", 1)[0])
            self.fail()
        else:
            self.future.set_result(answer)

    def fail(self) -> None:
        if not self.future.done():
            self.future.set_exception(
                BusError("The message bus is not available. Please retry.", retry_after_s=1.0)
            )
            # Whoever fires and forgets must not cause "exception was never retrieved".
            self.future.exception()
