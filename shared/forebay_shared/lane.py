"""Messages to one stream, in order: one packet is under way, the rest waits and then goes together.

So an engine that outruns Redis makes larger packets instead of more, and a message can never
overtake another although packets are sent again: while the stream is missing (its owner restarts or
makes it anew) or Redis is away, what is queued stays queued. It knows nothing of what the messages
mean.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from forebay_shared.bus import Publisher
from forebay_shared.errors import BusError, BusFullError
from forebay_shared.link import Value
from forebay_shared.packets import Codec

M = TypeVar("M")

RETRY_S = 0.25


class Lane(Generic[M]):
    """A queue of at most `limit` messages to `stream`.

    A packet that cannot be delivered within `patience_s` is given to `undelivered`, with the error
    when it was the bus and None when the stream is missing; so is everything that waits when the
    limit is passed. A packet that a full Redis does not take is given back at once, unless it is
    `vital`: then it is written all the same. `compact` may join what has waited before it is
    packed.
    """

    def __init__(
        self,
        publisher: Publisher,
        stream: str,
        codec: Codec[M],
        *,
        sender: str,
        maxlen: int,
        limit: int,
        patience_s: float,
        undelivered: Callable[[list[M], BusError | None], None],
        compact: Callable[[Sequence[M]], list[M]] = list,
        vital: Callable[[Sequence[M]], bool] = lambda _: False,
    ) -> None:
        self._publisher = publisher
        self._stream = stream
        self._codec = codec
        self._sender = sender
        self._maxlen = maxlen
        self._limit = limit
        self._patience_s = patience_s
        self._undelivered = undelivered
        self._compact = compact
        self._vital = vital
        self._waiting: list[M] = []
        self._packed: list[M] = []
        self._since = 0.0
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False
        self._after_waiting: list[Callable[[], None]] = []
        self._after_packed: list[Callable[[], None]] = []

    def __len__(self) -> int:
        """Messages that are not delivered yet."""
        return len(self._waiting) + len(self._packed)

    @property
    def idle(self) -> bool:
        return not self._packed

    def send(self, messages: Sequence[M]) -> None:
        """Queues messages; they leave at once unless a packet is under way."""
        self._waiting.extend(messages)
        if not self._packed:
            self._pack()
        elif len(self._waiting) > self._limit:
            self._waiting = self._compact(self._waiting)
            if len(self._waiting) > self._limit:
                refused, self._waiting = self._waiting, []
                self._after_waiting = []
                self._undelivered(refused, None)

    def after(self, then: Callable[[], None]) -> None:
        """Calls `then` once all that is queued now was delivered; never, when it is not."""
        if self._waiting:
            self._after_waiting.append(then)
        elif self._packed:
            self._after_packed.append(then)
        else:
            then()

    def close(self) -> None:
        """Forgets what is queued."""
        self._closed = True
        self._waiting = []
        if self._retry is not None:
            self._retry.cancel()

    def _pack(self) -> None:
        self._packed, self._waiting = self._waiting, []
        self._after_packed, self._after_waiting = self._after_waiting, []
        self._since = asyncio.get_running_loop().time()
        self._publish()

    def _publish(self) -> None:
        self._retry = None
        packet = self._codec.encode(self._sender, self._packed)
        vital = self._vital(self._packed)
        future = self._publisher.publish(self._stream, packet, self._maxlen, vital=vital)
        future.add_done_callback(self._landed)

    def _landed(self, future: asyncio.Future[Value]) -> None:
        if self._closed:
            return
        error = future.exception()
        if error is None and future.result() is not None:
            self._packed = []
            delivered, self._after_packed = self._after_packed, []
            for then in delivered:
                asyncio.get_running_loop().call_soon(then)
        else:
            loop = asyncio.get_running_loop()
            full = isinstance(error, BusFullError) and self._patience_s < math.inf
            if not full and loop.time() - self._since < self._patience_s:
                self._retry = loop.call_later(RETRY_S, self._publish)
                return
            refused, self._packed = self._packed, []
            self._undelivered(refused, error if isinstance(error, BusError) else None)
        if self._waiting and not self._packed:
            self._waiting = self._compact(self._waiting)
            self._pack()
