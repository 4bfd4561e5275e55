"""The index follows what workers say, whatever is missed: against a model, and end to end."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from bus_house import job, workers
from forebay_gateway import digests as module
from forebay_gateway import roster
from forebay_gateway.backend import Backend, connect
from forebay_gateway.digests import Digests
from forebay_gateway.prefix_index import PrefixIndex
from forebay_gateway.roster import Roster, Worker
from forebay_shared.settings import GatewaySettings, Secret
from forebay_shared.telemetry import GatewayMetrics
from forebay_shared.wire import CacheEvent, Digest, Snapshot, Started
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from redis_house import WaitUntil
from registry_house import total

LEASE_S = 5.0
"""Twice the usual: a machine that pauses for 3 s costs nobody else a lease."""


class FakeRoster:
    """Workers by name, and who wants to know when one is lost."""

    def __init__(self, names: Sequence[str]) -> None:
        self.live = {name: Worker(name, number) for number, name in enumerate(names)}
        self.lost: Callable[[str], None] = lambda name: None

    @property
    def workers(self) -> list[str]:
        return list(self.live)

    def get(self, name: str) -> Worker | None:
        return self.live.get(name)

    def on_lost(self, listener: Callable[[str], None]) -> None:
        self.lost = listener

    def lose(self, name: str) -> None:
        del self.live[name]
        self.lost(name)


class House:
    """Digests over a fake roster, and what was asked of whom."""

    def __init__(self, *names: str) -> None:
        self.roster = FakeRoster(names)
        self.index = PrefixIndex(1 << 24)
        self.asked: list[str] = []
        self.metrics = GatewayMetrics(CollectorRegistry())
        roster = cast(Roster, self.roster)
        self.digests = Digests(self.index, roster, self.metrics, self.asked.append)

    def held(self, name: str) -> set[int]:
        return set(self.index.held(self.roster.live[name].number))

    async def hear(self, *events: CacheEvent) -> None:
        """Takes events in, and applies all that is queued."""
        self.digests.receive(events)
        await self.settle()

    async def settle(self) -> None:
        task = asyncio.create_task(self.digests.run())
        while self.digests.queued_bytes:  # noqa: ASYNC110  it is a count
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()

    def gaps(self) -> float:
        value = self.metrics.registry.get_sample_value("forebay_digest_gaps_total")
        assert value is not None
        return value


def _pack(hashes: Sequence[int]) -> bytes:
    return b"".join(key.to_bytes(8, "little") for key in hashes)


def _digest(number: int, stored: Sequence[int] = (), evicted: Sequence[int] = ()) -> Digest:
    return Digest("a", number, _pack(stored), _pack(evicted))


async def test_digests_from_the_first_on_need_no_snapshot() -> None:
    house = House("a", "b")
    await house.hear(_digest(1, [1, 2, 3]), _digest(2, [4], [2]))
    assert house.held("a") == {1, 3, 4}
    house.roster.live["a"].digest = 2
    house.digests.check()
    assert house.asked == []


async def test_a_gap_is_closed_by_a_snapshot_and_old_digests_are_not_applied_again() -> None:
    house = House("a", "b")
    await house.hear(_digest(1, [1]), _digest(3, [3]), _digest(4, [4]))
    assert house.gaps() == 1
    house.roster.live["a"].digest = 4
    house.digests.check()
    house.digests.check()
    assert house.asked == ["a"]
    assert total(house.metrics.registry, "forebay_digest_snapshots_total") == 1
    assert house.held("a") == {1}
    parts = [Snapshot("a", 4, 0, 2, _pack([3, 4])), Snapshot("a", 4, 1, 2, _pack([5]))]
    await house.hear(*parts, _digest(3, [33]), _digest(5, [6], [3]), _digest(5, [77]))
    assert house.held("a") == {4, 5, 6}
    await house.hear(*parts)
    assert house.held("a") == {4, 5, 6}


async def test_half_a_snapshot_is_no_snapshot() -> None:
    house = House("a", "b")
    first, second = Snapshot("a", 4, 0, 2, _pack([1])), Snapshot("a", 4, 1, 2, _pack([2]))
    house.roster.live["a"].digest = 5
    await house.hear(second, first, _digest(5, [9]))
    house.digests.check()
    assert house.asked == ["a"]
    await house.hear(first, second, _digest(5, [9]))
    assert house.held("a") == {1, 2, 9}


async def test_what_was_lost_without_a_trace_shows_in_the_beacon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BEHIND_S", 0.0)
    house = House("a", "b")
    await house.hear(_digest(1, [1]))
    house.roster.live["a"].digest = 2
    house.digests.check()
    assert house.asked == ["a"]
    house.roster.live["b"].digest = 0
    house.digests.check()
    assert house.asked == ["a"]


async def test_a_worker_without_a_peer_is_not_asked() -> None:
    house = House("a")
    house.roster.live["a"].digest = 7
    house.digests.check()
    assert house.asked == []


async def test_a_lost_worker_leaves_nothing_and_its_number_serves_another() -> None:
    house = House("a", "b")
    await house.hear(_digest(1, range(1, 5000)))
    house.roster.lose("a")
    house.roster.live["c"] = Worker("c", 0)
    await house.hear(_digest(2, [7]), Digest("c", 1, _pack([9])))
    assert house.held("c") == {9}
    for _ in range(50):
        house.digests.check()
    assert len(house.index) == 1


async def test_too_much_at_once_is_dropped_and_asked_for_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED_BYTES", 10_000)
    house = House("a", "b")
    await house.hear(_digest(1, [1]))
    house.roster.live["a"].digest = 3
    await house.hear(_digest(2, range(1, 2000)), _digest(3, [5]))
    assert house.held("a") == {1}
    house.digests.check()
    assert house.asked == ["a"]
    await house.hear(Snapshot("a", 3, 0, 1, _pack([2, 3])))
    assert house.held("a") == {2, 3}


@dataclass
class Teller:
    """A worker's side: a set, numbered digests, snapshots."""

    held: set[int] = field(default_factory=set[int])
    number: int = 0

    def change(self, stored: set[int], evicted: set[int]) -> CacheEvent:
        stored, evicted = stored - self.held, (evicted & self.held) - stored
        self.held = (self.held | stored) - evicted
        self.number += 1
        return _digest(self.number, sorted(stored), sorted(evicted))

    def snapshot(self, parts: int) -> list[CacheEvent]:
        held = sorted(self.held)
        pieces = [held[at::parts] for at in range(parts)]
        return [
            Snapshot("a", self.number, at, parts, _pack(piece)) for at, piece in enumerate(pieces)
        ]


