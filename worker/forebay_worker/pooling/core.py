"""EncodeCore: inputs go in, vectors come out. A step packs inputs of any requests up to a budget.

It is to an embedding model what `engine.core` is to a decoder, and is driven by the same loop:
synchronous, single-threaded, knowing messages and not how they travel. What goes wrong in a request
ends only that.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

import numpy as np
from forebay_shared.errors import DeadlineError, EngineError, ForebayError, OverloadedError
from forebay_shared.models import EmbeddingCard
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import Done, Embedded, Encode, Load, Started, Usage

from forebay_worker.engine import replies
from forebay_worker.engine.ports import Event, Recorder
from forebay_worker.engine.waiting import WaitingQueue
from forebay_worker.pooling.intake import check_dimensions, inputs_of
from forebay_worker.pooling.ports import TokenIds, VectorRunner, Vectors

_log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""After this many failed steps in a row the engine calls itself dead."""
SHARES = 8
"""A request gets this part of a step, then the next one's turn comes: a single query does not wait
for a thousand documents."""
_LEAST_NORM = 1e-12

Key = replies.Key


@dataclass(slots=True, eq=False)
class _Request:
    """One Encode; a `Waiter`. Inputs before `taken` have been in a step."""

    key: Key
    gateway: str
    inputs: list[TokenIds]
    dimensions: int
    normalize: bool
    team: str
    weight: float
    priority: int
    serial: int
    arrived: float
    latest_start: float
    vectors: list[Vectors] = field(default_factory=list["Vectors"])
    taken: int = 0
    started_at: float | None = None
    announced: bool = False
    num_served: int = 0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.inputs))

    @property
    def queued_tokens(self) -> int:
        return sum(map(len, self.inputs[self.taken :]))

    def take(self, room: int) -> list[TokenIds]:
        """The next inputs that `room` tokens hold, one at least."""
        first, size = self.taken, 0
        while self.taken < len(self.inputs):
            size += len(self.inputs[self.taken])
            if size > room and self.taken > first:
                break
            self.taken += 1
        return self.inputs[first : self.taken]


@dataclass(slots=True)
class _Piece:
    """What one request has in a step."""

    request: _Request
    inputs: list[TokenIds]


