"""May a request wait here: bounds on all that waits for its first step, and on a team's part of it.

What is refused is refused at once, while the engine may be in a long step, and learns when to come
again from the rate at which the queue has drained. A request that would wait past its own deadline
is not let in to expire. Engines serve teams by weight, so a team waits for its own queue and not
for another's: a flood neither fills the queue for others nor makes it look long to them. It knows
no engine and no Redis.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from forebay_shared.errors import ForebayError, OverloadedError, RateLimitError
from forebay_shared.telemetry import RefuseReason

Key = tuple[str, int]

MEMORY_S = 10.0
"""The drain rate is that of about the last so many seconds in which something waited."""
LEARNT_S = 1.0
"""So much of such time makes a rate known."""
CERTAIN = 0.8
"""What is expected to wait for longer than this part of its patience is not let in: of those at the
edge, half would expire if the estimate were right on average."""
RETRY_S = (1.0, 40.0)
"""What a refused client is told at least and at most; SDKs do not believe in more than 60 s."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """`share`: what a team may hold of both, so far as others leave it. Where n hold all they may,
    that is 1 / (n + 1) each at a share of a half, so there is room for one more. A request alone is
    let in whatever its size."""

    requests: int = 1024
    tokens: int = 2_097_152
    share: float = 0.5


DEFAULT = Bounds()


@dataclass(slots=True)
class _Held:
    requests: int = 0
    tokens: int = 0
    weight: float = 1.0

    def add(self, sign: int, tokens: int) -> None:
        self.requests += sign
        self.tokens += sign * tokens


class Door:
    """One worker's. `clock` is monotonic, in seconds; `refused` is told each reason."""

    def __init__(
        self, bounds: Bounds, clock: Callable[[], float], refused: Callable[[RefuseReason], None]
    ) -> None:
        self._bounds = bounds
        self._clock = clock
        self._refused = refused
        self._waiting: dict[Key, tuple[str, int]] = {}
        self._all = _Held()
        self._teams: defaultdict[str, _Held] = defaultdict(_Held)
        self._looked_at = clock()
        self._drained_tokens = self._drained_requests = 0.0
        self._busy_s = 0.0
        """What left the queue, and the time in which something waited; all fade alike."""

    def __len__(self) -> int:
        """Requests that wait."""
        return self._all.requests

    @property
    def wait_s(self) -> float:
        """How long what waits now will take to leave; 0 when that is not known."""
        return self._time_of(self._all)

    def _time_of(self, waits: _Held) -> float:
        """In which so much leaves, by the less of what tokens and requests say: which of them is
        short is not known here."""
        if self._busy_s < LEARNT_S or not self._drained_tokens:
            return 0.0
        return self._busy_s * min(
            waits.tokens / self._drained_tokens, waits.requests / self._drained_requests
        )

    def _turn_s(self, team: str, weight: float) -> float:
        """How long a request of this team will wait: no longer than all that waits takes to leave,
        nor than its team's own at the team's share of the rate."""
        held = self._teams.get(team)
        if held is None:
            return 0.0
        others = sum(each.weight for each in self._teams.values() if each is not held)
        return min(self.wait_s, self._time_of(held) * (weight + others) / weight)

    def enter(
        self, key: Key, team: str, tokens: int, patience_s: float, weight: float = 1.0
    ) -> None:
        """Counts a request as waiting until it has left. `patience_s`: 0 for as long as it takes.

        Raises:
            OverloadedError: too much waits here, or it would wait too long.
            RateLimitError: too much of its team waits here.
        """
        self._look()
        if self._all.requests and (found := self._in_the_way(team, tokens, patience_s, weight)):
            reason, error = found
            self._refused(reason)
            raise error
        self.force(key, team, tokens, weight)

    def force(self, key: Key, team: str, tokens: int, weight: float = 1.0) -> None:
        """Counts one that is let in whatever waits: its client has had a part of its answer."""
        self._look()
        self._waiting[key] = (team, tokens)
        self._all.add(+1, tokens)
        held = self._teams[team]
        held.add(+1, tokens)
        held.weight = weight

    def leave(self, key: Key, *, served: bool) -> None:
        """It waits no more: it was `served`, or has ended. Once it has left, nothing happens."""
        if (waited := self._waiting.pop(key, None)) is None:
            return
        self._look()
        team, tokens = waited
        self._all.add(-1, tokens)
        held = self._teams[team]
        held.add(-1, tokens)
        if not held.requests:
            del self._teams[team]
        if served:
            self._drained_tokens += tokens
            self._drained_requests += 1

    def _in_the_way(
        self, team: str, tokens: int, patience_s: float, weight: float
    ) -> tuple[RefuseReason, ForebayError] | None:
        bounds, held = self._bounds, self._all
        message = "The worker's queue is full. Please retry."
        # Who comes again when half of what waits has left finds room.
        if held.requests >= bounds.requests:
            return "requests", OverloadedError(message, retry_after_s=_bounded(self.wait_s / 2))
        if held.tokens + tokens > bounds.tokens:
            return "tokens", OverloadedError(message, retry_after_s=_bounded(self.wait_s / 2))
        turn_s = self._turn_s(team, weight)
        if team and self._is_too_much(team, tokens):
            message = "Too many requests of this team wait already. Please retry."
            return "team", RateLimitError(message, retry_after_s=_bounded(turn_s / 2))
        if patience_s and (late_s := turn_s - CERTAIN * patience_s) > 0:
            message = "The request would wait longer than it may. Please retry."
            return "wait", OverloadedError(message, retry_after_s=_bounded(late_s))
        return None

    def _is_too_much(self, team: str, tokens: int) -> bool:
        held, bounds = self._teams.get(team), self._bounds
        if held is None:
            return False
        room = bounds.requests - (self._all.requests - held.requests)
        room_tokens = bounds.tokens - (self._all.tokens - held.tokens)
        return (
            held.requests >= max(1, bounds.share * room)
            or held.tokens + tokens > bounds.share * room_tokens
        )

    def _look(self) -> None:
        """Lets the past fade, and counts the time since the last look if something waited."""
        now = self._clock()
        passed_s = now - self._looked_at
        self._looked_at = now
        if self._all.requests:
            faded = math.exp(-passed_s / MEMORY_S)
            self._drained_tokens *= faded
            self._drained_requests *= faded
            self._busy_s = self._busy_s * faded + passed_s


def _bounded(seconds: float) -> float:
    return min(max(seconds, RETRY_S[0]), RETRY_S[1])