few = st.sets(st.integers(1, 12), max_size=5)
steps = st.one_of(
    st.tuples(st.just("change"), few, few),
    st.tuples(st.just("snapshot"), st.integers(1, 3)),
    st.tuples(st.just("check")),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(steps, st.sampled_from(["in", "in", "lost", "twice"])), max_size=30))
def test_whatever_is_lost_or_repeated_a_followed_cache_is_the_worker_s_own(
    told: list[tuple[Any, str]],
) -> None:
    async def follow() -> None:
        house, teller = House("a", "b"), Teller()
        worker = house.roster.live["a"]
        for step, fate in told:
            if step[0] == "check":
                worker.digest = teller.number
                house.digests.check()
                continue
            if step[0] == "change":
                events = [teller.change(step[1], step[2])]
            else:
                events = teller.snapshot(step[1])
            for event in events:
                if fate == "lost" and random.random() < 0.7:
                    continue
                await house.hear(*([event] * (2 if fate == "twice" else 1)))
            if house.digests.follows("a", teller.number):
                assert house.held("a") == teller.held
        await house.hear(teller.change({99}, set()), *teller.snapshot(2))
        assert house.digests.follows("a", teller.number)
        assert house.held("a") == teller.held

    asyncio.run(follow())


@asynccontextmanager
async def gateway(url: str) -> AsyncIterator[Backend]:
    async with connect(GatewaySettings(redis_url=Secret(url))) as backend:
        yield backend


async def _placed(backend: Backend, prompt: Sequence[int], salt: str = "") -> tuple[str, int]:
    """Begins a job; the worker that took it and the tokens that it found in its cache."""
    one = job(backend, prompt, tokens=500, cache_salt=salt)
    async with backend.dispatcher.generate(one) as generation:
        started = (await generation.events())[0]
        placement = generation.placement
        assert placement is not None
        assert isinstance(started, Started)
        return placement.worker, started.cached_tokens


async def test_a_prefix_finds_its_worker_through_any_gateway_until_that_is_killed(
    redis_url: str, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "LEASE_S", LEASE_S)
    with workers(redis_url, 2, delay_ms=20, cache_blocks=4096, lease_s=LEASE_S) as running:
        async with gateway(redis_url) as one, gateway(redis_url) as two:
            for backend in (one, two):
                await wait_until(lambda b=backend: len(b.roster.workers) == 2)
            prompts, homes = list[list[int]](), list[str]()
            while len(set(homes)) < 2 or len(homes) < 4:
                prompts.append([len(prompts), *range(1, 200)])
                home, cached = await _placed((one, two)[len(prompts) % 2], prompts[-1])
                assert cached == 0
                homes.append(home)
            blocks = len(prompts) * (200 // 16)
            await wait_until(lambda: len(one.index) == len(two.index) == blocks)
            for number, prompt in enumerate(prompts):
                other = (one, two)[number % 2]
                assert await _placed(other, [*prompt, 7, 8, 9]) == (homes[number], 192)
            async with gateway(redis_url) as late:
                await wait_until(lambda: len(late.index) >= blocks)
                assert await _placed(late, prompts[0]) == (homes[0], 192)
                assert (await _placed(late, prompts[0], "another tenant"))[1] == 0
            running[0].kill()
            await wait_until(lambda: len(one.roster.workers) == 1)
            orphan = next(at for at, home in enumerate(homes) if home not in one.roster.workers)
            assert await _placed(one, prompts[orphan]) == (one.roster.workers[0], 0)
            assert (await _placed(one, prompts[orphan]))[1] == 192
            text = await one.metrics()
            assert "forebay_router_picks_total" in text
            assert "forebay_prefix_hit_tokens_total" in text