class EncodeCore:
    """One model's requests. Every method returns at once but `step`, which runs the model."""

    def __init__(
        self,
        runner: VectorRunner,
        card: EmbeddingCard,
        settings: WorkerSettings,
        recorder: Recorder,
    ) -> None:
        self._runner = runner
        self._card = card
        self._recorder = recorder
        self._budget = settings.max_num_batched_tokens or runner.token_budget
        self._max_queued = settings.max_num_queued_reqs
        self._requests: dict[Key, _Request] = {}
        self._waiting = WaitingQueue[_Request]()
        self._serial = 0
        self._events: list[Event] = []
        self._failed_steps = 0

    @property
    def idle(self) -> bool:
        return not self._requests

    @property
    def stalled(self) -> bool:
        """Nothing is ever waited for."""
        return False

    @property
    def healthy(self) -> bool:
        return self._failed_steps < MAX_FAILED_STEPS

    @property
    def next_deadline(self) -> float | None:
        return None

    def on_ready(self, wake: Callable[[], None]) -> None:
        """Nothing is done outside."""

    def check(self) -> None:
        """Raises when an idle engine still holds something."""
        if len(self._waiting) or self._waiting.tokens:
            raise AssertionError("an idle engine has inputs that wait")

    def take_events(self) -> list[Event]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def load(self) -> Load:
        begun = sum(request.started_at is not None for request in self._requests.values())
        return Load(
            running=begun,
            waiting=len(self._requests) - begun,
            waiting_tokens=self._waiting.tokens,
        )

    def submit(self, encode: Encode, arrived: float) -> None:
        """Queues inputs, or answers Failed; a duplicate is dropped. Raises nothing."""
        key = (encode.request_id, encode.attempt)
        if key in self._requests:
            return
        try:
            self._admit(encode, key, arrived)
        except ForebayError as error:
            self._events.append((encode.gateway, replies.failed(key, error)))
        except Exception:
            _log.exception("intake of request %s failed", encode.request_id)
            error = EngineError("The engine could not take this request.")
            self._events.append((encode.gateway, replies.failed(key, error)))

    def cancel(self, request_id: str, attempt: int, index: int | None = None) -> None:
        """Drops a request between two steps; it has one sequence, whatever `index` says."""
        request = self._requests.get((request_id, attempt))
        if request is not None:
            now = monotonic()
            usage = self._end(request, "abort", now)
            done = Done(request_id, attempt, 0, "abort", None, usage)
            self._events.append((request.gateway, done))

    def cancel_gateway(self, gateway: str) -> None:
        for request in list(self._requests.values()):
            if request.gateway == gateway:
                self.cancel(*request.key)

    def fail_all(self, error: ForebayError) -> None:
        for request in list(self._requests.values()):
            self._fail(request, error)

    def step(self) -> None:
        """One round. A failed step fails its requests; the engine is ready for the next one."""
        began = monotonic()
        self._drop_expired(began)
        pieces = self._choose(began)
        if not pieces:
            return
        called = monotonic()
        results = self._run(pieces)
        now = monotonic()
        for piece, vectors in zip(pieces, results, strict=True):
            self._take(piece.request, vectors, now, lone=len(pieces) == 1)
        self._recorder.step(
            prompt_tokens=sum(len(ids) for piece in pieces for ids in piece.inputs),
            generation_tokens=0,
            prefix_queries=0,
            prefix_hits=0,
            preemptions=0,
            host_s=called - began + monotonic() - now,
        )

    def _admit(self, encode: Encode, key: Key, arrived: float) -> None:
        if len(self._requests) >= self._max_queued:
            raise OverloadedError("The engine's queue is full; try again later.")
        inputs = inputs_of(encode, self._runner)
        check_dimensions(encode.dimensions, self._card)
        self._serial += 1
        normalize = encode.normalize
        request = self._requests[key] = _Request(
            key=key,
            gateway=encode.gateway,
            inputs=inputs,
            dimensions=encode.dimensions or self._card.size,
            normalize=self._card.normalized if normalize is None else normalize,
            team=encode.team,
            weight=encode.weight,
            priority=encode.priority,
            serial=self._serial,
            arrived=arrived,
            latest_start=arrived + (encode.queue_timeout_ms / 1000 or math.inf),
        )
        self._waiting.enter(request)

    def _drop_expired(self, now: float) -> None:
        late = [
            request
            for request in self._requests.values()
            if request.started_at is None and request.latest_start < now
        ]
        for request in late:
            self._fail(request, DeadlineError("The request waited too long for its turn."))

    def _choose(self, now: float) -> list[_Piece]:
        """The inputs of the next step, in turns of a share of its budget; one at least."""
        pieces: list[_Piece] = []
        room, share = self._budget, max(1, self._budget // SHARES)
        while room > 0 and (request := self._waiting.head()) is not None:
            if pieces and len(request.inputs[request.taken]) > room:
                break
            self._waiting.pop(request)
            piece = _Piece(request, request.take(min(room, share)))
            size = sum(map(len, piece.inputs))
            self._waiting.charge(request, request.num_served + size)
            if request.started_at is None:
                request.started_at = now
            if request.taken < len(request.inputs):
                self._waiting.push(request)
            pieces.append(piece)
            room -= size
        return pieces

    def _run(self, pieces: Sequence[_Piece]) -> list[Vectors | None]:
        """The vectors of each piece, None for one that failed. When the step fails, each piece is
        tried alone, so that a bad input fails alone and a passing fault harms nobody."""
        try:
            results = self._split(pieces, self._encode(pieces))
        except Exception:
            self._recorder.step_failed()
            _log.exception("a step of %d requests failed; each is tried alone", len(pieces))
            results = [self._alone(piece) for piece in pieces]
        failed = all(vectors is None for vectors in results)
        self._failed_steps = self._failed_steps + 1 if failed else 0
        return results

    def _alone(self, piece: _Piece) -> Vectors | None:
        try:
            return self._encode([piece])
        except Exception:
            _log.exception("an input cannot be encoded")
            return None

    def _encode(self, pieces: Sequence[_Piece]) -> Vectors:
        return self._runner.encode([ids for piece in pieces for ids in piece.inputs])

    def _split(self, pieces: Sequence[_Piece], vectors: Vectors) -> list[Vectors | None]:
        ends = np.cumsum([len(piece.inputs) for piece in pieces])
        return [*np.split(vectors, ends[:-1])]

    def _take(self, request: _Request, vectors: Vectors | None, now: float, *, lone: bool) -> None:
        """Keeps what a step made for a request; answers it when that was the last of it."""
        if request.key not in self._requests:
            return  # another piece of it has failed
        if vectors is None:
            error = EngineError("The engine failed in a step of this request.")
            self._fail(request, error, retryable=not lone)
        elif not np.isfinite(vectors).all():
            self._fail(request, EngineError("The model gave no usable result for this request."))
        else:
            request.vectors.append(vectors)
            if sum(map(len, request.vectors)) == len(request.inputs):
                self._finish(request, now)
            elif not request.announced:
                self._announce(request)

    def _announce(self, request: _Request) -> None:
        """Says that it has begun, so that nobody takes it for one that waits."""
        request.announced = True
        started_at = request.arrived if request.started_at is None else request.started_at
        queued_ms = (started_at - request.arrived) * 1000
        self._events.append((request.gateway, Started(*request.key, 0, 0, queued_ms)))

    def _finish(self, request: _Request, now: float) -> None:
        vectors = np.concatenate(request.vectors)[:, : request.dimensions]
        if request.normalize:
            vectors = normalized(vectors)
        usage = self._end(request, "stop", now)
        packed = [vector.tobytes() for vector in np.ascontiguousarray(vectors, "<f4")]
        self._events.append((request.gateway, Embedded(*request.key, packed, usage)))

    def _fail(
        self, request: _Request, error: ForebayError, *, retryable: bool | None = None
    ) -> None:
        self._end(request, "error", monotonic())
        self._events.append((request.gateway, replies.failed(request.key, error, retryable)))

    def _end(self, request: _Request, reason: str, now: float) -> Usage:
        """Forgets a request and counts it."""
        del self._requests[request.key]
        self._waiting.leave(request)
        started = now if request.started_at is None else request.started_at
        tokens = request.tokens
        self._recorder.finished(
            reason=reason,
            e2e_s=now - request.arrived,
            queued_s=started - request.arrived,
            prefill_s=now - started,
            decode_s=0.0,
            prompt_tokens=tokens,
            generation_tokens=0,
            max_tokens=0,
        )
        return Usage(
            prompt_tokens=tokens,
            queued_ms=(started - request.arrived) * 1000,
            prefill_ms=(now - started) * 1000,
        )


def normalized(vectors: Vectors) -> Vectors:
    """Each row over its Euclidean length; a row of zeros stays."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.maximum(lengths, _LEAST_NORM)
