"""Spans, made with OpenTelemetry's SDK and sent in batches over OTLP.

A span is made when its work is over, but for that of the call, under which others stand. Names are
those of OpenTelemetry's conventions for HTTP and generative AI. No text, key or team is in any.
"""

import time
from collections.abc import Mapping
from contextvars import Token

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from forebay_shared.settings import StartError
from forebay_shared.tracing import CURRENT
from forebay_shared.wire import Usage

Attributes = Mapping[str, str | int | float]

QUEUE_LIMIT = 4096
"""Spans that wait for the collector; beyond it they are dropped, never waited for."""
EXPORT_TIMEOUT_MS = 2_000

_w3c = TraceContextTextMapPropagator()


class Tracing:
    """One process's spans on their way to a collector."""

    def __init__(self, endpoint: str, service: str, instance: str) -> None:
        """`endpoint` is the collector's base URL, as http://collector:4318, or that of its traces.

        Raises StartError when it is no URL.
        """
        if not endpoint.startswith(("http://", "https://")):
            raise StartError(f"--otlp-traces-endpoint: {endpoint!r} is not an http:// URL")
        if not endpoint.rstrip("/").endswith("/v1/traces"):
            endpoint = endpoint.rstrip("/") + "/v1/traces"
        resource = Resource.create({"service.name": service, "service.instance.id": instance})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_MS / 1000),
                max_queue_size=QUEUE_LIMIT,
                export_timeout_millis=EXPORT_TIMEOUT_MS,
            )
        )
        self._tracer = self._provider.get_tracer("forebay")

    def call(self, name: str, traceparent: str, attributes: Attributes) -> "Call":
        """Begins the span of an HTTP call, under the client's own when it sent one."""
        span = self._tracer.start_span(
            name, _context(traceparent), SpanKind.SERVER, attributes=attributes
        )
        return Call(span)

    def sequence(self, traceparent: str, model: str, usage: Usage, reason: str) -> None:
        """The spans of a sequence that has just ended: the whole, queue, prefill and decode."""
        parent, end = _context(traceparent), time.time_ns()
        decode = end - int(usage.decode_ms * 1e6)
        prefill = decode - int(usage.prefill_ms * 1e6)
        queued = prefill - int(usage.queued_ms * 1e6)
        attributes: Attributes = {
            "gen_ai.operation.name": "generate",
            "gen_ai.request.model": model,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.response.finish_reasons": reason,
        }
        whole = self._tracer.start_span(
            "generate", parent, start_time=queued, attributes=attributes
        )
        below = set_span_in_context(whole)
        for name, start, stop in (
            ("queue", queued, prefill),
            ("prefill", prefill, decode),
            ("decode", decode, end),
        ):
            self._tracer.start_span(name, below, start_time=start).end(stop)
        whole.end(end)

    def close(self) -> None:
        """Sends what waits, for EXPORT_TIMEOUT_MS at most. Not on an event loop."""
        self._provider.force_flush(EXPORT_TIMEOUT_MS)
        self._provider.shutdown()


class Call:
    """The span of one HTTP call, and the `current` of its task while it is open."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: Span) -> None:
        self._span = span
        carrier: dict[str, str] = {}
        _w3c.inject(carrier, set_span_in_context(span))
        self._token: Token[str] = CURRENT.set(carrier.get("traceparent", ""))

    def end(self, status: int) -> None:
        CURRENT.reset(self._token)
        self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


def _context(traceparent: str) -> Context:
    return _w3c.extract({"traceparent": traceparent} if traceparent else {})
