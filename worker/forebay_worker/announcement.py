"""What a worker says while it has no engine yet: which models it is loading.

Loading holds the main thread, so this has a thread and a connection of its own. Gateways answer
"still loading" meanwhile, not "no such model". It knows no engine.
"""

import asyncio
import contextlib
import threading
from types import TracebackType
from typing import Self

import msgspec
from forebay_shared import keys
from forebay_shared.bus import Publisher
from forebay_shared.packets import ROSTER
from forebay_shared.wire import Beacon, Farewell, Load, RosterEvent

FAREWELL_S = 1.0

_encode = msgspec.msgpack.Encoder().encode


class Announcement:
    """Renewed until `end`, or until the context is left; left by an error it takes all back.

    Without names there is nothing to say, and no thread.
    """

    def __init__(self, redis_url: str, worker: str, names: tuple[str, ...]) -> None:
        self._worker = worker
        self._url = redis_url
        self._beacon = Beacon(worker=worker, card="", load=Load(), draining=True, loading=names)
        self._takes_back = False
        self._ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="announcement", daemon=True)

    def __enter__(self) -> Self:
        if self._beacon.loading:
            self._loop = asyncio.new_event_loop()
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._takes_back = kind is not None
        self.end()

    def end(self) -> None:
        """Says no more: when it returns, nothing is on its way. Ending twice is fine."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        loop.close()

    def _run(self) -> None:
        assert self._loop is not None
        self._loop.run_until_complete(self._say())

    async def _say(self) -> None:
        publisher = Publisher(self._url)
        sending = asyncio.create_task(publisher.run(), name="announcement.publisher")
        try:
            while not self._ended.is_set():
                self._renew(publisher)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(keys.RENEW_S):
                        await self._ended.wait()
            if self._takes_back:
                self._take_back(publisher)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await publisher.drain()
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending

    def _renew(self, publisher: Publisher) -> None:
        call = publisher.call
        call("SET", keys.worker_lease(self._worker), "1", "PX", keys.LEASE_MS, vital=True)
        self._tell(publisher, self._beacon)
        call("HSET", keys.members(), self._worker, _encode(self._beacon))
        call("PEXPIRE", keys.members(), keys.STREAM_TTL_MS)

    def _take_back(self, publisher: Publisher) -> None:
        self._tell(publisher, Farewell(worker=self._worker))
        publisher.call("HDEL", keys.members(), self._worker)
        publisher.call("DEL", keys.worker_lease(self._worker))

    def _tell(self, publisher: Publisher, event: RosterEvent) -> None:
        packet = ROSTER.encode(self._worker, [event])
        publisher.announce(keys.roster(), packet, keys.ROSTER_MAXLEN, vital=True)
        publisher.call("PEXPIRE", keys.roster(), keys.STREAM_TTL_MS)
