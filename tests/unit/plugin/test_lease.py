"""The dead man's switch, in virtual time."""

from __future__ import annotations

import asyncio
import itertools

from aerie_vllm.lease import MAX_RETRY_SECONDS, DeadMansSwitch, Lease
from tests.unit.plugin.conftest import Run


class Recorder:
    """What is called when a lease ends: it fails some times, and records when it was called."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.calls: list[tuple[float, str | None]] = []

    async def end(self, lease: Lease) -> None:
        self.calls.append((round(asyncio.get_running_loop().time(), 3), lease.digest))
        if self.failures > 0:
            self.failures -= 1
            raise RuntimeError("the engine is paused")


async def run_for(switch: DeadMansSwitch, seconds: float) -> None:
    task = asyncio.ensure_future(switch.run())
    await asyncio.sleep(seconds)
    task.cancel()


def test_a_lease_ends_once(run: Run) -> None:
    async def work() -> None:
        recorder = Recorder()
        switch = DeadMansSwitch("a drafter", recorder.end)
        switch.arm("a", 10)
        await run_for(switch, 100)
        assert recorder.calls == [(10, "a")]
        assert switch.lease is None

    run(work())


def test_a_renewed_lease_ends_later(run: Run) -> None:
    async def work() -> None:
        recorder = Recorder()
        switch = DeadMansSwitch("a drafter", recorder.end)
        task = asyncio.ensure_future(switch.run())
        await asyncio.sleep(5)
        for _ in range(5):
            switch.arm("a", 10)
            await asyncio.sleep(9)
        assert switch.compute_remaining_seconds() == 1
        await asyncio.sleep(20)
        switch.arm("b", 1)
        await asyncio.sleep(2)
        task.cancel()
        assert recorder.calls == [(51, "a"), (71, "b")]

    run(work())


def test_a_shorter_lease_replaces_a_longer_one(run: Run) -> None:
    async def work() -> None:
        recorder = Recorder()
        switch = DeadMansSwitch("a drafter", recorder.end)
        task = asyncio.ensure_future(switch.run())
        switch.arm("a", 1000)
        await asyncio.sleep(1)
        switch.arm("b", 2)
        await asyncio.sleep(10)
        task.cancel()
        assert recorder.calls == [(3, "b")]

    run(work())


def test_a_cleared_lease_does_not_end(run: Run) -> None:
    async def work() -> None:
        recorder = Recorder()
        switch = DeadMansSwitch("a drafter", recorder.end)
        task = asyncio.ensure_future(switch.run())
        switch.arm("a", 10)
        await asyncio.sleep(9.9)
        switch.clear()
        assert switch.compute_remaining_seconds() == 0
        await asyncio.sleep(100)
        task.cancel()
        assert recorder.calls == []

    run(work())


def test_a_failure_is_retried_with_back_off(run: Run) -> None:
    async def work() -> None:
        recorder = Recorder(failures=8)
        switch = DeadMansSwitch("a drafter", recorder.end)
        switch.arm("a", 1)
        await run_for(switch, 200)
        times = [time for time, _ in recorder.calls]
        assert [later - earlier for earlier, later in itertools.pairwise(times)] == [
            *(1, 2, 4, 8, 16),
            *[MAX_RETRY_SECONDS] * 3,
        ]
        assert switch.lease is None

    run(work())


def test_a_lease_that_is_replaced_between_retries(run: Run) -> None:
    async def work() -> None:
        recorder = Recorder(failures=3)
        switch = DeadMansSwitch("a drafter", recorder.end)
        task = asyncio.ensure_future(switch.run())
        switch.arm("a", 1)
        await asyncio.sleep(5)  # calls after 1, 2 and 4 s failed
        switch.arm("b", 10)
        await asyncio.sleep(100)
        task.cancel()
        assert recorder.calls == [(1, "a"), (2, "a"), (4, "a"), (15, "b")]

    run(work())
