"""State of the pods and servers that are scraped: pools, last outcomes, and delays until the next scrape.

Guarantees: the state of a pod is a few scrapes and the message of its last failure, and that of a server is its health. A pod or
server that does not answer is scraped less and less often. One that answers slowly is being scraped for a quarter of the time at
most.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import zlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field

from aerie.analysis.measurement.blocks import MAX_SCRAPE_AGE_INTERVALS
from aerie.api.metrics import PrometheusSource
from aerie.controller.fair_queue import FairQueue
from aerie.controller.scraping.prometheus import SourceHealth
from aerie.controller.scraping.sliding_window import SlidingWindow
from aerie.controller.scraping.targets import EngineEndpoint
from aerie.controller.work_queue import NamespacedName
from aerie.engine.metrics.sample import Sample
from aerie.rollout.facts.arm_metrics import OWN_DRAFTER, CountedDrafter

_log = logging.getLogger(__name__)

MAX_CONCURRENT_SCRAPES = 64
"""Scrapes in progress at once in each pool."""
MAX_CONCURRENT_SCRAPES_PER_NAMESPACE = 32
"""Scrapes in progress at once in each pool, of the pods of one namespace."""
MAX_CONCURRENT_POLLS = 8
"""Resources that are polled at once in each pool; at most one per namespace."""
MAX_SCRAPES_PER_SECOND = 100.0
"""Maximum scrapes per second for one resource: with more than a thousand pods per 10 s, pods are scraped less often."""
MIN_DELAY_PER_SCRAPE_DURATION = 3.0
"""Minimum delay until the next scrape, as a multiple of the last one's duration."""
PARSE_BYTES_PER_SECOND = 50e6
"""Bytes of scrapes that are parsed per second, of all pods together.

Parsing then takes a quarter of the time, and half of it for scrapes that are crafted to take long.
"""
MIN_DELAY_PER_PARSE_DURATION = 200.0
"""Minimum delay until the next scrape of a pod, as a multiple of the time that parsing takes at `PARSE_BYTES_PER_SECOND`.

Each pod thus takes half a percent of the event loop.
"""
NORMAL_INTERVAL_FACTOR = 4.0
"""Factor of the interval in the normal pool."""
MAX_NORMAL_INTERVAL_SECONDS = 60.0
"""Maximum interval in the normal pool, where the configured interval is not longer itself."""
MAX_NORMAL_SCRAPE_DELAY_SECONDS = 600.0
"""Maximum seconds between two scrapes of a pod that does not answer, in the normal pool."""
MAX_ROLLOUT_SCRAPE_DELAY_SECONDS = 60.0
"""Maximum seconds between two scrapes of a pod that does not answer, in the rollout pool."""
INVALID_SAMPLE_LIMIT = 3
"""Invalid samples in a row after which the pod's metrics count as invalid."""
MISSING_SAMPLE_LIMIT = 4
"""Polls in a row without a sample of a pod after which it no longer counts as just started."""
STALE_AFTER_INTERVALS = 5.0
"""Intervals after which a pod that does not answer is ignored."""


ScrapeFunction = Callable[["ScrapePool", NamespacedName], Coroutine[None, None, None]]
"""Scrape of a pod or poll of a resource, in a pool."""


@dataclass(eq=False)
class ScrapePool:
    """Pool of pods, or of resources, that share limits on their scrapes."""

    max_delay_seconds: float
    queue: FairQueue
    max_concurrent: int

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.max_concurrent)

    async def run(self, scrape: ScrapeFunction, task_group: asyncio.TaskGroup) -> None:
        """Scrape what is due, as tasks of the group, until cancelled."""
        while True:
            await self._slots.acquire()
            try:
                key, _ = await self.queue.get()
            except asyncio.CancelledError:
                self._slots.release()
                raise
            # A task that is cancelled before it begins runs none of its own clean-up.
            task_group.create_task(scrape(self, key)).add_done_callback(functools.partial(self._finish, key))

    def _finish(self, key: NamespacedName, task: asyncio.Task[None]) -> None:
        """End the turn of a scrape. One that was cancelled is due again, for the next run."""
        self.queue.done(key)
        self._slots.release()
        if task.cancelled():
            self.queue.add(key)


