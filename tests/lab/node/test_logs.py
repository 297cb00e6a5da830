"""`kubectl logs`, through the API server."""

from __future__ import annotations

import datetime
import subprocess

import pytest

from aerie_lab.binaries import ensure_binary
from aerie_lab.errors import LabError
from aerie_lab.testing import Namespace
from aerie_lab.testing.pods import pod, shell


def test_logs_with_their_options(namespace: Namespace) -> None:
    script = "for i in 1 2 3; do echo line $i; done; echo error >&2; printf unfinished"
    namespace.apply(pod("writing", shell(script), {"name": "quiet", **shell("true")}, restartPolicy="Never"))
    namespace.wait_until_phase("writing", "Succeeded")

    def logs(*options: str) -> list[str]:
        return namespace.kubectl("logs", "writing", "-c", "main", *options).splitlines()

    assert sorted(logs()) == ["error", "line 1", "line 2", "line 3", "unfinished"]
    assert len(logs("--tail=2")) == 2
    assert logs("--limit-bytes=4") == ["line"]
    lines = logs("--timestamps")
    moment = datetime.datetime.fromisoformat(lines[0].split(" ")[0])
    assert abs(datetime.datetime.now(datetime.UTC) - moment) < datetime.timedelta(minutes=5)
    assert {line.split(" ", 1)[1] for line in lines} == set(logs())
    assert logs("--since=1h") == logs()
    tomorrow = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert logs(f"--since-time={tomorrow}") == []
    assert namespace.kubectl("logs", "writing", "-c", "quiet") == ""
    with pytest.raises(LabError, match="previous terminated container"):
        logs("--previous")


def test_following_a_log_ends_with_the_container(namespace: Namespace) -> None:
    script = "echo begin; while [ ! -e /in/go ]; do sleep 0.05; done; echo end"
    namespace.apply(
        pod(
            "followed",
            shell(script, volumeMounts=[{"name": "in", "mountPath": "/in"}]),
            volumes=[{"name": "in", "configMap": {"name": "signal", "optional": True}}],
            restartPolicy="Never",
        )
    )
    namespace.wait_until_phase("followed", "Running")
    command = [str(ensure_binary("kubectl")), "--kubeconfig", str(namespace.lab.kubeconfig), "-n", namespace.name]
    with subprocess.Popen([*command, "logs", "-f", "followed"], stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "begin\n"
        namespace.kubectl("create", "configmap", "signal", "--from-literal=go=1")
        namespace.kubectl("annotate", "pod", "followed", "look=again")
        assert following.stdout.read() == "end\n"
        assert following.wait(30) == 0


def test_a_container_that_has_not_started_has_no_log(namespace: Namespace) -> None:
    namespace.apply(pod("absent", {"image": "example.org/nothing:1"}))
    namespace.wait_until("pod", "absent", lambda p: p["status"].get("containerStatuses"), "a status")
    with pytest.raises(LabError, match="waiting to start"):
        namespace.kubectl("logs", "absent")
