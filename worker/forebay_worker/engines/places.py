"""A bounded number of places, given to those who wait in the order of an engine's scheduler: by
priority, then to the team that has been served least for its weight, then by arrival.

All of it belongs to one event loop.
"""

import asyncio
import itertools
from dataclasses import dataclass

from forebay_worker.engine.waiting import WaitingQueue


@dataclass(slots=True, eq=False)
class Ticket:
    """One who wants a place; a `Waiter`. `queued_tokens` are those of its prompt, as far as known.

    The rest belongs to its Places.
    """

    team: str = ""
    weight: float = 1.0
    priority: int = 0
    queued_tokens: int = 0
    serial: int = 0
    num_served: int = 0
    given: asyncio.Future[None] | None = None


class Places:
    """`take` waits for one of `number` places, `give_back` passes it on."""

    def __init__(self, number: int) -> None:
        self._free = number
        self._queue = WaitingQueue[Ticket]()
        self._numbers = itertools.count()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def waits(self, team: str) -> bool:
        """Whether one of this team waits."""
        return self._queue.waits(team)

    async def take(self, ticket: Ticket) -> None:
        """A ticket is for one place. A cancelled wait takes none."""
        ticket.serial = next(self._numbers)
        ticket.given = asyncio.get_running_loop().create_future()
        self._queue.enter(ticket)
        if self._free > 0:
            self._free -= 1
            self._give(ticket)
        try:
            await ticket.given
        except asyncio.CancelledError:
            if ticket.given.cancelled():
                self._queue.leave(ticket)
            else:
                self.give_back(ticket)  # it was given at the same moment
            raise

    def give_back(self, ticket: Ticket, tokens: int = 0) -> None:
        """`tokens` were made for it."""
        self._queue.charge(ticket, ticket.queued_tokens + tokens)
        self._queue.leave(ticket)
        self._free += 1
        while self._free and (following := self._queue.head()) is not None:
            if self._give(following):
                self._free -= 1

    def _give(self, ticket: Ticket) -> bool:
        """False when its wait has been cancelled just now."""
        self._queue.pop(ticket)
        if ticket.given is None or ticket.given.done():
            return False
        self._queue.charge(ticket, ticket.queued_tokens)
        ticket.given.set_result(None)
        return True
