"""A minimal Kubernetes for the operator's decisions: the user, the operator and its observations, over a cluster's state.

Guarantees: time passes only in a call of a test. The operator may crash after any part of a plan. `measure` closes blocks of an
analysis as a scraper would.
Not guaranteed: pods and Jobs that proceed with time. `settle` runs them, and `cluster.py` has controllers in virtual time.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from aerie.analysis.baseline import BaselineCalibration
from aerie.analysis.equivalence import EquivalenceResult, PromptDifference
from aerie.analysis.measurement.blocks import ArmCounts, ClosedBlock
from aerie.analysis.measurement.counts import EngineCounts
from aerie.api.status import CanaryArm
from aerie.engine.models.drafter_catalog import DrafterCatalog
from aerie.manifests.preflight_job import PreflightJobConfig
from aerie.manifests.rollout_history_config_map import RolloutHistory
from aerie.rollout.canary.evaluation import read_counted_batches
from aerie.rollout.facts.arm_metrics import ArmMetrics
from aerie.rollout.facts.concurrency import StartPermission
from aerie.rollout.facts.context_length import ContextLengths
from aerie.rollout.facts.last_valid_spec import read_resource
from aerie.rollout.facts.pairs import PairObservation
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.plan import ReconcilePlan
from aerie.rollout.reconcile import build_reconcile_plan
from aerie.rollout.revision.desired import resolve_desired_revision
from aerie.rollout.revision.drafter_selection import select_drafter
from aerie.rollout.trials.effective_setting import resolve_effective_setting
from aerie.tuning.recommendation import Recommendation
from tests.snapshots import build_snapshot
from tests.unit.rollout.cluster_state import ClusterState, copied
from tests.unit.rollout.simulated_evaluator import SimulatedEvaluator

IMAGE = PreflightJobConfig("aerie.dev/aerie:test")
START = datetime(2026, 1, 1, tzinfo=UTC)
DRAFTERS = ("eagle3", "eagle31", "refused")
K_OF_SPEC = 3
"""K if the spec does not set it."""


def by_pods(rollout: dict[str, Any]) -> dict[str, Any]:
    """Return spec.rollout where a test does not set these fields: most are about canaries under the traffic of users."""
    analysis = {"shadow": {"source": "None"}} | rollout.get("analysis", {})
    return {"inPlace": {"mode": "Off"}} | rollout | {"analysis": analysis}


class World(ClusterState):
    """One resource, its children and pods, and a clock."""

    def __init__(self, **spec: Any) -> None:
        full_spec = {
            "replicas": 2,
            "model": {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "target"}}},
            "engine": {"image": "vllm/vllm-openai:v0.33.0"},
            "drafter": {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "eagle3"}}},
            **spec,
            "rollout": by_pods(spec.get("rollout", {})),
        }
        document: dict[str, Any] = {
            "apiVersion": "aerie.dev/v1alpha1",
            "kind": "SpeculativeDeployment",
            "metadata": {"name": "chat", "namespace": "default", "uid": "u1", "generation": 1},
            "spec": full_spec,
        }
        super().__init__(document, START)
        self.checks: list[dict[str, Any]] = []
        self.name_conflicts: list[dict[str, Any]] = []
        self.catalog = DrafterCatalog(())
        self.blocks: list[ClosedBlock] = []
        self.metrics_source_error: str | None = ""
        self.baseline_calibration: BaselineCalibration | None = None
        self.equivalence_result: EquivalenceResult | None = None
        self.context_lengths: ContextLengths | None = None
        self.metrics: dict[str, ArmMetrics] = {}
        """Metrics of the engines, by name of their Deployment."""
        self.evaluator = SimulatedEvaluator()
        self.pairs: PairObservation | None = None
        """What the operator has read from the evaluator."""
        self.recommendation: Recommendation | None = None
        self.start_permission = StartPermission()
        self.rollout_history: RolloutHistory | None = None
        """What the operator keeps in memory of the rollout in progress."""
        self.nodes: dict[str, dict[str, str]] = {}
        """Labels of the nodes whose hardware the operator has observed."""
        self.rng = random.Random(1)  # noqa: S311 - no secrets

    # -- the user
    def edit(self, **spec: Any) -> None:
        self.document["spec"] |= spec
        self.document["spec"]["rollout"] = by_pods(self.document["spec"]["rollout"])
        self.document["metadata"]["generation"] += 1

    def drafter(self, path: str) -> None:
        self.edit(drafter={"source": {"persistentVolumeClaim": {"claimName": "models", "path": path}}})

    def annotate(self, **actions: str) -> None:
        annotations = self.document["metadata"].setdefault("annotations", {})
        annotations |= {f"aerie.dev/{action}": value for action, value in actions.items()}

    # -- the operator
    def observed(self) -> Snapshot:
        children = tuple(copied(list(self.objects.values())))
        resource, substitute = read_resource(copied(self.document), children)
        return build_snapshot(
            resource=resource,
            spec_substitution=substitute,
            children=children,
            name_conflicts=tuple(self.name_conflicts),
            pods=tuple(copied(self.pods)),
            preflight_pods=tuple(copied(self.checks)),
            blocks=tuple(self.blocks),
            metrics_source_error=self.metrics_source_error,
            baseline_calibration=self.baseline_calibration,
            equivalence_result=self.equivalence_result,
            context_lengths=self.context_lengths,
            metrics_by_deployment=dict(self.metrics),
            pairs=self.pairs if (self.status.get("canary") or {}).get("phase") == "Evaluating" else None,
            recommendation=self.recommendation,
            start_permission=self.start_permission,
            rollout_history=self.rollout_history,
            node_labels=self.nodes,
        )

    def plan(self) -> ReconcilePlan:
        return build_reconcile_plan(self.observed(), IMAGE, self.now, self.catalog)

    def step(self, parts: int = 1000) -> ReconcilePlan:
        """Reconcile once, and crash after `parts` writes."""
        plan, self.routed_services = self.plan(), set(self.route_weights())
        writes: list[Any] = [("apply", item) for item in plan.objects_to_apply]
        writes += [("delete", reference) for reference in plan.objects_to_delete]
        writes += [("status", plan.status)]
        writes += [("apply", plan.history_config_map)] if plan.history_config_map is not None else []
        self.rollout_history = plan.rollout_history if parts >= len(writes) else None
        for operation, item in writes[:parts]:
            if operation == "apply":
                self.apply(item)
            elif operation == "delete":
                current = self.objects.get((item.kind, item.name))
                assert current is not None
                assert current["metadata"]["uid"] == item.uid
                del self.objects[item.kind, item.name]
            else:
                self.document["status"] = json.loads(json.dumps(item.to_dict(), allow_nan=False))  # the API server's JSON
        return plan

    # -- the scraper and preflight
    def measure(self, blocks: int, better: float, *, dispersion: float = 0.01, seconds: float = 120, step: bool = True) -> None:
        """Close blocks in which the canary's acceptance length is the control's times (1 + better), and reconcile each."""
        for number in range(blocks):
            began = self.now.timestamp()
            self.now += timedelta(seconds=seconds)
            length = 2.5 * (1 + self.rng.gauss(0, dispersion))
            canary_side = side(length * (1 + better) * (1 + self.rng.gauss(0, dispersion)))
            block = ClosedBlock(began, self.now.timestamp(), canary_side, side(length), stable=stable_side(length, number))
            self.blocks = [*self.blocks[-3:], block]
            if step:
                self.step()

    def read_pairs(self) -> None:
        """Fetch counts from the evaluator, as the operator does: what the status has is acknowledged."""
        self.evaluator.follow(self.objects.get(("Deployment", "chat-evaluator")))
        arm = self.status.get("canary")
        evaluation = CanaryArm.model_validate(arm).evaluation if arm is not None else None
        if evaluation is None or evaluation.start_time is None or evaluation.result is not None:
            self.pairs = None
            return
        process = self.pairs.process if self.pairs is not None else ""
        self.pairs = self.evaluator.fetch(process, read_counted_batches(evaluation).get(process, 0))

    def evaluate(self, fetches: int = 1, seconds: float = 10) -> None:
        """Fetch counts from the evaluator so many times, and reconcile after each."""
        for _ in range(fetches):
            self.now += timedelta(seconds=seconds)
            self.read_pairs()
            self.step()

    def measure_time(self, blocks: int, slower: float, *, dispersion: float = 0.01, step: bool = True) -> None:
        """Close blocks in which the canary's time per output token is the control's times (1 + slower), and reconcile each."""
        for _ in range(blocks):
            began = self.now.timestamp()
            self.now += timedelta(seconds=120)
            seconds = 50 * (1 + self.rng.gauss(0, dispersion))
            canary_side = side(2.5, seconds=seconds * (1 + slower) * (1 + self.rng.gauss(0, dispersion)))
            self.blocks = [*self.blocks[-3:], ClosedBlock(began, self.now.timestamp(), canary_side, side(2.5, seconds=seconds))]
            if step:
                self.step()

    def measure_alone(self, blocks: int, length: float, *, dispersion: float = 0.01) -> None:
        """Close blocks of the stable pods alone, and reconcile each."""
        for _ in range(blocks):
            began = self.now.timestamp()
            self.now += timedelta(seconds=120)
            stable_side = side(length * (1 + self.rng.gauss(0, dispersion)))
            self.blocks = [*self.blocks[-3:], ClosedBlock(began, self.now.timestamp(), stable_side, None)]
            self.step()

    def check(self) -> None:
        """Finish every running preflight Job: the drafter named `refused` is rejected."""
        for (kind, name), item in self.objects.items():
            if kind != "Job" or item.get("status") or ("ConfigMap", name) not in self.objects:
                continue  # ended, or its pod waits for the volume
            data = json.loads(self.objects["ConfigMap", name]["data"]["resource.json"])
            drafter = data["spec"].get("drafter") or {}
            bad = drafter.get("source", {}).get("persistentVolumeClaim", {}).get("path") == "refused"
            self.conclude(name, {"passed": not bad, "summary": "checked.", "errors": ["✗ C9 weights: torn."] if bad else []})

    def conclude(self, name: str, result: dict[str, Any]) -> None:
        job = self.objects["Job", name]
        kind = "Complete" if result["passed"] else "Failed"
        job["status"] = {"conditions": [{"type": kind, "status": "True", "lastTransitionTime": self.now.isoformat()}]}
        state = {"terminated": {"exitCode": 0 if result["passed"] else 1, "message": json.dumps(result)}}
        labels = job["spec"]["template"]["metadata"]["labels"]
        owner = {"controller": True, "uid": job["metadata"]["uid"]}
        metadata = {"name": f"{name}-x", "labels": labels, "creationTimestamp": self.now.isoformat(), "ownerReferences": [owner]}
        self.checks.append(
            {"kind": "Pod", "metadata": metadata, "status": {"containerStatuses": [{"name": "preflight", "state": state}]}}
        )

    def settle(self) -> None:
        """Run reconciles, pods and Jobs until nothing changes any more."""
        for _ in range(20):
            before = copied((self.document, self.objects, self.pods))
            self.step()
            self.check()
            self.schedule()
            self.ready()
            if before == (self.document, self.objects, self.pods):
                return
        raise AssertionError("it never settles")

    def settle_until(self, phase: str) -> None:
        """Run reconciles and Jobs, without pods, until the resource is in the phase."""
        for _ in range(20):
            self.step()
            if self.status["phase"] == phase:
                return
            self.check()
        raise AssertionError(f"{self.status['phase']} instead of {phase}: {self.message('Progressing')}")

    # -- for assertions
    @property
    def status(self) -> dict[str, Any]:
        return dict(self.document.get("status") or {})

    def condition(self, kind: str) -> tuple[str, str]:
        condition = next(entry for entry in self.status["conditions"] if entry["type"] == kind)
        return condition["status"], condition["reason"]

    def message(self, kind: str) -> str:
        return str(next(condition for condition in self.status["conditions"] if condition["type"] == kind)["message"])

    @property
    def desired_revision(self) -> str:
        """Return the revision that the spec requests, or a current selection or trial of the tuner."""
        observed = self.observed()
        observed = replace(observed, resource=select_drafter(observed.resource, self.catalog).resource)
        return resolve_desired_revision(observed.resource, setting=resolve_effective_setting(observed, self.now).setting).revision


def side(length: float, drafts: float = 2000, seconds: float = 50) -> ArmCounts:
    """Return a block's counts of one pod with this acceptance length, with time for 5,000 tokens at a length of 2.5: a step takes
    the same time whatever its length. All other counts are unremarkable."""
    steps = 5000 / length if drafts else 0
    counts = EngineCounts(
        drafts=drafts,
        accepted_tokens=drafts * (length - 1),
        draft_tokens=3 * drafts,
        decode_tokens=5000,
        decode_seconds=seconds * 2.5 / length,
        output_tokens=5200,
        finished_requests=200,
        first_tokens=200,
        first_token_seconds=20,
        timed_requests=200,
        request_steps=steps,
        iterations=steps / 4,
    )
    return ArmCounts(1, counts, 4.0, {"pod": counts})


def stable_side(length: float, number: int) -> ArmCounts:
    """Return a block's counts of three stable pods, which differ by half a percent and are alike on average over the blocks."""
    pods = {f"stable-{pod}": side(length * (1 + ((number + pod) % 3 - 1) / 200)).counts for pod in range(3)}
    return ArmCounts(3, sum(pods.values(), EngineCounts()), 4.0, pods)


