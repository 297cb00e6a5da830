"""Preflights that cannot run, hang, or whose pod does not end: they are reported and retried, and results persist."""

from __future__ import annotations

import copy
import json
from datetime import timedelta
from typing import Any

import pytest

from aerie.manifests import preflight_job as preflight
from aerie.manifests.preflight_job import PreflightJobConfig
from aerie.rollout.plan import ReconcilePlan
from aerie.rollout.reconcile import build_reconcile_plan
from tests.golden import Messages
from tests.snapshots import replace_facts
from tests.unit.rollout.world import IMAGE, World, masked

PASSED = {"passed": True, "summary": "checked.", "errors": [], "warnings": ["⚠ C3 norms: a bit low."]}
REJECTED = {"passed": False, "summary": "no.", "errors": ["✗ C9 weights: torn."], "warnings": []}
HUB_ERROR = {"passed": None, "error": "the Hub does not answer"}


class Cluster(World):
    """A world in which the test creates the Job's pod."""

    def __init__(self) -> None:
        super().__init__()
        self.step()
        self.name = preflight.preflight_job_name("chat", self.desired_revision)

    @property
    def job(self) -> dict[str, Any]:
        return self.objects["Job", self.name]

    def pod(self, phase: str = "Pending", state: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
        self.job["metadata"].setdefault("creationTimestamp", self.now.isoformat())
        statuses = [{"name": "preflight", "image": "aerie:1", "state": state}] if state else []
        metadata = {
            "name": f"{self.name}-x",
            "labels": self.job["spec"]["template"]["metadata"]["labels"],
            "creationTimestamp": self.now.isoformat(),
            "ownerReferences": [{"controller": True, "uid": self.job["metadata"]["uid"]}],
        }
        self.checks[:] = [
            {"kind": "Pod", "metadata": metadata, "status": {"phase": phase, "containerStatuses": statuses, **status}}
        ]
        return self.checks[0]

    def finish_container(self, result: dict[str, Any], phase: str = "Running") -> None:
        """End the container with this message; another container of the pod keeps running."""
        code = {True: 0, False: 1, None: 2}[result["passed"]]
        ended = {"exitCode": code, "message": json.dumps(result), "startedAt": self.now.isoformat()}
        self.pod(phase, {"terminated": ended})

    def fail_job(self, reason: str = "BackoffLimitExceeded") -> None:
        moment = self.now.isoformat()
        failed = {"type": "Failed", "status": "True", "lastTransitionTime": moment, "reason": reason, "message": "it has failed"}
        self.job["status"] = {"conditions": [failed]}

    def reconcile(self, **observed: Any) -> ReconcilePlan:
        plan = build_reconcile_plan(replace_facts(self.observed(), **observed), IMAGE, self.now, self.catalog)
        self.document["status"] = plan.status.to_dict()
        return plan


@pytest.mark.parametrize(("result", "phase"), [(PASSED, "Starting"), (REJECTED, "Failed")])
def test_result_counts_while_other_containers_run(result: dict[str, Any], phase: str) -> None:
    cluster = Cluster()
    cluster.finish_container(result)
    cluster.step()
    assert cluster.status["phase"] == phase


@pytest.mark.parametrize(("result", "status", "text"), [(PASSED, "True", "C3 norms"), (REJECTED, "False", "C9 weights: torn.")])
def test_result_outlives_its_pod(result: dict[str, Any], status: str, text: str) -> None:
    cluster = Cluster()
    cluster.finish_container(result)
    cluster.step()
    cluster.checks.clear()  # a user cleans up, or the Job's deadline ends a pod whose other container still runs
    cluster.fail_job("DeadlineExceeded")
    cluster.now += timedelta(hours=7)
    cluster.step()
    assert cluster.condition("PreflightPassed")[0] == status
    assert text in cluster.message("PreflightPassed")
    assert ("Job", cluster.name) in cluster.objects


def test_deleted_job_is_recreated() -> None:
    cluster = Cluster()
    cluster.finish_container(REJECTED)
    cluster.step()
    old = copy.deepcopy(cluster.checks)
    del cluster.objects["Job", cluster.name]
    cluster.step()
    cluster.step()
    assert cluster.checks == old, "its pod has not gone yet"
    assert cluster.condition("PreflightPassed") == ("Unknown", "Preflight"), "another Job's result does not count"
    cluster.finish_container(PASSED)
    cluster.step()
    assert cluster.status["phase"] == "Starting"


@pytest.mark.parametrize(
    ("status", "reason", "text"),
    [
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]},
            "Unschedulable",
            "0/3 nodes are available",
        ),
        (
            {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "pull access denied"}}},
            "ImagePullBackOff",
            "pull access denied",
        ),
        (
            {"state": {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "hub" not found'}}},
            "CreateContainerError",
            'secret "hub" not found',
        ),
    ],
)
def test_reason_of_waiting_pod_is_shown_until_it_runs(status: dict[str, Any], reason: str, text: str) -> None:
    cluster = Cluster()
    cluster.pod(**status)
    cluster.step()
    assert cluster.condition("PreflightPassed") == ("Unknown", reason)
    assert text in cluster.message("PreflightPassed")
    assert text in cluster.message("Progressing")
    cluster.now += timedelta(hours=3)
    plan = cluster.step()
    assert (plan.objects_to_apply, plan.objects_to_delete, plan.events) == ((), (), ()), (
        "Kubernetes retries, and nothing has changed"
    )
    cluster.finish_container(PASSED, "Succeeded")
    cluster.step()
    assert cluster.status["phase"] == "Starting"


