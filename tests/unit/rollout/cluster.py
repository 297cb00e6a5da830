"""A simulated cluster in virtual time: API server, controllers, nodes, a gateway and clients, at fleet size, with their faults.

    reconcile ─► plan ─► apply ─► objects ─► Deployments create and delete pods ─► pods load, serve, fail, drain ─► reconcile ...

Time jumps to the next event, or to the next requested reconcile.

Guarantees: everything follows from the arguments and from the calls, in their order. Writes are applied as the operator does
(controller/kubernetes/apply.py): every object is tried, deletions wait for the objects that requests depend on, and the status is
written in any case. Deployments have maxSurge 1 and maxUnavailable 0, and delete pods that do not serve first.
Not here: proxies and endpoints that lag behind the API server; quota and scheduling by anything but a number of places.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from aerie.analysis.measurement.blocks import ClosedBlock
from aerie.api import ResourceError, SpeculativeDeployment
from aerie.api.status import TRAFFIC_SHIFT_PHASES
from aerie.manifests import naming
from aerie.manifests.pod.placement import GPU_PRODUCT_LABELS
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.plan import ReconcilePlan
from aerie.rollout.reconcile import build_reconcile_plan, with_apply_errors
from tests.snapshots import build_snapshot
from tests.unit.rollout.world import IMAGE, World, side

SECOND, MINUTE = timedelta(seconds=1), timedelta(minutes=1)
WRITE_DURATION = timedelta(milliseconds=100)
"""Duration of a reconcile that writes."""
GRACE_PERIOD = timedelta(seconds=120)
"""terminationGracePeriodSeconds."""
PREFLIGHT_DURATION = timedelta(seconds=20)
"""Duration of a preflight Job."""
GATEWAY_DELAY = timedelta(seconds=1)
"""Delay until a gateway's controller observes a change of its route."""
BLOCK_SECONDS = {"H100": 50.0, "A100": 250.0}
"""Time for the tokens of a block, by GPU."""
DRAFTS_PER_REQUEST = 40.0
"""Drafts of a request."""
_REJECTION_CODES = frozenset({404, 422})
_TRAFFIC_KINDS = frozenset({"Deployment", "Service", "HTTPRoute"})

State = Literal["Loading", "Serving", "NotReady", "Crashing", "Roomless", "Imageless", "Failed"]
DRAFTER_EFFECTS = {"worse": -0.2, "equal": 0.0}
"""Relative difference of a drafter's acceptance length; drafters that are not listed are better by a fifth."""
BROKEN_DRAFTERS: Mapping[str, State] = {"crashing": "Crashing", "hanging": "Loading"}
"""Drafters whose engines never serve."""


