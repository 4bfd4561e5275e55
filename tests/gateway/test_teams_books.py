"""Limits and books over several gateways, a real Redis and real workers: exact, and once."""

import asyncio
import re
import signal
import struct
import time
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from types import SimpleNamespace

import pytest
from bus_house import LONG_LEASE_S, WorkerProcess, answer, job, run_job, workers
from forebay_gateway import roster
from forebay_gateway.backend import Backend
from forebay_gateway.jobs import Job
from forebay_gateway.teams import limiter
from forebay_gateway.teams.bookkeeper import Bookkeeper
from forebay_gateway.teams.books import Query, Report, days_between, fold, money
from forebay_gateway.teams.caller import Caller
from forebay_gateway.teams.records import Budget, Entry, Limits, Model, Price, Team
from forebay_gateway.teams.secrets import split
from forebay_shared import keys
from forebay_shared.books import UsageRecord, decode_record
from forebay_shared.errors import AuthenticationError, BusError, RateLimitError
from forebay_shared.wire import Usage
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from patience import PATIENCE_S
from redis_house import RedisServer, WaitUntil
from teams_house import BASICS, gateways, key_of, write

PRICED = Model(id="echo", price=Price(input=1.0, cached_input=0.5, output=3.0))


async def caller_of(backend: Backend, sent: str, entries: Sequence[Entry] = ()) -> Caller:
    if entries:
        await write(backend, entries)
    token = split(sent.encode())
    assert token is not None
    return backend.teams.identify(token, "10.0.0.1")


def metered(backend: Backend, caller: Caller, **fields: int) -> Job:
    one = job(backend, **fields)
    return replace(one, toll=caller.toll("echo", "echo"))


def records(redis: RedisServer) -> list[UsageRecord]:
    return [decode_record(fields[b"p"]) for _, fields in redis.client.xrange(keys.records())]


