"""What the workers say of their prefix caches, kept in step: digests in, an index out.

Each worker numbers its digests, so a gateway knows when it has missed some: it then asks for a
snapshot, as it does when it joins. What comes in waits in a bounded queue and is applied in slices
of SLICE_S by one task, so that a snapshot of a large cache holds nobody up. It knows no request.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from forebay_shared import keys
from forebay_shared.blocks import HASH_BYTES
from forebay_shared.packets import CACHE
from forebay_shared.reader import Feed
from forebay_shared.telemetry import GatewayMetrics
from forebay_shared.wire import CacheEvent, Digest, Snapshot

from forebay_gateway.prefix_index import PrefixIndex
from forebay_gateway.roster import Roster, Worker

log = logging.getLogger(__name__)

SLICE_S = 0.001
BATCH = 256
"""Hashes applied between two looks at the clock."""
MAX_QUEUED_BYTES = 67_108_864
ASK_AGAIN_S = 2.0
BEHIND_S = 2.0
"""A worker's beacon may be ahead of its digests for so long."""
AGE_S = 15.0
"""A placed prompt counts as cached for one to two of these."""


class _Follower:
    """How far one worker's digests have been followed. `number` is None when that is not known."""

    __slots__ = ("asked_at", "behind_since", "next_part", "number", "worker")

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.number: int | None = None
        self.next_part: tuple[int, int] | None = None
        """Of the snapshot that is being taken in: its number, and the part that comes next."""
        self.asked_at: float | None = None
        self.behind_since: float | None = None


