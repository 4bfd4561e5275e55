"""A job that makes vectors of inputs: what is asked of a worker, and what its answer must be.

It does not know the form in which a client gets the vectors.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forebay_shared.wire import Accepted, Done, Embedded, Encode, Failed, Reply, Started, pack_ids

from forebay_gateway.attempts import Attempts
from forebay_gateway.jobs import EncodeJob
from forebay_gateway.ledger import Book
from forebay_gateway.routing import Uncached

if TYPE_CHECKING:
    from forebay_gateway.dispatch import Dispatcher


class EncodeLedger(Book[Embedded]):
    """The one answer that an encode job gets."""

    def __init__(self, job: EncodeJob) -> None:
        super().__init__()
        self._job = job
        self._open = True

    @property
    def open(self) -> bool:
        return self._open

    def clear(self) -> None:
        self._open = False

    def fold(self, replies: Sequence[Reply]) -> list[Embedded]:
        """The answer, once it is there. One that is not what was asked for counts as a failure."""
        for reply in replies:
            if isinstance(reply, Accepted):
                self.accept(reply)
            elif isinstance(reply, Started):
                self.begun = True
            elif isinstance(reply, Failed):
                self.failed = self.failed or reply
            elif isinstance(reply, Embedded) and self._open and self._fits(reply):
                self._open = False
                return [reply]
            elif isinstance(reply, Done | Embedded):
                self.lost = "failed"
        return []

    def _fits(self, reply: Embedded) -> bool:
        size = self._job.vector_bytes
        return len(reply.vectors) == len(self._job.inputs) and all(
            len(vector) == size for vector in reply.vectors
        )


class Encoding(Attempts[Embedded]):
    """A running encode job. A lost attempt is made again from its beginning."""

    def __init__(self, dispatcher: "Dispatcher", job: EncodeJob) -> None:
        super().__init__(dispatcher, job, EncodeLedger(job))
        self.job = job

    def prompt(self) -> Uncached:
        return Uncached(self.job.num_tokens)

    def message(self, attempt: int) -> Encode:
        job = self.job
        return Encode(
            request_id=job.request_id,
            attempt=attempt,
            gateway=self.dispatcher.gateway,
            inputs=tuple(pack_ids(each) for each in job.inputs if not isinstance(each, str)),
            dimensions=job.dimensions,
            normalize=job.normalize,
            team=job.team,
            weight=job.weight,
            priority=job.priority,
            queue_timeout_ms=self.dispatcher.queue_timeout_ms,
            metered=job.toll is not None,
            suspect=self.suspect,
            texts=tuple(each for each in job.inputs if isinstance(each, str)),
        )
