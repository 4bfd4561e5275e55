"""May this request start now: a bound on the requests that are open in this process.

It knows no teams and no other process; those limits live in Redis and come before this one.
"""

from collections.abc import Generator
from contextlib import contextmanager

from forebay_shared.errors import OverloadedError


class Admission:
    """Counts the open requests and refuses what is above the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.open = 0

    @contextmanager
    def admit(self) -> Generator[None]:
        """Holds a place for one request.

        Raises OverloadedError when all places are taken.
        """
        if self.open >= self._limit:
            raise OverloadedError(
                "The gateway holds as many requests as it may. Try again soon.", retry_after_s=1.0
            )
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1
