"""Clears away what dead incarnations left in Redis. Every gateway has one; a lease lets one work.

Streams and cards would go by themselves in two hours; names in the sets that the living renew
would stay for ever. A process that comes back after this finds its stream gone, and begins anew.
It knows no request and no worker's state.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from forebay_shared import keys
from forebay_shared.bus import Publisher
from forebay_shared.errors import BusError
from forebay_shared.scripts import Script
from forebay_shared.telemetry import GatewayMetrics

TICK_S = 1.0
LEASE_MS = 4_000
GRACE_S = 5.0
"""So long a lease must be gone: a process that was stalled, or Redis itself, comes back sooner."""
SCAN_COUNT = 256
MAX_SUSPECTS = 4_096
CLEAR = Script("clear")


class Janitor:
    """One gateway's. Its time is its own, and counts only while Redis answers."""

    def __init__(self, publisher: Publisher, gateway: str, metrics: GatewayMetrics) -> None:
        self._publisher = publisher
        self._gateway = gateway
        self._metrics = metrics.fleet
        self._rounds = (
            _Round("HSCAN", keys.members(), "HDEL", keys.worker_lease, _of_worker),
            _Round("SSCAN", keys.gateways(), "SREM", keys.gateway_lease, _of_gateway),
        )

    async def run(self) -> None:
        """Works whenever the lease is free, for ever."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                if await self._leads():
                    for part in self._rounds:
                        await self._look(part)
                    continue
            except BusError:
                pass
            for part in self._rounds:
                part.missing.clear()

    async def _leads(self) -> bool:
        lease, me, call = keys.janitor_lease(), self._gateway.encode(), self._publisher.call
        call("SET", lease, me, "NX", "PX", LEASE_MS)
        life = call("PTTL", lease)
        if await call("GET", lease) != me:
            if cast(int, await life) > LEASE_MS:  # of before the clock of Redis was put back
                call("SET", lease, me, "PX", LEASE_MS)
            return False
        call("PEXPIRE", lease, LEASE_MS)
        return True

    async def _look(self, part: "_Round") -> None:
        """Takes the next names of a set, and clears those that were dead for long enough."""
        call = self._publisher.call
        scanned = await call(part.scan, part.key, part.cursor, "COUNT", SCAN_COUNT)
        part.cursor, found = cast("tuple[bytes, list[bytes]]", scanned)
        names = [name.decode() for name in found[:: 2 if part.scan == "HSCAN" else 1]]
        lives = await asyncio.gather(*(call("PTTL", part.lease(name)) for name in names))
        now = asyncio.get_running_loop().time()
        for name, life_ms in zip(names, lives, strict=True):
            if keys.is_alive(life_ms):
                part.missing.pop(name, None)
            elif len(part.missing) < MAX_SUSPECTS:
                since = part.missing.setdefault(name, now)
                if now - since >= GRACE_S:
                    await self._clear(part, name)

    async def _clear(self, part: "_Round", name: str) -> None:
        del part.missing[name]
        of_it = [part.lease(name), *part.rest(name)]
        if await CLEAR.send(self._publisher, of_it, [keys.LEASE_MOST_MS]):
            self._publisher.call("DEL", keys.metrics(name))
            await self._publisher.call(part.remove, part.key, name)
            self._metrics.strays_cleared.inc()


class _Round:
    """One set of names: how to read it, and what else a name stands for."""

    def __init__(
        self,
        scan: str,
        key: str,
        remove: str,
        lease: Callable[[str], str],
        rest: Callable[[str], list[str]],
    ) -> None:
        self.scan = scan
        self.key = key
        self.remove = remove
        self.lease = lease
        self.rest = rest
        self.cursor = b"0"
        self.missing: dict[str, float] = {}
        """Since when a name has had no lease, as far as seen."""


def _of_worker(name: str) -> list[str]:
    return [keys.work(name), keys.worker_card(name)]


def _of_gateway(name: str) -> list[str]:
    return [keys.reply(name)]
