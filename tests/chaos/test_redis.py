"""Redis dies, forgets, stands still and finds no room, under load. More on it alone is in
`tests/gateway/test_redis_storms.py`; here is what clients and books see of the whole."""

import contextlib
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from chaos_house import ECHO, House
from dice import OFFSETS, Moments
from fleet_house import KEY, Fleet
from load import Load
from patience import crowd
from redis_house import RedisServer, redis_running
from requests_mix import echo_mix
from serve_house import until

pytestmark = [pytest.mark.system, pytest.mark.chaos]


def test_18_redis_killed_and_started_with_its_data(
    house: House, rng: random.Random, moments: Moments
) -> None:
    """What runs pauses and goes on; what comes meanwhile waits, or is refused with a hint."""
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
    with house.moving("forebay_streams_lost_total"):
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


def test_37_redis_finds_its_disk_full(
    small_disk: tuple[RedisServer, Path], rng: random.Random
) -> None:
    """It takes no writes until there is room again: what runs pauses, the books are whole."""
    redis, disk = small_disk
    house = House(redis)
    try:
        for _ in range(OFFSETS):
            with house.trial(rng, ends=("ok", "refused", "broken")) as load:
                load.flow(rng.randint(20, 400))
                filler = disk / "filler"
                _fill(filler)
                until(lambda: redis.client.info("persistence")["aof_last_write_status"] == "err")
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
        finally:
            fleet.close()
