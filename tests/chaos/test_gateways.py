"""Gateways that die and leave with many streams open, and work that nobody waits for any more."""

import random
import signal
import time

import pytest
from chaos_house import House
from dice import Moments
from forebay_shared import keys
from patience import crowd, within
from requests_mix import echo_leaver, echo_stream
from serve_house import until

pytestmark = [pytest.mark.system, pytest.mark.chaos]

STREAMS = 200
ABORTED = 'vllm:request_success_total{finished_reason="abort"}'


def test_14_a_gateway_killed_with_200_streams(
    house: House, rng: random.Random, moments: Moments
) -> None:
    """Its own clients lose their connections; the workers stop what it wanted, and settle it."""
    with house.metered("forebay_gateways_lost_total", "forebay_strays_cleared_total"):
        for moment in moments(200, 4000):
            with house.trial(rng, ends=("ok", "cut"), clients=0) as load:
                load.start([echo_stream(rng, 300) for _ in range(STREAMS)])
                load.flow(moment)
                victim = rng.choice(house.gateways)
                victim.kill()
                load.finish()
                killed = time.monotonic()
                until(lambda: house.metric("vllm:num_requests_running") == 0)
                assert time.monotonic() - killed < 10 * crowd()
                assert load.ends["cut"] > STREAMS / 4


def test_15_a_gateway_told_to_leave_with_200_streams(
    house: House, rng: random.Random, moments: Moments
) -> None:
    """All its streams finish, and it is not ready from the first moment on."""
    with house.metered("forebay_open_streams", still=("forebay_cancelled_total", ABORTED)):
        for moment in moments(200, 4000):
            with house.trial(rng, clients=0) as load:
                load.start([echo_stream(rng, 200) for _ in range(STREAMS)])
                until(lambda: house.metric("forebay_open_streams") >= STREAMS)
                load.flow(moment)
                leaver = rng.choice(house.gateways)
                leaver.send(signal.SIGTERM)
                until(lambda leaver=leaver: not leaver.ready)
                until(lambda leaver=leaver: not leaver.alive, 60)
                assert leaver.process.returncode == 0, leaver.log


def test_27_a_storm_of_cancels(house: House, rng: random.Random) -> None:
    """2,000 clients leave at any moment, from before the first token on; others get every token."""
    with house.metered("forebay_cancelled_total"):
        for _ in range(5):
            with house.trial(rng, clients=4) as load:
                for _ in range(10):
                    load.start([echo_leaver(rng) for _ in range(40)])
                    load.flow(rng.randint(50, 500))


def test_26_a_client_that_leaves_frees_everything_within_a_second(
    house: House, rng: random.Random, moments: Moments
) -> None:
    client = house.redis.client

    def leave() -> float:
        with house.trial(rng, clients=0) as load:
            load.start([echo_leaver(rng) for _ in range(12)])  # each at a moment of its own
            load.finish()
            left = time.monotonic()
            until(lambda: client.zcard(keys.open_requests()) == 0)
            return time.monotonic() - left

    with house.metered("forebay_cancelled_total"):
        for _ in moments(10, 800):
            within(1.5, leave, tries=3)
