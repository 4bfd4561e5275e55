"""Redis dies, forgets, stands still and finds no room, under load. More on it alone is in
`tests/gateway/test_redis_storms.py`; here is what clients and books see of the whole."""

import contextlib
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from chaos_house import ECHO, House
from dice import OFFSETS, Moments
from fleet_house import KEY, Fleet
from forebay_shared import keys
from load import Load
from patience import crowd
from redis_clock import Clock, redis_with_a_clock
from redis_house import RedisServer, redis_running
from requests_mix import echo_mix, echo_stream, shared_mix
from serve_house import until

pytestmark = [pytest.mark.system, pytest.mark.chaos]


def test_18_redis_killed_and_started_with_its_data(
    house: House, rng: random.Random, moments: Moments
) -> None:
    """What runs pauses and goes on; what comes meanwhile waits, or is refused with a hint."""
    with house.metered("forebay_redis_reconnects_total", still=("forebay_given_up_total",)):
        for moment in moments(20, 600):
            with house.trial(rng, ends=("ok", "refused", "broken")) as load:
                load.flow(moment)
                house.redis.kill()
                time.sleep(rng.uniform(0, 3))  # the outage itself
                house.redis.start()
                load.flow(100)
            assert load.ends["ok"] > 5
            assert not load.ends["broken"], "an outage shorter than 8 s ends no stream"


def test_19_redis_emptied(house: House, rng: random.Random, moments: Moments) -> None:
    """Streams are made anew, what was in them is asked again, and nobody asks all the time."""
    with house.metered("forebay_streams_lost_total"):
        for moment in moments(20, 600):
            ends = ("ok", "refused", "broken")
            with house.trial(rng, ends=ends, keys=[KEY], books=False) as load:
                load.flow(moment)
                house.redis.client.flushall()
                began = time.monotonic()
                load.flow(100)
                assert time.monotonic() - began < 10 * crowd()
            assert load.ends["ok"] > 5
    house.make_teams()
    house.balance.forget()


def test_33_while_redis_stands_still_no_unknown_key_opens(
    house: House, rng: random.Random, moments: Moments
) -> None:
    """A key that is known, or not, gets a 503 or waits; an unknown one is never let in."""
    with house.metered("forebay_auth_refused_total"):
        for moment in moments(20, 300):
            with house.trial(rng, ends=("ok", "refused", "broken")) as load:
                load.flow(moment)
                house.redis.pause()
                try:
                    for gateway in house.gateways:
                        assert httpx.get(gateway.base + "/health", timeout=5).status_code == 200
                        answer = gateway.get("/v1/models", key="sk-fb-" + "0" * 40)
                        assert answer is not None
                        assert answer.status_code in (401, 503)
                    time.sleep(rng.uniform(0, 3))  # the outage itself
                finally:
                    house.redis.go_on()
                load.flow(100)


