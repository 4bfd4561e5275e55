"""From a job to its events: which worker, one lane to each, cancel, and what Redis's absence ends.

It knows no text and no HTTP: it sees the roster, the inbox and one lane per worker.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from forebay_shared import keys
from forebay_shared.books import Outcome
from forebay_shared.bus import Publisher
from forebay_shared.errors import (
    BusError,
    ForebayError,
    NoWorkerError,
)
from forebay_shared.lane import Lane
from forebay_shared.models import ModelCard
from forebay_shared.packets import WORK
from forebay_shared.reader import Reader
from forebay_shared.telemetry import GatewayMetrics
from forebay_shared.wire import Cancel, Sync, Task, Work

from forebay_gateway.attempts import Attempts, Placement
from forebay_gateway.encoding import Encoding
from forebay_gateway.generation import Generation
from forebay_gateway.inbox import Box, Inbox
from forebay_gateway.jobs import EncodeJob, Job, TextJob
from forebay_gateway.meter import Meter, Tail
from forebay_gateway.roster import Roster, Worker
from forebay_gateway.router import Choice
from forebay_gateway.routing import Prompted, Routing
from forebay_gateway.telling import Telling

ACCEPT_S = 4.0
"""A worker takes a request in at once; one that has not answered for this long is passed over."""
LANE_PATIENCE_S = 2.5
"""A worker that lives makes its stream anew within keys.RENEW_S."""
LANE_LIMIT = 16_384
CANCEL_AGAIN_S = 0.5
REPLACE_S = 6.0
"""Longest wait for a worker where none lives. One that was lost is found by its lease first, so an
answer comes within 10 s."""
BUS_AWAY_S = 8.0
"""Redis away for longer ends what waits for its first token."""
BUS_GONE_S = 60.0
"""Redis away for longer ends what runs too; until then it goes on when Redis is back."""


class Dispatcher:
    """Places jobs on workers. `traceparent` tells the trace of the call that asks; "" without."""

    def __init__(
        self,
        gateway: str,
        publisher: Publisher,
        roster: Roster,
        inbox: Inbox,
        metrics: GatewayMetrics,
        queue_timeout_s: float,
        routing: Routing,
        traceparent: Callable[[], str] = str,
    ) -> None:
        self.gateway = gateway
        self.routing = routing
        self.metrics = metrics.jobs
        self.traceparent = traceparent
        self.queue_timeout_ms = int(queue_timeout_s * 1000)
        self._publisher = publisher
        self._roster = roster
        self._inbox = inbox
        self._lanes: dict[str, Lane[Work]] = {}
        self._running: set[Attempts[Any]] = set()
        self._tails: set[Tail] = set()
        self._away_since: float | None = None
        roster.on_lost(self._worker_lost)

    @property
    def unsent(self) -> int:
        """Messages for workers that are not delivered yet."""
        return sum(map(len, self._lanes.values()))

    def __len__(self) -> int:
        """Jobs that are open."""
        return len(self._running)

    def generate(self, job: Job | TextJob) -> Generation | Telling:
        return Telling(self, job) if isinstance(job, TextJob) else Generation(self, job)

    def encode(self, job: EncodeJob) -> Encoding:
        return Encoding(self, job)

    def enter(self, running: Attempts[Any]) -> None:
        self._running.add(running)
        self.metrics.open_generations.inc()

    def exit(self, running: Attempts[Any], *, cancelled: bool) -> None:
        self._running.discard(running)
        self.metrics.open_generations.dec()
        if cancelled:
            self.metrics.cancelled.inc()

    async def choose(
        self,
        card: ModelCard,
        prompt: Prompted,
        avoid: Collection[str],
        after: ForebayError | None,
    ) -> Choice[Worker]:
        """The worker for the next attempt; waits for one, not long: clients try again."""
        choose, roster = self.routing.choose, self._roster
        if (choice := choose(roster.candidates(card), prompt, avoid)) is not None:
            return choice
        try:
            async with asyncio.timeout(min(self.queue_timeout_ms / 1000, REPLACE_S)):
                while True:
                    await roster.changed()
                    choice = choose(roster.candidates(card), prompt, avoid)
                    if choice is not None:
                        return choice
        except TimeoutError:
            raise after or NoWorkerError(
                "No worker became ready in time. Please retry.", retry_after_s=5.0
            ) from None

    def others(self, card: ModelCard, tried: Collection[str]) -> bool:
        """Whether a worker that was not tried could take the job."""
        return any(worker.name not in tried for worker in self._roster.candidates(card).workers)

    def submit(self, choice: Choice[Worker], message: Task) -> Placement:
        """Opens the box, then sends the message."""
        worker = choice.worker
        box = self._inbox.open(message.request_id, message.attempt)
        worker.place(message.request_id, message.num_tokens - choice.cached_tokens)
        self._lane(worker.name).send([message])
        timer = asyncio.get_running_loop().call_later(ACCEPT_S, _expect, box)
        return Placement(worker.name, message.attempt, box, timer, choice)

    def ask_for_snapshot(self, worker: str) -> None:
        """Asks a worker to tell what its prefix cache holds."""
        self._lane(worker).send([Sync()])

    def cancel(self, request_id: str, placement: Placement, index: int | None = None) -> None:
        """Tells the worker to abort one sequence of an attempt, or all of it."""
        message = Cancel(request_id=request_id, attempt=placement.attempt, index=index)
        self._lane(placement.worker).send([message])

    def settle(self, request_id: str, placement: Placement) -> None:
        """The next report of the worker has the request in its load."""
        if (worker := self._roster.get(placement.worker)) is not None:
            worker.settle(request_id, asyncio.get_running_loop().time())

    def leave(self, request_id: str, placement: Placement) -> None:
        """Closes an attempt; cancels it unless it is over."""
        placement.timer.cancel()
        self._inbox.close(placement.box)
        if (worker := self._roster.get(placement.worker)) is not None:
            worker.forget(request_id)
        if not placement.over:
            self.cancel(request_id, placement)

    def settle_meter(self, meter: Meter, placement: Placement, outcome: Outcome) -> None:
        """Settles when the worker's figures are complete, at once or soon."""
        if meter.complete or meter.settled or (placement.over and outcome == "error"):
            # Whoever gets the last events now reads them first, so that thinking is counted.
            asyncio.get_running_loop().call_soon(meter.settle, outcome)
            return
        tail = Tail(self._inbox, placement.box, meter, outcome, self._tails.discard)
        if not tail.over:
            meter.tailed = True
            self._tails.add(tail)
            self._inbox.adopt(tail)

    def end_tails(self) -> None:
        """Settles with what is known, since this process ends."""
        for tail in list(self._tails):
            tail.end()

    def check(self, reader: Reader) -> None:
        """Ends what waits for a Redis that stays away, and forgets the lanes of lost workers.

        Call it a few times per second.
        """
        for name in self._lanes.keys() - set(self._roster.workers):
            if self._lanes[name].idle:
                del self._lanes[name]
        now = asyncio.get_running_loop().time()
        if reader.connected:
            self._away_since = None
        elif self._away_since is None:
            self._away_since = now
        elif (away_s := now - self._away_since) > BUS_AWAY_S:
            for running in self._running:
                if running.placement is not None and (away_s > BUS_GONE_S or not running.has_begun):
                    running.placement.box.fail(_bus_away())

    def _lane(self, worker: str) -> Lane[Work]:
        lane = self._lanes.get(worker)
        if lane is None:
            lane = self._lanes[worker] = Lane(
                self._publisher,
                keys.work(worker),
                WORK,
                sender=self.gateway,
                maxlen=keys.WORK_MAXLEN,
                limit=LANE_LIMIT,
                patience_s=LANE_PATIENCE_S,
                undelivered=partial(self._undelivered, worker),
                vital=_is_vital,
            )
        return lane

    def _undelivered(self, worker: str, messages: list[Work], error: BusError | None) -> None:
        """Takes back what a lane could not deliver: submits end, cancels are tried again."""
        for message in messages:
            if isinstance(message, Cancel | Sync):
                continue
            if (box := self._inbox.get(message.request_id, message.attempt)) is not None:
                if error is not None:
                    box.fail(error)
                else:
                    box.lose("not_accepted")
        cancels = [message for message in messages if isinstance(message, Cancel)]
        if cancels:
            loop = asyncio.get_running_loop()
            loop.call_later(CANCEL_AGAIN_S, self._cancel_again, worker, cancels)

    def _cancel_again(self, worker: str, cancels: list[Cancel]) -> None:
        """After an outage a worker that lives must not go on for clients that left meanwhile."""
        if self._roster.get(worker) is not None:
            self._lane(worker).send(cancels)

    def _worker_lost(self, worker: str) -> None:
        for running in self._running:
            if running.placement is not None and running.placement.worker == worker:
                running.placement.box.lose("worker_lost")


def _bus_away() -> BusError:
    return BusError("The message bus is not available. Please retry.", retry_after_s=1.0)


def _is_vital(messages: Sequence[Work]) -> bool:
    """What ends work, or goes on with it elsewhere; a full Redis refuses only what is new."""
    return all(isinstance(each, Cancel | Sync) or each.attempt > 1 for each in messages)


def _expect(box: Box) -> None:
    if not box.heard:
        box.lose("not_accepted")
