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
            "aerie_kube_api_requests",
            "Requests to the API server, by verb and status code or error.",
            ["verb", "code"],
            registry=self.registry,
        )
        self._api_call_seconds = Histogram(
            "aerie_kube_api_request_duration_seconds",
            "Duration of requests to the API server.",
            ["verb"],
            buckets=_DURATION_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self._queue_wait_seconds = Histogram(
            "aerie_workqueue_queue_duration_seconds",
            "Time that a resource waits in the work queue until its reconcile starts.",
            buckets=_DURATION_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self._reconcile_seconds = Histogram(
            "aerie_reconcile_duration_seconds",
            "Duration of reconciles, by outcome: done, conflict, failed.",
            ["outcome"],
            buckets=_DURATION_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self._queue_depth = Gauge(
            "aerie_workqueue_depth", "Resources that wait in the work queue for a reconcile.", registry=self.registry
        )
        self._leader = Gauge(
            "aerie_leader", "1 while this operator is the leader, 0 while it is on standby.", registry=self.registry
        )
        self._event_loop_lag = Histogram(
            "aerie_event_loop_lag_seconds",
            "Delay with which the event loop runs a callback that is due.",
            buckets=_LAG_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self._scrape_seconds = Histogram(
            "aerie_scrape_duration_seconds",
            "Duration of scrapes of engine metrics.",
            buckets=_DURATION_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self._scrape_failures = Counter(
            "aerie_scrape_failures", "Failed scrapes of engine metrics, by reason.", ["reason"], registry=self.registry
        )
        self._drafter_calls = Counter(
            "aerie_drafter_calls",
            "Calls that change a drafter in a running engine, by kind (prepare, load, renew, return) and outcome: done, rejected "
            "(by the pod), failed (no or no valid answer, or a failure in the pod).",
            ["call", "outcome"],
            registry=self.registry,
        )
        self._notifications = Counter(
            "aerie_notifications",
            "Notifications of rollouts, by receiver and outcome. sent: accepted by the receiver. Lost: queue_full (too many were "
            "pending), rejected (by the receiver), expired (not accepted in time), error (in the template, or in Aerie).",
            ["receiver", "outcome"],
            registry=self.registry,
        )
        self._decisions = Counter(
            "aerie_tuning_decisions",
            "Decisions on speculation settings, by outcome: hold, change, explore, insufficient (too few windows), no_data (no "
            "usable window since the last decision), superseded (the engines changed meanwhile), failed.",
            ["outcome"],
            registry=self.registry,
        )
        self._decision_seconds = Histogram(
            "aerie_tuning_decision_duration_seconds",
            "Duration of decisions on speculation settings, including the start of the worker process.",
            buckets=_DURATION_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self._list_failures = Gauge(
            "aerie_list_failed",
            "1 while the kind cannot be listed in the namespace (empty: all namespaces), 0 when it can be listed again.",
            ["kind", "namespace"],
            registry=self.registry,
        )
        self._resources_held = Gauge(
            "aerie_resources_held",
            "Resources on hold because they cannot be read or listed: they are left unchanged, or start no rollout.",
            ["reason"],
            registry=self.registry,
        )
        self._dropped_fields = Gauge(
            "aerie_status_fields_dropped",
            "Fields and values of the status that the API server drops because the CustomResourceDefinition lacks them.",
            registry=self.registry,
        )
        self._rollouts = Gauge(
            "aerie_rollouts",
            "Rollouts, and trials of speculation settings, that are in progress (Active) or wait for a slot (Queued). Those that "
            "wait for a user are not counted.",
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

    def record_drafter_call(self, call: str, outcome: str) -> None:
        """Record a call of a pod's drafter endpoint that has ended."""
        self._drafter_calls.labels(call, outcome).inc()

    def record_notification(self, receiver: str, outcome: str) -> None:
        """Record a notification that was sent to the receiver, or lost for this reason."""
        self._notifications.labels(receiver, outcome).inc()

    def record_tuning_decision(self, outcome: str, seconds: float) -> None:
        """Record a finished decision on a speculation setting."""
        self._decisions.labels(outcome).inc()
        if outcome != "no_data":
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
            ["no SpeculativeDeployment can be listed" if is_unable_to_list else "ready", *self.cache_sync.list_errors()]
        )

    async def serve(self, health_port: int, metrics_port: int) -> list[web.AppRunner]:
        """Open both ports on all addresses, and return the runners that have to be cleaned up."""

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(body=generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

        async def healthz(_: web.Request) -> web.Response:
            return _build_health_response(
                self.is_alive(), "alive", f"no progress for {HEARTBEAT_TIMEOUT_SECONDS:g} s although work is pending"
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
