"""What Redis may do to running requests: be slow, be full, stay away, come back as another."""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager

import pytest
from bus_house import Answer, answer, expected, job, run_job, workers
from forebay_gateway import dispatch, roster
from forebay_gateway.backend import Backend, connect
from forebay_shared import keys
from forebay_shared.errors import BusError, BusFullError
from forebay_shared.packets import REPLY
from forebay_shared.settings import GatewaySettings, Secret
from forebay_shared.wire import Done
from patience import PATIENCE_S
from redis_house import RedisServer, WaitUntil, redis_running
from registry_house import total
from storm_house import HeldPort, proxied

pytestmark = pytest.mark.chaos


LEASE_S = 5.0
"""Twice the usual: a machine that pauses for 3 s costs nobody else a lease."""


@pytest.fixture
def leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the workers, and how long one may take to accept, as the gateway sees it."""
    monkeypatch.setattr(roster, "LEASE_S", LEASE_S)
    monkeypatch.setattr(dispatch, "ACCEPT_S", 2 * dispatch.ACCEPT_S)


@pytest.fixture
def replica(redis_server: RedisServer) -> Iterator[RedisServer]:
    """A second server that follows the first."""
    with redis_running() as second, HeldPort() as port:
        redis_server.client.config_set("port", str(port.number))
        second.client.execute_command("REPLICAOF", "127.0.0.1", port.number)
        yield second


def gateway(url: str) -> AbstractAsyncContextManager[Backend]:
    return connect(GatewaySettings(redis_url=Secret(url)))


def _moved(backend: Backend, name: str, **labels: str) -> float:
    return total(backend.telemetry.registry, name, **labels)


def _resubmitted(backend: Backend, **labels: str) -> float:
    return _moved(backend, "forebay_resubmitted_total", **labels)


@pytest.mark.usefixtures("leases")
async def test_a_slow_redis_makes_answers_slow_and_nothing_else(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    async with proxied(redis_server.socket) as proxy:
        proxy.delay_s = 0.4
        async with gateway(proxy.url) as backend:
            with workers(proxy.url, 2, delay_ms=5, lease_s=LEASE_S):
                await wait_until(lambda: len(backend.roster.workers) == 2)
                await wait_until(lambda: backend.roster.ready)
                jobs = [job(backend, [number + 1, 9], tokens=200) for number in range(16)]
                answers = await asyncio.gather(*(run_job(backend, one) for one in jobs))
            for one, got in zip(jobs, answers, strict=True):
                assert got.tokens[0] == expected(one.prompt, 200)
            assert _resubmitted(backend) == 0
            looks = _moved(backend, "forebay_redis_round_trip_seconds_count")
            assert _moved(backend, "forebay_redis_round_trip_seconds_sum") > looks * proxy.delay_s
            assert backend.reader.reconnects == backend.publisher.reconnects == 0


@pytest.mark.usefixtures("leases")
async def test_a_full_redis_refuses_what_is_new_and_finishes_what_runs(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    async with gateway(redis_server.url) as backend:
        with workers(redis_server.url, 2, delay_ms=10, lease_s=LEASE_S):
            await wait_until(lambda: len(backend.roster.workers) == 2)
            one = job(backend, tokens=800)
            async with backend.dispatcher.generate(one) as generation:
                got = await answer(generation, until=5)
                redis_server.client.config_set("maxmemory", "1")
                with pytest.raises(BusFullError) as refused:
                    await run_job(backend, job(backend))
                assert refused.value.retryable
                assert refused.value.retry_after_s == 5.0
                assert _moved(backend, "forebay_shed_total", reason="bus_full") == 1
                # 8 s more: nobody may be taken for dead, and the answer comes to its end
                got = await answer(generation, so_far=got)
            assert got.tokens[0] == expected(one.prompt, 800)
            assert len(backend.roster.workers) == 2
            assert _resubmitted(backend) == 0
            redis_server.client.config_set("maxmemory", "0")
            assert (await run_job(backend, job(backend, tokens=5))).count == 5


async def test_what_runs_outlasts_a_long_outage_and_what_is_new_is_refused(
    redis_server: RedisServer, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay_gateway.dispatch.BUS_AWAY_S", 1.0)
    async with gateway(redis_server.url) as backend:
        with workers(redis_server.url, 1, delay_ms=10):
            await wait_until(lambda: backend.roster.ready)
            one = job(backend, tokens=400)
            async with backend.dispatcher.generate(one) as generation:
                got = await answer(generation, until=5)
                redis_server.kill()
                for _ in range(2):  # one that was on its way, and one that knows already
                    with pytest.raises(BusError) as refused:
                        await run_job(backend, job(backend))
                    assert refused.value.retryable
                assert _moved(backend, "forebay_shed_total", reason="bus_unavailable") == 2
                redis_server.start()
                got = await answer(generation, so_far=got)
            assert got.tokens[0] == expected(one.prompt, 400)


async def test_a_failover_that_loses_confirmed_writes_loses_no_answer(
    redis_server: RedisServer, replica: RedisServer, wait_until: WaitUntil
) -> None:
    async with proxied(redis_server.socket) as proxy, gateway(proxy.url) as backend:
        with workers(proxy.url, 2, delay_ms=10):
            await wait_until(lambda: len(backend.roster.workers) == 2)
            # Some end before the writes are lost, some while they are, some after.
            jobs = [job(backend, [n + 1, 9], tokens=20 + 10 * n) for n in range(30)]
            clients = [asyncio.create_task(run_job(backend, one)) for one in jobs]
            await wait_until(lambda: any(client.done() for client in clients))
            replica.client.execute_command("REPLICAOF", "NO", "ONE")
            lost = sum(client.done() for client in clients)
            await wait_until(lambda: sum(client.done() for client in clients) > lost + 4)
            proxy.turn(replica.socket)
            redis_server.kill()
            async with asyncio.timeout(PATIENCE_S):
                answers = await asyncio.gather(*clients)
            await wait_until(lambda: _moved(backend, "forebay_redis_reconnects_total") > 0)
        for one, got in zip(jobs, answers, strict=True):
            assert got.tokens[0] == expected(one.prompt, one.sampling.max_tokens)


async def test_an_end_that_a_failover_lost_is_asked_for_again(
    redis_server: RedisServer, replica: RedisServer, wait_until: WaitUntil
) -> None:
    async with (
        proxied(redis_server.socket) as mine,
        proxied(redis_server.socket) as its,
        gateway(mine.url) as backend,
    ):
        with workers(its.url, 1, delay_ms=5):
            await wait_until(lambda: backend.roster.ready)
            one = job(backend, tokens=400)
            client = asyncio.create_task(run_job(backend, one))
            await wait_until(lambda: any(r.has_begun for r in backend.dispatcher._running))
            mine.heard.clear()  # the end is written, and confirmed to the worker, and unread
            replica.client.execute_command("REPLICAOF", "NO", "ONE")
            await wait_until(lambda: _ended(redis_server, backend.gateway))
            its.turn(replica.socket)
            mine.turn(replica.socket)
            mine.heard.set()
            async with asyncio.timeout(PATIENCE_S):
                got = await client
        assert isinstance(got, Answer)
        assert got.tokens[0] == expected(one.prompt, 400)
        assert _resubmitted(backend, reason="bus_reset") >= 1


def _ended(server: RedisServer, gateway: str) -> bool:
    """Whether the end of an answer is in a gateway's stream."""
    packets = [fields[b"p"] for _, fields in server.client.xrange(keys.reply(gateway))]
    return any(isinstance(each, Done) for packet in packets for each in REPLY.decode(packet)[0])
