"""Between the bus and the engine: work in, one packed entry per gateway and step out.

It drops duplicates, turns away what may not wait, answers Accepted itself (the engine may be in a
long step), keeps what it cannot send while Redis is away up to a bound, aborts what nobody waits
for any more, and gives back what it cannot finish. `trials` says when the engine gets what. It
knows neither how an engine works nor what a request means.
"""

import asyncio
import logging
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from forebay_shared import keys
from forebay_shared.bus import Publisher
from forebay_shared.errors import (
    BusError,
    DrainingError,
    EngineError,
    ForebayError,
    UnsupportedError,
)
from forebay_shared.lane import Lane
from forebay_shared.link import Value
from forebay_shared.merge import merge
from forebay_shared.models import CAP_RESUME
from forebay_shared.packets import REPLY, WORK, Unread
from forebay_shared.reader import Feed
from forebay_shared.telemetry import WorkerMetrics
from forebay_shared.wire import (
    Accepted,
    Cancel,
    Done,
    Embedded,
    Encode,
    Failed,
    Reply,
    Started,
    Submit,
    SubmitText,
    Sync,
    Task,
    Usage,
    Work,
)

from forebay_worker.door import DEFAULT, Bounds, Door
from forebay_worker.engines.base import Encoder, Engine, Teller
from forebay_worker.metering import Metering
from forebay_worker.trials import Trials

if TYPE_CHECKING:
    from forebay_shared.tracing.spans import Tracing

log = logging.getLogger(__name__)

REMEMBERED = 65_536
"""Requests remembered so that a repeated Submit is known."""
LANE_LIMIT = 65_536
"""Replies kept for one gateway while Redis is away; beyond it, its requests are aborted."""
ACCEPT_DELAY_S = 0.005
"""So long an Accepted waits for a first step to travel with: one packet instead of two."""
GONE_S = keys.LEASE_MS / 1000
_POLL_S = 0.05

