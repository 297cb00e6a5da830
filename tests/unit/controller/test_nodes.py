"""Which nodes are asked for, how often, and what a refusal comes to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from aerie.controller.kubernetes import nodes
from aerie.controller.kubernetes.client import ApiError, Cluster, ObjectDict, ResourceKind
from aerie.controller.kubernetes.nodes import (
    FORBIDDEN_RETRY_SECONDS,
    MAX_CONCURRENT_NODE_READS,
    NODE_ERROR_RETRY_SECONDS,
    NODE_LABELS_TTL_SECONDS,
    NODES,
    NodeLabelCache,
)
from tests.unit.controller.served import served

Run = Callable[[Coroutine[Any, Any, None]], None]
A100 = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}


class Server(Cluster):
    """Nodes, of which `asked` were asked for."""

    def __init__(self) -> None:
        self.labels: dict[str, dict[str, str]] = {}
        self.asked: list[str] = []
        self.error: ApiError | None = None

    async def get_metadata(self, kind: ResourceKind, namespace: str | None, name: str) -> ObjectDict | None:
        assert (kind, namespace) == (NODES, None)
        self.asked.append(name)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return {"name": name, "labels": self.labels[name]} if name in self.labels else None


def test_each_node_is_asked_for_once_while_its_labels_are_valid(run: Run) -> None:
    async def work() -> None:
        server = Server()
        server.labels = {"a": {**A100, "kubernetes.io/hostname": "a"}}
        known = NodeLabelCache(server)
        assert await known.refresh(["a", "gone"])
        assert known.labels_by_node == {"a": A100, "gone": {}}
        assert not await known.refresh(["a", "gone"])
        assert server.asked == ["a", "gone"]
        await asyncio.sleep(NODE_LABELS_TTL_SECONDS + 1)
        assert not await known.refresh(["a"]), "nothing new"
        server.labels["a"] = {"nvidia.com/gpu.product": "H100"}
        await asyncio.sleep(NODE_LABELS_TTL_SECONDS + 1)
        assert await known.refresh(["a"])
        assert known.labels_by_node["a"] == {"nvidia.com/gpu.product": "H100"}

    run(work())


def test_a_refusal_is_told_once_and_nothing_is_asked_for_an_hour(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        server = Server()
        server.labels, known = {"a": A100}, NodeLabelCache(server)
        server.error = ApiError(403, "Forbidden", 'nodes "a" is forbidden')
        names = [f"n{at}" for at in range(40)]
        for _ in range(3):
            assert not await known.refresh(names)
        assert len(server.asked) == MAX_CONCURRENT_NODE_READS
        await asyncio.sleep(FORBIDDEN_RETRY_SECONDS + 1)
        assert not await known.refresh(names)
        assert known.labels_by_node == {}, "not known"
        assert [one.levelname for one in caplog.records] == ["WARNING"]
        assert "rbac.nodes" in caplog.text
        server.error = None
        await asyncio.sleep(FORBIDDEN_RETRY_SECONDS + 1)
        assert await known.refresh(["a"])
        assert "can be read now" in caplog.text

    with caplog.at_level(logging.INFO, logger=nodes.__name__):
        run(work())


@pytest.mark.parametrize("status", [None, 429, 500])
def test_an_api_server_that_does_not_answer_is_left_alone_and_what_was_known_stays(run: Run, status: int | None) -> None:
    async def work() -> None:
        server = Server()
        server.labels, known = {"a": A100}, NodeLabelCache(server)
        await known.refresh(["a"])
        await asyncio.sleep(NODE_LABELS_TTL_SECONDS + 1)
        server.error = ApiError(status, "Busy", "it is busy")
        assert not await known.refresh(["a"])
        assert not await known.refresh(["a"])
        assert (known.labels_by_node, len(server.asked)) == ({"a": A100}, 2)
        await asyncio.sleep(NODE_ERROR_RETRY_SECONDS + 1)
        await known.refresh(["a"])
        assert len(server.asked) == 3

    run(work())


def test_what_is_remembered_is_bounded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr(nodes, "MAX_CACHED_NODES", 3)
        known = NodeLabelCache(Server())
        await known.refresh(f"n{at}" for at in range(10))
        assert list(known.labels_by_node) == ["n7", "n8", "n9"]

    run(work())


def test_of_a_node_the_metadata_alone_is_asked_for() -> None:
    async def node(request: web.Request) -> web.Response:
        assert request.headers["Accept"] == "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
        if request.match_info["name"] == "gone":
            return web.json_response({"kind": "Status", "reason": "NotFound"}, status=404)
        return web.json_response({"kind": "PartialObjectMetadata", "metadata": {"name": "a", "labels": A100}})

    async def work() -> None:
        async with served("GET", "/api/v1/nodes/{name}", node) as address:
            cluster = Cluster(ApiClient(Configuration(host=address)))
            try:
                assert await cluster.get_metadata(NODES, None, "a") == {"name": "a", "labels": A100}
                assert await cluster.get_metadata(NODES, None, "gone") is None
            finally:
                await cluster.close()

    asyncio.run(work())
