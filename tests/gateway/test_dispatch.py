"""Jobs through a real Redis and real workers: killed, stopped, restarted, flooded with cancels."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator

import msgspec
import pytest
from bus_house import (
    LONG_LEASE_S,
    Answer,
    WorkerProcess,
    answer,
    expected,
    job,
    run_job,
    workers,
)
from forebay_gateway import dispatch, roster
from forebay_gateway.attempts import MAX_ATTEMPTS, SUSPECT_AFTER
from forebay_gateway.backend import Backend, connect
from forebay_gateway.dispatch import BUS_AWAY_S
from forebay_gateway.generation import Generation
from forebay_shared import keys
from forebay_shared.books import Outcome
from forebay_shared.errors import (
    BusError,
    ContextLengthError,
    EngineError,
    ForebayError,
    NoWorkerError,
    OverloadedError,
)
from forebay_shared.packets import REPLY, WORK
from forebay_shared.settings import GatewaySettings, Secret
from forebay_shared.wire import Accepted, Delta, Submit, Usage
from forebay_worker.trials import TRIAL_TOKENS
from patience import PATIENCE_S
from redis_house import RedisServer, WaitUntil

LOSSES = SUSPECT_AFTER + 2
LEASE_S = 5.0
"""Twice the usual: a machine that pauses for 3 s costs nobody else a lease."""


@pytest.fixture
def slow_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job waits for a worker as long as that takes to start, on whatever machine."""
    monkeypatch.setattr(dispatch, "REPLACE_S", PATIENCE_S)


def _lease(monkeypatch: pytest.MonkeyPatch, lease_s: float) -> None:
    """That of a worker, as the gateway sees it."""
    monkeypatch.setattr(roster, "LEASE_S", lease_s)


@pytest.fixture
async def backend(redis_url: str) -> AsyncIterator[Backend]:
    async with connect(GatewaySettings(redis_url=Secret(redis_url))) as one:
        yield one
        assert len(one.inbox) == 0
        assert len(one.dispatcher) == 0


def _count(backend: Backend, name: str, **labels: str) -> float:
    return backend.telemetry.registry.get_sample_value(f"forebay_{name}_total", labels) or 0.0


async def _send(backend: Backend, worker: str, packet: bytes) -> None:
    """A worker's first beacon may come before it has made its stream."""
    stream = keys.work(worker)
    while await backend.publisher.publish(stream, packet, keys.WORK_MAXLEN) is None:  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def _idle(backend: Backend, wait_until: WaitUntil) -> None:
    """Waits until every worker has reported, from now on, that nothing runs."""
    names = backend.roster.workers
    now = asyncio.get_running_loop().time()

    def idle() -> bool:
        living = [worker for name in names if (worker := backend.roster.get(name)) is not None]
        return all(
            worker.seen_at > now and worker.load.running + worker.load.waiting == 0
            for worker in living
        )

    await wait_until(idle)


async def test_n_sequences_arrive_whole_and_in_order(
    backend: Backend, redis_url: str, wait_until: WaitUntil
) -> None:
    with workers(redis_url, 1):
        await wait_until(lambda: backend.roster.ready)
        got = await run_job(backend, job(backend, tokens=50, n=3))
        assert got.tokens == {index: expected((1, 2, 3), 50, index) for index in range(3)}
        assert [done.finish_reason for done in got.done.values()] == ["length"] * 3
        assert got.done[0].usage.completion_tokens == 50


async def test_what_the_engine_refuses_is_raised_as_it_is(
    backend: Backend, redis_url: str, wait_until: WaitUntil
) -> None:
    with workers(redis_url, 1):
        await wait_until(lambda: backend.roster.ready)
        with pytest.raises(ContextLengthError) as caught:
            await run_job(backend, job(backend, [65] * 40_000))
        assert caught.value.param == "prompt"


async def test_a_full_queue_is_refused_at_once_when_there_is_no_other_worker(
    backend: Backend, redis_url: str, wait_until: WaitUntil
) -> None:
    with workers(redis_url, 1):
        await wait_until(lambda: backend.roster.ready)
        with pytest.raises(OverloadedError) as caught:
            await run_job(backend, job(backend, n=2000))
        assert caught.value.code == "overloaded"
        assert _count(backend, "resubmitted", reason="failed") == 0


