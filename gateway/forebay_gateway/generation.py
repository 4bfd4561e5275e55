"""A job in token ids: what is asked of its worker, and where another goes on when that is lost.

It goes on with the ids that were emitted. It knows no text.
"""

from typing import TYPE_CHECKING

import msgspec
from forebay_shared.blocks import root_hash
from forebay_shared.models import CAP_RESUME
from forebay_shared.sampling import SamplingParams
from forebay_shared.wire import Started, Submit, pack_ids

from forebay_gateway.attempts import Attempts, Placement
from forebay_gateway.jobs import Job
from forebay_gateway.ledger import Event, Ledger
from forebay_gateway.routing import Prompt

if TYPE_CHECKING:
    from forebay_gateway.dispatch import Dispatcher


class Generation(Attempts[Event]):
    """A running job. Use it as an async context manager; leaving it cancels what still runs."""

    def __init__(self, dispatcher: "Dispatcher", job: Job) -> None:
        self._ledger = Ledger(job.n)
        self._traceparent = dispatcher.traceparent()
        self.job = job
        scored = job.sampling.prompt_logprobs is not None
        root = root_hash(job.card.revision, job.card.adapter_revision, job.cache_salt)
        self._prompt = Prompt(pack_ids(job.prompt), root, whole=scored)
        super().__init__(dispatcher, job, self._ledger)

    def stop(self, index: int) -> None:
        """Aborts sequence `index` (a stop string matched); no further event of it is returned."""
        self.abort(index, self._ledger.drop(index))

    def prompt(self) -> Prompt:
        return self._prompt

    @property
    def repeatable(self) -> bool:
        return CAP_RESUME in self.card.capabilities or not self._ledger.told

    def begun(self, placement: Placement, event: Event) -> None:
        choice = placement.choice
        if choice.reason != "only" and isinstance(event, Started):
            self.dispatcher.routing.served(choice.cached_tokens, event.cached_tokens)

    def message(self, attempt: int) -> Submit:
        job = self.job
        return Submit(
            request_id=job.request_id,
            attempt=attempt,
            gateway=self.dispatcher.gateway,
            prompt=self._prompt.packed,
            sampling=self._sampling(),
            starts=self._ledger.starts(),
            cache_salt=job.cache_salt,
            team=job.team,
            weight=job.weight,
            priority=job.priority,
            queue_timeout_ms=self.dispatcher.queue_timeout_ms,
            traceparent=self._traceparent,
            metered=job.toll is not None,
            suspect=self.suspect,
            adapter=job.card.adapter.name if job.card.adapter is not None else "",
        )

    def _sampling(self) -> SamplingParams:
        """The job's. What is known of the prompt's log-probabilities is not computed again."""
        sampling = self.job.sampling
        if sampling.prompt_logprobs is None or self._ledger.scored < len(self.job.prompt) - 1:
            return sampling
        return msgspec.structs.replace(sampling, prompt_logprobs=None)
