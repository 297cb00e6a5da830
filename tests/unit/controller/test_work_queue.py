"""The work queue: each key waits once, is processed by one worker, and is retried with back-off. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aerie.controller.work_queue import Backoff, NamespacedName, WorkQueue

Run = Callable[[Coroutine[Any, Any, None]], None]
A, B = NamespacedName("default", "a"), NamespacedName("default", "b")


def test_a_key_waits_once(run: Run) -> None:
    async def work() -> None:
        queue = WorkQueue()
        for key in (A, B, A, A):
            queue.add(key)
        assert len(queue) == 2
        assert [(await queue.get())[0] for _ in range(2)] == [A, B]

    run(work())


def test_key_added_while_processed_is_returned_once_afterwards(run: Run) -> None:
    async def work() -> None:
        queue = WorkQueue()
        queue.add(A)
        await queue.get()
        queue.add(A)
        queue.add(A)
        assert len(queue) == 0
        queue.done(A)
        assert (await queue.get())[0] == A
        queue.done(A)
        assert len(queue) == 0

    run(work())


def test_earliest_time_of_a_key_counts(run: Run) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        queue = WorkQueue()
        queue.add_after(A, 60)
        queue.add_after(A, 10)
        queue.add_after(A, 30)
        assert await queue.get() == (A, 0.0)
        assert loop.time() == 10
        queue.done(A)
        queue.add_after(B, 100)
        queue.add(B)
        await queue.get()
        assert loop.time() == 10
        queue.done(B)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.get(), 1000)  # neither A's later times nor B's are left

    run(work())


def test_failed_key_is_retried_with_back_off_until_forgotten(run: Run) -> None:
    async def work() -> None:
        queue = WorkQueue(Backoff(initial_seconds=1, max_seconds=5))
        queue.add(A)
        waits = []
        for _ in range(5):
            key, _ = await queue.get()
            waits.append(queue.add_rate_limited(key))
            queue.done(key)
        assert waits == [1, 2, 4, 5, 5]
        assert asyncio.get_running_loop().time() == 12
        queue.forget(A)
        assert queue.add_rate_limited(A) == 1

    run(work())


def test_resting_key_is_returned_once_after_its_rest(run: Run) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        queue = WorkQueue()
        queue.add(A)
        await queue.get()
        queue.add(A)  # while it is processed
        queue.done(A, rest_seconds=3.3)
        for _ in range(4):
            await asyncio.sleep(0.7)
            queue.add(A)
        queue.add_after(A, 60)
        queue.add(B)
        assert await queue.get() == (B, 0.0)
        queue.done(B)
        assert (await queue.get())[0] == A
        assert loop.time() == pytest.approx(3.3)
        queue.done(A)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.get(), 1000)
        queue.add(A)
        assert await queue.get() == (A, 0.0)

    run(work())


def test_get_returns_the_time_waited(run: Run) -> None:
    async def work() -> None:
        queue = WorkQueue()
        queue.add(A)
        await asyncio.sleep(3)
        assert await queue.get() == (A, 3.0)

    run(work())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # `run` has no state
@given(st.lists(st.tuples(st.sampled_from([A, B]), st.sampled_from(["add", "after", "failed"]), st.integers(0, 20)), max_size=30))
def test_nothing_that_was_added_is_lost(run: Run, steps: list[tuple[NamespacedName, str, int]]) -> None:
    async def work() -> None:
        queue, pending, running, worked = WorkQueue(), set(), set(), []

        async def worker() -> None:
            while True:
                key, _ = await queue.get()
                assert key not in running
                running.add(key)
                pending.discard(key)
                await asyncio.sleep(2)
                running.remove(key)
                worked.append(key)
                queue.done(key)

        workers = [asyncio.create_task(worker()) for _ in range(2)]
        for key, action, seconds in steps:
            pending.add(key)
            if action == "add":
                queue.add(key)
            elif action == "after":
                queue.add_after(key, seconds)
            else:
                queue.add_rate_limited(key)
            await asyncio.sleep(1)
        await asyncio.sleep(1000)
        assert not pending
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

    run(work())


def test_queue_is_empty_when_no_key_waits_or_is_processed(run: Run) -> None:
    async def work() -> None:
        queue = WorkQueue()
        await queue.wait_until_empty()
        queue.add(A)
        queue.add_after(B, 100)
        waiting = asyncio.create_task(queue.wait_until_empty())
        key, _ = await queue.get()
        queue.add(A)
        queue.done(key)
        await asyncio.sleep(1)
        assert not waiting.done(), "it was added again meanwhile"
        key, _ = await queue.get()
        await asyncio.sleep(1)
        assert not waiting.done()
        queue.done(key)
        await waiting
        assert asyncio.get_running_loop().time() < 100

    run(work())
