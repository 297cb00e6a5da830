"""The status of a pod as a whole: conditions, gates, deadlines, pods without a process, and no write without a change."""

from __future__ import annotations

import json
import time

from aerie_lab.testing import Namespace
from aerie_lab.testing.pods import echo, find_container_status, pod, read_condition_status, shell


def test_readiness_gates(namespace: Namespace) -> None:
    namespace.apply(pod("gated", echo(), readinessGates=[{"conditionType": "aerie.dev/warm"}]))
    gated_pod = namespace.wait_until(
        "pod", "gated", lambda p: read_condition_status(p, "ContainersReady") == "True", "containers ready"
    )
    assert read_condition_status(gated_pod, "Ready") == "False"
    assert next(c for c in gated_pod["status"]["conditions"] if c["type"] == "Ready")["reason"] == "ReadinessGatesNotReady"
    patch = json.dumps({"status": {"conditions": [{"type": "aerie.dev/warm", "status": "True"}]}})
    namespace.kubectl("patch", "pod", "gated", "--subresource=status", "--type=strategic", "-p", patch)
    gated_pod = namespace.wait_until_ready("gated")
    assert read_condition_status(gated_pod, "aerie.dev/warm") == "True"


def test_conditions_and_phases(namespace: Namespace) -> None:
    namespace.apply(pod("brief", shell("true"), restartPolicy="Never"), pod("lasting", echo()))
    lasting_pod = namespace.wait_until_ready("lasting")
    kinds = ("PodScheduled", "PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready")
    assert {kind: read_condition_status(lasting_pod, kind) for kind in kinds} == dict.fromkeys(kinds, "True")
    status = lasting_pod["status"]
    assert status["hostIP"]
    assert status["podIPs"] == [{"ip": status["podIP"]}]
    main = find_container_status(lasting_pod)
    assert main["containerID"].startswith("lab://")
    assert (main["ready"], main["started"], main["restartCount"]) == (True, True, 0)
    brief_pod = namespace.wait_until_phase("brief", "Succeeded")
    done = {c["type"]: (c["status"], c.get("reason")) for c in brief_pod["status"]["conditions"]}
    assert done["Ready"] == done["ContainersReady"] == ("False", "PodCompleted")
    assert done["Initialized"] == ("True", "PodCompleted")


def test_an_active_deadline_ends_a_pod(namespace: Namespace) -> None:
    namespace.apply(pod("limited", shell("sleep 600"), activeDeadlineSeconds=15))
    namespace.wait_until_phase("limited", "Running")
    failed_pod = namespace.wait_until_phase("limited", "Failed")
    assert failed_pod["status"]["reason"] == "DeadlineExceeded"
    assert find_container_status(failed_pod)["state"]["terminated"]["exitCode"] == 137


def test_a_pod_without_a_process(namespace: Namespace) -> None:
    namespace.apply(
        pod(
            "hollow",
            {"image": "example.org/anything"},
            initContainers=[{"name": "setup", "image": "example.org/anything"}],
            metadata={"annotations": {"lab.aerie.dev/processless": "true"}},
        )
    )
    ready_pod = namespace.wait_until_ready("hollow")
    assert ready_pod["status"]["phase"] == "Running"
    assert ready_pod["status"]["podIP"]
    assert not [c for c in namespace.lab.call_agent("containers") if c["namespace"] == namespace.name]
    namespace.kubectl("delete", "pod", "hollow", "--timeout=180s")


def test_an_unchanged_status_is_not_written(namespace: Namespace) -> None:
    probe = {"exec": {"command": ["true"]}, "periodSeconds": 1, "timeoutSeconds": 30}
    namespace.apply(pod("steady", echo(readinessProbe=probe, livenessProbe=probe)))
    namespace.wait_until_ready("steady")
    before = {p["metadata"]["name"]: p["metadata"]["resourceVersion"] for p in namespace.list_all("pods")}
    # A label changes the object and not the status: the agent must reconcile and write nothing.
    namespace.kubectl("label", "pod", "steady", "colour=green")
    labelled = namespace.get("pod", "steady")["metadata"]["resourceVersion"]
    assert labelled != before["steady"]
    time.sleep(2.5)  # several periods of both probes: no write must come
    assert namespace.get("pod", "steady")["metadata"]["resourceVersion"] == labelled
