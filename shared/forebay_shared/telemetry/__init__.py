"""Every metric, once: names, labels and buckets.

Metrics live in a registry of their process that is passed in, never in a global one. They know
nothing of Redis, HTTP servers or engines. No label ever carries a team, a key or a text.
"""

from forebay_shared.telemetry.engine import EngineMetrics
from forebay_shared.telemetry.gateway import (
    PICK_REASONS,
    ROUTES,
    DropReason,
    FallbackReason,
    GatewayMetrics,
    PickReason,
    ResubmitReason,
)
from forebay_shared.telemetry.grammars import GRAMMAR_OUTCOMES, GrammarMetrics, GrammarOutcome
from forebay_shared.telemetry.upstream import (
    PROBE_RESULTS,
    TRIP_REASONS,
    ProbeResult,
    Replica,
    TripReason,
    UpstreamMetrics,
)
from forebay_shared.telemetry.worker import RefuseReason, WorkerMetrics

__all__ = [
    "GRAMMAR_OUTCOMES",
    "PICK_REASONS",
    "PROBE_RESULTS",
    "ROUTES",
    "TRIP_REASONS",
    "DropReason",
    "EngineMetrics",
    "FallbackReason",
    "GatewayMetrics",
    "GrammarMetrics",
    "GrammarOutcome",
    "PickReason",
    "ProbeResult",
    "RefuseReason",
    "Replica",
    "ResubmitReason",
    "TripReason",
    "UpstreamMetrics",
    "WorkerMetrics",
]