async def test_no_worker_in_time_is_a_503_with_a_hint(
    redis_url: str, wait_until: WaitUntil
) -> None:
    settings = GatewaySettings(redis_url=Secret(redis_url), queue_timeout_s=0.3)
    async with connect(settings) as backend:
        with workers(redis_url, 1) as running:
            await wait_until(lambda: backend.roster.ready)
            one = job(backend)
            running[0].send(signal.SIGTERM)
            await wait_until(lambda: not backend.roster.ready)
        with pytest.raises(NoWorkerError) as caught:
            await run_job(backend, one)
        assert caught.value.retry_after_s is not None


@pytest.mark.usefixtures("slow_starts")
async def test_a_job_waits_for_a_worker_that_comes(
    backend: Backend, redis_url: str, wait_until: WaitUntil
) -> None:
    with workers(redis_url, 1) as running:
        await wait_until(lambda: backend.roster.ready)
        one = job(backend)
        running[0].send(signal.SIGTERM)
        await wait_until(lambda: not backend.roster.ready)
        waiting = asyncio.create_task(run_job(backend, one))
        running.append(WorkerProcess(redis_url, 0, 1))
        assert (await waiting).count == 8


@pytest.mark.parametrize("after", [0, 20], ids=["before the first token", "after tokens"])
@pytest.mark.chaos
@pytest.mark.usefixtures("slow_starts")
async def test_a_killed_worker_is_replaced_and_the_answer_equals_an_undisturbed_one(
    backend: Backend, redis_url: str, wait_until: WaitUntil, after: int
) -> None:
    with workers(redis_url, 1, delay_ms=20) as running:
        await wait_until(lambda: backend.roster.ready)
        async with asyncio.timeout(PATIENCE_S):
            async with backend.dispatcher.generate(job(backend, tokens=60, n=2)) as generation:
                if not after:
                    running[0].send(signal.SIGSTOP)
                first = asyncio.create_task(answer(generation, until=max(after, 1)))
                if after:
                    await first
                else:
                    await wait_until(lambda: generation.placement is not None)
                running.append(WorkerProcess(redis_url, 20, 1))
                running[0].kill()
                got = await first
                await answer(generation, so_far=got)
    assert got.tokens == {index: expected((1, 2, 3), 60, index) for index in range(2)}
    assert len(got.started) == len(got.done) == 2
    assert got.done[1].usage.completion_tokens == 60


@pytest.mark.chaos
@pytest.mark.usefixtures("slow_starts")
async def test_replies_of_a_zombie_are_dropped(
    backend: Backend, redis_url: str, wait_until: WaitUntil
) -> None:
    lost: list[str] = []
    backend.roster.on_lost(lost.append)
    with workers(redis_url, 1, delay_ms=10) as running:
        await wait_until(lambda: backend.roster.ready)
        zombies = backend.roster.workers
        async with backend.dispatcher.generate(job(backend, tokens=600)) as generation:
            got = await answer(generation, until=5)
            running[0].send(signal.SIGSTOP)
            running.append(WorkerProcess(redis_url, 10, 1))
            await answer(generation, until=20, so_far=got)
            assert lost[:1] == zombies
            assert _count(backend, "workers_lost") == len(lost)
            running[0].send(signal.SIGCONT)
            await wait_until(lambda: _count(backend, "dropped_replies", reason="fenced") > 0)
            await answer(generation, so_far=got)
        assert got.tokens[0] == expected((1, 2, 3), 600)
        await wait_until(lambda: len(backend.roster.workers) == 2)
        await _idle(backend, wait_until)


async def test_a_repeated_submit_runs_once(
    backend: Backend, redis_url: str, wait_until: WaitUntil
) -> None:
    with workers(redis_url, 1):
        await wait_until(lambda: backend.roster.ready)
        (worker,) = backend.roster.workers
        one = job(backend, tokens=5)
        async with backend.dispatcher.generate(one) as generation:
            got = await answer(generation, until=1)
            submit = Submit(
                request_id=one.request_id, attempt=1, gateway=backend.gateway,
                prompt=b"\1\0\0\0", sampling=one.sampling,
            )  # fmt: skip
            packet = WORK.encode(backend.gateway, [submit, submit])
            await _send(backend, worker, packet)
            await answer(generation, so_far=got)
        assert got.tokens[0] == expected((1, 2, 3), 5)

        await _idle(backend, wait_until)


