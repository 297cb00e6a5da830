"""A simulated engine as a pod behind a Service: the basis of the operator's demos and scale tests."""

from __future__ import annotations

import json
import subprocess
import sys

from aerie_lab.cluster import process
from aerie_lab.testing import Namespace

MANIFESTS = """
apiVersion: v1
kind: Pod
metadata: {name: engine, labels: {app: engine}}
spec:
  terminationGracePeriodSeconds: 60
  containers:
  - name: engine
    image: aerie.dev/lab/engine:1
    args:
    - aerie/bundle-target
    - --served-model-name=chat
    - --port=8000
    - --shutdown-timeout=30
    - --speculative-config={"method":"eagle3","model":"aerie/bundle-eagle31","num_speculative_tokens":3}
    env: [{name: AERIE_SIMULATOR, value: '{"startup_seconds": 1}'}]
    ports: [{name: http, containerPort: 8000}]
    startupProbe: {httpGet: {path: /health, port: http}, periodSeconds: 1, failureThreshold: 60}
    readinessProbe: {httpGet: {path: /health, port: http}, periodSeconds: 2}
---
apiVersion: v1
kind: Service
metadata: {name: engine}
spec: {selector: {app: engine}, ports: [{port: 80, targetPort: http}]}
"""


def test_a_completion_through_a_service_finishes_during_a_drain(namespace: Namespace) -> None:
    namespace.apply(MANIFESTS)
    namespace.wait_until_ready("engine")
    address = namespace.get("service", "engine")["spec"]["clusterIP"]
    inside = [sys.executable, "-m", "aerie_lab.sandbox.inside", str(process.find_lab_pid(namespace.lab.folder))]

    def ask(path: str, *more: str) -> str:
        command = [*inside, "curl", "--silent", "--fail", "--retry", "10", "--retry-all-errors", *more, f"http://{address}{path}"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    body = json.dumps({"model": "chat", "prompt": "The eyrie", "max_tokens": 12})
    answer = json.loads(ask("/v1/completions", "--header", "Content-Type: application/json", "--data", body))
    assert answer["usage"]["completion_tokens"] == 12
    page = ask("/metrics")
    assert 'vllm:generation_tokens_total{engine="0",model_name="chat"} 12.0' in page
    assert "vllm:spec_decode_num_drafts_total" in page
    namespace.kubectl("delete", "pod", "engine", "--wait", "--timeout=180s")
    assert not namespace.exists("pod", "engine")
