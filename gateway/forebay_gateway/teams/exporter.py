"""Carries usage records from their stream to a sink, for finance to have them.

Every gateway that was told of a target has a task for it; a lease lets one at a time work. The
cursor in Redis moves when the sink has the records, so a crash makes it write some again, which the
sink leaves out; and the stream is not trimmed behind it. It knows no file and no database.
"""

import asyncio
import logging
from collections.abc import Sequence
from hashlib import blake2b
from typing import cast

from forebay_shared import keys
from forebay_shared.link import LINK_ERRORS, Backoff, Link

from forebay_gateway.teams.sinks import Sink, SinkError
from forebay_gateway.teams.stream import ask, entry_ms, lead, now_ms, read_records

log = logging.getLogger(__name__)

TICK_S = 1.0
LEASE_MS = 6_000
BATCH = 500
AGAIN_S = 5.0
"""So long a sink that failed is left alone."""
KEEP_S = 7 * 86_400
"""A target that no gateway has named for so long holds nothing back any more."""


class Exporter:
    """One target of one gateway. `exported` counts the records that it has written.

    `lag_s`: how far the sink is behind the stream, as this gateway last saw it.
    """

    def __init__(self, url: str, gateway: str, target: str, sink: Sink) -> None:
        self._link = Link(url, keys.records())
        self._gateway = gateway
        self._sink = sink
        # A URL may hold a password: what is in Redis is its hash.
        self._target = blake2b(target.encode(), digest_size=8).hexdigest()
        self._failing = False
        self.exported = 0
        self.failures = 0
        self.lag_s = 0.0

    async def run(self) -> None:
        """Works whenever the lease is free, for ever."""
        backoff = Backoff()
        try:
            while True:
                try:
                    pause_s = await self._tick()
                    backoff.reset()
                    await asyncio.sleep(pause_s)
                except LINK_ERRORS as error:
                    log.warning("the export lost redis: %s", type(error).__name__)
                    await backoff.wait()
        finally:
            await self._link.close()

    async def _tick(self) -> float:
        """Says that the target is wanted, and carries over what is there; seconds to wait."""
        cursor, now_s = await self._seen()
        lease = keys.exporter_lease(self._target)
        if not await lead(self._link, lease, self._gateway, LEASE_MS):
            return TICK_S
        while entries := await read_records(self._link, cursor, BATCH):
            self.lag_s = max(0.0, now_s - entry_ms(entries[0][0]) / 1000)
            readable = [(entry, record) for entry, record in entries if record is not None]
            try:
                await asyncio.to_thread(self._sink.write, readable)
            except Exception as error:  # whatever a file system or a driver raises
                self._failed(error)
                await ask(self._link, [("DEL", lease)])  # another gateway's disk may do better
                return AGAIN_S
            cursor = entries[-1][0]
            await self._move(cursor, now_s)
            self.exported += len(readable)
            self._failing = False
            if len(entries) < BATCH:
                break
        self.lag_s = 0.0
        return TICK_S

    async def _seen(self) -> tuple[str, int]:
        """The target's cursor, kept alive, and the time of Redis in seconds."""
        [known] = await ask(self._link, [("HGET", keys.exports(), self._target)])
        cursor = cast(bytes, known or b"0-0").decode().partition(" ")[0]
        now_s = await now_ms(self._link) // 1000
        await self._move(cursor, now_s)
        return cursor, now_s

    async def _move(self, cursor: str, now_s: int) -> None:
        value = f"{cursor} {now_s}"
        await ask(self._link, [("HSET", keys.exports(), self._target, value)])

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if not self._failing:
            self._failing = True
            # Whatever else is said may quote a URL with its password, or a record.
            why = str(error) if isinstance(error, SinkError) else type(error).__name__
            log.warning("usage cannot be exported: %s", why)


def oldest_wanted(pairs: Sequence[bytes], now_s: int) -> int | None:
    """Milliseconds of the record up to which every target has all, of the hash `exports`; None
    when no target is wanted.
    """
    cursors = [value.decode().partition(" ") for value in pairs[1::2]]
    wanted = [cursor for cursor, _, seen in cursors if int(seen) > now_s - KEEP_S]
    return min(map(entry_ms, wanted), default=None)