@dataclass
class Pod:
    """A pod; `document` is its object in the API server."""

    name: str
    deployment: str
    """Name of its Deployment."""
    labels: Mapping[str, str]
    template: str
    created_at: datetime
    state: State
    since: datetime
    """Time at which it entered this state."""
    serves_at: datetime | None = None
    """Time at which it has loaded."""
    restarts: int = 0
    ended: datetime | None = None
    """Time at which its engine's process ended last."""
    deleted: datetime | None = None
    node: str = ""
    """Node on which it runs; empty while it waits for room."""
    gone_at: datetime | None = None
    """Time at which it has drained; None: not before its node comes back."""

    @property
    def alive(self) -> bool:
        return self.deleted is None and self.state != "Failed"

    @property
    def serves(self) -> bool:
        return self.deleted is None and self.state == "Serving"

    @property
    def holds_place(self) -> bool:
        """Return whether it holds a place."""
        return self.state not in ("Failed", "Roomless")

    @property
    def revision(self) -> str:
        return self.labels[naming.REVISION_LABEL]

    @property
    def product(self) -> str:
        """Return the GPU of its node."""
        return self.node.partition("-")[0]

    def become(self, state: State, now: datetime, serves_at: datetime | None = None) -> None:
        self.state, self.since, self.serves_at = state, now, serves_at

    def document(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {
            "name": self.name,
            "labels": dict(self.labels),
            "creationTimestamp": self.created_at.isoformat(),
        }
        if self.deleted is not None:
            metadata["deletionTimestamp"] = (self.deleted + GRACE_PERIOD).isoformat()
        spec = {"nodeName": self.node} if self.node else {}
        return {"kind": "Pod", "metadata": metadata, "spec": spec, "status": self._status()}

    def _status(self) -> dict[str, Any]:
        if self.state == "Failed":
            return {"phase": "Failed", "reason": "Evicted", "message": "The node was low on ephemeral-storage."}
        scheduled = {"type": "PodScheduled", "status": "False" if self.state == "Roomless" else "True"}
        if self.state == "Roomless":
            scheduled |= {"reason": "Unschedulable", "message": "0/9 nodes are available: insufficient nvidia.com/gpu."}
            return {"phase": "Pending", "conditions": [scheduled]}
        ready = {
            "type": "Ready",
            "status": "True" if self.state == "Serving" else "False",
            "lastTransitionTime": self.since.isoformat(),
        }
        engine: dict[str, Any] = {"name": naming.ENGINE_CONTAINER, "image": "vllm", "ready": self.state == "Serving"}
        engine |= {"restartCount": self.restarts, "started": self.state in ("Serving", "NotReady"), "state": {"running": {}}}
        if self.state == "Crashing":
            engine |= {"state": {"waiting": {"reason": "CrashLoopBackOff"}}}
        if self.state == "Crashing" or self.ended is not None:
            ended = {"finishedAt": self.ended.isoformat()} if self.ended is not None else {}
            engine |= {"lastState": {"terminated": {"exitCode": 1, "reason": "Error", **ended}}}
        elif self.state == "Imageless":
            engine |= {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}}
        return {"phase": "Running", "conditions": [scheduled, ready], "containerStatuses": [engine]}


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


