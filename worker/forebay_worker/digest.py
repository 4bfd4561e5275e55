"""Digests: what the engine's prefix cache holds, told to every gateway.

Changes of fast steps share a digest, and a digest is published at most every INTERVAL_S. A copy of
the cache's hashes is kept here for snapshots, so that the engine's thread is never asked. Nothing
depends on a digest being received: a gateway that misses one asks for a snapshot (`Sync`).
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from time import monotonic

from forebay_shared import keys
from forebay_shared.blocks import HASH_BYTES
from forebay_shared.bus import Publisher
from forebay_shared.link import PACKET_FIELD, Value, order
from forebay_shared.packets import CACHE
from forebay_shared.wire import CacheEvent, Digest, Snapshot

from forebay_worker.engines.base import CacheLog, CacheTeller, Engine

INTERVAL_S = 0.05
SNAPSHOT_INTERVAL_S = 1.0
"""Gateways that start together share a snapshot."""
MARK_S = 1.0
PART = 8_192
"""Hashes of one message at most: 64 KiB."""


class Digests:
    """The publisher of one worker incarnation. For an engine without a log it does nothing."""

    def __init__(self, worker: str, engine: Engine, publisher: Publisher) -> None:
        self._worker = worker
        self._engine = engine
        self._publisher = publisher
        self._loop = asyncio.get_running_loop()
        self._log: CacheLog | None = engine.cache_log if isinstance(engine, CacheTeller) else None
        self._held: set[bytes] = set()
        self._publish_timer: asyncio.TimerHandle | None = None
        self._snapshot_timer: asyncio.TimerHandle | None = None
        self._published_at = self._snapshot_at = -SNAPSHOT_INTERVAL_S
        self._marks: deque[tuple[float, bytes]] = deque()
        """Entries of this worker's, about one a second: when it was told of each, and its id."""
        self.number = -1 if self._log is None else 0
        """Of the last digest; -1: there are none."""
        if self._log is not None:
            self._log.wake = self._wake

    def sync(self) -> None:
        """A gateway wants a snapshot; what others ask meanwhile is answered by the same one."""
        if self._log is not None and self._snapshot_timer is None:
            delay_s = self._snapshot_at + SNAPSHOT_INTERVAL_S - self._loop.time()
            self._snapshot_timer = self._loop.call_later(max(0.0, delay_s), self._answer)

    def renew(self) -> None:
        """Keeps the stream, which belongs to nobody, for as long as somebody lives."""
        if self._log is not None:
            self._publisher.call("PEXPIRE", keys.digests(), keys.STREAM_TTL_MS)

    def close(self) -> None:
        for timer in (self._publish_timer, self._snapshot_timer):
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        """Called by the engine's thread, up to once per step."""
        if self._publish_timer is None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._schedule)

    def _schedule(self) -> None:
        if self._publish_timer is None:
            delay_s = self._published_at + INTERVAL_S - self._loop.time()
            self._publish_timer = self._loop.call_later(max(0.0, delay_s), self._publish)

    def _publish(self) -> None:
        self._publish_timer = None
        self._published_at = self._loop.time()
        self._send(self._news())

    def _answer(self) -> None:
        self._snapshot_timer = None
        self._snapshot_at = self._loop.time()
        self._send([*self._news(), *self._snapshot()])

    def _news(self) -> list[CacheEvent]:
        """What changed since the last digest, all told, as digests or as a snapshot."""
        assert self._log is not None
        taken = self._log.take()
        changed: dict[bytes, bool] = {}
        afresh = False
        for changes in taken:
            if changes.all:
                self._held.clear()
                changed.clear()
                afresh = True
            changed.update(changes.blocks)
        stored = [key for key, there in changed.items() if there and key not in self._held]
        evicted = [key for key, there in changed.items() if not there and key in self._held]
        self._held.difference_update(evicted)
        self._held.update(stored)
        if afresh:
            self.number += 1
            return self._snapshot()
        if not stored and not evicted:
            return []
        return self._digests(stored, evicted, (monotonic() - taken[0].at) * 1000)

    def _digests(
        self, stored: list[bytes], evicted: list[bytes], waited_ms: float
    ) -> list[CacheEvent]:
        digests: list[CacheEvent] = []
        for at in range(0, max(len(stored), len(evicted)), PART):
            self.number += 1
            digests.append(
                Digest(
                    self._worker,
                    self.number,
                    b"".join(stored[at : at + PART]),
                    b"".join(evicted[at : at + PART]),
                    self._engine.load(),
                    waited_ms,
                )
            )
        return digests

    def _snapshot(self) -> list[CacheEvent]:
        held = b"".join(self._held)
        width = PART * HASH_BYTES
        parts = [held[at : at + width] for at in range(0, len(held), width)] or [b""]
        return [
            Snapshot(self._worker, self.number, at, len(parts), part)
            for at, part in enumerate(parts)
        ]

    def _send(self, events: Sequence[CacheEvent]) -> None:
        """One entry per event; those that fail make a gap, which gateways find."""
        for event in events:
            command = _append(CACHE.encode(self._worker, [event]), self._oldest())
            self._publisher.call(*command).add_done_callback(self._sent)

    def _sent(self, future: asyncio.Future[Value]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        now, entry_id = self._loop.time(), future.result()
        if not isinstance(entry_id, bytes):
            return
        if self._marks and order(entry_id) < order(self._marks[-1][1]):
            self._marks.clear()  # another stream, which begins behind the old one
        if not self._marks or now - self._marks[-1][0] >= MARK_S:
            self._marks.append((now, entry_id))

    def _oldest(self) -> bytes:
        """The entry that is keys.DIGEST_KEEP_S old, or about so: what is before it may go."""
        since = self._loop.time() - keys.DIGEST_KEEP_S
        while len(self._marks) > 1 and self._marks[1][0] <= since:
            self._marks.popleft()
        return self._marks[0][1] if self._marks and self._marks[0][0] <= since else b"0"


def _append(packet: bytes, oldest: bytes) -> Iterable[bytes | str]:
    return ("XADD", keys.digests(), "MINID", "~", oldest, "*", PACKET_FIELD, packet)