@pytest.fixture
def small_disk() -> Iterator[tuple[RedisServer, Path]]:
    """A Redis whose file is on a disk of 8 MB."""
    disk = Path(tempfile.mkdtemp(prefix="fb-disk-"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "forebay", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        disk.rmdir()
        pytest.skip("a disk of 8 MB needs the right to mount one")
    try:
        with redis_running() as redis:
            redis.kill()
            redis.start("--dir", str(disk))
            yield redis, disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
        disk.rmdir()


def _fill(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(65_536))


def _cannot_write(redis: RedisServer) -> bool:
    return redis.client.info("persistence")["aof_last_write_status"] == "err"


def test_37_redis_finds_its_disk_full(
    small_disk: tuple[RedisServer, Path], rng: random.Random
) -> None:
    """It takes no writes until there is room again: what runs pauses, the books are whole."""
    redis, disk = small_disk
    house = House(redis)
    try:
        with house.metered('forebay_admissions_total{outcome="unavailable"}'):
            for _ in range(OFFSETS):
                with house.trial(rng, ends=("ok", "refused", "broken")) as load:
                    load.flow(rng.randint(20, 400))
                    filler = disk / "filler"
                    _fill(filler)
                    until(lambda: _cannot_write(redis))
                    load.start([echo_stream(rng, 20)])
                    until(lambda: any(one.status == 503 for one in load.outcomes))
                    time.sleep(rng.uniform(0, 2))  # the outage itself
                    filler.unlink()
                    redis.client.bgrewriteaof()
                    load.flow(100)
    finally:
        house.close()


def test_37_logs_that_cannot_be_written_stop_nobody() -> None:
    """The disk of the logs is full: every line of a gateway and of a worker is an error."""
    with redis_running() as redis, Path("/dev/full").open("w") as full:
        fleet = Fleet(redis)
        try:
            gateway = fleet.gateway(FOREBAY_LOG_LEVEL="debug", log=full)
            workers = [fleet.worker(*ECHO, FOREBAY_LOG_LEVEL="debug", log=full) for _ in range(2)]
            fleet.ready(gateway, 2)
            with Load([gateway.base], [KEY], echo_mix, random.Random(37), 6) as load:
                load.flow(300)
                workers[0].kill()
                load.flow(300)
            load.only("ok")
            until(lambda: gateway.metric("forebay_log_lines_lost_total") > 0)
        finally:
            fleet.close()


HOUR_S = 3600
_SLOTS = 2
LONG = 700
"""Tokens of a stream that outlasts the looks at a moment, at 10 ms each."""


@pytest.fixture
def leaping() -> Iterator[tuple[House, Clock]]:
    with redis_with_a_clock() as (redis, clock):
        house = House(redis)
        try:
            yield house, clock
        finally:
            house.close()


def _bounded(house: House) -> dict[str, str]:
    """The keys of teams that have little: slots, tokens for ever and for a month, and one request a
    minute for each moment."""
    budgets = [{"amount": 30, "unit": "tokens", "window": window} for window in ("total", "month")]
    bounds = {
        "slots": {"limits": {"concurrent_requests": _SLOTS}},
        "total": {"budgets": budgets[:1]},
        "month": {"budgets": budgets[1:]},
        **{f"rate-{number}": {"limits": {"requests_per_minute": 1}} for number in range(OFFSETS)},
    }
    return house.add_teams(bounds)


def test_35_the_clock_of_redis_jumps_by_an_hour(
    leaping: tuple[House, Clock], rng: random.Random, moments: Moments
) -> None:
    """Forward and back in turn: what runs goes on without a pause, and who has used up slots,
    rates or budgets has not got them back."""
    house, clock = leaping
    keyring, redis = _bounded(house), house.redis.client
    spent = list[str]()

    def ask(load: Load, key: str, tokens: int, status: int) -> None:
        one = replace(echo_stream(rng, tokens), key=key, refused=status if status != 200 else None)
        load.start([one])
        if tokens < LONG:
            until(lambda: any(outcome.ask is one for outcome in load.outcomes))

    def all_refused(load: Load, number: int) -> None:
        for name in ("slots", f"rate-{number}", *spent):
            ask(load, keyring[name], 5, 429)

    still = ("workers_lost", "resubmitted", "streams_lost", "leases_lost", "strays_cleared",
             "dropped_replies", "lost_requests", "cancelled")  # fmt: skip
    counters = [f"forebay_{name}_total" for name in still]
    with house.metered("forebay_redis_clock_leaps_total", still=counters):
        for number, moment in enumerate(moments(20, 300)):
            with house.trial(rng, mix=shared_mix, clients=4) as load:
                load.flow(moment)
                for _ in range(_SLOTS):
                    ask(load, keyring["slots"], LONG, 200)
                until(lambda: redis.zcard(keys.slots("team:slots")) == _SLOTS)
                ask(load, keyring[f"rate-{number}"], 5, 200)
                if not spent:
                    ask(load, keyring["total"], 40, 200)
                    ask(load, keyring["month"], 40, 200)
                    spent = ["total", "month"]
                leaps = house.metric("forebay_redis_clock_leaps_total")
                all_refused(load, number)
                clock.jump(HOUR_S if number % 2 == 0 else -HOUR_S)
                all_refused(load, number)
                until(lambda n=leaps: house.metric("forebay_redis_clock_leaps_total") > n)
                all_refused(load, number)
                load.flow(100)
