"""Traces reach a real OTLP receiver: one tree over both processes, nothing that clients wrote."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from forebay_shared.settings import Secret, StartError
from forebay_shared.tracing import opened
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from serve_house import Admin, Serve, until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CANARY = "canary-8d1f"
TEAM = {"organisations": [{"id": "o", "teams": [{"id": "red", "keys": [{"name": "k"}]}]}]}


class Collector(ThreadingHTTPServer):
    """Keeps what is exported to it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receive)
        self.bodies: list[bytes] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def spans(self) -> dict[str, Span]:
        """By name."""
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return {
            span.name: span
            for request in requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }


class _Receive(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        self.server.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_a_call_and_its_sequence_are_one_tree_under_the_clients_span(
    collector: Collector, tmp_path: Path
) -> None:
    house = Serve(
        *("--engine", "echo", "--port", "0", "--otlp-traces-endpoint", collector.url),
        *("--enable-lora", "--lora-modules", "loud=/srv/loud"),
        data=tmp_path,
        OTEL_BSP_SCHEDULE_DELAY="50",
    )
    try:
        house.wait_ready()
        admin_key = (tmp_path / "admin-key").read_text().strip()
        tokens = Admin(house, Secret(admin_key)).call("POST", "apply", TEAM)["tokens"]
        (team_key,) = tokens.values()
        answer = (
            house.client()
            .with_options(api_key=team_key)
            .chat.completions.create(
                model="loud",
                messages=[{"role": "user", "content": CANARY}],
                extra_headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
            )
        )
        assert answer.usage is not None
        names = {"POST chat_completions", "generate", "queue", "prefill", "decode"}
        until(lambda: names <= collector.spans().keys())
    finally:
        house.close()
    spans = collector.spans()
    assert {spans[name].trace_id.hex() for name in names} == {TRACE}
    call, whole = spans["POST chat_completions"], spans["generate"]
    assert call.parent_span_id.hex() == PARENT
    assert whole.parent_span_id == call.span_id
    assert {spans[name].parent_span_id for name in ("queue", "prefill", "decode")} == {
        whole.span_id
    }
    facts = {each.key: each.value for each in whole.attributes}
    assert facts["gen_ai.usage.output_tokens"].int_value == answer.usage.completion_tokens
    assert facts["gen_ai.request.model"].string_value == "loud"
    assert facts["gen_ai.response.finish_reasons"].string_value == "stop"
    sent = b"".join(collector.bodies)
    assert CANARY.encode() not in sent
    assert not [key for key in (house.key, admin_key, team_key) if key.encode() in sent]
    assert not [key for key in (admin_key, team_key) if key.rpartition("-")[2].encode() in sent]


def test_without_an_endpoint_nothing_is_made_and_no_exporter_loaded() -> None:
    code = (
        "import sys, forebay_gateway.main, forebay_worker.main;"
        "sys.exit(any(name.startswith('opentelemetry.exporter') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with opened("", "forebay-gateway") as tracing:
        assert tracing is None


def test_an_endpoint_that_is_no_url_stops_the_start() -> None:
    with (
        pytest.raises(StartError, match="--otlp-traces-endpoint: 'collector:4318' is not"),
        opened("collector:4318", "forebay-gateway"),
    ):
        pass
