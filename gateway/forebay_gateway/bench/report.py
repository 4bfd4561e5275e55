"""Figures as the text that `vllm bench serve` prints and the JSON it saves. Computes nothing."""

from datetime import datetime
from typing import Any

from forebay_gateway.bench.client import Outcome
from forebay_gateway.bench.metrics import Metrics, Summary

WIDTH = 50
TITLES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}


def text_report(
    metrics: Metrics,
    *,
    percentile_metrics: tuple[str, ...],
    max_concurrency: int | None = None,
    request_rate: float = float("inf"),
) -> str:
    """The report of a run; what is None or infinite has no line."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines += [_line("Successful requests:", metrics.completed)]
    lines += [_line("Failed requests:", metrics.failed)]
    lines += [_line(f"  {kind}:", count) for kind, count in sorted(metrics.failures.items())]
    if max_concurrency is not None:
        lines += [_line("Maximum request concurrency:", max_concurrency)]
    if request_rate != float("inf"):
        lines += [_line("Request rate configured (RPS):", request_rate)]
    lines += [
        _line("Benchmark duration (s):", metrics.duration),
        _line("Total input tokens:", metrics.total_input_tokens),
        _line("Total generated tokens:", metrics.total_output_tokens),
        _line("Request throughput (req/s):", metrics.request_throughput),
    ]
    if metrics.request_goodput is not None:
        lines += [_line("Request goodput (req/s):", metrics.request_goodput)]
    lines += [
        _line("Output token throughput (tok/s):", metrics.output_throughput),
        _line("Peak output token throughput (tok/s):", metrics.max_output_tokens_per_s),
        _line("Peak concurrent requests:", float(metrics.max_concurrent_requests)),
        _line("Total token throughput (tok/s):", metrics.total_token_throughput),
    ]
    for name in percentile_metrics:
        lines += _section(*TITLES[name], metrics.series[name])
    return "\n".join([*lines, "=" * WIDTH])


def json_result(
    metrics: Metrics,
    outcomes: list[Outcome],
    *,
    about: dict[str, Any],
    percentile_metrics: tuple[str, ...],
    detailed: bool,
) -> dict[str, Any]:
    """The JSON of --save-result; `about` says what was run. Times are in ms, arrays in seconds."""
    result: dict[str, Any] = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        **about,
        "duration": metrics.duration,
        "completed": metrics.completed,
        "failed": metrics.failed,
        "failures": metrics.failures,
        "total_input_tokens": metrics.total_input_tokens,
        "total_output_tokens": metrics.total_output_tokens,
        "request_throughput": metrics.request_throughput,
        "request_goodput": metrics.request_goodput,
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": metrics.total_token_throughput,
        "max_output_tokens_per_s": metrics.max_output_tokens_per_s,
        "max_concurrent_requests": metrics.max_concurrent_requests,
    }
    for name in percentile_metrics:
        summary = metrics.series[name]
        result |= {
            f"{part}_{name}_ms": getattr(summary, part) for part in ("mean", "median", "std")
        }
        result |= {f"p{point:g}_{name}_ms": at for point, at in summary.percentiles.items()}
    return result | (_details(outcomes) if detailed else {})


def _details(outcomes: list[Outcome]) -> dict[str, Any]:
    """One entry per request, in order of arrival; a failed one has zeros and its error."""
    start = min((outcome.sent for outcome in outcomes), default=0.0)
    return {
        "input_lens": [outcome.prompt_tokens for outcome in outcomes],
        "output_lens": [outcome.output_tokens for outcome in outcomes],
        "start_times": [outcome.sent - start for outcome in outcomes],
        "queued": [outcome.queued for outcome in outcomes],
        "ttfts": [outcome.ttft if outcome.chunks else 0.0 for outcome in outcomes],
        "itls": [outcome.itls for outcome in outcomes],
        "latencies": [outcome.latency if outcome.chunks else 0.0 for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [f"{o.error}: {o.detail}" if o.error else "" for o in outcomes],
    }


def _section(title: str, short: str, summary: Summary) -> list[str]:
    lines = [f"{title:-^{WIDTH}}"]
    lines += [_line(f"Mean {short} (ms):", summary.mean)]
    lines += [_line(f"Median {short} (ms):", summary.median)]
    for point, value in summary.percentiles.items():
        lines += [_line(f"P{point:g} {short} (ms):", value)]
    return lines


def _line(label: str, value: float) -> str:
    shown = f"{value:<10}" if isinstance(value, int) else f"{value:<10.2f}"
    return f"{label:<40} {shown}".rstrip()
