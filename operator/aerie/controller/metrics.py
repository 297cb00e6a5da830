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

_WAITS = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 20.0, 60.0)
_LAGS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
STUCK_AFTER = 60.0
"""Seconds without a sign of life: longer than any chain of calls with their limits takes."""


class Lists(Protocol):
    """What tells whether everything could be listed."""

    filled: asyncio.Event
    """Set when the mirror has been filled."""
    under_way: int
    """Lists that have begun and not ended."""

    def troubles(self) -> list[str]:
        """What cannot be listed, each as a sentence without an end."""

    def blind(self) -> bool:
        """Whether nothing at all can be listed."""


class Telemetry:
    """Counts, and tells over HTTP."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._calls = Counter(
            "aerie_api_calls", "Calls of the API server, by verb and status or error.", ["verb", "code"], registry=self.registry
        )
        self._call_seconds = Histogram(
            "aerie_api_call_seconds", "Length of calls of the API server.", ["verb"], buckets=_WAITS, registry=self.registry
        )
        self._waits = Histogram(
            "aerie_queue_wait_seconds", "Time from an event to the pass that it caused.", buckets=_WAITS, registry=self.registry
        )
        self._passes = Histogram(
            "aerie_reconcile_seconds", "Length of passes, by outcome.", ["outcome"], buckets=_WAITS, registry=self.registry
        )
        self._depth = Gauge("aerie_queue_depth", "Resources that wait for a pass.", registry=self.registry)
        self._leading = Gauge("aerie_leading", "1 while this operator acts, 0 while it stands by.", registry=self.registry)
        self._lag = Histogram(
            "aerie_loop_lag_seconds", "How late the event loop runs what is due.", buckets=_LAGS, registry=self.registry
        )
        self._scrapes = Histogram(
            "aerie_scrape_seconds", "Length of readings of engines' metrics.", buckets=_WAITS, registry=self.registry
        )
        self._scrape_failures = Counter(
            "aerie_scrape_failures", "Readings of engines' metrics that failed, by reason.", ["reason"], registry=self.registry
        )
        self._notices = Counter(
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
            buckets=_WAITS,
            registry=self.registry,
        )
        self._lists_failed = Gauge(
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
        self._dropped = Gauge(
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
        self._reasons: dict[str, str] = {}
        """Why, by resource."""
        self._failing: set[tuple[str, str]] = set()
        self._sign = 0.0
        """When there was a sign of life."""
        self.ready = False
        self.lists: Lists | None = None
        """What fills the mirror, while this operator acts."""

    def called(self, verb: str, code: str, seconds: float) -> None:
        """A call of the API server ended."""
        self._calls.labels(verb, code).inc()
        self._call_seconds.labels(verb).observe(seconds)

    def waited(self, seconds: float) -> None:
        """A key was taken from the queue."""
        self._waits.observe(seconds)

    def passed(self, outcome: str, seconds: float) -> None:
        """A pass ended."""
        self.lives()
        self._passes.labels(outcome).observe(seconds)

    def lives(self) -> None:
        """Something has gone on."""
        self._sign = asyncio.get_running_loop().time()

    def held(self, resource: str, reason: str) -> None:
        """A resource is left as it is, for this reason; empty: it is not."""
        before = self._reasons.pop(resource, "")
        if reason:
            self._reasons[resource] = reason
        for one in {before, reason} - {""}:
            self._resources_held.labels(one).set(sum(each == one for each in self._reasons.values()))

    def slots(self, counts: Mapping[tuple[str, str], int]) -> None:
        """So many rollouts and trials there are, by purpose and state."""
        for labels, count in counts.items():
            self._rollouts.labels(*labels).set(count)

    def fields_dropped(self, count: int) -> None:
        """So many fields of the status are not stored."""
        self._dropped.set(count)

    def list_failed(self, kind: str, namespace: str | None, *, failed: bool) -> None:
        """A list ended; one that never failed is not shown."""
        labels = (kind, namespace or "")
        if failed or labels in self._failing:
            self._failing.add(labels)
            self._lists_failed.labels(*labels).set(float(failed))

    def scraped(self, outcome: str, seconds: float) -> None:
        """The reading of an engine's metrics ended; `outcome` is done, or why it failed."""
        self._scrapes.observe(seconds)
        if outcome != "done":
            self._scrape_failures.labels(outcome).inc()

    def noticed(self, outcome: str) -> None:
        """A notice was sent, or lost for this reason."""
        self._notices.labels(outcome).inc()

    def decided(self, outcome: str, seconds: float) -> None:
        """A decision on a speculation setting ended."""
        self._decisions.labels(outcome).inc()
        if outcome != "nothing":
            self._decision_seconds.observe(seconds)

    def leading(self, leads: bool) -> None:
        """Leadership was gained or lost."""
        self._leading.set(1.0 if leads else 0.0)
        self.lives()

    async def watch(self, depth: Callable[[], int]) -> None:
        """Measure the loop and the queue, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.5
            await asyncio.sleep(0.5)
            self._lag.observe(max(0.0, loop.time() - due))
            waiting = depth()
            self._depth.set(waiting)
            filling = self.lists if self.lists is not None and not self.lists.filled.is_set() else None
            if not (waiting if filling is None else filling.under_way):
                self.lives()

    def alive(self) -> bool:
        """Whether what is under way goes on."""
        return asyncio.get_running_loop().time() - self._sign < STUCK_AFTER

    def readiness(self) -> tuple[bool, str]:
        """Whether it is ready, and what is to be said about it."""
        if not self.ready:
            return False, "starting"
        if self.lists is None:
            return True, "ready"
        blind = self.lists.blind()
        return not blind, "\n".join(["nothing can be listed" if blind else "ready", *self.lists.troubles()])

    async def serve(self, health_port: int, metrics_port: int) -> list[web.AppRunner]:
        """Open both ports on all addresses; the runners to clean up."""

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(body=generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

        async def healthz(_: web.Request) -> web.Response:
            return _answer(self.alive(), "alive", f"nothing has gone on for {STUCK_AFTER:g} s, and something should")

        async def readyz(_: web.Request) -> web.Response:
            ready, text = self.readiness()
            return _answer(ready, text, text)

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


def _answer(good: bool, yes: str, no: str) -> web.Response:
    return web.Response(text=yes if good else no, status=200 if good else 503)
