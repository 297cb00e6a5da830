"""The tools that come with a cluster: Helm installs a chart, Prometheus scrapes pods by discovery."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aerie_lab.binaries import ensure_family
from aerie_lab.cluster import Lab, process
from aerie_lab.testing import Namespace, wait_until
from aerie_lab.testing.prometheus import PROMETHEUS_MANIFESTS

CHART = {
    "Chart.yaml": "apiVersion: v2\nname: small\nversion: 0.1.0\nkubeVersion: '>=1.36.0-0'\n",
    "values.yaml": "replicas: 1\n",
    "templates/deployment.yaml": """
apiVersion: apps/v1
kind: Deployment
metadata: {name: {{ .Release.Name }}}
spec:
  replicas: {{ .Values.replicas }}
  selector: {matchLabels: {app: {{ .Release.Name }}}}
  template:
    metadata: {labels: {app: {{ .Release.Name }}}}
    spec: {containers: [{name: echo, image: aerie.dev/lab/echo:1}]}
""",
}


def test_helm_installs_upgrades_and_uninstalls(namespace: Namespace, tmp_path: Path) -> None:
    for name, text in CHART.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    lab, where = namespace.lab, ("--namespace", namespace.name)
    lab.helm("install", "small", str(tmp_path), *where, "--wait", "--timeout=180s")
    lab.helm("upgrade", "small", str(tmp_path), *where, "--set", "replicas=2", "--wait", "--timeout=180s")
    assert namespace.get("deployment", "small")["status"]["readyReplicas"] == 2
    (release,) = json.loads(lab.helm("list", *where, "-o", "json"))
    assert (release["status"], release["revision"]) == ("deployed", "2")
    lab.helm("uninstall", "small", *where, "--wait")
    assert not namespace.exists("deployment", "small")


@pytest.mark.timeout(900)  # the first run has to build Prometheus
def test_prometheus_runs_as_a_pod_and_discovers_itself(namespace: Namespace) -> None:
    ensure_family("prometheus")
    namespace.apply(PROMETHEUS_MANIFESTS)
    namespace.wait_until_ready("prometheus", timeout_seconds=120)
    address = namespace.get("service", "prometheus")["spec"]["clusterIP"]

    def is_up() -> bool:
        answer = json.loads(get_from_lab_network(namespace.lab, f"http://{address}/api/v1/query?query=up"))
        return [(r["metric"]["pod"], r["value"][1]) for r in answer["data"]["result"]] == [("prometheus", "1")]

    wait_until(is_up, "Prometheus has scraped the one pod of its namespace")


def get_from_lab_network(lab: Lab, url: str) -> str:
    """Send a GET request from the lab's own network."""
    code = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=60).read().decode())"
    command = [
        sys.executable,
        "-m",
        "aerie_lab.sandbox.inside",
        str(process.find_lab_pid(lab.folder)),
        sys.executable,
        "-c",
        code,
        url,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.stdout or json.dumps({"data": {"result": []}, "error": done.stderr})
