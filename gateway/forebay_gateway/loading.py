"""The models that workers are still loading, by what the workers say meanwhile.

A worker is in here from its first word until it has a card, leaves, or has been silent for as long
as a lease; that it dies while it loads is no news. It knows no card and no request.
"""

from collections.abc import Callable

from forebay_shared.wire import Beacon


class Loading:
    """Names of models by the worker that loads them. `tell` is told how many workers load."""

    def __init__(self, tell: Callable[[int], None] = lambda _: None) -> None:
        self._tell = tell
        self._workers: dict[str, tuple[tuple[str, ...], float]] = {}

    def take(self, beacon: Beacon, now: float) -> None:
        self._workers[beacon.worker] = (beacon.loading, now)
        self._tell(len(self._workers))

    def drop(self, worker: str) -> None:
        if self._workers.pop(worker, None) is not None:
            self._tell(len(self._workers))

    def expire(self, lapsed: Callable[[float], bool]) -> None:
        """Forgets those that were last heard at a time that has `lapsed`."""
        for worker, (_, seen_at) in list(self._workers.items()):
            if lapsed(seen_at):
                self.drop(worker)

    def __contains__(self, name: str) -> bool:
        return any(name in names for names, _ in self._workers.values())
