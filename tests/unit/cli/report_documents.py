"""Rollouts as the real operator decides and records them, in virtual time: the input of reports.

Guarantee: everything follows from seeds. Analyses are fed with simulated blocks, windows and answers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

from aerie.rollout.facts.arm_metrics import ArmMetrics
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.plan import Event, ReconcilePlan
from tests.snapshots import replace_facts
from tests.unit.rollout.in_place.fleet import serving_fleet
from tests.unit.rollout.world import World

Document = dict[str, Any]
CONFIG_MAP = ("ConfigMap", "chat-aerie-rollouts")


@dataclass(frozen=True)
class Documents:
    """What kubectl returns."""

    resource: Document
    config_map: Document | None
    events: list[Document]


class ReportedWorld(World):
    """World whose pods have metrics, and whose events are stored."""

    def __init__(self, **spec: Any) -> None:
        super().__init__(**spec)
        self.events: list[Document] = []

    def observed(self) -> Snapshot:
        snapshot = super().observed()
        deployments = [name for kind, name in self.objects if kind == "Deployment"]
        metrics = ArmMetrics(2.5, 0.0101, 0.1, (0.72, 0.48, 0.3))
        arms = dict.fromkeys(deployments, metrics)
        canary = self.status.get("canary")
        if canary is not None:
            arms[f"chat-{canary['revision']}"] = ArmMetrics(2.62, 0.0097, 0.1, (0.75, 0.52, 0.35))
        return replace_facts(snapshot, metrics_by_deployment=arms)

    def step(self, parts: int = 1000) -> ReconcilePlan:
        plan = super().step(parts)
        self.events += [self._store(event) for event in plan.events]
        return plan

    def _store(self, event: Event) -> Document:
        time = self.now.isoformat(timespec="microseconds").replace("+00:00", "Z")
        return {"type": event.type, "reason": event.reason, "message": event.message, "eventTime": time}


def _begin(**spec: Any) -> ReportedWorld:
    world = ReportedWorld(**spec)
    world.settle()
    world.drafter("eagle31")
    for _ in range(3):
        world.step()
        world.check()
    world.schedule()
    world.ready()
    world.step()
    return world


def _analyze(world: World) -> None:
    world.now += timedelta(minutes=5)
    world.step()
    assert world.status["phase"] == "Analyzing"


def _finish(world: World, *phases: str) -> None:
    for _ in range(60):
        if world.status["phase"] in phases:
            return
        world.schedule()
        world.ready()
        world.now += timedelta(minutes=2)
        world.step()
    raise AssertionError(world.status["phase"])


def _promoted() -> ReportedWorld:
    world = _begin(replicas=4)
    _analyze(world)
    while world.status["phase"] == "Analyzing":
        world.measure(1, +0.09)
    _finish(world, "Ready", "Monitoring")
    return world


def _rolled_back() -> ReportedWorld:
    world = _begin()
    _analyze(world)
    while world.status["phase"] == "Analyzing":
        world.measure(1, -0.09)
    _finish(world, "RolledBack")
    return world


def _in_progress() -> ReportedWorld:
    world = _begin()
    _analyze(world)
    world.measure(8, 0.01)
    return world


def _inconclusive() -> ReportedWorld:
    world = _begin(rollout={"analysis": {"maxDuration": "1h"}})
    _analyze(world)
    world.measure(30, -0.004)
    assert world.status["phase"] == "Held"
    return world


def _long() -> ReportedWorld:
    world = _begin(rollout={"analysis": {"maxDuration": "48h"}})
    _analyze(world)
    world.measure(1000, -0.004, dispersion=0.05)
    return world


def _none() -> ReportedWorld:
    world = ReportedWorld()
    world.settle()
    world.document["status"]["rolloutHistory"] = []
    return world


def _first() -> ReportedWorld:
    world = ReportedWorld()
    world.settle()
    return world


def _equal_requests() -> ReportedWorld:
    world = _begin(rollout={"analysis": {"shadow": {"source": "Mirror"}}})
    world.evaluator.gain = 0.03
    world.evaluate(14)
    _finish(world, "Ready", "Monitoring")
    return world


def _by_turns() -> World:
    prompts = {"source": "Prompts", "prompts": {"configMap": "prompts"}}
    fleet = serving_fleet(4, rollout={"inPlace": {"mode": "Auto"}, "analysis": {"shadow": prompts}})
    fleet.run(timedelta(minutes=2))
    fleet.drafter("better")
    fleet.wake()
    fleet.run_until_phase("Staging")
    fleet.run_until_phase("Ready")
    return fleet


_SCENARIOS: dict[str, Callable[[], World]] = {
    "promoted": _promoted,
    "rolled-back": _rolled_back,
    "in-progress": _in_progress,
    "inconclusive": _inconclusive,
    "equal-requests": _equal_requests,
    "by-turns": _by_turns,
    "first-revision": _first,
    "no-rollout": _none,
    "long": _long,
}
ENDED = ("promoted", "rolled-back", "equal-requests", "by-turns")
COMPARED = (*ENDED, "in-progress", "inconclusive")


@cache
def _run(name: str) -> Documents:
    world = _SCENARIOS[name]()
    resource = world.document | {"metadata": world.document["metadata"] | {"namespace": "prod"}}
    return Documents(resource, world.objects.get(CONFIG_MAP), getattr(world, "events", []))


def documents(name: str) -> Documents:
    """Return a copy of what kubectl returns in this scenario."""
    return copy.deepcopy(_run(name))
