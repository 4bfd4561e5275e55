"""The metrics of another server's replicas, which a worker calls."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

TripReason = Literal["unreachable", "timeout", "status", "answer"]
TRIP_REASONS: tuple[TripReason, ...] = ("unreachable", "timeout", "status", "answer")
ProbeResult = Literal["ok", "refused", "failed"]
PROBE_RESULTS: tuple[ProbeResult, ...] = ("ok", "refused", "failed")


class Replica(Protocol):
    """What a replica of an upstream keeps of itself: so many trips and probes so far."""

    @property
    def open(self) -> int: ...
    @property
    def up(self) -> bool: ...
    @property
    def trips(self) -> Mapping[TripReason, int]: ...
    @property
    def probes(self) -> Mapping[ProbeResult, int]: ...

    def is_aside(self, now: float) -> bool: ...


class UpstreamMetrics(Collector):
    """The replicas of an upstream as they are when somebody looks, each by its number among the
    flags that name them, from 0: a URL would be a label that tells of hosts."""

    def __init__(
        self, engine: str, replicas: Sequence[Replica], clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._replicas = replicas
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        names = ["engine", "replica"]
        up = GaugeMetricFamily(
            "forebay_upstream_up", "The replica answered the last probe.", labels=names
        )
        calls = GaugeMetricFamily(
            "forebay_upstream_open_calls", "Calls of the replica that are open.", labels=names
        )
        aside = GaugeMetricFamily(
            "forebay_upstream_aside",
            "The replica is set aside: it gets calls only while no other can.",
            labels=names,
        )
        trips = CounterMetricFamily(
            "forebay_upstream_trips",
            "Times that the replica was set aside, by the failure that did it.",
            labels=[*names, "reason"],
        )
        probes = CounterMetricFamily(
            "forebay_upstream_probes",
            "Times that the replica was asked for its models, by what came.",
            labels=[*names, "result"],
        )
        now = self._clock()
        for number, replica in enumerate(self._replicas):
            labels = [self._engine, str(number)]
            up.add_metric(labels, float(replica.up))
            calls.add_metric(labels, replica.open)
            aside.add_metric(labels, float(replica.is_aside(now)))
            for reason, count in replica.trips.items():
                trips.add_metric([*labels, reason], count)
            for result, count in replica.probes.items():
                probes.add_metric([*labels, result], count)
        return [up, calls, aside, trips, probes]
