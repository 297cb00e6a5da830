"""Traffic beside something else: at a mean rate or from a number of clients, from a thread of its own, cut into named stretches.

Guarantee: nothing new is sent after the end of the block, and requests that are open then are finished.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from aerie_lab.engine.load_generation.traffic import TrafficReport, TrafficTarget, run_closed_loop, run_open_loop
from aerie_lab.engine.load_generation.workload import (
    DEFAULT_TRAFFIC_CLASSES,
    LengthDistribution,
    PoissonArrivals,
    TrafficClass,
    Turn,
    generate_turns,
)

SHORT_TRAFFIC_CLASSES = tuple(
    replace(kind, prompt_lengths=LengthDistribution(200, 0.5), answer_lengths=LengthDistribution(40, 0.5), mean_turns=1.0)
    for kind in DEFAULT_TRAFFIC_CLASSES
)
"""Short requests of every class."""
_DRAWN_PER_SECOND = 100.0
"""Turns drawn per second for clients, who send them without regard to their times."""


@dataclass(frozen=True)
class Clients:
    """A number of clients, each of which sends its next request when its answer has ended: a constant number of requests."""

    count: int


class IntervalReport:
    """Outcomes of requests as they come, cut into named intervals."""

    def __init__(self) -> None:
        self.intervals: list[tuple[str, TrafficReport]] = []
        self.report = TrafficReport()
        """All of it, as answers come."""
        self._started_at = time.monotonic()

    def mark(self, name: str) -> None:
        """Call by a name what was answered since the last mark."""
        seconds = time.monotonic() - self._started_at - sum(report.seconds for _, report in self.intervals)
        self.intervals.append((name, TrafficReport(seconds, self.report.outcomes[self._reported_count() :])))

    def _complete_last_interval(self) -> None:
        """Add the requests that were still open at the last mark."""
        if self.intervals:
            name, last = self.intervals.pop()
            self.intervals.append((name, TrafficReport(last.seconds, self.report.outcomes[self._reported_count() :])))

    def _reported_count(self) -> int:
        return sum(len(report.outcomes) for _, report in self.intervals)


class BackgroundTraffic(IntervalReport):
    """Sends `load`, requests per second on average or clients, for at most `max_seconds`."""

    def __init__(
        self,
        target: TrafficTarget,
        load: float | Clients,
        classes: Sequence[TrafficClass] = SHORT_TRAFFIC_CLASSES,
        max_seconds: float = 7200.0,
    ) -> None:
        super().__init__()
        self._target, self._load, self._classes, self._max_seconds = target, load, classes, max_seconds
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._send, name="traffic", daemon=True)

    def __enter__(self) -> Self:
        self._started_at = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_event.set()
        self._thread.join(self._target.timeout_seconds)
        self._complete_last_interval()

    def _send(self) -> None:
        if isinstance(self._load, Clients):
            asyncio.run(run_closed_loop(self._target, self._generate_turns(_DRAWN_PER_SECOND), self._load.count, self.report))
        else:
            asyncio.run(run_open_loop(self._target, self._generate_turns(self._load), report=self.report))

    def _generate_turns(self, requests_per_second: float) -> Iterator[Turn]:
        for turn in generate_turns(self._classes, PoissonArrivals(requests_per_second), 0.0, self._max_seconds, seed=0):
            if self._stop_event.is_set() or time.monotonic() - self._started_at > self._max_seconds:
                return
            yield turn
