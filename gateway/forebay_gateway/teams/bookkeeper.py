"""Folds records into the books, ends what nobody settled, and reads the books for reports.

Every gateway has one; a lease lets one at a time work. The lease saves work and no more: the cursor
moves with the sums in one atomic step, so two at once still count every record once.
"""

import asyncio
import logging
from collections.abc import Sequence
from struct import Struct
from typing import cast

import msgspec
from forebay_shared import keys
from forebay_shared.books import (
    SETTLE,
    UsageRecord,
    decode_hold,
    decode_record,
    record_of,
    settlement,
)
from forebay_shared.link import LINK_ERRORS, PACKET_FIELD, Answer, Argument, Backoff, Command, Link
from forebay_shared.link import field as field_of
from forebay_shared.scripts import Script
from forebay_shared.wire import Usage
from redis.exceptions import NoScriptError, ResponseError

from forebay_gateway.teams import books

log = logging.getLogger(__name__)

TICK_S = 0.5
SWEEP_S = 5.0
TRIM_S = 60.0
LEASE_MS = 5_000
BATCH = 500
TRIP_S = 10.0
GRACE_MS = 60_000
"""A request is given up this long after its lease: its worker may still settle it."""
KEEP_MS = 7 * 86_400_000
"""Records stay so long for export, once they are in the books."""

_FORGET_AT = Struct("<d")

Entry = tuple[str, UsageRecord]


