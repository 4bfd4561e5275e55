"""Tasks stop in order and in time; a farewell ends although everything around it is cancelled."""

import asyncio
import contextlib

import anyio
import pytest
from forebay_shared.supervise import Supervisor, shielded


async def test_tasks_stop_newest_first() -> None:
    stopped: list[str] = []

    async def work(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(name)

    async with Supervisor("test") as tasks:
        for name in ("publisher", "reader", "beacon"):
            tasks.start(name, work(name))
        await asyncio.sleep(0)
    assert stopped == ["beacon", "reader", "publisher"]


async def test_tasks_may_be_given_time_to_finish() -> None:
    release = asyncio.Event()
    done: list[str] = []

    async def work(name: str, until: asyncio.Event) -> None:
        await until.wait()
        done.append(name)

    async with Supervisor("test") as tasks:
        await tasks.finish(60)  # there is nothing to wait for
        tasks.start("short", work("short", release))
        asyncio.get_running_loop().call_soon(release.set)
        await tasks.finish(60)
        assert done == ["short"]
        tasks.start("long", work("long", asyncio.Event()))
        await tasks.finish(0.01)
        await tasks.finish(0)
    assert done == ["short"]


async def test_a_failed_task_is_told_to_who_waits() -> None:
    async def fail() -> None:
        raise ValueError("broken")

    async with Supervisor("test") as tasks:
        tasks.start("failing", fail())
        with pytest.raises(ValueError, match="broken"):
            await tasks.failure()


async def test_a_task_that_will_not_stop_holds_nobody_for_long() -> None:
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()

    tasks = Supervisor("test", stop_timeout_s=0.1)
    tasks.start("stubborn", stubborn())
    await asyncio.sleep(0)
    await tasks.stop()
    assert not release.is_set()
    release.set()


async def test_a_farewell_ends_in_a_cancelled_anyio_scope() -> None:
    said: list[str] = []

    async def farewell() -> str:
        await asyncio.sleep(0.02)
        said.append("bye")
        return "bye"

    async def generator() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            assert await shielded(farewell(), 5) == "bye"

    async with anyio.create_task_group() as group:
        group.start_soon(generator)
        await asyncio.sleep(0)
        group.cancel_scope.cancel()
    assert said == ["bye"]


async def test_a_cancel_during_a_farewell_is_raised_after_it() -> None:
    said = asyncio.Event()
    begun = asyncio.Event()

    async def farewell() -> None:
        begun.set()
        await asyncio.sleep(0.05)
        said.set()

    async def caller() -> None:
        await shielded(farewell(), 5)

    task = asyncio.create_task(caller())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert said.is_set()


async def test_a_farewell_that_takes_too_long_is_given_up() -> None:
    assert await shielded(asyncio.sleep(60), 0.05) is None


async def test_a_farewell_passes_its_error_on() -> None:
    async def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await shielded(fail(), 5)
