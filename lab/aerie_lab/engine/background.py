"""Traffic beside something else: requests at a mean rate, from a thread of its own, cut into named stretches.

Guarantee: nothing new is sent after the end of the block, and what was under way then is waited for.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Self

from aerie_lab.engine.traffic import Report, Target, open_loop
from aerie_lab.engine.workload import DEFAULT_CLASSES, Lengths, Poisson, TrafficClass, Turn, turns

SHORT = tuple(replace(kind, prompt=Lengths(200, 0.5), answer=Lengths(40, 0.5), turns=1.0) for kind in DEFAULT_CLASSES)
"""Short requests of every class."""


class Background:
    """Requests, `rate` of them a second in the mean, for `most` seconds at most."""

    def __init__(self, target: Target, rate: float, kinds: Sequence[TrafficClass] = SHORT, most: float = 7200.0) -> None:
        self.stretches: list[tuple[str, Report]] = []
        self.report = Report()
        """All of it, as answers come."""
        self._target, self._rate, self._kinds, self._most = target, rate, kinds, most
        self._done = threading.Event()
        self._began = 0.0
        self._thread = threading.Thread(target=self._send, name="traffic", daemon=True)

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(self._target.timeout)
        if self.stretches:  # with what was still under way
            name, last = self.stretches.pop()
            self.stretches.append((name, Report(last.seconds, self.report.outcomes[self._told() :])))

    def mark(self, name: str) -> None:
        """Call by a name what was answered since the last mark."""
        seconds = time.monotonic() - self._began - sum(report.seconds for _, report in self.stretches)
        self.stretches.append((name, Report(seconds, self.report.outcomes[self._told() :])))

    def _told(self) -> int:
        return sum(len(report.outcomes) for _, report in self.stretches)

    def _send(self) -> None:
        asyncio.run(open_loop(self._target, self._turns(), report=self.report))

    def _turns(self) -> Iterator[Turn]:
        for turn in turns(self._kinds, Poisson(self._rate), 0.0, self._most, seed=0):
            if self._done.is_set():
                return
            yield turn
