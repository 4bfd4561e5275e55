"""A job's attempts: placed on a worker, fenced from older ones, made again when that is lost.

The gateway that runs a job owns it: it numbers the attempts, drops what belongs to an old one, and
places the job again when its worker is lost. What is asked of a worker, and what its answers mean,
is the business of the kinds of work: `generation`, `telling` and `encoding`.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from forebay_shared.books import Outcome
from forebay_shared.errors import (
    DeadlineError,
    DrainingError,
    EngineError,
    ForebayError,
    OverloadedError,
    RateLimitError,
    WorkerLostError,
    from_code,
)
from forebay_shared.telemetry import ResubmitReason
from forebay_shared.wire import Task

from forebay_gateway.inbox import Box
from forebay_gateway.jobs import EncodeJob, Job, TextJob
from forebay_gateway.ledger import Book
from forebay_gateway.meter import Meter
from forebay_gateway.router import Choice
from forebay_gateway.routing import Prompted

if TYPE_CHECKING:
    from forebay_gateway.dispatch import Dispatcher
    from forebay_gateway.roster import Worker

log = logging.getLogger(__name__)

E = TypeVar("E")

MAX_ATTEMPTS = 3
"""So many may fail."""
SUSPECT_AFTER = 2
"""With so many workers lost under it, the request may be what ends them, or have run beside that.
It is begun alone from now on, and what ends a worker alone is given up."""
MAX_PLACEMENTS = 16
"""Attempts of any kind. Being handed over, a loss on the bus, or of a worker that others ran on, is
not the request's doing and does not count above: a long answer may outlive a rolling restart of
many workers."""
BLAMELESS: frozenset[ResubmitReason] = frozenset({"drained", "bus_reset"})
OVERDUE_S = 5.0
"""Past the queue's own deadline, which the engine watches, by so much."""

_LOST = "The worker was lost. Please retry."
_ENDED = (
    "The worker ended while it ran this request alone, and others before it: it is not tried again."
)


@dataclass(slots=True)
class Placement:
    """One attempt. `over` when its worker has nothing of it any more."""

    worker: str
    attempt: int
    box: Box
    timer: asyncio.TimerHandle
    choice: "Choice[Worker]"
    begun: bool = False
    accepted: bool = False
    over: bool = False


