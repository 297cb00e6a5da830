"""Prometheus for tests: the real one as a process of this machine or as a pod of the lab, and responses built from scrapes.

`build_range_response` is for tests of the client; the tests with the process compare it with real responses.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.utils import floatToGoString

from aerie_lab.binaries import ensure_binary
from aerie_lab.testing.namespace import wait_until

ScrapedPages = Sequence[tuple[float, bytes | str]]
"""Times, and the page of each."""


def build_range_response(pods: Mapping[str, ScrapedPages], *, include_up: bool = True, **target: str) -> dict[str, Any]:
    """Return the response to a range query of a server that scraped these pages; `target`: further labels."""
    series: dict[tuple[tuple[str, str], ...], list[list[Any]]] = {}
    for pod, scrapes in pods.items():
        own = {"namespace": "default", "pod": pod, "job": "engines", "instance": f"{pod}:8000", **target}
        for at, page in scrapes:
            values = _samples(page.decode() if isinstance(page, bytes) else page)
            for labels, value in (*values, *([({"__name__": "up"}, "1")] if include_up else [])):
                series.setdefault(tuple(sorted({**labels, **own}.items())), []).append([at, value])
    result = [{"metric": dict(labels), "values": values} for labels, values in series.items()]
    return {"status": "success", "data": {"resultType": "matrix", "result": result}}


@functools.lru_cache(maxsize=16)
def _samples(page: str) -> list[tuple[dict[str, str], str]]:
    return [
        ({**sample.labels, "__name__": sample.name}, floatToGoString(sample.value))  # type: ignore[no-untyped-call]
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    ]


def merge_responses(*responses: dict[str, Any]) -> bytes:
    """Merge several responses."""
    result = [series for response in responses for series in response["data"]["result"]]
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}).encode()


@contextlib.contextmanager
def run_prometheus(
    folder: Path, pods: Mapping[str, str], scrape_interval: str = "1s", further_jobs: Sequence[Mapping[str, Any]] = ()
) -> Iterator[str]:
    """Run a Prometheus on a free port that scrapes the pods (host:port, by name); yields its URL. Its log is in `folder`.

    `further_jobs`: entries of scrape_configs.
    """
    scrape = [{"targets": [address], "labels": {"pod": pod, "namespace": "default"}} for pod, address in pods.items()]
    config = {
        "global": {"scrape_interval": scrape_interval, "scrape_timeout": scrape_interval},
        "scrape_configs": [{"job_name": "engines", "static_configs": scrape}, *further_jobs],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # YAML is JSON too
    command = [
        str(ensure_binary("prometheus")),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
    ]
    command += ["--web.listen-address=127.0.0.1:0"]
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        running = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
    try:
        url = wait_until(lambda: _find_address(log, running), "Prometheus listens")
        assert url is not None
        wait_until(lambda: _is_ready(url), "Prometheus is ready")
        yield url
    finally:
        running.terminate()
        running.wait(60)


def _find_address(log: Path, running: subprocess.Popen[bytes]) -> str | None:
    text = log.read_text(errors="replace")
    if running.poll() is not None:
        raise RuntimeError(f"Prometheus has ended: {text[-2000:]}")
    match = re.search(r'msg="Listening on" .*?address=(127\.0\.0\.1:\d+)', text)
    return f"http://{match[1]}" if match else None


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


PROMETHEUS_MANIFESTS = """
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
      - {source_labels: [__meta_kubernetes_pod_container_port_name], regex: http, action: keep}
      - {source_labels: [__meta_kubernetes_namespace], target_label: namespace}
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
    ports: [{name: http, containerPort: 9090}]
    readinessProbe: {httpGet: {path: /-/ready, port: 9090}, periodSeconds: 1}
    volumeMounts: [{name: config, mountPath: /etc/prometheus}, {name: data, mountPath: /data}]
  volumes: [{name: config, configMap: {name: prometheus}}, {name: data, emptyDir: {}}]
---
apiVersion: v1
kind: Service
metadata: {name: prometheus}
spec: {selector: {app: prometheus}, ports: [{port: 80, targetPort: 9090}]}
"""
"""A Prometheus as a pod that scrapes the port `http` of all pods of its namespace every second, itself included."""
