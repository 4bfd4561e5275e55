"""What a worker says of itself: its lease, card and blobs, its load every second, and its farewell.

All of it is said again after Redis lost it. It knows the engine only by its card and its load.
"""

import asyncio
import logging
import zlib
from collections.abc import Callable

import msgspec
from forebay_shared import keys
from forebay_shared.bus import Publisher
from forebay_shared.exposition import snapshot
from forebay_shared.link import Value
from forebay_shared.models import content_hash
from forebay_shared.packets import ROSTER
from forebay_shared.telemetry import EngineMetrics
from forebay_shared.wire import Beacon, Farewell

from forebay_worker.digest import Digests
from forebay_worker.engines.base import Dependent, Engine

log = logging.getLogger(__name__)

LOST_S = keys.LEASE_MS / 1000 - 0.25
"""Beacons so far apart may have seemed a whole lease apart: one travels longer than another."""

_encode = msgspec.msgpack.Encoder().encode


class Presence:
    """One worker incarnation in the roster.

    `lapsed` is called when gateways may have taken this worker for dead: when its process did not
    come round to renew its lease in time (it was stopped, or starved). What counts is the time
    since the last beacon, not how long the process stood still, for gateways see no more.
    """

    def __init__(
        self,
        worker: str,
        engine: Engine,
        publisher: Publisher,
        metrics: EngineMetrics,
        digests: Digests,
        lapsed: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._engine = engine
        self._publisher = publisher
        self._metrics = metrics
        self._digests = digests
        self._lapsed = lapsed
        self._renewed_at: float | None = None
        self._card = _encode(engine.card)
        self._card_hash = content_hash(self._card)
        self._blobs = {
            name: zlib.compress(content, level=6) for name, content in engine.blobs.items()
        }
        self.draining = False

    def retire(self) -> None:
        """Asks for nothing new, at once."""
        self.draining = True
        self.renew()

    async def run(self) -> None:
        """Renews everything each keys.RENEW_S."""
        self._register()
        while True:
            self.renew()
            await asyncio.sleep(keys.RENEW_S)

    def renew(self) -> None:
        """Renews the lease, then tells everybody the load. A full Redis takes it too: none of it
        stays, and without it everybody here would be given up."""
        self._look_at_the_clock()
        call = self._publisher.call
        load = self._engine.load()
        self._metrics.load(load)
        beacon = Beacon(
            worker=self._worker,
            card=self._card_hash,
            load=load,
            draining=self.draining or not self._available,
            digest=self._digests.number,
        )
        call("SET", keys.worker_lease(self._worker), "1", "PX", keys.LEASE_MS, vital=True)
        self._renew_content()
        packet = ROSTER.encode(self._worker, [beacon])
        self._publisher.announce(keys.roster(), packet, keys.ROSTER_MAXLEN, vital=True)
        call("PEXPIRE", keys.roster(), keys.STREAM_TTL_MS)
        self._digests.renew()
        call("HSET", keys.members(), self._worker, _encode(beacon))
        call("PEXPIRE", keys.members(), keys.STREAM_TTL_MS)
        metrics = snapshot(self._metrics.registry)
        call("SET", keys.metrics(self._worker), metrics, "PX", keys.LEASE_MS, vital=True)

    def _look_at_the_clock(self) -> None:
        now = asyncio.get_running_loop().time()
        silent_s = 0.0 if self._renewed_at is None else now - self._renewed_at
        self._renewed_at = now
        if silent_s > LOST_S:
            log.warning("this worker was silent for %.1f s and lost its lease", silent_s)
            self._lapsed()

    @property
    def _available(self) -> bool:
        return not isinstance(self._engine, Dependent) or self._engine.available

    async def farewell(self) -> None:
        """Takes back all that was said; blobs stay, as other workers may serve the same model."""
        self._digests.close()
        call = self._publisher.call
        packet = ROSTER.encode(self._worker, [Farewell(worker=self._worker)])
        self._publisher.announce(keys.roster(), packet, keys.ROSTER_MAXLEN)
        call("HDEL", keys.members(), self._worker)
        call("DEL", keys.worker_lease(self._worker), keys.worker_card(self._worker))
        call("DEL", keys.work(self._worker))
        call("DEL", keys.metrics(self._worker))
        await self._publisher.drain()

    def _renew_content(self) -> None:
        call = self._publisher.call
        renewals = [call("PEXPIRE", keys.worker_card(self._worker), keys.STREAM_TTL_MS)]
        renewals.extend(call("PEXPIRE", keys.blob(name), keys.BLOB_TTL_MS) for name in self._blobs)

        def renewed(future: asyncio.Future[Value]) -> None:
            if not future.cancelled() and future.exception() is None and future.result() == 0:
                self._register()

        for renewal in renewals:
            renewal.add_done_callback(renewed)

    def _register(self) -> None:
        """Says what the beacons refer to, so it must be sent before them."""
        call = self._publisher.call
        for name, packed in self._blobs.items():
            call("SET", keys.blob(name), packed, "PX", keys.BLOB_TTL_MS)
        call("SET", keys.worker_card(self._worker), self._card, "PX", keys.STREAM_TTL_MS)
