"""Fixtures of every test: a real Redis, a check that no key is left, waiting for conditions."""

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from patience import PATIENCE_S, START_S
from redis_house import RedisServer, WaitUntil, redis_running
from serve_house import starting

if TYPE_CHECKING:
    from tiny_house import Tiny

# The same examples in each run, however slow the machine; `--hypothesis-profile explore` draws new
# ones.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("explore"), derandomize=True)
settings.load_profile("same")

if shutil.which("nvidia-smi") is None:
    # Triton reads it when it is first imported, which another test's imports may do.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The clients' tests need environments of their own, chaos its time: only when named."""
    name = collection_path.name
    named = any(name in argument for argument in config.args)
    return True if name in ("clients", "chaos") and not named else None


@pytest.fixture(scope="session")
def session_redis() -> Iterator[RedisServer]:
    with redis_running() as server:
        yield server


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Tiny"]:
    """One server on a small random model for all tests that want the whole product."""
    from tiny_checkpoint import MAX_LEN, MODEL, make_directory
    from tiny_house import Tiny

    home = make_directory(tmp_path_factory.mktemp("tiny"))
    with starting() as start:
        server = start(str(home), "--served-model-name", MODEL, "--max-model-len", str(MAX_LEN))
        tiny = Tiny(server.wait_ready(START_S), home)
        with tiny.http:
            yield tiny


@pytest.fixture
def redis_url(session_redis: RedisServer) -> Iterator[str]:
    """URL of the session's Redis, empty. A test may leave only keys with a TTL."""
    client = session_redis.client
    client.flushall()
    yield session_redis.url
    leaked = [key for key in client.scan_iter() if client.ttl(key) == -1]
    client.flushall()
    assert not leaked, f"keys without a TTL were left: {leaked}"


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A Redis of this test alone, which it may kill and start again."""
    with redis_running() as server:
        yield server


@pytest.fixture
def wait_until() -> WaitUntil:
    """`await wait_until(condition)`: fails when the condition stays false."""

    async def wait(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the condition stayed false"
            await asyncio.sleep(0.005)

    return wait
