"""Commands to one Redis server: a bounded queue, one task, one connection, many per round trip.

A command waits for a server that is away as long as its patience goes, and may then be sent twice
when the connection broke in between. What the server cannot take for want of memory fails at once,
unless it is vital. It knows nothing of streams and of other servers.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from redis.exceptions import NoScriptError, OutOfMemoryError, ResponseError

from forebay_shared.errors import BusError, BusFullError
from forebay_shared.link import (
    ELSEWHERE,
    LINK_ERRORS,
    ROUND_TRIP_S,
    Answer,
    Backoff,
    Command,
    Link,
    Value,
)

log = logging.getLogger(__name__)

MAX_PIPELINE = 256
_OVERFILL = "#!lua flags=allow-oom\nreturn redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))"
"""Runs a command, whose key comes first, in a Redis that is full."""


class Call:
    """A command and the future of its answer. `instead` is for a server that does not know the
    script; `vital` commands are run by one that is full, so they must not let it grow for long."""

    __slots__ = ("command", "future", "instead", "since", "vital")

    def __init__(
        self, command: Command, *, instead: Command | None = None, vital: bool = False
    ) -> None:
        loop = asyncio.get_running_loop()
        self.command = command
        self.instead = instead
        self.vital = vital
        self.future: asyncio.Future[Value] = loop.create_future()
        self.since = loop.time()

    def retry(self, error: ResponseError) -> bool:
        """Turns to another form of the command, where there is one that answers the error and
        somebody still waits."""
        if isinstance(error, OutOfMemoryError) and self.vital:
            name, key, *rest = self.command
            self.command, self.vital = ("EVAL", _OVERFILL, 1, key, name, *rest), False
            return True
        if self.instead is None or not isinstance(error, NoScriptError) or self.future.done():
            return False
        self.command, self.instead = self.instead, None
        return True

    def answer(self, answer: Answer) -> None:
        if self.future.done():
            return
        if isinstance(answer, OutOfMemoryError):
            self._fail(BusFullError("The message bus is full. Please retry.", retry_after_s=5.0))
        elif isinstance(answer, ResponseError):
            log.warning("redis refused %s: %s", self.command[0], str(answer).split(" ", 1)[0])
            self.fail()
        else:
            self.future.set_result(answer)

    def fail(self) -> None:
        """Redis is away, or does not want it."""
        self._fail(BusError("The message bus is not available. Please retry.", retry_after_s=1.0))

    def _fail(self, error: BusError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            # Whoever fires and forgets must not cause "exception was never retrieved".
            self.future.exception()


class Sink(Protocol):
    """What takes commands: a pipe, or several."""

    @property
    def connected(self) -> bool: ...
    @property
    def reconnects(self) -> int: ...
    @property
    def queued(self) -> int: ...

    def put(self, call: Call) -> None: ...

    async def drain(self) -> None: ...

    async def run(self) -> None: ...


class Pipe:
    """One server's queue. `stray` takes the calls that it has no keys for; without it they fail."""

    def __init__(
        self,
        link: Link,
        *,
        patience_s: float,
        max_queued: int,
        stray: Callable[[Call], None] | None = None,
    ) -> None:
        self._link = link
        self._patience_s = patience_s
        self._max_queued = max_queued
        self._stray = stray
        self._queue: deque[Call] = deque()
        self._wake = asyncio.Event()
        self._down_since: float | None = None
        self.reconnects = 0

    @property
    def connected(self) -> bool:
        return self._down_since is None

    @property
    def queued(self) -> int:
        return len(self._queue)

    def put(self, call: Call) -> None:
        """Queues it; it fails when the queue is full or the server is away for too long."""
        if len(self._queue) >= self._max_queued or self._given_up(call.since):
            call.fail()
        else:
            self._queue.append(call)
            self._wake.set()

    def take_back(self) -> list[Call]:
        """Everything that is queued, out of the queue."""
        calls = list(self._queue)
        self._queue.clear()
        return calls

    async def drain(self) -> None:
        call = Call(("PING",))
        self.put(call)
        await call.future

    async def run(self) -> None:
        """Drains the queue until it is cancelled; then what is queued fails."""
        backoff = Backoff()
        try:
            while True:
                if not self._queue and self.connected:
                    self._wake.clear()
                    await self._wake.wait()
                if await self._flush():
                    backoff.reset()
                else:
                    await backoff.wait()
                    self._expire()
        finally:
            await self._link.close()
            for call in self.take_back():
                call.fail()

    async def _flush(self) -> bool:
        """One round trip for the head of the queue, which stays queued when the trip fails.

        A server that has been given up is asked all the same: nothing is queued for it any more.
        """
        queue = self._queue
        batch = [queue.popleft() for _ in range(min(len(queue), MAX_PIPELINE))]
        try:
            commands = [call.command for call in batch] or [("PING",)]
            answers = (await self._link.run(commands, ROUND_TRIP_S))[: len(batch)]
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
            if isinstance(answer, ResponseError):
                self._refused(call, answer)
            else:
                call.answer(answer)
        return True

    def _refused(self, call: Call, error: ResponseError) -> None:
        if self._stray is not None and isinstance(error, ELSEWHERE):
            self._stray(call)
        elif call.retry(error):
            self._queue.append(call)
        else:
            call.answer(error)

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
