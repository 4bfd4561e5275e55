"""The receiving half of the bus: one reader per process, several streams.

Streams of one server share a connection. In a cluster each hash slot has its own, since no command
may ask for keys of two. It knows no engine, no request and no HTTP.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from forebay_shared.places import by_slot, cluster_of
from forebay_shared.strand import Feed, Strand

__all__ = ["Feed", "Reader"]


class Reader:
    """Reads several streams through one task per connection, for ever.

    Attributes for others to watch, in the loop's seconds: `heard_at`, when Redis last answered, and
    `steady_since`, since when it has answered without a gap (None: it is away). In a cluster they
    are those of the slowest, so that nobody is taken for silent whose stream could not be read.
    """

    def __init__(self, url: str, feeds: Sequence[Feed[Any]]) -> None:
        named = {feed.key: feed for feed in feeds}
        groups = [list(named)] if cluster_of(url) is None else by_slot(named)
        self.strands = [Strand(url, [named[key] for key in group]) for group in groups]

    @property
    def heard_at(self) -> float:
        return min(strand.heard_at for strand in self.strands)

    @property
    def steady_since(self) -> float | None:
        latest = 0.0
        for strand in self.strands:
            if strand.steady_since is None:
                return None
            latest = max(latest, strand.steady_since)
        return latest

    @property
    def round_trip_s(self) -> float:
        """How long Redis took for its last answer that waited for nothing, about a second ago."""
        return max(strand.round_trip_s for strand in self.strands)

    @property
    def reconnects(self) -> int:
        return sum(strand.reconnects for strand in self.strands)

    @property
    def bad_messages(self) -> int:
        return sum(strand.bad_messages for strand in self.strands)

    @property
    def connected(self) -> bool:
        return self.steady_since is not None

    async def run(self) -> None:
        """Reads until it is cancelled."""
        if len(self.strands) == 1:
            await self.strands[0].run()
            return
        async with asyncio.TaskGroup() as tasks:
            for strand in self.strands:
                tasks.create_task(strand.run(), name="reader.strand")
