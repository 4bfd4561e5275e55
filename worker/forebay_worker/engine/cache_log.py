"""CacheLog: what entered and left an engine's prefix cache, from its thread to one other thread.

The engine notes changes while it works and flushes them once per step. What nobody takes is
bounded: beyond that it is dropped, and the whole cache is told instead. It knows no Redis and no
block pool.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic

MAX_CHANGES = 262_144
"""Changes that may wait to be taken: 30 MB."""


@dataclass(frozen=True, slots=True)
class Changes:
    """One step's: hash -> stored (True) or evicted. `all`: these are all blocks there are."""

    blocks: dict[bytes, bool]
    all: bool
    at: float
    """Of the monotonic clock, in seconds."""


class CacheLog:
    """`note` and `flush` belong to the engine's thread, `take` to the other one."""

    def __init__(self, *, max_changes: int = MAX_CHANGES) -> None:
        self._max_changes = max_changes
        self._step: dict[bytes, bool] = {}
        self._flushed: deque[Changes] = deque()
        self._put = 0
        self._taken = 0
        self._lost = False
        self.wake: Callable[[], None] = lambda: None
        """Called by the engine's thread when there is something to take."""
        self.everything: Callable[[], Iterable[bytes]] = tuple
        """Gives all blocks in the cache, for when changes were lost."""

    def note(self, block_hash: bytes, stored: bool) -> None:
        """A block was stored or evicted."""
        self._step[block_hash] = stored

    def flush(self) -> None:
        """Hands on what was noted since the last flush."""
        if not self._step:
            return
        changes, self._step = self._step, {}
        room = self._max_changes - (self._put - self._taken)
        if self._lost and room >= self._max_changes // 2:
            self._lost = False
            self._hand(Changes(dict.fromkeys(self.everything(), True), True, monotonic()))
        elif self._lost or len(changes) > room:
            self._lost = True
        else:
            self._hand(Changes(changes, False, monotonic()))

    def take(self) -> list[Changes]:
        """All that was flushed since the last call, in order."""
        taken: list[Changes] = []
        while self._flushed:
            taken.append(self._flushed.popleft())
            self._taken += len(taken[-1].blocks)
        return taken

    def _hand(self, changes: Changes) -> None:
        self._put += len(changes.blocks)
        self._flushed.append(changes)
        self.wake()
