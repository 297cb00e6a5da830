"""Reads of node labels: which nodes, how often, and the effect of a rejection."""

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
from tests.unit.controller.served import serve_http

Run = Callable[[Coroutine[Any, Any, None]], None]
A100 = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}


class Server(Cluster):
    """An API server with nodes; records the names that were requested."""

    def __init__(self) -> None:
        self.labels: dict[str, dict[str, str]] = {}
        self.requested_names: list[str] = []
        self.error: ApiError | None = None

    async def get_metadata(self, kind: ResourceKind, namespace: str | None, name: str) -> ObjectDict | None:
        assert (kind, namespace) == (NODES, None)
        self.requested_names.append(name)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return {"name": name, "labels": self.labels[name]} if name in self.labels else None


def test_node_is_read_once_while_its_labels_are_valid(run: Run) -> None:
    async def work() -> None:
        server = Server()
        server.labels = {"a": {**A100, "kubernetes.io/hostname": "a"}}
        label_cache = NodeLabelCache(server)
        assert await label_cache.refresh(["a", "gone"])
        assert label_cache.labels_by_node == {"a": A100, "gone": {}}
        assert not await label_cache.refresh(["a", "gone"])
        assert server.requested_names == ["a", "gone"]
        await asyncio.sleep(NODE_LABELS_TTL_SECONDS + 1)
        assert not await label_cache.refresh(["a"]), "nothing new"
        server.labels["a"] = {"nvidia.com/gpu.product": "H100"}
        await asyncio.sleep(NODE_LABELS_TTL_SECONDS + 1)
        assert await label_cache.refresh(["a"])
        assert label_cache.labels_by_node["a"] == {"nvidia.com/gpu.product": "H100"}

    run(work())


def test_forbidden_read_is_logged_once_and_retried_after_an_hour(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        server = Server()
        server.labels, label_cache = {"a": A100}, NodeLabelCache(server)
        server.error = ApiError(403, "Forbidden", 'nodes "a" is forbidden')
        names = [f"n{at}" for at in range(40)]
        for _ in range(3):
            assert not await label_cache.refresh(names)
        assert len(server.requested_names) == MAX_CONCURRENT_NODE_READS
        await asyncio.sleep(FORBIDDEN_RETRY_SECONDS + 1)
        assert not await label_cache.refresh(names)
        assert label_cache.labels_by_node == {}, "not known"
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "rbac.nodes" in caplog.text
        server.error = None
        await asyncio.sleep(FORBIDDEN_RETRY_SECONDS + 1)
        assert await label_cache.refresh(["a"])
        assert "can be read now" in caplog.text

    with caplog.at_level(logging.INFO, logger=nodes.__name__):
        run(work())


@pytest.mark.parametrize("status", [None, 429, 500])
def test_failed_read_is_retried_later_and_cached_labels_stay(run: Run, status: int | None) -> None:
    async def work() -> None:
        server = Server()
        server.labels, label_cache = {"a": A100}, NodeLabelCache(server)
        await label_cache.refresh(["a"])
        await asyncio.sleep(NODE_LABELS_TTL_SECONDS + 1)
        server.error = ApiError(status, "Busy", "it is busy")
        assert not await label_cache.refresh(["a"])
        assert not await label_cache.refresh(["a"])
        assert (label_cache.labels_by_node, len(server.requested_names)) == ({"a": A100}, 2)
        await asyncio.sleep(NODE_ERROR_RETRY_SECONDS + 1)
        await label_cache.refresh(["a"])
        assert len(server.requested_names) == 3

    run(work())


def test_number_of_cached_nodes_is_bounded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr(nodes, "MAX_CACHED_NODES", 3)
        label_cache = NodeLabelCache(Server())
        await label_cache.refresh(f"n{at}" for at in range(10))
        assert list(label_cache.labels_by_node) == ["n7", "n8", "n9"]

    run(work())


def test_only_metadata_of_a_node_is_requested() -> None:
    async def handle_node(request: web.Request) -> web.Response:
        assert request.headers["Accept"] == "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
        if request.match_info["name"] == "gone":
            return web.json_response({"kind": "Status", "reason": "NotFound"}, status=404)
        return web.json_response({"kind": "PartialObjectMetadata", "metadata": {"name": "a", "labels": A100}})

    async def work() -> None:
        async with serve_http("GET", "/api/v1/nodes/{name}", handle_node) as address:
            cluster = Cluster(ApiClient(Configuration(host=address)))
            try:
                assert await cluster.get_metadata(NODES, None, "a") == {"name": "a", "labels": A100}
                assert await cluster.get_metadata(NODES, None, "gone") is None
            finally:
                await cluster.close()

    asyncio.run(work())
