"""What goes to each gateway, in order, and whether there is still somebody who reads it.

A lane for each keeps what cannot be sent while Redis is away, up to a bound. A gateway is gone when
its lease has been missing for as long as a lease lasts. It knows replies, not requests.
"""

import asyncio
import math
from collections.abc import Callable, Sequence

from forebay_shared import keys
from forebay_shared.bus import Publisher
from forebay_shared.errors import BusError
from forebay_shared.lane import Lane
from forebay_shared.link import Value
from forebay_shared.merge import merge
from forebay_shared.packets import REPLY
from forebay_shared.wire import Reply

LANE_LIMIT = 65_536
"""Replies kept for one gateway while Redis is away; beyond it, its requests are aborted."""
GONE_S = keys.LEASE_MS / 1000


class Outbox:
    """One worker's.

    `overflowed` is told a gateway for which too much waited, which was dropped; `lost` one that is
    gone, of which nothing is kept any more.
    """

    def __init__(
        self,
        worker: str,
        publisher: Publisher,
        overflowed: Callable[[str], None],
        lost: Callable[[str], None],
    ) -> None:
        self._worker = worker
        self._publisher = publisher
        self._overflowed = overflowed
        self._lost = lost
        self._lanes: dict[str, Lane[Reply]] = {}
        self._missing_since: dict[str, float] = {}
        """Since when, by the loop's clock, a gateway has had no lease."""

    def __len__(self) -> int:
        """Replies that are not delivered yet."""
        return sum(map(len, self._lanes.values()))

    @property
    def idle(self) -> bool:
        """All has been delivered."""
        return all(lane.idle for lane in self._lanes.values())

    def send(self, gateway: str, replies: Sequence[Reply]) -> None:
        self._lane(gateway).send(replies)

    def after(self, gateway: str, then: Callable[[], None]) -> None:
        """Calls `then` once the gateway has all that was sent until now; never, if it is lost."""
        self._lane(gateway).after(then)

    def look(self, is_needed: Callable[[str], bool]) -> None:
        """Asks for the lease of each gateway that is needed, or has not got everything yet; forgets
        the others. To be called about once a second."""
        for gateway, lane in list(self._lanes.items()):
            if is_needed(gateway) or not lane.idle:
                self._check_lease(gateway)
            else:
                self._forget(gateway)

    def _check_lease(self, gateway: str) -> None:
        def answered(future: asyncio.Future[Value]) -> None:
            if gateway not in self._lanes:
                return  # it was forgotten meanwhile
            if future.cancelled() or future.exception() or keys.is_alive(future.result()):
                self._missing_since.pop(gateway, None)
                return
            now = asyncio.get_running_loop().time()
            if now - self._missing_since.setdefault(gateway, now) > GONE_S:
                self._forget(gateway)
                self._lost(gateway)

        self._publisher.call("PTTL", keys.gateway_lease(gateway)).add_done_callback(answered)

    def _forget(self, gateway: str) -> None:
        self._missing_since.pop(gateway, None)
        if (lane := self._lanes.pop(gateway, None)) is not None:
            lane.close()

    def _lane(self, gateway: str) -> Lane[Reply]:
        lane = self._lanes.get(gateway)
        if lane is None:

            def undelivered(_: list[Reply], __: BusError | None) -> None:
                self._overflowed(gateway)

            lane = self._lanes[gateway] = Lane(
                self._publisher,
                keys.reply(gateway),
                REPLY,
                sender=self._worker,
                maxlen=keys.REPLY_MAXLEN,
                limit=LANE_LIMIT,
                patience_s=math.inf,
                undelivered=undelivered,
                compact=merge,
                vital=lambda _: True,  # what runs goes on although Redis is full: it is read soon
            )
        return lane
