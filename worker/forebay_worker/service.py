"""Between the bus and the engine: work in, one packed entry per gateway and step out.

It drops duplicates, turns away what may not wait, answers Accepted itself (the engine may be in a
long step), aborts what nobody waits for any more, and gives back what it cannot finish. `trials`
says when the engine gets what, `outbox` who still reads the answers. It knows neither how an engine
works nor what a request means.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from forebay_shared import keys
from forebay_shared.bus import Publisher
from forebay_shared.errors import DrainingError, EngineError, ForebayError
from forebay_shared.mishaps import Mishaps
from forebay_shared.packets import WORK, Unread
from forebay_shared.reader import Feed
from forebay_shared.telemetry import WorkerMetrics
from forebay_shared.wire import (
    Accepted,
    Cancel,
    Done,
    Embedded,
    Failed,
    Started,
    Submit,
    Sync,
    Task,
    Usage,
    Work,
)

from forebay_worker import handing
from forebay_worker.door import DEFAULT, Bounds, Door
from forebay_worker.engines.base import Engine
from forebay_worker.metering import Metering
from forebay_worker.opened import Opened, RequestKey
from forebay_worker.outbox import Outbox
from forebay_worker.packing import Addressed, Packing
from forebay_worker.trials import Trials

if TYPE_CHECKING:
    from forebay_shared.tracing.spans import Tracing

log = logging.getLogger(__name__)

REMEMBERED = 65_536
"""Requests remembered so that a repeated Submit is known."""
_POLL_S = 0.05


class Service:
    """One worker incarnation's requests."""

    def __init__(
        self,
        worker: str,
        engine: Engine,
        publisher: Publisher,
        metrics: WorkerMetrics,
        tracing: "Tracing | None" = None,
        bounds: Bounds = DEFAULT,
    ) -> None:
        self._worker = worker
        self._engine = engine
        self._publisher = publisher
        self._metrics = metrics
        self._leaving: ForebayError | None = None
        """Why nothing more is taken in."""
        self._loop = asyncio.get_running_loop()
        self._door = Door(bounds, self._loop.time, metrics.refused)
        self._outbox = Outbox(worker, publisher, self._overflowed, self._gateway_lost)
        self._packing = Packing(self._outbox, self._hear)
        self._opened = Opened(tracing)
        self._seen: OrderedDict[RequestKey, None] = OrderedDict()
        self._metering = Metering(publisher)
        self._trials = Trials(self)
        self._mishaps = Mishaps(metrics)
        self.on_sync: Callable[[], None] = lambda: None
        """Called when a gateway asks for a snapshot of the prefix cache."""

    def feed(self) -> Feed[Work]:
        """The work stream, for the worker's reader.

        When it is lost, cancels may be lost with it, and the gateways may have taken this worker
        for dead: what was asked before is dropped, and they send again what they still want.
        """
        return Feed(
            keys.work(self._worker),
            WORK,
            self.receive,
            owned=True,
            reset=self.fence,
            unread=self._unread,
        )

    @property
    def open_requests(self) -> int:
        return len(self._opened)

    def receive(self, messages: Sequence[Work]) -> None:
        """Takes the messages of one packet, in order."""
        for message in messages:
            try:
                self._receive(message)
            except Exception:
                self._broke(message)

    def _receive(self, message: Work) -> None:
        if isinstance(message, Cancel):
            key = (message.request_id, message.attempt)
            if not self._trials.cancel(key, message.index):
                self._engine.cancel(*key, message.index)
        elif isinstance(message, Sync):
            self.on_sync()
        else:
            self._submit(message)

    def emit(self, events: Sequence[Addressed]) -> None:
        """Takes one step's events from the engine's thread."""
        self._packing.emit(events)

    async def watch(self) -> None:
        """Looks after the leases of the gateways that have requests here."""
        while True:
            self._outbox.look(lambda name: name in self._opened or self._metering.watches(name))
            self._metering.forget_old()
            self._count()
            self._mishaps.look()
            await asyncio.sleep(keys.RENEW_S)

    def _count(self) -> None:
        """Says how much waits here."""
        self._metrics.unsent.set(len(self._outbox))
        self._metrics.redis_queue.set(self._publisher.queued)
        self._metrics.metered.set(len(self._metering))

    def fence(self) -> None:
        """Drops every request: gateways took this worker for dead. An attempt that one of them
        still waits for ends as aborted, and it makes another."""
        if self.open_requests:
            log.warning("dropped %d requests of gateways that gave them up", self.open_requests)
        self._metrics.leases_lost.inc()
        self._metrics.fenced.inc(self.open_requests)
        for gateway in self._opened.gateways:
            self._abort_all(gateway)

    def refuse(self, reason: ForebayError) -> None:
        """Takes no more requests from now on: what comes is given back."""
        self._leaving = reason

    def give_back(self) -> int:
        """Ends every request here, after `refuse`: its gateway goes on elsewhere, at the token
        where this worker left off. Returns how many there were."""
        assert self._leaving is not None, "refuse first"
        left = self._opened.keys()
        self._metrics.handed_over.inc(len(left))
        self._refuse_all(left, self._leaving)
        return len(left)

    async def drained(self, timeout_s: float) -> bool:
        """Waits until nothing is open and every reply is sent; False when the time runs out."""
        return await self._until(lambda: not self.open_requests and self._flushed(), timeout_s)

    async def flushed(self, timeout_s: float) -> bool:
        """Waits until every reply is sent; False when the time runs out."""
        return await self._until(self._flushed, timeout_s)

    def _flushed(self) -> bool:
        return self._packing.idle and self._outbox.idle

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline = self._loop.time() + timeout_s
        while not condition():
            if self._loop.time() >= deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def _submit(self, work: Task) -> None:
        key = (work.request_id, work.attempt)
        if key in self._seen:
            self._metrics.duplicates.inc()
            return
        self._seen[key] = None
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        self._opened.add(work, handing.answering(self._engine.card, work))
        self._packing.accept(work.gateway, Accepted(*key))
        if work.metered:
            self._metering.submitted(work)
        if (refusal := self._leaving or self._turned_away(work, key)) is not None:
            self._refuse_all([(work.gateway, key)], refusal)
        else:
            self._trials.enter(work)

    def begin(self, work: Task) -> None:
        """Gives it to the engine."""
        try:
            refusal = handing.hand(self._engine, work)
            if refusal is not None:
                self._refuse_all([(work.gateway, (work.request_id, work.attempt))], refusal)
        except Exception:
            self._broke(work)

    def cancel(self, work: Task, index: int | None) -> None:
        self._engine.cancel(work.request_id, work.attempt, index)

    def movable(self, work: Task) -> bool:
        """Another worker can go on with it."""
        return handing.movable(self._engine.card, work)

    def hand_over(self, work: Task) -> None:
        """Ends it here; its gateway goes on with it elsewhere, or here when the trial is over."""
        self._metrics.handed_over.inc()
        message = "Another request is to run alone on this worker."
        key = (work.request_id, work.attempt)
        self._say(work, Failed(*key, DrainingError.code, message, retryable=True))
        self.cancel(work, None)

    def drop(self, work: Task) -> None:
        """Answers the cancel of what the engine has never had."""
        for index in work.indexes:
            done = Done(work.request_id, work.attempt, index, "abort", None, Usage())
            self._say(work, done)

    def tell(self, work: Task, alone: bool | None, then: Callable[[], None]) -> None:
        """Calls `then` when its gateway has all that was said, and this; None: nothing."""
        if alone is not None:
            self._say(work, Accepted(work.request_id, work.attempt, alone))
        self._packing.after(work.gateway, then)

    def step_age_s(self) -> float:
        return self._engine.load().step_age_s

    def _say(self, work: Task, reply: Accepted | Done | Failed) -> None:
        """Says what did not come of the engine."""
        self._packing.say(work.gateway, reply)
        if not isinstance(reply, Accepted):
            self._metering.replied(reply)
            self._ended(work.gateway, reply)

    def _turned_away(self, work: Task, key: RequestKey) -> ForebayError | None:
        """Why the request may not wait here. One that goes on with an answer always may."""
        tokens = work.num_tokens
        if isinstance(work, Submit) and any(start.emitted for start in work.starts):
            self._door.force(key, work.team, tokens, work.weight)
            return None
        try:
            patience_s = work.queue_timeout_ms / 1000
            self._door.enter(key, work.team, tokens, patience_s, work.weight)
        except ForebayError as refusal:
            return refusal
        return None

    def _refuse_all(self, requests: Sequence[tuple[str, RequestKey]], why: ForebayError) -> None:
        said = (why.code, why.message, why.retryable, None, why.retry_after_s)
        self._packing.fail([(gateway, Failed(*key, *said)) for gateway, key in requests])

    def _broke(self, message: Work) -> None:
        """A message that the engine stumbles over ends its own request, once."""
        self._metrics.dead_letters.inc()
        if isinstance(message, Sync):
            log.exception("a request for a snapshot failed")
            return
        log.exception("request %s attempt %d failed on intake", message.request_id, message.attempt)
        if not isinstance(message, Cancel):
            key = (message.request_id, message.attempt)
            self._refuse_all([(message.gateway, key)], _not_taken())

    def _unread(self, one: Unread) -> None:
        self._metrics.dead_letters.inc()
        if one.request_id and one.gateway:
            self._refuse_all([(one.gateway, (one.request_id, one.attempt))], _not_taken())

    def _hear(self, events: Sequence[Addressed]) -> Iterator[Addressed]:
        """Takes note of one step's events; gives those that are still somebody's."""
        metered = len(self._metering) > 0
        for gateway, reply in events:
            if not self._trials.heard(reply):
                continue
            if metered:
                self._metering.replied(reply)
            if isinstance(reply, Started):
                self._door.leave((reply.request_id, reply.attempt), served=True)
            elif isinstance(reply, Done | Failed | Embedded):
                self._ended(gateway, reply)
            yield gateway, reply

    def _ended(self, gateway: str, reply: Done | Failed | Embedded) -> None:
        key = (reply.request_id, reply.attempt)
        self._door.leave(key, served=isinstance(reply, Embedded))
        self._opened.ended(gateway, reply)

    def _overflowed(self, gateway: str) -> None:
        """Too much waits for a gateway: its requests end here, and it is told so when it can be."""
        self._metrics.overflows.inc()
        requests = self._opened.drop(gateway)
        log.warning("aborted %d requests whose replies cannot be sent", len(requests))
        self._abort_all(gateway)
        message = "The worker could not send its answer."
        self._outbox.send(
            gateway,
            [Failed(*key, code="worker_lost", message=message, retryable=True) for key in requests],
        )

    def _abort_all(self, gateway: str) -> None:
        self._trials.cancel_gateway(gateway)
        self._engine.cancel_gateway(gateway)

    def _gateway_lost(self, gateway: str) -> None:
        self._metrics.gateways_lost.inc()
        requests = self._opened.drop(gateway)
        log.warning("gateway %s is gone: aborted %d requests", gateway, len(requests))
        self._abort_all(gateway)
        self._metering.gateway_gone(gateway)


def _not_taken() -> EngineError:
    return EngineError("The worker could not take this request.")
