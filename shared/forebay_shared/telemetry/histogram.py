"""A histogram that is cheap to fill: there is a value for every token."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class FastHistogram(Collector):
    """A histogram that one thread fills and others may read.

    The library's own takes two locks and walks the buckets: 1.1 us of processor time for each value
    against 0.25 us here (Python 3.11), and there is a value for every token.
    """

    def __init__(
        self, name: str, text: str, labels: dict[str, str], bounds: Sequence[float]
    ) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._bounds = [float(bound) for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        names = [*map(str, self._bounds), "+Inf"]
        totals = accumulate(list(self._counts))
        buckets = list(zip(names, map(float, totals), strict=True))
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        return [family]
