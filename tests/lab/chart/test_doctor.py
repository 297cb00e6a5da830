"""`kubectl aerie doctor` and `diagnose pod/NAME` against an API server, with the chart installed and without a gateway."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aerie_lab.binaries import ensure_binary
from aerie_lab.cluster import Lab
from aerie_lab.testing import Namespace
from aerie_lab.testing.plugin import new_namespace
from tests.lab.chart.conftest import Release

ENGINE = """
apiVersion: v1
kind: Pod
metadata: {name: engine, labels: {aerie.dev/name: chat}}
spec:
  containers:
  - name: engine
    image: aerie.dev/lab/engine:1
    args:
    - aerie/bundle-target
    - --port=8000
    - --speculative-config={"method":"eagle3","model":"aerie/bundle-eagle31","num_speculative_tokens":3}
    env: [{name: AERIE_SIMULATOR, value: '{"startup_seconds": 0, "own_requests_per_second": 5}'}]
    ports: [{name: http, containerPort: 8000}]
    readinessProbe: {httpGet: {path: /health, port: http}, periodSeconds: 1}
"""
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def aerie(lab: Lab) -> Run:
    """Runs the command line with the lab's kubectl and the rights of a user, or of the administrator."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        path = f"{ensure_binary('kubectl').parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "KUBECONFIG": str(lab.kubeconfig), "PATH": path}
        command = [sys.executable, "-m", "aerie.cli", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run


@pytest.fixture(scope="module")
def home(lab: Lab, chart: Path, release: Release) -> Iterator[Namespace]:
    """A namespace with a release `aerie` in it, ready."""
    with new_namespace(lab, "aerie-doctor") as namespace, release(namespace.name, chart):
        namespace.wait_for_rollout("aerie")
        namespace.wait_until("lease", "aerie", lambda item: item["spec"].get("holderIdentity"), "a leader")
        yield namespace


def results(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    document: dict[str, Any] = json.loads(done.stdout)
    return {check["check"]: check["result"] for check in document["checks"]}


@pytest.mark.usefixtures("home")
def test_a_fresh_install_is_healthy(aerie: Run) -> None:
    done = aerie("doctor", "-o", "json")
    assert set(results(done).values()) == {"ok"}, done.stdout + done.stderr
    assert done.returncode == 0
    assert results(done).keys() >= {"definition", "operator", "leader", "versions", "admission policy", "your rights", "clock"}


def test_a_stopped_operator_is_found(home: Namespace, aerie: Run) -> None:
    home.kubectl("scale", "deployment", "aerie", "--replicas=0")
    home.kubectl("wait", "--for=delete", "pod", "-l", "app.kubernetes.io/name=aerie", "--timeout=120s")
    done = aerie("doctor", "-o", "json")
    home.kubectl("scale", "deployment", "aerie", "--replicas=2")
    home.wait_for_rollout("aerie")
    assert done.returncode == 1
    assert results(done)["operator"] == "problem"


def test_a_user_without_rights(home: Namespace, aerie: Run) -> None:
    done = aerie("doctor", "--as=nobody", "-n", home.name, "-o", "json")
    checks = results(done)
    assert [checks[name] for name in ("definition", "operator", "admission policy", "resources")] == ["unknown"] * 4
    assert json.loads(done.stdout)["kind"] == "ClusterChecks"


def test_an_engine_in_a_pod_is_diagnosed(namespace: Namespace, aerie: Run) -> None:
    namespace.apply(ENGINE)
    namespace.wait_until_ready("engine")
    done = aerie("diagnose", "pod/engine", "-n", namespace.name, "--duration", "8", "-o", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["speculation"] == "K=3"
    assert document["requests"] > 0
    assert 2.0 < document["acceptance"]["length"] < 3.5
    forbidden = aerie("diagnose", "pod/engine", "-n", namespace.name, "--as=nobody", "--since-start")
    assert (forbidden.returncode, "pods" in forbidden.stderr) == (2, True)
    assert "Forbidden" in forbidden.stderr or "forbidden" in forbidden.stderr
