"""Requests and messages that harm: too large, too many, unreadable, repeated, too late."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from chaos_house import ECHO, House
from dice import OFFSETS, Moments
from redis_house import RedisServer, redis_running
from requests_mix import COMPLETIONS, Ask, echo_stream, shared_mix
from serve_house import until
from vigil import vigil

pytestmark = [pytest.mark.system, pytest.mark.chaos]

REFUSED = 'forebay_http_requests_total{route="completions",status="4xx"}'
REPEATED = (
    "forebay_duplicate_requests_total",
    'forebay_dropped_replies_total{reason="duplicate"}',
)


def _too_long(rng: random.Random) -> Ask:
    body = {"model": "echo", "prompt": "x" * rng.randint(33_000, 200_000), "max_tokens": 5}
    return Ask(COMPLETIONS, body, refused=400)


def test_11_a_request_larger_than_the_context_is_refused_and_the_queue_moves_on(
    house: House, rng: random.Random, moments: Moments
) -> None:
    with house.metered(REFUSED):
        for moment in moments(20, 400):
            with house.trial(rng, mix=shared_mix) as load:
                load.flow(moment)
                load.start([_too_long(rng) for _ in range(5)])
                load.flow(200)
            refused = [one for one in load.outcomes if one.code == "context_length_exceeded"]
            assert len(refused) == 5


def test_13_five_megabytes_of_text_do_not_stop_the_others(
    house: House, rng: random.Random, moments: Moments
) -> None:
    """Health answers meanwhile; 0.1 s on a quiet machine, and never as long as the text takes."""
    with house.metered(REFUSED):
        for moment in moments(20, 200):
            with (
                house.trial(rng, mix=shared_mix) as load,
                vigil(house.gateways) as slowest,
            ):
                load.flow(moment)
                body = {"model": "echo", "prompt": "word " * 1_000_000, "max_tokens": 5}
                load.start([Ask(COMPLETIONS, body, refused=400)] * 2)
                load.flow(300)
            assert max(slowest) < 2.0


def test_24_messages_that_cannot_be_read_end_nobody(
    house: House, rng: random.Random, moments: Moments
) -> None:
    """Random bytes, wrong schemas, an unknown version and 20 MB, in every stream that is read."""
    with house.metered("forebay_dead_letters_total", 'forebay_dropped_replies_total{reason="bad"}'):
        for moment in moments(20, 400):
            with house.trial(rng) as load:
                load.flow(moment)
                pids = [one.process.pid for one in house.processes]
                for stream in list(house.redis.client.scan_iter("fb:{*:*", _type="stream")):
                    _poison(house.redis, stream, rng)
                load.flow(200)
                assert [one.process.pid for one in house.processes if one.alive] == pids


def _poison(redis: RedisServer, stream: bytes, rng: random.Random) -> None:
    for bad in (
        {b"p": rng.randbytes(rng.randint(0, 200))},
        {b"p": b"\x01\x93\x01\x02\x03"},
        {b"p": b"\xff" + rng.randbytes(40)},
        {b"p": b"{}"},
        {b"other": b"field"},
    ):
        redis.client.xadd(stream, bad)
    if rng.random() < 0.3:
        redis.client.xadd(stream, {b"p": rng.randbytes(20_000_000)})


def test_25_messages_delivered_twice_are_done_once(
    house: House, rng: random.Random, moments: Moments
) -> None:
    """Everything that is in flight comes again, to workers and to gateways."""
    with house.metered(*REPEATED):
        for moment in moments(20, 400):
            with house.trial(rng) as load:
                for _ in range(10):
                    load.flow(moment // 10 + 10)
                    _repeat(house)


def _repeat(house: House) -> None:
    client = house.redis.client
    for pattern in ("fb:{w:*}:work", "fb:{g:*}:reply"):
        for stream in client.scan_iter(pattern):
            for _, fields in client.xrange(stream):
                client.xadd(stream, fields)


@pytest.fixture
def narrow() -> Iterator[House]:
    """One worker that runs one sequence at a time, and a gateway that lets nothing wait long."""
    flags = (*ECHO, "--max-num-seqs", "1")
    with redis_running() as redis:
        house = House(redis, (flags,), gateways=1, gateway=("--queue-timeout-s", "1"))
        try:
            yield house
        finally:
            house.close()


def test_32_what_waits_too_long_is_an_error_and_costs_no_step(
    narrow: House, rng: random.Random
) -> None:
    late = (503, 504)  # the door knows from the first round how long the next one would wait
    with narrow.metered("forebay_shed_total"):
        for _ in range(OFFSETS):
            before = narrow.metric("vllm:generation_tokens_total")
            with narrow.trial(rng, ends=("ok", "refused"), statuses=late, clients=0) as load:
                long = echo_stream(rng, 300)
                load.start([long])
                load.flow(1)
                whole = echo_stream(rng, 30)
                body = {key: v for key, v in whole.body.items() if not key.startswith("stream")}
                load.start([replace(whole, body=body) for _ in range(rng.randint(2, 9))])
                load.finish()
            assert load.ends["ok"] == 1, load.ends
            until(
                lambda before=before: narrow.metric("vllm:generation_tokens_total") == before + 300
            )
