"""Thirty days of a tuned resource, in virtual time, in clusters where no trial can succeed.

The operator's own decisions run on the world of the rollout tests, which simulates Kubernetes. The tuner recommends K=5 every
half hour, whatever has happened. So only the operator's own record of failures delays the next trial.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from aerie.engine.speculation import Static
from aerie.tuning.recommendation import Recommendation
from tests.unit.rollout.world import World, serving_world

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
    """Totals of thirty days."""

    trials: int
    gpu_hours: float
    """Hours of scheduled pods beyond the replicas, one GPU each."""
    pending_hours: float
    """Hours of pods without a node, for which an autoscaler would add one."""
    spent: float
    """Hours of a replica that the status counts as spent."""
    condition_message: str
    """Reason and message of the condition SpeculationTuned at the end."""


def simulate_days(fault: str, days: int = DAYS, **tuning: Any) -> Days:
    """Simulate days with a fault: NoRoom, a cluster with as many GPUs as replicas; Crash, a setting whose engines crash."""
    world = serving_world(speculation={"tuning": {"mode": "Auto", **tuning}})
    stable, replicas = world.desired_revision, world.document["spec"]["replicas"]
    end, trials, surge_hours, pending_hours = world.now + timedelta(days=days), 0, 0.0, 0.0
    in_trial, recommended_at = False, world.now
    while world.now < end:
        if world.now >= recommended_at:
            revision = world.status["stable"]["revision"]
            world.recommendation = Recommendation(
                revision, world.now.timestamp(), "Change", Static(5), (0.02, 0.08, 0.15), "K=5 is better."
            )
            recommended_at += timedelta(minutes=30)
        for _ in range(3 if "trial" in world.status["speculation"] else 1):
            world.step()
            world.check()
            world.schedule()
            _inject_fault(world, fault, stable, replicas)
        trial = "trial" in world.status["speculation"]
        trials += trial and not in_trial
        in_trial = trial
        hours = STEP / timedelta(hours=1)
        unscheduled = sum(NO_NODE in pod["status"].get("conditions", []) for pod in world.pods)
        pending_hours += unscheduled * hours
        surge_hours += (len(world.pods) - unscheduled - replicas) * hours
        world.now += STEP
    condition = next(row for row in world.status["conditions"] if row["type"] == "SpeculationTuned")
    spent = (world.status["speculation"].get("savings") or {}).get("spent", 0.0)
    return Days(trials, surge_hours, pending_hours, spent, f"{condition['reason']}: {condition['message']}")


def _inject_fault(world: World, fault: str, stable: str, replicas: int) -> None:
    world.ready(stable)
    if fault == "NoRoom":
        for pod in world.pods[replicas:]:
            pod["status"] = {"phase": "Pending", "conditions": [NO_NODE]}
        return
    trial = (world.status["speculation"].get("trial") or {}).get("revision")
    if trial is not None and any(_age(pod, world) >= STEP and trial in pod["metadata"]["name"] for pod in world.pods):
        world.crash(trial, 3)


def _age(pod: Any, world: World) -> timedelta:
    """Return the age of the pod."""
    return world.now - datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
