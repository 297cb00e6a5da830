"""Status and definition of another release: no field is lost, and Degraded names the skew."""

from __future__ import annotations

import asyncio
import copy
import logging
from typing import Any

import pytest

from aerie.api.crd import build_custom_resource_definition
from aerie.controller.kubernetes.client import ObjectDict
from tests.unit.controller.conftest import Run
from tests.unit.controller.operator_harness import CHAT, Operator, Server, get_condition, start_settled_operator

NEWER_STATUS_FIELDS = [
    ("phase", "Charming"),
    ("canary", {"revision": "x", "change": "y", "phase": "Charming", "startTime": "2026-11-21T12:00:00Z"}),
    (
        "rolloutHistory",
        [{"revision": "x", "change": "y", "result": "Adopted", "message": "z", "startTime": 1, "completionTime": 2}],
    ),
    ("replicas", "many"),
]


@pytest.mark.parametrize(("field", "value"), NEWER_STATUS_FIELDS)
def test_unreadable_status_of_another_release_is_preserved(run: Run, field: str, value: Any) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        server = operator.server
        item = server.objects["SpeculativeDeployment", "chat"]
        newer_status = {**item["status"], field: value, "novel": {"of": ["another", "release"]}}
        server._store({**item, "status": newer_status})
        server.edit(drafter={"source": {"persistentVolumeClaim": {"claimName": "models", "path": "other"}}})
        server.remove("Service", "chat")
        server.calls.clear()
        for _ in range(4):
            operator.deliver_events()
            await operator.reconciler.reconcile(CHAT)
        assert server.writes == ["STATUS"]
        status, reason, message = get_condition(server, "Degraded")
        assert (status, reason) == ("True", "VersionSkew")
        assert f"status.{field}" in message
        assert "install the operator" in message
        stored_status = server.objects["SpeculativeDeployment", "chat"]["status"]
        assert {name for name in newer_status if stored_status[name] != newer_status[name]} == {"conditions"}

    run(work())


def test_status_fields_of_a_newer_release_are_preserved(run: Run) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        server = operator.server
        item = copy.deepcopy(server.objects["SpeculativeDeployment", "chat"])
        for part in (item["status"], item["status"]["stable"], item["status"]["rolloutHistory"][0]):
            part["novel"] = {"of": "another release"}
        server._store(item)
        operator.deliver_events()
        server.calls.clear()
        await operator.reconciler.reconcile(CHAT)
        assert server.calls == []
        server.edit(replicas=3)
        await operator.settle()
        stored_status = server.objects["SpeculativeDeployment", "chat"]["status"]
        assert stored_status["stable"]["replicas"] == 3
        for part in (stored_status, stored_status["stable"], stored_status["rolloutHistory"][0]):
            assert part["novel"] == {"of": "another release"}

    run(work())


# ----------------------------------------------------------------------------------------------------------- an older definition
class ServerWithOldDefinition(Server):
    """An API server whose definition lacks status fields."""

    missing_fields: tuple[str, ...] = ("rolloutHistory", "selector")

    async def replace_status(self, resource: ObjectDict, status: ObjectDict) -> ObjectDict:
        return await super().replace_status(
            resource, {key: value for key, value in status.items() if key not in self.missing_fields}
        )

    async def request(self, verb: str, path: str, *_: Any, **__: Any) -> Any:
        assert (verb, path.rpartition("/")[2]) == ("GET", "speculativedeployments.aerie.dev")
        definition = build_custom_resource_definition()
        properties = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
        for field in self.missing_fields:
            del properties[field]
        return definition


def test_older_definition_is_logged_once_and_causes_no_repeated_writes(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        server = ServerWithOldDefinition()
        server.edit()
        operator = Operator(server)
        await operator.settle()
        status, reason, message = get_condition(server, "Degraded")
        assert (status, reason) == ("True", "VersionSkew")
        assert "status.rolloutHistory, status.selector: apply the definition of this release" in message
        metric = operator.reconciler.metrics.registry.get_sample_value
        assert metric("aerie_status_fields_dropped") == 2
        operator.deliver_events()
        server.calls.clear()
        for _ in range(3):
            await operator.reconciler.reconcile(CHAT)
        assert server.calls == []
        server.edit(replicas=3)
        await operator.settle()
        assert server.objects["SpeculativeDeployment", "chat"]["status"]["readyReplicas"] == 3, "reconciles continue"
        server.missing_fields = ()
        monitoring = asyncio.create_task(operator.reconciler.crd_monitor.run(server))
        await asyncio.sleep(1)
        await operator.settle()
        assert get_condition(server, "Degraded")[0] == "False"
        assert server.objects["SpeculativeDeployment", "chat"]["status"]["selector"]
        assert metric("aerie_status_fields_dropped") == 0
        monitoring.cancel()
        await asyncio.gather(monitoring, return_exceptions=True)

    with caplog.at_level(logging.WARNING):
        run(work())
    logged_levels = [record.levelname for record in caplog.records if "CustomResourceDefinition" in record.message]
    assert logged_levels == ["ERROR", "ERROR", "WARNING"], "the second field is written after the first one"


def test_older_definition_is_reported_before_the_first_write(run: Run) -> None:
    async def work() -> None:
        server = ServerWithOldDefinition()
        server.edit()
        operator = Operator(server)
        monitoring = asyncio.create_task(operator.reconciler.crd_monitor.run(server))
        await asyncio.sleep(1)
        operator.deliver_events()
        await operator.reconciler.reconcile(CHAT)
        assert get_condition(server, "Degraded")[:2] == ("True", "VersionSkew")
        monitoring.cancel()
        await asyncio.gather(monitoring, return_exceptions=True)

    run(work())
