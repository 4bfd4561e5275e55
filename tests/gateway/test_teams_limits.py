"""The limiter's scripts against a simple model of them, with a clock of the test's own."""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
from forebay_gateway.teams.access import Access, Scope, Standing
from forebay_gateway.teams.directory import Directory, decoded, encode
from forebay_gateway.teams.limiter import Limiter
from forebay_gateway.teams.outage import MOST, Allowance
from forebay_gateway.teams.plan import Plan, limit_name, make_plan, window
from forebay_gateway.teams.records import Budget, Key, Limits, Record, Team
from forebay_shared import keys
from forebay_shared.books import Hold, Rates, UsageRecord, admission, record_of, settlement
from forebay_shared.bus import Publisher
from forebay_shared.scripts import Script
from forebay_shared.wire import Usage
from hypothesis import given, settings
from hypothesis import strategies as st
from redis import Redis
from redis_house import RedisServer, redis_running

START = 1_800_000_000_000
LEASE = keys.HOLD_MS
RATES = Rates(input=1000.0, cached=500.0, output=2000.0)
ADMIT, SETTLE, RENEW = Script("admit"), Script("settle"), Script("renew")


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_running() as server:
        yield server


class Scripts:
    """The real ones, at a time that is given."""

    def __init__(self, redis: Redis, plan: Plan) -> None:
        self._admit = redis.register_script(ADMIT.text)
        self._settle = redis.register_script(SETTLE.text)
        self._renew = redis.register_script(RENEW.text)
        self._plan = plan

    def hold(self, request_id: str, input_tokens: int, output_tokens: int) -> Hold:
        return Hold(
            record=UsageRecord(id=request_id, team="red"),
            rates=RATES,
            slots=self._plan.slots,
            plan=self._plan.packed,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            cost=RATES.cost(input_tokens, 0, output_tokens),
        )

    def admit(self, now: int, hold: Hold, *, started: bool = False) -> list:
        names, arguments = admission(hold, now, started=started)
        return self._admit(keys=names, args=arguments)

    def settle(self, now: int, hold: Hold, usage: Usage, *, only_held: bool = False) -> int:
        record = record_of(hold, usage, "completed")
        names, arguments = settlement(hold, record, only_held=only_held, now_ms=now)
        return self._settle(keys=names, args=arguments)

    def renew(self, now: int, hold: Hold) -> None:
        names = [keys.fleet_clock(), keys.open_requests(), *hold.slots]
        self._renew(keys=names, args=[now, hold.record.id, LEASE, keys.SLOTS_TTL_MS])


@dataclass
class Model:
    """One scope, in the plainest way: every charge is kept with its time."""

    limits: Limits
    budget: float | None
    charges: dict[str, tuple[float, float]] = field(default_factory=dict)
    held: dict[str, tuple[int, int]] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)
    spent: float = 0.0

    def level(self, name: str, now: float) -> float:
        cap, period = self.bounds(name)
        used, at = self.charges.get(name, (0.0, now))
        return max(0.0, used - cap * (now - at) / period)

    def bounds(self, name: str) -> tuple[int, int]:
        return getattr(self.limits, name), 86_400_000 if name.endswith("day") else 60_000

    def charge(self, name: str, now: float, amount: float) -> None:
        if getattr(self.limits, name) is not None:
            self.charges[name] = (self.level(name, now) + amount, now)

    def admits(self, now: float) -> bool:
        inputs = sum(i for i, _ in self.held.values())
        outputs = sum(o for _, o in self.held.values())
        held = {
            "requests_per_minute": 0,
            "input_tokens_per_minute": inputs,
            "output_tokens_per_minute": outputs,
            "tokens_per_minute": inputs + outputs,
            "tokens_per_day": inputs + outputs,
        }
        for name, amount in held.items():
            cap = getattr(self.limits, name)
            if cap is not None and self.level(name, now) + amount + 1 > cap + 1e-6:
                return False
        slots = self.limits.concurrent_requests
        if slots is not None and sum(end > now for end in self.slots.values()) >= slots:
            return False
        return self.budget is None or self.spent + inputs + outputs < self.budget

    def open(self, name: str, now: int, inputs: int, outputs: int) -> None:
        self.charge("requests_per_minute", now, 1)
        self.held[name] = (inputs, outputs)
        self.slots[name] = now + LEASE

    def settle(self, name: str, now: float, inputs: int, outputs: int) -> None:
        self.held.pop(name)
        self.slots.pop(name, None)
        self.spent += inputs + outputs
        self.charge("input_tokens_per_minute", now, inputs)
        self.charge("output_tokens_per_minute", now, outputs)
        self.charge("tokens_per_minute", now, inputs + outputs)
        self.charge("tokens_per_day", now, inputs + outputs)


