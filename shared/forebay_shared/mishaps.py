"""What befalls a process from outside, as its metrics say: its wall clock leaps, its log's disk is
full. It is counted and told, and no more: nothing but the calendar goes by that clock.
"""

import logging
import time
from typing import Protocol

from prometheus_client import Counter

from forebay_shared.logs import lost_lines

log = logging.getLogger(__name__)

LEAP_S = 5.0
"""A clock is set right by less now and then."""


class Counters(Protocol):
    """Those that gateways and workers have."""

    clock_leaps: Counter
    log_lines_lost: Counter


class Mishaps:
    """One process's, looked at about once a second."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._ahead_s = _ahead_s()
        self._lost_lines = 0

    def look(self) -> None:
        """Counts what has come since the last look."""
        before, self._ahead_s = self._ahead_s, _ahead_s()
        if abs(leap_s := self._ahead_s - before) >= LEAP_S:
            log.warning("the clock of this host has leapt by %.0f s", leap_s)
            self._counters.clock_leaps.inc()
        lost = lost_lines()
        self._counters.log_lines_lost.inc(lost - self._lost_lines)
        self._lost_lines = lost


def _ahead_s() -> float:
    """By how much the wall clock is ahead of the one that never leaps."""
    return time.time() - time.monotonic()
