"""The recorder's counts for Prometheus. No label has a value that comes from a request."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from aerie.recorder.skip_reasons import SkipReason


class RecorderMetrics:
    """Metrics of the process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.received = self._counter("aerie_recorder_requests_received", "Copies of requests that were received.")
        self.recorded = self._counter("aerie_recorder_requests_recorded", "Requests whose prompt was written.")
        self.deleted_files = self._counter("aerie_recorder_files_deleted", "Files that were deleted by the retention.")
        self.storage_failures = self._counter(
            "aerie_recorder_storage_failures", "Attempts to write, upload, list or delete files that failed."
        )
        self._skipped = Counter(
            "aerie_recorder_requests_skipped",
            "Requests that were not recorded, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.stored_files = Gauge(
            "aerie_recorder_stored_files", "Complete files in the storage, as of the last look.", registry=self.registry
        )
        self.stored_bytes = Gauge("aerie_recorder_stored_bytes", "Size of these files.", registry=self.registry)
        for reason in SkipReason:
            self._skipped.labels(reason)

    def skip(self, reason: SkipReason) -> None:
        """Count a request that is not recorded."""
        self._skipped.labels(reason).inc()

    def render(self) -> bytes:
        """Return the exposition in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, documentation: str) -> Counter:
        return Counter(name, documentation, registry=self.registry)