@dataclass(eq=False)
class ScrapeTarget:
    """Pod that is scraped."""

    owner: NamespacedName
    endpoint: EngineEndpoint
    pool: ScrapePool
    interval: float
    window: SlidingWindow = field(default_factory=SlidingWindow)
    drafter: CountedDrafter = OWN_DRAFTER
    """Drafter of the samples in `window`."""
    failures: int = 0
    last_duration_seconds: float = 0.0
    """Duration of the latest scrape."""
    last_response_bytes: int = 0
    """Size of the latest scrape."""
    last_sample: Sample | None = None
    last_sample_at: float = 0.0
    """Time of `last_sample` in seconds since the epoch."""
    prometheus_scraped_at: float = 0.0
    """Time at which Prometheus scraped that sample, by its clock."""
    invalid_samples: int = 0
    """Invalid samples in a row."""
    invalid_reason: str = ""
    last_error: str = ""
    """Message about the latest scrape if it failed; else empty."""

    @property
    def stale_after_seconds(self) -> float:
        """Seconds after which the pod is ignored if it does not answer."""
        return STALE_AFTER_INTERVALS * self.interval

    def follow_drafter(self, drafter: CountedDrafter) -> None:
        """Start the window over where the pod may have another drafter from now on."""
        if drafter != self.drafter:
            self.window, self.drafter = SlidingWindow(), drafter

    def next_delay(self) -> float:
        """Return the seconds until the next scrape."""
        min_delay = max(
            MIN_DELAY_PER_SCRAPE_DURATION * self.last_duration_seconds,
            MIN_DELAY_PER_PARSE_DURATION * self.last_response_bytes / PARSE_BYTES_PER_SECOND,
        )
        return max(min_delay, _backoff_interval(self.interval, self.pool.max_delay_seconds, self.failures))


@dataclass(eq=False)
class PrometheusPoll:
    """Resource whose metrics are polled from a Prometheus server."""

    server: PrometheusSource
    pool: ScrapePool
    interval: float
    rollout_interval: float
    """Interval during a rollout, which the server's scrape interval is compared with."""
    failures: int = 0
    last_duration_seconds: float = 0.0
    """Duration of the latest poll."""
    min_scrape_gap_seconds: float = 0.0
    """Seconds between the latest two scrapes of a pod, the minimum over all pods."""
    health: SourceHealth = field(default_factory=SourceHealth)

    def next_delay(self) -> float:
        """Return the seconds until the next poll."""
        return max(
            MIN_DELAY_PER_SCRAPE_DURATION * self.last_duration_seconds,
            _backoff_interval(self.interval, self.pool.max_delay_seconds, self.failures),
        )


def _backoff_interval(interval: float, max_delay: float, failures: int) -> float:
    return float(min(max(interval, max_delay), interval * 2.0 ** min(failures, 30)))


def limit_scrape_rate(interval: float, pod_count: int) -> float:
    """Return the scrape interval in seconds for this many pods: `interval`, doubled until their scrapes are few enough.

    It is not proportional to the number of pods, because a comparison restarts when the interval changes.

        >>> limit_scrape_rate(15.0, 1000), limit_scrape_rate(5.0, 1000), limit_scrape_rate(1.0, 100), limit_scrape_rate(1.0, 101)
        (15.0, 10.0, 1.0, 2.0)
    """
    while pod_count > MAX_SCRAPES_PER_SECOND * interval:
        interval *= 2
    return interval


def record_scrape_outcome(name: NamespacedName, target: ScrapeTarget, outcome: str, message: str) -> None:
    """Record the outcome of a scrape of the pod."""
    target.failures = 0 if outcome == "done" else target.failures + 1
    target.last_error = message if target.failures else ""
    if target.failures == 1:
        _log.info("pod %s: %s", name, message)


def find_metrics_source_error(
    poll: PrometheusPoll, targets: Mapping[str, ScrapeTarget], missing: Mapping[str, str]
) -> tuple[str, str] | None:
    """Return what is wrong with the server's metrics as a kind and a message; None when nothing is.

    `missing`: for each pod without a sample, the reason.
    """
    for name, reason in missing.items():
        if targets[name].failures >= MISSING_SAMPLE_LIMIT:
            return "no_sample", f"pod {name} {reason}"
    if poll.interval == poll.rollout_interval and poll.min_scrape_gap_seconds > MAX_SCRAPE_AGE_INTERVALS * poll.rollout_interval:
        message = (
            f"{poll.server.address} scrapes the pods every {poll.min_scrape_gap_seconds:.0f} s, "
            f"but spec.metrics.scrapeInterval is {poll.rollout_interval:g} s"
        )
        return "scrape_interval_too_long", f"{message}, and blocks are counted with it: raise it to the time between two scrapes"
    return None


def hash_fraction(name: NamespacedName) -> float:
    """Return a number from 0 to 1 that depends on the name only, so that pods are scraped at different times."""
    return zlib.crc32(str(name).encode()) / 2**32
