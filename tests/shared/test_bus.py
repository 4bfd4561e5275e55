"""The bus under cuts, floods of cancels, lost streams and poison, on a real Redis."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
from forebay_shared import keys
from forebay_shared.bus import Publisher
from forebay_shared.errors import BusError
from forebay_shared.lane import Lane
from forebay_shared.nodes import Nodes
from forebay_shared.packets import REPLY
from forebay_shared.pipe import Call
from forebay_shared.places import Cluster
from forebay_shared.reader import Feed, Reader
from forebay_shared.supervise import Supervisor
from forebay_shared.wire import Accepted, Reply
from patience import PATIENCE_S
from redis_house import RedisServer, WaitUntil

GATEWAY = "g1"
STREAM = keys.reply(GATEWAY)


class House:
    """A publisher and the reader of one reply stream."""

    def __init__(self, url: str, patience_s: float) -> None:
        self.seen: list[str] = []
        self.resets = 0
        self.publisher = Publisher(url, patience_s=patience_s)
        self.reader = Reader(url, [Feed(STREAM, REPLY, self._take, owned=True, reset=self._reset)])

    def send(self, name: str) -> asyncio.Future[object]:
        packet = REPLY.encode("w1", [Accepted(name, 1)])
        return self.publisher.publish(STREAM, packet, keys.REPLY_MAXLEN)

    def _take(self, replies: list[Reply]) -> None:
        self.seen.extend(reply.request_id for reply in replies)

    def _reset(self) -> None:
        self.resets += 1


@asynccontextmanager
async def house(url: str, patience_s: float = PATIENCE_S) -> AsyncIterator[House]:
    one = House(url, patience_s)
    async with Supervisor("test") as tasks:
        tasks.start("publisher", one.publisher.run())
        tasks.start("reader", one.reader.run())
        yield one
        one.publisher.call("DEL", STREAM)
        await one.publisher.drain()


async def test_what_is_published_is_read_in_order_and_trimmed(
    redis_url: str, session_redis: RedisServer, wait_until: WaitUntil
) -> None:
    async with house(redis_url) as one:
        await wait_until(lambda: one.reader.connected)
        names = [str(number) for number in range(3000)]
        for name in names:
            one.send(name)
        await wait_until(lambda: len(one.seen) == len(names))
        assert one.seen == names
        await wait_until(lambda: session_redis.client.xlen(STREAM) == 0)
        assert 0 < session_redis.client.pttl(STREAM) <= keys.STREAM_TTL_MS


async def test_ten_thousand_random_cancels_never_cross_replies(redis_url: str) -> None:
    publisher = Publisher(redis_url)
    random.seed(7)

    async def echo(number: int) -> bool:
        reply = await publisher.call("ECHO", str(number))
        assert reply == str(number).encode()
        return True

    async with Supervisor("test") as tasks:
        tasks.start("publisher", publisher.run())
        finished = 0
        for _ in range(100):
            callers = [asyncio.create_task(echo(number)) for number in range(200)]
            await asyncio.sleep(0)
            for caller in random.sample(callers, 100):
                if random.random() < 0.5:
                    await asyncio.sleep(0)
                caller.cancel()
            results = await asyncio.gather(*callers, return_exceptions=True)
            assert all(r is True or isinstance(r, asyncio.CancelledError) for r in results)
            finished += results.count(True)
        assert finished >= 10_000
        assert publisher.reconnects == 0, "forebay_redis_reconnects_total counts them"


async def test_a_publish_to_a_stream_that_nobody_owns_makes_no_key(
    redis_url: str, session_redis: RedisServer
) -> None:
    publisher = Publisher(redis_url)
    async with Supervisor("test") as tasks:
        tasks.start("publisher", publisher.run())
        packet = REPLY.encode("w1", [])
        assert await publisher.publish(STREAM, packet, keys.REPLY_MAXLEN) is None
        assert session_redis.client.exists(STREAM) == 0


async def test_the_reader_resumes_after_a_restart_with_its_data(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    async with house(redis_server.url) as one:
        await one.publisher.drain()
        await wait_until(lambda: one.reader.connected)
        await one.send("before")
        redis_server.kill()
        during = one.send("during")
        await wait_until(lambda: not one.reader.connected)
        redis_server.start()
        await during
        await one.send("after")
        await wait_until(lambda: "after" in one.seen)
        assert [*dict.fromkeys(one.seen)] == ["before", "during", "after"]
        assert one.resets == 0
        assert one.reader.reconnects >= 1


@pytest.mark.parametrize("loss", ["restart", "flush"])
async def test_a_lost_stream_is_noticed_once_and_read_from_its_new_beginning(
    redis_server: RedisServer, wait_until: WaitUntil, loss: str
) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with house(redis_server.url) as one:
        await wait_until(lambda: one.reader.connected)
        await one.send("before")
        await wait_until(lambda: one.seen == ["before"])
        if loss == "restart":
            redis_server.kill()
            redis_server.forget()
            redis_server.start()
        else:
            redis_server.client.flushall()
        await wait_until(lambda: one.resets == 1)
        await one.send("after")
        await wait_until(lambda: one.seen == ["before", "after"])
        assert one.resets == 1
        calls = redis_server.client.info("commandstats")["cmdstat_xinfo|stream"]["calls"]
        assert calls < 20 + 2 * (loop.time() - began), "no hot loop"


async def test_a_stream_that_went_back_in_time_is_read_from_its_beginning(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    async with house(redis_server.url) as one:
        await wait_until(lambda: one.reader.connected)
        await one.send("before")
        await wait_until(lambda: one.seen == ["before"])
        pipeline = redis_server.client.pipeline(transaction=True)
        pipeline.delete(STREAM)
        pipeline.xadd(STREAM, {"p": REPLY.encode("w1", [Accepted("old", 1)])}, id="5-1")
        pipeline.execute()
        await wait_until(lambda: one.resets == 1)
        await wait_until(lambda: one.seen == ["before", "old"])


async def test_poison_is_counted_and_never_stops_the_reader(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    async with house(redis_server.url) as one:
        await wait_until(lambda: one.reader.connected)
        client = redis_server.client
        poison: list[dict[str, bytes]] = [
            {"p": b""},
            {"p": random.Random(1).randbytes(20_000_000)},
            {"p": b"\x93" * 100_000},
            {"x": b"no packet"},
            {"p": REPLY.encode("w1", []) + b"tail"},
        ]
        for fields in poison:
            client.xadd(STREAM, fields)
        await one.send("after")
        await wait_until(lambda: one.seen == ["after"])
        assert one.reader.bad_messages == len(poison)
        assert one.reader.reconnects == 0


async def test_a_lost_redis_is_asked_less_than_five_times_a_second(
    redis_server: RedisServer, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(redis_server.url) as one:
        await wait_until(lambda: one.reader.connected)
        redis_server.kill()
        attempts = 0
        link = one.reader.strands[0].link
        run = link.run

        async def counted(*arguments: object) -> object:
            nonlocal attempts
            attempts += 1
            return await run(*arguments)

        monkeypatch.setattr(link, "run", counted)
        started = asyncio.get_running_loop().time()
        await wait_until(lambda: attempts >= 5)
        assert asyncio.get_running_loop().time() - started >= 1.0


async def test_while_redis_is_away_commands_fail_in_time_and_then_at_once(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    async with house(redis_server.url, patience_s=1.0) as one:
        await one.publisher.drain()
        redis_server.kill()
        with pytest.raises(BusError):
            await one.send("lost")
        while not (late := one.send("lost too")).done():  # sent as the first one was given up
            await asyncio.wait({late})
        with pytest.raises(BusError):
            await late
        redis_server.start()  # nothing is queued that would be tried again
        await wait_until(lambda: one.publisher.connected and one.reader.connected)
        await one.send("back")


async def test_a_full_redis_is_a_bus_error(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    async with house(redis_server.url) as one:
        await wait_until(lambda: one.reader.connected)
        redis_server.client.config_set("maxmemory", "1")
        with pytest.raises(BusError):
            await one.send("too much")
        redis_server.client.config_set("maxmemory", "0")
        await one.send("fits")


async def test_a_lane_keeps_order_over_a_missing_stream_and_a_restart(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    lost: list[list[Reply]] = []
    async with house(redis_server.url) as one:
        lane = Lane(
            one.publisher,
            STREAM,
            REPLY,
            sender="w1",
            maxlen=keys.REPLY_MAXLEN,
            limit=100_000,
            patience_s=60,
            undelivered=lambda messages, _: lost.append(messages),
        )
        await wait_until(lambda: one.reader.connected)
        redis_server.client.flushall()
        for number in range(100):
            lane.send([Accepted(str(number), 1)])
        await wait_until(lambda: "99" in one.seen)
        redis_server.kill()
        for number in range(100, 200):
            lane.send([Accepted(str(number), 1)])
        redis_server.start()
        await wait_until(lambda: "199" in one.seen)
        assert [*dict.fromkeys(one.seen)] == [str(number) for number in range(200)]
        assert not lost


class OneNode:
    """A cluster of one server, which has all keys."""

    def __init__(self, url: str) -> None:
        self.nodes = frozenset({url})
        self._url = url

    async def refresh(self) -> None: ...

    def owner(self, key: str) -> str:
        return self._url


async def test_a_node_whose_task_crashes_ends_the_publisher_of_its_cluster(redis_url: str) -> None:
    nodes = Nodes(cast(Cluster, OneNode(redis_url)), patience_s=PATIENCE_S, max_queued=10)
    running = asyncio.create_task(nodes.run())
    sound = Call(("SET", "fb:sound", "1", "PX", 60_000))
    nodes.put(sound)
    assert await sound.future == b"OK"
    nodes.put(Call(("SET", "fb:unsound", "\ud800")))  # no bytes say it
    with pytest.raises(UnicodeEncodeError):
        async with asyncio.timeout(PATIENCE_S):
            await running


async def test_a_lane_gives_back_what_it_cannot_deliver(redis_url: str) -> None:
    publisher = Publisher(redis_url)
    lost: list[Reply] = []
    async with Supervisor("test") as tasks:
        tasks.start("publisher", publisher.run())
        given_up = asyncio.Event()

        def undelivered(messages: list[Reply], error: BusError | None) -> None:
            assert error is None
            lost.extend(messages)
            given_up.set()

        lane = Lane(
            publisher, STREAM, REPLY, sender="w1", maxlen=10, limit=3, patience_s=0.3,
            undelivered=undelivered,
        )  # fmt: skip
        told: list[str] = []
        lane.send([Accepted("first", 1)])
        lane.send([Accepted("0", 1)])
        lane.after(lambda: told.append("of what was given back"))
        lane.send([Accepted(str(number), 1) for number in range(1, 4)])
        assert [reply.request_id for reply in lost] == ["0", "1", "2", "3"]
        given_up.clear()
        lane.send([Accepted("last", 1)])
        await given_up.wait()
        assert lost[-1].request_id == "first"
        await publisher.announce(STREAM, b"", 10)
        await publisher.call("PEXPIRE", STREAM, 60_000)
        delivered = asyncio.Event()
        lane.after(delivered.set)
        await delivered.wait()
        assert not told
        with contextlib.suppress(BusError):
            await publisher.drain()