async def test_leaving_and_stopping_free_the_worker(
    backend: Backend, redis_url: str, wait_until: WaitUntil
) -> None:
    with workers(redis_url, 1, delay_ms=5):
        await wait_until(lambda: backend.roster.ready)
        async with backend.dispatcher.generate(job(backend, tokens=30_000, n=2)) as generation:
            await answer(generation, until=4)
            generation.stop(0)
            events = await generation.events()
            assert {event.index for event in events} == {1}
            generation.stop(1)
            assert await generation.events() == []
        async with backend.dispatcher.generate(job(backend, tokens=30_000)) as generation:
            await answer(generation, until=2)
        task = asyncio.create_task(run_job(backend, job(backend, tokens=30_000)))
        await wait_until(lambda: len(backend.inbox) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _idle(backend, wait_until)
        metrics = await backend.metrics()
        assert 'finished_reason="abort"' in metrics


async def test_the_books_balance_after_a_storm_of_cancels(
    backend: Backend, redis_url: str, wait_until: WaitUntil
) -> None:
    random.seed(3)
    with workers(redis_url, 2, delay_ms=1):
        await wait_until(lambda: len(backend.roster.workers) == 2)
        await wait_until(
            lambda: len(backend.roster.candidates(backend.roster.find("echo")).workers) == 2
        )

        async def client(number: int) -> None:
            prompt = [number % 200 + 1, 7, 9]
            one = job(backend, prompt, tokens=random.randint(1, 60), n=random.randint(1, 3))
            async with asyncio.timeout(random.choice([0.01, 0.05, 0.2, 60])):
                got = await run_job(backend, one)
            for index, tokens in got.tokens.items():
                assert tokens == expected(prompt, one.sampling.max_tokens, index)

        clients = [asyncio.create_task(client(number)) for number in range(400)]
        results = await asyncio.gather(*clients, return_exceptions=True)
        assert {type(result) for result in results} == {type(None), TimeoutError}
        assert len(backend.inbox) == len(backend.dispatcher) == 0
        await _idle(backend, wait_until)
        for name in backend.roster.workers:
            worker = backend.roster.get(name)
            assert worker is not None
            assert not worker.placed


@pytest.mark.chaos
@pytest.mark.parametrize("empty", [False, True], ids=["with its data", "empty"])
async def test_a_restart_of_redis_leaves_no_client_hanging(
    redis_server: RedisServer, wait_until: WaitUntil, empty: bool
) -> None:
    settings = GatewaySettings(redis_url=Secret(redis_server.url))
    async with connect(settings) as backend:
        with workers(redis_server.url, 2, delay_ms=10):
            await wait_until(lambda: len(backend.roster.workers) == 2)
            await wait_until(lambda: backend.roster.ready)
            jobs = [job(backend, [number + 1, 9], tokens=300) for number in range(20)]
            clients = [asyncio.create_task(run_job(backend, one)) for one in jobs]
            await wait_until(lambda: backend.inbox.tokens >= 0 and len(backend.inbox) == 20)
            await run_job(backend, job(backend, tokens=5))
            redis_server.kill()
            late = [job(backend, [number + 1, 9], tokens=300) for number in range(20)]
            clients += [asyncio.create_task(run_job(backend, one)) for one in late]
            await wait_until(lambda: not backend.connected)
            if empty:
                redis_server.forget()
            redis_server.start()
            async with asyncio.timeout(PATIENCE_S):
                results = await asyncio.gather(*clients, return_exceptions=True)
            for one, got in zip([*jobs, *late], results, strict=True):
                if isinstance(got, ForebayError):
                    assert got.retryable
                else:
                    assert isinstance(got, Answer)
                    assert got.tokens[0] == expected(one.prompt, 300)
            assert sum(isinstance(got, Answer) for got in results) >= 30
            assert len(backend.inbox) == 0


@pytest.mark.chaos
async def test_a_redis_that_stays_away_ends_every_wait(
    redis_server: RedisServer, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay_gateway.dispatch.BUS_GONE_S", BUS_AWAY_S)
    async with connect(GatewaySettings(redis_url=Secret(redis_server.url))) as backend:
        with workers(redis_server.url, 1, delay_ms=10):
            await wait_until(lambda: backend.roster.ready)
            running = asyncio.create_task(run_job(backend, job(backend, tokens=30_000)))
            await run_job(backend, job(backend, tokens=5))
            redis_server.kill()
            fresh = asyncio.create_task(run_job(backend, job(backend)))
            async with asyncio.timeout(PATIENCE_S):
                for client in (running, fresh):
                    with pytest.raises((BusError, OverloadedError)):
                        await client


@pytest.mark.chaos
async def test_clients_that_leave_during_an_outage_free_the_worker_after_it(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    async with connect(GatewaySettings(redis_url=Secret(redis_server.url))) as backend:
        with workers(redis_server.url, 1, delay_ms=5):
            await wait_until(lambda: backend.roster.ready)
            async with backend.dispatcher.generate(job(backend, tokens=30_000)) as generation:
                await answer(generation, until=3)
                redis_server.kill()
                await wait_until(lambda: not backend.connected)
            with pytest.raises(BusError):  # when this one gives up, so has the lane with the cancel
                await run_job(backend, job(backend))
            redis_server.start()
            await wait_until(lambda: backend.connected)
            answered = await run_job(backend, job(backend, tokens=5))
            assert answered.count == 5
            await _idle(backend, wait_until)


@pytest.mark.chaos
async def test_a_killed_gateway_frees_its_workers(redis_url: str, wait_until: WaitUntil) -> None:
    settings = GatewaySettings(redis_url=Secret(redis_url))
    with workers(redis_url, 1, delay_ms=5):
        async with connect(settings) as watcher:
            await wait_until(lambda: watcher.roster.ready)
            one = job(watcher, tokens=30_000)
            (name,) = watcher.roster.workers
            orphan = Submit(
                request_id="orphan", attempt=1, gateway="dead", prompt=b"\1\0\0\0",
                sampling=one.sampling,
            )  # fmt: skip
            packet = WORK.encode("dead", [orphan])
            await watcher.publisher.call("SET", keys.gateway_lease("dead"), "1", "PX", 60_000)
            await _send(watcher, name, packet)
            worker = watcher.roster.get(name)
            assert worker is not None
            await wait_until(lambda: worker.load.running == 1)
            await watcher.publisher.call("DEL", keys.gateway_lease("dead"))
            await wait_until(lambda: worker.load.running == 0)
            assert await watcher.publisher.call("EXISTS", keys.reply("dead")) == 0


async def test_sigterm_lets_running_jobs_finish(
    backend: Backend, redis_url: str, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    _lease(monkeypatch, LONG_LEASE_S)
    with workers(redis_url, 1, delay_ms=5, drain_s=PATIENCE_S, lease_s=LONG_LEASE_S) as running:
        await wait_until(lambda: backend.roster.ready)
        async with backend.dispatcher.generate(job(backend, tokens=200)) as generation:
            got = await answer(generation, until=1)
            running[0].send(signal.SIGTERM)
            await wait_until(lambda: not backend.roster.ready)
            await answer(generation, so_far=got)
        assert got.tokens[0] == expected((1, 2, 3), 200)
        assert await asyncio.to_thread(running[0].process.wait) == 0
        assert _count(backend, "resubmitted", reason="worker_lost") == 0


async def test_what_a_drain_cannot_finish_goes_to_another_worker(
    backend: Backend, redis_url: str, wait_until: WaitUntil
) -> None:
    with workers(redis_url, 1, delay_ms=5, drain_s=0.2) as running:
        await wait_until(lambda: backend.roster.ready)
        (first,) = backend.roster.workers
        running.append(WorkerProcess(redis_url, 5, 0.2))
        await wait_until(lambda: len(backend.roster.workers) == 2)
        async with backend.dispatcher.generate(job(backend, tokens=1000)) as generation:
            got = await answer(generation, until=1)
            assert generation.placement is not None
            busy = running[0 if generation.placement.worker == first else 1]
            busy.send(signal.SIGTERM)
            await answer(generation, so_far=got)
        assert got.tokens[0] == expected((1, 2, 3), 1000)
        assert _count(backend, "resubmitted", reason="drained") == 1


async def test_a_gap_in_the_replies_is_closed_by_another_attempt(
    backend: Backend, redis_url: str, wait_until: WaitUntil
) -> None:
    with workers(redis_url, 1, delay_ms=10):
        await wait_until(lambda: backend.roster.ready)
        async with backend.dispatcher.generate(job(backend, tokens=50)) as generation:
            got = await answer(generation, until=3)
            forged = Delta(generation.job.request_id, 1, 0, 45, [99])
            packet = REPLY.encode("forger", [forged])
            stream = keys.reply(backend.gateway)
            await backend.publisher.publish(stream, packet, keys.REPLY_MAXLEN)
            await answer(generation, so_far=got)
        assert got.tokens[0] == expected((1, 2, 3), 50)
        assert _count(backend, "resubmitted", reason="gap") == 1


async def _until_moved(generation: Generation, attempt: int, got: Answer) -> None:
    """Takes what comes until the attempt is over and another one has answered."""
    while generation.placement is not None and generation.placement.attempt == attempt:
        got.take(await generation.events())


class Bill:
    """Admits everything and keeps what is settled."""

    def __init__(self) -> None:
        self.settled: list[tuple[Usage, Outcome, int]] = []

    async def admit(self, request_id: str, input_tokens: int, output_tokens: int) -> "Bill":
        return self

    def settle(self, usage: Usage, outcome: Outcome, attempts: int, _: int | None) -> None:
        self.settled.append((usage, outcome, attempts))


@pytest.mark.chaos
async def test_a_job_goes_on_behind_any_workers_that_others_ran_on_and_is_billed_for_what_was_sent(
    backend: Backend, redis_url: str, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the third on it is begun alone, and no longer is when that is lost."""
    bill = Bill()
    _lease(monkeypatch, LEASE_S)
    with workers(redis_url, 1, delay_ms=20, lease_s=LEASE_S) as running:
        await wait_until(lambda: backend.roster.ready)
        one = msgspec.structs.replace(job(backend, tokens=30_000), toll=bill)
        got = Answer()
        async with backend.dispatcher.generate(one) as generation:
            for attempt in range(1, LOSSES + 1):
                await answer(generation, until=got.count + 2 * TRIAL_TOKENS, so_far=got)
                running.append(WorkerProcess(redis_url, 20, 1, lease_s=LEASE_S))
                await wait_until(lambda: len(backend.roster.workers) == 2)
                running[-2].kill()
                await _until_moved(generation, attempt, got)
                assert generation.suspect == (attempt >= SUSPECT_AFTER)
            await answer(generation, until=got.count + 5, so_far=got)
        assert got.tokens[0] == expected((1, 2, 3), got.count)
        await wait_until(lambda: len(bill.settled) == 1)
        assert bill.settled[0][1:] == ("cancelled", LOSSES + 1)
        assert _count(backend, "given_up") == 0
        await _idle(backend, wait_until)


async def test_a_job_that_was_alone_on_a_lost_worker_is_given_up_and_billed_for_what_was_sent(
    backend: Backend, redis_url: str, wait_until: WaitUntil
) -> None:
    bill = Bill()
    with workers(redis_url, 1, delay_ms=20) as running:
        await wait_until(lambda: backend.roster.ready)
        one = msgspec.structs.replace(job(backend, tokens=30_000), toll=bill)
        got = Answer()

        async def lose_it_alone() -> None:
            async with backend.dispatcher.generate(one) as generation:
                await answer(generation, until=5, so_far=got)
                alone = REPLY.encode("forger", [Accepted(one.request_id, 1, alone=True)])
                stream = keys.reply(backend.gateway)
                await backend.publisher.publish(stream, alone, keys.REPLY_MAXLEN)
                await answer(generation, until=got.count + 5, so_far=got)
                running[0].kill()
                await answer(generation, so_far=got)

        with pytest.raises(EngineError, match="not tried again"):
            await lose_it_alone()
        [(usage, outcome, attempts)] = bill.settled
        assert (usage.prompt_tokens, usage.completion_tokens) == (3, got.count)
        assert (outcome, attempts) == ("error", 1)
        assert _count(backend, "given_up") == 1


async def test_being_handed_over_does_not_count_among_the_attempts(
    backend: Backend, redis_url: str, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    bill = Bill()
    _lease(monkeypatch, LONG_LEASE_S)
    with workers(redis_url, 1, delay_ms=5, drain_s=0.0, lease_s=LONG_LEASE_S) as running:
        await wait_until(lambda: backend.roster.ready)
        one = msgspec.structs.replace(job(backend, tokens=30_000), toll=bill)
        got = Answer()
        async with backend.dispatcher.generate(one) as generation:
            for attempt in range(1, MAX_ATTEMPTS + 2):
                await answer(generation, until=got.count + 5, so_far=got)
                assert generation.placement is not None
                assert generation.placement.attempt == attempt
                running.append(WorkerProcess(redis_url, 5, 0, lease_s=LONG_LEASE_S))
                await wait_until(lambda: len(backend.roster.workers) == 2)
                running[-2].send(signal.SIGTERM)
                await _until_moved(generation, attempt, got)
                await wait_until(lambda: len(backend.roster.workers) == 1)  # the old one has left
            await answer(generation, until=got.count + 5, so_far=got)
        assert got.tokens[0] == expected((1, 2, 3), got.count)
        assert _count(backend, "resubmitted", reason="drained") == MAX_ATTEMPTS + 1
        await wait_until(lambda: len(bill.settled) == 1)
        assert bill.settled[0][1:] == ("cancelled", MAX_ATTEMPTS + 2)
