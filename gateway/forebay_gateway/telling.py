"""A job for an engine that speaks text: what is asked of its worker.

Such a job is made again only while nothing of its answer is known: nobody can go on with a text
that another has begun. It knows no dialect.
"""

from typing import TYPE_CHECKING

from forebay_shared.wire import (
    SubmitText,
)

from forebay_gateway.attempts import Attempts
from forebay_gateway.jobs import TextJob
from forebay_gateway.ledger import Event, TextLedger
from forebay_gateway.routing import Uncached

if TYPE_CHECKING:
    from forebay_gateway.dispatch import Dispatcher


class Telling(Attempts[Event]):
    """A running text job. Use it as an async context manager; see `generation.Generation`."""

    def __init__(self, dispatcher: "Dispatcher", job: TextJob) -> None:
        self._ledger = TextLedger(job.n)
        self._traceparent = dispatcher.traceparent()
        self.job = job
        super().__init__(dispatcher, job, self._ledger)

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
            suspect=self.suspect,
        )