def test_pod_creation_error_is_shown() -> None:
    cluster = Cluster()
    cluster.job["metadata"]["creationTimestamp"] = cluster.now.isoformat()
    plan = cluster.reconcile()
    assert plan.requeue_after is not None
    assert plan.requeue_after <= timedelta(seconds=10), "no event of a Job is watched"
    cluster.now += plan.requeue_after
    cluster.reconcile()
    assert cluster.condition("PreflightPassed") == ("Unknown", "FailedCreate"), "for this the Job's events are read"
    message = 'pods "..." is forbidden: violates PodSecurity "restricted:latest"'
    plan = cluster.reconcile(job_creation_errors={cluster.name: message})
    assert cluster.condition("PreflightPassed") == ("Unknown", "FailedCreate")
    assert message in cluster.message("PreflightPassed")
    cluster.now += timedelta(hours=2)
    plan = cluster.reconcile(job_creation_errors={cluster.name: message})
    assert not plan.objects_to_delete
    assert plan.requeue_after == timedelta(minutes=1)


def test_job_retry_delay_grows_up_to_an_hour() -> None:
    cluster, delays = Cluster(), []
    for _ in range(7):
        cluster.finish_container(HUB_ERROR, "Failed")
        cluster.fail_job()
        plan = cluster.step()
        assert cluster.condition("PreflightPassed") == ("Unknown", "PreflightError")
        assert "the Hub does not answer" in cluster.message("PreflightPassed")
        assert plan.requeue_after is not None
        delays.append(plan.requeue_after)
        assert cluster.step().requeue_after == plan.requeue_after, "an error is counted once"
        cluster.checks.clear()
        cluster.now += plan.requeue_after - timedelta(seconds=1)
        cluster.step()
        assert ("Job", cluster.name) in cluster.objects
        cluster.now += timedelta(seconds=1)
        cluster.step()
        assert ("Job", cluster.name) not in cluster.objects
        cluster.step()
    assert [delay.total_seconds() / 60 for delay in delays] == [5, 10, 20, 40, 60, 60, 60]
    cluster.finish_container(PASSED)
    cluster.step()
    assert cluster.status["phase"] == "Starting"


