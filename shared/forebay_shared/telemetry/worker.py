"""The metrics of a worker as a process. What its engine does is in `engine`."""

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge

RefuseReason = Literal["requests", "tokens", "team", "wait"]


class WorkerMetrics:
    """A worker as a process: what befell it, beside what its engine does."""

    def __init__(self, registry: CollectorRegistry, *, engine: str) -> None:
        self.registry = registry
        self._engine = engine
        self.dead_letters = self._counter(
            "dead_letters", "Messages that could not be read or taken, each dropped once."
        )
        self.leases_lost = self._counter(
            "leases_lost", "Times that the worker found itself taken for dead."
        )
        self.fenced = self._counter(
            "fenced_requests", "Requests dropped then, since others do their work."
        )
        self.handed_over = self._counter(
            "handed_over_requests", "Requests given back to their gateways on leaving."
        )
        self.duplicates = self._counter(
            "duplicate_requests", "Requests that came again, and were left out."
        )
        self.gateways_lost = self._counter(
            "gateways_lost", "Gateways found gone while they had requests here."
        )
        self.overflows = self._counter(
            "reply_overflows",
            "Times that more waited for a gateway than is kept, so that its requests were ended.",
        )
        self.log_lines_lost = self._counter(
            "log_lines_lost", "Log lines that could not be written."
        )
        self.clock_leaps = self._counter(
            "clock_leaps", "Times that the process's wall clock has leapt."
        )
        self._refused = Counter(
            "forebay_refused_requests",
            "Requests that might not wait here, by the bound that they met.",
            ["engine", "reason"],
            registry=registry,
        )
        self.unsent = self._gauge(
            "unsent_messages", "Messages to other processes that are not delivered yet."
        )
        self.redis_queue = self._gauge("redis_queue", "Commands that wait to be sent to Redis.")
        self.metered = self._gauge(
            "metered_requests", "Requests that this worker settles if their gateway is gone."
        )
        self.step_age = self._gauge(
            "step_age_seconds", "Since the engine's loop last came round, while there is work."
        )

    def refused(self, reason: RefuseReason) -> None:
        self._refused.labels(engine=self._engine, reason=reason).inc()

    def _gauge(self, name: str, text: str) -> Gauge:
        family = Gauge(f"forebay_{name}", text, ["engine"], registry=self.registry)
        return family.labels(engine=self._engine)

    def _counter(self, name: str, text: str) -> Counter:
        family = Counter(f"forebay_{name}", text, ["engine"], registry=self.registry)
        return family.labels(engine=self._engine)
