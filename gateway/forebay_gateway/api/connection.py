"""Notices a client that leaves while its answer is being made. Knows no dialect."""

import asyncio
from types import TracebackType

from litestar.types import Receive

from forebay_gateway.api.errors import ClientGoneError


class WhileConnected:
    """Runs its body until the client disconnects, which interrupts it and raises ClientGoneError.

    The body must have been read: whatever `receive` still gives is waited away. An asyncio.Timeout
    does the interrupting, because it takes its own cancellation back and lets a foreign one pass.
    """

    __slots__ = ("_interrupt", "_receive", "_watcher")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._interrupt = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._interrupt.__aenter__()
        self._watcher = asyncio.create_task(self._watch(), name="disconnect-watch")

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watcher.cancel()
        try:
            await self._interrupt.__aexit__(kind, error, trace)
        except TimeoutError:
            raise ClientGoneError from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._interrupt.reschedule(0)
