"""How long runs of a container last, while a fault ends them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from aerie_lab.node.run_time_limit import RunTimeLimit


def runs(of: RunTimeLimit, then: Callable[[], None] = lambda: None, count: int = 1) -> list[float]:
    """Seconds of runs, one after the other; `then` is called a moment after the first has begun."""

    async def play() -> list[float]:
        asyncio.get_running_loop().call_later(0.05, then)
        durations = []
        for _ in range(count):
            began = time.monotonic()
            await asyncio.wait_for(of.wait_until_exceeded(), 5)
            durations.append(time.monotonic() - began)
        return durations

    return asyncio.run(play())


def test_each_run_lasts_for_as_long() -> None:
    span = RunTimeLimit()
    span.set(0.1)
    assert all(0.1 <= seconds < 2 for seconds in runs(span, count=3))


def test_a_limit_set_during_a_run_counts_from_its_start() -> None:
    span = RunTimeLimit()
    (seconds,) = runs(span, lambda: span.set(0.2))
    assert 0.2 <= seconds < 2
    other = RunTimeLimit()
    other.set(60)
    (seconds,) = runs(other, lambda: other.set(0.01))
    assert 0.05 <= seconds < 2, "it was set to less than the run had lasted for"


def test_without_bound_a_run_goes_on() -> None:
    span = RunTimeLimit()
    span.set(0.1)

    async def play() -> None:
        asyncio.get_running_loop().call_later(0.05, span.set, None)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(span.wait_until_exceeded(), 0.4)

    asyncio.run(play())