class Cluster(World):
    """A simulated cluster, see the module's docstring."""

    def __init__(self, seed: int = 0, *, load: float = 300.0, drain: float = 30.0, **spec: Any) -> None:
        super().__init__(**spec)
        self.rng = random.Random(seed)  # noqa: S311 - no secrets
        self.load, self.drain = load, drain
        self.fleet: list[Pod] = []
        self.places = 10**6
        self.products = ["H100"]
        """GPUs of the nodes for new pods, in turn; each pod gets a node of its own."""
        self.node_numbers = itertools.count()
        self.quota = False
        """Whether a quota rejects pods without room, instead of letting them wait for a node."""
        self.unpullable_revisions: set[str] = set()
        """Revisions whose image can no longer be pulled."""
        self.invalid_metrics_revisions: set[str] = set()
        """Revisions whose metrics responses are invalid."""
        self.api_errors: list[ApiError] = []
        self.unlisted_kinds: dict[str, datetime] = {}
        self.gateway: Literal["Accepts", "Refuses", "Silent"] = "Accepts"
        self.requests = 20.0
        """Requests per second, for the whole fleet."""
        self.drift = 1.0
        self.block_started_at: datetime | None = None
        """Start of the current block."""
        self.failures = 0
        self.idle_streak = IdleStreak()
        self.drafters: dict[str, str] = {}
        """Drafter of each revision."""
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
        before = copy.deepcopy(self.document.get("status"))
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
        applied = copy.deepcopy(item)
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

    # ----------------------------------------------------------------------------------------------------------- its controllers
    def react(self) -> None:
        """Run controllers, nodes and the gateway at the current time."""
        self.api_errors = [error for error in self.api_errors if self.now < error.until]
        self.unlisted_kinds = {kind: until for kind, until in self.unlisted_kinds.items() if self.now < until}
        self.fleet = [pod for pod in self.fleet if pod.gone_at is None or self.now < pod.gone_at]
        deployments = {name: item for (kind, name), item in self.objects.items() if kind == "Deployment"}
        for pod in self.fleet:
            if pod.serves_at is not None and pod.serves_at <= self.now and pod.deleted is None:
                pod.become("Serving", pod.serves_at)
            if pod.deployment not in deployments and pod.deleted is None:
                self._delete_pod(pod)
        for name, item in deployments.items():
            self._scale(name, item)
        self._schedule_pods()
        for (kind, name), job in list(self.objects.items()):
            if kind == "Job" and not job.get("status") and self.now >= _creation_time(job) + PREFLIGHT_DURATION:
                self._conclude(name)
        self._answer_route()
        self._close_block()

    def _scale(self, name: str, item: dict[str, Any]) -> None:
        """Scale with maxSurge 1 and maxUnavailable 0: an outdated pod is deleted when a new one serves in its place."""
        desired_replicas, template = item["spec"]["replicas"], json.dumps(item["spec"]["template"], sort_keys=True)
        own_pods = [pod for pod in self.fleet if pod.deployment == name and pod.alive]
        outdated_pods = [pod for pod in own_pods if pod.template != template]
        for pod in sorted(outdated_pods, key=lambda pod: pod.serves)[
            : max(0, sum(pod.serves for pod in own_pods) - desired_replicas) if outdated_pods else 0
        ]:
            self._delete_pod(pod)
            own_pods.remove(pod)
        # Controllers delete pods that do not serve first, then the youngest serving ones.
        order = sorted(own_pods, key=lambda pod: (pod.serves, pod.state != "Roomless", -pod.since.timestamp(), pod.name))
        for pod in order[: max(0, len(own_pods) - desired_replicas - (1 if outdated_pods else 0))]:
            self._delete_pod(pod)
        missing = desired_replicas + (1 if outdated_pods and desired_replicas else 0) - len(own_pods)
        room = max(0, self.places - self._held_places) if self.quota else missing
        for _ in range(min(missing, room)):
            self._create_pod(name, item, template)
        self._set_replica_failure(item, "exceeded quota: gpus" if missing > room else "")

    def _set_replica_failure(self, item: dict[str, Any], message: str) -> None:
        before = next(iter((item.get("status") or {}).get("conditions") or []), None)
        status = "True" if message else "False"
        if status == (before["status"] if before else "False"):
            return
        condition = {
            "type": "ReplicaFailure",
            "status": status,
            "reason": "FailedCreate",
            "message": f"pods are forbidden: {message}",
        }
        item["status"] = {"conditions": [condition | {"lastTransitionTime": self.now.isoformat()}]}

    @property
    def _held_places(self) -> int:
        return sum(pod.holds_place for pod in self.fleet)

    def _create_pod(self, name: str, item: dict[str, Any], template: str) -> None:
        labels = item["spec"]["template"]["metadata"]["labels"]
        revision = labels[naming.REVISION_LABEL]
        self.drafters.setdefault(revision, _drafter_name(template))
        pod = Pod(f"{name}-{next(self.counter):05d}", name, labels, template, self.now, "Roomless", self.now)
        self.fleet.append(pod)
        if self.quota:
            self._start_pod(pod)

    def _schedule_pods(self) -> None:
        """Place waiting pods on nodes, the oldest first."""
        free = self.places - self._held_places
        for pod in self.fleet:
            if free <= 0:
                return
            if pod.state == "Roomless" and pod.deleted is None:
                self._start_pod(pod)
                free -= 1

    def _start_pod(self, pod: Pod) -> None:
        number = next(self.node_numbers)
        pod.node = f"{self.products[number % len(self.products)]}-{number}"
        if pod.revision in self.unpullable_revisions:
            pod.become("Imageless", self.now)
            return
        state = BROKEN_DRAFTERS.get(self.drafters[pod.revision], "Loading")
        pod.restarts, pod.ended = (4, self.now) if state == "Crashing" else (0, None)
        late = timedelta(seconds=self.load + self.rng.randrange(4) * 10)
        loads = state == "Loading" and self.drafters[pod.revision] not in BROKEN_DRAFTERS
        pod.become(state, self.now, self.now + late if loads else None)

    def _delete_pod(self, pod: Pod) -> None:
        pod.deleted = self.now
        if pod.state == "Failed" or not pod.holds_place:
            pod.gone_at = self.now
        else:
            pod.gone_at = self.now + timedelta(seconds=self.drain)

    def restart(self, pod: Pod) -> None:
        """End the engine's process; it is restarted."""
        pod.restarts, pod.ended = pod.restarts + 1, self.now
        pod.become("Loading", self.now, self.now + timedelta(seconds=self.load))

    def lose(self, pod: Pod) -> None:
        """Lose the pod's node: the pod is deleted, and its object stays."""
        pod.become("NotReady", self.now)
        pod.deleted, pod.gone_at = self.now, None

    def _conclude(self, name: str) -> None:
        spec = json.loads(self.objects["ConfigMap", name]["data"]["resource.json"]) if ("ConfigMap", name) in self.objects else {}
        drafter = (spec.get("spec") or {}).get("drafter") or {}
        bad = drafter.get("source", {}).get("persistentVolumeClaim", {}).get("path") == "refused"
        self.conclude(name, {"passed": not bad, "summary": "checked.", "errors": ["✗ C9 weights: torn."] if bad else []})

    def _answer_route(self) -> None:
        route = self.objects.get(("HTTPRoute", "chat"))
        if route is None or self.gateway == "Silent":
            return
        changed = _change_time(route)
        accepted = "True" if self.gateway == "Accepts" else "False"
        parents = (route.get("status") or {}).get("parents") or []
        current = parents[0]["conditions"][0] if parents else {}
        answer = {"observedGeneration": route["metadata"]["generation"], "status": accepted}
        if self.now < changed + GATEWAY_DELAY or {key: current.get(key) for key in answer} == answer:
            return
        since = current["lastTransitionTime"] if current.get("status") == accepted else self.now.isoformat()
        reason = "Accepted" if accepted == "True" else "NoMatchingParent"
        condition = {"type": "Accepted", "reason": reason, "message": "no such listener", "lastTransitionTime": since, **answer}
        route["status"] = {
            "parents": [{"parentRef": parent, "conditions": [condition]} for parent in route["spec"]["parentRefs"]]
        }

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
        for pod in self.fleet:
            if pod.gone_at is not None:
                yield pod.gone_at
            if pod.serves_at is not None and pod.deleted is None:
                yield pod.serves_at
        for (kind, _), item in self.objects.items():
            if kind == "Job" and not item.get("status"):
                yield _creation_time(item) + PREFLIGHT_DURATION
            elif kind == "HTTPRoute" and self.gateway != "Silent":
                yield _change_time(item) + GATEWAY_DELAY
        yield from (error.until for error in self.api_errors)
        yield from self.unlisted_kinds.values()
        if (ends := self._block_end()) is not None:
            yield ends

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
        self.heal()

    def branch(self) -> Cluster:
        """Return an independent copy."""
        return copy.deepcopy(without_callback(self))


def without_callback(cluster: Cluster) -> Cluster:
    """Return a shallow copy without the callback, which cannot be copied."""
    copied = copy.copy(cluster)
    copied.on_reconcile = lambda _: None
    return copied


def _creation_time(item: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(str(item["metadata"]["creationTimestamp"]))


def _change_time(route: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(str(route["metadata"]["managedFields"][0]["time"]))


def _drafter_name(template: str) -> str:
    """Return the drafter's name in a pod's template."""
    marks = ["crashing", "hanging", "worse", "equal", "refused"]
    return next((mark for mark in marks if f'"subPath": "{mark}"' in template), "good")
