"""Duration of the runs of a container that a fault ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from aerie_lab.node.run_time_limit import RunTimeLimit


def measure_runs(of: RunTimeLimit, then: Callable[[], None] = lambda: None, count: int = 1) -> list[float]:
    """Return the seconds of consecutive runs; `then` is called 0.05 s after the first has begun."""

    async def measure() -> list[float]:
        asyncio.get_running_loop().call_later(0.05, then)
        durations = []
        for _ in range(count):
            began = time.monotonic()
            await asyncio.wait_for(of.wait_until_exceeded(), 5)
            durations.append(time.monotonic() - began)
        return durations

    return asyncio.run(measure())


def test_each_run_lasts_until_the_limit() -> None:
    limit = RunTimeLimit()
    limit.set(0.1)
    assert all(0.1 <= seconds < 2 for seconds in measure_runs(limit, count=3))


def test_a_limit_set_during_a_run_counts_from_its_start() -> None:
    limit = RunTimeLimit()
    (seconds,) = measure_runs(limit, lambda: limit.set(0.2))
    assert 0.2 <= seconds < 2
    shortened_limit = RunTimeLimit()
    shortened_limit.set(60)
    (seconds,) = measure_runs(shortened_limit, lambda: shortened_limit.set(0.01))
    assert 0.05 <= seconds < 2, "it was set to less than the run had lasted for"


def test_a_removed_limit_does_not_end_a_run() -> None:
    limit = RunTimeLimit()
    limit.set(0.1)

    async def measure() -> None:
        asyncio.get_running_loop().call_later(0.05, limit.set, None)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(limit.wait_until_exceeded(), 0.4)

    asyncio.run(measure())
