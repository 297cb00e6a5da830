"""Time that a user waits for `kubectl aerie`, as a process, against the API server of a lab.

| key                    | what is measured                                                                                |
|------------------------|-------------------------------------------------------------------------------------------------|
| plugin_start_ms        | `kubectl-aerie --version`, median                                                               |
| plugin_help_ms         | `kubectl-aerie --help`, median                                                                  |
| plugin_status_ms       | `kubectl aerie status` of a resource under analysis, median; two starts of kubectl are in it    |
| plugin_list_1000_ms    | `kubectl aerie list -A` of 1,000 resources, median                                              |
| kubectl_get_ms         | `kubectl get specdep NAME -o json`, median: what kubectl alone takes                            |
| kubectl_list_1000_ms   | `kubectl get specdep -A -o json` of 1,000 resources, median                                     |

The commands run in turn, so that all meet the same load of the machine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from aerie_lab.binaries.lookup import ensure_binary
from aerie_lab.cluster import Lab, LabSettings, take_down_lab

NAME = "bench-cli"
REPOSITORY = Path(__file__).resolve().parents[1]
ROUNDS = 15
RESOURCES = 1000
PLUGIN = Path(sys.executable).with_name("kubectl-aerie")
_ARM = {
    "revision": "71a723caa5",
    "drafter": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B@ada412b6",
    "setting": {"mode": "Static", "numSpeculativeTokens": 3},
    "replicas": 4,
    "readyReplicas": 4,
    "weight": 66,
    "acceptanceLength": 3.08,
}
_METRICS = ("TokensPerStep", "TimePerOutputToken", "TimeToFirstToken", "FailedRequests", "OutputLength")


def measure() -> dict[str, float]:
    try:
        with Lab.up(LabSettings(name=NAME, gateway=False)) as lab:
            return _measure_in(lab)
    finally:
        take_down_lab(NAME)


def _measure_in(lab: Lab) -> dict[str, float]:
    environment = {**os.environ, "KUBECONFIG": str(lab.kubeconfig)}
    environment["PATH"] = os.pathsep.join([str(ensure_binary("kubectl").parent), str(PLUGIN.parent), environment["PATH"]])
    lab.apply(yaml.safe_load((REPOSITORY / "crds/aerie.dev_speculativedeployments.yaml").read_text()))
    lab.kubectl("wait", "--for=condition=Established", "crd/speculativedeployments.aerie.dev", "--timeout=180s")
    documents = [_resource(f"chat-{index}") for index in range(RESOURCES)]
    lab.kubectl("create", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}))
    lab.kubectl("patch", "specdep", "chat-0", "--subresource=status", "--type=merge", "-p", json.dumps({"status": _status()}))
    commands = {
        "plugin_start_ms": [str(PLUGIN), "--version"],
        "plugin_help_ms": [str(PLUGIN), "--help"],
        "plugin_status_ms": ["kubectl", "aerie", "status", "chat-0"],
        "plugin_list_1000_ms": ["kubectl", "aerie", "list", "-A"],
        "kubectl_get_ms": ["kubectl", "get", "specdep", "chat-0", "-o", "json"],
        "kubectl_list_1000_ms": ["kubectl", "get", "specdep", "-A", "-o", "json"],
    }
    milliseconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(ROUNDS + 1):
        for name, command in commands.items():
            began = time.monotonic()
            subprocess.run(command, env=environment, check=True, capture_output=True)
            milliseconds[name].append(1000 * (time.monotonic() - began))
    return {name: round(statistics.median(times[1:])) for name, times in milliseconds.items()}  # without the first, cold round


def _resource(name: str) -> dict[str, Any]:
    image = {"source": {"image": {"reference": f"models.example/target@sha256:{'0' * 64}"}}}
    engine = {"image": "vllm/vllm-openai:v0.33.0"}
    spec = {"replicas": 4, "model": image, "drafter": image, "engine": engine, "speculation": {"numSpeculativeTokens": 3}}
    return {"apiVersion": "aerie.dev/v1alpha1", "kind": "SpeculativeDeployment", "metadata": {"name": name}, "spec": spec}


def _status() -> dict[str, Any]:
    comparisons = [
        {
            "metric": name,
            "sampleCount": 12,
            "estimate": 0.01,
            "lower": -0.01,
            "upper": 0.03,
            "requirement": "below +5.0 %",
            "met": True,
        }
        for name in _METRICS
    ]
    since = "2026-11-28T08:00:00.000Z"
    message = "After 12 blocks: time to first token is missing, in about 12 min at this rate."
    canary = {**_ARM, "revision": "b2657d3a14", "replicas": 1, "readyReplicas": 1, "weight": 17, "change": "drafter"}
    canary |= {"phase": "Analyzing", "startTime": since, "control": {**_ARM, "replicas": 1, "readyReplicas": 1, "weight": 17}}
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "AllPodsReady",
        "message": "6/6 pods ready",
        "lastTransitionTime": since,
    }
    progressing = {**condition, "type": "Progressing", "reason": "Analyzing", "message": message}
    analysis = {"design": "BetweenPods", "verdict": "Continue", "parameters": {}, "comparisons": comparisons}
    return {"phase": "Analyzing", "stable": _ARM, "canary": canary, "conditions": [condition, progressing], "analysis": analysis}
