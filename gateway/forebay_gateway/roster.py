"""The gateway's picture of the workers: who lives, how loaded, which models they serve.

A worker is lost when it says farewell, or when no beacon came for keys.LEASE_MS while Redis
answered all the time, both by this process's own monotonic clock: other hosts' clocks do not
matter, and after an outage of Redis everybody has a fresh lease. It knows no request beyond the
tokens placed.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import msgspec
from forebay_shared import keys
from forebay_shared.bus import Publisher
from forebay_shared.errors import ModelNotFoundError, NoWorkerError
from forebay_shared.link import Value
from forebay_shared.models import ModelCard, content_hash
from forebay_shared.packets import ROSTER
from forebay_shared.reader import Feed, Reader
from forebay_shared.telemetry import GatewayMetrics
from forebay_shared.wire import Beacon, Farewell, Load, RosterEvent

from forebay_gateway.loading import Loading
from forebay_gateway.routing import Pool

log = logging.getLogger(__name__)

LEASE_S = keys.LEASE_MS / 1000
KEEP_CARD_S = 600.0
"""A model whose last worker went away stays known for so long: its requests wait, not 404."""
MAX_POOLS = 256
"""Models whose workers are kept prepared for the router."""
SLOW_STEP_S = 10.0
"""A worker whose engine has not come round for this long is taken last."""
SETTLE_S = 0.03
"""A report that comes so soon after an Accepted was sent before it."""

_decode_card = msgspec.msgpack.Decoder(ModelCard).decode
_decode_beacon = msgspec.msgpack.Decoder(Beacon).decode


class Worker:
    """A live worker. Its load is the last report plus what was placed since."""

    __slots__ = (
        "_settling", "_tokens", "card", "card_hash", "digest", "draining", "load", "name", "number",
        "placed", "seen_at",
    )  # fmt: skip

    def __init__(self, name: str, number: int = 0) -> None:
        self.name = name
        self.number = number
        """Among the live ones: small, and used again."""
        self.card: ModelCard | None = None
        self.card_hash = ""
        self.load = Load()
        self.digest = -1
        """The number of its last digest when it last said so; -1: it publishes none."""
        self.draining = False
        self.seen_at = 0.0
        self.placed: dict[str, int] = {}
        """Tokens to prefill of requests that the worker has not accepted yet."""
        self._settling: dict[str, tuple[int, float]] = {}
        """Tokens of requests that it accepted after its last report, and when."""
        self._tokens = 0

    @property
    def queued_tokens(self) -> int:
        return self.load.waiting_tokens + self._tokens

    @property
    def busy(self) -> int:
        return self.load.running + self.load.waiting + len(self.placed) + len(self._settling)

    @property
    def prefill_rate(self) -> float:
        return self.load.prefill_rate

    @property
    def decode_rate(self) -> float:
        return self.load.decode_rate

    @property
    def block_size(self) -> int:
        return self.card.block_size if self.card is not None else 0

    @property
    def open(self) -> bool:
        """It may get new requests."""
        return self.card is not None and not self.draining

    @property
    def slow(self) -> bool:
        """Its engine's step takes long, or hangs."""
        return self.load.step_age_s >= SLOW_STEP_S

    def place(self, request_id: str, tokens: int) -> None:
        """Counts a request from now on, with the tokens that it has to prefill."""
        self.forget(request_id)
        self.placed[request_id] = tokens
        self._tokens += tokens

    def settle(self, request_id: str, now: float) -> None:
        """The worker accepted the request: a later report includes it."""
        if (tokens := self.placed.pop(request_id, None)) is not None:
            self._settling[request_id] = (tokens, now)

    def forget(self, request_id: str) -> None:
        self._tokens -= self.placed.pop(request_id, 0)
        self._tokens -= self._settling.pop(request_id, (0, 0.0))[0]

    def report(self, load: Load, now: float) -> None:
        """Takes a report. One that was on its way when a request was accepted knows it not."""
        self.load = load
        for request_id, (_, since) in list(self._settling.items()):
            if now - since >= SETTLE_S:
                self.forget(request_id)


