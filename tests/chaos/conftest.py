"""Fixtures: dice with a printed seed, the moments of a fault, houses that a module shares."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chaos_house import House, tiny_flags, tiny_house
from dice import OFFSETS, SEED, Moments
from redis_house import RedisServer, redis_running


def pytest_report_header() -> str:
    return f"CHAOS_SEED={SEED} gives the same moments again"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(f"{SEED} {request.node.name}")


@pytest.fixture
def moments(rng: random.Random) -> Moments:
    def draw(low: int, high: int) -> Iterator[int]:
        for number in range(OFFSETS):
            events = rng.randint(low, high)
            print(f"CHAOS_SEED={SEED}: moment {number}, after {events} parts of answers")
            yield events

    return draw


class Keeper:
    """Keeps a house for a module's tests; one that a test left unsound is built anew."""

    def __init__(self, build: Callable[[RedisServer], House]) -> None:
        self._build = build
        self._house: House | None = None

    def get(self, redis: RedisServer) -> House:
        if self._house is not None and not self._house.sound:
            self.close()
            redis.kill()
            redis.forget()
            redis.start()
        if self._house is None:
            self._house = self._build(redis)
        return self._house

    def close(self) -> None:
        if self._house is not None:
            self._house.close()
            self._house = None

    def leave(self) -> None:
        """The last look, when all tests are over."""
        try:
            if self._house is not None and self._house.sound:
                self._house.balance.check_keys()
        finally:
            self.close()


def _kept(redis: RedisServer, build: Callable[[RedisServer], House]) -> Iterator[Keeper]:
    keeper = Keeper(build)
    try:
        yield keeper
    finally:
        keeper.leave()


@pytest.fixture(scope="module")
def module_redis() -> Iterator[RedisServer]:
    with redis_running() as server:
        yield server


@pytest.fixture(scope="module")
def echo_keeper(module_redis: RedisServer) -> Iterator[Keeper]:
    yield from _kept(module_redis, House)


@pytest.fixture
def house(echo_keeper: Keeper, module_redis: RedisServer) -> House:
    """Two gateways and two echo workers."""
    return echo_keeper.get(module_redis)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_checkpoint import make_directory

    return make_directory(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny_keeper(module_redis: RedisServer, tiny_model: Path) -> Iterator[Keeper]:
    yield from _kept(module_redis, lambda redis: tiny_house(redis, tiny_flags(tiny_model)))


@pytest.fixture
def small(tiny_keeper: Keeper, module_redis: RedisServer) -> House:
    """Two gateways and two native engines with a small random model."""
    return tiny_keeper.get(module_redis)
