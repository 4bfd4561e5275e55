"""Which of an upstream's replicas gets a call: the least busy one, those that fail set aside.

Transport errors and 5xx count, refusals do not, and the last replica is never set aside: one that
may fail is better than none. Pure: the time is given.
"""

from collections.abc import Sequence
from dataclasses import dataclass

TRIP_AT = 3
"""Failures in a row that set a replica aside."""
ASIDE_S = 5.0
"""How long, for the first time; twice as long for each failure after it."""
MAX_ASIDE_S = 60.0


@dataclass(slots=True)
class Replica:
    """One base URL, and how it does. `up` is what the last probe said."""

    url: str
    open: int = 0
    failures: int = 0
    aside_until: float = 0.0
    up: bool = True

    def succeeded(self) -> None:
        self.failures = 0
        self.aside_until = 0.0

    def failed(self, now: float) -> None:
        self.failures += 1
        if self.failures >= TRIP_AT:
            aside_s = min(MAX_ASIDE_S, ASIDE_S * 2 ** min(self.failures - TRIP_AT, 10))
            self.aside_until = now + aside_s


def choose(replicas: Sequence[Replica], now: float) -> Replica:
    """The least busy of those that work; if none does, the one that is back first.

    When the time of one that was set aside is over, it gets calls again, and the first failure sets
    it aside for longer.
    """
    able = [each for each in replicas if each.up and each.aside_until <= now]
    if able:
        return min(able, key=lambda each: each.open)
    return min(replicas, key=lambda each: (not each.up, each.aside_until, each.open))
