"""What a scrape shows of limits, books and mirrors. Every label has a fixed set of values.

The numbers are the attributes of those who count; they are read when somebody asks, so a request
pays nothing for them.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from forebay_gateway.teams.teams import Teams


class TeamsCollector(Collector):
    """The families of one gateway."""

    def __init__(self, teams: "Teams") -> None:
        self._teams = teams

    def collect(self) -> Iterable[Metric]:
        yield from self._limits()
        yield from self._directory()
        yield from self._books()
        yield from self._exports()
        yield from self._issuers()

    def _limits(self) -> Iterable[Metric]:
        limiter = self._teams.limiter
        admissions = CounterMetricFamily(
            "forebay_admissions",
            "Requests of teams that asked to start, by what came of it and the kind of scope that "
            "refused.",
            labels=["outcome", "scope"],
        )
        for labels, count in limiter.admissions.items():
            admissions.add_metric(labels, count)
        yield admissions
        yield _by("settlements", "Requests that are over, by how late.", limiter.settlements)
        yield _gauge("admitted_requests", "Admitted requests that are not over.", len(limiter))
        yield _gauge(
            "unsettled_requests", "Settlements that Redis has not confirmed.", limiter.unsettled
        )
        yield _counter(
            "abandoned_settlements",
            "Settlements given up, as too many waited for Redis.",
            limiter.abandoned,
        )
        yield _counter(
            "redis_clock_leaps",
            "Times that the clock of Redis was found to have leapt.",
            limiter.leaps,
        )

    def _directory(self) -> Iterable[Metric]:
        directory, sync = self._teams.directory, self._teams.sync
        yield _gauge(
            "directory_revision", "Changes of the directory, as mirrored.", directory.revision
        )
        yield _gauge("directory_records", "Records in the mirror.", len(directory))
        yield _gauge(
            "directory_unreadable_records",
            "Records that this version cannot read.",
            directory.unreadable,
        )
        yield _gauge(
            "directory_age_seconds", "Since the mirror was last known to be whole.", sync.age_s
        )
        yield _gauge(
            "pepper_differs",
            "1 where this gateway's pepper is not its fleet's, so that it knows no key of others.",
            float(sync.pepper_differs),
        )
        yield _counter("directory_loads", "Times that the mirror was loaded whole.", sync.reloads)

    def _books(self) -> Iterable[Metric]:
        keeper = self._teams.bookkeeper
        yield _gauge(
            "ledger_lag_seconds",
            "Age of the oldest record that is not in the books, where this gateway keeps them.",
            keeper.lag_s,
        )
        yield _counter("ledger_records", "Records put into the books.", keeper.folded)
        yield _counter(
            "lost_requests", "Requests that neither gateway nor worker settled.", keeper.lost
        )
        yield _gauge(
            "usage_stream_bytes",
            "Memory of the records' stream, where this gateway keeps the books.",
            keeper.stream_bytes,
        )

    def _exports(self) -> Iterable[Metric]:
        exporters = self._teams.exporters
        yield _gauge(
            "usage_export_lag_seconds",
            "Age of the oldest record that a target lacks, where this gateway exports.",
            max((each.lag_s for each in exporters), default=0.0),
        )
        yield _counter(
            "usage_exported_records",
            "Records given to targets.",
            sum(each.exported for each in exporters),
        )
        yield _counter(
            "usage_export_failures",
            "Times that a target did not take records.",
            sum(each.failures for each in exporters),
        )

    def _issuers(self) -> Iterable[Metric]:
        keeper = self._teams.keeper
        yield _counter("jwks_reads", "Times that an issuer's keys were read.", keeper.version)
        yield _counter(
            "jwks_failures", "Times that an issuer's keys could not be read.", keeper.failures
        )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"forebay_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"forebay_{name}", text, value=value)


def _by(name: str, text: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"forebay_{name}", text, labels=["outcome"])
    for outcome, count in counts.items():
        family.add_metric([outcome], count)
    return family
