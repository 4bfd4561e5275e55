"""Folds records into the books, ends what nobody settled, and reads the books for reports.

Every gateway has one; a lease lets one at a time work. The lease saves work and no more: the cursor
moves with the sums in one atomic step, so two at once still count every record once.
"""

import asyncio
import logging
from collections.abc import Iterator
from struct import Struct
from typing import cast

import msgspec
from forebay_shared import keys
from forebay_shared.books import SETTLE, UsageRecord, decode_hold, record_of, settlement
from forebay_shared.link import LINK_ERRORS, Argument, Backoff, Link
from forebay_shared.link import field as field_of
from forebay_shared.scripts import Script
from forebay_shared.wire import Usage

from forebay_gateway.teams import books
from forebay_gateway.teams.exporter import oldest_wanted
from forebay_gateway.teams.stream import (
    ask,
    entry_ms,
    lead,
    now_ms,
    read_records,
    reading,
    run_script,
)

log = logging.getLogger(__name__)

TICK_S = 0.5
SWEEP_S = 5.0
TRIM_S = 60.0
LEASE_MS = 5_000
BATCH = 500
GRACE_MS = 45_000
"""A request is late this long after its lease: its worker may still settle it."""
KEEP_MS = 7 * 86_400_000
"""Records stay so long for export, once they are in the books."""
REPORTS = 2
"""Made at once: anybody with a key may ask for one, and each reads whole books."""

_FORGET_AT = Struct("<d")

Entry = tuple[str, UsageRecord]


