"""A simulated cluster in virtual time: API server, controllers, nodes, a gateway and clients, at fleet size, with their faults.

    reconcile ─► plan ─► apply ─► objects ─► Deployments create and delete pods ─► pods load, serve, fail, drain ─► reconcile ...

Time jumps to the next event, or to the next requested reconcile.

Guarantees: everything follows from the arguments and from the calls, in their order. Writes are applied as the operator does
(controller/kubernetes/apply.py): every object is tried, deletions wait for the objects that requests depend on, and the status is
written in any case. `controllers.py` has what pods, Jobs and the gateway do.
Not guaranteed: proxies and endpoints that lag behind the API server. `cluster_state.py` has them.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from aerie.analysis.measurement.blocks import ClosedBlock
from aerie.api import ResourceError, SpeculativeDeployment
from aerie.api.status import TRAFFIC_SHIFT_PHASES
from aerie.manifests import naming
from aerie.manifests.pod.placement import GPU_PRODUCT_LABELS
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.plan import ReconcilePlan
from aerie.rollout.reconcile import build_reconcile_plan, with_apply_errors
from tests.snapshots import build_snapshot
from tests.unit.rollout.cluster_state import copied
from tests.unit.rollout.controllers import BROKEN_DRAFTERS, SimulatedControllers
from tests.unit.rollout.world import IMAGE, side

SECOND, MINUTE = timedelta(seconds=1), timedelta(minutes=1)
WRITE_DURATION = timedelta(milliseconds=100)
"""Duration of a reconcile that writes."""
BLOCK_SECONDS = {"H100": 50.0, "A100": 250.0}
"""Time for the tokens of a block, by GPU."""
PAIRS_INTERVAL = timedelta(seconds=30)
"""Time between two reads of the evaluator."""
DRAFTS_PER_REQUEST = 40.0
"""Drafts of a request."""
_REJECTION_CODES = frozenset({404, 422})
_TRAFFIC_KINDS = frozenset({"Deployment", "Service", "HTTPRoute"})

DRAFTER_EFFECTS = {"worse": -0.2, "equal": 0.0}
"""Relative difference of a drafter's acceptance length; drafters that are not listed are better by a fifth."""


@dataclass(frozen=True)
class ApiError:
    """An error of the API server for writes of a kind, or of the status, until a time."""

    kind: str
    code: int
    until: datetime


@dataclass(frozen=True)
class Reconcile:
    """One reconcile of the operator: its observation, its plan and the outcome."""

    at: datetime
    observed: Snapshot
    plan: ReconcilePlan
    serving: Mapping[str, int]
    """Serving pods at the time of the plan, by Deployment."""
    written: bool
    """Whether the plan had anything to write."""
    requeue_after: timedelta | None


@dataclass
class IdleStreak:
    """Number of successive reconciles that only time caused."""

    writing: int = 0
    """Successive reconciles that wrote, with no other event in between."""
    idle: int = 0
    """Successive reconciles that wrote nothing and requested the next one in less than five seconds."""
    stretch: int = 0


