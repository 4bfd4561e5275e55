"""More than the fleet can do, and one team that wants it all: refused at once with a hint, and
whoever was taken in is served as if nothing were."""

import random
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx2
import openai
import pytest
from chaos_house import ECHO, NARROW_SLOTS, House
from dice import OFFSETS, Moments
from fleet_house import KEY
from redis_house import redis_running
from requests_mix import echo_stream
from serve_house import FAILURES, until
from vigil import vigil

pytestmark = [pytest.mark.system, pytest.mark.chaos]

SEATS, QUEUE = 8, 16


@pytest.fixture
def tight() -> Iterator[House]:
    """Workers that run and queue few sequences."""
    flags = (*ECHO, "--max-num-seqs", str(SEATS), "--max-num-queued-reqs", str(QUEUE))
    with redis_running() as redis:
        house = House(redis, (flags, flags))
        try:
            yield house
        finally:
            house.close()


def test_30_twenty_times_the_capacity_at_once(tight: House, rng: random.Random) -> None:
    """Health stays green, and a refusal is a status, sooner than an answer: no stream begins
    before its request has a place in a queue."""
    with tight.metered("forebay_refused_requests_total", "forebay_shed_total"):
        for _ in range(OFFSETS):
            with (
                tight.trial(rng, ends=("ok", "refused"), statuses=(429, 503), clients=0) as load,
                vigil(tight.gateways) as slowest,
            ):
                load.start([echo_stream(rng, 100) for _ in range(2 * SEATS * 20)])
                load.finish()
            assert load.ends["ok"] >= 2 * SEATS, load.ends
            refused = [one for one in load.outcomes if one.end != "ok"]
            assert len(refused) >= 2 * SEATS * 20 - 4 * (SEATS + QUEUE), load.ends
            answered = [one.seconds for one in load.outcomes if one.end == "ok"]
            assert statistics.median(one.seconds for one in refused) < statistics.median(answered)
            assert max(slowest) < 2.0


def test_31_one_team_floods_and_the_others_notice_nothing(
    house: House, rng: random.Random, moments: Moments
) -> None:
    with house.metered('forebay_admissions_total{outcome="refused",scope="team"}'):
        for moment in moments(20, 400):
            ends = ("ok", "refused")
            with house.trial(rng, ends=ends, statuses=(429,)) as load:
                load.flow(moment)
                load.start([replace(echo_stream(rng, 60), key=house.narrow_key) for _ in range(60)])
                load.flow(200)
            flood = [one for one in load.outcomes if one.ask.key]
            assert sum(one.end == "ok" for one in flood) >= NARROW_SLOTS
            assert all(one.ask.key for one in load.outcomes if one.status == 429)


class _Counting(httpx2.HTTPTransport):
    """Notes which attempt of a call each request is, as the SDK says it."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        self.most = max(self.most, 1 + int(request.headers["x-stainless-retry-count"]))
        return super().handle_request(request)


def test_36_clients_that_try_again_by_themselves(
    house: House, rng: random.Random, moments: Moments
) -> None:
    """The SDK's own retries against an outage of Redis: three attempts at most, and all is as
    before soon after it."""
    unavailable = 'forebay_admissions_total{outcome="unavailable"}'
    with house.metered("forebay_redis_reconnects_total", unavailable):
        for moment in moments(20, 300):
            over, back, answered = threading.Event(), threading.Event(), threading.Semaphore(0)

            def client(base: str, over=over, back=back, answered=answered) -> int:
                transport = _Counting()
                http = openai.DefaultHttpxClient(transport=transport)
                url = base + "/v1"
                with openai.OpenAI(base_url=url, api_key=KEY, http_client=http, timeout=30) as sdk:
                    while not over.is_set():
                        late = back.is_set()
                        try:
                            sdk.completions.create(model="echo", prompt="again", max_tokens=20)
                        except FAILURES:
                            continue
                        if late:
                            answered.release()
                return transport.most

            ends = ("ok", "refused", "broken")
            with house.trial(rng, ends=ends, clients=4) as load, ThreadPoolExecutor(20) as pool:
                clients = [pool.submit(client, rng.choice(house.bases)) for _ in range(20)]
                try:
                    load.flow(moment)
                    house.redis.kill()
                    load.start([echo_stream(rng, 20)])
                    time.sleep(rng.uniform(3, 5))  # the outage itself
                    house.redis.start()
                    back.set()
                    until(lambda answered=answered: answered._value >= 100, 30)
                finally:
                    over.set()
                assert max(one.result() for one in clients) <= 3
