"""What is held of the pods and servers that are read: lanes, what was read last, and how often to read again.

Guarantees: of a pod, a few scrapes and the sentence of its last failure; of a server, how it stands. A pod or server that does
not answer is read less and less often.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from aerie.api.metrics import Prometheus
from aerie.controller.prometheus import Standing
from aerie.controller.queue import Key, WorkQueue
from aerie.controller.readings import Readings
from aerie.controller.targets import Target
from aerie.engine.samples import Sample
from aerie.engine.series import Scrape
from aerie.rollout.analysis.blocks import LATE

_log = logging.getLogger(__name__)

AT_ONCE = 32
"""Pages at once, in each lane."""
SLOWER, SLOWEST = 4.0, 60.0
"""Calm pods are read this many times slower, up to so many seconds apart where the interval is not longer itself."""
LONGEST_WAIT, LONGEST_URGENT_WAIT = 600.0, 60.0
"""Seconds between two readings of a pod that does not answer."""
UNBELIEVABLE = 3
"""Pages in a row that say what cannot be, after which it is no accident."""
ABSENT = 4
"""Readings in a row in which Prometheus has nothing of a pod, after which it is no pod that has just begun."""
COSTS = 200.0
"""Times as long as its page took to be read, a pod is not read again: half a percent of a core for the most costly one."""
STALE = 5.0
"""Intervals after which a pod that does not answer counts for nothing."""


@dataclass(eq=False)
class Lane:
    """Pods, or resources, that are read at one pace."""

    longest_wait: float
    queue: WorkQueue = field(default_factory=WorkQueue)
    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))


@dataclass(eq=False)
class Pod:
    """A pod that is read."""

    owner: Key
    target: Target
    lane: Lane
    interval: float
    readings: Readings = field(default_factory=Readings)
    failures: int = 0
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
    cost: float = 0.0
    """Seconds that its latest large page took to be read."""

    @property
    def stale_after(self) -> float:
        """Seconds after which it counts for nothing."""
        return STALE * self.interval

    def wait(self) -> float:
        """Seconds until it is read again: so that it never takes more than a share of the processor."""
        longest = max(self.interval, self.lane.longest_wait)
        return max(COSTS * self.cost, float(min(longest, self.interval * 2.0 ** min(self.failures, 30))))


@dataclass(eq=False)
class Asked:
    """A resource whose metrics a Prometheus server has."""

    server: Prometheus
    lane: Lane
    interval: float
    shortest: float
    """The interval of a rollout: what the server's scrapes are held against."""
    failures: int = 0
    gap: float = 0.0
    """Seconds between the latest two scrapes of a pod, the least of all pods."""
    standing: Standing = field(default_factory=Standing)

    def wait(self) -> float:
        """Seconds until it is asked again."""
        longest = max(self.interval, self.lane.longest_wait)
        return float(min(longest, self.interval * 2.0 ** min(self.failures, 30)))


def note(name: Key, pod: Pod, outcome: str, told: str) -> None:
    """How a reading of the pod went."""
    pod.failures = 0 if outcome == "done" else pod.failures + 1
    pod.failed = told if pod.failures else ""
    if pod.failures == 1:
        _log.info("pod %s: %s", name, told)


def seen(asked: Asked, pods: Mapping[str, Pod], found: Mapping[str, Scrape | str]) -> tuple[str, str] | None:
    """What is wrong with what the server has: the kind of it, and the sentence."""
    for name, pod in pods.items():
        one = found[name]
        if isinstance(one, str) and pod.failures >= ABSENT:
            return "absent", f"pod {name} {one}"
    if asked.interval == asked.shortest and asked.gap > LATE * asked.shortest:
        told = (
            f"{asked.server.address} scrapes the pods each {asked.gap:.0f} s, and spec.metrics.interval is {asked.shortest:g} s"
        )
        return "sparse", f"{told}, by which blocks are counted: raise it to the time between two scrapes"
    return None


def share(name: Key) -> float:
    """A number from 0 to 1 that is the pod's own, so that pods are read at different moments."""
    return zlib.crc32(str(name).encode()) / 2**32
