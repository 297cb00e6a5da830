"""Polls the engines' metrics from Prometheus servers, for resources whose spec.metrics.source names one, in two pools.

A server is polled for all pods of a resource at once, and for one resource of a namespace at a time. Its sample of a pod counts
only if it is of a new scrape; otherwise the pod's scrape has failed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable

import httpx

from aerie.controller.fair_queue import FairQueue
from aerie.controller.scraping.engine_metrics import EngineMetrics
from aerie.controller.scraping.http_fetch import ScrapeError
from aerie.controller.scraping.prometheus import PrometheusAccess, PrometheusClient
from aerie.controller.scraping.scrape_pool import (
    INVALID_SAMPLE_LIMIT,
    MAX_CONCURRENT_POLLS,
    MAX_NORMAL_SCRAPE_DELAY_SECONDS,
    MAX_ROLLOUT_SCRAPE_DELAY_SECONDS,
    PrometheusPoll,
    ScrapePool,
    ScrapeTarget,
    find_metrics_source_error,
    hash_fraction,
    record_scrape_outcome,
)
from aerie.controller.scraping.targets import EngineEndpoint
from aerie.controller.work_queue import NamespacedName
from aerie.engine.metrics.promql import PrometheusScrape

_log = logging.getLogger(__name__)


class PrometheusPoller:
    """Poller of the Prometheus servers of all resources with a metrics source."""

    def __init__(
        self,
        metrics: EngineMetrics,
        enqueue: Callable[[NamespacedName], None],
        record_scrape: Callable[[str, float], None],
        transport: httpx.AsyncBaseTransport | None,
        access: PrometheusAccess,
    ) -> None:
        self._metrics, self._enqueue, self._record_scrape = metrics, enqueue, record_scrape
        self._transport, self._access = transport, access
        self._rollout_pool, self._normal_pool = (
            ScrapePool(max_delay, FairQueue(lambda key: key, 1), MAX_CONCURRENT_POLLS)
            for max_delay in (MAX_ROLLOUT_SCRAPE_DELAY_SECONDS, MAX_NORMAL_SCRAPE_DELAY_SECONDS)
        )
        self._polls: dict[NamespacedName, PrometheusPoll] = {}

    def select_pool(self, *, is_rolling_out: bool) -> ScrapePool:
        """Return the pool for a resource."""
        return self._rollout_pool if is_rolling_out else self._normal_pool

    def start(self, key: NamespacedName, poll: PrometheusPoll) -> None:
        """Poll the resource's server from now on; the same poll as before continues."""
        previous = self._polls.get(key)
        if previous is not None and previous.server == poll.server:
            if (previous.pool, previous.interval, previous.rollout_interval) == (poll.pool, poll.interval, poll.rollout_interval):
                return
            poll.health = previous.health
        self._polls[key] = poll
        poll.pool.queue.add_after(key, poll.interval * hash_fraction(key))

    def forget(self, key: NamespacedName) -> None:
        """Poll for the resource no longer."""
        self._polls.pop(key, None)

    def source_error(self, key: NamespacedName) -> str | None:
        """Return the problem with the resource's server; empty when there is none, None while that is unknown."""
        poll = self._polls.get(key)
        return "" if poll is None else poll.health.message

    async def run(self) -> None:
        """Poll until cancelled."""
        prometheus_client = PrometheusClient(self._access, self._transport)
        try:
            async with asyncio.TaskGroup() as group:
                for pool in (self._rollout_pool, self._normal_pool):
                    group.create_task(pool.run(functools.partial(self._poll_and_reschedule, prometheus_client), group))
        finally:
            await prometheus_client.close()

    async def _poll_and_reschedule(self, prometheus_client: PrometheusClient, pool: ScrapePool, key: NamespacedName) -> None:
        poll = self._polls.get(key)
        if poll is None or poll.pool is not pool:
            return
        await self._poll_source(key, poll, prometheus_client)
        if self._polls.get(key) is poll:
            pool.queue.add_after(key, poll.next_delay())

    async def _poll_source(self, key: NamespacedName, poll: PrometheusPoll, prometheus_client: PrometheusClient) -> None:
        """Poll the metrics of all pods of the resource from its server."""
        loop = asyncio.get_running_loop()
        started, outcome = loop.time(), "done"
        targets = self._metrics.targets_of(key)
        endpoints = {name: target.endpoint for name, target in targets.items()}
        source_error: tuple[str, str] | None = None
        has_news = False
        try:
            gaps: list[float] = []
            missing: dict[str, str] = {}
            async for results in prometheus_client.poll(poll.server, key.namespace, list(targets), poll.rollout_interval):
                for name, result in results.items():
                    previous_invalid_samples = targets[name].invalid_samples
                    gap = self._record_poll_result(NamespacedName(key.namespace, name), targets[name], endpoints[name], result)
                    gaps += [gap] if gap else []
                    missing |= {name: result} if isinstance(result, str) else {}
                    has_news = has_news or previous_invalid_samples < targets[name].invalid_samples == INVALID_SAMPLE_LIMIT
            poll.min_scrape_gap_seconds = min(gaps, default=poll.min_scrape_gap_seconds)
            source_error = find_metrics_source_error(poll, targets, missing)
            poll.failures = 0
        except ScrapeError as error:
            outcome, source_error = error.reason, (error.reason, str(error))
            poll.failures += 1
        except Exception:  # noqa: BLE001 - one resource's server must not stop the polls of the others
            outcome = "error"
            poll.failures += 1
            _log.exception("%s: the poll of %s failed with an internal error", key, poll.server.address)
        poll.last_duration_seconds = loop.time() - started
        self._record_scrape(outcome, poll.last_duration_seconds)
        if self._polls.get(key) is not poll:
            return
        if source_error is not None:
            has_news = poll.health.record_failure(*source_error, loop.time()) or has_news
        elif outcome == "done":
            has_news = poll.health.record_success() or has_news
        if self._metrics.has_news(key, len(targets), has_succeeded=outcome == "done") or has_news:
            self._enqueue(key)

    def _record_poll_result(
        self, name: NamespacedName, scrape_target: ScrapeTarget, endpoint: EngineEndpoint, result: PrometheusScrape | str
    ) -> float:
        """Record the server's result for the pod. Return the seconds between its last two scrapes, or 0 without a new one."""
        if isinstance(result, str):
            record_scrape_outcome(name, scrape_target, "no_sample", result)
            return 0.0
        if result.timestamp <= scrape_target.prometheus_scraped_at:  # the same scrape as before: no new sample
            return 0.0
        gap, scrape_target.prometheus_scraped_at = (
            result.timestamp - scrape_target.prometheus_scraped_at if scrape_target.prometheus_scraped_at else 0.0,
            result.timestamp,
        )
        record_scrape_outcome(
            name, scrape_target, *self._metrics.record_sample(name, scrape_target, endpoint, result.to_sample, result.timestamp)
        )
        return gap
