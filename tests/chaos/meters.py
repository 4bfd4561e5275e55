"""Which metrics moved during a trial, over all processes, those that died on the way included.

The one scrape is taken again and again: a process that is killed takes its counters along, but what
it had said until then counts. Each series has its process's name among its labels, so that the next
incarnation begins at nothing. A counter (`…_total`, a histogram's `…_count` and `…_sum`) has moved
when it grew since the trial began, a gauge when it was seen at two values.
"""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from patience import PATIENCE_S
from serve_house import until

EVERY_S = 1.0
_SERIES = re.compile(r"^([a-zA-Z_:]+)(?:\{(.*)\})? (\S+)$", re.M)
_NAMED = re.compile(r'^([a-z_:]+)(?:\{((?:\w+="[^"]*",?)+)\})?$')
_LABEL = re.compile(r'\w+="[^"]*"')
_COUNTERS = ("_total", "_sum", "_count", "_bucket")


@dataclass(frozen=True)
class Metric:
    """A family, or those of its series that have these labels: as it stands in a query."""

    name: str
    labels: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str) -> "Metric":
        found = _NAMED.match(text)
        assert found, f"{text!r} is not a metric's name"
        return cls(found[1], tuple(_LABEL.findall(found[2] or "")))

    def matches(self, name: str, labels: str) -> bool:
        return name == self.name and all(label in labels for label in self.labels)


@dataclass
class _Seen:
    """One series: what it was when the trial began, the last value, and the extremes."""

    first: float
    last: float
    low: float
    high: float


class Meters:
    """A context manager: entering takes the first scrape. `scrape` gives the text of one of any
    live gateway, or "" when there is none."""

    def __init__(self, scrape: Callable[[], str]) -> None:
        self._scrape = scrape
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meters", daemon=True)

    def __enter__(self) -> "Meters":
        self._look(begins=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def check(self, moves: Sequence[str], still: Sequence[str] = ()) -> None:
        """All of `moves` have moved, or do so soon, as a process tells its metrics once a second;
        none of `still` has. Raises AssertionError that names those which did otherwise."""
        wanted = [Metric.read(text) for text in moves]
        try:
            until(lambda: not self._unmoved(wanted), PATIENCE_S)
        except AssertionError:
            unmoved = [text for text in moves if self.growth(Metric.read(text)) <= 0]
            raise AssertionError(f"these metrics did not move: {unmoved}") from None
        moved = [text for text in still if self.growth(Metric.read(text))]
        assert not moved, f"these metrics moved: {[(text, self._all(text)) for text in moved]}"

    def growth(self, metric: Metric) -> float:
        """How much a counter grew; how far apart the values of a gauge's series were."""
        counts = metric.name.endswith(_COUNTERS)
        return sum(
            seen.last - seen.first if counts else seen.high - seen.low
            for seen in self._matching(metric).values()
        )

    def _unmoved(self, metrics: Sequence[Metric]) -> list[Metric]:
        self._look()
        return [metric for metric in metrics if self.growth(metric) <= 0]

    def _matching(self, metric: Metric) -> dict[tuple[str, str], _Seen]:
        with self._lock:
            return {key: seen for key, seen in self._seen.items() if metric.matches(*key)}

    def _all(self, text: str) -> list[tuple[str, float, float]]:
        found = self._matching(Metric.read(text))
        return [(labels, seen.first, seen.last) for (_, labels), seen in found.items()]

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            self._look()

    def _look(self, *, begins: bool = False) -> None:
        with self._lock:
            for name, labels, value in _series(self._scrape()):
                key = (name, labels)
                if (seen := self._seen.get(key)) is None:
                    counts = name.endswith(_COUNTERS) and not begins
                    self._seen[key] = _Seen(0.0 if counts else value, value, value, value)
                else:
                    seen.last = value
                    seen.low, seen.high = min(seen.low, value), max(seen.high, value)


def _series(text: str) -> Iterator[tuple[str, str, float]]:
    for name, labels, value in _SERIES.findall(text):
        yield name, labels, float(value)
