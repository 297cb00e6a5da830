"""Turns are shared: many or slow keys of one owner delay no other owner."""

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
    """Return the resource of a pod: `a` for pod `a-3`."""
    return NamespacedName(key.namespace, key.name.partition("-")[0])


async def take_keys(queue: FairQueue, number: int) -> list[NamespacedName]:
    return [(await queue.get())[0] for _ in range(number)]


def test_namespaces_alternate_and_so_do_their_resources(run: Run) -> None:
    async def scenario() -> None:
        queue = FairQueue(owner, 100)
        for key in (
            *(NamespacedName("many", f"a-{n}") for n in range(50)),
            NamespacedName("many", "b-0"),
            NamespacedName("few", "c-0"),
            NamespacedName("few", "c-1"),
        ):
            queue.add(key)
        assert [str(key) for key in await take_keys(queue, 6)] == [
            "many/a-0",
            "few/c-0",
            "many/b-0",
            "few/c-1",
            "many/a-1",
            "many/a-2",
        ]
        assert len(queue) == 47

    run(scenario())


def test_turns_of_a_namespace_and_of_a_resource_are_bounded(run: Run) -> None:
    async def scenario() -> None:
        queue = FairQueue(owner, 4)
        for number in range(10):
            queue.add(NamespacedName("many", f"a-{number}"))
        first = await take_keys(queue, 2)
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(10)
        assert not waiting.done(), "a has two turns"
        queue.add(NamespacedName("many", "b-0"))
        assert (await waiting)[0] == NamespacedName("many", "b-0")
        for number in range(3):
            queue.add(NamespacedName("many", f"c-{number}"))
        assert await take_keys(queue, 1) == [NamespacedName("many", "c-0")]
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(10)
        assert not waiting.done(), "the namespace has four"
        queue.add(NamespacedName("few", "d-0"))
        assert (await waiting)[0] == NamespacedName("few", "d-0")
        waiting = asyncio.create_task(queue.get())
        queue.done(first[0])
        assert (await waiting)[0].namespace == "many"

    run(scenario())


def test_key_added_during_its_turn_is_returned_once_more(run: Run) -> None:
    async def scenario() -> None:
        queue = FairQueue(owner, 1)
        key = NamespacedName("one", "a-0")
        queue.add(key)
        assert await take_keys(queue, 1) == [key]
        queue.add(key)
        queue.add(key)
        queue.done(key)
        assert await take_keys(queue, 1) == [key]
        queue.done(key)
        assert len(queue) == 0

    run(scenario())


KEYS = st.builds(NamespacedName, st.sampled_from("xyz"), st.builds("{}-{}".format, st.sampled_from("abc"), st.integers(0, 5)))


@given(st.lists(st.tuples(st.sampled_from(["add", "get", "done"]), KEYS), max_size=80), st.integers(1, 5))
def test_limits_hold_and_every_key_gets_its_turn(steps: list[tuple[str, NamespacedName]], max_turns: int) -> None:
    async def scenario() -> None:
        queue, waiting, working = FairQueue(owner, max_turns), set(), []  # type: tuple[FairQueue, set[NamespacedName], list[NamespacedName]]
        for action, key in steps:
            if action == "add":
                queue.add(key)
                waiting.add(key)
            elif action == "get" and queue._ready:
                working += await take_keys(queue, 1)
                waiting.discard(working[-1])
                assert max(Counter(active_key.namespace for active_key in working).values()) <= max_turns
                assert max(Counter(map(owner, working)).values()) <= (max_turns + 1) // 2
            elif action == "done" and working:
                queue.done(working.pop(0))
        while working:
            queue.done(working.pop())
        while waiting:
            (key,) = await take_keys(queue, 1)
            waiting.remove(key)
            queue.done(key)
        assert len(queue) == 0

    run_virtually(scenario())
