"""Restart policies, back-off, exit codes and signals."""

from __future__ import annotations

import re

from aerie_lab.testing import Namespace
from aerie_lab.testing.pods import Object, find_container_status, pod, read_condition_status, shell


def read_back_off_seconds(status: Object) -> int:
    """Return the back-off in the message of a waiting container."""
    match = re.search(r"back-off (\d+)s", status["state"]["waiting"]["message"])
    assert match is not None
    return int(match[1])


def test_always_restarts_with_back_off(namespace: Namespace) -> None:
    namespace.apply(pod("crashing", shell("echo run; exit 5")))
    crashing_pod = namespace.wait_until(
        "pod",
        "crashing",
        lambda p: (
            find_container_status(p)["restartCount"] >= 2
            and find_container_status(p)["state"].get("waiting", {}).get("reason") == "CrashLoopBackOff"
            and read_back_off_seconds(find_container_status(p)) == min(2 ** (find_container_status(p)["restartCount"] - 1), 30)
        ),
        "CrashLoopBackOff of 2 s at two restarts, and of twice as long at each further one",
    )
    status = find_container_status(crashing_pod)
    assert crashing_pod["status"]["phase"] == "Running"
    assert status["lastState"]["terminated"]["exitCode"] == 5
    assert status["lastState"]["terminated"]["reason"] == "Error"
    assert read_condition_status(crashing_pod, "Ready") == "False"
    assert namespace.kubectl("logs", "crashing", "--previous").split() == ["run"]


def test_always_restarts_after_success_too(namespace: Namespace) -> None:
    namespace.apply(pod("repeating", shell("true")))
    restarted_pod = namespace.wait_until("pod", "repeating", lambda p: find_container_status(p)["restartCount"] >= 1, "restarted")
    assert find_container_status(restarted_pod)["lastState"]["terminated"]["reason"] == "Completed"


def test_on_failure_restarts_until_success(namespace: Namespace) -> None:
    script = "test -e /work/tried || { touch /work/tried; exit 9; }"
    namespace.apply(
        pod(
            "trying",
            shell(script, volumeMounts=[{"name": "work", "mountPath": "/work"}]),
            volumes=[{"name": "work", "emptyDir": {}}],
            restartPolicy="OnFailure",
        )
    )
    status = find_container_status(namespace.wait_until_phase("trying", "Succeeded"))
    assert status["restartCount"] == 1
    assert status["lastState"]["terminated"]["exitCode"] == 9
    assert status["state"]["terminated"]["reason"] == "Completed"


def test_with_policy_never_a_pod_keeps_its_terminated_state(namespace: Namespace) -> None:
    namespace.apply(
        pod("failing", shell("exit 3"), {"name": "other", **shell("true")}, restartPolicy="Never"),
        pod("killed", shell("sleep 600"), restartPolicy="Never"),
    )
    failed_pod = namespace.wait_until_phase("failing", "Failed")
    assert find_container_status(failed_pod)["state"]["terminated"]["exitCode"] == 3
    assert find_container_status(failed_pod, "other")["state"]["terminated"]["exitCode"] == 0
    assert {read_condition_status(failed_pod, kind) for kind in ("Ready", "ContainersReady", "PodReadyToStartContainers")} == {
        "False"
    }
    namespace.wait_until_ready("killed")
    namespace.faults.kill("killed", namespace=namespace.name)
    ended = find_container_status(namespace.wait_until_phase("killed", "Failed"))["state"]["terminated"]
    assert (ended["exitCode"], ended["signal"], ended["reason"]) == (137, 9, "Error")