def test_job_that_waited_for_hours_is_recreated_immediately() -> None:
    cluster = Cluster()
    cluster.fail_job("DeadlineExceeded")
    cluster.step()
    assert ("Job", cluster.name) not in cluster.objects


@pytest.mark.parametrize("state", ["running", "terminated"])
def test_hanging_container_is_ended(state: str) -> None:
    """The volume hangs; or the Hub could not be read, and another container keeps the pod from ending."""
    cluster = Cluster()
    started = {"startedAt": cluster.now.isoformat()}
    cluster.pod(
        "Running", {state: started | ({"exitCode": 2, "message": json.dumps(HUB_ERROR)} if state == "terminated" else {})}
    )
    plan = cluster.step()
    assert plan.requeue_after == timedelta(minutes=30)
    cluster.now += timedelta(minutes=30)
    plan = cluster.step()
    assert cluster.condition("PreflightPassed") == ("Unknown", "PreflightError")
    assert plan.requeue_after == timedelta(minutes=5)
    cluster.now += timedelta(minutes=5)
    cluster.step()
    assert ("Job", cluster.name) not in cluster.objects


def test_exit_of_container_without_message_is_shown(messages: Messages) -> None:
    cluster = Cluster()
    cluster.pod("Failed", {"terminated": {"exitCode": 137, "reason": "OOMKilled", "startedAt": cluster.now.isoformat()}})
    cluster.fail_job()
    cluster.step()
    messages.check("a container that was killed", cluster.message("PreflightPassed"))


def test_running_canary_has_passed_without_its_job() -> None:
    cluster = Cluster()
    cluster.finish_container(PASSED)
    cluster.step()
    assert cluster.status["phase"] == "Starting"
    cluster.checks.clear()
    cluster.objects["ConfigMap", cluster.name]["data"].pop(preflight.RESULT_KEY)
    cluster.fail_job()
    cluster.step()
    assert cluster.condition("PreflightPassed") == ("True", "Passed")


def test_waiting_job_is_recreated_with_current_configuration() -> None:
    cluster = Cluster()
    cluster.pod(state={"waiting": {"reason": "ImagePullBackOff", "message": "pull access denied"}})
    cluster.step()
    configuration = PreflightJobConfig(IMAGE.image, ("registry",))
    plan = build_reconcile_plan(cluster.observed(), configuration, cluster.now, cluster.catalog)
    assert [(item.kind, item.name) for item in plan.objects_to_delete] == [("Job", cluster.name)]
    cluster.finish_container(PASSED)
    plan = build_reconcile_plan(cluster.observed(), configuration, cluster.now, cluster.catalog)
    assert not plan.objects_to_delete, "its result counts"


# -- denials by the Hub --------------------------------------------------------------------------------------------------

DENIED = {"passed": None, "hubRejected": True, "error": "me/model answered HTTP 403: the token may not read it."}


def test_hub_denial_rejects_and_is_retried_with_backoff() -> None:
    cluster, delays = Cluster(), []
    for _ in range(6):
        cluster.finish_container(DENIED, "Failed")
        cluster.fail_job("PodFailurePolicy")
        plan = cluster.step()
        assert cluster.condition("PreflightPassed") == ("False", "PreflightFailed")
        assert cluster.message("PreflightPassed").startswith(str(DENIED["error"]))
        assert f"Job {cluster.name}" in cluster.message("PreflightPassed")
        assert cluster.status["phase"] == "Failed"
        assert plan.requeue_after is not None
        delays.append(plan.requeue_after.total_seconds() / 60)
        cluster.checks.clear()
        cluster.now += plan.requeue_after
        cluster.step()
        assert ("Job", cluster.name) not in cluster.objects
        cluster.step()
    assert delays == [5, 10, 20, 40, 60, 60]
    cluster.finish_container(PASSED)
    cluster.step()
    assert cluster.status["phase"] == "Starting"


# -- spec.rollout.preflight ----------------------------------------------------------------------------------------------

