"""Init containers: in order, each until it has succeeded, and before all other containers."""

from __future__ import annotations

from aerie_lab.testing import Namespace
from aerie_lab.testing.pods import find_container_status, pod, read_condition_status, read_termination_message, shell

MOUNT = {"volumeMounts": [{"name": "work", "mountPath": "/work"}]}
VOLUMES = [{"name": "work", "emptyDir": {}}]


def test_init_containers_run_in_order_and_restart_after_failure(namespace: Namespace) -> None:
    failing_once = "test -e /work/tried || { touch /work/tried; exit 3; }; echo second >> /work/order"
    namespace.apply(
        pod(
            "ordered",
            shell("cat /work/order > /dev/termination-log", **MOUNT),
            initContainers=[
                {"name": "first", **shell("echo first >> /work/order", **MOUNT)},
                {"name": "second", **shell(failing_once, **MOUNT)},
            ],
            volumes=VOLUMES,
            restartPolicy="OnFailure",
        )
    )
    ordered_pod = namespace.wait_until_phase("ordered", "Succeeded")
    assert read_termination_message(ordered_pod).split() == ["first", "second"]
    second = find_container_status(ordered_pod, "second")
    assert second["restartCount"] == 1
    assert second["lastState"]["terminated"]["exitCode"] == 3
    assert second["ready"]
    assert find_container_status(ordered_pod, "first")["state"]["terminated"]["reason"] == "Completed"
    assert read_condition_status(ordered_pod, "Initialized") == "True"


def test_a_failed_init_container_fails_a_pod_that_never_restarts(namespace: Namespace) -> None:
    namespace.apply(pod("failing", shell("true"), initContainers=[{"name": "setup", **shell("exit 7")}], restartPolicy="Never"))
    failed_pod = namespace.wait_until_phase("failing", "Failed")
    assert find_container_status(failed_pod, "setup")["state"]["terminated"]["exitCode"] == 7
    assert find_container_status(failed_pod)["state"]["waiting"]["reason"] == "PodInitializing"
    assert read_condition_status(failed_pod, "Initialized") == "False"
    assert read_condition_status(failed_pod, "Ready") == "False"
