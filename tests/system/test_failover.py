"""Workers that stop, hang or die one after the other, and clocks that jump: what clients see, and
what the metrics say of it. All parts are real processes."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
from fleet_house import AUTH, LONG_LEASE_S, Fleet, Gateway, Worker, fleet, stream
from forebay_worker.alarm import EXIT_CODE
from forebay_worker.watchdog import LOOK_S
from patience import PATIENCE_S
from redis_house import redis_running
from serve_house import until
from transcripts import check_error, check_stream

pytestmark = [pytest.mark.system, pytest.mark.chaos]

COMPLETIONS = "/v1/completions"
HOUR_S = 3600
LEASE_S = 5.0
"""Twice the usual: a machine that pauses for 3 s costs nobody else a lease."""


@pytest.fixture
def house() -> Iterator[Fleet]:
    with redis_running() as redis, fleet(redis, LEASE_S) as processes:
        yield processes


@pytest.fixture
def patient() -> Iterator[Fleet]:
    with redis_running() as redis, fleet(redis, LONG_LEASE_S) as processes:
        yield processes


def _body(tokens: int, **more: object) -> dict:
    return {"model": "echo", "prompt": "abcdef", "max_tokens": tokens, **more}


def _check(raw: bytes, tokens: int) -> None:
    heard = check_stream(raw, model="echo", chat=False)
    assert heard.texts[0] == ("abcdef" * tokens)[:tokens]


def _idle(gateway: Gateway) -> bool:
    return gateway.metric("vllm:num_requests_running") == 0


def test_a_zombie_is_fenced_drops_its_work_and_serves_again(house: Fleet) -> None:
    gateway = house.gateway()
    for _ in range(2):
        house.echo(10.0)
    house.ready(gateway, 2)

    def seen(count: int) -> None:
        if count == 10:
            zombie = house.holder(0)
            zombie.send(signal.SIGSTOP)
            stopped = time.monotonic()
            until(lambda: len(house.placements) == 2)
            assert house.placements[1] != zombie.name
            # Another has taken over, a little before the zombie itself can know.
            until(lambda: time.monotonic() - stopped > LEASE_S + LOOK_S)
            zombie.send(signal.SIGCONT)
            until(lambda: "lost its lease" in zombie.log)

    _check(stream(gateway, COMPLETIONS, _body(1500), seen), 1500)
    zombie = house.holder(0).name
    until(lambda: gateway.metric("forebay_leases_lost_total", engine=zombie) >= 1)
    until(lambda: gateway.metric("forebay_fenced_requests_total", engine=zombie) == 1)
    until(lambda: any(gateway.metric("forebay_dropped_replies_total", reason=why) for why in _LATE))
    house.ready(gateway, 2)
    until(lambda: _idle(gateway))
    assert gateway.metric("forebay_resubmitted_total") == 1
    other = house.workers[house.placements[1]]
    other.kill()
    _check(stream(gateway, COMPLETIONS, _body(20)), 20)
    until(lambda: house.placements[-1] == zombie)


_LATE = ("fenced", "unknown")


def test_a_step_that_hangs_ends_its_worker_and_nothing_else(house: Fleet) -> None:
    gateway = house.gateway()
    for _ in range(2):
        house.echo(10.0, "--step-timeout-s", "6", TEST_HANG="1")
    house.ready(gateway, 2)
    hanging: list[Worker] = []

    def seen(count: int) -> None:
        if count == 10:
            hanging.append(house.holder(0))
            hanging[0].hang()
            until(lambda: gateway.metric("forebay_step_age_seconds") > 1)

    _check(stream(gateway, COMPLETIONS, _body(1000), seen), 1000)
    assert hanging[0].process.wait(PATIENCE_S) == 1
    assert "The engine hangs" in hanging[0].log
    until(lambda: gateway.metric("forebay_workers_lost_total") == 1)
    assert gateway.metric("forebay_resubmitted_total") == 1
    until(lambda: len(set(house.placements)) == 2)


def test_a_thread_that_keeps_the_interpreter_ends_its_worker_too(house: Fleet) -> None:
    hanging = house.echo(0.0, "--step-timeout-s", "1", TEST_SEIZE="1")
    assert hanging.process.wait(PATIENCE_S) == EXIT_CODE
    assert "Timeout" in hanging.log
    assert "seize" in hanging.log


POISON = "q" * 17
"""Of so many tokens: at its fifth a worker with TEST_POISON dies."""


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "in one piece"])
def test_what_ends_three_workers_is_given_up_and_nobody_beside_it(
    house: Fleet, streamed: bool
) -> None:
    """Its neighbours lose two workers with it, and it is alone on the third."""
    gateway = house.gateway()
    for _ in range(5):
        house.echo(20.0, TEST_POISON=str(len(POISON)))
    house.ready(gateway, 5)
    ended: list[bytes] = []
    with ThreadPoolExecutor() as pool:
        running = threading.Event()

        def neighbour() -> bytes:
            seen = threading.Event() if running.is_set() else running
            return stream(gateway, COMPLETIONS, _body(600), lambda _: seen.set())

        neighbours = [pool.submit(neighbour) for _ in range(8)]
        running.wait(PATIENCE_S)
        body = {**_body(3000), "prompt": POISON}
        if streamed:
            ended.append(stream(gateway, COMPLETIONS, body))
        else:
            url = gateway.base + COMPLETIONS
            answer = httpx.post(url, json=body, headers=AUTH, timeout=PATIENCE_S)
            assert answer.status_code == 500
            assert answer.headers["x-should-retry"] == "false"
            ended.append(answer.content)
        for each in neighbours:
            _check(each.result(PATIENCE_S), 600)
    if streamed:
        heard = check_stream(ended[0], model="echo", chat=False)
        assert heard.error is not None
        assert heard.error["code"] == "engine_error"
        assert heard.reasons == {}
        assert ended[0].count(b'"error"') == 1
        said = "".join(heard.texts.values())
        assert said == POISON[0] * len(said)
    else:
        check_error(ended[0], status=500)
        assert json.loads(ended[0])["error"]["code"] == "engine_error"
    assert len(house.workers) == 2
    assert gateway.metric("forebay_given_up_total") == 1
    _check(stream(gateway, COMPLETIONS, _body(20)), 20)
    until(lambda: _idle(gateway))


def test_a_suspect_is_begun_alone_and_who_ran_there_goes_on_behind_it(house: Fleet) -> None:
    """Two workers are killed under a sound answer. The third, the last one, has another's: that is
    handed over to where it was, and waits until the suspect has been tried."""
    gateway = house.gateway()
    for _ in range(3):
        house.echo(20.0)
    house.ready(gateway, 3)
    with ThreadPoolExecutor() as pool:
        neighbours: list[Future[bytes]] = []

        def seen(count: int) -> None:
            if count == 10:
                house.holder(0).kill()
            elif count == 60:
                neighbours.append(pool.submit(stream, gateway, COMPLETIONS, _body(600)))
                until(lambda: house.holder(2) is not house.holder(1))
                until(lambda: gateway.metric("vllm:num_requests_running") == 2)
                house.holder(1).kill()

        _check(stream(gateway, COMPLETIONS, _body(600), seen), 600)
        _check(neighbours[0].result(PATIENCE_S), 600)
    assert gateway.metric("forebay_resubmitted_total", reason="worker_lost") == 2
    assert gateway.metric("forebay_resubmitted_total", reason="drained") == 1
    assert gateway.metric("forebay_given_up_total") == 0


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
@pytest.mark.parametrize("whose", ["gateway", "worker"])
def test_a_clock_that_jumps_changes_nothing(patient: Fleet, whose: str, jump_s: int) -> None:
    clock = {"TEST_CLOCK": f"{jump_s}"}
    gateway = patient.gateway(**(clock if whose == "gateway" else {}))
    for _ in range(2):
        patient.echo(10.0, **(clock if whose == "worker" else {}))
    patient.ready(gateway, 2)

    def seen(count: int) -> None:
        if count == 10:
            for each in (gateway, *patient.workers.values()):
                each.jump()

    _check(stream(gateway, COMPLETIONS, _body(600), seen), 600)
    _check(stream(gateway, COMPLETIONS, _body(20)), 20)
    for name in ("workers_lost", "resubmitted", "redis_reconnects", "streams_lost", "leases_lost",
                 "strays_cleared", "dropped_replies"):  # fmt: skip
        assert gateway.metric(f"forebay_{name}_total") == 0, name
    leapt = 1 if whose == "gateway" else 2
    until(lambda: gateway.metric("forebay_clock_leaps_total") == leapt)