counts = st.none() | st.integers(1, 40)
limits = st.builds(
    Limits,
    requests_per_minute=st.none() | st.integers(1, 6),
    input_tokens_per_minute=counts,
    output_tokens_per_minute=counts,
    tokens_per_minute=counts,
    tokens_per_day=st.none() | st.integers(20, 200),
    concurrent_requests=st.none() | st.integers(1, 3),
)
step = st.tuples(
    st.sampled_from(["admit", "admit", "settle", "again", "renew"]),
    st.integers(0, 20_000),
    st.integers(0, 12),
    st.integers(0, 12),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(limits, min_size=1, max_size=3), st.none() | st.integers(5, 60), st.data())
def test_the_scripts_admit_what_the_model_admits_over_all_scopes(
    server: RedisServer, each: list[Limits], budget: int | None, data: st.DataObject
) -> None:
    redis = server.client
    redis.flushall()
    budgets = () if budget is None else (Budget(amount=budget, unit="tokens", window="total"),)
    scopes = [
        Scope("team", Record(id=str(n), limits=one, budgets=budgets)) for n, one in enumerate(each)
    ]
    plan = make_plan(scopes, START / 1000)
    bounded = [Model(one, budget) for one in each if one != Limits() or budgets]
    scripts = Scripts(redis, plan)
    now, number = START, 0
    holds: dict[str, Hold] = {}
    settled: list[Hold] = []
    for action, pause, inputs, outputs in data.draw(st.lists(step, max_size=25)):
        now += pause
        if action == "admit":
            number += 1
            hold = scripts.hold(str(number), inputs, outputs)
            answer = scripts.admit(now, hold)
            assert answer[0] == all(model.admits(now) for model in bounded)
            if answer[0]:
                holds[hold.record.id] = hold
                for model in bounded:
                    model.open(hold.record.id, now, inputs, outputs)
                assert scripts.admit(now, hold)[0] == 1, "sent again, it changes nothing"
            else:
                assert answer[7] >= 1
                assert answer[9] >= 1
        elif action == "settle" and holds:
            request_id, hold = holds.popitem()
            usage = Usage(min(inputs, hold.input_tokens), 0, min(outputs, hold.output_tokens))
            assert scripts.settle(now, hold, usage) == 1
            for model in bounded:
                model.settle(request_id, now, usage.prompt_tokens, usage.completion_tokens)
            settled.append(hold)
        elif action == "again" and settled:
            assert scripts.settle(now, settled[-1], Usage(9, 0, 9)) == 0
            assert scripts.settle(now, settled[-1], Usage(9, 0, 9), only_held=True) == 0
        elif action == "renew" and holds:
            request_id, hold = next(iter(holds.items()))
            scripts.renew(now, hold)
            for model in bounded:
                model.slots[request_id] = now + LEASE
    assert redis.zcard(keys.open_requests()) == len(holds) == redis.hlen(keys.holds())
    assert redis.xlen(keys.records()) == len(settled)
    # Never stuck: with everything settled or crashed, all but a spent budget comes back.
    for hold in holds.values():
        scripts.settle(now, hold, Usage(), only_held=True)
    later = now + 10 * 86_400_000
    if budget is None:
        assert scripts.admit(later, scripts.hold("last", 1, 1))[0] == 1


@settings(max_examples=40, deadline=None)
@given(limits, st.data())
def test_who_waits_as_long_as_it_was_told_is_let_in(
    server: RedisServer, one: Limits, data: st.DataObject
) -> None:
    redis = server.client
    redis.flushall()
    scripts = Scripts(redis, make_plan([Scope("team", Record(id="a", limits=one))], START / 1000))
    now = START
    for number in range(30):
        hold = scripts.hold(str(number), data.draw(st.integers(0, 9)), 5)
        answer = scripts.admit(now, hold)
        if answer[0] == 0:
            now += answer[9]
            assert scripts.admit(now, hold)[0] == 1
        scripts.settle(now, hold, Usage(hold.input_tokens, 0, 5))


