"""A job that makes vectors of inputs: what is asked of a worker, and what its answer must be.

It does not know the form in which a client gets the vectors.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from forebay_shared.models import ModelCard
from forebay_shared.telemetry import ResubmitReason
from forebay_shared.wire import Accepted, Done, Embedded, Encode, Failed, Reply, Started, pack_ids

from forebay_gateway.attempts import Attempts
from forebay_gateway.inputs import Input, input_tokens
from forebay_gateway.meter import Demand, Toll
from forebay_gateway.routing import Uncached

if TYPE_CHECKING:
    from forebay_gateway.dispatch import Dispatcher

FLOAT_BYTES = 4


class EncodeJob(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs, no more than one message may hold; see `wire.Encode`."""

    request_id: str
    card: ModelCard
    inputs: Sequence[Input]
    dimensions: int = 0
    normalize: bool | None = None
    team: str = ""
    weight: float = 1.0
    priority: int = 0
    toll: Toll | None = None
    """Who admits it and pays for it; None: nobody counts."""

    @property
    def num_tokens(self) -> int:
        """Of all inputs; of texts, as estimated."""
        return sum(map(input_tokens, self.inputs))

    @property
    def demand(self) -> Demand:
        return Demand(self.toll, self.num_tokens, 0, 1, estimated=self.card.speaks_text)

    @property
    def vector_bytes(self) -> int:
        """How long each vector of the answer must be."""
        whole = self.card.embedding.size if self.card.embedding is not None else 0
        return (self.dimensions or whole) * FLOAT_BYTES


class EncodeLedger:
    """The one answer that an encode job gets. See `attempts.Book`."""

    def __init__(self, job: EncodeJob) -> None:
        self._job = job
        self.open = True
        self.begun = False
        self.repeated = 0
        self.begin()

    def begin(self) -> None:
        self.accepted = False
        self.lost: ResubmitReason | None = None
        self.failed: Failed | None = None

    def clear(self) -> None:
        self.open = False

    def fold(self, replies: Sequence[Reply]) -> list[Embedded]:
        """The answer, once it is there. One that is not what was asked for counts as a failure."""
        for reply in replies:
            if isinstance(reply, Accepted):
                self.accepted = True
            elif isinstance(reply, Started):
                self.begun = True
            elif isinstance(reply, Failed):
                self.failed = self.failed or reply
            elif isinstance(reply, Embedded) and self.open and self._fits(reply):
                self.open = False
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
        super().__init__(dispatcher, job.request_id, job.card, EncodeLedger(job), job.demand)
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
            texts=tuple(each for each in job.inputs if isinstance(each, str)),
        )
