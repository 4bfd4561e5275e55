"""Tasks with a name, an owner and a stop; and the one helper for farewells inside cancelled scopes.

CancelledError is never swallowed: it is put off at most until a farewell's deadline. It knows
nothing of what the tasks do.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

import anyio

log = logging.getLogger(__name__)

T = TypeVar("T")


class Supervisor:
    """Owns long-running tasks. As a context manager it stops them on leaving, the last started
    first.

    A task that ends by an exception ends the house: `failure` raises it, and who waits there
    stops the process. A task that merely returns is done.
    """

    def __init__(self, name: str, *, stop_timeout_s: float = 2.0) -> None:
        self._name = name
        self._stop_timeout_s = stop_timeout_s
        self._tasks: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` as a task."""
        task = asyncio.create_task(work, name=f"{self._name}.{name}")
        self._tasks.append(task)
        task.add_done_callback(self._ended)

    async def failure(self) -> None:
        """Waits for ever, or raises what the first failed task raised."""
        await asyncio.shield(self._failed)

    async def finish(self, timeout_s: float) -> None:
        """Gives the tasks so long to come to their end by themselves."""
        if self._tasks and timeout_s > 0:
            await asyncio.wait(list(self._tasks), timeout=timeout_s)

    async def stop(self) -> None:
        """Cancels the tasks one by one, newest first, each within the stop time."""
        try:
            while self._tasks:
                task = self._tasks.pop()
                task.cancel()
                _, pending = await asyncio.wait({task}, timeout=self._stop_timeout_s)
                if pending:
                    log.error("task %s did not stop in time", task.get_name())
        finally:  # who is cancelled while stopping still leaves no task behind
            for task in self._tasks:
                task.cancel()
            self._failed.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task in self._tasks:
            self._tasks.remove(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("task %s failed", task.get_name(), exc_info=error)
        if not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()  # retrieved: nobody has to wait for it


async def shielded(work: Coroutine[Any, Any, T], timeout_s: float) -> T | None:
    """Finishes `work` although the caller is being cancelled; None when the time runs out.

    The work runs as a task of its own, so no cancel of the caller reaches it, and the wait is
    shielded from the caller's anyio scopes, which would otherwise cancel every await again. A
    cancel that arrives in the meantime is raised afterwards.
    """
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    with anyio.CancelScope(shield=True):
        while not task.done() and (left := deadline - loop.time()) > 0:
            try:
                await asyncio.wait({task}, timeout=left)
            except asyncio.CancelledError as error:
                cancelled = error
    if not task.done():
        task.cancel()
    if cancelled is not None:
        raise cancelled
    if not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task}, timeout=0)
        return None
    return task.result()
