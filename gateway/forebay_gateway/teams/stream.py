"""What the tasks of teams ask of Redis: answers without errors, a lease, records in order.

Each task has a link of its own, so nobody waits behind its long answers.
"""

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import cast

import msgspec
from forebay_shared import keys
from forebay_shared.books import UsageRecord, decode_record
from forebay_shared.link import PACKET_FIELD, Answer, Argument, Command, Link
from forebay_shared.link import field as field_of
from forebay_shared.scripts import Script
from redis.exceptions import NoScriptError, ResponseError

log = logging.getLogger(__name__)

TRIP_S = 10.0
ALIVE_S = 1.0
"""A reader does not wait longer than this to learn that Redis is away."""


@asynccontextmanager
async def reading(url: str) -> AsyncGenerator[Link]:
    """A link for one reader, whose answers may be long and keep nobody waiting behind them.

    Raises one of LINK_ERRORS; within a second where Redis does not answer at all.
    """
    link = Link(url, keys.records())
    try:
        await link.run([("PING",)], ALIVE_S)
        yield link
    finally:
        await link.close()


async def ask(link: Link, commands: Sequence[Command], timeout_s: float = TRIP_S) -> list[Answer]:
    """Answers in order. Raises one of LINK_ERRORS, for a refused command too."""
    answers = await link.run(commands, timeout_s)
    for answer in answers:
        if isinstance(answer, ResponseError):
            raise answer
    return answers


async def run_script(
    link: Link, script: Script, names: Sequence[str], arguments: Sequence[Argument]
) -> Answer:
    """A script's answer, by its hash or else by its text."""
    rest = (len(names), *names, *arguments)
    [answer] = await link.run([("EVALSHA", script.sha, *rest)], TRIP_S)
    if isinstance(answer, NoScriptError):
        [answer] = await ask(link, [("EVAL", script.text, *rest)])
    elif isinstance(answer, ResponseError):
        raise answer
    return answer


async def lead(link: Link, lease: str, who: str, lease_ms: int) -> bool:
    """Takes or keeps a lease; False while another has it.

    One that has longer to live than anybody gives it is of before the clock of Redis was put back;
    it is taken. Two who lead for a moment do no harm.
    """
    taken = [("SET", lease, who, "NX", "PX", lease_ms), ("GET", lease), ("PTTL", lease)]
    [_, holder, life] = await ask(link, cast("list[Command]", taken))
    if holder != who.encode():
        if cast(int, life) > lease_ms:
            await ask(link, [("SET", lease, who, "PX", lease_ms)])
        return False
    await ask(link, [("PEXPIRE", lease, lease_ms)])
    return True


async def read_records(link: Link, after: str, count: int) -> list[tuple[str, UsageRecord | None]]:
    """Entries of the records' stream behind one, oldest first; None for what cannot be read."""
    start = f"({after}" if after else "-"
    [answer] = await ask(link, [("XRANGE", keys.records(), start, "+", "COUNT", count)])
    found: list[tuple[str, UsageRecord | None]] = []
    for entry_id, fields in cast("list[tuple[bytes, list[bytes]]]", answer or []):
        record = None
        try:
            record = decode_record(cast(bytes, field_of(fields, PACKET_FIELD)))
        except (msgspec.DecodeError, TypeError):
            log.warning("a usage record cannot be read: it is left out of the books")
        found.append((entry_id.decode(), record))
    return found


def entry_ms(entry: str) -> int:
    """When an entry of a stream was written, by the clock of Redis."""
    return int(entry.partition("-")[0])


async def now_ms(link: Link) -> int:
    """The clock of Redis."""
    [time] = await ask(link, [("TIME",)])
    seconds, micros = cast("list[bytes]", time)
    return int(seconds) * 1000 + int(micros) // 1000