class Cluster(SimulatedControllers):
    """A simulated cluster, see the module's docstring."""

    def __init__(self, seed: int = 0, *, load: float = 300.0, drain: float = 30.0, **spec: Any) -> None:
        super().__init__(seed, load=load, drain=drain, **spec)
        self.invalid_metrics_revisions: set[str] = set()
        """Revisions whose metrics responses are invalid."""
        self.api_errors: list[ApiError] = []
        self.unlisted_kinds: dict[str, datetime] = {}
        self.pairs_read_at: datetime | None = None
        """Time of the last read of the evaluator; None outside of a shadow evaluation."""
        self.requests = 20.0
        """Requests per second, for the whole fleet."""
        self.drift = 1.0
        self.block_started_at: datetime | None = None
        """Start of the current block."""
        self.failures = 0
        self.idle_streak = IdleStreak()
        self.on_reconcile: Callable[[Reconcile], None] = lambda _: None
        self.reconcile_count = 0

    # ------------------------------------------------------------------------------------------------------------- the operator
    def observed(self) -> Snapshot:
        hidden = self.unlisted_kinds
        return build_snapshot(
            resource=SpeculativeDeployment.from_dict(self.document),
            children=tuple(item for (kind, _), item in self.objects.items() if kind not in hidden),
            pods=tuple(pod.document() for pod in self.fleet),
            preflight_pods=tuple(self.checks),
            blocks=tuple(self.blocks),
            pairs=self.pairs,
            node_labels={pod.node: {GPU_PRODUCT_LABELS[0]: pod.product} for pod in self.fleet if pod.node},
            invalid_metrics={
                pod.name: "a counter is below zero"
                for pod in self.fleet
                if pod.serves and pod.revision in self.invalid_metrics_revisions
            },
            unlisted_kinds={kind: f"{kind}s of namespace default cannot be listed" for kind in hidden},
        )

    def reconcile(self, parts: int = 10**6) -> Reconcile:
        """Reconcile once, and crash after this number of writes."""
        observed, serving = self.observed(), self.serving_by_deployment()
        before = copied(self.document.get("status"))
        plan = build_reconcile_plan(observed, IMAGE, self.now, self.catalog)
        written = bool(plan.objects_to_apply or plan.objects_to_delete or plan.events or plan.status.to_dict() != before)
        requeue_after = self._apply_plan(observed, plan, parts) if written else plan.requeue_after
        reconcile = Reconcile(self.now, observed, plan, serving, written, requeue_after)
        self.reconcile_count += 1
        self.on_reconcile(reconcile)
        self.react()
        return reconcile

    def _apply_plan(self, observed: Snapshot, plan: ReconcilePlan, parts: int) -> timedelta | None:
        """Apply the plan as controller/kubernetes/apply.py does; return the requeue delay."""
        rejections, failed, traffic_applied = [], False, True
        for item in plan.objects_to_apply[:parts]:
            code = self._answer(item["kind"])
            if code is None:
                self.apply(item)
                continue
            traffic_applied = traffic_applied and item["kind"] not in _TRAFFIC_KINDS
            rejection = f"{item['kind']} {item['metadata']['name']}: {code}"
            if code in _REJECTION_CODES:
                rejections.append(rejection)
            else:
                failed = True
        requeue_after: timedelta | None = timedelta(0)
        if rejections:
            plan = with_apply_errors(plan, observed.resource.status, rejections, self.now)
            requeue_after = plan.requeue_after
        for reference in plan.objects_to_delete[: max(0, parts - len(plan.objects_to_apply))] if traffic_applied else ():
            if self._answer(reference.kind) is not None:
                failed = True
            else:
                self.delete(reference.kind, reference.name)
        if self._answer("Status") is not None:
            failed = True
        elif parts > len(plan.objects_to_apply) + len(plan.objects_to_delete):
            self.document["status"] = plan.status.to_dict()
        self.failures = self.failures + 1 if failed else 0
        return min(timedelta(seconds=0.5 * 2 ** min(self.failures, 9)), MINUTE) if failed else requeue_after

    def _answer(self, kind: str) -> int | None:
        """Return the code with which the API server rejects a write of the kind, or None."""
        return next((error.code for error in self.api_errors if error.kind == kind), None)

    def advance(self, duration: timedelta, until: Callable[[], bool] = lambda: False) -> bool:
        """Advance time by the duration, or until the condition holds; return whether it holds."""
        end = self.now + duration
        while self.now < end:
            reconcile = self.reconcile()
            if until():
                return True
            next_event_time = self.next_event_time()
            if reconcile.written and reconcile.requeue_after == timedelta(0):
                self.idle_streak.writing += 1
                self._advance_to(self.now + WRITE_DURATION)
                continue
            self.idle_streak.writing = 0
            reconcile_at = None if reconcile.requeue_after is None else self.now + reconcile.requeue_after
            if reconcile_at is None and next_event_time is None:
                self._advance_to(end)
                self.reconcile()
                break
            if reconcile_at is not None and (next_event_time is None or reconcile_at < next_event_time) and not reconcile.written:
                reconcile_at = self._idle_requeue_time(reconcile.requeue_after or timedelta(0))
            else:
                self.idle_streak = IdleStreak()
            self._advance_to(min(time for time in (reconcile_at, next_event_time, end) if time is not None))
        return until()

    def _idle_requeue_time(self, requeue_after: timedelta) -> datetime:
        """Return a later time for idle reconciles: an operator may be late, and a walk does not have to wait for it."""
        self.idle_streak.idle = self.idle_streak.idle + 1 if requeue_after < 5 * SECOND else 0
        if requeue_after >= 5 * SECOND:
            self.idle_streak.stretch += 1
        return self.now + max(
            min(requeue_after * (1 << max(0, min(self.idle_streak.stretch - 3, 8))), 20 * MINUTE), requeue_after
        )

    # ------------------------------------------------------------------------------------------------------------ the API server
    def edited(self, **spec: Any) -> bool:
        """Edit the spec unless the API server rejects it; return whether it was accepted."""
        document = {**self.document, "spec": {**self.document["spec"], **spec}}
        try:
            SpeculativeDeployment.from_dict(document)
        except ResourceError:
            return False
        self.edit(**spec)
        return True

    def apply(self, item: dict[str, Any]) -> None:
        kind, name = item["kind"], item["metadata"]["name"]
        before = self.objects.get((kind, name))
        applied = copied(item)
        applied["metadata"]["uid"] = before["metadata"]["uid"] if before else f"c{next(self.counter)}"
        applied["metadata"]["creationTimestamp"] = before["metadata"]["creationTimestamp"] if before else self.now.isoformat()
        if before and before.get("status"):
            applied["status"] = before["status"]
        if kind == "HTTPRoute":
            same = before is not None and before["spec"] == applied["spec"]
            generation = (before or {}).get("metadata", {}).get("generation", 0) + (not same)
            time = before["metadata"]["managedFields"][0]["time"] if before and same else self.now.isoformat()
            applied["metadata"] |= {"generation": generation, "managedFields": [{"manager": naming.FIELD_MANAGER, "time": time}]}
        self.objects[kind, name] = applied

    def delete(self, kind: str, name: str) -> None:
        deleted = self.objects.pop((kind, name), None)
        if deleted is not None and kind == "Job":
            uid = deleted["metadata"]["uid"]
            self.checks = [pod for pod in self.checks if pod["metadata"]["ownerReferences"][0]["uid"] != uid]

    # --------------------------------------------------------------------------------------------------------- clients and blocks
    def _compared_deployments(self) -> tuple[str, str | None] | None:
        """Return the Deployments that the current block compares, as controller/collection/blocks.py does; the second is None if
        there is nothing to compare with."""
        status = self.document.get("status") or {}
        if not (status.get("analysis") or {}).get("state") or not self.requests:
            return None
        stable, canary, previous = status.get("stable"), status.get("canary"), status.get("previous")
        name = functools.partial(naming.deployment_name, self.document["metadata"]["name"])
        if stable and canary and canary["phase"] != "RollingBack":
            controlled = canary.get("control") is not None and canary["phase"] not in TRAFFIC_SHIFT_PHASES
            return name(canary["revision"], control=False), name(stable["revision"], control=controlled)
        if stable and previous:
            rechecks = previous["phase"] == "Verifying"
            return name(stable["revision"], control=False), name(previous["revision"], control=False) if rechecks else None
        return None

    def _block_end(self) -> datetime | None:
        arms, serving = self._compared_deployments(), sum(pod.serves for pod in self.fleet)
        if arms is None or self.block_started_at is None or not serving:
            return None
        return self.block_started_at + timedelta(seconds=max(120.0, 2000 / (DRAFTS_PER_REQUEST * self.requests / serving)))

    def _close_block(self) -> None:
        """Close the current block if it has ended."""
        arms, ends = self._compared_deployments(), self._block_end()
        if arms is None:
            self.block_started_at, self.blocks = None, []
        elif self.block_started_at is None:
            self.block_started_at = self.now
        elif ends is not None and ends <= self.now:
            sides = [self._measure_side(deployment) for deployment in arms]
            if sides[0] is not None and (sides[1] is not None or arms[1] is None):
                self.blocks = [
                    *self.blocks[-3:],
                    ClosedBlock(self.block_started_at.timestamp(), self.now.timestamp(), sides[0], sides[1]),
                ]
            self.block_started_at = self.now

    def _measure_side(self, deployment: str | None) -> Any:
        serving = [pod for pod in self.fleet if pod.serves and pod.deployment == deployment]
        if not serving:
            return None
        status, revision = self.document["status"], serving[0].revision
        new = (status.get("canary") or status["stable"])["revision"] == revision
        effect = DRAFTER_EFFECTS.get(self.drafters.get(revision, ""), 0.2) if new else 0.0
        noise = (1 + self.rng.gauss(0, 0.01)) * self.drift
        seconds = max(BLOCK_SECONDS[pod.product] for pod in serving)
        return side(2.5 * (1 + effect) * noise, seconds=seconds)

    # ---------------------------------------------------------------------------------------------------------------------- time
    def next_event_time(self) -> datetime | None:
        """Return the time of the next event, or None."""
        return min((at for at in self._event_times() if at > self.now), default=None)

    def _event_times(self) -> Iterator[datetime]:
        yield from super()._event_times()
        yield from (error.until for error in self.api_errors)
        yield from self.unlisted_kinds.values()
        if (ends := self._block_end()) is not None:
            yield ends
        if self.pairs_read_at is not None and self.pairs is not None:
            yield self.pairs_read_at + PAIRS_INTERVAL

    def react(self) -> None:
        """Run controllers, nodes, the gateway and clients at the current time."""
        self.api_errors = [error for error in self.api_errors if self.now < error.until]
        self.unlisted_kinds = {kind: until for kind, until in self.unlisted_kinds.items() if self.now < until}
        super().react()
        self._close_block()
        self._read_pairs()

    def _read_pairs(self) -> None:
        """Read the evaluator at intervals."""
        if (self.status.get("canary") or {}).get("phase") != "Evaluating":
            self.pairs, self.pairs_read_at = None, None
        if self.pairs_read_at is None or self.now >= self.pairs_read_at + PAIRS_INTERVAL:
            self.read_pairs()
            self.pairs_read_at = self.now

    def _advance_to(self, time: datetime) -> None:
        self.now = max(self.now, time)
        self.react()

    # ------------------------------------------------------------------------------------------------------------- for assertions
    def serving_by_deployment(self) -> dict[str, int]:
        pod_counts: dict[str, int] = {}
        for pod in self.fleet:
            if pod.serves:
                pod_counts[pod.deployment] = pod_counts.get(pod.deployment, 0) + 1
        return pod_counts

    def serving(self, revision: str | None = None) -> int:
        return sum(pod.serves for pod in self.fleet if revision in (None, pod.revision))

    def heal(self) -> None:
        """End all faults of the cluster, but not those of drafters."""
        self.places, self.quota, self.gateway, self.failures = 10**6, False, "Accepts", 0
        self.products = ["H100"]
        self.unpullable_revisions, self.invalid_metrics_revisions, self.api_errors, self.unlisted_kinds = set(), set(), [], {}
        for pod in self.fleet:
            broken = pod.state in ("NotReady", "Imageless") or (
                pod.state == "Crashing" and self.drafters[pod.revision] != "crashing"
            )
            if pod.alive and broken:
                pod.restarts = 0
                pod.become("Loading", self.now, self.now + timedelta(seconds=self.load))
        self.react()

    def heal_all(self) -> None:
        """End all faults, those of drafters included."""
        for revision, drafter in self.drafters.items():
            self.drafters[revision] = "good" if drafter in BROKEN_DRAFTERS else drafter
        for pod in self.fleet:
            if pod.alive and pod.state == "Loading" and pod.serves_at is None:
                pod.become("Crashing", self.now)
        self.evaluator.gain, self.evaluator.pairs_per_fetch, self.evaluator.skipped = 0.1, 40, {}
        self.heal()

    def branch(self) -> Cluster:
        """Return an independent copy."""
        return copy.deepcopy(without_callback(self))


def without_callback(cluster: Cluster) -> Cluster:
    """Return a shallow copy without the callback, which cannot be copied."""
    copied = copy.copy(cluster)
    copied.on_reconcile = lambda _: None
    return copied
