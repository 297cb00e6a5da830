"""Traffic beside something else: requests at a mean rate, from a thread of its own, cut into named stretches.

Guarantee: nothing new is sent after the end of the block, and requests that are open then are finished.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Self

from aerie_lab.engine.load_generation.traffic import TrafficReport, TrafficTarget, run_open_loop
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


class BackgroundTraffic:
    """Sends `requests_per_second` on average, for at most `max_seconds`."""

    def __init__(
        self,
        target: TrafficTarget,
        requests_per_second: float,
        classes: Sequence[TrafficClass] = SHORT_TRAFFIC_CLASSES,
        max_seconds: float = 7200.0,
    ) -> None:
        self.intervals: list[tuple[str, TrafficReport]] = []
        self.report = TrafficReport()
        """All of it, as answers come."""
        self._target, self._requests_per_second, self._classes, self._max_seconds = (
            target,
            requests_per_second,
            classes,
            max_seconds,
        )
        self._stop_event = threading.Event()
        self._started_at = 0.0
        self._thread = threading.Thread(target=self._send, name="traffic", daemon=True)

    def __enter__(self) -> Self:
        self._started_at = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_event.set()
        self._thread.join(self._target.timeout_seconds)
        if self.intervals:  # with the requests that were still open
            name, last = self.intervals.pop()
            self.intervals.append((name, TrafficReport(last.seconds, self.report.outcomes[self._reported_count() :])))

    def mark(self, name: str) -> None:
        """Call by a name what was answered since the last mark."""
        seconds = time.monotonic() - self._started_at - sum(report.seconds for _, report in self.intervals)
        self.intervals.append((name, TrafficReport(seconds, self.report.outcomes[self._reported_count() :])))

    def _reported_count(self) -> int:
        return sum(len(report.outcomes) for _, report in self.intervals)

    def _send(self) -> None:
        asyncio.run(run_open_loop(self._target, self._generate_turns(), report=self.report))

    def _generate_turns(self) -> Iterator[Turn]:
        for turn in generate_turns(self._classes, PoissonArrivals(self._requests_per_second), 0.0, self._max_seconds, seed=0):
            if self._stop_event.is_set():
                return
            yield turn
