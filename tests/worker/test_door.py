"""Who may wait at a worker: bounds by requests, tokens and team, and by the queue's drain rate."""

import itertools
import random

import pytest
from forebay_shared.errors import ForebayError, OverloadedError, RateLimitError
from forebay_worker.door import Bounds, Door, Key


class House:
    """A door with a clock of the test's own."""

    def __init__(self, **bounds: float) -> None:
        self.now = 100.0
        self.refused: list[str] = []
        self.door = Door(Bounds(**bounds), lambda: self.now, self.refused.append)
        self._serial = 0

    def enter(
        self, tokens: int = 10, team: str = "", patience_s: float = 0.0, weight: float = 1.0
    ) -> Key:
        self._serial += 1
        key = (f"r{self._serial}", 1)
        self.door.enter(key, team, tokens, patience_s, weight)
        return key

    def fill(self, team: str) -> int:
        """Requests of a team until one is refused."""
        for held in itertools.count():
            try:
                self.enter(1, team)
            except RateLimitError:
                return held
        raise AssertionError

    def drain(self, seconds: int, per_s: int, tokens: int) -> None:
        """A second's arrivals are served in the next one, so that something always waits."""
        waiting = [self.enter(tokens) for _ in range(per_s)]
        for _ in range(seconds):
            self.now += 1.0
            fresh = [self.enter(tokens) for _ in range(per_s)]
            for key in waiting:
                self.door.leave(key, served=True)
            waiting = fresh


def test_what_is_above_a_bound_is_refused_and_counted() -> None:
    house = House(requests=2, tokens=1000)
    house.enter(10)
    with pytest.raises(OverloadedError) as refused:
        house.enter(991)
    assert refused.value.retry_after_s == 1.0
    first = house.enter(990)
    with pytest.raises(OverloadedError):
        house.enter(1)
    assert house.refused == ["tokens", "requests"]
    house.door.leave(first, served=True)
    house.enter(1)


def test_an_empty_queue_takes_a_request_of_any_size() -> None:
    house = House(requests=1, tokens=10)
    house.enter(10_000)
    assert len(house.door) == 1


def test_a_team_holds_its_share_and_no_more() -> None:
    house = House(requests=10, tokens=1000, share=0.5)
    house.enter(team="blue")
    keys = [house.enter(team="red") for _ in range(5)]
    with pytest.raises(RateLimitError):
        house.enter(team="red")
    for _ in range(2):
        house.enter(team="blue")
    for key in keys[:3]:
        house.door.leave(key, served=False)
    with pytest.raises(RateLimitError):
        house.enter(900, team="red")
    house.enter(team="red")
    assert house.refused == ["team", "team"]


def test_however_many_teams_flood_there_is_room_for_another_one() -> None:
    """Each holds at most its share of what the others leave."""
    house = House(requests=1024)
    held = [house.fill(f"team {at}") for at in range(6)]
    assert held == [512, 256, 128, 64, 32, 16]
    house.enter(team="blue")


def test_a_queue_of_another_teams_is_not_in_the_way() -> None:
    """The engine serves teams in turns: blue's next request is served at once, whatever red has
    waiting, and what blue has waiting at blue's share of the rate, here a third."""
    house = House()
    house.drain(20, per_s=5, tokens=100)
    for _ in range(400):
        house.enter(100, team="red")
    assert house.door.wait_s == pytest.approx(81, rel=0.1)
    with pytest.raises(OverloadedError):
        house.enter(100, team="red", patience_s=30)
    for _ in range(10):  # 2 s of work for the whole engine
        house.enter(100, team="blue", patience_s=8)
    with pytest.raises(OverloadedError):
        house.enter(100, team="blue", patience_s=6)
    house.enter(100, team="blue", patience_s=6, weight=9.0)
    assert house.refused == ["wait", "wait"]


def test_who_would_expire_in_the_queue_is_not_let_in() -> None:
    house = House()
    house.drain(20, per_s=5, tokens=100)
    for _ in range(45):  # with the 5 that wait: 10 s of work
        house.enter(100, patience_s=30)
    assert house.door.wait_s == pytest.approx(10, rel=0.1)
    with pytest.raises(OverloadedError) as refused:
        house.enter(100, patience_s=5)
    assert refused.value.retry_after_s == pytest.approx(6, rel=0.2)
    house.enter(100, patience_s=15)
    assert house.refused == ["wait"]


def test_the_advice_is_the_time_in_which_half_of_the_queue_leaves() -> None:
    house = House(requests=100)
    house.drain(20, per_s=5, tokens=100)
    for _ in range(95):
        house.enter(100)
    with pytest.raises(OverloadedError) as refused:
        house.enter(100)
    assert refused.value.retry_after_s == pytest.approx(10, rel=0.1)


def test_one_that_goes_on_is_let_in_whatever_waits() -> None:
    house = House(requests=1)
    house.enter()
    house.door.force(("going on", 2), "", 10)
    assert len(house.door) == 2


def test_after_any_history_nothing_is_left() -> None:
    house, rng = House(requests=20, tokens=2_000), random.Random(7)
    held: list[Key] = []
    refusals: list[ForebayError] = []
    for _ in range(5_000):
        house.now += rng.random() / 10
        try:
            held.append(house.enter(rng.randrange(1, 300), rng.choice("abc"), rng.choice([0, 5])))
        except ForebayError as refusal:
            refusals.append(refusal)
        while held and rng.random() < 0.4:
            key = held.pop(rng.randrange(len(held)))
            for _ in range(2):  # an end after a start, as the service says them
                house.door.leave(key, served=rng.random() < 0.9)
        assert len(house.door) == len(held) <= 20
    assert refusals
    assert all(1.0 <= (each.retry_after_s or 0) <= 40.0 for each in refusals)
    for key in held:
        house.door.leave(key, served=True)
    assert len(house.door) == 0
    assert house.door.wait_s == 0.0
