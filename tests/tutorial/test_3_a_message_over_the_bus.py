"""Lesson 3: what lies between gateway and worker: streams in Redis, one reader each.

A gateway appends packets of messages to a worker's work stream; the worker reads them in their
order. The answers go the same way in the other direction, on the gateway's reply stream.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forebay_shared import keys
from forebay_shared.bus import Publisher
from forebay_shared.packets import WORK
from forebay_shared.reader import Feed, Reader
from forebay_shared.sampling import SamplingParams
from forebay_shared.supervise import Supervisor
from forebay_shared.wire import Cancel, Submit, Work, pack_ids, unpack_ids
from redis_house import RedisServer, WaitUntil

WORKER = "w1"
STREAM = keys.work(WORKER)
SUBMIT = Submit(
    request_id="r1",
    attempt=1,
    gateway="g1",
    prompt=pack_ids([7, 8, 9]),
    sampling=SamplingParams(max_tokens=5),
)
CANCEL = Cancel(request_id="r1", attempt=1)


@asynccontextmanager
async def publishing(url: str) -> AsyncIterator[Publisher]:
    """The sending half: one task and one connection per process, whoever sends."""
    publisher = Publisher(url)
    async with Supervisor("lesson") as tasks:
        tasks.start("publisher", publisher.run())
        yield publisher


@asynccontextmanager
async def reading(url: str, into: list[Work]) -> AsyncIterator[None]:
    """The receiving half. The worker owns its stream: it makes it, reads it and trims it."""
    feed = Feed(STREAM, WORK, into.extend, owned=True, reset=lambda: None)
    reader = Reader(url, [feed])
    async with Supervisor("lesson") as tasks:
        tasks.start("reader", reader.run())
        yield


async def test_a_cancel_never_overtakes_its_submit(
    redis_url: str, session_redis: RedisServer, wait_until: WaitUntil
) -> None:
    """Both travel in one stream, here even in one packet."""
    received: list[Work] = []
    async with publishing(redis_url) as publisher, reading(redis_url, received):
        await wait_until(lambda: session_redis.client.exists(STREAM))
        packet = WORK.encode("g1", [SUBMIT, CANCEL])
        await publisher.publish(STREAM, packet, keys.WORK_MAXLEN)
        await wait_until(lambda: len(received) == 2)
    assert received == [SUBMIT, CANCEL]
    assert unpack_ids(SUBMIT.prompt) == [7, 8, 9]


async def test_what_is_for_a_worker_that_is_gone_is_known_at_once(redis_url: str) -> None:
    """Nobody made that stream, so the message goes nowhere and no key is left behind."""
    async with publishing(redis_url) as publisher:
        packet = WORK.encode("g1", [SUBMIT])
        assert await publisher.publish(keys.work("nobody"), packet, keys.WORK_MAXLEN) is None


async def test_redis_keeps_nothing_of_what_was_read(
    redis_url: str, session_redis: RedisServer, wait_until: WaitUntil
) -> None:
    """Redis is transport: its streams are empty at rest, and they expire without their owner."""
    received: list[Work] = []
    async with publishing(redis_url) as publisher, reading(redis_url, received):
        await wait_until(lambda: session_redis.client.exists(STREAM))
        packet = WORK.encode("g1", [SUBMIT])
        await publisher.publish(STREAM, packet, keys.WORK_MAXLEN)
        await wait_until(lambda: session_redis.client.xlen(STREAM) == 0)
    assert received == [SUBMIT]
    assert 0 < session_redis.client.pttl(STREAM) <= keys.STREAM_TTL_MS
