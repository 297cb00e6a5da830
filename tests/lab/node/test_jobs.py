"""Jobs run to completion, or fail."""

from __future__ import annotations

from aerie_lab.testing import Namespace
from aerie_lab.testing.pods import Object, read_condition_status, shell


def job(name: str, script: str, **spec: object) -> Object:
    containers = [{"name": "main", **shell(script)}]
    template = {"spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": containers}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": {"template": template, **spec}}


def test_jobs_complete_and_fail(namespace: Namespace) -> None:
    namespace.apply(
        job("working", "true", completions=3, parallelism=2),
        job("hopeless", "exit 1", backoffLimit=0),
        job("late", "sleep 600", activeDeadlineSeconds=1),
    )
    finished_job = namespace.wait_until("job", "working", lambda j: read_condition_status(j, "Complete") == "True", "complete")
    assert finished_job["status"]["succeeded"] == 3
    finished_job = namespace.wait_until("job", "hopeless", lambda j: read_condition_status(j, "Failed") == "True", "failed")
    assert finished_job["status"]["failed"] == 1
    finished_job = namespace.wait_until("job", "late", lambda j: read_condition_status(j, "Failed") == "True", "failed")
    reasons = {c["type"]: c["reason"] for c in finished_job["status"]["conditions"]}
    assert reasons["Failed"] == "DeadlineExceeded"
    # Jobs and pods have finalizers, which must not block their deletion.
    namespace.kubectl("delete", "job", "working", "hopeless", "late", "--cascade=foreground", "--timeout=180s")
    assert namespace.list_all("pods") == []
