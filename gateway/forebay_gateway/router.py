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


_Option = tuple[float, float, C, int]
"""Score, wait in seconds, worker, cached tokens: a plain tuple, as a choice makes dozens."""


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
    limit = min(option[1] for option in options) + tau_s
    best = min((option for option in options if option[1] <= limit), key=_score)
    most = max((cached for _, cached in holders), default=0)
    reason = "load" if not most else "prefix" if best[3] == most else "spread"
    return Choice(best[2], best[3], reason)


def _options(held: list[tuple[C, int]], prompt_tokens: int, keep: float) -> list[_Option[C]]:
    prefill = [worker.prefill_rate for worker, _ in held]
    decode = [worker.decode_rate for worker, _ in held]
    if 0 in prefill:
        prefill = _filled(prefill, PREFILL_RATE)
    if 0 in decode:
        decode = _filled(decode, DECODE_RATE)
    options: list[_Option[C]] = []
    for (worker, cached), rate, steps in zip(held, prefill, decode, strict=True):
        wait_s = worker.queued_tokens / rate + worker.busy / steps
        score = wait_s + keep * (prompt_tokens - cached) / rate
        options.append((score, wait_s, worker, cached))
    return options


def _score(option: _Option[C]) -> float:
    return option[0]


def _filled(rates: list[float], default: float) -> list[float]:
    """Those that are not known taken for the mean of those that are."""
    known = [rate for rate in rates if rate > 0]
    typical = sum(known) / len(known) if known else default
    return [rate or typical for rate in rates]
