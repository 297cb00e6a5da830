"""The operator's own metrics, and whether it is alive and ready.

Alive: the event loop turns, and what is under way goes on: while the mirror is filled for the first time, its lists; from then
on the passes, as long as keys wait. Ready: it acts, or stands by. A leader that cannot list some of what it should stays ready,
because it serves the rest and no other one could do more; what is missing is in the answer's text. Only one that can list nothing
at all is not, so that an upgrade that takes its rights away does not go on.
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
"""Seconds without a sign of life: longer than any chain of calls with their limits takes."""


class CacheSyncStatus(Protocol):
    """What tells whether everything could be listed."""

    synced: asyncio.Event
    """Set when the mirror has been filled."""
    active_lists: int
    """Lists that have begun and not ended."""

    def list_errors(self) -> list[str]:
        """What cannot be listed, each as a sentence without an end."""

    def is_unable_to_list(self) -> bool:
        """Whether nothing at all can be listed."""


class OperatorMetrics:
    """Counts, and tells over HTTP."""

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
        """Why, by resource."""
        self._reported_list_failures: set[tuple[str, str]] = set()
        self._last_heartbeat = 0.0
        """When there was a sign of life."""
        self.ready = False
        self.cache_sync: CacheSyncStatus | None = None
        """What fills the mirror, while this operator acts."""

    def record_api_call(self, verb: str, code: str, seconds: float) -> None:
        """A call of the API server ended."""
        self._api_calls.labels(verb, code).inc()
        self._api_call_seconds.labels(verb).observe(seconds)

    def record_queue_wait(self, seconds: float) -> None:
        """A key was taken from the queue."""
        self._queue_wait_seconds.observe(seconds)

    def record_reconcile(self, outcome: str, seconds: float) -> None:
        """A pass ended."""
        self.record_heartbeat()
        self._reconcile_seconds.labels(outcome).observe(seconds)

    def record_heartbeat(self) -> None:
        """Something has gone on."""
        self._last_heartbeat = asyncio.get_running_loop().time()

    def set_hold_reason(self, resource: str, reason: str) -> None:
        """A resource is left as it is, for this reason; empty: it is not."""
        before = self._hold_reasons.pop(resource, "")
        if reason:
            self._hold_reasons[resource] = reason
        for one in {before, reason} - {""}:
            self._resources_held.labels(one).set(sum(each == one for each in self._hold_reasons.values()))

    def set_rollout_counts(self, counts: Mapping[tuple[str, str], int]) -> None:
        """So many rollouts and trials there are, by purpose and state."""
        for labels, count in counts.items():
            self._rollouts.labels(*labels).set(count)

    def set_dropped_field_count(self, count: int) -> None:
        """So many fields of the status are not stored."""
        self._dropped_fields.set(count)

    def set_list_failure(self, kind: str, namespace: str | None, *, failed: bool) -> None:
        """A list ended; one that never failed is not shown."""
        labels = (kind, namespace or "")
        if failed or labels in self._reported_list_failures:
            self._reported_list_failures.add(labels)
            self._list_failures.labels(*labels).set(float(failed))

    def record_scrape(self, outcome: str, seconds: float) -> None:
        """The reading of an engine's metrics ended; `outcome` is done, or why it failed."""
        self._scrape_seconds.observe(seconds)
        if outcome != "done":
            self._scrape_failures.labels(outcome).inc()

    def record_notification(self, outcome: str) -> None:
        """A notice was sent, or lost for this reason."""
        self._notifications.labels(outcome).inc()

    def record_tuning_decision(self, outcome: str, seconds: float) -> None:
        """A decision on a speculation setting ended."""
        self._decisions.labels(outcome).inc()
        if outcome != "nothing":
            self._decision_seconds.observe(seconds)

    def set_leader(self, is_leader: bool) -> None:
        """Leadership was gained or lost."""
        self._leader.set(1.0 if is_leader else 0.0)
        self.record_heartbeat()

    async def monitor_event_loop(self, queue_depth: Callable[[], int]) -> None:
        """Measure the loop and the queue, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.5
            await asyncio.sleep(0.5)
            self._event_loop_lag.observe(max(0.0, loop.time() - due))
            waiting = queue_depth()
            self._queue_depth.set(waiting)
            filling = self.cache_sync if self.cache_sync is not None and not self.cache_sync.synced.is_set() else None
            if not (waiting if filling is None else filling.active_lists):
                self.record_heartbeat()

    def is_alive(self) -> bool:
        """Whether what is under way goes on."""
        return asyncio.get_running_loop().time() - self._last_heartbeat < HEARTBEAT_TIMEOUT_SECONDS

    def readiness(self) -> tuple[bool, str]:
        """Whether it is ready, and what is to be said about it."""
        if not self.ready:
            return False, "starting"
        if self.cache_sync is None:
            return True, "ready"
        blind = self.cache_sync.is_unable_to_list()
        return not blind, "\n".join(["nothing can be listed" if blind else "ready", *self.cache_sync.list_errors()])

    async def serve(self, health_port: int, metrics_port: int) -> list[web.AppRunner]:
        """Open both ports on all addresses; the runners to clean up."""

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
