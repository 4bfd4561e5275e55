"""Streams of one server, read through one task and one connection.

A stream has one owner, which is its only reader: the work stream of a worker, the reply stream of a
gateway. So there are no consumer groups: a group shares one stream among readers and keeps a
pending list for redelivery, while here the reader's position lives and dies with its process, and
the one who asked (the gateway) asks again when an answer is missing. The roster's stream is read by
everybody, each from its own position.

The owner creates its stream, renews its TTL and trims what it has read. Redis 7.0 commands only. It
knows no engine, no request and no HTTP.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from redis.exceptions import ResponseError

from forebay_shared import keys
from forebay_shared.link import (
    LINK_ERRORS,
    PACKET_FIELD,
    ROUND_TRIP_S,
    Answer,
    Backoff,
    Command,
    Link,
    Value,
    field,
    order,
)
from forebay_shared.packets import Codec, Unread

log = logging.getLogger(__name__)

BLOCK_MS = 250
READ_COUNT = 256
TRIM_EVERY = 512
"""Entries read between two upkeeps, at most."""
GAP_S = 1.0
"""Redis answers at least every BLOCK_MS; a longer silence than this is an outage, or a stall of our
own. A shorter one costs nobody a lease, which outlasts the second between two beacons by 1.5 s."""

_RUN_ID = re.compile(rb"run_id:(\w+)")

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Feed(Generic[M]):
    """A stream to read. `handle` gets the messages of one packet, in order, and must not block.

    The owner of a stream (`owned`) creates, renews and trims it, and reads from its beginning;
    others begin with what is added after they joined. `reset` is called when the stream was found
    gone or rolled back, so that messages may have been lost; reading goes on from its new
    beginning. `restarted` is called when the server is not the one it was: a crash or a failover
    may have lost the last entries, even though the stream goes on. `unread` is told once of each
    message that could not be read.
    """

    key: str
    codec: Codec[M]
    handle: Callable[[list[M]], None]
    owned: bool
    reset: Callable[[], None]
    unread: Callable[[Unread], None] = lambda _: None
    restarted: Callable[[], None] = lambda: None


class Strand:
    """What one connection reads. After a failure it connects again with back-off and resumes after
    the last entry it has read. `heard_at`, `steady_since` and `round_trip_s` are those of `Reader`.
    """

    def __init__(self, url: str, feeds: Sequence[Feed[Any]]) -> None:
        self.link = Link(url, feeds[0].key)
        self._cursors = [_Cursor(feed) for feed in feeds]
        self._upkeep_at = 0.0
        self._server_life: bytes | None = None
        self.round_trip_s = 0.0
        self.heard_at = 0.0
        self.steady_since: float | None = None
        self.reconnects = 0
        self.bad_messages = 0

    async def run(self) -> None:
        """Reads until it is cancelled."""
        backoff = Backoff()
        try:
            while True:
                try:
                    await self._serve(backoff)
                except LINK_ERRORS as error:
                    self._lost(error)
                    await backoff.wait()
        finally:
            self.steady_since = None
            await self.link.close()

    async def _serve(self, backoff: Backoff) -> None:
        """One life of the connection."""
        await self._recognise()
        await self._upkeep()
        backoff.reset()
        loop = asyncio.get_running_loop()
        while True:
            await self._read()
            if loop.time() >= self._upkeep_at or any(
                c.untrimmed > TRIM_EVERY for c in self._cursors
            ):
                await self._upkeep()

    async def _recognise(self) -> None:
        """Tells the feeds when this is not the server, or not the life of it, that was read from
        before. One that hides it counts as another each time."""
        [info] = await self.link.run([("INFO", "server")], ROUND_TRIP_S)
        found = _RUN_ID.search(info) if isinstance(info, bytes) else None
        life = found[1] if found else b""
        before, self._server_life = self._server_life, life
        if before is not None and (not life or life != before):
            log.warning("this redis is another one, or was restarted: what it lost is asked again")
            for cursor in self._cursors:
                cursor.feed.restarted()

    async def _read(self) -> None:
        names = [cursor.feed.key for cursor in self._cursors]
        lasts = [cursor.last for cursor in self._cursors]
        command = ("XREAD", "COUNT", READ_COUNT, "BLOCK", BLOCK_MS, "STREAMS", *names, *lasts)
        answer = await self._ask([command], ROUND_TRIP_S + BLOCK_MS / 1000)
        for name, entries in cast(list[list[Any]], _raised(answer[0]) or []):
            cursor = next(c for c in self._cursors if c.name == name)
            for entry_id, fields in entries:
                self._deliver(cursor, entry_id, fields)

    def _deliver(self, cursor: "_Cursor", entry_id: bytes, fields: list[Any] | None) -> None:
        # The position moves first: an entry that fails is dropped, never read again.
        cursor.last = entry_id
        cursor.untrimmed += 1
        data = field(fields or [], PACKET_FIELD)
        messages, bad = cursor.feed.codec.decode(data) if isinstance(data, bytes) else ([], 1)
        try:
            if bad:
                self._bury(cursor, data)
            cursor.feed.handle(messages)
        except Exception:
            self.bad_messages += len(messages)
            log.exception("dropped a packet that its handler failed on")

    def _bury(self, cursor: "_Cursor", data: Value) -> None:
        """Counts, names and drops what cannot be read: it is never looked at again."""
        codec = cursor.feed.codec
        unread = codec.unread(data) if isinstance(data, bytes) else [Unread()]
        self.bad_messages += len(unread)
        for one in unread:
            log.warning("dropped an unreadable message of request %r", one.request_id)
            cursor.feed.unread(one)

    async def _upkeep(self) -> None:
        """Renews and trims the owned streams, and looks whether any stream went back in time."""
        commands: list[Command] = []
        for cursor in self._cursors:
            commands.append(("XINFO", "STREAM", cursor.feed.key))
            if cursor.feed.owned:
                commands.append(("PEXPIRE", cursor.feed.key, keys.STREAM_TTL_MS))
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        answers = iter(await self._ask(commands, ROUND_TRIP_S))
        self.round_trip_s = loop.time() - asked_at
        for cursor in self._cursors:
            newest = _newest(next(answers))
            if cursor.feed.owned:
                _raised(next(answers))
            await self._settle(cursor, newest)
        await self._trim()
        self._upkeep_at = loop.time() + keys.RENEW_S

    async def _trim(self) -> None:
        """Removes what was read. After the positions are settled: they say what was read."""
        commands: list[Command] = [
            ("XTRIM", cursor.feed.key, "MINID", _after(cursor.last))
            for cursor in self._cursors
            if cursor.feed.owned and cursor.untrimmed
        ]
        if commands:
            for answer in await self._ask(commands, ROUND_TRIP_S):
                _raised(answer)
        for cursor in self._cursors:
            cursor.untrimmed = 0

    async def _settle(self, cursor: "_Cursor", newest: bytes | None) -> None:
        """Brings the position in line with the stream, whose newest id (ever) is `newest`."""
        lost = cursor.known and (newest is None or order(newest) < order(cursor.last))
        if lost:
            cursor.last = b"0-0"
            cursor.untrimmed = 0
        elif not cursor.known and newest is not None and not cursor.feed.owned:
            cursor.last = newest
        if newest is None and cursor.feed.owned:
            cursor.last = await self._create(cursor.feed.key)
        cursor.known = cursor.known or newest is not None or cursor.feed.owned
        if lost:
            log.warning("a stream was lost; reading it from its beginning")
            cursor.feed.reset()

    async def _create(self, key: str) -> bytes:
        """Makes an empty stream. An entry that is trimmed at once leaves its id as the newest."""
        answers = await self._ask(
            [
                ("MULTI",),
                ("XADD", key, "MAXLEN", 0, "*", PACKET_FIELD, b""),
                ("PEXPIRE", key, keys.STREAM_TTL_MS),
                ("EXEC",),
            ],
            ROUND_TRIP_S,
        )
        results = cast(list[Any], _raised(answers[3]))
        return cast(bytes, _raised(results[0]))

    async def _ask(self, commands: list[Command], timeout_s: float) -> list[Answer]:
        answers = await self.link.run(commands, timeout_s)
        now = asyncio.get_running_loop().time()
        # A gap (a stalled Redis, or a stall of our own) makes everybody look silent: start afresh.
        if self.steady_since is None or now - self.heard_at > GAP_S:
            self.steady_since = now
        self.heard_at = now
        return answers

    def _lost(self, error: BaseException) -> None:
        if self.steady_since is not None:
            self.steady_since = None
            self.reconnects += 1
            log.warning("reader lost redis: %s", type(error).__name__)


class _Cursor:
    """A feed and the position in it."""

    __slots__ = ("feed", "known", "last", "name", "untrimmed")

    def __init__(self, feed: Feed[Any]) -> None:
        self.feed = feed
        self.name = feed.key.encode()
        self.last = b"0-0"
        self.known = False
        self.untrimmed = 0


def _raised(answer: Answer) -> Value:
    if isinstance(answer, ResponseError):
        raise answer
    return answer


def _newest(answer: Answer) -> bytes | None:
    """The last-generated-id of an XINFO STREAM; None when there is no such stream."""
    if isinstance(answer, ResponseError):
        if "no such key" in str(answer).lower():
            return None
        raise answer
    return cast(bytes, field(cast(list[Any], answer), b"last-generated-id"))


def _after(entry_id: bytes) -> str:
    milliseconds, sequence = order(entry_id)
    return f"{milliseconds}-{sequence + 1}"
