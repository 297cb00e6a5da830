"""Engine pods with the plugin, on a real API server: what the operator mounts is what the endpoint needs to change a drafter."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aerie.manifests import naming, plugin_config_map
from aerie_drafter.bundle import find_bundle_path
from aerie_lab.testing import Namespace
from aerie_vllm.worker_protocol import compute_digest
from tests.lab.operator.test_operator import is_ready

Wait = Callable[..., dict[str, Any]]
MODELS = ("target", "eagle3", "eagle31")


@pytest.fixture
def claim(namespace: Namespace, tmp_path: Path) -> Iterator[str]:
    """A claim with the bundled models, a folder for each."""
    for name in MODELS:
        shutil.copytree(find_bundle_path(name), tmp_path / "models" / name)
    node = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-1"]}]}
    common = {"accessModes": ["ReadWriteOnce"], "storageClassName": namespace.name}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": namespace.name},
        "spec": {
            **common,
            "capacity": {"storage": "1Gi"},
            "persistentVolumeReclaimPolicy": "Retain",
            "local": {"path": str(tmp_path / "models")},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [node]}},
        },
    }
    namespace.lab.apply(volume)
    namespace.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "models"},
            "spec": {**common, "resources": {"requests": {"storage": "1Gi"}}},
        }
    )
    yield "models"
    namespace.lab.kubectl("delete", "persistentvolume", namespace.name, "--wait=false")


def resource(claim: str) -> dict[str, Any]:
    def source(path: str) -> dict[str, Any]:
        return {"source": {"persistentVolumeClaim": {"claimName": claim, "path": path}}}

    container = {"name": "engine", "lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}
    engine = {
        "image": "aerie.dev/lab/engine:v0.33.0",
        "version": "0.33.0",
        "env": [{"name": "PYTHONPATH", "value": "/mine"}],
        "podTemplate": {"spec": {"terminationGracePeriodSeconds": 10, "containers": [container]}},
    }
    rollout = {"preflight": {"mode": "Off"}, "inPlace": {"mode": "Auto"}}
    return {
        "apiVersion": "aerie.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "metadata": {"name": "chat"},
        "spec": {"replicas": 1, "model": source("target"), "drafter": source("eagle3"), "engine": engine, "rollout": rollout},
    }


def compute_files(name: str) -> dict[str, str]:
    """Return the SHA-256 of a bundled drafter's files."""
    return {
        file: hashlib.sha256((find_bundle_path(name) / file).read_bytes()).hexdigest()
        for file in ("config.json", "model.safetensors")
    }


def test_drafter_changes_in_a_pod_that_the_operator_built(
    namespace: Namespace, claim: str, inner_operator: Any, wait_for_status: Wait
) -> None:
    namespace.apply(resource(claim))
    wait_for_status(is_ready, "it is Ready, so the plugin's readiness answers")
    config_map = namespace.get("configmap", plugin_config_map.plugin_config_map_name("chat"))
    assert config_map["immutable"] is True
    secret = namespace.get("secret", naming.drafter_token_secret_name("chat"))
    token = base64.b64decode(secret["data"][naming.DRAFTER_TOKEN_KEY]).decode()
    (pod,) = json.loads(namespace.kubectl("get", "pods", "-l", f"{naming.NAME_LABEL}=chat", "-o", "json"))["items"]
    address = f"http://{pod['status']['podIP']}:{naming.ENGINE_PORT}/aerie/drafter"

    def call(method: str, body: dict[str, Any] | None = None, path: str = "") -> dict[str, Any]:
        """Call the endpoint from inside the lab's network."""
        program = (
            "import json, sys, urllib.request as u\n"
            f"r = u.Request({address + path!r}, method={method!r}, headers={{'Authorization': 'Bearer {token}'}})\n"
            "try: print(u.urlopen(r, data=sys.stdin.buffer.read() or None, timeout=60).read().decode())\n"
            "except u.HTTPError as error: sys.exit(error.read().decode())"
        )
        completed = subprocess.run(
            [*inner_operator.network_command(), "python3", "-c", program],
            input=json.dumps(body) if body else "",
            capture_output=True,
            text=True,
            check=False,
        )
        assert completed.returncode == 0, completed.stderr
        answer: dict[str, Any] = json.loads(completed.stdout)
        return answer

    assert call("GET")["loaded"]["digest"] == compute_digest(compute_files("eagle3"))
    folder, deadline = "/models/drafters/eagle31", time.monotonic() + 60
    while (prepared := call("POST", {"folder": folder}, "/prepare")["prepared"])["phase"] == "Running":
        assert time.monotonic() < deadline, prepared
        time.sleep(0.2)
    assert (prepared["phase"], prepared["files"]) == ("Ready", compute_files("eagle31")), prepared
    candidate = {"folder": folder, "files": prepared["files"], "lease_seconds": 60}
    assert call("PUT", candidate)["loaded"]["digest"] == compute_digest(compute_files("eagle31"))
    assert call("DELETE")["loaded"]["digest"] == compute_digest(compute_files("eagle3"))