class Digests:
    """The followers of all live workers. `ask` sends a worker the wish for a snapshot."""

    def __init__(
        self,
        index: PrefixIndex,
        roster: Roster,
        metrics: GatewayMetrics,
        ask: Callable[[str], None],
    ) -> None:
        self._index = index
        self._roster = roster
        self._metrics = metrics.routing
        self._ask = ask
        self._followers: dict[str, _Follower] = {}
        self._queue: deque[tuple[CacheEvent, float]] = deque()
        self._queued_bytes = 0
        self._ready = asyncio.Event()
        self._aged_at = 0.0
        self._refused = 0
        roster.on_lost(self._lost)

    @property
    def queued_bytes(self) -> int:
        """Of what is not applied yet; 0: the index has all that came."""
        return self._queued_bytes

    def follows(self, worker: str, number: int) -> bool:
        """Whether the index has all that the worker said, up to a digest's number."""
        follower = self._followers.get(worker)
        return follower is not None and follower.number == number

    def feed(self) -> Feed[CacheEvent]:
        """The stream of digests, for a reader of its own: replies must not wait behind it."""
        return Feed(keys.digests(), CACHE, self.receive, owned=False, reset=self._forget_all)

    def receive(self, events: Sequence[CacheEvent]) -> None:
        """Queues the events of one packet."""
        now = asyncio.get_running_loop().time()
        for event in events:
            if event.worker not in self._followers and not self._follow(event.worker):
                continue
            self._queue.append((event, now))
            self._queued_bytes += _size(event)
        if self._queued_bytes > MAX_QUEUED_BYTES:
            log.warning("digests come faster than they are applied; asking anew")
            self._forget_all()
        self._ready.set()

    async def run(self) -> None:
        """Applies what is queued, a slice at a time, until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            if not self._queue:
                self._ready.clear()
                await self._ready.wait()
            until = loop.time() + SLICE_S
            while self._queue:
                first = self._queue[0]
                event, since = first
                for _ in self._apply(event, since):
                    if loop.time() >= until:
                        await asyncio.sleep(0)
                        until = loop.time() + SLICE_S
                if self._queue and self._queue[0] is first:  # else all was forgotten meanwhile
                    self._queue.popleft()
                    self._queued_bytes -= _size(event)
            await asyncio.sleep(0)

    def check(self) -> None:
        """Asks for the snapshots that are missing; tidies the index. Call it a few times a second.

        A worker without a peer is not asked: there is nothing to choose.
        """
        now = asyncio.get_running_loop().time()
        names = self._roster.workers
        for name in names:
            self._follow(name)
        for follower in self._followers.values():
            self._catch_up(follower, now, asks=len(names) > 1)
        if now - self._aged_at > AGE_S:
            self._aged_at = now
            self._index.age()
        self._index.sweep()
        self._metrics.index(self._index.nbytes, len(self._index))
        self._metrics.index_refused.inc(self._index.refused - self._refused)
        self._refused = self._index.refused

    def _follow(self, name: str) -> bool:
        worker = self._roster.get(name)
        if worker is None:
            return False
        known = self._followers.get(name)
        if known is None or known.worker is not worker:
            self._followers[name] = _Follower(worker)
        return True

    def _catch_up(self, follower: _Follower, now: float, *, asks: bool) -> None:
        said = follower.worker.digest
        if said < 0 or (follower.number is not None and follower.number >= said):
            follower.behind_since = None
            return
        if said == 0:
            follower.number = 0
            return
        if follower.number is not None:
            follower.behind_since = follower.behind_since or now
            if now - follower.behind_since < BEHIND_S:
                return
            self._lose_track(follower)
        if asks and (follower.asked_at is None or now - follower.asked_at > ASK_AGAIN_S):
            follower.asked_at = now
            self._metrics.digest_snapshots.inc()
            self._ask(follower.worker.name)

    def _apply(self, event: CacheEvent, since: float) -> Iterator[None]:
        """Applies one event; yields now and then, where others may run."""
        follower = self._followers.get(event.worker)
        if follower is None:
            return
        if isinstance(event, Snapshot):
            yield from self._take_part(follower, event)
            return
        now = asyncio.get_running_loop().time()
        if event.load is not None:
            follower.worker.report(event.load, now)
        if follower.number is None and event.number == 1:
            follower.number = 0
        if follower.number is None or event.number <= follower.number:
            return
        if event.number != follower.number + 1:
            self._lose_track(follower)
            return
        follower.number = event.number
        number = follower.worker.number
        for hashes in _batches(event.evicted):
            self._index.evict(number, hashes)
            yield
            if self._followers.get(event.worker) is not follower:
                return
        for hashes in _batches(event.stored):
            self._index.store(number, hashes)
            yield
            if self._followers.get(event.worker) is not follower:
                return
        self._metrics.digest_lag.observe(event.waited_ms / 1000 + now - since)

    def _take_part(self, follower: _Follower, part: Snapshot) -> Iterator[None]:
        if follower.number is not None and part.number <= follower.number:
            return
        if part.part == 0:
            follower.number = None
            self._index.remove(follower.worker.number)
        elif follower.next_part != (part.number, part.part):
            return
        follower.next_part = (part.number, part.part + 1)
        for hashes in _batches(part.hashes):
            self._index.store(follower.worker.number, hashes)
            yield
            if self._followers.get(part.worker) is not follower:
                return
        if part.part + 1 == part.parts:
            follower.number = part.number
            follower.next_part = follower.asked_at = follower.behind_since = None

    def _lose_track(self, follower: _Follower) -> None:
        """Its blocks stay, as good a hint as any, until a snapshot takes their place."""
        self._metrics.digest_gaps.inc()
        follower.number = follower.next_part = follower.asked_at = follower.behind_since = None

    def _forget_all(self) -> None:
        self._queue.clear()
        self._queued_bytes = 0
        for follower in self._followers.values():
            if follower.number is not None:
                self._lose_track(follower)

    def _lost(self, name: str) -> None:
        if (follower := self._followers.pop(name, None)) is not None:
            self._index.remove(follower.worker.number)


def _size(event: CacheEvent) -> int:
    if isinstance(event, Digest):
        return 200 + len(event.stored) + len(event.evicted)
    return 200 + len(event.hashes)


def _batches(packed: bytes) -> Iterator[list[int]]:
    """Hashes of 8 bytes, as whole numbers, some at a time; a broken last one is left out."""
    width = BATCH * HASH_BYTES
    for start in range(0, len(packed), width):
        part = packed[start : start + width]
        yield [
            int.from_bytes(part[at : at + HASH_BYTES], "little")
            for at in range(0, len(part) - HASH_BYTES + 1, HASH_BYTES)
        ]
