"""Fleet time under a Redis whose clock leaps, and what goes by it; leases that outlived a leap."""

import itertools
import time
from collections.abc import Callable, Iterator

import pytest
from forebay_gateway.teams.access import Scope
from forebay_gateway.teams.plan import make_plan
from forebay_gateway.teams.records import Budget, Limits, Team
from forebay_gateway.teams.stream import lead
from forebay_shared import keys
from forebay_shared.books import Hold, Rates, UsageRecord, admission, record_of, settlement
from forebay_shared.link import Link
from forebay_shared.scripts import Script
from forebay_shared.wire import Usage
from redis_clock import Clock, redis_with_a_clock
from redis_house import RedisServer
from serve_house import until

HOUR_MS = 3_600_000
TEAM = Team(
    id="red",
    organisation="acme",
    limits=Limits(concurrent_requests=1, requests_per_minute=2),
    budgets=(Budget(amount=100, unit="tokens", window="total"),),
)

_numbers = itertools.count()


@pytest.fixture(scope="module")
def house() -> Iterator[tuple[RedisServer, Clock]]:
    with redis_with_a_clock() as (redis, clock):
        yield redis, clock


@pytest.fixture
def redis(house: tuple[RedisServer, Clock]) -> RedisServer:
    house[0].client.flushall()
    return house[0]


@pytest.fixture
def jump(house: tuple[RedisServer, Clock]) -> Callable[[int], None]:
    return lambda milliseconds: house[1].jump(milliseconds // 1000)


def run(redis: RedisServer, name: str, names: list[str], arguments: list) -> list:
    return redis.client.register_script(Script(name).text)(keys=names, args=arguments)


def beat(redis: RedisServer, passed: object) -> list[int]:
    """Fleet time and the leap that was found, in ms."""
    return run(redis, "beat", [keys.fleet_clock()], [passed])


@pytest.mark.parametrize("leap_ms", [HOUR_MS, -HOUR_MS])
def test_a_leap_is_no_time(redis: RedisServer, jump: Callable[[int], None], leap_ms: int) -> None:
    began, steady = beat(redis, "first")[0], time.monotonic()
    jump(leap_ms)
    stands = beat(redis, "")[0]
    assert 0 <= stands - began < 1_000
    now, leap = beat(redis, 40)
    assert now - stands == (40 if leap_ms > 0 else 0), "as much as the gateway's own clock counted"
    assert abs(leap - leap_ms) < 5_000
    assert beat(redis, 40)[1] == 0, "told once"
    until(lambda: beat(redis, "")[0] > now + 50)
    assert beat(redis, "")[0] - began <= (time.monotonic() - steady) * 1000 + 50


def test_an_outage_is_time_and_so_is_an_absence(
    redis: RedisServer, jump: Callable[[int], None]
) -> None:
    began = beat(redis, "first")[0]
    jump(60_000)  # as if Redis had been away for a minute, or its host suspended
    now, leap = beat(redis, 60_500)
    assert (round((now - began) / 1000), leap) == (60, 0)
    jump(HOUR_MS)  # the whole fleet was down: who starts has seen nothing
    now, leap = beat(redis, "first")
    assert (round((now - began) / 1000), leap) == (3_660, 0)


def admit(redis: RedisServer, tokens: int = 60) -> tuple[Hold, list[int]]:
    plan = make_plan([Scope("team", TEAM)], time.time())
    hold = Hold(
        record=UsageRecord(id=f"r{next(_numbers)}", team="red"),
        rates=Rates(),
        slots=plan.slots,
        plan=plan.packed,
        input_tokens=tokens,
        output_tokens=0,
        cost=0,
    )
    return hold, run(redis, "admit", *admission(hold))


def settle(redis: RedisServer, hold: Hold, *, only_held: bool = False) -> int:
    record = record_of(hold, Usage(prompt_tokens=hold.input_tokens), "completed")
    names, arguments = settlement(hold, record, only_held=only_held)
    return redis.client.register_script(Script("settle").text)(keys=names, args=arguments)


@pytest.mark.parametrize("leap_ms", [HOUR_MS, -HOUR_MS])
def test_slots_rates_budgets_and_settlements_outlive_a_leap(
    redis: RedisServer, jump: Callable[[int], None], leap_ms: int
) -> None:
    beat(redis, "first")
    first, admitted = admit(redis)
    assert admitted[0] == 1
    jump(leap_ms)
    for _ in range(2):
        assert admit(redis)[1][8:9] == [6], "its slot is taken"
        beat(redis, 20)
    assert settle(redis, first) == 1
    second, admitted = admit(redis)
    assert admitted[0] == 1
    jump(leap_ms)
    assert settle(redis, second) == 1
    assert settle(redis, first) == 0, "it was settled, and comes again"
    refused = admit(redis)[1]
    assert refused[0] == 0
    assert refused[8] in (1, 200 + 4), "the rate is used up, and the budget"


def test_settled_ids_go_when_nobody_repeats_them_any_more(
    redis: RedisServer, jump: Callable[[int], None]
) -> None:
    beat(redis, "first")
    for _ in range(20):
        settle(redis, admit(redis, 1)[0])
    jump(keys.SETTLED_KEEP_S * 1000 + 10_000)
    beat(redis, "first")
    for _ in range(3):
        settle(redis, admit(redis, 1)[0])
    assert redis.client.zcard(keys.settled()) == 3


@pytest.mark.parametrize("leap_ms", [HOUR_MS, -HOUR_MS])
async def test_a_dead_leaders_lease_does_not_outlive_a_leap(
    redis: RedisServer, jump: Callable[[int], None], leap_ms: int
) -> None:
    link, lease = Link(redis.url), keys.ledger_lease()
    assert await lead(link, lease, "dead", 60_000)
    assert not await lead(link, lease, "next", 60_000)
    jump(leap_ms)
    leads = [await lead(link, lease, "next", 60_000) for _ in range(2)]
    assert leads[-1]
    assert not await lead(link, lease, "dead", 60_000)
    await link.close()


def test_the_lease_of_who_died_before_the_clock_was_put_back_is_none(
    redis: RedisServer, jump: Callable[[int], None]
) -> None:
    lease, client = keys.worker_lease("w"), redis.client
    client.set(lease, "1", px=keys.LEASE_MS)
    client.set(keys.work("w"), "left")
    assert keys.is_alive(client.pttl(lease))
    jump(-HOUR_MS)
    assert not keys.is_alive(client.pttl(lease))
    assert run(redis, "clear", [lease, keys.work("w")], [keys.LEASE_MOST_MS]) == 1
    assert not client.exists(keys.work("w"))
    client.set(lease, "1", px=keys.LEASE_MS)
    assert keys.is_alive(client.pttl(lease)), "who lives renews it"
