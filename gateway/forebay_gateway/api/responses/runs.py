"""Responses that run in the background: a task each, owned by the gateway that took the request.

The store is the truth about them: it says whether one still runs, so a cancel reaches the owner
from any gateway. A gateway that dies falls silent, and its responses count as failed. It knows no
HTTP.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from forebay_shared.errors import BusError, ForebayError, OverloadedError
from forebay_shared.supervise import shielded

from forebay_gateway.api.errors import foreseen
from forebay_gateway.api.ports import Services
from forebay_gateway.api.responses.composer import encode, error_event
from forebay_gateway.api.responses.shapes import Status
from forebay_gateway.api.responses.store import BEAT_S, MAX_EVENT_BYTES, ResponseStore
from forebay_gateway.api.responses.writer import ResponseWriter
from forebay_gateway.api.transcript import Transcript

NEWS_S = 0.05
"""How often a stream looks for events that another gateway makes."""
FAREWELL_S = 1.0
_SETTLE_ATTEMPTS = 5
_SETTLE_AGAIN_S = 1.0


Work = tuple[ResponseWriter, Transcript]
"""Who writes a response, and what."""
Again = Callable[[ForebayError], Awaitable[Work]]
"""The same by the next model of an alias, after an error of the last one; raises where there is
none."""


class _Run:
    """One response in work. `streams`: its events are kept as well."""

    def __init__(
        self, team: str, work: Work, input_: bytes, again: Again | None, streams: bool
    ) -> None:
        self.team = team
        self.writer, self.transcript = work
        self.id = self.writer.response.id
        self.input = input_
        self.again = again
        self.scope = AsyncExitStack()
        """Holds the transcript, once it is entered."""
        self.streams = streams
        self.status: Status = "queued"
        self.event_bytes = 0
        self.told = 0
        self.interrupt = asyncio.timeout(None)
        self.works = False
        """Its task is within the interrupt: it may be stopped."""
        self.stopped = False
        self.news = asyncio.Event()

    def stop(self) -> None:
        """Ends the work: nobody wants it any more."""
        if self.works and not self.stopped:
            self.stopped = True
            self.interrupt.reschedule(0)


class BackgroundRuns:
    """The responses that this process runs, at most `limit` at once."""

    def __init__(self, store: ResponseStore, services: Services, limit: int) -> None:
        self._store = store
        self._services = services
        self._limit = limit
        self._runs: dict[str, _Run] = {}
        self._watched = False

    async def start(
        self, team: str, work: Work, input_: bytes, again: Again, streams: bool
    ) -> None:
        """Stores the response as queued and runs it; `again` where its model cannot.

        Its team's limits are asked first, and hold until it has ended: so a refusal is this call's.
        Raises OverloadedError or RateLimitError where too many run already or a limit is reached,
        BusError.
        """
        if len(self._runs) >= self._limit:
            raise OverloadedError(
                "This gateway runs as many background responses as it may.", retry_after_s=5.0
            )
        run = _Run(team, work, input_, again, streams)
        self._runs[run.id] = run
        try:
            await run.scope.enter_async_context(run.transcript)
            response = run.writer.response
            previous = response.previous_response_id or ""
            owner = self._services.gateway
            await self._store.begin(team, run.id, encode(response), input_, previous, owner)
            await self._tell(run, run.writer.created())
        except BaseException:
            del self._runs[run.id]
            await run.scope.aclose()
            raise
        self._services.tasks.start(f"response-{run.id}", self._work(run))
        self._services.telemetry.responses.background.set(len(self._runs))
        if not self._watched:
            self._watched = True
            self._services.tasks.start("responses-watch", self._watch())

    def news(self, response_id: str) -> asyncio.Event | None:
        """Set when a response of this process has something new to say; None for any other."""
        run = self._runs.get(response_id)
        return run.news if run else None

    async def _work(self, run: _Run) -> None:
        try:
            async with run.interrupt:
                run.works = True
                try:
                    await self._generate(run)
                finally:
                    run.works = False
        except asyncio.CancelledError:
            gone = OverloadedError("The server was shut down while this response was running.")
            await shielded(self._fail(run, gone), FAREWELL_S)
            raise
        except Exception as error:
            if not run.stopped:
                await self._fail(run, foreseen(error)[0])
        finally:
            run.news.set()
            del self._runs[run.id]
            self._services.telemetry.responses.background.set(len(self._runs))

    async def _generate(self, run: _Run) -> None:
        """By the models of its alias, one after the other, until one begins."""
        while True:
            try:
                return await self._attempt(run)
            except ForebayError as error:
                if run.again is None:
                    raise
                run.writer, run.transcript = await run.again(error)
            run.writer.created()  # it was told: this one's events go on behind it
            run.scope = AsyncExitStack()
            await run.scope.enter_async_context(run.transcript)

    async def _attempt(self, run: _Run) -> None:
        writer, transcript = run.writer, run.transcript
        async with run.scope:
            updates = await transcript.advance()
            run.again = None
            events = writer.started()
            run.status = "in_progress"
            if not await self._beat(run):
                return
            while True:
                for update in updates:
                    events += writer.pushed(update)
                await self._tell(run, events)
                if transcript.done:
                    break
                updates, events = await transcript.advance(), []
            writer.settle(transcript.usage)
        await self._settle(run)

    async def _fail(self, run: _Run, error: ForebayError) -> None:
        run.writer.fail(error)
        await self._settle(run)

    async def _settle(self, run: _Run) -> None:
        """Stores how it ended, then says so; when Redis stays away, its silence says it failed."""
        response = run.writer.response
        more = len(run.input) + run.event_bytes
        data = encode(response)
        owner = self._services.gateway
        for _ in range(_SETTLE_ATTEMPTS):
            with contextlib.suppress(BusError):
                if await self._store.settle(run.team, run.id, data, response.status, owner, more):
                    await self._tell(run, run.writer.ended())
                return
            await asyncio.sleep(_SETTLE_AGAIN_S)

    async def _tell(self, run: _Run, events: Sequence[bytes]) -> None:
        """Keeps events for whoever streams them; the last one that there is room for says so."""
        if not run.streams or not events:
            return
        run.event_bytes += sum(map(len, events))
        if run.event_bytes > MAX_EVENT_BYTES:
            run.streams = False
            events = [error_event(run.told, "stream_too_long", _TOO_LONG)]
        await self._store.add_events(run.team, run.id, events)
        run.told += len(events)
        news, run.news = run.news, asyncio.Event()
        news.set()

    async def _watch(self) -> None:
        """Says that the responses of this process still run, and ends those that are to stop."""
        while self._runs:
            await asyncio.sleep(BEAT_S)
            await asyncio.gather(*(self._check(run) for run in list(self._runs.values())))
        self._watched = False

    async def _check(self, run: _Run) -> None:
        """One that is not stored yet, or is being settled, is not there to be stopped."""
        worked = run.works
        with contextlib.suppress(BusError):
            if not await self._beat(run) and worked:
                run.stop()

    async def _beat(self, run: _Run) -> bool:
        return await self._store.beat(run.team, run.id, self._services.gateway, run.status)


_TOO_LONG = "This response has too many events to keep them all: retrieve it when it has ended."
