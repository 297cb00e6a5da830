"""The agent dies, or the API server is down: pods that ran, ended or changed meanwhile get the right status."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aerie_lab.cluster import Lab, LabSettings
from aerie_lab.testing import Namespace, wait_until
from aerie_lab.testing.namespace import is_ready
from aerie_lab.testing.pods import echo, find_container_status, pod, shell

SERVING = {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1}


@pytest.fixture(scope="module")
def lab(report_progress: Callable[[str], None]) -> Iterator[Lab]:
    """Start a separate lab, so that failures here do not affect other tests."""
    settings = LabSettings(name=f"agent-{os.getpid()}", gateway=False, restart_backoff=1.0)
    with Lab.up(settings, report_progress, end_with_caller=True) as running:
        yield running


def test_pods_of_an_agent_that_died_are_taken_over(lab: Lab, namespace: Namespace) -> None:
    namespace.apply(
        pod("serving", echo(readinessProbe=SERVING)),
        pod("hollow", shell("true"), metadata={"annotations": {"lab.aerie.dev/processless": "true"}}, restartPolicy="Never"),
        pod("done", shell("echo kept"), restartPolicy="Never"),
        pod("half", shell("true"), {"name": "other", **shell("sleep 600")}, restartPolicy="Never"),
    )
    before = namespace.wait_until_ready("serving")
    namespace.wait_until_ready("hollow")
    namespace.wait_until_phase("done", "Succeeded")
    namespace.wait_until("pod", "half", lambda p: find_container_status(p)["state"].get("terminated"), "one of two done")
    namespace.faults.restart("node-agent")
    serving_pod = namespace.wait_until(
        "pod",
        "serving",
        lambda p: find_container_status(p)["restartCount"] == 1 and is_ready(p),
        "started again",
        timeout_seconds=120,
    )
    assert serving_pod["metadata"]["uid"] == before["metadata"]["uid"]
    ended = find_container_status(serving_pod)["lastState"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (137, "ContainerStatusUnknown")
    assert len(serving_pod["status"]["podIPs"]) == 1
    # Ended containers stay ended and keep their logs; a container that ran and must not restart has failed.
    assert namespace.get("pod", "done")["status"]["phase"] == "Succeeded"
    assert namespace.kubectl("logs", "done") == "kept\n"
    half_pod = namespace.wait_until_phase("half", "Failed")
    assert find_container_status(half_pod)["state"]["terminated"]["exitCode"] == 0
    assert find_container_status(half_pod, "other")["state"]["terminated"]["exitCode"] == 137
    running = [c["container"] for c in lab.call_agent("containers") if c["namespace"] == namespace.name]
    assert running == ["main"]
    hollow_pod = namespace.wait_until_ready("hollow")
    assert (hollow_pod["status"]["phase"], find_container_status(hollow_pod)["restartCount"]) == ("Running", 0)
    namespace.kubectl("delete", "pod", "serving", "hollow", "done", "half", "--timeout=180s")


def test_changes_during_an_api_server_outage_are_reported_later(lab: Lab, namespace: Namespace, tmp_path: Path) -> None:
    volume = {"name": "told", "hostPath": {"path": str(tmp_path)}}
    ending = shell("until [ -e /told/go ]; do sleep 0.1; done", volumeMounts=[{"name": "told", "mountPath": "/told"}])
    namespace.apply(pod("crashing", shell("sleep 0.5; exit 1")), pod("ending", ending, volumes=[volume], restartPolicy="Never"))
    namespace.wait_until_phase("ending", "Running")
    with namespace.faults.stop_component("kube-apiserver"):
        (tmp_path / "go").touch()
        wait_until(
            lambda: not [c for c in lab.call_agent("containers") if (c["namespace"], c["pod"]) == (namespace.name, "ending")],
            "it has ended",
        )
    namespace.wait_until_phase("ending", "Succeeded", timeout_seconds=120)
    namespace.wait_until("pod", "crashing", lambda p: find_container_status(p)["restartCount"] >= 2, "it went on restarting")