RequestKey = tuple[str, int]


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
        self._lanes: dict[str, Lane[Reply]] = {}
        self._open: defaultdict[str, dict[RequestKey, int]] = defaultdict(dict)
        """Per gateway, the sequences of each request that have not ended."""
        self._seen: OrderedDict[RequestKey, None] = OrderedDict()
        self._gone_since: dict[str, float] = {}
        self._emitted: deque[Sequence[tuple[str, Reply]]] = deque()
        self._collecting = False
        self._own: list[tuple[str, Reply]] = []
        """What this service says itself, before what the engine does."""
        self._told: list[tuple[str, Callable[[], None]]] = []
        """Gateways, and what to do when they have all that was said until now."""
        self._tracing = tracing
        self._traces: dict[RequestKey, str] = {}
        """Where the spans of open requests belong; only of those that are traced."""
        self._accepting: asyncio.TimerHandle | None = None
        self._metering = Metering(publisher)
        self._trials = Trials(self)
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
        return sum(len(requests) for requests in self._open.values())

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

    def emit(self, events: Sequence[tuple[str, Reply]]) -> None:
        """Takes one step's events from the engine's thread. Fast steps share a packet."""
        self._emitted.append(events)
        if not self._collecting:
            self._collecting = True
            self._loop.call_soon_threadsafe(self._collect)

    async def watch(self) -> None:
        """Looks after the leases of the gateways that have requests here."""
        while True:
            for gateway, lane in list(self._lanes.items()):
                if self._open[gateway] or not lane.idle or self._metering.watches(gateway):
                    self._check_lease(gateway)
                else:
                    self._forget(gateway)
            self._metering.forget_old()
            await asyncio.sleep(keys.RENEW_S)

    def fence(self) -> None:
        """Drops every request: gateways took this worker for dead. An attempt that one of them
        still waits for ends as aborted, and it makes another."""
        if self.open_requests:
            log.warning("dropped %d requests of gateways that gave them up", self.open_requests)
        self._metrics.leases_lost.inc()
        self._metrics.fenced.inc(self.open_requests)
        for gateway in [name for name, requests in self._open.items() if requests]:
            self._abort_all(gateway)

    def refuse(self, reason: ForebayError) -> None:
        """Takes no more requests from now on: what comes is given back."""
        self._leaving = reason

    def give_back(self) -> int:
        """Ends every request here, after `refuse`: its gateway goes on elsewhere, at the token
        where this worker left off. Returns how many there were."""
        assert self._leaving is not None, "refuse first"
        left = [(gateway, key) for gateway, requests in self._open.items() for key in requests]
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
        return (
            not self._emitted and not self._own and all(lane.idle for lane in self._lanes.values())
        )

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
            return
        self._seen[key] = None
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        self._open[work.gateway][key] = work.num_sequences
        if self._accepting is None:
            self._accepting = self._loop.call_later(ACCEPT_DELAY_S, self._collect)
        self._own.append((work.gateway, Accepted(*key)))
        if work.metered:
            self._metering.submitted(work)
        if not isinstance(work, Encode) and self._tracing is not None and work.traceparent:
            self._traces[key] = work.traceparent
        if (refusal := self._leaving or self._turned_away(work, key)) is not None:
            self._refuse_all([(work.gateway, key)], refusal)
        else:
            self._trials.enter(work)

    def begin(self, work: Task) -> None:
        """Gives it to the engine."""
        try:
            self._begin(work)
        except Exception:
            self._broke(work)

    def _begin(self, work: Task) -> None:
        if isinstance(work, Submit):
            self._engine.submit(work)
        elif isinstance(work, SubmitText) and isinstance(self._engine, Teller):
            self._engine.submit_text(work)
        elif isinstance(work, Encode) and isinstance(self._engine, Encoder):
            self._engine.encode(work)
        else:
            what = "make embeddings" if isinstance(work, Encode) else "speak text"
            refusal = UnsupportedError(f"This engine does not {what}.")
            self._refuse_all([(work.gateway, (work.request_id, work.attempt))], refusal)

    def cancel(self, work: Task, index: int | None) -> None:
        self._engine.cancel(work.request_id, work.attempt, index)

    def movable(self, work: Task) -> bool:
        """Another worker can go on with it."""
        if isinstance(work, Submit):
            return CAP_RESUME in self._engine.card.capabilities
        return isinstance(work, Encode)

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
        self._told.append((work.gateway, then))
        self._loop.call_soon(self._collect)

    def step_age_s(self) -> float:
        return self._engine.load().step_age_s

    def _say(self, work: Task, reply: Accepted | Done | Failed) -> None:
        """Says what did not come of the engine."""
        self._own.append((work.gateway, reply))
        if not isinstance(reply, Accepted):
            self._metering.replied(reply)
            self._ended(work.gateway, reply)
        self._loop.call_soon(self._collect)

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
        self._emitted.append(
            [
                (
                    gateway,
                    Failed(*key, why.code, why.message, why.retryable, None, why.retry_after_s),
                )
                for gateway, key in requests
            ]
        )
        self._collect()

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

    def _collect(self) -> None:
        """Packs what was accepted and what the engine has emitted since, by gateway."""
        self._collecting = False
        if self._accepting is not None:
            self._accepting.cancel()
            self._accepting = None
        packets: defaultdict[str, list[Reply]] = defaultdict(list)
        for gateway, reply in self._own:
            packets[gateway].append(reply)
        self._own.clear()
        told, self._told = self._told, []
        steps, metered = 0, len(self._metering) > 0
        while self._emitted:
            steps += 1
            for gateway, reply in self._emitted.popleft():
                if not self._trials.heard(reply):
                    continue
                packets[gateway].append(reply)
                if metered:
                    self._metering.replied(reply)
                if isinstance(reply, Started):
                    self._door.leave((reply.request_id, reply.attempt), served=True)
                elif isinstance(reply, Done | Failed | Embedded):
                    self._ended(gateway, reply)
        for gateway, replies in packets.items():
            self._lane(gateway).send(merge(replies) if steps > 1 else replies)
        for gateway, then in told:
            self._lane(gateway).after(then)

    def _ended(self, gateway: str, reply: Done | Failed | Embedded) -> None:
        requests = self._open[gateway]
        key = (reply.request_id, reply.attempt)
        self._door.leave(key, served=isinstance(reply, Embedded))
        left = requests.get(key, 0) - 1
        if self._traces:
            self._trace(key, reply, last=left <= 0)
        if left > 0 and isinstance(reply, Done):
            requests[key] = left
        else:
            requests.pop(key, None)

    def _trace(self, key: RequestKey, reply: Done | Failed | Embedded, *, last: bool) -> None:
        ended = isinstance(reply, Done)
        traceparent = self._traces.get(key, "") if ended and not last else self._traces.pop(key, "")
        if ended and traceparent and self._tracing is not None:
            model = self._engine.card.name
            self._tracing.sequence(traceparent, model, reply.usage, reply.finish_reason)

    def _lane(self, gateway: str) -> Lane[Reply]:
        lane = self._lanes.get(gateway)
        if lane is None:

            def undelivered(_: list[Reply], __: BusError | None) -> None:
                self._overflowed(gateway)

            lane = self._lanes[gateway] = Lane(
                self._publisher,
                keys.reply(gateway),
                REPLY,
                sender=self._worker,
                maxlen=keys.REPLY_MAXLEN,
                limit=LANE_LIMIT,
                patience_s=math.inf,
                undelivered=undelivered,
                compact=merge,
                vital=lambda _: True,  # what runs goes on although Redis is full: it is read soon
            )
        return lane

    def _overflowed(self, gateway: str) -> None:
        """Too much waits for a gateway: its requests end here, and it is told so when it can be."""
        requests = self._open.pop(gateway, {})
        for key in requests:
            self._traces.pop(key, None)
        log.warning("aborted %d requests whose replies cannot be sent", len(requests))
        self._abort_all(gateway)
        message = "The worker could not send its answer."
        self._lane(gateway).send(
            [Failed(*key, code="worker_lost", message=message, retryable=True) for key in requests]
        )

    def _check_lease(self, gateway: str) -> None:
        def answered(future: asyncio.Future[Value]) -> None:
            if future.cancelled() or future.exception() is not None or future.result() == 1:
                self._gone_since.pop(gateway, None)
                return
            since = self._gone_since.setdefault(gateway, self._loop.time())
            if self._loop.time() - since > GONE_S:
                self._gateway_lost(gateway)

        self._publisher.call("EXISTS", keys.gateway_lease(gateway)).add_done_callback(answered)

    def _abort_all(self, gateway: str) -> None:
        self._trials.cancel_gateway(gateway)
        self._engine.cancel_gateway(gateway)

    def _gateway_lost(self, gateway: str) -> None:
        log.warning("gateway %s is gone: aborted %d requests", gateway, len(self._open[gateway]))
        self._abort_all(gateway)
        self._metering.gateway_gone(gateway)
        self._forget(gateway)

    def _forget(self, gateway: str) -> None:
        self._gone_since.pop(gateway, None)
        for key in self._open.pop(gateway, ()):
            self._traces.pop(key, None)
        if (lane := self._lanes.pop(gateway, None)) is not None:
            lane.close()


def _not_taken() -> EngineError:
    return EngineError("The worker could not take this request.")
