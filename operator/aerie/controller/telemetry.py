"""The operator's own metrics, and whether it is alive and ready.

Alive: the event loop turns, and the workers' queue does not stand still while keys wait in it. Ready: it leads and watches, or
stands by to lead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_WAITS = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 20.0, 60.0)
_LAGS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
STUCK_AFTER = 60.0
"""Seconds in which no pass ends although keys wait: longer than any chain of calls with their limits takes."""


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
        self._last_pass = 0.0
        self.ready = False

    def called(self, verb: str, code: str, seconds: float) -> None:
        """A call of the API server ended."""
        self._calls.labels(verb, code).inc()
        self._call_seconds.labels(verb).observe(seconds)

    def waited(self, seconds: float) -> None:
        """A key was taken from the queue."""
        self._waits.observe(seconds)

    def passed(self, outcome: str, seconds: float) -> None:
        """A pass ended."""
        self._last_pass = asyncio.get_running_loop().time()
        self._passes.labels(outcome).observe(seconds)

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
        self._last_pass = asyncio.get_running_loop().time()

    async def watch(self, depth: Callable[[], int]) -> None:
        """Measure the loop and the queue, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.5
            await asyncio.sleep(0.5)
            self._lag.observe(max(0.0, loop.time() - due))
            waiting = depth()
            self._depth.set(waiting)
            if not waiting:
                self._last_pass = loop.time()

    def alive(self) -> bool:
        """Whether passes are made while keys wait."""
        return asyncio.get_running_loop().time() - self._last_pass < STUCK_AFTER

    async def serve(self, health_port: int, metrics_port: int) -> list[web.AppRunner]:
        """Open both ports on all addresses; the runners to clean up."""

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(body=generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

        async def healthz(_: web.Request) -> web.Response:
            return _answer(self.alive(), "alive", f"keys wait and no pass has ended for {STUCK_AFTER:g} s")

        async def readyz(_: web.Request) -> web.Response:
            return _answer(self.ready, "ready", "starting")

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
