"""Traces of reconciles by OpenTelemetry, as an option: the standard variables OTEL_* of the process switch and configure them.

    reconcile ─┬─ read      from the cache or live
               ├─ decide
               └─ apply ─── status        API calls are events of the span that they are made in

Guarantees: without an endpoint nothing of OpenTelemetry is imported, and a span costs one call. A collector that hangs or is
absent delays no reconcile: a thread exports, from a queue with a limit (OTEL_BSP_MAX_QUEUE_SIZE), and what does not fit is lost.
Not guaranteed: spans of the last moments of a process that is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_log = logging.getLogger(__name__)
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
SHUTDOWN_TIMEOUT_SECONDS = 5.0
"""Maximum seconds that the shutdown waits for the export of the last spans."""
Attributes = Mapping[str, str | float]
_NO_SPAN = contextlib.nullcontext()


class Tracer:
    """Source of spans. This one makes none."""

    def span(self, name: str, attributes: Attributes | None = None) -> AbstractContextManager[object]:  # noqa: ARG002
        """Return a context within which a span is the current one."""
        return _NO_SPAN

    def set_attributes(self, attributes: Attributes) -> None:
        """Set attributes of the current span."""

    def add_event(self, name: str, attributes: Attributes) -> None:
        """Add an event to the current span."""

    async def shut_down(self) -> None:
        """Export the last spans."""


class OpenTelemetryTracer(Tracer):
    """Source of spans of OpenTelemetry."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace

        self._provider, self._tracer = provider, provider.get_tracer("aerie")
        self._get_current_span = trace.get_current_span

    def span(self, name: str, attributes: Attributes | None = None) -> AbstractContextManager[object]:
        span: AbstractContextManager[object] = self._tracer.start_as_current_span(name, attributes=attributes)
        return span

    def set_attributes(self, attributes: Attributes) -> None:
        self._get_current_span().set_attributes(attributes)

    def add_event(self, name: str, attributes: Attributes) -> None:
        self._get_current_span().add_event(name, attributes)

    async def shut_down(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_SECONDS):
                await asyncio.to_thread(self._provider.shutdown)


NO_TRACER = Tracer()


def create_tracer(environment: Mapping[str, str] = os.environ) -> Tracer:
    """Return the tracer that the environment configures. Where it cannot be had, the reason is logged, and there is none."""
    is_disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none"
    endpoint = next((name for name in ENDPOINT_VARIABLES if environment.get(name)), None)
    if endpoint is None or is_disabled:
        return NO_TRACER
    protocol = next((name for name in PROTOCOL_VARIABLES if environment.get(name)), None)
    if protocol is not None and environment[protocol] != "http/protobuf":
        _log.error("no traces: %s is %s: set http/protobuf, and an endpoint for it.", protocol, environment[protocol])
        return NO_TRACER
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        _log.error("no traces: %s is set, but %s: install aerie-operator[tracing], or unset it.", endpoint, error)
        return NO_TRACER
    has_name = environment.get("OTEL_SERVICE_NAME") or "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    try:
        provider = TracerProvider(resource=Resource.create({} if has_name else {"service.name": "aerie-operator"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    except Exception as error:  # noqa: BLE001 - whatever the SDK raises for a wrong variable: traces are no reason not to start
        _log.error("no traces: the variables OTEL_* cannot be used (%s: %s): correct them.", type(error).__name__, error)
        return NO_TRACER
    return OpenTelemetryTracer(provider)