async def test_three_gateways_admit_together_what_one_would(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    key, sent = key_of(limits=Limits(requests_per_minute=10))
    async with gateways(redis_server.url, 3, wait_until) as backends:
        with workers(redis_server.url, 1):
            for backend in backends:
                await wait_until(lambda backend=backend: backend.roster.ready)
            revision = await write(backends[0], [*BASICS, key])
            for backend in backends:
                assert await backend.teams.sync.reached(revision, PATIENCE_S)
            callers = [(b, await caller_of(b, sent)) for b in backends for _ in range(10)]
            began = time.monotonic()
            outcomes = await asyncio.gather(
                *(run_job(backend, metered(backend, caller)) for backend, caller in callers),
                return_exceptions=True,
            )
            refused = [each for each in outcomes if isinstance(each, RateLimitError)]
            took = time.monotonic() - began
            admitted = len(outcomes) - len(refused)
            assert 10 <= admitted <= 10 + took / 6, "one comes back each 6 s"
            assert all("key " + key.id in each.message for each in refused)
            assert all(6 - took <= (each.retry_after_s or 0) <= 6 for each in refused)
            headers = dict(callers[0][1].answer_headers())
            assert headers[b"x-ratelimit-limit-requests"] == b"10"
            await wait_until(lambda: len(records(redis_server)) == admitted)


async def test_every_way_to_end_is_on_the_books_once_with_what_the_worker_measured(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    key, sent = key_of(user="ann")
    async with gateways(redis_server.url, 1, wait_until) as [backend]:
        with workers(redis_server.url, 1, delay_ms=5):
            await wait_until(lambda: backend.roster.ready)
            caller = await caller_of(backend, sent, [*BASICS, key, PRICED])
            async with backend.dispatcher.generate(
                metered(backend, caller, tokens=7, n=2)
            ) as whole:
                await answer(whole)
                whole.reasoned(5)
            async with backend.dispatcher.generate(metered(backend, caller, tokens=30_000)) as left:
                await answer(left, until=5)
            async with backend.dispatcher.generate(
                metered(backend, caller, tokens=15_000, n=2)
            ) as stopped:
                so_far = await answer(stopped, until=4)
                stopped.stop(0)
                await answer(stopped, until=20, so_far=so_far)
                stopped.stop(1)
            cut = asyncio.create_task(run_job(backend, metered(backend, caller, tokens=30_000)))
            await wait_until(lambda: any(each.has_begun for each in backend.dispatcher._running))
            cut.cancel()
            await asyncio.gather(cut, return_exceptions=True)
            await wait_until(lambda: len(records(redis_server)) == 4)
            found = {record.id: record for record in records(redis_server)}
            assert len(found) == 4
            made = sum(record.output_tokens for record in found.values())

            async def counted() -> float:
                text = await backend.metrics()
                lines = re.findall(r"^vllm:generation_tokens_total\S* (\S+)$", text, re.M)
                return sum(map(float, lines))

            async with asyncio.timeout(PATIENCE_S):
                while await counted() != made:  # noqa: ASYNC110  it is a count
                    await asyncio.sleep(0.05)
            assert sum(record.reasoning_tokens for record in found.values()) == 5
            assert all(
                record.decode_ms > 0 for record in found.values() if record.output_tokens > 1
            )
            outcomes = sorted(record.outcome for record in found.values())
            assert outcomes == ["cancelled", "cancelled", "completed", "completed"]
            for record in found.values():
                assert (record.team, record.organisation) == ("red", "acme")
                assert (record.user, record.key, record.model) == ("ann", key.id, "echo")
                assert record.input_tokens == 3
                fresh = record.input_tokens - record.cached_tokens
                cost = fresh * 1000 + record.cached_tokens * 500 + record.output_tokens * 3000
                assert record.cost == cost
            assert redis_server.client.zcard(keys.open_requests()) == 0
            assert redis_server.client.hlen(keys.holds()) == 0

            keeper = backend.teams.bookkeeper
            await wait_until(lambda: keeper.folded == 4)
            last = datetime.now(UTC).date()
            first = last - timedelta(days=1)
            [row] = await keeper.report(Query(first=first, last=last, by=("team", "user")))
            assert row["output_tokens"] == made
            assert row["requests"] == 4
            assert row["reasoning_tokens"] == 5
            assert row["cost"] == sum(record.cost for record in found.values())


async def test_a_teams_cached_prefix_is_its_own_unless_it_shares(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    sharing = [Team(id=name, organisation="acme", share_cache=True) for name in ("green", "yellow")]
    pairs = {team: key_of(team) for team in ("red", "blue", "green", "yellow")}
    async with gateways(redis_server.url, 1, wait_until) as [backend]:
        with workers(redis_server.url, 1, cache_blocks=256):
            await wait_until(lambda: backend.roster.ready)
            await write(backend, [*BASICS, *sharing, *(key for key, _ in pairs.values())])

            async def cached(team: str) -> int:
                caller = await caller_of(backend, pairs[team][1])
                one = job(backend, [1, 2, 3, 4] * 50, cache_salt=caller.cache_salt)
                one = replace(one, toll=caller.toll("echo", "echo"))
                await run_job(backend, one)
                await wait_until(lambda: any(r.id == one.request_id for r in records(redis_server)))
                [record] = [r for r in records(redis_server) if r.id == one.request_id]
                return record.cached_tokens

            assert await cached("red") == 0
            assert await cached("red") > 100
            assert await cached("blue") == 0
            assert await cached("green") == 0
            assert await cached("yellow") > 100
            assert await cached("blue") > 100, "its own"


async def test_a_moved_request_is_charged_once(
    redis_server: RedisServer, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "LEASE_S", LONG_LEASE_S)
    key, sent = key_of()
    async with gateways(redis_server.url, 1, wait_until) as [backend]:
        long = {"drain_s": 0, "lease_s": LONG_LEASE_S}
        with workers(redis_server.url, 1, delay_ms=5, **long) as running:
            await wait_until(lambda: backend.roster.ready)
            [first] = backend.roster.workers
            running += [WorkerProcess(redis_server.url, 5, **long)]
            await wait_until(lambda: len(backend.roster.workers) == 2)
            caller = await caller_of(backend, sent, [*BASICS, key])
            one = metered(backend, caller, tokens=600)
            async with backend.dispatcher.generate(one) as generation:
                so_far = await answer(generation, until=10)
                assert generation.placement is not None
                busy = running[0 if generation.placement.worker == first else 1]
                busy.send(signal.SIGTERM)
                got = await answer(generation, so_far=so_far)
            assert got.count == 600
            await wait_until(lambda: len(records(redis_server)) == 1)
            [record] = records(redis_server)
            assert (record.input_tokens, record.output_tokens, record.attempts) == (3, 600, 2)


async def test_a_dead_gateways_requests_are_settled_by_their_worker(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    limits = Limits(concurrent_requests=1, tokens_per_minute=10_000)
    key, sent = key_of(limits=limits)
    async with gateways(redis_server.url, 2, wait_until) as [dead, alive]:
        with workers(redis_server.url, 1, delay_ms=20):
            await wait_until(lambda: dead.roster.ready and alive.roster.ready)
            revision = await write(dead, [*BASICS, key])
            assert await alive.teams.sync.reached(revision, PATIENCE_S)
            generation = dead.dispatcher.generate(
                metered(dead, await caller_of(dead, sent), tokens=5_000)
            )
            await generation.__aenter__()
            await answer(generation, until=5)
            with pytest.raises(RateLimitError, match="concurrent requests"):
                await run_job(alive, metered(alive, await caller_of(alive, sent)))
            for supervisor in reversed(dead.supervisors):
                await supervisor.stop()  # it says nothing any more
            await wait_until(lambda: len(records(redis_server)) == 1)
            [record] = records(redis_server)
            assert record.outcome == "cancelled"
            assert record.output_tokens >= 5
            await run_job(alive, metered(alive, await caller_of(alive, sent)))
            await wait_until(lambda: len(records(redis_server)) == 2)


async def test_a_clock_that_is_put_back_ends_no_lease(
    redis_server: RedisServer, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, sent = key_of(limits=Limits(concurrent_requests=1))
    redis = redis_server.client
    async with gateways(redis_server.url, 1, wait_until) as [backend]:
        toll = (await caller_of(backend, sent, [*BASICS, key])).toll("echo", "echo")
        assert toll is not None
        permit = await toll.admit("r1", 5, 5)
        late = SimpleNamespace(time=lambda: time.time() - 3_600, monotonic=time.monotonic)
        monkeypatch.setattr(limiter, "time", late)
        monkeypatch.setattr(limiter, "RENEW_AFTER_S", 0.0)
        ends = redis.zscore(keys.open_requests(), "r1")
        await wait_until(lambda: redis.zscore(keys.open_requests(), "r1") > ends)
        permit.settle(Usage(5, 0, 5), "completed", 1)
        await wait_until(lambda: len(records(redis_server)) == 1)
        assert backend.teams.limiter.settlements["settled"] == 1


async def test_what_nobody_settled_is_given_up_and_its_budget_comes_back(
    redis_server: RedisServer, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay_gateway.teams.bookkeeper.GRACE_MS", -keys.HOLD_MS - 1000)
    monkeypatch.setattr("forebay_gateway.teams.bookkeeper.SWEEP_S", 0.0)
    key, sent = key_of(budgets=(Budget(amount=1_000, unit="tokens", window="total"),))
    async with gateways(redis_server.url, 1, wait_until) as [backend]:
        caller = await caller_of(backend, sent, [*BASICS, key])
        toll = caller.toll("echo", "echo")
        assert toll is not None
        await toll.admit("lost", 100, 5_000)
        with pytest.raises(RateLimitError, match="budget"):
            await toll.admit("next", 100, 100)
        await wait_until(lambda: len(records(redis_server)) == 1)
        [record] = records(redis_server)
        assert (record.outcome, record.input_tokens, record.output_tokens) == ("lost", 100, 0)
        assert record.estimated
        await toll.admit("next", 100, 100)


async def test_what_a_scope_used_is_forgotten_a_day_after_it_can_matter(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    hourly, sent = key_of(budgets=(Budget(amount=1, window="hour"),))
    for_ever, other = key_of(budgets=(Budget(amount=1, window="total"),))
    async with gateways(redis_server.url, 1, wait_until) as [backend]:
        await write(backend, [*BASICS, hourly, for_ever])
        before = time.time()
        for token in (sent, other):
            toll = (await caller_of(backend, token)).toll("echo", "echo")
            assert toll is not None
            (await toll.admit(token, 1, 1)).settle(Usage(1, 0, 1), "completed", 1)
        await wait_until(lambda: len(records(redis_server)) == 2)
        client, name = redis_server.client, f"key:{hourly.id}"
        until_ms, *_ = struct.unpack("<d", client.hget(keys.uses(), name)[:8])
        window_ends = until_ms / 1000 - 86_400
        assert before <= window_ends <= time.time() + 3_600
        own = Bookkeeper(redis_server.url, "another")
        await own._forget()
        assert client.hlen(keys.uses()) == 2
        old = struct.pack("<10d", (time.time() - 1) * 1000, *[0.0] * 9)
        client.hset(keys.uses(), name, old)
        client.hset(keys.uses(), "key:deleted", old)
        await own._forget()
        await own._link.close()
        assert client.hkeys(keys.uses()) == [f"key:{for_ever.id}".encode()]


@pytest.mark.chaos
async def test_a_settlement_waits_for_a_redis_that_is_away_and_counts_once(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    key, sent = key_of(limits=Limits(tokens_per_minute=1_000))
    async with gateways(redis_server.url, 1, wait_until) as [backend]:
        with workers(redis_server.url, 1):
            await wait_until(lambda: backend.roster.ready)
            caller = await caller_of(backend, sent, [*BASICS, key])
            toll = caller.toll("echo", "echo")
            assert toll is not None
            permit = await toll.admit("one", 3, 10)
            redis_server.kill()
            await wait_until(lambda: not backend.connected)
            permit.settle(Usage(3, 0, 10), "completed", 1)
            await wait_until(lambda: not backend.publisher.connected)
            with pytest.raises(BusError):
                await toll.admit("two", 3, 10)
            redis_server.start()
            await wait_until(lambda: backend.connected)
            await wait_until(lambda: backend.teams.limiter.unsettled == 0)
            assert len(records(redis_server)) == 1
            await toll.admit("three", 3, 10)


@pytest.mark.chaos
async def test_with_redis_away_a_team_goes_on_by_its_policy_within_what_it_had_left(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    limits = Limits(requests_per_minute=5, tokens_per_minute=10_000)
    goes_on = Team(id="red", organisation="acme", limits=limits, on_outage="continue")
    spends = Team(
        id="green", organisation="acme", on_outage="continue", budgets=(Budget(amount=1),)
    )
    pairs = {team: key_of(team) for team in ("red", "blue", "green")}
    async with gateways(redis_server.url, 1, wait_until) as [backend]:
        with workers(redis_server.url, 1):
            await wait_until(lambda: backend.roster.ready)
            await write(backend, [*BASICS, goes_on, spends, *(key for key, _ in pairs.values())])
            first_at = time.monotonic()
            for _, sent in pairs.values():
                await run_job(backend, metered(backend, await caller_of(backend, sent)))
            await wait_until(lambda: backend.teams.limiter.unsettled == 0)
            redis_server.kill()
            await wait_until(lambda: not backend.publisher.connected)
            for team in ("blue", "green"):  # its policy says no; a budget is not known here
                with pytest.raises(BusError) as refused:
                    await run_job(
                        backend, metered(backend, await caller_of(backend, pairs[team][1]))
                    )
                assert refused.value.retry_after_s
            with pytest.raises(AuthenticationError):
                await caller_of(backend, key_of()[1])
            caller = await caller_of(backend, pairs["red"][1])
            running = [
                asyncio.create_task(run_job(backend, metered(backend, caller))) for _ in range(6)
            ]
            await wait_until(lambda: any(task.done() for task in running))
            assert len(backend.teams.limiter) == 4, "four of five were left"
            redis_server.start()
            outcomes = await asyncio.gather(*running, return_exceptions=True)
            began = [each for each in outcomes if not isinstance(each, BaseException)]
            assert sum(isinstance(each, BusError) for each in outcomes) + len(began) == 6
            await wait_until(lambda: backend.teams.limiter.unsettled == 0)
            await wait_until(lambda: not redis_server.client.hlen(keys.holds()))
            red = [record for record in records(redis_server) if record.team == "red"]
            assert len(red) == 1 + 4
            assert sum(record.output_tokens for record in red) == 8 * (1 + len(began))
            await wait_until(lambda: backend.connected)
            more = await _until_refused(backend, caller)
            assert more <= (time.monotonic() - first_at) / 12, "one comes back each 12 s"


async def _until_refused(backend: Backend, caller: Caller) -> int:
    """How many requests are admitted before one is not."""
    for number in range(100):
        try:
            await run_job(backend, metered(backend, caller))
        except RateLimitError:
            return number
    raise AssertionError("there is no limit")


async def test_limits_change_at_once_and_a_team_shares_its_limit(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    one, sent = key_of()
    two, other = key_of()
    async with gateways(redis_server.url, 1, wait_until) as [backend]:
        await write(backend, [*BASICS, one, two])
        first, second = await caller_of(backend, sent), await caller_of(backend, other)

        async def admit(caller: Caller, number: int) -> None:
            toll = caller.toll("echo", "echo")
            assert toll is not None
            await toll.admit(f"r{number}", 1, 1)

        for number in range(5):
            await admit(first, number)
        team = Team(id="red", organisation="acme", limits=Limits(requests_per_minute=2))
        await write(backend, [team])
        first, second = await caller_of(backend, sent), await caller_of(backend, other)
        await admit(first, 10)
        await admit(second, 11)
        for caller in (first, second):
            with pytest.raises(RateLimitError, match="The team red has reached"):
                await admit(caller, 12)


usage_records = st.builds(
    UsageRecord,
    id=st.uuids().map(str),
    at=st.floats(1_700_000_000, 1_700_500_000),
    team=st.sampled_from(["red", "blue", "a\x1fb\tc"]),
    model=st.sampled_from(["m", "Qwen/Qwen3"]),
    outcome=st.sampled_from(["completed", "error", "lost"]),
    input_tokens=st.integers(0, 1000),
    output_tokens=st.integers(0, 1000),
    cost=st.integers(0, 10**12),
)


@given(st.lists(usage_records, max_size=20), st.integers(0, 20))
def test_reports_add_up_however_the_records_were_folded(
    given_records: list[UsageRecord], cut: int
) -> None:
    books: dict[str, dict[str, int]] = {}
    for part in (given_records[:cut], given_records[cut:]):
        for cell, figures in fold(part).items():
            book = books.setdefault(cell.book, {})
            for number, amount in enumerate(figures, 1):
                field = f"{cell.name}\t{number}"
                book[field] = book.get(field, 0) + amount
    first, last = days_between("2023-11-01", "2023-12-31", date(2023, 12, 1))
    for by in (("team",), ("day", "model"), ("hour",), ()):
        query = Query(first=first, last=last, by=by)
        report = Report(query)
        for name in query.books():
            report.add(books.get(name, {}).items())
        rows = report.rows()
        assert sum(row["output_tokens"] for row in rows) == sum(
            record.output_tokens for record in given_records
        )
        assert sum(row["cost"] for row in rows) == sum(record.cost for record in given_records)
        assert sum(row["failed"] for row in rows) == sum(
            record.outcome != "completed" for record in given_records
        )
    assert all(cell.name.count("\x1f") == 6 for cell in fold(given_records))


async def test_a_report_of_large_books_holds_nobody_up(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    day = date(2026, 11, 5)
    at = datetime(2026, 11, 5, 12, tzinfo=UTC).timestamp()
    made = [
        UsageRecord(id="r", at=at, team="red", key=f"{number:012x}", input_tokens=3)
        for number in range(20_000)
    ]
    book = keys.book_of_days("2026-11")
    fields = {
        f"{cell.name}\t{number}": amount
        for cell, figures in fold(made).items()
        if cell.book == book
        for number, amount in enumerate(figures, 1)
    }
    redis_server.client.hset(book, mapping=fields)
    query = Query(first=day, last=day, by=("team",))
    async with gateways(redis_server.url, 1, wait_until) as [backend]:
        reporting = asyncio.create_task(backend.teams.bookkeeper.report(query))
        turns = 0
        while not reporting.done():
            await asyncio.sleep(0.001)
            turns += 1
        [row] = reporting.result()
    assert (row["team"], row["requests"], row["input_tokens"]) == ("red", 20_000, 60_000)
    assert turns > 20  # a few, had they been summed at one go


def test_money_is_exact() -> None:
    assert [money(n) for n in (0, 1, 10**9, 1_500_000_000, -25 * 10**7)] == [
        "0", "0.000000001", "1", "1.5", "-0.25",
    ]  # fmt: skip
