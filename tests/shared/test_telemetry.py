"""Metrics of many processes join into one exposition that a scraper accepts."""

import re

from forebay_shared.exposition import render, snapshot
from forebay_shared.telemetry import EngineMetrics, GatewayMetrics
from forebay_shared.wire import Load
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.parser import text_string_to_metric_families


def _engine(name: str, steps: int) -> bytes:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, model_name="m", engine=name, max_model_len=4096)
    metrics.cache_config(block_size=16, num_gpu_blocks=100)
    metrics.load(Load(running=3, waiting=2, kv_usage=0.5))
    for _ in range(steps):
        metrics.step(
            prompt_tokens=10, generation_tokens=3, prefix_queries=10, prefix_hits=4,
            preemptions=1, host_s=0.001,
        )  # fmt: skip
        metrics.first_token(0.03)
        metrics.inter_token(0.02)
        metrics.finished(
            reason="stop", e2e_s=1.0, queued_s=0.1, prefill_s=0.2, decode_s=0.7,
            prompt_tokens=10, generation_tokens=3, max_tokens=16,
        )  # fmt: skip
    return snapshot(registry)


def _gateway() -> bytes:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    metrics.http.answered("chat_completions", 200, 0.1)
    metrics.http.answered("/v1/some/random/path", 404, 0.1)
    metrics.jobs.dropped("fenced")
    return snapshot(registry)


def test_the_joined_exposition_is_valid_and_complete() -> None:
    text = render(
        [
            ({"gateway": "g1"}, _gateway()),
            ({"gateway": "g2"}, _gateway()),
            ({}, _engine("w1", 2)),
            ({}, _engine("w2", 5)),
        ]
    )
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    assert len(re.findall(r"^# TYPE ", text, re.MULTILINE)) == len(names)
    series = [
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in families
        for sample in family.samples
    ]
    assert len(series) == len(set(series))
    values = {
        (sample.name, sample.labels.get("engine")): sample.value
        for family in families
        for sample in family.samples
    }
    assert values["vllm:prompt_tokens_total", "w1"] == 20
    assert values["vllm:prompt_tokens_total", "w2"] == 50
    assert values["vllm:prefix_cache_hits_total", "w2"] == 20
    assert values["vllm:time_to_first_token_seconds_count", "w2"] == 5
    assert values["vllm:cache_config_info", "w1"] == 1
    assert values["forebay_step_host_seconds_count", "w2"] == 5


def test_every_name_that_dashboards_read_is_there() -> None:
    text = render([({}, _engine("w1", 1))])
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total",
        "prefix_cache_hits_total", "num_preemptions_total",
        'request_success_total{engine="w1",finished_reason="stop",model_name="m"} 1.0',
        "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket",
        "request_prefill_time_seconds_bucket", "request_decode_time_seconds_bucket",
        "request_prompt_tokens_bucket", "request_generation_tokens_bucket",
        "iteration_tokens_total_bucket", "cache_config_info",
    ):  # fmt: skip
        assert f"vllm:{name}" in text, name


def test_a_route_outside_the_fixed_set_adds_no_series() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    for number in range(100):
        metrics.http.answered(f"/made/up/{number}", 404, 0.0)
    text = render([({}, snapshot(registry))])
    assert 'forebay_http_requests_total{route="other",status="4xx"} 100.0' in text
    assert "/made/up" not in text


def test_foreign_snapshots_do_not_spoil_the_scrape() -> None:
    first, second = CollectorRegistry(), CollectorRegistry()
    Counter("clash", "A counter.", registry=first).inc()
    Gauge("clash", "A gauge of the same name.", registry=second).set(5)
    text = render([({}, b"\xc1 no msgpack"), ({}, snapshot(first)), ({}, snapshot(second))])
    (family,) = text_string_to_metric_families(text)
    assert (family.type, len(family.samples)) == ("counter", 1)
