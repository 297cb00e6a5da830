"""A random walk through the events of a resource and its cluster, from a seed: edits, manual actions, an autoscaler, pods, nodes,
quotas, API errors, crashes of the operator, lost statuses.

Each step is one event and some reconciles; each reconcile is checked against the invariants (invariants.py). At the end of a walk
three copies are left alone: unchanged, with a new spec, and healed.

Guarantees: with the same code, the same seed makes the same walk. `InvariantError` names the violated invariant and the steps
that led to it.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.unit.rollout import invariants
from tests.unit.rollout.cluster import MINUTE, ApiError, Cluster, Reconcile

SIZES = (0, 1, 1, 2, 2, 3, 4, 4, 5, 8, 24, 40, 64)
DRAFTERS = ("eagle3", "eagle31", "eagle32", "equal", "worse", "crashing", "hanging", "refused")
KINDS = ("Deployment", "Deployment", "Service", "ConfigMap", "PodDisruptionBudget", "Job", "HTTPRoute", "Status")
LISTS = ("Service", "PodDisruptionBudget", "HTTPRoute", "Job")
CODES = (404, 409, 422, 429, 500)
INVARIANTS = (
    "no_exception",
    "no_weight_without_a_pod",
    "no_serving_pod_removed",
    "arms_are_of_different_revisions",
    "isolated_canary_is_not_reached",
    "no_rollback_for_gpu_time",
    "ended_or_waits_for_user",
    "new_spec_gets_pods",
    "healthy_spec_is_promoted",
    "all_replicas_serve",
    "no_spin",
    "bounded_reconciles",
    "no_writes_at_rest",
)
SHADOW = {"source": "Prompts", "prompts": {"configMap": "prompts"}, "maxDuration": "10m"}
PARENTS = [{"name": "public", "namespace": "gateways"}]
EDITS: dict[str, tuple[Any, ...]] = {
    "rollout.canary.replicas": (1, 2, 3, 10, 100),
    "rollout.canary.control": ("Fresh", "Stable"),
    "rollout.canary.capacity": ("Surge", "Reuse"),
    "rollout.canary.stepWeights": ([], [25, 50], [60], [1, 2, 3, 50, 99]),
    "rollout.canary.stepDuration": ("0s", "5m", "1h"),
    "rollout.canary.scaleDownDelay": ("0s", "10m", "3h"),
    "rollout.canary.approval": ("Automatic", "Manual"),
    "rollout.analysis.blockDuration": ("30s", "2m", "5m"),
    "rollout.analysis.warmupDuration": ("0s", "1m", "5m"),
    "rollout.analysis.minBlocks": (2, 5),
    "rollout.analysis.minDuration": ("0s", "4m", "30m"),
    "rollout.analysis.maxDuration": ("40m", "1h", "4h"),
    "rollout.analysis.goal": ("NonInferior", "Superior"),
    "rollout.analysis.margin": (0.02, 0.1),
    "rollout.analysis.outputEquivalence": ("Enabled", "Disabled"),
    "rollout.analysis.onInconclusive": ("Hold", "Rollback"),
    "rollout.traffic": (
        {"mode": "Service"},
        {"mode": "Gateway", "gateway": {"parentRefs": PARENTS}},
        {"mode": "Gateway", "gateway": {"parentRefs": PARENTS, "hostnames": ["chat.example.com"]}},
    ),
    "rollout.disruption": ({"budget": "None"}, {"budget": "Managed"}, {"maxUnavailable": "20%"}),
    "rollout.progressDeadline": ("10m", "30m", "1h"),
    "rollout.paused": (True, False),
    "rollout.preflight": ({"mode": "Off"}, {"mode": "Warn"}, {"acceptedChecks": ["C2"]}, {"mode": "Enforce"}),
    "replicas": SIZES,
    "speculation": (
        {"numSpeculativeTokens": 0},
        {"numSpeculativeTokens": 2},
        {"numSpeculativeTokens": 5},
        {"tuning": {"mode": "Recommend"}},
        {"tuning": {"mode": "Auto"}},
    ),
    "engine": (
        {"image": "vllm/vllm-openai:v0.33.0"},
        {"image": "vllm/vllm-openai:v0.33.0", "args": ["--max-model-len=4096"]},
        {"image": "vllm/vllm-openai:v0.33.0", "env": [{"name": "A", "value": "1"}]},
        {"image": "vllm/vllm-openai:v0.33.0", "resources": {"limits": {"nvidia.com/gpu": "2"}}},
    ),
    "model.source.persistentVolumeClaim.path": ("target", "other"),
    "drafter": (None, *({"source": {"persistentVolumeClaim": {"claimName": "models", "path": path}}} for path in DRAFTERS)),
}
"""Values of every field that may change."""


class InvariantError(AssertionError):
    """Violation of an invariant."""

    def __init__(self, invariant: str, seed: int, violation: str, trail: list[str]) -> None:
        steps = "\n".join(f"  {step}" for step in trail)
        super().__init__(f"{invariant}, seed {seed}: {violation}\n{steps}")
        self.invariant, self.seed, self.violation = invariant, seed, violation


class Walk:
    """One walk from one seed."""

    def __init__(self, seed: int, cluster: Cluster | None = None, *, mixed: bool = False, shadow: bool = False) -> None:
        """Create a walk; `mixed`: nodes have one GPU and then another one, which is five times as slow. `shadow`: canaries have a
        shadow evaluation."""
        self.seed, self.rng = seed, random.Random(seed)  # noqa: S311 - no secrets
        self.steps, self.trail = 0, list[str]()
        self.phases = Counter[str]()
        """Number of reconciles, by the phase that they led to."""
        self.alone_duration = timedelta(0)
        """Total time for which the copies were left alone."""
        rng = self.rng
        if cluster is None:
            load, drain = rng.choice([20.0, 120.0, 300.0, 900.0]), rng.choice([5.0, 30.0, 110.0])
            replicas = rng.choice(SIZES)
            traffic = rng.choice(EDITS["rollout.traffic"])
            analysis = {"minDuration": "4m", "warmupDuration": "1m", **({"shadow": SHADOW} if shadow else {})}
            rollout = {"analysis": analysis, "traffic": traffic}
            cluster = Cluster(seed, load=load, drain=drain, replicas=replicas, rollout=rollout)
            self.trail.append(f"{replicas} replicas that load in {load:.0f} s and drain in {drain:.0f} s, mode {traffic['mode']}")
        self.cluster = cluster
        self.cluster.on_reconcile = self._check_reconcile
        self.actions: list[tuple[int, Callable[[], str]]] = [
            (30, self.time_passes),
            (6, self.an_operator_crashes),
            (12, self.a_field_changes),
            (10, self.another_drafter),
            (6, self.an_autoscaler),
            (5, self.a_user_acts),
            (12, self.pods_fail),
            (3, self.an_image_is_unpullable),
            (4, self.room_changes),
            (6, self.the_api_server_rejects),
            (2, self.the_status_is_lost),
            (3, self.a_child_is_deleted),
            (3, self.the_gateway),
            (2, self.a_kind_cannot_be_listed),
            (4, self.the_requests),
            (2, self.metrics_are_invalid),
            (4, self.all_heals),
            (6, self.the_phase_changes),
        ]
        if mixed:
            self.actions.append((12, self.other_nodes))
        if shadow:
            self.actions.append((8, self.the_evaluator))

    @property
    def decisions(self) -> int:
        return sum(self.phases.values())

    # ----------------------------------------------------------------------------------------------------------------- the walk
    def go(self, steps: int) -> Walk:
        """Take this number of steps."""
        for _ in range(steps):
            self.step()
        return self

    def step(self) -> None:
        weights = [weight for weight, _ in self.actions]
        action = self.rng.choices([action for _, action in self.actions], weights)[0]
        self.steps += 1
        self.trail.append(action.__name__)
        self._run_guarded(lambda: self._record_action(action))

    def _record_action(self, action: Callable[[], str]) -> None:
        index = len(self.trail) - 1
        outcome = action()
        status = self.cluster.document.get("status") or {}
        self.trail[index] = f"{self.cluster.now:%d %H:%M:%S} {self.trail[index]}: {outcome} → {status.get('phase')}"

    def finish(self) -> None:
        """Leave copies alone: unchanged, with a new spec, and healed."""
        for check in (invariants.ended_or_waits_for_user, invariants.new_spec_gets_pods, invariants.healthy_spec_is_promoted):
            copied = self._branch()
            self._check(check.__name__, lambda check=check, copied=copied: check(copied))  # type: ignore[misc]
            if check is invariants.healthy_spec_is_promoted:
                self._check("all_replicas_serve", lambda copied=copied: invariants.all_replicas_serve(copied))  # type: ignore[misc]
            if check is not invariants.new_spec_gets_pods and copied.status["phase"] in ("Ready", "RolledBack"):
                copied.advance(timedelta(hours=8))
                self._check("no_writes_at_rest", lambda copied=copied: invariants.no_writes_at_rest(copied))  # type: ignore[misc]
            self.alone_duration += copied.now - self.cluster.now

    def _branch(self) -> Cluster:
        branch = self.cluster.branch()
        branch.on_reconcile = lambda reconcile: self._check_reconcile(reconcile, branch)
        return branch

    def _check(self, name: str, check: Callable[[], str]) -> None:
        violation = ""

        def run() -> None:
            nonlocal violation
            violation = check()

        self._run_guarded(run)
        if violation:
            raise InvariantError(name, self.seed, violation, self.trail)

    def _run_guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except InvariantError:
            raise
        except Exception as error:
            raise InvariantError("no_exception", self.seed, f"{error!r}\n{traceback.format_exc(limit=-6)}", self.trail) from error

    def _check_reconcile(self, reconcile: Reconcile, cluster: Cluster | None = None) -> None:
        cluster = cluster or self.cluster
        self.phases[reconcile.plan.status.phase or "None"] += 1
        violations = {
            "no_weight_without_a_pod": invariants.no_weight_without_a_pod(reconcile),
            "no_serving_pod_removed": invariants.no_serving_pod_removed(reconcile),
            "arms_are_of_different_revisions": invariants.arms_are_of_different_revisions(reconcile),
            "isolated_canary_is_not_reached": invariants.isolated_canary_is_not_reached(reconcile),
            "no_rollback_for_gpu_time": invariants.no_rollback_for_gpu_time(reconcile),
            "no_spin": invariants.no_spin(cluster, reconcile),
            "bounded_reconciles": invariants.bounded_reconciles(cluster, reconcile),
        }
        for name, violation in violations.items():
            if violation:
                message = f"at {reconcile.at:%d %H:%M:%S} in {reconcile.plan.status.phase}: {violation}"
                raise InvariantError(name, self.seed, message, self.trail)

    # ------------------------------------------------------------------------------------------------------------- what happens
    def time_passes(self) -> str:
        duration = self.rng.choice([1, 3, 6, 15, 40, 90]) * MINUTE
        self.cluster.advance(duration)
        return f"{duration}"

    def the_phase_changes(self) -> str:
        """Advance until the phase changes."""
        before = self.cluster.status.get("phase")
        self.cluster.advance(6 * 60 * MINUTE, lambda: bool(self.cluster.status.get("phase") != before))
        return f"from {before}"

    def an_operator_crashes(self) -> str:
        parts = self.rng.randrange(9)
        self.cluster.reconcile(parts)
        return f"after {parts} writes"

    def a_field_changes(self) -> str:
        path = self.rng.choice(list(EDITS))
        return self.change(path, self.rng.choice(EDITS[path]))

    def another_drafter(self) -> str:
        return self.change("drafter", self.rng.choice(EDITS["drafter"]))

    def an_autoscaler(self) -> str:
        now = int(self.cluster.document["spec"]["replicas"])
        near = max(1, min(64, now + self.rng.choice([-3, -1, 1, 2, 5])))
        return self.change("replicas", self.rng.choice([near, near, near, *SIZES]))

    def change(self, path: str, value: Any) -> str:
        """Edit one field, and reconcile."""
        document = self.cluster.document
        spec = _with(document["spec"], path.split("."), value)
        taken = self.cluster.edited(**spec)
        self.cluster.reconcile()
        return f"{path} = {value}" if taken else f"{path} = {value} is refused"

    def a_user_acts(self) -> str:
        status = self.cluster.status
        arms = [status[arm]["revision"] for arm in ("canary", "stable") if status.get(arm)]
        action = self.rng.choice(["promote", "rollback", "retry", "nothing"])
        if action == "nothing" or not arms:
            self.cluster.document["metadata"].pop("annotations", None)
            return "nothing any more"
        value = str(self.steps) if action == "retry" else self.rng.choice([arms[0], *arms])
        self.cluster.annotate(**{action: value})
        self.cluster.reconcile()
        return f"{action} {value}"

    def pods_fail(self) -> str:
        cluster, rng = self.cluster, self.rng
        how = rng.choice(["Failed", "lost", "NotReady", "Crashing", "killed", "back"])
        names = sorted({pod.deployment for pod in cluster.fleet})
        if not names:
            return "there is none"
        group = rng.choice(names)
        able = [
            pod for pod in cluster.fleet if pod.alive and pod.deployment == group and (pod.state == "Serving") == (how != "back")
        ]
        count = rng.choice([1, 1, 2, len(able)])
        for pod in able[:count]:
            if how == "lost":
                cluster.lose(pod)
            elif how == "killed":
                cluster.restart(pod)
            elif how == "back" and pod.state in ("NotReady", "Crashing"):
                pod.restarts = 0
                pod.become("Loading", cluster.now, cluster.now + MINUTE)
            elif how != "back":
                pod.become(how, cluster.now)  # type: ignore[arg-type]
                if how == "Crashing":
                    pod.restarts, pod.ended = rng.choice([1, 4]), cluster.now
        cluster.react()
        if rng.random() < 0.7:
            cluster.reconcile()
        return f"{min(count, len(able))} of {group}: {how}"

    def an_image_is_unpullable(self) -> str:
        cluster = self.cluster
        revisions = sorted({pod.revision for pod in cluster.fleet})
        if not revisions or (cluster.unpullable_revisions and self.rng.random() < 0.5):
            cluster.unpullable_revisions = set()
            for pod in cluster.fleet:
                if pod.state == "Imageless":
                    pod.become("Loading", cluster.now, cluster.now + 2 * MINUTE)
            return "all are back"
        revision = self.rng.choice(revisions)
        cluster.unpullable_revisions.add(revision)
        return f"that of revision {revision}"

    def room_changes(self) -> str:
        cluster = self.cluster
        replicas = int(cluster.document["spec"]["replicas"])
        cluster.quota = self.rng.random() < 0.5
        cluster.places = self.rng.choice([replicas // 2, replicas, replicas + 1, replicas + 2, 10**6, 10**6])
        cluster.react()
        return f"{cluster.places} places{', by a quota' if cluster.quota else ''}"

    def other_nodes(self) -> str:
        cluster = self.cluster
        cluster.products = self.rng.choice([["H100"], ["A100"], ["H100", "A100"]])
        return f"{' and '.join(cluster.products)} for pods to come"

    def the_evaluator(self) -> str:
        """Change what the evaluator counts, restart it, or change shadow itself."""
        cluster, rng = self.cluster, self.rng
        cluster.evaluator.gain = rng.choice([-0.3, 0.0, 0.1])
        cluster.evaluator.pairs_per_fetch = rng.choice([0, 1, 40])
        cluster.evaluator.skipped = rng.choice([{}, {}, {"canary_failed": 3}, {"without_metrics": 9}])
        cluster.evaluator.outage_seconds = rng.choice([0.0, 0.0, 60.0, 300.0])
        if rng.random() < 0.3:
            cluster.evaluator.restart()
        if rng.random() < 0.2:
            return self.change("rollout.analysis.shadow", rng.choice([SHADOW, SHADOW, {"source": "None"}, {"source": "Mirror"}]))
        return f"gain {cluster.evaluator.gain:+.0%}, {cluster.evaluator.pairs_per_fetch} pairs, {cluster.evaluator.skipped}"

    def the_api_server_rejects(self) -> str:
        cluster, rng = self.cluster, self.rng
        error = ApiError(rng.choice(KINDS), rng.choice(CODES), cluster.now + rng.choice([1, 5, 30]) * MINUTE)
        cluster.api_errors.append(error)
        cluster.reconcile()
        return f"{error.kind} with {error.code} until {error.until:%H:%M}"

    def the_status_is_lost(self) -> str:
        self.cluster.document.pop("status", None)
        self.cluster.reconcile()
        return "and is looked at"

    def a_child_is_deleted(self) -> str:
        cluster = self.cluster
        if not cluster.objects:
            return "there is none"
        kind, name = self.rng.choice(sorted(cluster.objects))
        cluster.delete(kind, name)
        cluster.react()
        return f"{kind} {name}"

    def the_gateway(self) -> str:
        self.cluster.gateway = self.rng.choice(["Accepts", "Accepts", "Refuses", "Silent"])
        self.cluster.react()
        return self.cluster.gateway.lower()

    def a_kind_cannot_be_listed(self) -> str:
        kind = self.rng.choice(LISTS)
        self.cluster.unlisted_kinds[kind] = self.cluster.now + self.rng.choice([2, 30]) * MINUTE
        self.cluster.reconcile()
        return kind

    def the_requests(self) -> str:
        self.cluster.requests = self.rng.choice([0.0, 0.2, 20.0, 20.0])
        self.cluster.drift = self.rng.choice([1.0, 1.0, 0.8])
        return f"{self.cluster.requests} a second, of which the drafter hits {self.cluster.drift:.0%}"

    def metrics_are_invalid(self) -> str:
        cluster = self.cluster
        revisions = sorted({pod.revision for pod in cluster.fleet})
        cluster.invalid_metrics_revisions = (
            {self.rng.choice(revisions)} if revisions and not cluster.invalid_metrics_revisions else set()
        )
        return f"of {sorted(cluster.invalid_metrics_revisions)}"

    def all_heals(self) -> str:
        self.cluster.heal()
        return "all but drafters"


def _with(document: dict[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """Return the document with another value at the path."""
    key, rest = path[0], path[1:]
    if rest:
        return {**document, key: _with(document.get(key) or {}, rest, value)}
    return {**document, key: value}
