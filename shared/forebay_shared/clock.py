"""Whether this process's wall clock has leapt: nothing but the calendar goes by it, so it is
counted and told, and no more."""

import time

LEAP_S = 5.0


class WallClock:
    """One process's, looked at about once a second."""

    def __init__(self) -> None:
        self._ahead_s = self._ahead()

    def leap_s(self) -> float:
        """By how much it has leapt since the last look; 0 for less than LEAP_S, as it is set right
        now and then."""
        before, self._ahead_s = self._ahead_s, self._ahead()
        leap_s = self._ahead_s - before
        return leap_s if abs(leap_s) >= LEAP_S else 0.0

    @staticmethod
    def _ahead() -> float:
        return time.time() - time.monotonic()