def test_a_crashed_gateways_slots_come_back_when_their_leases_end(server: RedisServer) -> None:
    redis = server.client
    redis.flushall()
    record = Record(id="a", limits=Limits(concurrent_requests=1))
    scripts = Scripts(redis, make_plan([Scope("team", record)], START / 1000))
    assert scripts.admit(START, scripts.hold("one", 1, 1))[0] == 1
    refused = scripts.admit(START + LEASE - 1, scripts.hold("two", 1, 1))
    assert refused[0] == 0
    assert limit_name(refused[8]) == "concurrent_requests"
    assert scripts.admit(START + LEASE, scripts.hold("two", 1, 1))[0] == 1


@given(
    st.none() | st.integers(0, 8),
    st.none() | st.integers(0, 60),
    st.lists(st.integers(1, 30), max_size=90),
)
def test_an_outage_admits_no_more_than_was_left(
    requests: int | None, tokens: int | None, asked: list[int]
) -> None:
    team = Team(id="red", organisation="o", on_outage="continue", limits=Limits(tokens_per_day=9))
    directory = Directory()
    records = decoded([("organisation/o", '1 {"id":"o"}'), ("team/red", f"1 {encode(team)}")])
    directory.replace(1, records)
    access = Access(Key(id="k", team="red"), directory)
    allowance = Allowance()
    assert not allowance.admits(access, access.scopes, 1, {}), "nothing is known yet"
    access.standing = Standing(
        None if requests is None else (9, requests, 1.0),
        None if tokens is None else (99, tokens, 1.0),
    )
    begun = [each for each in asked if allowance.admits(access, access.scopes, each, {})]
    assert len(begun) <= (MOST if requests is None else requests)
    assert tokens is None or sum(begun[:-1]) < max(tokens, 1), "one reservation more at most"
    slots = Team(id="red", organisation="o", limits=Limits(concurrent_requests=2))
    allowance.end()
    if requests != 0 and tokens != 0:
        scopes = [Scope("team", slots)]
        assert not allowance.admits(access, scopes, 1, {keys.slots("team:red"): 2})
        assert allowance.admits(access, scopes, 1, {keys.slots("team:red"): 1})


async def test_a_client_that_leaves_while_redis_is_asked_is_no_outage() -> None:
    limiter = Limiter(Publisher("unix:///none.sock"), Directory())
    access = Access(Key(id="k"), Directory())
    asking = asyncio.create_task(limiter.admit(access, UsageRecord(id="r"), 1, 1))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert not any(limiter.admissions.values())
    assert limiter.unsettled == 1, "it may have been admitted all the same"


def test_what_began_without_redis_is_reserved_whatever_the_limits_say(server: RedisServer) -> None:
    redis = server.client
    redis.flushall()
    record = Record(id="a", limits=Limits(requests_per_minute=1, concurrent_requests=1))
    scripts = Scripts(redis, make_plan([Scope("team", record)], START / 1000))
    assert scripts.admit(START, scripts.hold("one", 1, 1))[0] == 1
    two = scripts.hold("two", 1, 1)
    assert scripts.admit(START, two)[0] == 0
    assert scripts.admit(START, two, started=True)[0] == 1
    assert redis.zcard(keys.slots("team:a")) == redis.hlen(keys.holds()) == 2
    assert scripts.settle(START, two, Usage(1, 0, 1)) == 1
    refused = scripts.admit(START + 60_000, scripts.hold("three", 1, 1))
    assert (refused[0], limit_name(refused[8])) == (0, "requests_per_minute")


