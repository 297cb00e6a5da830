"""The evaluator's counts for Prometheus. No label has a value that comes from a request."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, generate_latest

from aerie.evaluator.skip_reasons import SkipReason


class EvaluatorMetrics:
    """Counters of the process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.received = self._counter("aerie_evaluator_requests_received", "Requests that were received, or read from the file.")
        self.dropped = self._counter(
            "aerie_evaluator_requests_dropped", "Requests that were dropped because others were in work."
        )
        self.pairs = self._counter("aerie_evaluator_pairs", "Requests that both engines answered, with counts.")
        self._skipped = Counter(
            "aerie_evaluator_requests_skipped",
            "Requests that gave no pair, by reason.",
            ["reason"],
            registry=self.registry,
        )
        for reason in SkipReason:
            self._skipped.labels(reason)

    def skip(self, reason: SkipReason) -> None:
        """Count a request that gives no pair."""
        self._skipped.labels(reason).inc()

    def render(self) -> bytes:
        """Return the exposition in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, documentation: str) -> Counter:
        return Counter(name, documentation, registry=self.registry)
