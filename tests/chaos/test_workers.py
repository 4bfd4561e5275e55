"""Workers that die, stop, hang and leave under load: no client notices more than a pause."""

import random
import signal

import pytest
from chaos_house import ECHO, House, resume, stop
from dice import OFFSETS, Moments
from redis_house import redis_running
from requests_mix import echo_stream, shared_mix
from serve_house import until

pytestmark = [pytest.mark.system, pytest.mark.chaos]

LOST = ("forebay_workers_lost_total", 'forebay_resubmitted_total{reason="worker_lost"}')
"""What a lost worker moves."""
ZOMBIE = (
    "forebay_workers_lost_total",
    "forebay_leases_lost_total",
    "forebay_fenced_requests_total",
    "forebay_dropped_replies_total",
)
UNSEEN = ("forebay_shed_total", "forebay_given_up_total", LOST[1])
"""What no worker moves that leaves when it is told to."""


def test_01_a_worker_killed_with_requests_in_its_queue(rng: random.Random) -> None:
    """Each worker runs four sequences at once: most of the load waits."""
    flags = (*ECHO, "--max-num-seqs", "4")
    with redis_running() as redis:
        house = House(redis, (flags, flags))
        try:
            with house.metered(*LOST):
                for _ in range(OFFSETS):
                    with house.trial(rng, clients=0) as load:
                        load.start([echo_stream(rng, 60) for _ in range(30)])
                        until(lambda: house.metric("vllm:num_requests_waiting") > 10)
                        load.flow(rng.randint(1, 200))
                        rng.choice(house.workers).kill()
            house.balance.check_keys()
        finally:
            house.close()


def test_02_a_worker_killed_in_the_middle_of_streams(
    house: House, rng: random.Random, moments: Moments
) -> None:
    with house.metered(*LOST):
        for moment in moments(20, 1000):
            with house.trial(rng) as load:
                load.flow(moment)
                rng.choice(house.workers).kill()


def test_02_all_workers_killed_and_started_again_at_once(
    house: House, rng: random.Random, moments: Moments
) -> None:
    """Their supervisor is quick, but a new process takes longer than 6 s on a busy machine: then a
    request may end in a 503, or an error event behind its last token, and never otherwise."""
    with house.metered(*LOST):
        for moment in moments(20, 1000):
            with house.trial(rng, ends=("ok", "broken", "refused")) as load:
                load.flow(moment)
                for worker in house.workers:
                    worker.kill()
                house.heal()


def test_04_a_worker_that_stands_still_and_comes_back(
    house: House, rng: random.Random, moments: Moments
) -> None:
    """It is taken for dead; what it says of old attempts when it comes back is dropped."""
    with house.metered(*ZOMBIE):
        for moment in moments(20, 600):
            with house.trial(rng) as load:
                load.flow(moment)
                zombie = rng.choice(house.workers)
                stop(zombie)
                until(lambda: house.metric("forebay_workers") < 2 * len(house.gateways))
                load.flow(100)
                resume(zombie)
                house.ready()


def test_16_a_worker_told_to_leave_finishes_or_hands_over(
    house: House, rng: random.Random, moments: Moments
) -> None:
    with house.metered(LOST[0], still=UNSEEN):
        for moment in moments(20, 1000):
            with house.trial(rng, clients=40) as load:
                load.flow(moment)
                leaver = rng.choice(house.workers)
                leaver.send(signal.SIGTERM)
                until(lambda leaver=leaver: not leaver.alive, 60)
                assert leaver.process.returncode == 0, leaver.log


def test_17_a_rolling_restart_of_everything(house: House, rng: random.Random) -> None:
    """One process after the other, the next when the fleet is whole again."""
    with house.metered(LOST[0], still=UNSEEN):
        for _ in range(2):
            with house.trial(rng) as load:
                for process in house.processes:
                    load.flow(rng.randint(20, 300))
                    process.send(signal.SIGTERM)
                    until(lambda process=process: not process.alive, 60)
                    house.heal()


def test_38_a_worker_that_lost_its_cache_is_asked_for_it(
    house: House, rng: random.Random, moments: Moments
) -> None:
    """The gateways took its blocks for cached: right answers, and hits only where blocks are."""
    with house.metered("forebay_prefix_hit_tokens_total", "forebay_prefix_predicted_tokens_total"):
        for moment in moments(100, 600):
            with house.trial(rng, mix=shared_mix) as load:
                load.flow(moment)
                rng.choice(house.workers).kill()
                house.heal()
                load.flow(200)