class Roster:
    """Live workers and the cards of the models that they serve."""

    def __init__(self, publisher: Publisher, metrics: GatewayMetrics) -> None:
        self._publisher = publisher
        self._metrics = metrics.fleet
        self._workers: dict[str, Worker] = {}
        self._cards: dict[str, tuple[ModelCard, ...]] = {}
        """By hash: a worker's card, and behind it those of its adapters."""
        self._card_seen_at: dict[str, float] = {}
        self._listeners: list[Callable[[str], None]] = []
        self._learners: list[Callable[[ModelCard], None]] = []
        self._changed = asyncio.Event()
        self._snapshots = -1
        self._pools: dict[tuple[str, str, str], Pool[Worker]] = {}
        self._loading = Loading(self._metrics.loading_workers.set)
        self._joined = False
        self._unmet: set[str] = set()
        """Members and workers whose card is on its way: any name may be on it."""

    @property
    def met(self) -> bool:
        """All members that Redis named are known, so that what is not known does not exist."""
        return self._joined and not self._unmet

    @property
    def ready(self) -> bool:
        """A live worker that takes requests exists."""
        return any(worker.open for worker in self._workers.values())

    @property
    def workers(self) -> list[str]:
        """Names of the live workers."""
        return list(self._workers)

    def cards(self) -> list[ModelCard]:
        """One card per served model or adapter, by main name; those long without a worker are
        gone."""
        cards: dict[str, ModelCard] = {}
        for card in self._known():
            cards.setdefault(card.name, card)
        return list(cards.values())

    def find(self, name: str) -> ModelCard:
        """The card that serves `name` (any of its names).

        Raises:
            NoWorkerError: no worker has ever been seen, one is still loading the model, or one is
                known whose models are not.
            ModelNotFoundError: workers are known, but none serves this name.
        """
        for card in self._known():
            if name in card.names:
                return card
        if name in self._loading:
            raise NoWorkerError(
                "The model is still loading. Please retry.", param="model", retry_after_s=5.0
            )
        if not self._cards:
            raise NoWorkerError("No worker is ready yet. Please retry.", retry_after_s=2.0)
        if self._unmet:
            raise NoWorkerError("A worker has just joined. Please retry.", retry_after_s=1.0)
        raise ModelNotFoundError("The model does not exist or is not served here.", param="model")

    def knows(self, name: str) -> bool:
        """Whether some card serves this name."""
        return any(name in card.names for card in self._known())

    def serves(self, card: ModelCard) -> bool:
        """Whether a worker takes requests for it now."""
        return bool(self.candidates(card).workers)

    def candidates(self, card: ModelCard) -> Pool[Worker]:
        """The workers that may take a request for `card`: they give the same answers."""
        key = (card.revision, card.name, card.adapter_revision)
        pool = self._pools.get(key)
        if pool is None:
            if len(self._pools) >= MAX_POOLS:
                self._pools.clear()
            pool = self._pools[key] = Pool(self._able(card))
        return pool

    def _able(self, card: ModelCard) -> list[Worker]:
        able = [
            worker
            for worker in self._workers.values()
            if worker.open and worker.card is not None and worker.card.answers(card)
        ]
        return [worker for worker in able if not worker.slow] or able

    def get(self, worker: str) -> Worker | None:
        return self._workers.get(worker)

    def on_lost(self, listener: Callable[[str], None]) -> None:
        """Calls `listener` with the name of every worker that is lost from now on."""
        self._listeners.append(listener)

    def on_card(self, learner: Callable[[ModelCard], None]) -> None:
        """Calls `learner` with every card that is fetched from now on."""
        self._learners.append(learner)

    async def changed(self) -> None:
        """Waits until a worker begins to take requests, or the last one is met."""
        await self._changed.wait()

    def feed(self) -> Feed[RosterEvent]:
        """The roster stream, for the gateway's reader."""
        return Feed(keys.roster(), ROSTER, self.receive, owned=False, reset=lambda: None)

    def receive(self, events: Sequence[RosterEvent]) -> None:
        """Takes the events of one packet."""
        for event in events:
            if isinstance(event, Farewell):
                self._loading.drop(event.worker)
                self._lose(event.worker, "said farewell")
            else:
                self._take(event)

    def check(self, reader: Reader) -> None:
        """Finds the workers that went silent. Call it a few times per lease."""
        if reader.steady_since is None:
            return
        if reader.reconnects != self._snapshots:
            self._snapshots = reader.reconnects
            self._join()
        heard_at, steady_since = reader.heard_at, reader.steady_since

        def lapsed(seen_at: float) -> bool:
            return heard_at - max(seen_at, steady_since) > LEASE_S

        self._loading.expire(lapsed)
        for worker in list(self._workers.values()):
            if lapsed(worker.seen_at):
                self._lose(worker.name, "lapsed")
        self._drop_old_cards()

    def _take(self, beacon: Beacon) -> None:
        worker = self._workers.get(beacon.worker)
        if beacon.loading:
            if worker is None:  # else it has come late
                self._loading.take(beacon, asyncio.get_running_loop().time())
            return
        if worker is None:
            worker = self._workers[beacon.worker] = Worker(beacon.worker, self._free_number())
            log.info("worker %s joined", beacon.worker)
        was_open, was_slow = worker.open, worker.slow
        worker.seen_at = asyncio.get_running_loop().time()
        worker.report(beacon.load, worker.seen_at)
        worker.draining = beacon.draining
        worker.digest = beacon.digest
        if worker.card_hash != beacon.card or worker.card is None:
            worker.card_hash = beacon.card
            worker.card = next(iter(self._cards.get(beacon.card, ())), None)
            self._pools.clear()
            if worker.card is None:
                self._fetch_card(worker)
        if (worker.open, worker.slow) != (was_open, was_slow):
            self._pools.clear()
        if worker.card is not None:
            self._card_seen_at[worker.card_hash] = worker.seen_at
        self._opened(worker, was_open)

    def _free_number(self) -> int:
        """The least that no live worker has."""
        taken = {worker.number for worker in self._workers.values()}
        return next(number for number in itertools.count() if number not in taken)

    def _opened(self, worker: Worker, was_open: bool) -> None:
        self._metrics.workers.set(len(self._workers))
        if worker.card is not None:
            self._loading.drop(worker.name)
        if worker.open and not was_open:
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _now_met(self, worker: str) -> None:
        self._unmet.discard(worker)
        if not self._unmet:
            self._wake()

    def _fetch_card(self, worker: Worker) -> None:
        wanted = worker.card_hash
        self._unmet.add(worker.name)

        def received(future: asyncio.Future[Value]) -> None:
            self._now_met(worker.name)
            if future.cancelled() or future.exception() is not None:
                return
            card = _card(future.result(), wanted)
            if card is None or worker.card_hash != wanted:
                return
            was_open = worker.open
            worker.card, self._cards[wanted] = card, tuple(card.served())
            self._pools.clear()
            self._card_seen_at[wanted] = worker.seen_at
            for learner in self._learners:
                learner(card)
            self._opened(worker, was_open)

        self._publisher.call("GET", keys.worker_card(worker.name)).add_done_callback(received)

    def _join(self) -> None:
        """Asks for the members, so that a gateway need not wait for everybody's next beacon."""

        def received(future: asyncio.Future[Value]) -> None:
            if future.cancelled() or future.exception() is not None:
                return
            for beacon in _beacons(future.result()):
                if beacon.worker not in self._workers:
                    self._meet(beacon)
            self._joined = True
            if not self._unmet:
                self._wake()

        self._publisher.call("HGETALL", keys.members()).add_done_callback(received)

    def _meet(self, beacon: Beacon) -> None:
        """Takes a member whose lease is there; one without is the trace of a dead worker."""

        self._unmet.add(beacon.worker)

        def received(future: asyncio.Future[Value]) -> None:
            self._now_met(beacon.worker)
            told = not future.cancelled() and future.exception() is None
            if told and keys.is_alive(future.result()) and beacon.worker not in self._workers:
                self._take(beacon)

        lease = keys.worker_lease(beacon.worker)
        self._publisher.call("PTTL", lease).add_done_callback(received)

    def _lose(self, name: str, why: str) -> None:
        if self._workers.pop(name, None) is None:
            return
        self._pools.clear()
        log.warning("worker %s %s", name, why)
        self._metrics.workers_lost.inc()
        self._metrics.workers.set(len(self._workers))
        for listener in self._listeners:
            listener(name)

    def _known(self) -> Iterator[ModelCard]:
        """Cards of live workers, then those of workers that went away; of one worker the model's
        first, then its adapters'."""
        live = dict.fromkeys(each.card_hash for each in self._workers.values() if each.card)
        gone = (key for key in self._cards if key not in live)
        for key in (*live, *gone):
            yield from self._cards.get(key, ())

    def _drop_old_cards(self) -> None:
        now = asyncio.get_running_loop().time()
        for key, seen_at in list(self._card_seen_at.items()):
            if now - seen_at > KEEP_CARD_S and len(self._cards) > 1:
                del self._card_seen_at[key]
                self._cards.pop(key, None)


def _card(value: Value, wanted: str) -> ModelCard | None:
    """The card in Redis, when it is the one that the beacon named."""
    if not isinstance(value, bytes) or content_hash(value) != wanted:
        return None
    try:
        return _decode_card(value)
    except (msgspec.DecodeError, ValueError):
        log.warning("a worker's card cannot be read")
        return None


def _beacons(value: Value) -> Iterator[Beacon]:
    pairs = cast(list[Any], value or [])
    for packed in pairs[1::2]:
        try:
            yield _decode_beacon(packed)
        except (msgspec.DecodeError, ValueError):
            continue