class Bookkeeper:
    """One gateway's. `folded` counts the records that it has put into the books, `lost` those of
    requests that it gave up. `lag_s` and `stream_bytes` are of whoever keeps the books now.
    """

    def __init__(self, url: str, gateway: str) -> None:
        self._url = url
        self._link = Link(url, keys.records())
        self._gateway = gateway
        self._fold = Script("fold")
        self._forget_script = Script("forget")
        self._beat = Script("beat")
        self._reporting = asyncio.Semaphore(REPORTS)
        self._sweep_at = self._trim_at = 0.0
        self.folded = 0
        self.lost = 0
        self.lag_s = 0.0
        self.stream_bytes = 0

    async def run(self) -> None:
        """Works whenever the lease is free, for ever."""
        backoff = Backoff()
        try:
            while True:
                try:
                    if await lead(self._link, keys.ledger_lease(), self._gateway, LEASE_MS):
                        await self._work()
                    else:
                        self.lag_s, self.stream_bytes = 0.0, 0
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
        report = books.Report(query)
        async with self._reporting, reading(self._url) as link:
            for name in query.books():
                [answer] = await ask(link, [("HGETALL", name)])
                if book := cast("list[bytes]", answer):
                    await asyncio.to_thread(report.add, _fields(book))
        return report.rows()

    async def records(self, after: str, count: int) -> list[Entry]:
        """Records behind an entry of their stream, oldest first, each with its entry's id."""
        async with reading(self._url) as link:
            entries = await read_records(link, after, count)
        return [(entry, record) for entry, record in entries if record is not None]

    async def audit(self, after: str, count: int) -> list[dict[str, object]]:
        """Lines of the audit log behind an entry, oldest first."""
        command = ("XRANGE", keys.audit(), f"({after}" if after else "-", "+", "COUNT", count)
        async with reading(self._url) as link:
            [answer] = await ask(link, [command])
        return [
            {
                "entry": entry_id.decode(),
                "at": entry_ms(entry_id.decode()) / 1000,
                "who": cast(bytes, field_of(fields, b"who")).decode(),
                "what": msgspec.json.decode(cast(bytes, field_of(fields, b"what"))),
            }
            for entry_id, fields in cast("list[tuple[bytes, list[bytes]]]", answer or [])
        ]

    async def _work(self) -> None:
        while await self._fold_batch():
            pass
        self.lag_s = 0.0
        now = asyncio.get_running_loop().time()
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_S
            await self._sweep()
            [size] = await ask(self._link, [("MEMORY", "USAGE", keys.records())])
            self.stream_bytes = cast(int, size or 0)
        if now >= self._trim_at:
            self._trim_at = now + TRIM_S
            await self._trim()
            await self._forget()

    async def _fold_batch(self) -> bool:
        """Puts the next records into the books; True when there may be more."""
        [cursor] = await ask(self._link, [("GET", keys.ledger_cursor())])
        at = cast(bytes, cursor or b"0-0").decode()
        entries = await read_records(self._link, at, BATCH)
        if not entries:
            return False
        self.lag_s = max(0.0, (await now_ms(self._link) - entry_ms(entries[0][0])) / 1000)
        records = [record for _, record in entries if record is not None]
        names = [keys.ledger_cursor()]
        arguments: list[Argument] = [at, entries[-1][0], len(books.FIGURES)]
        for cell, figures in books.fold(records).items():
            names.append(cell.book)
            arguments += [cell.name, cell.life_s, *figures]
        done = await run_script(self._link, self._fold, names, arguments)
        self.folded += len(records) if done == 1 else 0
        return len(entries) == BATCH

    async def _sweep(self) -> None:
        """Settles requests whose gateway and worker are both gone: their prompt is charged."""
        told = await run_script(self._link, self._beat, [keys.fleet_clock()], [""])
        since = cast("list[int]", told)[0] - GRACE_MS
        late = ("ZRANGEBYSCORE", keys.open_requests(), "-inf", since, "LIMIT", 0, BATCH)
        [answer] = await ask(self._link, [late])
        if not (ids := cast("list[bytes]", answer)):
            return
        [values] = await ask(self._link, [("HMGET", keys.holds(), *ids)])
        for request_id, value in zip(ids, cast("list[bytes | None]", values), strict=True):
            await self._give_up(request_id, value)

    async def _give_up(self, request_id: bytes, value: bytes | None) -> None:
        try:
            hold = decode_hold(value or b"")
        except msgspec.DecodeError:
            log.warning("a hold cannot be read: it is dropped")
            await ask(self._link, [("ZREM", keys.open_requests(), request_id)])
            await ask(self._link, [("HDEL", keys.holds(), request_id)])
            return
        self.lost += 1
        # What it made before both were gone, nobody knows.
        usage = Usage(prompt_tokens=hold.input_tokens, estimated=True)
        record = record_of(hold, usage, "lost")
        await run_script(self._link, SETTLE, *settlement(hold, record, only_held=True))

    async def _trim(self) -> None:
        """Drops old records; never one that is not in the books, or that an export waits for."""
        now = await now_ms(self._link)
        [cursor, exports] = await ask(
            self._link, [("GET", keys.ledger_cursor()), ("HGETALL", keys.exports())]
        )
        folded = entry_ms(cast(bytes, cursor or b"0-0").decode())
        exported = oldest_wanted(cast("list[bytes]", exports), now // 1000)
        first = min(now - KEEP_MS, folded, folded if exported is None else exported)
        await ask(self._link, [("XTRIM", keys.records(), "MINID", first)])

    async def _forget(self) -> None:
        """Drops what scopes used whose last windows ended long ago, deleted keys' for one."""
        now, cursor = await now_ms(self._link), b"0"
        while True:
            [page] = await ask(self._link, [("HSCAN", keys.uses(), cursor, "COUNT", BATCH)])
            cursor, pairs = cast("tuple[bytes, list[bytes]]", page)
            old = [
                scope
                for scope, state in zip(pairs[::2], pairs[1::2], strict=True)
                if 0 <= _FORGET_AT.unpack_from(state)[0] < now
            ]
            if old:
                await run_script(self._link, self._forget_script, [keys.uses()], old)
            if cursor == b"0":
                return


def _fields(pairs: list[bytes]) -> Iterator[tuple[str, int]]:
    return (
        (name.decode(), int(amount)) for name, amount in zip(pairs[::2], pairs[1::2], strict=True)
    )
