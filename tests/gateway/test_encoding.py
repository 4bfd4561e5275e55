"""Encode jobs through a real Redis and real workers: answered, sent again, cancelled."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence

import pytest
from bus_house import workers
from forebay_gateway.backend import Backend, connect
from forebay_gateway.encoding import EncodeLedger
from forebay_gateway.jobs import EncodeJob
from forebay_shared import keys
from forebay_shared.settings import GatewaySettings, Secret
from forebay_shared.wire import Accepted, Done, Embedded, Failed, Usage
from patience import PATIENCE_S
from redis_house import WaitUntil

SIZE = 32


@pytest.fixture
async def backend(redis_url: str) -> AsyncIterator[Backend]:
    async with connect(GatewaySettings(redis_url=Secret(redis_url))) as one:
        yield one
        assert len(one.inbox) == len(one.dispatcher) == 0


def _job(backend: Backend, *inputs: Sequence[int]) -> EncodeJob:
    card = backend.roster.find("echo")
    return EncodeJob(request_id=keys.incarnation(), card=card, inputs=inputs, normalize=False)


async def _run(backend: Backend, job: EncodeJob) -> list[list[float]]:
    async with backend.dispatcher.encode(job) as running:
        (answer,) = await running.events()
        assert await running.events() == []
    return [array("f", vector).tolist() for vector in answer.vectors]


async def test_vectors_come_back_in_order(
    backend: Backend, redis_url: str, wait_until: WaitUntil
) -> None:
    with workers(redis_url, 1):
        await wait_until(lambda: backend.roster.ready)
        first, second = await _run(backend, _job(backend, [1, 1, 2], [3]))
        assert (first[1], first[2], second[3]) == (2.0, 1.0, 1.0)


@pytest.mark.chaos
async def test_a_worker_killed_in_the_middle_is_replaced(
    backend: Backend, redis_url: str, wait_until: WaitUntil
) -> None:
    with workers(redis_url, 2, delay_ms=400) as running:
        await wait_until(lambda: len(backend.roster.workers) == 2)
        await wait_until(lambda: backend.roster.ready)
        jobs = [_job(backend, [number + 1, 9]) for number in range(20)]
        answers = [asyncio.create_task(_run(backend, job)) for job in jobs]
        await wait_until(lambda: len(backend.inbox) == 20)
        running[0].kill()
        async with asyncio.timeout(PATIENCE_S):
            found = await asyncio.gather(*answers)
        assert all(vectors[0][number + 1] > 0 for number, vectors in enumerate(found))


async def test_leaving_takes_the_job_off_the_worker(
    backend: Backend, redis_url: str, wait_until: WaitUntil
) -> None:
    with workers(redis_url, 1, delay_ms=300):
        await wait_until(lambda: backend.roster.ready)
        job = _job(backend, *[[1] * 2000] * 8)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await _run(backend, job)
        (name,) = backend.roster.workers
        now = asyncio.get_running_loop().time()

        def idle() -> bool:
            worker = backend.roster.get(name)
            return worker is not None and worker.seen_at > now and not worker.load.running

        await wait_until(idle)


def test_a_ledger_takes_one_answer_that_fits() -> None:
    from forebay_shared.settings import WorkerSettings
    from forebay_worker.engines.echo.engine import EchoEngine

    card = EchoEngine(WorkerSettings(engine="echo")).card
    job = EncodeJob(request_id="r", card=card, inputs=[[1]], dimensions=2)
    ledger = EncodeLedger(job)
    assert ledger.fold([Accepted("r", 1)]) == []
    assert ledger.accepted
    short = Embedded("r", 1, [b"\0" * 4], Usage())
    assert ledger.fold([short]) == []
    assert ledger.lost == "failed"
    ledger.begin()
    assert ledger.fold([Failed("r", 2, "engine_error", "x")]) == []
    assert ledger.failed is not None
    ledger.begin()
    assert ledger.fold([Done("r", 3, 0, "abort", None, Usage())]) == []
    assert ledger.lost == "failed"
    ledger.begin()
    right = Embedded("r", 4, [b"\0" * 8], Usage())
    assert ledger.fold([right, right]) == [right]
    assert not ledger.open
