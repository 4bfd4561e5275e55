"""The requests that an engine has taken and not ended: by key, by deadline, and by their grammars.

It knows who waits for what; it queues nothing, runs nothing and says nothing to anybody.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from forebay_shared.errors import OverloadedError, UnsupportedError
from forebay_shared.sampling import Grammar
from forebay_shared.wire import Submit

from forebay_worker.engine.grammar import Grammars, Preparation
from forebay_worker.engine.intake import Limits, sequences_of
from forebay_worker.engine.replies import Key
from forebay_worker.engine.sequence import Sequence

_REMEMBERED = 8192
"""Requests whose key is kept after their end, to know a duplicate."""


@dataclass(slots=True)
class Request:
    """The sequences of one Submit that have not ended, by index."""

    key: Key
    gateway: str
    sequences: dict[int, Sequence]
    started: bool = False
    preparation: Preparation | None = None
    """Its grammar, while that is compiled; only then are its sequences queued."""


class Requests:
    """Open requests, at most `max_queued` of which have not started."""

    def __init__(self, limits: Limits, grammars: Grammars | None, max_queued: int) -> None:
        self._limits = limits
        self._grammars = grammars
        self._max_queued = max_queued
        self._open: dict[Key, Request] = {}
        self._ended: OrderedDict[Key, None] = OrderedDict()
        self._preparing: dict[Preparation, Request] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._num_queued = 0
        self._serial = 0

    def __iter__(self) -> Iterator[Request]:
        """All that are open now, whatever is done to them meanwhile."""
        return iter(list(self._open.values()))

    def __contains__(self, key: Key) -> bool:
        """Whether it is open or has ended not long ago."""
        return key in self._open or key in self._ended

    def get(self, key: Key) -> Request | None:
        return self._open.get(key)

    def of(self, sequence: Sequence) -> Request:
        return self._open[sequence.request_id, sequence.attempt]

    @property
    def num_preparing(self) -> int:
        """Requests that wait for their grammars."""
        return len(self._preparing)

    @property
    def next_deadline(self) -> float | None:
        """When the next waiting request expires, if none of it is served by then."""
        return self._deadlines[0][0] if self._deadlines else None

    def open(self, submit: Submit, key: Key, arrived: float) -> Request:
        """Takes a request in. Raises a ForebayError when it cannot be served."""
        if self._num_queued >= self._max_queued:
            raise OverloadedError("The engine's queue is full; try again later.")
        if submit.sampling.grammar is not None and self._grammars is None:
            raise UnsupportedError("This engine does not support grammars.", param="grammar")
        sequences = sequences_of(submit, self._limits, arrived)
        request = Request(key, submit.gateway, {each.index: each for each in sequences})
        self._prepare(request, submit.sampling.grammar)
        self._open[key] = request
        self._num_queued += 1
        if submit.queue_timeout_ms > 0:
            deadline = arrived + submit.queue_timeout_ms / 1000
            self._serial += 1  # two deadlines may be equal
            heappush(self._deadlines, (deadline, self._serial, request))
        return request

    def start(self, request: Request) -> None:
        """The first of its sequences runs."""
        if not request.started:
            request.started = True
            self._num_queued -= 1

    def remove(self, sequence: Sequence) -> None:
        """Takes out an ended sequence, and its request with the last one."""
        request = self.of(sequence)
        del request.sequences[sequence.index]
        if request.sequences:
            return
        if request.preparation is not None:
            request.preparation.cancelled = True
            self._preparing.pop(request.preparation, None)
        self._num_queued -= not request.started
        del self._open[request.key]
        self.remember(request.key)

    def remember(self, key: Key) -> None:
        """Knows `key` for a while, so that its duplicates are dropped."""
        self._ended[key] = None
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def expired(self, now: float) -> Iterator[Request]:
        """Those that have waited too long; forgets the deadlines of what waits no more."""
        while self._deadlines:
            deadline, _, request = self._deadlines[0]
            waits = bool(request.sequences) and not request.started
            if waits and deadline > now:
                return
            heappop(self._deadlines)
            if waits:
                yield request

    def prepared(self, timeout_s: float) -> Iterator[tuple[Request, Preparation]]:
        """Those whose grammar is ready, or has failed, by now; waits for the first one at most so
        long."""
        for preparation in self._grammars.finished(timeout_s) if self._grammars else ():
            request = self._preparing.pop(preparation, None)
            if request is None:
                continue
            if preparation.error is None:
                request.preparation = None
                _attach(request, preparation)
            yield request, preparation

    def _prepare(self, request: Request, grammar: Grammar | None) -> None:
        """Gives the sequences their matchers, or lets the request wait for them."""
        if grammar is None or self._grammars is None:
            return
        outputs = {
            each.index: each.token_ids[each.num_prompt :] for each in request.sequences.values()
        }
        preparation = Preparation(grammar, outputs)
        if self._grammars.prepare(preparation):
            _attach(request, preparation)
        else:
            request.preparation = preparation
            self._preparing[preparation] = request


def _attach(request: Request, preparation: Preparation) -> None:
    for index, sequence in request.sequences.items():
        sequence.matcher = preparation.matchers[index]
