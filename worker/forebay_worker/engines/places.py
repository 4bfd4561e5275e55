"""A bounded number of places, given to those who wait by priority, then by arrival.

All of it belongs to one event loop.
"""

import asyncio
import itertools
from heapq import heapify, heappop, heappush


class Places:
    """`take` waits for one of `number` places, `give_back` passes it on."""

    def __init__(self, number: int) -> None:
        self._free = number
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def take(self, priority: int = 0) -> None:
        """Lower runs earlier. A cancelled wait takes no place."""
        if self._free > 0:
            self._free -= 1
            return
        future = asyncio.get_running_loop().create_future()
        heappush(self._queue, (priority, next(self._numbers), future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give_back()  # it was given at the same moment
            else:
                self._queue = [each for each in self._queue if each[2] is not future]
                heapify(self._queue)
            raise

    def give_back(self) -> None:
        while self._queue:
            _, _, future = heappop(self._queue)
            if not future.done():
                future.set_result(None)
                return
        self._free += 1
