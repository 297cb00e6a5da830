"""What is held of the pods and servers that are read: lanes, what was read last, and how often to read again.

Guarantees: of a pod, a few scrapes and the sentence of its last failure; of a server, how it stands. A pod or server that does
not answer is read less and less often, and one that answers slowly is being read for a quarter of the time at most.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from aerie.analysis.measurement.blocks import MAX_SCRAPE_AGE_INTERVALS
from aerie.api.metrics import PrometheusSource
from aerie.controller.fair_queue import FairQueue
from aerie.controller.scraping.prometheus import SourceHealth
from aerie.controller.scraping.sliding_window import SlidingWindow
from aerie.controller.scraping.targets import EngineEndpoint
from aerie.controller.work_queue import NamespacedName
from aerie.engine.metrics.sample import Sample

_log = logging.getLogger(__name__)

MAX_CONCURRENT_SCRAPES, MAX_CONCURRENT_SCRAPES_PER_NAMESPACE = 64, 32
"""Pages at once, in each lane: in all, and of one namespace."""
MAX_CONCURRENT_POLLS = 8
"""Resources of which servers are asked at once, in each lane; one of each namespace."""
MAX_SCRAPES_PER_SECOND = 100.0
"""Pages of one resource, at most: more than a thousand pods each 10 s are read less often."""
MIN_DELAY_PER_SCRAPE_DURATION = 3.0
"""Times as long as a reading took until the next."""
PARSE_BYTES_PER_SECOND, MIN_DELAY_PER_PARSE_DURATION = 50e6, 200.0
"""Bytes of pages that are parsed each second, of all pods together: honest ones take a quarter of the time, those that are made
to take long a half. And times as long as its page takes by that, a pod is not read: half a percent of the loop, each."""
NORMAL_INTERVAL_FACTOR, MAX_NORMAL_INTERVAL_SECONDS = 4.0, 60.0
"""Calm pods are read this many times slower, up to so many seconds apart where the interval is not longer itself."""
MAX_NORMAL_SCRAPE_DELAY_SECONDS, MAX_ROLLOUT_SCRAPE_DELAY_SECONDS = 600.0, 60.0
"""Seconds between two readings of a pod that does not answer."""
INVALID_SAMPLE_LIMIT = 3
"""Pages in a row that say what cannot be, after which it is no accident."""
MISSING_SAMPLE_LIMIT = 4
"""Readings in a row in which Prometheus has nothing of a pod, after which it is no pod that has just begun."""
STALE_AFTER_INTERVALS = 5.0
"""Intervals after which a pod that does not answer counts for nothing."""


@dataclass(eq=False)
class ScrapePool:
    """Pods, or resources, that are read at one pace."""

    max_delay_seconds: float
    queue: FairQueue
    max_concurrent: int

    def __post_init__(self) -> None:
        self.slots = asyncio.Semaphore(self.max_concurrent)


@dataclass(eq=False)
class ScrapeTarget:
    """A pod that is read."""

    owner: NamespacedName
    endpoint: EngineEndpoint
    pool: ScrapePool
    interval: float
    window: SlidingWindow = field(default_factory=SlidingWindow)
    failures: int = 0
    last_duration_seconds: float = 0.0
    """Seconds that the latest reading took."""
    last_response_bytes: int = 0
    """Bytes of the latest page."""
    last_sample: Sample | None = None
    last_sample_at: float = 0.0
    """Seconds since the epoch."""
    prometheus_scraped_at: float = 0.0
    """When Prometheus had scraped that, by its clock."""
    invalid_samples: int = 0
    """Pages in a row that were read and say what cannot be."""
    invalid_reason: str = ""
    last_error: str = ""
    """Why the latest reading failed; empty when it did not."""

    @property
    def stale_after_seconds(self) -> float:
        """Seconds after which it counts for nothing."""
        return STALE_AFTER_INTERVALS * self.interval

    def next_delay(self) -> float:
        """Seconds until it is read again."""
        costs = max(
            MIN_DELAY_PER_SCRAPE_DURATION * self.last_duration_seconds,
            MIN_DELAY_PER_PARSE_DURATION * self.last_response_bytes / PARSE_BYTES_PER_SECOND,
        )
        return max(costs, _backoff_interval(self.interval, self.pool.max_delay_seconds, self.failures))


@dataclass(eq=False)
class PrometheusPoll:
    """A resource whose metrics a Prometheus server has."""

    server: PrometheusSource
    pool: ScrapePool
    interval: float
    rollout_interval: float
    """The interval of a rollout: what the server's scrapes are held against."""
    failures: int = 0
    last_duration_seconds: float = 0.0
    """Seconds that asking took, the latest time."""
    min_scrape_gap_seconds: float = 0.0
    """Seconds between the latest two scrapes of a pod, the least of all pods."""
    health: SourceHealth = field(default_factory=SourceHealth)

    def next_delay(self) -> float:
        """Seconds until it is asked again."""
        return max(
            MIN_DELAY_PER_SCRAPE_DURATION * self.last_duration_seconds,
            _backoff_interval(self.interval, self.pool.max_delay_seconds, self.failures),
        )


def _backoff_interval(interval: float, max_delay: float, failures: int) -> float:
    return float(min(max(interval, max_delay), interval * 2.0 ** min(failures, 30)))


def limit_scrape_rate(interval: float, pod_count: int) -> float:
    """Seconds between two readings of each of so many pods that are to be read each `interval`: doubled until they are few
    enough, and not by how many there are just now, since what is counted begins anew with another interval.

    >>> paced(15.0, 1000), paced(5.0, 1000), paced(1.0, 100), paced(1.0, 101)
    (15.0, 10.0, 1.0, 2.0)
    """
    while pod_count > MAX_SCRAPES_PER_SECOND * interval:
        interval *= 2
    return interval


def record_scrape_outcome(name: NamespacedName, target: ScrapeTarget, outcome: str, message: str) -> None:
    """How a reading of the pod went."""
    target.failures = 0 if outcome == "done" else target.failures + 1
    target.last_error = message if target.failures else ""
    if target.failures == 1:
        _log.info("pod %s: %s", name, message)


def find_metrics_source_error(
    poll: PrometheusPoll, targets: Mapping[str, ScrapeTarget], missing: Mapping[str, str]
) -> tuple[str, str] | None:
    """What is wrong with what the server has, and with what it has not, by pod: the kind of it, and the sentence."""
    for name, why in missing.items():
        if targets[name].failures >= MISSING_SAMPLE_LIMIT:
            return "absent", f"pod {name} {why}"
    if poll.interval == poll.rollout_interval and poll.min_scrape_gap_seconds > MAX_SCRAPE_AGE_INTERVALS * poll.rollout_interval:
        told = f"{poll.server.address} scrapes the pods each {poll.min_scrape_gap_seconds:.0f} s, and spec.metrics.interval is {poll.rollout_interval:g} s"
        return "sparse", f"{told}, by which blocks are counted: raise it to the time between two scrapes"
    return None


def hash_fraction(name: NamespacedName) -> float:
    """A number from 0 to 1 that is the pod's own, so that pods are read at different moments."""
    return zlib.crc32(str(name).encode()) / 2**32
