"""May this request start now: a bound on the requests that are open in this process, and on a
team's part of them, so that no team's flood is a wall to the others.

It knows no other process; the limits that a team has been given live in Redis.
"""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from forebay_shared.errors import OverloadedError, RateLimitError

TEAM_SHARE = 0.9
"""Of the places that other teams leave: a team alone may have most of a process, and however many
flood it, there is room for another one."""


class Admission:
    """Counts the open requests and refuses what is above the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.open = 0
        self._teams = Counter[str]()

    @contextmanager
    def admit(self, team: str = "") -> Generator[None]:
        """Holds a place for one request of a team; nobody's, "", may have all places.

        Raises:
            OverloadedError: all places are taken.
            RateLimitError: the team has too many of them.
        """
        self._check(team)
        self.open += 1
        self._teams[team] += 1
        try:
            yield
        finally:
            self.open -= 1
            self._teams[team] -= 1
            if not self._teams[team]:
                del self._teams[team]

    def _check(self, team: str) -> None:
        if self.open >= self._limit:
            raise OverloadedError(
                "The gateway holds as many requests as it may. Try again soon.", retry_after_s=1.0
            )
        mine = self._teams[team]
        left = self._limit - (self.open - mine)
        if team and mine >= max(1, TEAM_SHARE * left):
            raise RateLimitError(
                "The gateway holds as many requests of this team as it may. Try again soon.",
                retry_after_s=1.0,
            )
