"""A real Redis Cluster and a real Sentinel under gateways and workers: jobs, vectors, digests, the
whole product; a node that is killed where a replica takes over, and where none does."""

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
from bus_house import answer, expected, job, run_job, workers
from forebay_gateway.backend import Backend, connect
from forebay_gateway.jobs import EncodeJob
from forebay_shared import keys
from forebay_shared.errors import BusError
from forebay_shared.settings import GatewaySettings, Secret
from patience import PATIENCE_S
from redis_fleet import Cluster, cluster_running, watched_running
from redis_house import WaitUntil

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three nodes. A test leaves only keys with a TTL, and all nodes alive."""
    with cluster_running() as three:
        yield three


def _settings(url: str) -> GatewaySettings:
    return GatewaySettings(redis_url=Secret(url))


async def test_jobs_cancels_vectors_and_digests_go_over_a_cluster(
    cluster: Cluster, wait_until: WaitUntil
) -> None:
    async with connect(_settings(cluster.url)) as backend, connect(_settings(cluster.url)) as other:
        with workers(cluster.url, 2, delay_ms=5, cache_blocks=1000):
            for each in (backend, other):
                await wait_until(lambda each=each: len(each.roster.workers) == 2)
                await wait_until(lambda each=each: each.roster.ready)
            jobs = [
                job(each, [n + 1, 9], tokens=50) for n in range(16) for each in (backend, other)
            ]
            answers = await asyncio.gather(
                *(run_job(each, one) for each, one in zip([backend, other] * 16, jobs, strict=True))
            )
            for one, got in zip(jobs, answers, strict=True):
                assert got.tokens[0] == expected(one.prompt, 50)
            async with backend.dispatcher.generate(job(backend, tokens=30_000)) as generation:
                await answer(generation, until=3)
            await wait_until(lambda: _running(backend) == 0)
            card = backend.roster.find("echo")
            encode = EncodeJob(request_id=keys.incarnation(), card=card, inputs=[[1, 2, 3]])
            async with backend.dispatcher.encode(encode) as encoding:
                assert await encoding.events()
            long = list(range(1, 200))
            await run_job(backend, job(backend, long, tokens=2))
            for each in (backend, other):
                await wait_until(lambda each=each: len(each.index) >= 12)
    tags = {bytes(key).split(b"}")[0] for key in cluster.names()}
    assert len(tags) >= 4
    owners = {cluster.owner(keys.roster()).port, cluster.owner(keys.digests()).port}
    assert len(owners) == 2  # so the reader did need more than one connection


def _running(backend) -> int:
    return sum(
        backend.roster.get(name).load.running + len(backend.roster.get(name).placed)
        for name in backend.roster.workers
    )


async def test_a_replica_takes_over_and_no_answer_is_lost(wait_until: WaitUntil) -> None:
    with cluster_running(replicas=1) as cluster:
        async with connect(_settings(cluster.url)) as backend:
            with workers(cluster.url, 2, delay_ms=10):
                await wait_until(lambda: len(backend.roster.workers) == 2)
                jobs = [job(backend, [n + 1, 9], tokens=300) for n in range(20)]
                clients = [asyncio.create_task(run_job(backend, one)) for one in jobs]
                await wait_until(
                    lambda: sum(r.has_begun for r in backend.dispatcher._running) == 20, PATIENCE_S
                )
                cluster.owner(keys.reply(backend.gateway)).kill()
                async with asyncio.timeout(PATIENCE_S):
                    answers = await asyncio.gather(*clients)
                for one, got in zip(jobs, answers, strict=True):
                    assert got.tokens[0] == expected(one.prompt, 300)
                assert (await run_job(backend, job(backend, tokens=5))).count == 5


async def test_without_a_replica_requests_are_refused_until_the_node_is_back(
    wait_until: WaitUntil,
) -> None:
    with cluster_running() as cluster:
        async with connect(_settings(cluster.url)) as backend:
            with workers(cluster.url, 1, delay_ms=5):
                await wait_until(lambda: backend.roster.ready)
                one = job(backend, tokens=400)
                async with backend.dispatcher.generate(one) as generation:
                    got = await answer(generation, until=5)
                    node = cluster.owner(keys.work(backend.roster.workers[0]))
                    node.kill()
                    with pytest.raises(BusError) as refused:
                        await run_job(backend, job(backend))
                    assert refused.value.retryable
                    node.start()
                    got = await answer(generation, so_far=got)
                assert got.tokens[0] == expected(one.prompt, 400)
                await _served_again(backend)


async def _served_again(backend: Backend) -> None:
    """Refusals end with the node's return, though not at once: a pipe asks anew now and then."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(BusError):
                assert (await run_job(backend, job(backend, tokens=5))).count == 5
                return
            await asyncio.sleep(0.05)


async def test_a_sentinels_failover_costs_a_pause(wait_until: WaitUntil) -> None:
    with watched_running() as watched:
        async with connect(_settings(watched.url)) as backend:
            with workers(watched.url, 2, delay_ms=10):
                await wait_until(lambda: len(backend.roster.workers) == 2)
                jobs = [job(backend, [n + 1, 9], tokens=300) for n in range(10)]
                clients = [asyncio.create_task(run_job(backend, one)) for one in jobs]
                await wait_until(
                    lambda: sum(r.has_begun for r in backend.dispatcher._running) == 10, PATIENCE_S
                )
                watched.primary.kill()
                async with asyncio.timeout(PATIENCE_S):
                    answers = await asyncio.gather(*clients)
                for one, got in zip(jobs, answers, strict=True):
                    assert got.tokens[0] == expected(one.prompt, 300)
