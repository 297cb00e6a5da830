"""Metrics of the operator itself, its liveness and its readiness.

Alive: the event loop runs, and the work in progress advances. While the cache is filled for the first time, this work is its
lists. From then on it is the reconciles, as long as keys wait. Ready: the operator acts, or is on standby.

A leader that cannot list some kinds stays ready, because it serves the rest and no other operator could do more. The answer's
text says what is missing. Only an operator that can list nothing at all is not ready, so that an upgrade that takes its rights
away does not continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_DURATION_BUCKETS_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 20.0, 60.0)
_LAG_BUCKETS_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
HEARTBEAT_TIMEOUT_SECONDS = 60.0
"""Seconds without a sign of life: longer than any chain of calls takes with their timeouts."""


class CacheSyncStatus(Protocol):
    """State of the lists that fill the cache."""

    synced: asyncio.Event
    """Event that is set when the cache has been filled."""
    active_lists: int
    """Number of lists in progress."""

    def list_errors(self) -> list[str]:
        """Return a message for each list that fails, as a sentence without a period."""

    def is_unable_to_list(self) -> bool:
        """Return True when nothing at all can be listed."""


class OperatorMetrics:
    """Metrics of the operator, and its endpoints for metrics, liveness and readiness."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._api_calls = Counter(
            "aerie_api_calls", "Calls of the API server, by verb and status or error.", ["verb", "code"], registry=self.registry
        )
        self._api_call_seconds = Histogram(
            "aerie_api_call_seconds",
            "Length of calls of the API server.",
            ["verb"],
            buckets=_DURATION_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self._queue_wait_seconds = Histogram(
            "aerie_queue_wait_seconds",
            "Time from an event to the pass that it caused.",
            buckets=_DURATION_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self._reconcile_seconds = Histogram(
            "aerie_reconcile_seconds",
            "Length of passes, by outcome.",
            ["outcome"],
            buckets=_DURATION_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self._queue_depth = Gauge("aerie_queue_depth", "Resources that wait for a pass.", registry=self.registry)
        self._leader = Gauge("aerie_leading", "1 while this operator acts, 0 while it stands by.", registry=self.registry)
        self._event_loop_lag = Histogram(
            "aerie_loop_lag_seconds",
            "How late the event loop runs what is due.",
            buckets=_LAG_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self._scrape_seconds = Histogram(
            "aerie_scrape_seconds",
            "Length of readings of engines' metrics.",
            buckets=_DURATION_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self._scrape_failures = Counter(
            "aerie_scrape_failures", "Readings of engines' metrics that failed, by reason.", ["reason"], registry=self.registry
        )
        self._notifications = Counter(
            "aerie_notices",
            "Notices of rollouts, by outcome: sent, or why lost: too many waited (full), the endpoint refused it, or did not "
            "take it in time (expired).",
            ["outcome"],
            registry=self.registry,
        )
        self._decisions = Counter(
            "aerie_tuning_decisions",
            "Decisions on speculation settings, by outcome: hold, change, explore, insufficient; nothing where no requests came, "
            "outdated where the engines have changed meanwhile, failed.",
            ["outcome"],
            registry=self.registry,
        )
        self._decision_seconds = Histogram(
            "aerie_tuning_decision_seconds",
            "Length of decisions on speculation settings, the start of their process among it.",
            buckets=_DURATION_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self._list_failures = Gauge(
            "aerie_list_failed",
            "1 while the kind cannot be listed in the namespace (none: in all), 0 when it can again.",
            ["kind", "namespace"],
            registry=self.registry,
        )
        self._resources_held = Gauge(
            "aerie_resources_held",
            "Resources that are left as they are, or whose rollout is held, because they cannot be read or listed.",
            ["reason"],
            registry=self.registry,
        )
        self._dropped_fields = Gauge(
            "aerie_status_fields_dropped",
            "Fields and values of the status that the installed CustomResourceDefinition does not have.",
            registry=self.registry,
        )
        self._rollouts = Gauge(
            "aerie_rollouts",
            "Rollouts, and trials of speculation settings, that are under way and wait for nobody (UnderWay), or wait for their "
            "turn (Queued).",
            ["purpose", "state"],
            registry=self.registry,
        )
        self._hold_reasons: dict[str, str] = {}
        """Reason by resource, of resources on hold."""
        self._reported_list_failures: set[tuple[str, str]] = set()
        self._last_heartbeat = 0.0
        """Time of the last sign of life."""
        self.ready = False
        self.cache_sync: CacheSyncStatus | None = None
        """State of the lists that fill the cache, while this operator is the leader."""

    def record_api_call(self, verb: str, code: str, seconds: float) -> None:
        """Record a finished call of the API server."""
        self._api_calls.labels(verb, code).inc()
        self._api_call_seconds.labels(verb).observe(seconds)

    def record_queue_wait(self, seconds: float) -> None:
        """Record how long a key has waited in the queue."""
        self._queue_wait_seconds.observe(seconds)

    def record_reconcile(self, outcome: str, seconds: float) -> None:
        """Record a finished reconcile."""
        self.record_heartbeat()
        self._reconcile_seconds.labels(outcome).observe(seconds)

    def record_heartbeat(self) -> None:
        """Record a sign of life."""
        self._last_heartbeat = asyncio.get_running_loop().time()

    def set_hold_reason(self, resource: str, reason: str) -> None:
        """Set the reason for which a resource is on hold; an empty one means that it is not."""
        previous = self._hold_reasons.pop(resource, "")
        if reason:
            self._hold_reasons[resource] = reason
        for changed_reason in {previous, reason} - {""}:
            self._resources_held.labels(changed_reason).set(
                sum(held_reason == changed_reason for held_reason in self._hold_reasons.values())
            )

    def set_rollout_counts(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Set the number of rollouts and trials by purpose and state."""
        for labels, count in counts.items():
            self._rollouts.labels(*labels).set(count)

    def set_dropped_field_count(self, count: int) -> None:
        """Set the number of status fields that are not stored."""
        self._dropped_fields.set(count)

    def set_list_failure(self, kind: str, namespace: str | None, *, failed: bool) -> None:
        """Record whether the latest list failed. A list that never failed has no time series."""
        labels = (kind, namespace or "")
        if failed or labels in self._reported_list_failures:
            self._reported_list_failures.add(labels)
            self._list_failures.labels(*labels).set(float(failed))

    def record_scrape(self, outcome: str, seconds: float) -> None:
        """Record a finished scrape; `outcome` is done, or why it failed."""
        self._scrape_seconds.observe(seconds)
        if outcome != "done":
            self._scrape_failures.labels(outcome).inc()

    def record_notification(self, outcome: str) -> None:
        """Record a notification that was sent, or lost for this reason."""
        self._notifications.labels(outcome).inc()

    def record_tuning_decision(self, outcome: str, seconds: float) -> None:
        """Record a finished decision on a speculation setting."""
        self._decisions.labels(outcome).inc()
        if outcome != "nothing":
            self._decision_seconds.observe(seconds)

    def set_leader(self, is_leader: bool) -> None:
        """Record that leadership was gained or lost."""
        self._leader.set(1.0 if is_leader else 0.0)
        self.record_heartbeat()

    async def monitor_event_loop(self, queue_depth: Callable[[], int]) -> None:
        """Measure the event-loop lag and the queue depth until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.5
            await asyncio.sleep(0.5)
            self._event_loop_lag.observe(max(0.0, loop.time() - due))
            depth = queue_depth()
            self._queue_depth.set(depth)
            unsynced_cache = self.cache_sync if self.cache_sync is not None and not self.cache_sync.synced.is_set() else None
            if not (depth if unsynced_cache is None else unsynced_cache.active_lists):
                self.record_heartbeat()

    def is_alive(self) -> bool:
        """Return True while the work in progress advances."""
        return asyncio.get_running_loop().time() - self._last_heartbeat < HEARTBEAT_TIMEOUT_SECONDS

    def readiness(self) -> tuple[bool, str]:
        """Return whether the operator is ready, and the text of the answer."""
        if not self.ready:
            return False, "starting"
        if self.cache_sync is None:
            return True, "ready"
        is_unable_to_list = self.cache_sync.is_unable_to_list()
        return not is_unable_to_list, "\n".join(
            ["nothing can be listed" if is_unable_to_list else "ready", *self.cache_sync.list_errors()]
        )

    async def serve(self, health_port: int, metrics_port: int) -> list[web.AppRunner]:
        """Open both ports on all addresses, and return the runners that have to be cleaned up."""

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(body=generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

        async def healthz(_: web.Request) -> web.Response:
            return _build_health_response(
                self.is_alive(), "alive", f"nothing has gone on for {HEARTBEAT_TIMEOUT_SECONDS:g} s, and something should"
            )

        async def readyz(_: web.Request) -> web.Response:
            ready, text = self.readiness()
            return _build_health_response(ready, text, text)

        runners = []
        for port, routes in (
            (health_port, [web.get("/healthz", healthz), web.get("/readyz", readyz)]),
            (metrics_port, [web.get("/metrics", metrics)]),
        ):
            app = web.Application()
            app.add_routes(routes)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, None, port).start()
            runners.append(runner)
        return runners


def _build_health_response(is_healthy: bool, healthy_text: str, unhealthy_text: str) -> web.Response:
    return web.Response(text=healthy_text if is_healthy else unhealthy_text, status=200 if is_healthy else 503)
