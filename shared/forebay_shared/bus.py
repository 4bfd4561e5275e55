"""The sending half of the bus: one publisher per process, for one server or for a whole cluster.

Packets go to streams with NOMKSTREAM, so nothing can revive the stream of a dead process: its owner
makes it (`reader.py`). Redis 7.0 commands only. It knows no engine, no request and no HTTP.
"""

import asyncio
import contextlib

from forebay_shared.errors import BusError
from forebay_shared.link import PACKET_FIELD, Argument, Command, Link, Value
from forebay_shared.nodes import Nodes
from forebay_shared.pipe import Call, Pipe, Sink
from forebay_shared.places import cluster_of


class Publisher:
    """Sends commands through one task and one connection to each server; what is queued goes in
    one round trip.

    Every call returns a future at once. Cancelling it, or whoever awaits it, touches neither the
    command nor the connection. While Redis is away a command waits `patience_s`, then its future
    gets a BusError; it may be sent twice when the connection broke in between, so receivers drop
    duplicates. Commands on one key keep their order.
    """

    def __init__(self, url: str, *, patience_s: float = 5.0, max_queued: int = 65_536) -> None:
        cluster = cluster_of(url)
        self._sink: Sink = (
            Pipe(Link(url), patience_s=patience_s, max_queued=max_queued)
            if cluster is None
            else Nodes(cluster, patience_s=patience_s, max_queued=max_queued)
        )

    @property
    def connected(self) -> bool:
        return self._sink.connected

    @property
    def queued(self) -> int:
        """Commands that wait to be sent."""
        return self._sink.queued

    @property
    def reconnects(self) -> int:
        return self._sink.reconnects

    def publish(
        self, stream: str, packet: bytes, maxlen: int, *, vital: bool = False
    ) -> asyncio.Future[Value]:
        """Appends a packet. The future holds the entry's id; None: there is no such stream."""
        bound = ("NOMKSTREAM", "MAXLEN", "~", maxlen)
        return self.call("XADD", stream, *bound, "*", PACKET_FIELD, packet, vital=vital)

    def announce(
        self, stream: str, packet: bytes, maxlen: int, *, vital: bool = False
    ) -> asyncio.Future[Value]:
        """Appends a packet to a stream that nobody owns; makes the stream if need be."""
        bound = ("MAXLEN", "~", maxlen)
        return self.call("XADD", stream, *bound, "*", PACKET_FIELD, packet, vital=vital)

    def call(
        self, *command: Argument, instead: Command | None = None, vital: bool = False
    ) -> asyncio.Future[Value]:
        """Sends any command that has a key. The future raises BusError when Redis is away, full or
        refuses it.

        `instead` is sent when Redis does not know the script that `command` names. What is `vital`
        is written by a Redis that is full: only what must not stop, and does not stay.
        """
        call = Call(command, instead=instead, vital=vital)
        self._sink.put(call)
        return call.future

    async def run(self) -> None:
        """Sends what is queued until it is cancelled; then what is queued fails."""
        await self._sink.run()

    async def drain(self) -> None:
        """Waits until all that was queued before is answered; `run` must be running."""
        with contextlib.suppress(BusError):
            await self._sink.drain()