class Bookkeeper:
    """One gateway's. `folded` counts the records that it has put into the books."""

    def __init__(self, url: str, gateway: str) -> None:
        self._url = url
        self._link = Link(url)
        self._gateway = gateway
        self._fold = Script("fold")
        self._forget_script = Script("forget")
        self._sweep_at = self._trim_at = 0.0
        self.folded = 0
        self.lost = 0

    async def run(self) -> None:
        """Works whenever the lease is free, for ever."""
        backoff = Backoff()
        try:
            while True:
                try:
                    if await self._leads():
                        await self._work()
                    backoff.reset()
                    await asyncio.sleep(TICK_S)
                except LINK_ERRORS as error:
                    log.warning("the books lost redis: %s", type(error).__name__)
                    await backoff.wait()
        finally:
            await self._link.close()

    async def report(self, query: books.Query) -> list[dict[str, str | int]]:
        """Rows of the books. Raises InvalidRequestError, or one of LINK_ERRORS."""
        query.check()
        link = Link(self._url)  # its answers are long: nobody else waits behind them
        try:
            answers = await _ask(link, [("HGETALL", book) for book in query.books()])
        finally:
            await link.close()
        return books.report(query, [_book(cast("list[bytes]", answer)) for answer in answers])

    async def records(self, after: str, count: int) -> list[Entry]:
        """Records behind an entry of their stream, oldest first, each with its entry's id."""
        link = Link(self._url)
        try:
            command = ("XRANGE", keys.records(), f"({after}" if after else "-", "+", "COUNT", count)
            [answer] = await _ask(link, [command])
        finally:
            await link.close()
        return _entries(answer)

    async def audit(self, after: str, count: int) -> list[dict[str, object]]:
        """Lines of the audit log behind an entry, oldest first."""
        link = Link(self._url)
        try:
            command = ("XRANGE", keys.audit(), f"({after}" if after else "-", "+", "COUNT", count)
            [answer] = await _ask(link, [command])
        finally:
            await link.close()
        return [
            {
                "entry": entry_id.decode(),
                "at": int(entry_id.partition(b"-")[0]) / 1000,
                "who": cast(bytes, field_of(fields, b"who")).decode(),
                "what": msgspec.json.decode(cast(bytes, field_of(fields, b"what"))),
            }
            for entry_id, fields in cast("list[tuple[bytes, list[bytes]]]", answer or [])
        ]

    async def _leads(self) -> bool:
        me = self._gateway.encode()
        [_, holder] = await _ask(
            self._link,
            [
                ("SET", keys.ledger_lease(), me, "NX", "PX", LEASE_MS),
                ("GET", keys.ledger_lease()),
            ],
        )
        if holder != me:
            return False
        await _ask(self._link, [("PEXPIRE", keys.ledger_lease(), LEASE_MS)])
        return True

    async def _work(self) -> None:
        while await self._fold_batch():
            pass
        now = asyncio.get_running_loop().time()
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_S
            await self._sweep()
        if now >= self._trim_at:
            self._trim_at = now + TRIM_S
            await self._trim()
            await self._forget()

    async def _fold_batch(self) -> bool:
        """Puts the next records into the books; True when there may be more."""
        [cursor] = await _ask(self._link, [("GET", keys.ledger_cursor())])
        at = cast(bytes, cursor or b"0-0").decode()
        [answer] = await _ask(
            self._link, [("XRANGE", keys.records(), f"({at}", "+", "COUNT", BATCH)]
        )
        raw = cast("list[list[bytes]]", answer or [])
        if not raw:
            return False
        records = [record for _, record in _entries(answer)]
        names, arguments = [keys.ledger_cursor()], [at, raw[-1][0], len(books.FIGURES)]
        for cell, figures in books.fold(records).items():
            names.append(cell.book)
            arguments += [cell.name, cell.life_s, *figures]
        done = await self._run(self._fold, names, arguments)
        self.folded += len(records) if done == 1 else 0
        return len(raw) == BATCH

    async def _sweep(self) -> None:
        """Settles requests whose gateway and worker are both gone: their prompt is charged."""
        [time] = await _ask(self._link, [("TIME",)])
        now_ms = int(cast("list[bytes]", time)[0]) * 1000
        late = ("ZRANGEBYSCORE", keys.open_requests(), "-inf", now_ms - GRACE_MS, "LIMIT", 0, BATCH)
        [answer] = await _ask(self._link, [late])
        ids = cast("list[bytes]", answer)
        if not ids:
            return
        [values] = await _ask(self._link, [("HMGET", keys.holds(), *ids)])
        for request_id, value in zip(ids, cast("list[bytes | None]", values), strict=True):
            await self._give_up(request_id, value)

    async def _give_up(self, request_id: bytes, value: bytes | None) -> None:
        try:
            hold = decode_hold(value or b"")
        except msgspec.DecodeError:
            log.warning("a hold cannot be read: it is dropped")
            await _ask(self._link, [("ZREM", keys.open_requests(), request_id)])
            await _ask(self._link, [("HDEL", keys.holds(), request_id)])
            return
        self.lost += 1
        record = record_of(hold, Usage(prompt_tokens=hold.input_tokens), "lost")
        await self._run(SETTLE, *settlement(hold, record, only_held=True))

    async def _trim(self) -> None:
        """Drops old records; never one that is not in the books."""
        [time, cursor] = await _ask(self._link, [("TIME",), ("GET", keys.ledger_cursor())])
        old = int(cast("list[bytes]", time)[0]) * 1000 - KEEP_MS
        folded = int(cast(bytes, cursor or b"0-0").partition(b"-")[0])
        await _ask(self._link, [("XTRIM", keys.records(), "MINID", min(old, folded))])

    async def _forget(self) -> None:
        """Drops what scopes used whose last windows ended long ago, deleted keys' for one."""
        [time] = await _ask(self._link, [("TIME",)])
        now_ms, cursor = int(cast("list[bytes]", time)[0]) * 1000, b"0"
        while True:
            [page] = await _ask(self._link, [("HSCAN", keys.uses(), cursor, "COUNT", BATCH)])
            cursor, pairs = cast("tuple[bytes, list[bytes]]", page)
            old = [
                scope
                for scope, state in zip(pairs[::2], pairs[1::2], strict=True)
                if 0 <= _FORGET_AT.unpack_from(state)[0] < now_ms
            ]
            if old:
                await self._run(self._forget_script, [keys.uses()], old)
            if cursor == b"0":
                return

    async def _run(self, script: Script, names: list[str], arguments: Sequence[Argument]) -> Answer:
        [answer] = await self._link.run(
            [("EVALSHA", script.sha, len(names), *names, *arguments)], TRIP_S
        )
        if isinstance(answer, NoScriptError):
            [answer] = await _ask(
                self._link, [("EVAL", script.text, len(names), *names, *arguments)]
            )
        elif isinstance(answer, ResponseError):
            raise answer
        return answer


async def _ask(link: Link, commands: Sequence[Command]) -> list[Answer]:
    answers = await link.run(commands, TRIP_S)
    for answer in answers:
        if isinstance(answer, ResponseError):
            raise answer
    return answers


def _entries(answer: Answer) -> list[Entry]:
    """Records of an XRANGE; one that cannot be read is left out."""
    found: list[Entry] = []
    for entry_id, fields in cast("list[tuple[bytes, list[bytes]]]", answer or []):
        value = field_of(fields, PACKET_FIELD)
        try:
            found.append((entry_id.decode(), decode_record(cast(bytes, value))))
        except (msgspec.DecodeError, TypeError):
            log.warning("a usage record cannot be read: it is left out of the books")
    return found


def _book(pairs: list[bytes]) -> dict[str, int]:
    return {
        name.decode(): int(amount) for name, amount in zip(pairs[::2], pairs[1::2], strict=True)
    }
