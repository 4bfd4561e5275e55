"""Which of an upstream's replicas gets a call: the least busy one, those that fail set aside.

Transport errors and 5xx count, refusals do not, and the last replica is never set aside: one that
may fail is better than none. Pure: the time is given.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay_shared.telemetry import PROBE_RESULTS, TRIP_REASONS, ProbeResult, TripReason

TRIP_AT = 3
"""Failures in a row that set a replica aside."""
ASIDE_S = 5.0
"""How long, for the first time; twice as long for each failure after it."""
MAX_ASIDE_S = 60.0


@dataclass(slots=True)
class Replica:
    """One base URL, and how it does. `up` is what the last probe said.

    `trips` counts how often it was set aside, by the failure that did it; calls that were open when
    it was, and fail too, do not count again.
    """

    url: str
    open: int = 0
    failures: int = 0
    aside_until: float = 0.0
    up: bool = True
    trips: dict[TripReason, int] = field(default_factory=lambda: dict.fromkeys(TRIP_REASONS, 0))
    probes: dict[ProbeResult, int] = field(default_factory=lambda: dict.fromkeys(PROBE_RESULTS, 0))

    def succeeded(self) -> None:
        self.failures = 0
        self.aside_until = 0.0

    def failed(self, now: float, reason: TripReason) -> None:
        self.failures += 1
        if self.failures >= TRIP_AT:
            self.trips[reason] += not self.is_aside(now)
            aside_s = min(MAX_ASIDE_S, ASIDE_S * 2 ** min(self.failures - TRIP_AT, 10))
            self.aside_until = now + aside_s

    def is_aside(self, now: float) -> bool:
        return self.aside_until > now

    def probed(self, result: ProbeResult) -> None:
        """Who refuses is there."""
        self.probes[result] += 1
        self.up = result != "failed"


def choose(replicas: Sequence[Replica], now: float) -> Replica:
    """The least busy of those that work; if none does, the one that is back first.

    When the time of one that was set aside is over, it gets calls again, and the first failure sets
    it aside for longer.
    """
    able = [each for each in replicas if each.up and not each.is_aside(now)]
    if able:
        return min(able, key=lambda each: each.open)
    return min(replicas, key=lambda each: (not each.up, each.aside_until, each.open))
