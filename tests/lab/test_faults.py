"""Each fault has its effect, and its repair reverts it."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from aerie_lab.cluster import Lab
from aerie_lab.errors import LabError, StateError
from aerie_lab.faults import FaultInjector
from aerie_lab.testing import Namespace, wait_until
from aerie_lab.testing.namespace import is_ready

POD = """
apiVersion: v1
kind: Pod
metadata: {name: echo, labels: {app: echo}}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: echo
    image: aerie.dev/lab/echo:1
    readinessProbe: {httpGet: {path: /healthz, port: 8080}, periodSeconds: 1, failureThreshold: 1}
"""


@pytest.fixture
def echo(namespace: Namespace) -> Namespace:
    namespace.apply(POD)
    namespace.wait_until_ready("echo")
    return namespace


def test_kill(echo: Namespace) -> None:
    echo.faults.kill("echo", namespace=echo.name)
    status = echo.wait_until(
        "pod", "echo", lambda p: p["status"]["containerStatuses"][0]["restartCount"] == 1 and is_ready(p), "restarted"
    )["status"]["containerStatuses"][0]
    assert status["lastState"]["terminated"]["exitCode"] == 137
    assert status["lastState"]["terminated"]["signal"] == 9


def test_crash_and_its_repair(echo: Namespace) -> None:
    def container(pod: dict[str, Any]) -> dict[str, Any]:
        status: dict[str, Any] = pod["status"]["containerStatuses"][0]
        return status

    def runs_for_longer(pod: dict[str, Any]) -> bool:
        began = (container(pod)["state"].get("running") or {}).get("startedAt")
        return bool(began) and datetime.now(UTC) - datetime.fromisoformat(str(began)) > timedelta(seconds=6)

    with echo.faults.crash("echo", 2, namespace=echo.name):
        echo.wait_until("pod", "echo", lambda p: container(p)["restartCount"] >= 2, "restarted twice")
        assert [record.kind for record in echo.faults.list_active()] == ["crash"]
    assert echo.faults.list_active() == []
    running_pod = echo.wait_until("pod", "echo", runs_for_longer, "it runs for longer than before")
    assert container(running_pod)["lastState"]["terminated"]["signal"] == 9
    with pytest.raises(StateError, match="killed after 0 s: give a number of seconds above 0"):
        echo.faults.crash("echo", 0, namespace=echo.name)


def test_freeze_and_resume(echo: Namespace) -> None:
    with echo.faults.freeze("echo", namespace=echo.name):
        echo.wait_until("pod", "echo", lambda p: not is_ready(p), "not Ready while frozen")
        assert [record.kind for record in echo.faults.list_active()] == ["freeze"]
    echo.wait_until_ready("echo")
    assert echo.faults.list_active() == []
    assert echo.get("pod", "echo")["status"]["containerStatuses"][0]["restartCount"] == 0


def test_disconnect_and_reconnect(echo: Namespace) -> None:
    with echo.faults.disconnect("echo", namespace=echo.name):
        echo.wait_until("pod", "echo", lambda p: not is_ready(p), "not Ready while disconnected")
    echo.wait_until_ready("echo")


def test_a_silenced_node_is_detected_as_lost_and_comes_back(lab: Lab, echo: Namespace) -> None:
    node = echo.get("pod", "echo")["spec"]["nodeName"]

    def ready() -> str:
        conditions = echo.get("node", node)["status"]["conditions"]
        return str(next(c["status"] for c in conditions if c["type"] == "Ready"))

    with FaultInjector(lab).silence_node(node):
        wait_until(lambda: ready() == "Unknown", "the node is Unknown", timeout_seconds=120)
        echo.wait_until("pod", "echo", lambda p: not is_ready(p), "its pod is not Ready")
    wait_until(lambda: ready() == "True", "the node is Ready again")
    echo.wait_until_ready("echo")
    assert echo.get("pod", "echo")["status"]["containerStatuses"][0]["restartCount"] == 0


@pytest.mark.parametrize("component", ["etcd", "kube-apiserver"])
def test_restart_of_the_control_plane(echo: Namespace, component: str) -> None:
    before = echo.lab.status()["components"][component]["restarts"]
    echo.faults.restart(component)
    assert echo.lab.status()["components"][component]["restarts"] == before + 1
    # The agent has to resume its watches: a new pod must run, and the status of the old one must still be reported.
    wait_until(lambda: echo.kubectl("get", "pods") and True, "the API server answers")
    echo.apply(POD.replace("name: echo,", "name: later,"))
    echo.wait_until_ready("later", timeout_seconds=120)
    echo.wait_until_ready("echo")
    assert echo.get("pod", "echo")["status"]["containerStatuses"][0]["restartCount"] == 0


def test_a_stopped_component_stays_down_until_resumed(echo: Namespace) -> None:
    with echo.faults.stop_component("kube-apiserver"):
        with pytest.raises(LabError, match=r"refused|EOF|reset"):
            echo.kubectl("get", "pods")
        assert echo.lab.status()["components"]["kube-apiserver"]["stopped_by_fault"]
        with pytest.raises(LabError, match=r"is stopped by a fault"):
            echo.faults.restart("kube-apiserver")
    wait_until(lambda: is_ready(echo.get("pod", "echo")), "the pod is there, Ready, and was left alone")
    assert echo.get("pod", "echo")["status"]["containerStatuses"][0]["restartCount"] == 0


def test_a_full_node_gets_no_pod(namespace: Namespace) -> None:
    pod = """
apiVersion: v1
kind: Pod
metadata: {name: late}
spec:
  nodeSelector: {kubernetes.io/hostname: node-1}
  containers:
  - {name: echo, image: aerie.dev/lab/echo:1, resources: {limits: {nvidia.com/gpu: "1"}}}
"""
    fault = namespace.faults.fill_node("node-1")
    namespace.apply(pod)
    namespace.wait_until(
        "pod",
        "late",
        lambda p: any(c.get("reason") == "Unschedulable" for c in p["status"].get("conditions") or []),
        "unschedulable while the node is full",
    )
    fault.undo()
    namespace.wait_until_ready("late", timeout_seconds=90)


def test_deleted_objects_are_restored(namespace: Namespace) -> None:
    namespace.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"a": "1"}})
    fault = namespace.faults.delete("configmap", "settings", namespace=namespace.name)
    namespace.wait_until_deleted("configmap", "settings")
    fault.undo()
    assert namespace.get("configmap", "settings")["data"] == {"a": "1"}


def test_missing_targets_of_faults_are_reported(namespace: Namespace) -> None:
    with pytest.raises(LabError, match=r"no running container 'x' in pod default/none"):
        namespace.faults.freeze("none", "x")
    with pytest.raises(LabError, match="'node-9' is not a node of this lab: choose one of node-1, node-2"):
        namespace.faults.silence_node("node-9")
    with pytest.raises(LabError, match="'nginx' is not a component of the lab: choose one of etcd"):
        namespace.faults.restart("nginx")
    with pytest.raises(StateError, match="there is no fault 99"):
        namespace.faults.undo(99)
    assert namespace.faults.list_active() == []


def test_a_failed_fault_is_not_recorded_and_a_fault_outlives_its_pod(echo: Namespace) -> None:
    fault = echo.faults.freeze("echo", namespace=echo.name)
    began = time.monotonic()
    echo.kubectl("delete", "pod", "echo")  # a stopped process ends by SIGKILL after its grace period
    assert time.monotonic() - began < 120
    fault.undo()
    assert echo.faults.list_active() == []
