"""Resources of the tests of rollouts: pods that run nothing, or simulated engines that ask themselves; rollouts in a hurry."""

from __future__ import annotations

from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.rollout.canary.messages import PROMOTE_ANNOTATION
from aerie.rollout.revision.desired import resolve_desired_revision

Object = dict[str, Any]


def image(name: str) -> Object:
    return {"source": {"image": {"reference": f"models.example/{name}@sha256:{'0' * 64}"}}}


def resource(
    name: str,
    drafter: str = "eagle3",
    *,
    replicas: int = 1,
    node: str = "node-1",
    gated: bool = False,
    engine: str = "aerie.dev/lab/engine",
    runs: bool | None = None,
    simulator: str | None = None,
    gpus: int = 0,
    canary: Object | None = None,
    analysis: Object | None = None,
    **rollout: Any,
) -> Object:
    """`runs`: whether its pods run their engine, which they do where there is a simulator or another engine than the lab's."""
    runs = runs if runs is not None else simulator is not None or not engine.startswith("aerie.dev/lab/")
    pods: Object = {"nodeSelector": {"kubernetes.io/hostname": node}, "terminationGracePeriodSeconds": 30}
    pods["containers"] = [{"name": "engine", "lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}]
    if gated:
        pods["schedulingGates"] = [{"name": "aerie.dev/test"}]
    template: Object = {"spec": pods}
    if not runs:
        template["metadata"] = {"annotations": {"lab.aerie.dev/processless": "true"}}
    run: Object = {"image": f"{engine}:v0.33.0", "version": "0.33.0", "podTemplate": template}
    if simulator is not None:
        run["env"] = [{"name": "AERIE_SIMULATOR", "value": simulator}]
    if gpus:
        run["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    # Pods that run nothing are looked at less often.
    interval, block, blocks = ("1s", "2s", 5) if simulator is not None else ("10s", "20s", 2)
    quick = {"warmupDuration": "1s", "blockDuration": block, "minBlocks": blocks, "minDuration": "2s", "maxDuration": "1h"}
    quick |= {"margin": 0.05, "failureMargin": 0.1}
    return {
        "apiVersion": "aerie.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "model": image("target"),
            "drafter": image(drafter),
            "engine": run,
            # So long that a slow machine does not fail them: what is compared here is the drafters.
            "speculation": {
                "numSpeculativeTokens": 3,
                "tuning": {"slo": {"timePerOutputToken": "10s", "timeToFirstToken": "30s"}},
            },
            "rollout": {
                "canary": {"stepWeights": [], "stepDuration": "0s", "scaleDownDelay": "0s", **(canary or {})},
                "analysis": quick | (analysis or {}),
                **rollout,
            },
            "metrics": {"scrapeInterval": interval},
        },
    }


BUSY = (
    '{"startup_seconds": 0.5, "own_requests_per_second": 5, '
    '"step_time": {"formula": {"base_seconds": 0.03, "seconds_per_token": 1e-4}}}'
)
"""An engine that asks itself, in steps so long that thirty of them take little of a processor."""
FROZEN = BUSY.replace("{", '{"metrics_corruption": "frozen", ', 1)
IDLE = '{"startup_seconds": 0.5}'
GONE = IDLE.replace("{", '{"metrics_corruption": "missing", ', 1)
BUSY_GONE = BUSY.replace("{", '{"metrics_corruption": "missing", ', 1)
LONG = {"warmupDuration": "10m"}
SHORT = {"maxDuration": "1m"}


def revision_of(document: Object) -> str:
    """The revision that a resource asks for."""
    return resolve_desired_revision(SpeculativeDeployment.from_dict(document)).revision


def accepted(document: Object) -> Object:
    """With a person's word beforehand that the canary of this very revision is to be promoted."""
    return {**document, "metadata": {**document["metadata"], "annotations": {PROMOTE_ANNOTATION: revision_of(document)}}}
