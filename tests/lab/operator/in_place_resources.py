"""Resources whose drafter can change in place on the lab's simulated engines, and what their pods report of it.

    claim    a folder for each model: the target, and drafters of which the engine accepts more or fewer tokens, or none at all
    engines  send themselves requests in steps so long that many of them take little CPU time

Guarantee: a drafter's state is read from the pod's own endpoint, with the resource's own token.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.manifests import naming
from aerie.rollout.revision.desired import resolve_desired_revision
from aerie_drafter.bundle import find_bundle_path
from aerie_lab.cluster import process
from aerie_lab.errors import LabError
from aerie_lab.testing import Namespace
from aerie_vllm.worker_protocol import compute_digest

Object = dict[str, Any]
OPTIONS = {
    "startup_seconds": 0.5,
    "own_requests_per_second": 5,
    "step_time": {"formula": {"base_seconds": 0.06, "seconds_per_token": 1e-4}},
}
MODELS: dict[str, tuple[str, Object]] = {
    "target": ("target", {}),
    "eagle3": ("eagle3", {}),
    "eagle31": ("eagle31", {}),
    "better": ("eagle31", {"simulator": {"logit_shift": 0.8}}),
    "worse": ("eagle31", {"simulator": {"logit_shift": -0.8}}),
    "unfit": ("eagle31", {"rms_norm_eps": 0.5}),
}
"""Bundled model of each folder, and what its config.json has beside."""


@contextlib.contextmanager
def create_model_claim(namespace: Namespace, folder: Path, name: str = "models") -> Iterator[str]:
    """Create a claim with the models on node-1, and delete its volume at the end."""
    for model, (bundled, changes) in MODELS.items():
        shutil.copytree(find_bundle_path(bundled), folder / model)
        config_file = folder / model / "config.json"
        config_file.write_text(json.dumps(json.loads(config_file.read_text()) | changes))
    node = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-1"]}]}
    volume_name = f"{namespace.name}-{name}"
    common = {"accessModes": ["ReadWriteOnce"], "storageClassName": volume_name}
    spec = {
        **common,
        "capacity": {"storage": "1Gi"},
        "persistentVolumeReclaimPolicy": "Retain",
        "local": {"path": str(folder)},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [node]}},
    }
    namespace.lab.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume_name}, "spec": spec})
    claim_spec = {**common, "resources": {"requests": {"storage": "1Gi"}}}
    namespace.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": claim_spec})
    try:
        yield name
    finally:
        namespace.lab.kubectl("delete", "persistentvolume", volume_name, "--wait=false")


def resource(
    name: str,
    drafter: str,
    *,
    claim: str = "models",
    replicas: int = 1,
    options: Object | None = None,
    in_place: Object | None = None,
    canary: Object | None = None,
    **rollout: Any,
) -> Object:
    """Return a resource with simulated engines that can change their drafter. `options`: those of the simulator."""

    def source(path: str) -> Object:
        return {"source": {"persistentVolumeClaim": {"claimName": claim, "path": path}}}

    container = {"name": "engine", "lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}
    engine = {
        "image": "aerie.dev/lab/engine:v0.33.0",
        "version": "0.33.0",
        "env": [
            {"name": "PYTHONPATH", "value": ""},  # the image is none of vLLM's own
            {"name": "AERIE_SIMULATOR", "value": json.dumps(OPTIONS | (options or {}))},
        ],
        "podTemplate": {"spec": {"terminationGracePeriodSeconds": 10, "containers": [container]}},
    }
    return {
        "apiVersion": "aerie.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "model": source("target"),
            "drafter": source(drafter),
            "engine": engine,
            # Long enough for slow machines: the drafters are compared here, not the times.
            "speculation": {
                "numSpeculativeTokens": 3,
                "tuning": {"slo": {"timePerOutputToken": "10s", "timeToFirstToken": "30s"}},
            },
            "rollout": {
                "preflight": {"mode": "Off"},
                "inPlace": {"mode": "Auto", "minDuration": "10s", **(in_place or {})},
                "canary": {"stepWeights": [], "stepDuration": "0s", "scaleDownDelay": "0s", **(canary or {})},
                "analysis": {
                    "margin": 0.05,
                    "failureMargin": 0.1,
                    "warmupDuration": "1s",
                    "maxDuration": "1h",
                    "shadow": {"source": "None"},
                },
                **rollout,
            },
            "metrics": {"scrapeInterval": "2s"},
        },
    }


def compute_model_digest(folder: Path, model: str) -> str:
    """Return the digest of a model's files in the claim's folder, as pods report it."""
    files = ("config.json", "model.safetensors")
    return compute_digest({name: hashlib.sha256((folder / model / name).read_bytes()).hexdigest() for name in files})


def revision_of(document: Object) -> str:
    """Return the resource's desired revision."""
    return resolve_desired_revision(SpeculativeDeployment.from_dict(document)).revision


def list_engine_pods(namespace: Namespace, name: str) -> list[Object]:
    """Return the engine pods of a resource that are not terminating."""
    pods = namespace.list_all("pods", f"{naming.NAME_LABEL}={name}")
    return [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]


def restart_counts(pods: Iterable[Object]) -> dict[str, int]:
    """Return the restarts of each pod's containers, by its uid."""
    return {
        pod["metadata"]["uid"]: sum(status["restartCount"] for status in pod["status"].get("containerStatuses") or [])
        for pod in pods
    }


_PROGRAM = """
import json, sys, urllib.request
states = {}
for name, address in json.load(sys.stdin).items():
    request = urllib.request.Request(address, headers={"Authorization": "Bearer " + sys.argv[1]})
    try:
        states[name] = json.load(urllib.request.urlopen(request, timeout=10))
    except OSError as error:
        states[name] = {"error": str(error)}
print(json.dumps(states))
"""


def read_drafter_states(namespace: Namespace, name: str, pods: Iterable[Object] | None = None) -> dict[str, Object]:
    """Return what each pod of a resource reports of its drafter, by the pod's name. Raises LabError if one does not answer."""
    token = base64.b64decode(
        namespace.get("secret", naming.drafter_token_secret_name(name))["data"][naming.DRAFTER_TOKEN_KEY]
    ).decode()
    addresses = {
        pod["metadata"]["name"]: f"http://{pod['status'].get('podIP')}:{naming.ENGINE_PORT}/aerie/drafter?after=0"
        for pod in (list_engine_pods(namespace, name) if pods is None else pods)
    }
    network = [sys.executable, "-m", "aerie_lab.sandbox.inside", "--network", str(process.find_lab_pid(namespace.lab.folder))]
    completed = subprocess.run(
        [*network, sys.executable, "-c", _PROGRAM, token],
        input=json.dumps(addresses),
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode != 0:
        raise LabError(completed.stderr)
    states: dict[str, Object] = json.loads(completed.stdout)
    for pod, state in states.items():
        if "error" in state:
            raise LabError(f"pod {pod} does not answer: {state['error']}")
    return states


def serves_alone(state: Object, digest: str) -> bool:
    """Return whether a drafter is a pod's own and loaded, without a lease."""
    return (state["own"] or {}).get("digest") == (state["loaded"] or {}).get("digest") == digest and state["lease"] is None
