"""Which worker takes a request: a pure function of a snapshot. It knows no Redis, no clock, no
request.

A worker's score is in seconds, so that unequal ones compare. Its wait: the tokens that are to be
prefilled there by its last report and by what was placed since (which counts at once), over its
prefill rate, and the sequences there over its decode rate. To that comes KEEP times the prefill of
what it does not hold of this prompt. The load is always in the score: routers that look at caches
alone make hot spots.

KEEP is above 1 because a prefix that is computed twice costs others too: its time, and the room of
what it evicts. TAU_S bounds it: a worker that waits TAU_S longer than the lightest is no choice,
whatever it holds.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from forebay_shared.telemetry import PickReason

KEEP = 2.0
TAU_S = 2.0
"""Longest added wait that a cached prefix is worth."""
PREFILL_RATE = 16_000.0
"""Tokens/s of a worker that has not measured its own, where no other has."""
DECODE_RATE = 4_000.0


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

    @property
    def prefill_rate(self) -> float:
        """Tokens/s as the worker measured them; 0: not known."""
        ...

    @property
    def decode_rate(self) -> float:
        """Tokens/s of a full batch; 0: not known."""
        ...


C = TypeVar("C", bound=Candidate)


class Choice(NamedTuple, Generic[C]):
    """A worker, and how many tokens of the prompt it is thought to hold.

    The reason: there was no other (only); it holds the most (prefix); nobody holds anything, and it
    has the least to do (load); or who holds the most has too much to do (spread).
    """

    worker: C
    cached_tokens: int
    reason: PickReason


class _Option(NamedTuple, Generic[C]):
    score: float
    wait_s: float
    worker: C
    cached_tokens: int


def pick(
    candidates: Iterable[C],
    holders: Sequence[tuple[C, int]] = (),
    *,
    prompt_tokens: int = 0,
    avoid: Collection[str] = (),
    tie: int = 0,
    keep: float = KEEP,
    tau_s: float = TAU_S,
) -> Choice[C] | None:
    """The worker for a prompt; one in `avoid` only when there is no other; None without any.

    `holders` have the first so many tokens of the prompt in their caches; they may be among the
    `candidates`. `tie` chooses among equals, so that gateways with the same picture do not all run
    to one worker.
    """
    able = list(candidates)
    if avoid and (kept := [worker for worker in able if worker.name not in avoid]):
        able = kept
        holders = [held for held in holders if held[0].name not in avoid]
    if not able:
        return None
    if len(able) == 1 and not holders:
        return Choice(able[0], 0, "only")
    start = tie % len(able)
    empty = [(worker, 0) for worker in able[start:] + able[:start]]
    options = _options([*holders, *empty], prompt_tokens, keep)
    limit = min(option.wait_s for option in options) + tau_s
    best = min((o for o in options if o.wait_s <= limit), key=_score)
    most = max((cached for _, cached in holders), default=0)
    reason = "load" if not most else "prefix" if best.cached_tokens == most else "spread"
    return Choice(best.worker, best.cached_tokens, reason)


def _options(held: list[tuple[C, int]], prompt_tokens: int, keep: float) -> list[_Option[C]]:
    prefill = _typical([worker.prefill_rate for worker, _ in held], PREFILL_RATE)
    decode = _typical([worker.decode_rate for worker, _ in held], DECODE_RATE)
    options: list[_Option[C]] = []
    for worker, cached in held:
        rate = worker.prefill_rate or prefill
        wait_s = worker.queued_tokens / rate + worker.busy / (worker.decode_rate or decode)
        score = wait_s + keep * (prompt_tokens - cached) / rate
        options.append(_Option(score, wait_s, worker, cached))
    return options


def _score(option: _Option[C]) -> float:
    return option.score


def _typical(rates: list[float], default: float) -> float:
    """The mean of what is known: what an unmeasured worker is taken for."""
    known = [rate for rate in rates if rate > 0]
    return sum(known) / len(known) if known else default
