"""Runs a transcript and writes it, whole or as an event stream, in any dialect.

Both end the work when the client leaves. It knows no request fields, no model and no JSON: a
`Writer` gives the bytes.
"""

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from forebay_shared.errors import BusError, ForebayError, OverloadedError
from forebay_shared.supervise import shielded
from litestar.types import Receive, Scope, Send
from prometheus_client import Gauge

from forebay_gateway.api.connection import WhileConnected
from forebay_gateway.api.errors import ClientGoneError, foreseen
from forebay_gateway.api.respond import Answer
from forebay_gateway.api.sse import EventStream
from forebay_gateway.api.transcript import (
    EARLY_S,
    UNTAKEN_S,
    FinishReason,
    Transcript,
    Update,
    Usage,
)
from forebay_gateway.parts import Collected

FAREWELL_S = 1.0
_LOOK_S = 0.1
"""Between two looks whether a request has its place in a worker's queue."""


class Keeper(Protocol):
    """Keeps an answer, as its writer has it, for later."""

    async def complete(self, usage: Usage) -> None:
        """It is complete, which the client does not know yet. When this raises, it fails."""
        ...

    async def broken(self) -> None:
        """A stream broke off, as the writer has written. Raises nothing that is foreseen."""
        ...


class Writer(Protocol):
    """One answer in a dialect's bytes. `running_usage`: every event wants the usage so far."""

    @property
    def running_usage(self) -> bool: ...

    def sign_of_life(self, *, as_event: bool) -> bytes:
        """What a silent stream says now: an event that adds nothing, or a comment, where the
        dialect has a choice."""
        ...

    def opening(self, size: int, usage: Usage) -> bytes:
        """The events before any token of an answer with `size` choices. Of the usage only the
        prompt's is known, and what of it was cached only when the engine has begun."""
        ...

    def events(self, update: Update, usage: Usage | None) -> bytes:
        """The events of what one choice got; `usage` is given when `running_usage` asks for it."""
        ...

    def closing(self, usage: Usage) -> bytes:
        """The events after the last choice has ended."""
        ...

    def failure(self, error: ForebayError) -> bytes:
        """The last events of a stream that breaks off."""
        ...

    def collect(self, update: Update) -> None:
        """Keeps of an update what `whole` needs beside text and parts."""
        ...

    def whole(
        self, answers: Sequence[Collected], reasons: Sequence[FinishReason], usage: Usage
    ) -> bytes:
        """The answer in one JSON object."""
        ...


class WholeAnswer:
    """An answer in one JSON object."""

    def __init__(
        self, transcript: Transcript, writer: Writer, keeper: Keeper | None = None
    ) -> None:
        self._transcript = transcript
        self._writer = writer
        self._keeper = keeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        transcript = self._transcript
        answers = [Collected() for _ in range(transcript.size)]
        reasons: dict[int, FinishReason] = {}
        async with WhileConnected(receive), transcript:
            while not transcript.done:
                for update in await transcript.advance():
                    answers[update.index].add_text(update.text)
                    answers[update.index].add(update.parts)
                    self._writer.collect(update)
                    if update.reason is not None:
                        reasons[update.index] = update.reason
            if self._keeper is not None:
                await self._keeper.complete(transcript.usage)
        body = self._writer.whole(
            answers,
            [reasons[index] for index in range(transcript.size)],
            transcript.usage,
        )
        await Answer(body)(scope, receive, send)


class StreamedAnswer:
    """An answer as server-sent events.

    `early_s` is how long errors are plain JSON, whatever they are, and longer while the request may
    be refused for want of room; None: until the engine speaks. `signs_are_events`: in silence there
    come events, for clients that hear no comments.
    """

    def __init__(
        self,
        transcript: Transcript,
        writer: Writer,
        open_streams: Gauge,
        early_s: float | None = EARLY_S,
        keeper: Keeper | None = None,
        *,
        signs_are_events: bool = False,
    ) -> None:
        self._sign = partial(writer.sign_of_life, as_event=signs_are_events)
        self._transcript = transcript
        self._writer = writer
        self._keeper = keeper
        self._open_streams = open_streams
        self._early_s = early_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with EventStream(send, self._sign) as stream:
            await self._run(stream, receive)

    async def _run(self, stream: EventStream, receive: Receive) -> None:
        try:
            with _counted(self._open_streams):
                async with WhileConnected(receive), self._transcript:
                    await self._write(stream)
        except ClientGoneError:
            if not stream.started:
                raise
        except asyncio.CancelledError:
            # The process ends and the drain time is over: say so, rather than just breaking off.
            if stream.started:
                await self._break(stream, OverloadedError("The server is shutting down."))
            raise
        except Exception as error:
            if not stream.started:
                raise
            await self._break(stream, foreseen(error)[0])

    async def _break(self, stream: EventStream, error: ForebayError) -> None:
        """Says how the stream ends, which a client that has its id may ask for again."""
        events = self._writer.failure(error)
        if self._keeper is not None and not isinstance(error, BusError):
            await shielded(self._keeper.broken(), FAREWELL_S)
        await stream.end(events)

    async def _write(self, stream: EventStream) -> None:
        transcript, writer = self._transcript, self._writer
        updates = await self._early()
        opening = writer.opening(transcript.size, transcript.usage)
        events = opening + self._events(updates)
        while not transcript.done:
            if events or not stream.started:
                await stream.write(events)
            events = self._events(await transcript.advance())
        if self._keeper is not None:
            await stream.write(events)
            events = b""
            await self._keeper.complete(transcript.usage)
        events += writer.closing(transcript.usage)
        if stream.started:
            await stream.end(events)
        else:
            await stream.write(events)
            await stream.end()

    async def _early(self) -> list[Update]:
        """What comes before the status has to go out."""
        if self._early_s is None:
            return await self._transcript.advance()
        loop = asyncio.get_running_loop()
        latest = loop.time() + UNTAKEN_S

        def look() -> None:
            """Lets the status go out once every job has its place, or it is late."""
            nonlocal timer
            now = loop.time()
            if self._transcript.taken or now >= latest:
                limit.reschedule(now)
            else:
                timer = loop.call_later(_LOOK_S, look)

        timer = loop.call_later(self._early_s, look)
        try:
            async with asyncio.timeout(None) as limit:
                return await self._transcript.advance()
        except TimeoutError:
            return []
        finally:
            timer.cancel()

    def _events(self, updates: list[Update]) -> bytes:
        if not updates:
            return b""
        usage = self._running_usage()
        return b"".join([self._writer.events(update, usage) for update in updates])

    def _running_usage(self) -> Usage | None:
        """What every event is to carry; None when only the last one does, or none."""
        return self._transcript.usage if self._writer.running_usage else None


@contextmanager
def _counted(gauge: Gauge) -> Generator[None]:
    gauge.inc()
    try:
        yield
    finally:
        gauge.dec()
