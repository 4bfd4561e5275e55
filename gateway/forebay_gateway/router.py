"""Which worker takes a request: a pure function of a snapshot. It knows no Redis, no clock, no
request.

The score is in tokens: those that wait for prefill on a worker by its last report, plus those
placed since then, which count at once. A score of cached prefixes is to be subtracted here.
"""

from collections.abc import Collection, Iterable
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """What the router sees of a worker."""

    @property
    def name(self) -> str: ...

    @property
    def queued_tokens(self) -> int:
        """Uncached prompt tokens still to prefill: reported, plus just placed."""
        ...

    @property
    def busy(self) -> int:
        """Sequences running or waiting: reported, plus just placed."""
        ...


C = TypeVar("C", bound=Candidate)


def pick(candidates: Iterable[C], *, avoid: Collection[str] = (), tie: int = 0) -> C | None:
    """The least loaded candidate; one in `avoid` only when there is no other; None when there is
    none.

    `tie` chooses among equals, so that gateways with the same picture do not all run to one worker.
    """
    everyone = list(candidates)
    pool = [worker for worker in everyone if worker.name not in avoid] or everyone
    if not pool:
        return None
    best = min((worker.queued_tokens, worker.busy) for worker in pool)
    equals = [worker for worker in pool if (worker.queued_tokens, worker.busy) == best]
    return equals[tie % len(equals)]
