"""Several hosts: gateways and workers with addresses of their own, links cut and healed.

Two gateways, two workers and Redis, each in a network namespace of its own.
"""

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from chaos_house import ECHO, House
from dice import Moments
from fleet_house import Gateway, Worker
from forebay_shared.link import ROUND_TRIP_S, Link
from hosts import REDIS, Hosts, missing
from load import Load
from patience import PATIENCE_S
from redis_house import RedisServer, redis_running
from requests_mix import COMPLETIONS, Ask, echo_mix
from serve_house import until

pytestmark = [pytest.mark.system, pytest.mark.chaos]

PORT, SLOW_PORT, DELAY_S = 6379, 6380, 0.1


class Apart(House):
    """Each process on a host of its own: `worker-0`, `gateway-0`, … `slow`: the workers' links."""

    def __init__(self, redis: RedisServer, hosts: Hosts, *, slow: bool = False) -> None:
        self.hosts = hosts
        self._slow = slow
        super().__init__(redis)

    def new_worker(self, number: int) -> Worker:
        host = f"worker-{number}"
        url = f"redis://127.0.0.1:{SLOW_PORT}" if self._slow else self._url(host)
        with self.hosts.inside(host):
            return self.fleet.worker(*ECHO, FOREBAY_REDIS_URL=url, **self.marks)

    def new_gateway(self, number: int, port: int = 0) -> Gateway:
        host = f"gateway-{number}"
        with self.hosts.inside(host):
            return self.fleet.gateway(
                host=self.hosts.doors[host].far,
                port=port,
                FOREBAY_REDIS_URL=self._url(host),
                **self.marks,
            )

    def _url(self, host: str) -> str:
        return f"redis://{self.hosts.links[host].near}:{PORT}"


HOSTS = ("gateway-0", "gateway-1", "worker-0", "worker-1")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if why := missing():
        pytest.skip(why)
    with Hosts(*HOSTS) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def far_redis(hosts: Hosts) -> Iterator[RedisServer]:
    """On a host of its own; the test looks at it through its Unix socket."""
    with redis_running() as redis:
        redis.kill()
        with hosts.inside(REDIS):
            redis.start("--port", str(PORT), "--bind", "0.0.0.0", "--protected-mode", "no")
        yield redis


@pytest.fixture
def apart(hosts: Hosts, far_redis: RedisServer) -> Iterator[Apart]:
    house = Apart(far_redis, hosts)
    try:
        yield house
    finally:
        for link in (*hosts.links.values(), *hosts.doors.values()):
            link.heal()
        house.close()
        far_redis.client.flushall()


def test_34_links_that_are_cut_and_healed(
    apart: Apart, rng: random.Random, moments: Moments
) -> None:
    """A worker that is cut off is dead to all, and what it did meanwhile is dropped when it is
    back: no client sees more than a pause."""
    with apart.metered("forebay_workers_lost_total"):
        for moment in moments(20, 500):
            with apart.trial(rng) as load:
                load.flow(moment)
                lost = f"worker-{rng.randrange(2)}"
                apart.hosts.links[lost].cut()
                until(lambda: apart.metric("forebay_workers") < 4, 20)
                load.flow(200)
                apart.hosts.links[lost].heal()
                until(lambda: apart.metric("forebay_workers") == 4, 60)
                load.flow(100)


def test_34_a_gateway_that_is_cut_off_from_redis(
    apart: Apart, rng: random.Random, moments: Moments
) -> None:
    """Its clients get an answer late, an error event or a 503; those of the other one notice
    nothing. It lives, is not the balancer's choice, and serves again when the link is healed."""
    outage_s = ROUND_TRIP_S + 1  # a connection outlives the shorter ones
    with apart.metered("forebay_redis_reconnects_total", still=("forebay_workers_lost_total",)):
        for moment in moments(20, 500):
            with apart.trial(rng, ends=("ok", "refused", "broken")) as load:
                load.flow(moment)
                number = rng.randrange(2)
                lost, other = apart.gateways[number], apart.gateways[1 - number]
                apart.hosts.links[f"gateway-{number}"].cut()
                assert httpx.get(lost.base + "/health", timeout=10).status_code == 200
                time.sleep(outage_s)  # the outage itself
                outage_s = rng.uniform(0, 4)
                assert other.ready
                apart.hosts.links[f"gateway-{number}"].heal()
                until(lambda lost=lost: lost.ready, 60)
                load.flow(100)
            assert load.ends["ok"] > 5


def test_34_what_was_given_up_over_a_cut_link_is_never_done(
    hosts: Hosts, far_redis: RedisServer
) -> None:
    """The kernel would go on sending it for minutes: the socket is gone with all that was in it."""
    link, host = hosts.links["worker-0"], "worker-0"

    async def give_up() -> None:
        redis = Link(f"redis://{link.near}:{PORT}")
        await redis.run([("PING",)], PATIENCE_S)
        link.cut()
        with pytest.raises(TimeoutError):
            await redis.run([("SET", "given-up", "x")], 0.5)

    with hosts.inside(host):
        others = hosts.sockets_to(PORT)  # of processes that ended while a link was cut
        try:
            asyncio.run(give_up())
            assert hosts.sockets_to(PORT) <= others
        finally:
            link.heal()
        assert not far_redis.client.exists("given-up")


def test_34_slow_links_make_answers_slow_and_nothing_else(
    hosts: Hosts, far_redis: RedisServer, rng: random.Random
) -> None:
    """The workers are 100 ms from Redis, each way."""
    with ExitStack() as stack:
        for host in ("worker-0", "worker-1"):
            with hosts.inside(host):
                script = str(Path(__file__).with_name("slow_link.py"))
                words = [SLOW_PORT, hosts.links[host].near, PORT, DELAY_S]
                link = subprocess.Popen([sys.executable, script, *map(str, words)])
            stack.callback(link.wait)
            stack.callback(link.kill)
        stack.callback(far_redis.client.flushall)
        house = Apart(far_redis, hosts, slow=True)
        stack.callback(house.close)
        still = ("forebay_workers_lost_total", "forebay_resubmitted_total")
        with (
            house.metered("forebay_http_request_seconds_sum", still=still),
            house.trial(rng) as load,
        ):
            load.flow(200)
        answered = [one for one in load.outcomes if one.end == "ok" and one.ask.streams]
        assert min(one.seconds for one in answered) > 2 * DELAY_S


def test_29_clients_whose_cable_is_pulled(apart: Apart, rng: random.Random) -> None:
    """No packet says that they are gone: the kernel finds it within a minute, as what was sent to
    them is not taken."""
    gateway, door = apart.gateways[1], apart.hosts.doors["gateway-1"]
    body = {"model": "echo", "prompt": "abc", "max_tokens": 30_000, "stream": True}
    with (
        apart.metered("forebay_cancelled_total"),
        Load([gateway.base], apart.keys, echo_mix, rng, 0) as load,
    ):
        load.start([Ask(COMPLETIONS, body)] * 4)
        until(lambda: apart.metric("vllm:num_requests_running") == 4)
        door.cut()
        until(lambda: apart.metric("vllm:num_requests_running") == 0, 80)
        door.heal()
    load.only("cut")
    apart.balance.check(load)
