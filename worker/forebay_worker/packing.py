"""What is said to gateways, packed: one entry for each gateway and engine step.

The engine says it from its own thread; the service adds what it says itself, which goes before it.
It knows replies by their gateway, not requests.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

from forebay_shared.merge import merge
from forebay_shared.wire import Accepted, Reply

from forebay_worker.outbox import Outbox

ACCEPT_DELAY_S = 0.005
"""So long an Accepted waits for a first step to travel with: one packet instead of two."""

Addressed = tuple[str, Reply]
"""A gateway, and a reply to it."""


class Packing:
    """One worker's.

    `hear` gets what each step has emitted, in order and before it goes out, and passes on what is
    to go.
    """

    def __init__(
        self, outbox: Outbox, hear: Callable[[Sequence[Addressed]], Iterable[Addressed]]
    ) -> None:
        self._outbox = outbox
        self._hear = hear
        self._loop = asyncio.get_running_loop()
        self._emitted: deque[Sequence[Addressed]] = deque()
        self._collecting = False
        self._own: list[Addressed] = []
        """What the service says itself."""
        self._told: list[tuple[str, Callable[[], None]]] = []
        """Gateways, and what to do when they have all that was said until now."""
        self._accepting: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """All that was said is in the outbox."""
        return not self._emitted and not self._own

    def emit(self, events: Sequence[Addressed]) -> None:
        """Takes one step's events from the engine's thread. Fast steps share a packet."""
        self._emitted.append(events)
        if not self._collecting:
            self._collecting = True
            self._loop.call_soon_threadsafe(self._collect)

    def accept(self, gateway: str, reply: Accepted) -> None:
        """Says it with what comes next, within ACCEPT_DELAY_S."""
        self._own.append((gateway, reply))
        if self._accepting is None:
            self._accepting = self._loop.call_later(ACCEPT_DELAY_S, self._collect)

    def say(self, gateway: str, reply: Reply) -> None:
        """Says what did not come of the engine, and is not heard."""
        self._own.append((gateway, reply))
        self._loop.call_soon(self._collect)

    def fail(self, failures: Sequence[Addressed]) -> None:
        """Says what ends requests in the engine's stead. It goes out with the next packet, never
        from within one that is being made: what was said before would come after it."""
        self._emitted.append(failures)
        self._loop.call_soon(self._collect)

    def after(self, gateway: str, then: Callable[[], None]) -> None:
        """Calls `then` when the gateway has all that was said to it until now."""
        self._told.append((gateway, then))
        self._loop.call_soon(self._collect)

    def _collect(self) -> None:
        """Packs what was said since, by gateway."""
        self._collecting = False
        if self._accepting is not None:
            self._accepting.cancel()
            self._accepting = None
        packets: defaultdict[str, list[Reply]] = defaultdict(list)
        for gateway, reply in self._own:
            packets[gateway].append(reply)
        self._own.clear()
        told, self._told = self._told, []
        steps = 0
        while self._emitted:
            steps += 1
            for gateway, reply in self._hear(self._emitted.popleft()):
                packets[gateway].append(reply)
        for gateway, replies in packets.items():
            self._outbox.send(gateway, merge(replies) if steps > 1 else replies)
        for gateway, then in told:
            self._outbox.after(gateway, then)
