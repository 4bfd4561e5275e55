"""How long tests wait for what must happen, and how they hold a promise of time.

A wait ends with its condition, so only what hangs takes long: a loaded machine needs 20 s to start
one worker. Where time itself is promised, the best of a few counts: a machine that pauses, or that
others use as well, makes some of them late, a fault all.
"""

import os
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 120.0
START_S = 240.0
"""Of processes that load a model, several at once."""

T = TypeVar("T")


def crowd() -> float:
    """How many others want each core, at least 1: what takes a second takes so many then."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def within(limit_s: float, measure: Callable[[], float], tries: int = 5) -> None:
    """Holds that `measure`, which says how many seconds it took, is in time at one of the tries."""
    took: list[float] = []
    for _ in range(tries):
        took.append(measure())
        if took[-1] < limit_s * crowd():
            return
    raise AssertionError(f"took {took} s, of {limit_s}")


def promptly(act: Callable[[], T], limit_s: float, tries: int = 5) -> T:
    """What `act` returns, done in time at one of so many tries."""
    done: list[T] = []

    def measure() -> float:
        began = time.monotonic()
        done.append(act())
        return time.monotonic() - began

    within(limit_s, measure, tries)
    return done[-1]
