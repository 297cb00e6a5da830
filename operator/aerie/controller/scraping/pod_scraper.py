"""Scrapes the engines' metrics from the pods themselves, in two pools.

One scrape at a time is parsed, with a pause after it that grows with its size. So the event loop is blocked by one scrape at
most, and by all scrapes for half of the time at most.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable

import httpx

from aerie.controller.fair_queue import FairQueue
from aerie.controller.scraping.engine_metrics import EngineMetrics
from aerie.controller.scraping.http_fetch import ScrapeError, create_http_client, fetch_metrics
from aerie.controller.scraping.scrape_pool import (
    INVALID_SAMPLE_LIMIT,
    MAX_CONCURRENT_SCRAPES,
    MAX_CONCURRENT_SCRAPES_PER_NAMESPACE,
    MAX_NORMAL_SCRAPE_DELAY_SECONDS,
    MAX_ROLLOUT_SCRAPE_DELAY_SECONDS,
    PARSE_BYTES_PER_SECOND,
    ScrapePool,
    ScrapeTarget,
    hash_fraction,
    record_scrape_outcome,
)
from aerie.controller.work_queue import NamespacedName
from aerie.engine.metrics.exposition import parse_exposition

_log = logging.getLogger(__name__)


class PodScraper:
    """Scraper of the pods of all resources without a metrics source."""

    def __init__(
        self,
        metrics: EngineMetrics,
        enqueue: Callable[[NamespacedName], None],
        record_scrape: Callable[[str, float], None],
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        self._metrics, self._enqueue, self._record_scrape, self._transport = metrics, enqueue, record_scrape, transport
        self._rollout_pool, self._normal_pool = (
            ScrapePool(max_delay, FairQueue(metrics.find_owner, MAX_CONCURRENT_SCRAPES_PER_NAMESPACE), MAX_CONCURRENT_SCRAPES)
            for max_delay in (MAX_ROLLOUT_SCRAPE_DELAY_SECONDS, MAX_NORMAL_SCRAPE_DELAY_SECONDS)
        )
        self._parse_lock = asyncio.Lock()

    def select_pool(self, *, is_rolling_out: bool) -> ScrapePool:
        """Return the pool for a resource's pods."""
        return self._rollout_pool if is_rolling_out else self._normal_pool

    def schedule(self, names: Iterable[NamespacedName]) -> None:
        """Schedule the pods in their pools, spread over an interval."""
        for name in names:
            target = self._metrics.targets[name]
            target.pool.queue.add_after(name, target.interval * hash_fraction(name))

    async def run(self) -> None:
        """Scrape until cancelled."""
        async with create_http_client(self._transport) as http_client, asyncio.TaskGroup() as group:
            for pool in (self._rollout_pool, self._normal_pool):
                group.create_task(pool.run(functools.partial(self._scrape_and_reschedule, http_client), group))

    async def _scrape_and_reschedule(self, http_client: httpx.AsyncClient, pool: ScrapePool, name: NamespacedName) -> None:
        target = self._metrics.targets.get(name)
        if target is None or target.pool is not pool:
            return
        await self._scrape_pod(name, target, http_client)
        if self._metrics.targets.get(name) is target and target.pool is pool:
            pool.queue.add_after(name, target.next_delay())

    async def _scrape_pod(self, name: NamespacedName, scrape_target: ScrapeTarget, http_client: httpx.AsyncClient) -> None:
        loop, endpoint = asyncio.get_running_loop(), scrape_target.endpoint
        started, outcome, message = loop.time(), "done", ""
        try:
            exposition = await fetch_metrics(http_client, endpoint.url)
            scrape_target.last_response_bytes = len(exposition)
            async with self._parse_lock:
                outcome, message = self._metrics.record_sample(
                    name, scrape_target, endpoint, functools.partial(parse_exposition, exposition), None
                )
                await asyncio.sleep(len(exposition) / PARSE_BYTES_PER_SECOND)
        except ScrapeError as error:
            outcome, message = error.reason, str(error)
        except Exception:  # noqa: BLE001 - one pod's metrics must not stop the scrapes of the others
            outcome = "error"
            _log.exception("pod %s: the scrape failed with an internal error", name)
        scrape_target.last_duration_seconds = loop.time() - started
        self._record_scrape(outcome, scrape_target.last_duration_seconds)
        record_scrape_outcome(name, scrape_target, outcome, message)
        if self._metrics.targets.get(name) is not scrape_target:
            return
        has_news = self._metrics.has_news(scrape_target.owner, 1, has_succeeded=outcome == "done")
        if has_news or scrape_target.invalid_samples == INVALID_SAMPLE_LIMIT:
            self._enqueue(scrape_target.owner)
