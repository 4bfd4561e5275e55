"""Places of an engine, which those who wait get in the order of a scheduler."""

import asyncio

import pytest
from forebay_worker.engines.places import Places, Ticket


async def test_places_go_by_priority_and_are_never_lost() -> None:
    places, first = Places(1), Ticket()
    await places.take(first)
    order: list[str] = []

    async def wait(name: str, priority: int) -> None:
        ticket = Ticket(priority=priority)
        await places.take(ticket)
        order.append(name)
        places.give_back(ticket)

    tasks = [asyncio.create_task(wait(name, p)) for name, p in (("b", 1), ("x", 0), ("a", 0))]
    await asyncio.sleep(0)
    assert places.waiting == 3
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    places.give_back(first)
    await asyncio.gather(tasks[0], tasks[2])
    assert order == ["a", "b"]
    await places.take(Ticket())
    assert places.waiting == 0


async def test_a_place_that_is_given_as_its_wait_is_cancelled_goes_on() -> None:
    places, first, second, third = Places(1), Ticket(), Ticket(), Ticket()
    await places.take(first)
    tasks = [asyncio.create_task(places.take(ticket)) for ticket in (second, third)]
    await asyncio.sleep(0)
    places.give_back(first)
    tasks[0].cancel()
    await tasks[1]
    assert tasks[0].cancelled()
    assert places.waiting == 0


async def _call(places: Places, served: list[str], team: str, tokens: int, weight: float) -> None:
    ticket = Ticket(team, weight, queued_tokens=10)
    await places.take(ticket)
    served.append(team)
    await asyncio.sleep(0)
    places.give_back(ticket, tokens)


async def test_another_teams_flood_is_not_in_the_way_to_the_next_free_place() -> None:
    places, served = Places(2), list[str]()
    async with asyncio.TaskGroup() as group:
        for _ in range(200):
            group.create_task(_call(places, served, "red", 30, 1.0))
        for _ in range(5):
            await asyncio.sleep(0)
            before = len(served)
            await _call(places, served, "blue", 10, 1.0)
            assert "blue" in served[before : before + 3]


@pytest.mark.parametrize("weight", [1.0, 3.0])
async def test_places_go_to_teams_by_weight(weight: float) -> None:
    places, served = Places(2), list[str]()
    async with asyncio.TaskGroup() as group:
        for _ in range(200):
            group.create_task(_call(places, served, "red", 30, weight))
            group.create_task(_call(places, served, "blue", 10, 1.0))
    red, blue = (served[:200].count(team) * cost for team, cost in (("red", 40), ("blue", 20)))
    assert red / (red + blue) == pytest.approx(weight / (1 + weight), abs=0.03)
