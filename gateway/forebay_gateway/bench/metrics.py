"""Outcomes into figures: arithmetic on recorded times, as `vllm bench serve` defines them.

TTFT   first chunk with content - request sent
E2EL   last chunk with content - request sent
TPOT   (E2EL - TTFT) / (output tokens - 1), of requests with two tokens or more
ITL    every gap between two chunks of a request, pooled over all requests
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from forebay_gateway.bench.client import Outcome

SERIES = ("ttft", "tpot", "itl", "e2el")


class Summary(msgspec.Struct, frozen=True):
    """Of one series, in milliseconds; `percentiles` is by the number asked for (99, 99.9)."""

    mean: float
    median: float
    std: float
    percentiles: dict[float, float]


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run; rates are per second of `duration`."""

    duration: float
    completed: int
    failures: dict[str, int]
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    series: dict[str, Summary]

    @property
    def failed(self) -> int:
        return sum(self.failures.values())


def measure(
    outcomes: Sequence[Outcome],
    duration: float,
    percentiles: Sequence[float],
    goodput: Mapping[str, float],
) -> Metrics:
    """Of a run of `duration` seconds; `goodput` maps ttft, tpot or e2el to its limit in ms."""
    good = [outcome for outcome in outcomes if not outcome.error]
    values = {
        "ttft": [outcome.ttft for outcome in good],
        "tpot": [outcome.tpot for outcome in good if outcome.output_tokens > 1],
        "itl": [gap for outcome in good for gap in outcome.itls],
        "e2el": [outcome.latency for outcome in good],
    }
    total_input = sum(outcome.prompt_tokens for outcome in good)
    total_output = sum(outcome.output_tokens for outcome in good)
    within = sum(_within(outcome, goodput) for outcome in good)
    return Metrics(
        duration=duration,
        completed=len(good),
        failures=dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
        total_input_tokens=total_input,
        total_output_tokens=total_output,
        request_throughput=len(good) / duration,
        request_goodput=within / duration if goodput else None,
        output_throughput=total_output / duration,
        total_token_throughput=(total_input + total_output) / duration,
        max_output_tokens_per_s=_busiest_second(good),
        max_concurrent_requests=_most_at_once(good),
        series={name: summarize(values[name], percentiles) for name in SERIES},
    )


def summarize(seconds: Sequence[float], percentiles: Iterable[float]) -> Summary:
    """Seconds in, milliseconds out; zeros for an empty series."""
    values = sorted(value * 1e3 for value in seconds) or [0.0]
    return Summary(
        mean=statistics.fmean(values),
        median=percentile(values, 50),
        std=statistics.pstdev(values),
        percentiles={point: percentile(values, point) for point in percentiles},
    )


def percentile(ordered: Sequence[float], point: float) -> float:
    """Of sorted values, with linear interpolation between neighbours (numpy's default)."""
    position = (len(ordered) - 1) * point / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _within(outcome: Outcome, goodput: Mapping[str, float]) -> bool:
    """Whether the request met every limit; the TPOT of a single token is 0."""
    times = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}
    return all(times[name] * 1e3 <= limit_ms for name, limit_ms in goodput.items())


def _busiest_second(good: Sequence[Outcome]) -> float:
    """Chunks that arrived in the fullest second, counted from the first request on."""
    if not good:
        return 0.0
    start = min(outcome.sent for outcome in good)
    return float(max(Counter(int(at - start) for o in good for at in o.chunks).values()))


def _most_at_once(good: Sequence[Outcome]) -> int:
    """Requests open at the same moment, at most. (`vllm bench serve` counts by whole seconds, which
    shows more than there were when requests are shorter than that.)"""
    events = [(outcome.sent, 1) for outcome in good]
    events += [(outcome.chunks[-1], -1) for outcome in good]
    most = open_now = 0
    for _, change in sorted(events):
        open_now += change
        most = max(most, open_now)
    return most
