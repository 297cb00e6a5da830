"""Resources for rollout tests: pods that run nothing, or simulated engines with own requests; fast rollouts."""

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
    run_engine: bool | None = None,
    simulator: str | None = None,
    gpus: int = 0,
    canary: Object | None = None,
    analysis: Object | None = None,
    **rollout: Any,
) -> Object:
    """Return a resource; `run_engine`: whether its pods run their engine (default: with a simulator or a foreign image)."""
    run_engine = run_engine if run_engine is not None else simulator is not None or not engine.startswith("aerie.dev/lab/")
    pod_spec: Object = {"nodeSelector": {"kubernetes.io/hostname": node}, "terminationGracePeriodSeconds": 30}
    pod_spec["containers"] = [{"name": "engine", "lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}]
    if gated:
        pod_spec["schedulingGates"] = [{"name": "aerie.dev/test"}]
    template: Object = {"spec": pod_spec}
    if not run_engine:
        template["metadata"] = {"annotations": {"lab.aerie.dev/processless": "true"}}
    engine_spec: Object = {"image": f"{engine}:v0.33.0", "version": "0.33.0", "podTemplate": template}
    if simulator is not None:
        engine_spec["env"] = [{"name": "AERIE_SIMULATOR", "value": simulator}]
    if gpus:
        engine_spec["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    # Two labs on two cores scrape up to a second late. Pods that run nothing are scraped less often.
    interval, block, blocks = ("2s", "4s", 5) if simulator is not None else ("10s", "20s", 2)
    analysis_spec = {
        "warmupDuration": "1s",
        "blockDuration": block,
        "minBlocks": blocks,
        "minDuration": "2s",
        "maxDuration": "1h",
        "shadow": {"source": "None"},
    }
    analysis_spec |= {"margin": 0.05, "failureMargin": 0.1}
    return {
        "apiVersion": "aerie.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "model": image("target"),
            "drafter": image(drafter),
            "engine": engine_spec,
            # Long enough for slow machines: the drafters are compared here, not the times.
            "speculation": {
                "numSpeculativeTokens": 3,
                "tuning": {"slo": {"timePerOutputToken": "10s", "timeToFirstToken": "30s"}},
            },
            "rollout": {
                "inPlace": {"mode": "Off"},
                "canary": {"stepWeights": [], "stepDuration": "0s", "scaleDownDelay": "0s", **(canary or {})},
                "analysis": analysis_spec | (analysis or {}),
                **rollout,
            },
            "metrics": {"scrapeInterval": interval},
        },
    }


BUSY = (
    '{"startup_seconds": 0.5, "own_requests_per_second": 5, '
    '"step_time": {"formula": {"base_seconds": 0.03, "seconds_per_token": 1e-4}}}'
)
"""An engine with own requests, in steps so long that thirty engines take little CPU time."""
FROZEN = BUSY.replace("{", '{"metrics_corruption": "frozen", ', 1)
IDLE = '{"startup_seconds": 0.5}'
NO_METRICS = IDLE.replace("{", '{"metrics_corruption": "missing", ', 1)
BUSY_NO_METRICS = BUSY.replace("{", '{"metrics_corruption": "missing", ', 1)
LONG = {"warmupDuration": "10m"}
SHORT = {"maxDuration": "1m"}


def revision_of(document: Object) -> str:
    """Return the resource's desired revision."""
    return resolve_desired_revision(SpeculativeDeployment.from_dict(document)).revision


def with_manual_promotion(document: Object) -> Object:
    """Return the resource with a manual promotion of exactly this revision."""
    return {**document, "metadata": {**document["metadata"], "annotations": {PROMOTE_ANNOTATION: revision_of(document)}}}
