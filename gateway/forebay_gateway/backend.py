"""The gateway's side of the bus, wired: `async with connect(settings) as backend`."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import cast

from forebay_shared import keys, tracing
from forebay_shared.bus import Publisher
from forebay_shared.errors import BusError
from forebay_shared.exposition import render, snapshot
from forebay_shared.mishaps import Mishaps
from forebay_shared.reader import Reader
from forebay_shared.settings import GatewaySettings
from forebay_shared.supervise import Supervisor, shielded
from forebay_shared.telemetry import GatewayMetrics
from prometheus_client import CollectorRegistry

from forebay_gateway.digests import Digests
from forebay_gateway.dispatch import Dispatcher
from forebay_gateway.inbox import Inbox
from forebay_gateway.janitor import Janitor
from forebay_gateway.prefix_index import PrefixIndex
from forebay_gateway.roster import Roster
from forebay_gateway.routing import Routing
from forebay_gateway.store import Store
from forebay_gateway.teams.metrics import TeamsCollector
from forebay_gateway.teams.teams import Teams

TICK_S = 0.25
FAREWELL_S = 1.0


class Backend:
    """What the HTTP layer uses. `telemetry` is where it counts requests and open streams."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.gateway = keys.incarnation()
        self.telemetry = GatewayMetrics(CollectorRegistry())
        self.publisher = Publisher(settings.redis_url)
        self.inbox = Inbox(self.telemetry)
        self.roster = Roster(self.publisher, self.telemetry)
        self.store = Store(self.publisher)
        self.teams = Teams(settings, self.publisher, self.gateway, self.roster.knows)
        self.telemetry.registry.register(TeamsCollector(self.teams))
        self.reader = Reader(
            settings.redis_url,
            [self.inbox.feed(self.gateway), self.roster.feed(), self.teams.sync.feed()],
        )
        self.index = PrefixIndex(settings.prefix_index_bytes)
        self.supervisors: tuple[Supervisor, ...] = ()
        self.tasks = Supervisor("background")
        self._scraping = asyncio.Lock()
        self._reconnects = 0
        self._bad_messages = 0
        self._mishaps = Mishaps(self.telemetry.process)
        self.dispatcher = Dispatcher(
            self.gateway,
            self.publisher,
            self.roster,
            self.inbox,
            self.telemetry,
            settings.queue_timeout_s,
            Routing(self.index, self.telemetry),
            tracing.current,
        )
        self.digests = Digests(
            self.index, self.roster, self.telemetry, self.dispatcher.ask_for_snapshot
        )
        self.janitor = Janitor(self.publisher, self.gateway, self.telemetry)
        self.digest_reader = Reader(settings.redis_url, [self.digests.feed()])

    @property
    def connected(self) -> bool:
        """Redis answers."""
        return self.reader.connected

    async def opened(self, timeout_s: float) -> None:
        """Waits until this process can serve: it has the directory, and knows a worker and all that
        are there. Not longer than `timeout_s`, since Redis may be away and workers may still
        load."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.teams.sync.loaded()
                while not (self.roster.ready and self.roster.met):
                    await self.roster.changed()

    async def failure(self) -> None:
        """Waits for ever, or raises what ended one of the tasks: the process must end then."""
        await asyncio.gather(*(supervisor.failure() for supervisor in self.supervisors))

    async def metrics(self) -> str:
        """One Prometheus exposition of this process and of every live gateway and worker. That of
        32 workers takes 0.1 s, in a thread: and one at a time, since anybody may ask."""
        async with self._scraping:
            snapshots = [({"gateway": self.gateway}, snapshot(self.telemetry.registry))]
            if self.connected:
                with contextlib.suppress(BusError):
                    snapshots.extend(await self._others())
            return await asyncio.to_thread(render, snapshots)

    async def _others(self) -> list[tuple[dict[str, str], bytes]]:
        """Snapshots of the other live processes."""
        members = cast(list[bytes], await self.publisher.call("SMEMBERS", keys.gateways()))
        names = {member.decode() for member in members} - {self.gateway}
        snapshots: list[tuple[dict[str, str], bytes]] = []
        for name, data in await self._fetch(sorted(names)):
            if data is not None:
                snapshots.append(({"gateway": name}, data))
        workers = await self._fetch(self.roster.workers)
        return snapshots + [({}, data) for _, data in workers if data is not None]

    async def _fetch(self, processes: list[str]) -> list[tuple[str, bytes | None]]:
        calls = [self.publisher.call("GET", keys.metrics(name)) for name in processes]
        values = cast(list[bytes | None], await asyncio.gather(*calls))
        return list(zip(processes, values, strict=True))

    async def upkeep(self) -> None:
        """Watches the workers and Redis, and renews what says that this gateway lives."""
        loop = asyncio.get_running_loop()
        renew_at = due = loop.time()
        while True:
            now = loop.time()
            self.telemetry.process.loop_lag.observe(max(0.0, now - due))
            self.roster.check(self.reader)
            self.dispatcher.check(self.reader)
            self.digests.check()
            if now >= renew_at:
                renew_at = now + keys.RENEW_S
                self._count()
                self._mishaps.look()
                self._renew()
                self.teams.limiter.upkeep()
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)

    def _count(self) -> None:
        """Brings the counters in line with what reader and publisher have counted since."""
        self.telemetry.jobs.inbox_tokens.set(self.inbox.tokens)
        reconnects = self.reader.reconnects + self.publisher.reconnects
        self.telemetry.process.reconnects.inc(reconnects - self._reconnects)
        self.telemetry.jobs.dropped("bad", self.reader.bad_messages - self._bad_messages)
        self._reconnects, self._bad_messages = reconnects, self.reader.bad_messages
        self.telemetry.process.unsent.set(self.dispatcher.unsent)
        self.telemetry.process.redis_queue.set(self.publisher.queued)
        self.telemetry.routing.digest_queue.set(self.digests.queued_bytes)
        if self.connected:
            self.telemetry.process.redis_trip.observe(self.reader.round_trip_s)

    def _renew(self) -> None:
        call = self.publisher.call
        call("SET", keys.gateway_lease(self.gateway), "1", "PX", keys.LEASE_MS, vital=True)
        call("SADD", keys.gateways(), self.gateway)
        call("PEXPIRE", keys.gateways(), keys.STREAM_TTL_MS)
        metrics = snapshot(self.telemetry.registry)
        call("SET", keys.metrics(self.gateway), metrics, "PX", keys.LEASE_MS, vital=True)

    async def farewell(self) -> None:
        """Leaves nothing behind; the lease goes, so workers abort what this gateway left open."""
        self.dispatcher.end_tails()
        await self.teams.limiter.drained(FAREWELL_S / 2)
        call = self.publisher.call
        call("SREM", keys.gateways(), self.gateway)
        call("DEL", keys.reply(self.gateway), keys.gateway_lease(self.gateway))
        call("DEL", keys.metrics(self.gateway))
        await self.publisher.drain()


@asynccontextmanager
async def connect(settings: GatewaySettings) -> AsyncGenerator[Backend]:
    """Starts the reader, the publisher and the upkeep of one gateway incarnation.

    Leaving stops them. Returns at once when Redis is away: everything then raises BusError until it
    is back.
    """
    backend = Backend(settings)
    async with Supervisor("gateway") as publishing:
        publishing.start("publisher", backend.publisher.run())
        async with Supervisor("gateway") as reading:
            reading.start("reader", backend.reader.run())
            reading.start("digest reader", backend.digest_reader.run())
            reading.start("digests", backend.digests.run())
            reading.start("upkeep", backend.upkeep())
            reading.start("teams", backend.teams.sync.run())
            reading.start("issuers", backend.teams.keeper.run())
            reading.start("janitor", backend.janitor.run())
            reading.start("books", backend.teams.bookkeeper.run())
            for number, exporter in enumerate(backend.teams.exporters):
                reading.start(f"export-{number}", exporter.run())
            backend.supervisors = (publishing, reading, backend.tasks)
            async with backend.tasks:
                yield backend
        await shielded(backend.farewell(), FAREWELL_S)
