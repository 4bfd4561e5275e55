"""The metrics of an engine's grammars: what compiles, what came of it, what is kept."""

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

GrammarOutcome = Literal["compiled", "refused", "failed"]
GRAMMAR_OUTCOMES: tuple[GrammarOutcome, ...] = ("compiled", "refused", "failed")


class Compiles(Protocol):
    """What an engine's grammars keep of themselves."""

    @property
    def waiting(self) -> int: ...
    @property
    def outcomes(self) -> Mapping[GrammarOutcome, int]: ...
    @property
    def cache_size(self) -> tuple[int, int]: ...


class GrammarMetrics(Collector):
    """Those of one worker, as they are when somebody looks."""

    def __init__(self, engine: str, grammars: Compiles) -> None:
        self._engine = engine
        self._grammars = grammars

    def collect(self) -> Iterable[Metric]:
        waiting = GaugeMetricFamily(
            "forebay_grammars_compiling",
            "Requests whose grammar compiles or waits for that.",
            labels=["engine"],
        )
        waiting.add_metric([self._engine], self._grammars.waiting)
        kept = GaugeMetricFamily(
            "forebay_grammar_cache_bytes", "Memory of compiled grammars.", labels=["engine"]
        )
        kept.add_metric([self._engine], self._grammars.cache_size[1])
        outcomes = CounterMetricFamily(
            "forebay_grammar_compilations",
            "Grammars that were to be compiled, by what came of it.",
            labels=["engine", "outcome"],
        )
        for outcome, count in self._grammars.outcomes.items():
            outcomes.add_metric([self._engine, outcome], count)
        return [waiting, kept, outcomes]