def test_a_budget_is_new_in_each_window_and_a_gateways_wrong_clock_opens_none(
    server: RedisServer,
) -> None:
    redis = server.client
    redis.flushall()
    team = Team(id="a", organisation="o", budgets=(Budget(amount=0.001, window="hour"),))
    hour = 3_600_000
    start = START - START % hour

    def at(now: int) -> Scripts:
        return Scripts(redis, make_plan([Scope("team", team)], now / 1000))

    spent = at(start).hold("1", 500, 250)  # 1,000,000 billionths: all of it
    assert at(start).admit(start, spent)[0] == 1
    refused = at(start).admit(start + 1000, at(start).hold("2", 1, 1))
    assert (refused[0], limit_name(refused[8]), refused[9]) == (0, "hour_budget", hour - 1000)
    at(start).settle(start + 2000, spent, Usage(500, 0, 250))
    assert at(start).admit(start + 3000, at(start).hold("3", 1, 1))[0] == 0
    assert at(start + hour).admit(start + 4000, at(start + hour).hold("4", 1, 1))[0] == 0
    assert at(start + hour).admit(start + hour, at(start + hour).hold("5", 1, 1))[0] == 1
    # A gateway whose clock is behind spends from the present window all the same.
    late = at(start).hold("6", 500, 250)
    at(start).settle(start + hour + 1, late, Usage(500, 0, 250))
    assert at(start + hour).admit(start + hour + 2, at(start + hour).hold("7", 1, 1))[0] == 0


def test_a_model_and_a_team_are_bounded_together_and_the_one_that_refuses_is_named(
    server: RedisServer,
) -> None:
    redis = server.client
    redis.flushall()
    team = Record(id="red", limits=Limits(requests_per_minute=5))
    model = Record(id="m", limits=Limits(requests_per_minute=2))
    plan = make_plan([Scope("team", team), Scope("model", model)], START / 1000)
    scripts = Scripts(redis, plan)
    first = scripts.admit(START, scripts.hold("1", 1, 1))
    assert first == [1, 2, 1, 30_000, -1, 0, 0]
    assert scripts.admit(START, scripts.hold("2", 1, 1))[:3] == [1, 2, 0]
    refused = scripts.admit(START, scripts.hold("3", 1, 1))
    assert plan.scopes[refused[7] - 1] == "model m"
    assert (limit_name(refused[8]), refused[9]) == ("requests_per_minute", 30_000)


ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"]


@given(
    st.sampled_from(["hour", "day", "week", "month"]),
    st.sampled_from(ZONES),
    st.floats(1_700_000_000, 1_900_000_000),
)
def test_windows_follow_each_other_without_a_gap(name, zone: str, now: float) -> None:
    budget = Budget(amount=1, window=name, time_zone=zone)
    start, end = window(budget, now)
    assert start <= now < end or math.isclose(now, end)
    assert window(budget, end)[0] == end
    assert window(budget, (start + end) / 2) == (start, end)
    local = datetime.fromtimestamp(start, ZoneInfo(zone))
    if name != "hour":
        assert (local.hour, local.minute) == (0, 0)
    if name == "week":
        assert local.weekday() == 0
    if name == "month":
        assert local.day == 1


def test_what_is_said_to_be_left_is_what_is_left_behind_the_request(server: RedisServer) -> None:
    """Who is let in is told of its own part too; who is refused has taken nothing."""
    redis = server.client
    redis.flushall()
    team = Team(
        id="red", organisation="o", limits=Limits(requests_per_minute=3, tokens_per_minute=60)
    )
    scripts = Scripts(redis, make_plan([Scope("team", team)], START / 1000))
    assert scripts.admit(START, scripts.hold("a", 10, 20))[:7] == [
        1, 3, 2, 20_000, 60, 30, 30_000,
    ]  # fmt: skip
    assert scripts.admit(START, scripts.hold("b", 10, 30))[:7] == [
        1, 3, 1, 40_000, 60, 0, 70_000,
    ]  # fmt: skip
    assert scripts.admit(START, scripts.hold("c", 10, 10))[:7] == [
        0, 3, 1, 40_000, 60, 0, 70_000,
    ]  # fmt: skip
    assert scripts.settle(START, scripts.hold("b", 10, 30), Usage(10, 0)) == 1
    assert scripts.admit(START, scripts.hold("d", 10, 5))[:7] == [
        1, 3, 0, 60_000, 60, 5, 55_000,
    ]  # fmt: skip
    assert scripts.admit(START, scripts.hold("e", 3, 1))[:7] == [
        0, 3, 0, 60_000, 60, 5, 55_000,
    ]  # fmt: skip
