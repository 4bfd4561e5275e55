"""A job for an engine that speaks text: what is asked of its worker, and what came of it.

Such a job is made again only while nothing of its answer is known: nobody can go on with a text
that another has begun. It knows no dialect.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from forebay_shared.asked import Asked
from forebay_shared.models import ModelCard
from forebay_shared.sampling import SamplingParams
from forebay_shared.telemetry import ResubmitReason
from forebay_shared.wire import (
    Accepted,
    Done,
    Failed,
    Reply,
    Started,
    SubmitText,
    TextDelta,
)

from forebay_gateway.attempts import Attempts
from forebay_gateway.ledger import Event
from forebay_gateway.meter import Demand, Toll
from forebay_gateway.routing import Uncached

if TYPE_CHECKING:
    from forebay_gateway.dispatch import Dispatcher


class TextJob(msgspec.Struct, frozen=True, kw_only=True):
    """One request as text, `n` answers of it; `given` names what of `sampling` the client set."""

    request_id: str
    card: ModelCard
    asked: Asked
    sampling: SamplingParams
    given: tuple[str, ...] = ()
    n: int = 1
    cache_salt: str = ""
    team: str = ""
    weight: float = 1.0
    priority: int = 0
    toll: Toll | None = None
    """Who admits it and pays for it; None: nobody counts."""

    @property
    def prompt(self) -> list[int]:
        """Its ids, which only the engine knows."""
        return []

    @property
    def prompt_tokens(self) -> int:
        """As estimated, until the engine tells."""
        return self.asked.estimated_tokens

    @property
    def demand(self) -> Demand:
        """By the prompt's bytes; what it took is settled by what the engine tells."""
        output = min(self.sampling.max_tokens, self.card.max_model_len)
        return Demand(self.toll, self.prompt_tokens, self.n * output, self.n, estimated=True)


class TextLedger:
    """What a client has had of the `n` answers of a job; see `attempts.Book`.

    `told`: some of the text has been passed on.
    """

    __slots__ = ("_open", "_started", "accepted", "begun", "failed", "lost", "repeated", "told")

    def __init__(self, n: int) -> None:
        self._open = dict.fromkeys(range(n), 0)
        """Deltas of the answers that have not ended."""
        self._started: set[int] = set()
        self.begun = self.told = False
        self.repeated = 0
        self.begin()

    def begin(self) -> None:
        self.accepted = False
        self.lost: ResubmitReason | None = None
        self.failed: Failed | None = None

    @property
    def open(self) -> bool:
        return bool(self._open)

    def indexes(self) -> tuple[int, ...]:
        """The answers that have not ended."""
        return tuple(self._open)

    def drop(self, index: int) -> bool:
        """Takes an answer out; False when it had ended."""
        return self._open.pop(index, None) is not None

    def clear(self) -> None:
        self._open.clear()

    def fold(self, replies: Sequence[Reply]) -> list[Event]:
        events: list[Event] = []
        for reply in replies:
            if self.lost is not None:
                break
            if isinstance(reply, Accepted):
                self.accepted = True
            elif isinstance(reply, Failed):
                self.failed = reply
            elif isinstance(reply, Started | TextDelta | Done) and reply.index in self._open:
                self._take(reply, events)
        return events

    def _take(self, reply: Started | TextDelta | Done, events: list[Event]) -> None:
        if isinstance(reply, TextDelta):
            known = self._open[reply.index]
            if reply.offset > known:
                self.lost = "gap"
            elif reply.offset < known:
                self.repeated += 1
            else:
                self._open[reply.index] = known + 1
                self.told = True
                events.append(reply)
        elif isinstance(reply, Started):
            self.begun = True
            if reply.index not in self._started:
                self._started.add(reply.index)
                events.append(reply)
        elif reply.finish_reason == "abort":
            self.lost = "failed"  # nobody here asked for it
        else:
            self.told = True
            del self._open[reply.index]
            events.append(reply)


class Telling(Attempts[Event]):
    """A running text job. Use it as an async context manager; see `dispatch.Generation`."""

    def __init__(self, dispatcher: "Dispatcher", job: TextJob) -> None:
        self._ledger = TextLedger(job.n)
        self._traceparent = dispatcher.traceparent()
        self.job = job
        super().__init__(dispatcher, job.request_id, job.card, self._ledger, job.demand)

    @property
    def repeatable(self) -> bool:
        return not self._ledger.told

    def stop(self, index: int) -> None:
        """Aborts answer `index`; no further event of it is returned."""
        self.abort(index, self._ledger.drop(index))

    def prompt(self) -> Uncached:
        return Uncached(self.job.prompt_tokens)

    def message(self, attempt: int) -> SubmitText:
        job = self.job
        return SubmitText(
            request_id=job.request_id,
            attempt=attempt,
            gateway=self.dispatcher.gateway,
            asked=job.asked,
            sampling=job.sampling,
            given=job.given,
            indexes=self._ledger.indexes(),
            cache_salt=job.cache_salt,
            team=job.team,
            weight=job.weight,
            priority=job.priority,
            queue_timeout_ms=self.dispatcher.queue_timeout_ms,
            traceparent=self._traceparent,
            metered=job.toll is not None,
        )