class Attempts(ABC, Generic[E]):
    """A running job. Use it as an async context manager; leaving it cancels what still runs."""

    def __init__(
        self,
        dispatcher: "Dispatcher",
        job: Job | TextJob | EncodeJob,
        book: Book[E],
    ) -> None:
        self._book = book
        self._demand = job.demand
        self._meter: Meter | None = None
        self.dispatcher = dispatcher
        self.request_id = job.request_id
        self.card = job.card
        self._attempts = 0
        self._strikes = 0
        self._losses = 0
        self._tried: set[str] = set()
        self._error: ForebayError | None = None
        self.placement: Placement | None = None

    @property
    def has_begun(self) -> bool:
        """Anything of it ran, in any attempt."""
        return self._book.begun

    @property
    def taken(self) -> bool:
        """A worker has it in its queue, or is done with it: none refuses it for want of room."""
        placement = self.placement
        return not self._book.open or (placement is not None and placement.accepted)

    @abstractmethod
    def message(self, attempt: int) -> Task:
        """What the worker of this attempt is to do."""

    @abstractmethod
    def prompt(self) -> Prompted:
        """What the router is to look at."""

    def begun(self, placement: Placement, event: E) -> None:
        """The first event of an attempt came."""

    @property
    def suspect(self) -> bool:
        """It may be what ends its workers."""
        return self._losses >= SUSPECT_AFTER

    @property
    def repeatable(self) -> bool:
        """Another attempt would go on where this one is lost."""
        return True

    async def __aenter__(self) -> Self:
        """Raises RateLimitError when the job's owner has reached a limit, and BusError."""
        demand = self._demand
        if demand.toll is not None:
            self._meter = await Meter.admitted(self.request_id, demand.toll, demand)
        self.dispatcher.enter(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Nothing is awaited here: a lane takes the cancel at once and the publisher's own task
        # sends it, so a scope that cancels every await cannot keep a worker busy for nobody.
        failed = kind is not None and issubclass(kind, ForebayError)
        if isinstance(error, ForebayError):
            self.dispatcher.metrics.shed(error)
        outcome = "error" if failed else "cancelled" if self._book.open else "completed"
        self._leave(outcome)
        if self._meter is not None and not self._meter.tailed:
            self._meter.settle(outcome)
        self.dispatcher.exit(self, cancelled=self._book.open)
        self._book.clear()

    def reasoned(self, tokens: int) -> None:
        """So many tokens of all sequences were thinking, so far."""
        if self._meter is not None:
            self._meter.reasoning_tokens = tokens

    def abort(self, index: int, was_open: bool) -> None:
        """Stops sequence `index`, which the book has dropped, and the attempt with the last one."""
        if self._meter is not None:
            self._meter.stop(index)
        if not was_open or self.placement is None:
            return
        if self._book.open:
            self.dispatcher.cancel(self.request_id, self.placement, index)
        else:
            self._leave("completed")

    async def events(self) -> list[E]:
        """Waits, then returns everything that is ready together; [] after the last event.

        Deltas of one index that adjoin are merged. The first call places the job, so an error here
        before any event was returned is an error before anything ran. A cancelled call loses no
        event.

        Raises:
            NoWorkerError, WorkerLostError, BusError, DeadlineError, EngineError, OverloadedError,
            and whatever InvalidRequestError the engine answers.
        """
        while self._book.open:
            placement = self.placement or await self._place()
            box = placement.box
            replies = box.take()
            if self._meter is not None:
                self._meter.take(replies)
            events = self._book.fold(replies)
            if self._book.accepted and not placement.accepted:
                self._accepted(placement)
            if events and not placement.begun:
                placement.begun = True
                self.begun(placement, events[0])
            if not self._book.open:
                placement.over = True
                self._leave("completed")
            if events:
                return events
            if self.placement is not None and not self._recover(placement):
                await box.wait()
        return []

    async def _place(self) -> Placement:
        """Makes the next attempt: picks a worker, opens the box, then publishes."""
        if self._strikes >= MAX_ATTEMPTS or self._attempts >= MAX_PLACEMENTS:
            raise self._error or WorkerLostError(_LOST, retry_after_s=1.0)
        choice = await self.dispatcher.choose(self.card, self.prompt(), self._tried, self._error)
        self._attempts += 1
        self._book.begin()
        if self._meter is not None:
            self._meter.begin()
        self.placement = self.dispatcher.submit(choice, self.message(self._attempts))
        return self.placement

    def _accepted(self, placement: Placement) -> None:
        """The worker holds the request: from now on its lease counts, and the queue's deadline."""
        placement.accepted = True
        placement.timer.cancel()
        placement.timer = asyncio.get_running_loop().call_later(
            self.dispatcher.queue_timeout_ms / 1000 + OVERDUE_S, self._overdue, placement
        )
        self.dispatcher.settle(self.request_id, placement)

    def _overdue(self, placement: Placement) -> None:
        """An engine ends what waits too long by itself, unless it hangs."""
        if not self._book.begun:
            placement.box.fail(DeadlineError("The request waited too long for its first step."))

    def _recover(self, placement: Placement) -> bool:
        """Looks at what went wrong; True when the attempt was given up for another one."""
        failed = self._book.failed
        reason = self._book.lost or placement.box.lost
        if placement.box.error is not None:
            raise placement.box.error
        if failed is not None:
            placement.over = True
            error = from_code(
                failed.code,
                failed.message,
                param=failed.param,
                retry_after_s=failed.retry_after_s,
            )
            self._tried.add(placement.worker)
            if not failed.retryable or not self.repeatable or self._full(error):
                raise error
            self._error = error
            reason = "drained" if isinstance(error, DrainingError) else "failed"
        elif reason is not None:
            self._error = WorkerLostError(_LOST, retry_after_s=1.0)
            if not self.repeatable:
                raise self._error
            if reason != "bus_reset":
                self._tried.add(placement.worker)
        if reason is None:
            return False
        if reason == "worker_lost" or (failed is not None and type(self._error) is WorkerLostError):
            self._worker_lost(placement)
        else:
            self._strikes += reason not in BLAMELESS
        log.info("request %s attempt %d: %s", self.request_id, placement.attempt, reason)
        self.dispatcher.metrics.resubmitted(reason)
        self._leave()
        return True

    def _worker_lost(self, placement: Placement) -> None:
        """Raises EngineError when nothing else can have ended it."""
        if not self._book.alone:
            self._losses += 1
            return
        placement.over = True
        self.dispatcher.metrics.given_up.inc()
        log.error("request %s ended worker %s alone: given up", self.request_id, placement.worker)
        raise EngineError(_ENDED)

    def _full(self, error: ForebayError) -> bool:
        """The worker's queue has no room for it, and neither have those of all others."""
        full = type(error) is OverloadedError or isinstance(error, RateLimitError)
        return full and not self.dispatcher.others(self.card, self._tried)

    def _leave(self, outcome: Outcome | None = None) -> None:
        """Ends the current attempt: its box is closed, and what still runs of it is cancelled.

        `outcome` None: another attempt follows. Else what the worker measures last is waited for.
        """
        placement, self.placement = self.placement, None
        if placement is not None:
            self.dispatcher.leave(self.request_id, placement)
            if self._meter is not None and outcome is not None:
                self.dispatcher.settle_meter(self._meter, placement, outcome)
            if self._book.repeated:
                self.dispatcher.metrics.dropped("duplicate", self._book.repeated)
                self._book.repeated = 0
