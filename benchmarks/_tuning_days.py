"""Thirty days of a tuned resource, in virtual time, in clusters that a trial cannot succeed in.

The operator's own decisions run on the world of the rollout tests, which does what Kubernetes would. The tuner is as stubborn as
one can be: each half hour it advises K=5, whatever has happened. So all that keeps trials apart is what the operator remembers.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from aerie.engine.speculation import Static
from aerie.tuning.recommendation import Recommendation
from tests.unit.rollout.world import World, serving

DAYS = 30
STEP = timedelta(minutes=10)
NO_NODE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/2 nodes are available: Insufficient nvidia.com/gpu.",
}


@dataclass(frozen=True)
class Days:
    """What thirty days came to."""

    trials: int
    gpu_hours: float
    """Of pods beyond the replicas that had a node, one GPU each."""
    pending_hours: float
    """Of pods without a node, for which a cluster with an autoscaler would buy one."""
    spent: float
    """By the account of the status, in hours of a replica."""
    told: str
    """Reason and message of the condition SpeculationTuned at the end."""


def lived(fault: str, days: int = DAYS, **tuning: Any) -> Days:
    """`fault`: NoRoom, a cluster with as many GPUs as replicas; Crash, a setting whose engines end at once."""
    world = serving(speculation={"tuning": {"mode": "Auto", **tuning}})
    stable, replicas = world.desired_revision, world.document["spec"]["replicas"]
    end, trials, beyond, pending = world.now + timedelta(days=days), 0, 0.0, 0.0
    under_way, advised = False, world.now
    while world.now < end:
        if world.now >= advised:
            revision = world.status["stable"]["revision"]
            world.recommendation = Recommendation(
                revision, world.now.timestamp(), "Change", Static(5), (0.02, 0.08, 0.15), "K=5 is better."
            )
            advised += timedelta(minutes=30)
        for _ in range(3 if "trial" in world.status["speculation"] else 1):
            world.step()
            world.check()
            world.schedule()
            _befall(world, fault, stable, replicas)
        trial = "trial" in world.status["speculation"]
        trials += trial and not under_way
        under_way = trial
        hours = STEP / timedelta(hours=1)
        without = sum(NO_NODE in pod["status"].get("conditions", []) for pod in world.pods)
        pending += without * hours
        beyond += (len(world.pods) - without - replicas) * hours
        world.now += STEP
    said = next(one for one in world.status["conditions"] if one["type"] == "SpeculationTuned")
    spent = (world.status["speculation"].get("savings") or {}).get("spent", 0.0)
    return Days(trials, beyond, pending, spent, f"{said['reason']}: {said['message']}")


def _befall(world: World, fault: str, stable: str, replicas: int) -> None:
    world.ready(stable)
    if fault == "NoRoom":
        for pod in world.pods[replicas:]:
            pod["status"] = {"phase": "Pending", "conditions": [NO_NODE]}
        return
    trial = (world.status["speculation"].get("trial") or {}).get("revision")
    if trial is not None and any(_since(pod, world) >= STEP and trial in pod["metadata"]["name"] for pod in world.pods):
        world.crash(trial, 3)


def _since(pod: Any, world: World) -> timedelta:
    """Since when there is the pod."""
    return world.now - datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
