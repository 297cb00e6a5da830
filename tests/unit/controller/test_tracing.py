"""Traces of reconciles: spans and attributes, a real export over HTTP, and nothing at all without an endpoint."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from aerie.controller.kubernetes.client import ApiError
from aerie.controller.tracing import NO_TRACER, OpenTelemetryTracer, create_tracer
from tests.unit.controller.conftest import Run
from tests.unit.controller.operator_harness import CHAT, Operator, Server


async def trace_reconcile(server: Server) -> list[ReadableSpan]:
    """Run one reconcile of a worker, and return its spans in the order of their ends."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    operator = Operator(server)
    operator.reconciler.tracer = OpenTelemetryTracer(provider)
    operator.deliver_events()
    worker = asyncio.create_task(operator.reconciler.run_worker())
    while not any(span.name == "reconcile" for span in exporter.get_finished_spans()):
        await asyncio.sleep(0)
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)
    spans = list(exporter.get_finished_spans())
    return spans[: [span.name for span in spans].index("reconcile") + 1]


def test_reconcile_is_a_span_with_its_phases(run: Run) -> None:
    async def work() -> None:
        server = Server()
        server.edit()
        spans = await trace_reconcile(server)
        assert [span.name for span in spans] == ["read", "decide", "read", "decide", "status", "apply", "reconcile"]
        *_, status, apply, reconcile = spans
        assert reconcile.parent is None
        assert status.parent is not None
        assert status.parent.span_id == apply.context.span_id
        parents = {span.parent.span_id for span in spans if span.parent is not None and span is not status}
        assert parents == {reconcile.context.span_id}
        assert reconcile.attributes == {
            "k8s.namespace.name": CHAT.namespace,
            "aerie.name": CHAT.name,
            "aerie.phase": "Preflight",
            "aerie.outcome": "done",
        }
        assert [span.attributes for span in spans if span.name == "read"] == [{"aerie.source": "cache"}, {"aerie.source": "live"}]

    run(work())


def test_failed_apply_is_an_error_of_its_span(run: Run) -> None:
    async def work() -> None:
        server = Server()
        server.edit()
        server.apply_errors["ConfigMap"] = ApiError(503, "Unavailable", "try again")
        server.apply_errors["Job"] = ApiError(503, "Unavailable", "try again")
        spans = {span.name: span for span in await trace_reconcile(server)}
        assert not spans["apply"].status.is_ok
        assert spans["reconcile"].attributes is not None
        assert spans["reconcile"].attributes["aerie.outcome"] == "failed"

    run(work())


def test_spans_are_exported_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            received.append(ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        tracer = create_tracer()
        with tracer.span("reconcile", {"aerie.name": "chat"}):
            tracer.add_event("API call", {"aerie.verb": "get", "aerie.seconds": 0.1})
        asyncio.run(tracer.shut_down())
        server.shutdown()
        thread.join()
    ((resource_spans,),) = (request.resource_spans for request in received)
    names = {item.key: item.value.string_value for item in resource_spans.resource.attributes}
    assert names["service.name"] == "aerie-operator"
    (span,) = resource_spans.scope_spans[0].spans
    assert (span.name, [event.name for event in span.events]) == ("reconcile", ["API call"])


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_no_endpoint_means_no_tracer(environment: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    assert create_tracer(environment) is NO_TRACER
    assert not caplog.records


def test_unsupported_protocol_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    with caplog.at_level(logging.ERROR):
        assert create_tracer(environment) is NO_TRACER
    assert "OTEL_EXPORTER_OTLP_PROTOCOL is grpc: set http/protobuf" in caplog.text


def test_a_wrong_variable_is_no_reason_not_to_start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "-1")
    assert create_tracer({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}) is NO_TRACER
    assert "the variables OTEL_* cannot be used" in caplog.text


def test_nothing_is_imported_without_an_endpoint() -> None:
    code = (
        "import sys; from aerie.controller import operator; from aerie.controller.tracing import create_tracer; "
        "create_tracer({}); print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
