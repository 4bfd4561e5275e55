"""Settles, in its gateway's place, what a metered request has used here: when the gateway is gone.

A gateway settles its own requests. When one dies, what its requests held is in Redis, and what they
used is known here; also of those that ended a moment before, whose gateway may not have come to it.
The script lets only the first settlement through. It knows no team and no price: the hold has them.
What had ended by itself is on the books as completed: its client may have had all of it, or not.
"""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import msgspec
from forebay_shared import keys
from forebay_shared.books import SETTLE, Outcome, decode_hold, record_of, settlement, total
from forebay_shared.bus import Publisher
from forebay_shared.link import Value
from forebay_shared.wire import (
    Delta,
    Done,
    Embedded,
    Failed,
    Reply,
    Started,
    Task,
    TextDelta,
    Usage,
)

log = logging.getLogger(__name__)

KEEP_S = 30.0
"""So long an ended request is remembered: its gateway has settled it by then or was found dead."""
MAX_TALLIES = 65_536


_Key = tuple[str, int]


@dataclass(slots=True)
class _Tally:
    """What one attempt has used so far, and how it ends if nothing else is heard of it."""

    gateway: str
    attempt: int
    open: int
    started: bool = False
    outcome: Outcome = "completed"
    usages: list[Usage] = field(default_factory=list[Usage])


class Metering:
    """The metered requests of one worker."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._tallies: OrderedDict[_Key, _Tally] = OrderedDict()
        self._ended: deque[tuple[float, _Key]] = deque()
        self._gone: set[str] = set()

    def __len__(self) -> int:
        return len(self._tallies)

    def watches(self, gateway: str) -> bool:
        """Something of this gateway's may still have to be settled here."""
        return any(tally.gateway == gateway for tally in self._tallies.values())

    def submitted(self, work: Task) -> None:
        self._gone.discard(work.gateway)
        key = (work.request_id, work.attempt)
        self._tallies[key] = _Tally(work.gateway, work.attempt, work.num_sequences)
        if len(self._tallies) > MAX_TALLIES:
            self._tallies.popitem(last=False)

    def replied(self, reply: Reply) -> None:
        """Takes a reply of the engine, in order. Costs a look-up when nothing is metered."""
        if not self._tallies or isinstance(reply, Delta | TextDelta):
            return
        tally = self._tallies.get((reply.request_id, reply.attempt))
        if tally is None:
            return
        if isinstance(reply, Started):
            tally.started = True
        elif isinstance(reply, Done | Failed | Embedded):
            if not isinstance(reply, Failed):
                tally.started = tally.started or isinstance(reply, Embedded)
                tally.usages.append(reply.usage)
                tally.open -= 1
                if isinstance(reply, Done) and reply.finish_reason == "abort":
                    tally.outcome = "cancelled"
            else:
                tally.open = 0
                tally.outcome = "cancelled" if reply.retryable else "error"
            if tally.open <= 0:
                self._ended.append((time.monotonic(), (reply.request_id, reply.attempt)))
                if tally.gateway in self._gone:
                    self._settle(reply.request_id, tally)

    def gateway_gone(self, gateway: str) -> None:
        """Settles what has ended of this gateway's requests; what still runs, when it ends."""
        self._gone.add(gateway)
        for (request_id, _), tally in list(self._tallies.items()):
            if tally.gateway == gateway and tally.open <= 0:
                self._settle(request_id, tally)

    def forget_old(self) -> None:
        """Drops what ended long ago. Call it about once a second."""
        before = time.monotonic() - KEEP_S
        self._gone &= {tally.gateway for tally in self._tallies.values()} if self._gone else set()
        while self._ended and self._ended[0][0] < before:
            self._tallies.pop(self._ended.popleft()[1], None)

    def _settle(self, request_id: str, tally: _Tally) -> None:
        self._tallies.pop((request_id, tally.attempt), None)
        usage = total(tally.usages) if tally.started else Usage()

        def fetched(future: asyncio.Future[Value]) -> None:
            value = None if future.cancelled() or future.exception() else future.result()
            if not isinstance(value, bytes):
                return  # it was settled
            try:
                hold = decode_hold(value)
            except msgspec.DecodeError:
                log.warning("a hold cannot be read")
                return
            record = record_of(hold, usage, tally.outcome, tally.attempt)
            SETTLE.send(self._publisher, *settlement(hold, record, only_held=True))

        self._publisher.call("HGET", keys.holds(), request_id).add_done_callback(fetched)
