"""What a metered request has used: measured by its worker, counted here until it is settled.

The worker's own figures come with each sequence's end, also when the client has left: a tail waits
for them a little longer. It knows no limits, no prices and no HTTP; a `Toll` does.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self

from forebay_shared.books import Outcome, total
from forebay_shared.errors import ForebayError
from forebay_shared.telemetry import ResubmitReason
from forebay_shared.wire import Delta, Done, Embedded, Failed, Reply, Started, TextDelta, Usage

from forebay_gateway.inbox import Box, Inbox

TAIL_S = 5.0
"""How long a worker may take to say what an aborted request has used."""


class Receipt(Protocol):
    """An admitted request; see teams.limiter.Permit."""

    def settle(
        self, usage: Usage, outcome: Outcome, attempts: int, reasoning_tokens: int = 0
    ) -> None: ...


class Toll(Protocol):
    """Who pays for a request."""

    async def admit(self, request_id: str, input_tokens: int, output_tokens: int) -> Receipt:
        """Raises RateLimitError or BusError when it may not start."""
        ...


class Demand(NamedTuple):
    """What a job may take at most, and who pays for it. `estimated`: of a text, whose tokens only
    its engine can tell."""

    toll: Toll | None
    input_tokens: int
    output_tokens: int
    n: int
    estimated: bool = False


class Meter:
    """The `n` sequences of one admitted request, over all its attempts."""

    __slots__ = (
        "_aborted", "_cached", "_done", "_estimated", "_n", "_positions", "_prompt", "_receipt",
        "_started", "_stopped", "attempts", "reasoning_tokens", "settled", "tailed",
    )  # fmt: skip

    def __init__(
        self, receipt: Receipt, prompt_tokens: int, n: int, *, estimated: bool = False
    ) -> None:
        self._receipt = receipt
        self._estimated = estimated
        self._prompt = prompt_tokens
        self._n = n
        self._started = False
        self._cached = 0
        self._positions: dict[int, int] = {}
        self._done: dict[int, Usage] = {}
        self._aborted: set[int] = set()
        self._stopped: set[int] = set()
        self.attempts = 0
        self.reasoning_tokens = 0
        """What whoever reads the text takes for thinking; a worker cannot tell."""
        self.settled = False
        self.tailed = False
        """A tail will settle it."""

    @classmethod
    async def admitted(cls, request_id: str, toll: Toll, demand: Demand) -> Self:
        """Asks for the job's admission. Raises RateLimitError, BusError."""
        receipt = await toll.admit(request_id, demand.input_tokens, demand.output_tokens)
        return cls(receipt, demand.input_tokens, demand.n, estimated=demand.estimated)

    @property
    def complete(self) -> bool:
        """Every sequence's own figures are here."""
        return len(self._done) >= self._n

    def begin(self) -> None:
        """A new attempt: what another worker aborted runs again, unless we stopped it."""
        self.attempts += 1
        for index in self._aborted - self._stopped:
            self._done.pop(index, None)
        self._aborted &= self._stopped

    def stop(self, index: int) -> None:
        """The sequence is aborted for us, not lost."""
        self._stopped.add(index)

    def take(self, replies: Sequence[Reply]) -> None:
        """Looks through the replies of the current attempt."""
        for reply in replies:
            if isinstance(reply, Delta):
                end = reply.offset + len(reply.token_ids)
                self._positions[reply.index] = max(self._positions.get(reply.index, 0), end)
            elif isinstance(reply, TextDelta):
                self._positions[reply.index] = reply.offset + 1
            elif isinstance(reply, Embedded):
                self._started = True
                self._done[0] = reply.usage
            elif isinstance(reply, Done):
                self._done[reply.index] = reply.usage
                if reply.finish_reason == "abort":
                    self._aborted.add(reply.index)
            elif isinstance(reply, Started):
                self._started = True
                self._cached = reply.cached_tokens

    def settle(self, outcome: Outcome) -> None:
        """Settles with the best figures that there are. Once."""
        if not self.settled:
            self.settled = True
            attempts = max(1, self.attempts)
            self._receipt.settle(self._usage(), outcome, attempts, self.reasoning_tokens)

    def _usage(self) -> Usage:
        if not self._started:
            return Usage()  # it was never scheduled
        missing = [
            Usage(
                self._prompt,
                self._cached,
                self._positions.get(index, 0),
                estimated=self._estimated,
            )
            for index in range(self._n)
            if index not in self._done
        ]
        return total([*self._done.values(), *missing])


class Tail(Box):
    """Takes the box's place when nobody waits for a request any more, for the worker's figures."""

    __slots__ = ("_ended", "_inbox", "_meter", "_outcome", "_timer", "over")

    def __init__(
        self,
        inbox: Inbox,
        box: Box,
        meter: Meter,
        outcome: Outcome,
        ended: Callable[["Tail"], None],
    ) -> None:
        super().__init__(box.request_id, box.attempt)
        self._inbox = inbox
        self._meter = meter
        self._outcome: Outcome = outcome
        self._ended = ended
        self._timer = asyncio.get_running_loop().call_later(TAIL_S, self.end)
        meter.take(box.take())
        self.over = meter.complete
        if self.over:
            self.end()

    def put(self, reply: Reply) -> None:
        self._meter.take((reply,))
        if self._meter.complete or type(reply) is Failed:
            self.end()

    def lose(self, reason: ResubmitReason) -> None:
        self.end()

    def fail(self, error: ForebayError) -> None:
        self.end()

    def end(self) -> None:
        """Settles with what is known."""
        self._timer.cancel()
        self._inbox.close(self)
        self._meter.settle(self._outcome)
        self._ended(self)
