"""From a job to its events: attempts, fencing, resubmission, cancel. The gateway that runs it owns
the request.

It knows no text, no HTTP and no Redis command: it sees token ids, the roster, the inbox and a
publisher.
"""

from types import TracebackType
from typing import Self

import msgspec
from forebay_shared.models import ModelCard
from forebay_shared.sampling import SamplingParams
from forebay_shared.wire import Delta, Done, Started

Event = Started | Delta | Done


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One request, ready for an engine: `prompt` in token ids, `n` sequences of it."""

    request_id: str
    card: ModelCard
    prompt: list[int]
    sampling: SamplingParams
    n: int = 1
    cache_salt: str = ""
    team: str = ""
    weight: float = 1.0
    priority: int = 0


class Generation:
    """A running job. Use it as an async context manager; leaving it cancels what still runs."""

    async def __aenter__(self) -> Self:
        raise NotImplementedError

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        raise NotImplementedError

    async def events(self) -> list[Event]:
        """Waits, then returns everything that is ready together; [] after the last Done.

        Deltas of one index that adjoin are merged. The first call places the job, so an error here
        before any event was returned is an error before anything ran. A cancelled call loses no
        event.

        Raises:
            NoWorkerError, WorkerLostError, BusError, DeadlineError, EngineError, OverloadedError,
            and whatever InvalidRequestError the engine answers.
        """
        raise NotImplementedError

    def stop(self, index: int) -> None:
        """Aborts sequence `index` (a stop string matched); no further event of it is returned."""
        raise NotImplementedError


class Dispatcher:
    """Places jobs on workers."""

    def generate(self, job: Job) -> Generation:
        raise NotImplementedError
