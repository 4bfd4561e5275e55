"""Notices a client that leaves while its answer is being made. Knows no dialect."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from litestar.types import Receive

from forebay_gateway.api.errors import ClientGoneError


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncGenerator[None]:
    """Runs its body until the client disconnects, which interrupts it and raises ClientGoneError.

    The body must have been read: whatever `receive` still gives is waited away. An asyncio.Timeout
    does the interrupting, because it takes its own cancellation back and lets a foreign one pass.
    """
    interrupt = asyncio.timeout(None)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        interrupt.reschedule(0)

    try:
        async with interrupt:
            watcher = asyncio.create_task(watch(), name="disconnect-watch")
            try:
                yield
            finally:
                watcher.cancel()
    except TimeoutError:
        if interrupt.expired():
            raise ClientGoneError from None
        raise
