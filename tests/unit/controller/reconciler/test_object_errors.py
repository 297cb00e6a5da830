"""Errors of one object: a rejected write blocks no other, an object of another owner is left as it is, and both are reported."""

from __future__ import annotations

import copy

import pytest

from aerie.controller.kubernetes.client import ApiError
from tests.unit.controller.conftest import Run
from tests.unit.controller.operator_harness import CHAT, Operator, Server, start_settled_operator

KINDS = ("Service", "PodDisruptionBudget", "ConfigMap", "Job", "Deployment")
ERROR_MESSAGES = {
    404: "the server could not find the requested resource",
    409: "Apply failed with 1 conflict",
    422: "spec: Invalid value",
    429: "too many requests, please try again later",
    500: "failed calling webhook",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("status", ERROR_MESSAGES)
def test_apply_error_of_one_object_blocks_no_other(run: Run, kind: str, status: int) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        server = operator.server
        for item in [item for (object_kind, _), item in server.objects.items() if object_kind in KINDS and object_kind != "Job"]:
            # Without the annotation by which Aerie knows what it has applied.
            server._store({**item, "metadata": {**item["metadata"], "annotations": {}}})
        server.edit(replicas=3, rollout={"progressDeadline": "40m"})
        server.apply_errors[kind] = ApiError(status, "Reason", ERROR_MESSAGES[status])
        server.calls.clear()
        operator.deliver_events()
        await operator.list()
        is_temporary = status not in (404, 422)
        for _ in range(5):
            if is_temporary and kind != "Job":
                with pytest.raises(ApiError, match=ERROR_MESSAGES[status]):
                    await operator.reconciler.reconcile(CHAT)
                operator.reconciler.queue.add_rate_limited(CHAT)
            else:
                await operator.reconciler.reconcile(CHAT)
        applied = {call.split()[1] for call in server.writes if call.startswith("APPLY")}
        assert applied >= {"Service", "PodDisruptionBudget", "ConfigMap", "Deployment"}
        document = server.objects["SpeculativeDeployment", "chat"]
        degraded = next(condition for condition in document["status"]["conditions"] if condition["type"] == "Degraded")
        assert document["status"]["observedGeneration"] == document["metadata"]["generation"]
        if kind != "Job":  # no Job has to be created
            assert degraded["reason"] == "ApplyFailed"
            assert ERROR_MESSAGES[status] in degraded["message"]
        server.apply_errors.clear()
        await operator.settle()
        degraded = next(
            condition
            for condition in server.objects["SpeculativeDeployment", "chat"]["status"]["conditions"]
            if condition["type"] == "Degraded"
        )
        assert degraded["reason"] == "AsExpected"

    run(work())


@pytest.mark.parametrize("kind", KINDS)
def test_foreign_object_is_unchanged_and_reported(run: Run, kind: str) -> None:
    async def work() -> None:
        owner = await start_settled_operator()
        owned_object = next(item for (object_kind, _), item in owner.server.objects.items() if object_kind == kind)
        name = owned_object["metadata"]["name"]
        server = Server()
        server.edit()
        server._store({**owned_object, "metadata": {"name": name, "labels": {"team": "other"}}, "status": {}})
        before = copy.deepcopy({key: server.objects[kind, name][key] for key in ("spec", "data") if key in owned_object})
        operator = Operator(server)
        await operator.settle()
        foreign_object = server.objects[kind, name]
        assert foreign_object["metadata"]["labels"] == {"team": "other"}
        assert {key: foreign_object[key] for key in before} == before
        document = server.objects["SpeculativeDeployment", "chat"]
        degraded = next(condition for condition in document["status"]["conditions"] if condition["type"] == "Degraded")
        assert (degraded["status"], degraded["reason"]) == ("True", "NameTaken")
        assert degraded["message"].startswith(f"{kind} {name} ")
        assert not [call for call in server.writes if call in (f"APPLY {kind} {name}", f"DELETE {kind} {name}")]

    run(work())


def test_events_explain_a_job_without_pods(run: Run) -> None:
    async def work() -> None:
        server = Server()
        server.edit()
        operator = Operator(server)
        operator.deliver_events()
        await operator.reconciler.reconcile(CHAT)
        ((_, name),) = (object_key for object_key in server.objects if object_key[0] == "Job")
        job = server.objects["Job", name]
        server._store({**job, "metadata": {**job["metadata"], "creationTimestamp": "2026-01-01T00:00:00Z"}})
        notes = {"00:01": f'pods "{name}-bcdfg" is forbidden: exceeded', "00:00": "older"}
        server.events = [{"metadata": {}, "note": note, "deprecatedLastTimestamp": at} for at, note in notes.items()]
        operator.deliver_events()
        requeue_after = await operator.reconciler.reconcile(CHAT)
        status = server.objects["SpeculativeDeployment", "chat"]["status"]
        (preflight_condition,) = (condition for condition in status["conditions"] if condition["type"] == "PreflightPassed")
        assert (preflight_condition["status"], preflight_condition["reason"]) == ("Unknown", "FailedCreate")
        assert preflight_condition["message"].endswith(f'pods "{name}-..." is forbidden: exceeded')
        assert requeue_after is not None
        server.calls.clear()
        server.events[0]["note"] = f'pods "{name}-hjklm" is forbidden: exceeded'
        operator.deliver_events()
        await operator.reconciler.reconcile(CHAT)
        assert server.writes == [], "another attempt causes no write"

    run(work())
