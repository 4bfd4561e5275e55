"""The roster on a real Redis: workers join, lapse, say farewell, and outlive an outage."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from bus_house import job, run_job, workers
from forebay_gateway import roster
from forebay_gateway.app import create_app
from forebay_gateway.backend import Backend, connect
from forebay_gateway.roster import LEASE_S, SETTLE_S, Roster
from forebay_shared import keys
from forebay_shared.bus import Publisher
from forebay_shared.errors import ModelNotFoundError, NoWorkerError
from forebay_shared.exposition import snapshot
from forebay_shared.models import ModelCard, content_hash
from forebay_shared.reader import Reader
from forebay_shared.settings import GatewaySettings, Secret
from forebay_shared.supervise import Supervisor
from forebay_shared.telemetry import EngineMetrics, GatewayMetrics
from forebay_shared.wire import Beacon, Farewell, Load
from patience import PATIENCE_S
from prometheus_client import CollectorRegistry
from redis_house import RedisServer, WaitUntil

STILL_LOADING = "The model is still loading. Please retry."


@asynccontextmanager
async def backend(url: str) -> AsyncIterator[Backend]:
    async with connect(GatewaySettings(redis_url=Secret(url))) as one:
        yield one


async def test_a_worker_joins_and_its_farewell_takes_it_out_at_once(
    redis_url: str, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture
) -> None:
    async with backend(redis_url) as one:
        with pytest.raises(NoWorkerError):
            one.roster.find("echo")
        with workers(redis_url, 1) as running:
            await wait_until(lambda: one.roster.ready)
            card = one.roster.find("echo")
            assert one.roster.cards() == [card]
            tokenizer = await one.store.blob(card.tokenizer)
            assert b'"ByteLevel"' in tokenizer
            with pytest.raises(ModelNotFoundError):
                one.roster.find("another")
            (name,) = one.roster.workers
            running[0].send(signal.SIGTERM)
            assert await asyncio.to_thread(running[0].process.wait) == 0
            await wait_until(lambda: one.roster.workers == [])
            assert f"worker {name} said farewell" in caplog.text, "nobody waited for its lease"
            assert one.roster.find("echo") == card


async def test_a_models_tokenizer_is_loaded_before_anybody_asks_for_it(
    redis_url: str, wait_until: WaitUntil
) -> None:
    settings = GatewaySettings(redis_url=Secret(redis_url))
    async with backend(redis_url) as one:
        fetched: list[str] = []
        blob = one.store.blob

        async def watched(sha256: str) -> bytes:
            data = await blob(sha256)
            fetched.append(sha256)
            return data

        one.store.blob = watched
        create_app(settings, one)
        with workers(redis_url, 1):
            await wait_until(lambda: one.roster.ready)
            card = one.roster.find("echo")
            await wait_until(lambda: card.tokenizer in fetched)


async def test_a_gateway_that_joins_knows_the_members_before_their_next_beacon(
    redis_url: str, wait_until: WaitUntil, session_redis: RedisServer
) -> None:
    client = session_redis.client
    with workers(redis_url, 1) as running:
        await wait_until(lambda: client.hlen(keys.members()) == 1)
        (name,) = (member.decode() for member in client.hkeys(keys.members()))
        running[0].send(signal.SIGSTOP)  # there is no next beacon
        client.set(keys.worker_lease(name), "1", px=60_000)
        client.hset(keys.members(), "dead", b"no beacon")
        seen: list[str] = []
        async with backend(redis_url) as one:
            one.roster.on_card(lambda _: seen.extend(one.roster.workers))
            await wait_until(lambda: seen == [name])


async def test_a_gateway_opens_when_it_knows_all_that_are_there(
    redis_url: str, wait_until: WaitUntil, session_redis: RedisServer
) -> None:
    """Else its first requests for the model of the second worker would be told that it is none."""
    client = session_redis.client
    with workers(redis_url, 3):
        await wait_until(lambda: client.hlen(keys.members()) == 3)
        for _ in range(5):
            async with backend(redis_url) as one:
                assert not one.roster.met
                await one.opened(PATIENCE_S)
                names = one.roster.workers
                cards = [worker.card for name in names if (worker := one.roster.get(name))]
                assert len(cards) == 3
                assert all(cards)


async def test_no_name_is_unknown_while_a_workers_card_is_on_its_way(
    redis_url: str, wait_until: WaitUntil
) -> None:
    def refused() -> bool:
        try:
            one.roster.find("another")
        except NoWorkerError:
            return False
        except ModelNotFoundError:
            return True
        return False

    async with backend(redis_url) as one:
        with workers(redis_url, 1):
            await wait_until(lambda: one.roster.ready and refused())
            one.roster.receive([Beacon(worker="new", card="of none", load=Load())])
            with pytest.raises(NoWorkerError, match="just joined"):
                one.roster.find("another")
            assert one.roster.find("echo")
            await wait_until(refused)


async def test_a_silent_worker_lapses_and_a_zombie_joins_again(
    redis_url: str, wait_until: WaitUntil
) -> None:
    loop = asyncio.get_running_loop()
    async with backend(redis_url) as one:
        lost: dict[str, float] = {}
        one.roster.on_lost(lambda name: lost.setdefault(name, loop.time()))
        with workers(redis_url, 1) as running:
            await wait_until(lambda: one.roster.ready)
            (name,) = one.roster.workers
            worker = one.roster.get(name)
            assert worker is not None
            running[0].send(signal.SIGSTOP)
            await wait_until(lambda: name in lost)
            assert lost[name] - worker.seen_at > LEASE_S, "not before its time"
            running[0].send(signal.SIGCONT)
            await wait_until(lambda: one.roster.workers == [name])


async def test_an_outage_of_redis_costs_no_worker_its_lease(
    redis_server: RedisServer, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease_s = 5.0  # a machine that pauses for 3 s costs nobody this lease
    monkeypatch.setattr(roster, "LEASE_S", lease_s)
    async with backend(redis_server.url) as one:
        lost: list[str] = []
        one.roster.on_lost(lost.append)
        with workers(redis_server.url, 2, lease_s=lease_s):
            await wait_until(lambda: len(one.roster.workers) == 2)
            redis_server.kill()
            loop = asyncio.get_running_loop()
            away = loop.time() + lease_s + 1
            await wait_until(lambda: loop.time() > away)
            redis_server.forget()
            redis_server.start()
            await wait_until(lambda: one.connected)
            back = loop.time()
            answer = await run_job(one, job(one, tokens=3))
            assert answer.count == 3
            await wait_until(lambda: loop.time() > back + lease_s + 1)
            assert lost == []


async def test_a_full_outage_brings_back_cards_and_blobs(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    with workers(redis_server.url, 1):
        async with backend(redis_server.url) as one:
            await wait_until(lambda: one.roster.ready)
        redis_server.client.flushall()
        async with backend(redis_server.url) as one:
            await wait_until(lambda: one.roster.ready)
            assert await one.store.blob(one.roster.find("echo").tokenizer)


@pytest.fixture
async def quiet_roster(redis_url: str) -> AsyncIterator[Roster]:
    """A roster that hears only what the test tells it, with a card to fetch."""
    publisher = Publisher(redis_url)
    async with Supervisor("test") as tasks:
        tasks.start("publisher", publisher.run())
        yield Roster(publisher, GatewayMetrics(CollectorRegistry()))


def _beacon(load: Load, *, draining: bool = False) -> Beacon:
    return Beacon(worker="w1", card="unknown", load=load, draining=draining)


async def test_a_worker_without_a_readable_card_gets_nothing(quiet_roster: Roster) -> None:
    quiet_roster.receive([_beacon(Load())])
    assert quiet_roster.workers == ["w1"]
    assert not quiet_roster.ready
    quiet_roster.receive([Farewell(worker="w1"), Farewell(worker="never seen")])
    assert quiet_roster.workers == []


async def test_a_model_is_loading_until_its_card_is_there_or_its_worker_is_gone(
    redis_url: str, quiet_roster: Roster, wait_until: WaitUntil, session_redis: RedisServer
) -> None:
    def answer() -> str:
        try:
            return quiet_roster.find("late").name
        except (NoWorkerError, ModelNotFoundError) as error:
            return error.message

    loading = Beacon(worker="w2", card="", load=Load(), draining=True, loading=("late",))
    quiet_roster.receive([loading])
    assert answer() == STILL_LOADING
    assert (quiet_roster.workers, quiet_roster.ready) == ([], False)
    quiet_roster.receive([Farewell(worker="w2")])
    assert answer() == "No worker is ready yet. Please retry."
    quiet_roster.receive([loading])
    now = asyncio.get_running_loop().time()
    quiet_roster.check(Clock(now + LEASE_S + 0.1, now - 100))
    assert answer() != STILL_LOADING, "it went silent"
    quiet_roster.receive([loading])
    card = msgspec.msgpack.encode(
        ModelCard(
            names=("late",), revision="v", family="echo", engine="echo", tokenizer="t",
            vocab_size=9, max_model_len=9, block_size=1, created=1,
        )
    )  # fmt: skip
    session_redis.client.set(keys.worker_card("w2"), card, px=keys.STREAM_TTL_MS)
    quiet_roster.receive([Beacon(worker="w2", card=content_hash(card), load=Load()), loading])
    assert answer() == STILL_LOADING, "its card is on its way; its last word of loading came late"
    await wait_until(lambda: answer() == "late")
    assert quiet_roster.ready


async def test_what_was_just_placed_counts_until_a_report_includes_it(
    quiet_roster: Roster,
) -> None:
    quiet_roster.receive([_beacon(Load(running=2, waiting=1, waiting_tokens=50))])
    worker = quiet_roster.get("w1")
    assert worker is not None
    worker.place("r1", 100)
    worker.place("r2", 10)
    assert (worker.queued_tokens, worker.busy) == (160, 5)
    now = asyncio.get_running_loop().time()
    worker.settle("r1", now - SETTLE_S)
    assert (worker.queued_tokens, worker.busy) == (160, 5)
    quiet_roster.receive([_beacon(Load(running=3))])
    assert (worker.queued_tokens, worker.busy) == (10, 4)
    worker.place("r3", 7)
    worker.settle("r3", now)
    worker.report(Load(), now + SETTLE_S / 2)  # sent before the request came
    assert (worker.queued_tokens, worker.busy) == (17, 2)
    worker.report(Load(), now + 2 * SETTLE_S)
    assert (worker.queued_tokens, worker.busy) == (10, 1)
    worker.forget("r2")
    assert (worker.queued_tokens, worker.busy) == (0, 0)


class Clock:
    """A reader as the roster sees it."""

    def __init__(self, heard_at: float, steady_since: float | None) -> None:
        self.heard_at = heard_at
        self.steady_since = steady_since
        self.reconnects = 0


@pytest.mark.parametrize(
    ("clock", "lapses"),
    [
        (lambda now: Clock(now + LEASE_S + 0.1, now - 100), True),
        (lambda now: Clock(now + LEASE_S - 0.1, now - 100), False),
        (lambda now: Clock(now + 1000, None), False),
        (lambda now: Clock(now + 1000, now + 1000 - LEASE_S + 0.1), False),
    ],
    ids=["silent", "in time", "redis away", "redis just back"],
)
async def test_silence_counts_only_while_redis_answers(
    quiet_roster: Roster, clock: Callable[[float], Reader], lapses: bool
) -> None:
    quiet_roster.receive([_beacon(Load())])
    worker = quiet_roster.get("w1")
    assert worker is not None
    quiet_roster.check(clock(worker.seen_at))
    assert (quiet_roster.workers == []) is lapses


async def test_one_scrape_shows_every_live_process_and_forgets_dead_ones(
    redis_url: str, wait_until: WaitUntil, session_redis: RedisServer
) -> None:
    client = session_redis.client
    async with backend(redis_url) as one, backend(redis_url) as other:
        with workers(redis_url, 1):
            await wait_until(lambda: one.roster.ready)
            client.sadd(keys.gateways(), "dead")
            await wait_until(lambda: client.exists(keys.metrics(other.gateway)) == 1)
            await wait_until(lambda: client.exists(keys.metrics(one.roster.workers[0])) == 1)
            text = await one.metrics()
            for gateway in (one.gateway, other.gateway):
                assert f'forebay_workers{{gateway="{gateway}"}}' in text
            assert f'engine="{one.roster.workers[0]}",model_name="echo"' in text
            assert text.count("# TYPE forebay_workers gauge") == 1
            await wait_until(lambda: not client.sismember(keys.gateways(), "dead"))


async def test_a_scrape_of_a_large_fleet_holds_nobody_up(
    redis_url: str, session_redis: RedisServer
) -> None:
    registry, client = CollectorRegistry(), session_redis.client
    EngineMetrics(registry, model_name="m", engine="w", max_model_len=100_000)
    for number in range(100):
        client.sadd(keys.gateways(), f"other-{number}")
        client.set(keys.metrics(f"other-{number}"), snapshot(registry), ex=60)
    async with backend(redis_url) as one:
        async with asyncio.timeout(PATIENCE_S):
            while not one.connected:  # noqa: ASYNC110  another task's doing
                await asyncio.sleep(0.001)
        scraping, turns = asyncio.create_task(one.metrics()), 0
        while not scraping.done():
            await asyncio.sleep(0.001)
            turns += 1
        text = scraping.result()
    assert text.count('vllm:num_requests_running{engine="w",gateway="other-') == 100
    assert turns > 20  # a few, had it been written at one go
