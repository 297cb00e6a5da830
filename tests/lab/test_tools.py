"""The tools that come with a cluster: Helm installs a chart, Prometheus scrapes pods by discovery."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aerie_lab.binaries import ensure
from aerie_lab.cluster import Lab, process
from aerie_lab.testing import Namespace, until

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


PROMETHEUS = """
apiVersion: v1
kind: ServiceAccount
metadata: {name: prometheus}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: prometheus}
rules: [{apiGroups: [""], resources: [pods], verbs: [get, list, watch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: prometheus}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: prometheus}
subjects: [{kind: ServiceAccount, name: prometheus}]
---
apiVersion: v1
kind: ConfigMap
metadata: {name: prometheus}
data:
  prometheus.yml: |
    global: {scrape_interval: 1s}
    scrape_configs:
    - job_name: pods
      kubernetes_sd_configs: [{role: pod, namespaces: {own_namespace: true}}]
      relabel_configs:
      - {source_labels: [__meta_kubernetes_pod_name], target_label: pod}
---
apiVersion: v1
kind: Pod
metadata: {name: prometheus, labels: {app: prometheus}}
spec:
  serviceAccountName: prometheus
  terminationGracePeriodSeconds: 5
  containers:
  - name: prometheus
    image: prom/prometheus:v3.15.0
    args: [--config.file=/etc/prometheus/prometheus.yml, --storage.tsdb.path=/data]
    ports: [{containerPort: 9090}]
    readinessProbe: {httpGet: {path: /-/ready, port: 9090}, periodSeconds: 1}
    volumeMounts: [{name: config, mountPath: /etc/prometheus}, {name: data, mountPath: /data}]
  volumes: [{name: config, configMap: {name: prometheus}}, {name: data, emptyDir: {}}]
---
apiVersion: v1
kind: Service
metadata: {name: prometheus}
spec: {selector: {app: prometheus}, ports: [{port: 80, targetPort: 9090}]}
"""


@pytest.mark.timeout(900)  # the first time Prometheus has to be built
def test_prometheus_runs_as_a_pod_and_finds_itself(namespace: Namespace) -> None:
    ensure("prometheus")
    namespace.apply(PROMETHEUS)
    namespace.until_ready("prometheus", within=120)
    address = namespace.get("service", "prometheus")["spec"]["clusterIP"]

    def up() -> bool:
        answer = json.loads(inside(namespace.lab, f"http://{address}/api/v1/query?query=up"))
        return [(r["metric"]["pod"], r["value"][1]) for r in answer["data"]["result"]] == [("prometheus", "1")]

    until(up, "Prometheus has scraped the one pod of its namespace")


def inside(lab: Lab, url: str) -> str:
    """GET from the lab's own network."""
    code = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())"
    command = [sys.executable, "-m", "aerie_lab.sandbox.inside", str(process.living(lab.folder)), sys.executable, "-c", code, url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout or json.dumps({"data": {"result": []}, "error": done.stderr})
