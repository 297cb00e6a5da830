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

from aerie.analysis.measurement.blocks import LATE
from aerie.api.metrics import Prometheus
from aerie.controller.fair_queue import FairQueue
from aerie.controller.scraping.prometheus import Standing
from aerie.controller.scraping.sliding_window import Readings
from aerie.controller.scraping.targets import Target
from aerie.controller.work_queue import Key
from aerie.engine.metrics.sample import Sample

_log = logging.getLogger(__name__)

AT_ONCE, OF_NAMESPACE = 64, 32
"""Pages at once, in each lane: in all, and of one namespace."""
ASKED_AT_ONCE = 8
"""Resources of which servers are asked at once, in each lane; one of each namespace."""
PER_SECOND = 100.0
"""Pages of one resource, at most: more than a thousand pods each 10 s are read less often."""
REST = 3.0
"""Times as long as a reading took until the next."""
SPEED, COSTS = 50e6, 200.0
"""Bytes of pages that are parsed each second, of all pods together: honest ones take a quarter of the time, those that are made
to take long a half. And times as long as its page takes by that, a pod is not read: half a percent of the loop, each."""
SLOWER, SLOWEST = 4.0, 60.0
"""Calm pods are read this many times slower, up to so many seconds apart where the interval is not longer itself."""
LONGEST_WAIT, LONGEST_URGENT_WAIT = 600.0, 60.0
"""Seconds between two readings of a pod that does not answer."""
UNBELIEVABLE = 3
"""Pages in a row that say what cannot be, after which it is no accident."""
ABSENT = 4
"""Readings in a row in which Prometheus has nothing of a pod, after which it is no pod that has just begun."""
STALE = 5.0
"""Intervals after which a pod that does not answer counts for nothing."""


@dataclass(eq=False)
class Lane:
    """Pods, or resources, that are read at one pace."""

    longest_wait: float
    queue: FairQueue
    at_once: int

    def __post_init__(self) -> None:
        self.free = asyncio.Semaphore(self.at_once)


@dataclass(eq=False)
class Pod:
    """A pod that is read."""

    owner: Key
    target: Target
    lane: Lane
    interval: float
    readings: Readings = field(default_factory=Readings)
    failures: int = 0
    took: float = 0.0
    """Seconds that the latest reading took."""
    size: int = 0
    """Bytes of the latest page."""
    latest: Sample | None = None
    read_at: float = 0.0
    """Seconds since the epoch."""
    scraped_at: float = 0.0
    """When Prometheus had scraped that, by its clock."""
    unbelievable: int = 0
    """Pages in a row that were read and say what cannot be."""
    why: str = ""
    failed: str = ""
    """Why the latest reading failed; empty when it did not."""

    @property
    def stale_after(self) -> float:
        """Seconds after which it counts for nothing."""
        return STALE * self.interval

    def wait(self) -> float:
        """Seconds until it is read again."""
        costs = max(REST * self.took, COSTS * self.size / SPEED)
        return max(costs, _wait(self.interval, self.lane.longest_wait, self.failures))


@dataclass(eq=False)
class Asked:
    """A resource whose metrics a Prometheus server has."""

    server: Prometheus
    lane: Lane
    interval: float
    shortest: float
    """The interval of a rollout: what the server's scrapes are held against."""
    failures: int = 0
    took: float = 0.0
    """Seconds that asking took, the latest time."""
    gap: float = 0.0
    """Seconds between the latest two scrapes of a pod, the least of all pods."""
    standing: Standing = field(default_factory=Standing)

    def wait(self) -> float:
        """Seconds until it is asked again."""
        return max(REST * self.took, _wait(self.interval, self.lane.longest_wait, self.failures))


def _wait(interval: float, longest: float, failures: int) -> float:
    return float(min(max(interval, longest), interval * 2.0 ** min(failures, 30)))


def paced(interval: float, pods: int) -> float:
    """Seconds between two readings of each of so many pods that are to be read each `interval`: doubled until they are few
    enough, and not by how many there are just now, since what is counted begins anew with another interval.

    >>> paced(15.0, 1000), paced(5.0, 1000), paced(1.0, 100), paced(1.0, 101)
    (15.0, 10.0, 1.0, 2.0)
    """
    while pods > PER_SECOND * interval:
        interval *= 2
    return interval


def note(name: Key, pod: Pod, outcome: str, told: str) -> None:
    """How a reading of the pod went."""
    pod.failures = 0 if outcome == "done" else pod.failures + 1
    pod.failed = told if pod.failures else ""
    if pod.failures == 1:
        _log.info("pod %s: %s", name, told)


def seen(asked: Asked, pods: Mapping[str, Pod], missing: Mapping[str, str]) -> tuple[str, str] | None:
    """What is wrong with what the server has, and with what it has not, by pod: the kind of it, and the sentence."""
    for name, why in missing.items():
        if pods[name].failures >= ABSENT:
            return "absent", f"pod {name} {why}"
    if asked.interval == asked.shortest and asked.gap > LATE * asked.shortest:
        told = (
            f"{asked.server.address} scrapes the pods each {asked.gap:.0f} s, and spec.metrics.interval is {asked.shortest:g} s"
        )
        return "sparse", f"{told}, by which blocks are counted: raise it to the time between two scrapes"
    return None


def share(name: Key) -> float:
    """A number from 0 to 1 that is the pod's own, so that pods are read at different moments."""
    return zlib.crc32(str(name).encode()) / 2**32