CHECKED = {**REJECTED, "failedChecks": ["C2", "C9"]}


def edit_preflight(cluster: Cluster, **preflight: Any) -> None:
    cluster.edit(rollout={"preflight": preflight})


def read_result(cluster: Cluster) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(cluster.objects["ConfigMap", cluster.name]["data"][preflight.RESULT_KEY])
    return result


def test_accepted_checks_let_a_rejected_revision_continue(messages: Messages) -> None:
    cluster = Cluster()
    cluster.finish_container(CHECKED)
    cluster.step()
    job = cluster.job["metadata"]["uid"]
    edit_preflight(cluster, acceptedChecks=["C2"])
    cluster.step()
    assert cluster.condition("PreflightPassed") == ("False", "PreflightFailed"), "C9 is not accepted"
    edit_preflight(cluster, acceptedChecks=["C2", "C9", "C11"])
    cluster.step()
    assert cluster.condition("PreflightPassed") == ("True", "PreflightAccepted")
    messages.check("accepted checks", masked(cluster.message("PreflightPassed")))
    assert cluster.status["phase"] == "Starting"
    assert (read_result(cluster)["acceptedChecks"], read_result(cluster)["failedChecks"]) == (["C2", "C9"], ["C2", "C9"])
    assert cluster.job["metadata"]["uid"] == job, "the same result"


def test_unreadable_files_cannot_be_accepted() -> None:
    cluster = Cluster()
    cluster.finish_container({**REJECTED, "failedChecks": []})
    edit_preflight(cluster, acceptedChecks=["C2", "C9"])
    cluster.step()
    assert cluster.condition("PreflightPassed") == ("False", "PreflightFailed")


@pytest.mark.parametrize("result", [CHECKED, {**REJECTED, "failedChecks": []}, HUB_ERROR, DENIED])
def test_mode_warn_ignores_failed_preflight(result: dict[str, Any]) -> None:
    cluster = Cluster()
    edit_preflight(cluster, mode="Warn")
    cluster.step()
    assert cluster.condition("PreflightPassed") == ("Unknown", "Preflight"), "preflight runs first"
    cluster.finish_container(result, "Failed")
    cluster.fail_job()
    cluster.step()
    assert cluster.condition("PreflightPassed") == ("True", "PreflightWarned")
    assert str(result.get("error") or result["errors"][0]) in cluster.message("PreflightPassed")
    assert cluster.status["phase"] == "Starting"
    assert read_result(cluster)["mode"] == "Warn"


def test_mode_off_has_no_job_and_a_permanent_condition() -> None:
    cluster = Cluster()
    cluster.pod("Running", {"running": {"startedAt": cluster.now.isoformat()}})
    edit_preflight(cluster, mode="Off")
    cluster.step()
    assert cluster.condition("PreflightPassed") == ("Unknown", "Skipped")
    assert cluster.status["phase"] == "Starting"
    assert ("Job", cluster.name) not in cluster.objects, "a running one is ended"
    cluster.step()
    assert ("Job", cluster.name) not in cluster.objects
    assert read_result(cluster)["mode"] == "Off"
    edit_preflight(cluster, mode="Enforce")
    cluster.step()
    assert cluster.condition("PreflightPassed") == ("Unknown", "Skipped")


@pytest.mark.parametrize("fields", [{"mode": "Off"}, {"mode": "Warn"}, {"acceptedChecks": ["C9"]}, {"mode": "Enforce"}])
def test_mode_change_keeps_a_passed_revision(fields: dict[str, Any]) -> None:
    cluster = Cluster()
    cluster.finish_container(PASSED)
    cluster.step()
    edit_preflight(cluster, **fields)
    plan = cluster.reconcile()
    assert [item["kind"] for item in plan.objects_to_apply] == []
    assert plan.objects_to_delete == ()
    assert cluster.condition("PreflightPassed") == ("True", "Passed")
