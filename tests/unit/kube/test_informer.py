"""The informer reports every change, whether it received the event or a later list shows it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aerie_lab.errors import KubeError
from aerie_lab.kube.informer import Informer


def item(name: str, uid: str, version: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "n", "uid": uid, "resourceVersion": str(version)}}


Round = tuple[list[dict[str, Any]], list[tuple[str, dict[str, Any]]]]
"""The objects of a list, and the events that follow it."""


class Server:
    """A client that returns one list after the other, and the events between them."""

    def __init__(self, *rounds: Round) -> None:
        self.rounds = list(rounds)
        self.done = asyncio.Event()

    async def get(self, _where: str, **_query: str) -> Any:
        if not self.rounds:
            self.done.set()
            await asyncio.Event().wait()
        items = self.rounds[0][0]
        return {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}

    async def watch(self, _where: str, _version: str, **_query: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        for event in self.rounds.pop(0)[1]:
            yield event
        raise KubeError(410, "Expired", "too old")


def collect_events(*rounds: Round) -> list[tuple[str, str]]:
    async def run() -> list[tuple[str, str]]:
        events: list[tuple[str, str]] = []
        server = Server(*rounds)

        def record(kind: str, item: dict[str, Any]) -> None:
            events.append((kind, item["metadata"]["uid"]))
            if item["metadata"]["name"] == "cursed":
                raise RuntimeError("a defect")

        following = asyncio.create_task(Informer(server, "/api/v1/pods", record).run())  # type: ignore[arg-type]
        await asyncio.wait_for(server.done.wait(), 10)
        following.cancel()
        return events

    return asyncio.run(run())


def test_a_second_list_gives_events_for_its_differences() -> None:
    first: Round = ([item("a", "1", 1), item("b", "2", 1), item("c", "3", 1)], [])
    second: Round = ([item("a", "1", 1), item("b", "2", 5)], [])
    assert collect_events(first, second) == [("ADDED", "1"), ("ADDED", "2"), ("ADDED", "3"), ("DELETED", "3"), ("MODIFIED", "2")]


def test_an_object_with_another_uid_is_deleted_and_added() -> None:
    assert collect_events(([item("a", "1", 1)], []), ([item("a", "2", 9)], [])) == [
        ("ADDED", "1"),
        ("DELETED", "1"),
        ("ADDED", "2"),
    ]


def test_watch_events_are_reported() -> None:
    events = [("ADDED", item("b", "2", 2)), ("BOOKMARK", item("", "", 3)), ("DELETED", item("a", "1", 4))]
    assert collect_events(([item("a", "1", 1)], events)) == [("ADDED", "1"), ("ADDED", "2"), ("DELETED", "1")]


def test_an_error_for_one_object_does_not_hide_the_others(caplog: pytest.LogCaptureFixture) -> None:
    assert collect_events(([item("cursed", "1", 1), item("b", "2", 1)], [])) == [("ADDED", "1"), ("ADDED", "2")]
    assert "a defect" in caplog.text
