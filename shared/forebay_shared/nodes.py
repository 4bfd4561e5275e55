"""Commands to the nodes of a Redis Cluster: a pipe to each, and where a key is now.

A node that is away, or that has lost a slot, makes it ask the cluster anew; what waited for the old
place goes to the new one, in its order. So a failover costs a pause, and a slot that nobody has
makes its commands fail in their time. It knows nothing of streams.
"""

import asyncio
import contextlib
import logging
from collections import deque

from forebay_shared.link import LINK_ERRORS, Backoff, Command, Link
from forebay_shared.pipe import Call, Pipe
from forebay_shared.places import Cluster

log = logging.getLogger(__name__)

LOOK_S = 1.0
_KEY_AT = {"EVALSHA": 3, "EVAL": 3}
"""Where a command's first key stands; with others it comes first."""


class Nodes:
    """The pipes of one process to all nodes of a cluster."""

    def __init__(self, cluster: Cluster, *, patience_s: float, max_queued: int) -> None:
        self._cluster = cluster
        self._patience_s = patience_s
        self._max_queued = max_queued
        self._pipes: dict[str, Pipe] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._astray: deque[Call] = deque()
        """Calls whose node is not known now."""
        self._astray_since: float | None = None
        self._stale = asyncio.Event()
        self._crash: BaseException | None = None
        self._gone_reconnects = 0

    @property
    def connected(self) -> bool:
        """Every node answers, and every slot has one."""
        return not self._astray and all(pipe.connected for pipe in self._pipes.values())

    @property
    def reconnects(self) -> int:
        return self._gone_reconnects + sum(pipe.reconnects for pipe in self._pipes.values())

    @property
    def queued(self) -> int:
        return len(self._astray) + sum(pipe.queued for pipe in self._pipes.values())

    def put(self, call: Call) -> None:
        """Queues it at its key's node."""
        node = "" if self._astray else self._cluster.owner(_key(call.command))
        if not node or not (pipe := self._pipes.get(node)):
            self._lose(call)
            return
        pipe.put(call)
        if not pipe.connected:
            self._stale.set()

    async def drain(self) -> None:
        await asyncio.gather(*(pipe.drain() for pipe in self._pipes.values()))

    async def run(self) -> None:
        """Keeps the pipes running until it is cancelled; then what is queued fails. Raises what one
        of them crashed on: nothing would be sent to its node any more."""
        backoff = Backoff()
        try:
            while True:
                if self._crash is not None:
                    raise self._crash
                try:
                    self._stale.clear()
                    await self._cluster.refresh()
                    await self._follow()
                    backoff.reset()
                except LINK_ERRORS as error:
                    self._stale.set()
                    log.warning("the cluster's nodes are not known: %s", type(error).__name__)
                self._expire()
                await backoff.wait()
                if not self._astray:
                    self._astray_since = None
                    await self._trouble()
        finally:
            for node in list(self._tasks):
                await self._end(node)
            for call in self._astray:
                call.fail()
            self._astray.clear()

    async def _follow(self) -> None:
        """Makes the pipes those of the nodes, and sends on what waited at a wrong one."""
        waiting = list(self._astray)
        self._astray.clear()
        for node, pipe in list(self._pipes.items()):
            if node not in self._cluster.nodes:
                waiting += pipe.take_back()
                await self._end(node)
            elif not pipe.connected:
                waiting += pipe.take_back()
        for node in self._cluster.nodes - self._pipes.keys():
            pipe = self._pipes[node] = Pipe(
                Link(node),
                patience_s=self._patience_s,
                max_queued=self._max_queued,
                stray=self._lose,
            )
            task = self._tasks[node] = asyncio.create_task(pipe.run(), name="publisher.node")
            task.add_done_callback(self._ended)
        waiting.sort(key=lambda call: call.since)
        for call in waiting:
            self.put(call)

    async def _trouble(self) -> None:
        """Waits until a node is away, or a call is not where it should be."""
        while self.connected and not self._stale.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._stale.wait()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crash = error
            self._stale.set()

    async def _end(self, node: str) -> None:
        task = self._tasks.pop(node)
        task.cancel()
        await asyncio.wait({task})
        pipe = self._pipes.pop(node)
        self._gone_reconnects += pipe.reconnects

    def _lose(self, call: Call) -> None:
        """Keeps a call until the cluster was asked again."""
        self._astray_since = since = self._astray_since or call.since
        if len(self._astray) >= self._max_queued or call.since - since > self._patience_s:
            call.fail()
        else:
            self._astray.append(call)
            self._stale.set()

    def _expire(self) -> None:
        deadline = asyncio.get_running_loop().time() - self._patience_s
        for call in [call for call in self._astray if call.since < deadline]:
            self._astray.remove(call)
            call.fail()


def _key(command: Command) -> str:
    key = command[_KEY_AT.get(str(command[0]), 1)]
    return key.decode() if isinstance(key, bytes) else str(key)
