"""Startup, readiness and liveness probes: by http, tcp and exec, with their thresholds."""

from __future__ import annotations

import functools
from pathlib import Path

from aerie_lab.testing import Namespace, wait_until
from aerie_lab.testing.pods import echo, find_container_status, pod, python, read_condition_status, shell

OFTEN = {"periodSeconds": 1}


def post(namespace: Namespace, pod_name: str, path: str) -> None:
    """Send a request to the echo server of a pod, through the API server."""
    where = f"/api/v1/namespaces/{namespace.name}/pods/{pod_name}:8080/proxy/{path}"
    namespace.kubectl("create", "--raw", where, "-f", "-", stdin="{}")


def test_readiness_by_http_follows_the_answers(namespace: Namespace) -> None:
    probe = {"httpGet": {"path": "/healthz", "port": "web"}, "failureThreshold": 2, "successThreshold": 2, **OFTEN}
    ports = [{"name": "web", "containerPort": 8080}]
    namespace.apply(pod("serving", echo(readinessProbe=probe, ports=ports)))
    namespace.wait_until_ready("serving")
    post(namespace, "serving", "unhealthy")
    unready_pod = namespace.wait_until(
        "pod", "serving", lambda p: read_condition_status(p, "Ready") == "False", "not Ready any more"
    )
    assert read_condition_status(unready_pod, "ContainersReady") == "False"
    status = find_container_status(unready_pod)
    assert (status["ready"], status["started"], status["restartCount"]) == (False, True, 0)
    wait_until(
        lambda: [m for r, m in namespace.events("serving") if r == "Unhealthy" and "statuscode: 503" in m],
        "an Unhealthy event",
    )
    post(namespace, "serving", "healthy")
    namespace.wait_until_ready("serving")


def has_liveness_kill_event(namespace: Namespace, pod_name: str) -> bool:
    return any(reason == "Killing" and "liveness" in message for reason, message in namespace.events(pod_name))


def test_liveness_restarts_a_container(namespace: Namespace) -> None:
    web = {"httpGet": {"path": "/healthz", "port": 8080}, **OFTEN}
    by_http = {**web, "failureThreshold": 1, "timeoutSeconds": 30}
    probes = {"startupProbe": {**web, "failureThreshold": 100}, "livenessProbe": by_http, "readinessProbe": by_http}
    by_command = {"exec": {"command": ["test", "!", "-e", "/tmp/broken"]}, "failureThreshold": 1, **OFTEN}
    namespace.apply(
        pod("by-http", echo(**probes), terminationGracePeriodSeconds=60),
        pod("by-command", shell("touch /tmp/broken; sleep 600", livenessProbe=by_command)),
    )
    namespace.wait_until_ready("by-http")
    post(namespace, "by-http", "unhealthy")
    for name, code in (("by-http", 0), ("by-command", 137)):
        restarted_pod = namespace.wait_until(
            "pod",
            name,
            lambda p: find_container_status(p)["restartCount"],
            "restarted",
        )
        assert find_container_status(restarted_pod)["lastState"]["terminated"]["exitCode"] == code
        wait_until(functools.partial(has_liveness_kill_event, namespace, name), "an event says why")


def test_other_probes_wait_until_the_startup_probe_succeeds(namespace: Namespace, tmp_path: Path) -> None:
    late = """
import os, socket, time
while not os.path.exists("/told/go"):
    time.sleep(0.05)
listening = socket.create_server(("", 7000))
open("/tmp/up", "w")
time.sleep(600)
"""
    container = python(
        late,
        volumeMounts=[{"name": "told", "mountPath": "/told"}],
        startupProbe={"tcpSocket": {"port": 7000}, "failureThreshold": 100, **OFTEN},
        livenessProbe={"tcpSocket": {"port": 7000}, "failureThreshold": 1, "timeoutSeconds": 30, **OFTEN},
        readinessProbe={"exec": {"command": ["test", "-e", "/tmp/up"]}, **OFTEN},
    )
    never = shell("sleep 600", startupProbe={"exec": {"command": ["false"]}, "failureThreshold": 2, **OFTEN})
    volume = {"name": "told", "hostPath": {"path": str(tmp_path)}}
    namespace.apply(pod("slow", container, volumes=[volume]), pod("stuck", never, restartPolicy="Never"))
    slow_pod = namespace.wait_until("pod", "slow", lambda p: find_container_status(p)["state"].get("running"), "running")
    assert find_container_status(slow_pod)["started"] is False
    (tmp_path / "go").touch()
    slow_pod = namespace.wait_until_ready("slow")
    assert find_container_status(slow_pod)["started"] is True
    assert find_container_status(slow_pod)["restartCount"] == 0
    stuck_pod = namespace.wait_until_phase("stuck", "Failed")
    assert find_container_status(stuck_pod)["state"]["terminated"]["exitCode"] == 137


def test_a_probe_that_times_out_has_failed(namespace: Namespace) -> None:
    probe = {"exec": {"command": ["sleep", "600"]}, "timeoutSeconds": 1, "failureThreshold": 1, **OFTEN}
    namespace.apply(pod("hanging", shell("sleep 600", readinessProbe=probe)))
    wait_until(lambda: [m for r, m in namespace.events("hanging") if r == "Unhealthy" and "timed out after 1s" in m], "told so")
    assert read_condition_status(namespace.get("pod", "hanging"), "Ready") == "False"
