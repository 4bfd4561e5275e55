"""Fixtures: servers to start, and one that a module shares."""

from collections.abc import Iterator

import pytest
from serve_house import Serve, Starter, starting


@pytest.fixture
def start() -> Iterator[Starter]:
    with starting() as starter:
        yield starter


@pytest.fixture(scope="module")
def echo() -> Iterator[Serve]:
    """Two gateways and an echo engine that takes 10 ms per step. A test leaves it healthy."""
    with starting() as starter:
        yield starter("--engine", "echo", "--echo-delay-ms", "10", "--gateways", "2").wait_ready()
