"""One reader for all replies, and a bounded box per attempt that its generation empties.

The reader's task puts the messages of a packet into their boxes and wakes each waiting generation
once per packet. What belongs to no open box, or to another attempt, is dropped and counted. It
knows no worker and no meaning of a reply.
"""

import asyncio
from collections.abc import Sequence

from forebay_shared import keys
from forebay_shared.errors import ForebayError, OverloadedError
from forebay_shared.merge import merge
from forebay_shared.packets import REPLY
from forebay_shared.reader import Feed
from forebay_shared.telemetry import GatewayMetrics, ResubmitReason
from forebay_shared.wire import Delta, Reply, TextDelta, TextLogprobs, TokenLogprobs

COMPACT_AT = 64
SILENT_S = 4.0
"""After a restart of Redis an attempt has so long to say something."""
MAX_TOKENS = 65_536
"""Token ids that may wait for a slow client: 2 MiB as Python has them."""
LOGPROB_WEIGHT = 4
"""A log-probability takes the memory of so many token ids."""
TEXT_WEIGHT = 8
"""A TextDelta takes the memory of so many token ids, its text left out."""
CHARS_PER_ID = 16


class Box:
    """What has arrived for one attempt, until its generation takes it.

    `lost` says why the attempt must be made again, `error` why the job failed; both are read after
    the replies that came before.
    """

    __slots__ = ("_limit", "_pending", "_waiter", "attempt", "error", "heard", "lost", "request_id")

    def __init__(self, request_id: str, attempt: int) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.heard = False
        self.lost: ResubmitReason | None = None
        self.error: ForebayError | None = None
        self._pending: list[Reply] = []
        self._limit = COMPACT_AT
        self._waiter: asyncio.Future[None] | None = None

    def put(self, reply: Reply) -> None:
        self.heard = True
        self._pending.append(reply)
        if len(self._pending) > self._limit:
            self._compact()
        self._wake()

    def lose(self, reason: ResubmitReason) -> None:
        """The attempt is lost: its worker, its stream or some of its replies are gone."""
        self.lost = self.lost or reason
        self._wake()

    def doubt(self) -> None:
        """Its last replies may be lost. The next one shows what is missing; when none comes, the
        attempt is lost."""
        self.heard = False
        asyncio.get_running_loop().call_later(SILENT_S, self._lose_unheard)

    def _lose_unheard(self) -> None:
        if not self.heard:
            self.lose("bus_reset")

    def fail(self, error: ForebayError) -> None:
        self.error = self.error or error
        self._wake()

    def take(self) -> list[Reply]:
        """Everything that waits, in order, adjoining deltas joined."""
        pending, self._pending = self._pending, []
        return merge(pending) if len(pending) > 1 else pending

    async def wait(self) -> None:
        """Returns when something waits, at once when it does already."""
        if self._pending or self.lost is not None or self.error is not None:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    @property
    def tokens(self) -> int:
        """Token ids that wait, and pieces of text."""
        return sum(map(_tokens, self._pending))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _compact(self) -> None:
        self._pending = merge(self._pending)
        self._limit = max(COMPACT_AT, 2 * len(self._pending))
        if sum(map(_weight, self._pending)) > MAX_TOKENS:
            self._pending.clear()
            self.fail(OverloadedError("The client reads its answer too slowly."))


class Inbox:
    """All open boxes of this gateway incarnation."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._boxes: dict[str, Box] = {}

    def __len__(self) -> int:
        return len(self._boxes)

    @property
    def tokens(self) -> int:
        """Token ids that wait in all boxes."""
        return sum(box.tokens for box in self._boxes.values())

    def feed(self, gateway: str) -> Feed[Reply]:
        """The reply stream of this gateway, for its reader."""
        return Feed(
            keys.reply(gateway),
            REPLY,
            self.deliver,
            owned=True,
            reset=self.lose_all,
            restarted=self.doubt_all,
        )

    def open(self, request_id: str, attempt: int) -> Box:
        """A box for an attempt, in place of an earlier one's. Open it before publishing."""
        box = self._boxes[request_id] = Box(request_id, attempt)
        return box

    def adopt(self, box: Box) -> None:
        """Another box for an attempt, in the place of the one that was closed."""
        self._boxes[box.request_id] = box

    def get(self, request_id: str, attempt: int) -> Box | None:
        """The open box of this attempt."""
        box = self._boxes.get(request_id)
        return box if box is not None and box.attempt == attempt else None

    def close(self, box: Box) -> None:
        if self._boxes.get(box.request_id) is box:
            del self._boxes[box.request_id]

    def deliver(self, replies: Sequence[Reply]) -> None:
        """Puts the replies of one packet into their boxes."""
        boxes = self._boxes
        for reply in replies:
            box = boxes.get(reply.request_id)
            if box is None:
                self._metrics.jobs.dropped("unknown")
            elif box.attempt != reply.attempt:
                self._metrics.jobs.dropped("fenced")
            else:
                box.put(reply)

    def lose_all(self) -> None:
        """The reply stream was lost: no attempt can be sure of its replies."""
        self._metrics.process.streams_lost.inc()
        for box in list(self._boxes.values()):
            box.lose("bus_reset")

    def doubt_all(self) -> None:
        """Redis is not the one it was: it may have lost replies that it had taken."""
        for box in list(self._boxes.values()):
            box.doubt()


def _tokens(reply: Reply) -> int:
    return len(reply.token_ids) if type(reply) is Delta else int(type(reply) is TextDelta)


def _weight(reply: Reply) -> int:
    """What a reply takes, in token ids."""
    if type(reply) is TextDelta:
        calls = sum(len(call.arguments) for call in reply.calls)
        text = len(reply.content) + len(reply.reasoning) + calls
        return TEXT_WEIGHT + text // CHARS_PER_ID + _weight_of(reply.logprobs)
    if type(reply) is Delta:
        return len(reply.token_ids) + _weight_of(reply.logprobs or ())
    return 0


def _weight_of(logprobs: Sequence[TokenLogprobs | TextLogprobs]) -> int:
    return len(logprobs) * LOGPROB_WEIGHT * (1 + len(logprobs[0].top)) if logprobs else 0
