"""Turns are shared: whoever has many keys or slow ones keeps nobody else waiting."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aerie.controller.fair_queue import FairQueue
from aerie.controller.work_queue import NamespacedName

from .conftest import run_virtually

Run = Callable[[Coroutine[Any, Any, None]], None]


def owner(key: NamespacedName) -> NamespacedName:
    """Of pod `a-3` the resource `a`."""
    return NamespacedName(key.namespace, key.name.partition("-")[0])


async def taken(queue: FairQueue, number: int) -> list[NamespacedName]:
    return [(await queue.get())[0] for _ in range(number)]


def test_namespaces_take_turns_and_in_each_its_resources(run: Run) -> None:
    async def story() -> None:
        queue = FairQueue(owner, 100)
        for key in (
            *(NamespacedName("many", f"a-{n}") for n in range(50)),
            NamespacedName("many", "b-0"),
            NamespacedName("few", "c-0"),
            NamespacedName("few", "c-1"),
        ):
            queue.add(key)
        assert [str(key) for key in await taken(queue, 6)] == [
            "many/a-0",
            "few/c-0",
            "many/b-0",
            "few/c-1",
            "many/a-1",
            "many/a-2",
        ]
        assert len(queue) == 47

    run(story())


def test_a_namespace_has_so_many_turns_at_a_time_and_a_resource_half_of_them(run: Run) -> None:
    async def story() -> None:
        queue = FairQueue(owner, 4)
        for number in range(10):
            queue.add(NamespacedName("many", f"a-{number}"))
        first = await taken(queue, 2)
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(10)
        assert not waiting.done(), "a has two turns"
        queue.add(NamespacedName("many", "b-0"))
        assert (await waiting)[0] == NamespacedName("many", "b-0")
        for number in range(3):
            queue.add(NamespacedName("many", f"c-{number}"))
        assert await taken(queue, 1) == [NamespacedName("many", "c-0")]
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(10)
        assert not waiting.done(), "the namespace has four"
        queue.add(NamespacedName("few", "d-0"))
        assert (await waiting)[0] == NamespacedName("few", "d-0")
        waiting = asyncio.create_task(queue.get())
        queue.done(first[0])
        assert (await waiting)[0].namespace == "many"

    run(story())


def test_a_key_that_was_added_during_its_turn_comes_back_once(run: Run) -> None:
    async def story() -> None:
        queue = FairQueue(owner, 1)
        key = NamespacedName("one", "a-0")
        queue.add(key)
        assert await taken(queue, 1) == [key]
        queue.add(key)
        queue.add(key)
        queue.done(key)
        assert await taken(queue, 1) == [key]
        queue.done(key)
        assert len(queue) == 0

    run(story())


KEYS = st.builds(NamespacedName, st.sampled_from("xyz"), st.builds("{}-{}".format, st.sampled_from("abc"), st.integers(0, 5)))


@given(st.lists(st.tuples(st.sampled_from(["add", "get", "done"]), KEYS), max_size=80), st.integers(1, 5))
def test_whatever_happens_limits_hold_and_every_key_gets_its_turn(steps: list[tuple[str, NamespacedName]], each: int) -> None:
    async def story() -> None:
        queue, waiting, working = FairQueue(owner, each), set(), []  # type: tuple[FairQueue, set[NamespacedName], list[NamespacedName]]
        for word, key in steps:
            if word == "add":
                queue.add(key)
                waiting.add(key)
            elif word == "get" and queue._ready:
                working += await taken(queue, 1)
                waiting.discard(working[-1])
                assert max(Counter(one.namespace for one in working).values()) <= each
                assert max(Counter(map(owner, working)).values()) <= (each + 1) // 2
            elif word == "done" and working:
                queue.done(working.pop(0))
        while working:
            queue.done(working.pop())
        while waiting:
            (key,) = await taken(queue, 1)
            waiting.remove(key)
            queue.done(key)
        assert len(queue) == 0

    run_virtually(story())