def masked(text: str, **revisions: str) -> str:
    """Return the text with names in place of these and all other revisions, which change with every pod template."""
    for name, revision in revisions.items():
        text = text.replace(revision, name)
    return re.sub(r"\b[0-9a-f]{10}\b", "REVISION", text)


def equivalence_result(canary_differences: int, control_differences: int = 0, prompt_count: int = 24) -> EquivalenceResult:
    """Return greedy answers of which so many differ only in the canary, or only in the control."""
    prompts = [
        *[PromptDifference(canary_position=2)] * canary_differences,
        *[PromptDifference(control_position=7)] * control_differences,
        *[PromptDifference()] * (prompt_count - canary_differences - control_differences),
    ]
    return EquivalenceResult(tuple(prompts), prompt_count)


def serving_world(**spec: Any) -> World:
    world = World(**spec)
    world.settle()
    return world


def world_in_phase(phase: str, **spec: Any) -> tuple[World, str]:
    """Return a world with two stable pods whose canary is in this phase, and the stable revision."""
    world = serving_world(**spec)
    old = world.desired_revision
    world.drafter("eagle31")
    for _ in range(3):
        world.step()
        world.check()
    if phase == "Starting":
        return world, old
    world.schedule()
    world.ready()
    world.step()
    if phase == "Evaluating":
        assert world.status["phase"] == phase, world.message("Progressing")
        return world, old
    for _ in range(30):
        if world.status["phase"] != "Evaluating":
            break
        world.evaluate()
    if phase == "WarmingUp":
        return world, old
    world.now += timedelta(minutes=5)
    world.step()
    assert world.status["phase"] == "Analyzing"
    for _ in range(30 if phase in ("Ramping", "Promoting") else 0):
        if world.status["phase"] == "Ramping":
            break
        world.measure(1, +0.2)
    for _ in range(20 if phase == "Promoting" else 0):
        if world.status["phase"] == phase:
            break
        world.schedule()
        world.ready()
        world.now += timedelta(minutes=5)
        world.step()
    assert world.status["phase"] == phase
    return world, old


def monitored_world(**spec: Any) -> tuple[World, str]:
    """Return a world whose canary has just been promoted, and the previous revision, whose pods are retained."""
    rollout = spec.pop("rollout", {})
    rollout = {**rollout, "canary": {"scaleDownDelay": "10m", **rollout.get("canary", {})}}
    world, old = world_in_phase("Promoting", **{"replicas": 4, **spec}, rollout=rollout)
    for _ in range(20):
        world.schedule()
        world.ready()
        world.step()
        if world.status["phase"] != "Promoting":
            return world, old
    raise AssertionError("it is not promoted")
