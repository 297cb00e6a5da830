"""A simulated cluster in virtual time: what the API server, its controllers, nodes, a gateway and clients do with what the
operator writes, at fleet size, with all that goes wrong there.

    look ─► decide ─► carry_out ─► objects ─► Deployments make and remove pods ─► pods load, serve, fail, drain ─► look ...

Time jumps to the next moment at which anything changes, or at which the decision wants to be made again.

Guarantees: everything follows from the arguments and from what is called, in the order in which it is called. Writes are carried
out as the operator does (controller/kubernetes/apply.py): every object is tried, deletions wait for those that requests depend
on, and the status is written in any case. Deployments have maxSurge 1 and maxUnavailable 0, and give up pods that do not serve
first.
Not here: proxies and endpoints that lag behind what the API server has; quota and scheduling by anything but a number of places.
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
PASS = timedelta(milliseconds=100)
"""A pass of the operator that writes."""
GRACE = timedelta(seconds=120)
"""terminationGracePeriodSeconds."""
CHECK = timedelta(seconds=20)
"""A preflight Job."""
SEES = timedelta(seconds=1)
"""A gateway's controller sees a change of its route."""
SECONDS = {"H100": 50.0, "A100": 250.0}
"""For the tokens of a block, by the GPU."""
DRAFTS = 40.0
"""Of a request."""
_REFUSALS = frozenset({404, 422})
_CARRYING = frozenset({"Deployment", "Service", "HTTPRoute"})

State = Literal["Loading", "Serving", "NotReady", "Crashing", "Roomless", "Imageless", "Failed"]
EFFECTS = {"worse": -0.2, "equal": 0.0}
"""Of a drafter's acceptance length against that of any other; all that are not named are better by a fifth."""
BROKEN: Mapping[str, State] = {"crashing": "Crashing", "hanging": "Loading"}
"""Drafters whose engines never serve."""


@dataclass
class Pod:
    """A pod; `document` is how the API server shows it."""

    name: str
    of: str
    """Its Deployment."""
    labels: Mapping[str, str]
    template: str
    made: datetime
    state: State
    since: datetime
    """When it came into this state."""
    serves_at: datetime | None = None
    """When it has loaded."""
    restarts: int = 0
    ended: datetime | None = None
    """When its engine's process ended last."""
    deleted: datetime | None = None
    node: str = ""
    """Where it runs; empty while it waits for room."""
    gone_at: datetime | None = None
    """When it has drained; None: not before its node comes back."""

    @property
    def alive(self) -> bool:
        return self.deleted is None and self.state != "Failed"

    @property
    def serves(self) -> bool:
        return self.deleted is None and self.state == "Serving"

    @property
    def holds(self) -> bool:
        """Whether it holds a place."""
        return self.state not in ("Failed", "Roomless")

    @property
    def revision(self) -> str:
        return self.labels[naming.REVISION_LABEL]

    @property
    def product(self) -> str:
        """The GPU of its node."""
        return self.node.partition("-")[0]

    def become(self, state: State, now: datetime, serves_at: datetime | None = None) -> None:
        self.state, self.since, self.serves_at = state, now, serves_at

    def document(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {"name": self.name, "labels": dict(self.labels), "creationTimestamp": self.made.isoformat()}
        if self.deleted is not None:
            metadata["deletionTimestamp"] = (self.deleted + GRACE).isoformat()
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
class Refusing:
    """The API server answers with an error to writes of a kind, or of the status, until it does not."""

    kind: str
    code: int
    until: datetime


@dataclass(frozen=True)
class Look:
    """One pass of the operator: what it saw, what it decided, and what came of it."""

    at: datetime
    observed: Snapshot
    plan: ReconcilePlan
    serving: Mapping[str, int]
    """Pods that served when it was decided, by Deployment."""
    written: bool
    """Whether there was anything to write."""
    again: timedelta | None


@dataclass
class Quiet:
    """Looks in a row for which time alone was the reason."""

    writing: int = 0
    """Of those, in a row, looks that wrote, with nothing else happening in between."""
    idle: int = 0
    """Looks in a row that wrote nothing and want to come back in less than five seconds."""
    stretch: int = 0


class Cluster(World):
    """See the module."""

    def __init__(self, seed: int = 0, *, load: float = 300.0, drain: float = 30.0, **spec: Any) -> None:
        super().__init__(**spec)
        self.chance = random.Random(seed)  # noqa: S311 - no secrets
        self.load, self.drain = load, drain
        self.fleet: list[Pod] = []
        self.places = 10**6
        self.products = ["H100"]
        """GPUs of the nodes that take pods from now on, in turn; each pod gets one of its own."""
        self.node_numbers = itertools.count()
        self.quota = False
        """Whether what lacks room is refused by a quota, instead of waiting for a node."""
        self.imageless: set[str] = set()
        """Revisions whose image cannot be pulled any more."""
        self.lying: set[str] = set()
        """Revisions whose metrics pages cannot be believed."""
        self.refusing: list[Refusing] = []
        self.unlisted: dict[str, datetime] = {}
        self.gateway: Literal["Accepts", "Refuses", "Silent"] = "Accepts"
        self.requests = 20.0
        """A second, for the whole fleet."""
        self.drift = 1.0
        self.counted: datetime | None = None
        """Since when the block under way is counted."""
        self.failures = 0
        self.quiet = Quiet()
        self.drafters: dict[str, str] = {}
        """By revision."""
        self.on_look: Callable[[Look], None] = lambda _: None
        self.looks = 0

    # ------------------------------------------------------------------------------------------------------------- the operator
    def observed(self) -> Snapshot:
        hidden = self.unlisted
        return build_snapshot(
            resource=SpeculativeDeployment.from_dict(self.document),
            children=tuple(item for (kind, _), item in self.objects.items() if kind not in hidden),
            pods=tuple(pod.document() for pod in self.fleet),
            preflight_pods=tuple(self.checks),
            blocks=tuple(self.blocks),
            node_labels={pod.node: {GPU_PRODUCT_LABELS[0]: pod.product} for pod in self.fleet if pod.node},
            invalid_metrics={
                pod.name: "a counter is below zero" for pod in self.fleet if pod.serves and pod.revision in self.lying
            },
            unlisted_kinds={kind: f"{kind}s of namespace default cannot be listed" for kind in hidden},
        )

    def look(self, parts: int = 10**6) -> Look:
        """One pass, which crashes after so many of its writes."""
        observed, serving = self.observed(), self.serving_by_deployment()
        before = copy.deepcopy(self.document.get("status"))
        plan = build_reconcile_plan(observed, IMAGE, self.now, self.catalog)
        written = bool(plan.objects_to_apply or plan.objects_to_delete or plan.events or plan.status.to_dict() != before)
        again = self._carry_out(observed, plan, parts) if written else plan.requeue_after
        look = Look(self.now, observed, plan, serving, written, again)
        self.looks += 1
        self.on_look(look)
        self.react()
        return look

    def _carry_out(self, observed: Snapshot, plan: ReconcilePlan, parts: int) -> timedelta | None:
        """As controller/kubernetes/apply.py does; when to look again."""
        refusals, failed, carried = [], False, True
        for item in plan.objects_to_apply[:parts]:
            code = self._answer(item["kind"])
            if code is None:
                self.apply(item)
                continue
            carried = carried and item["kind"] not in _CARRYING
            what = f"{item['kind']} {item['metadata']['name']}: {code}"
            if code in _REFUSALS:
                refusals.append(what)
            else:
                failed = True
        again: timedelta | None = timedelta(0)
        if refusals:
            plan = with_apply_errors(plan, observed.resource.status, refusals, self.now)
            again = plan.requeue_after
        for reference in plan.objects_to_delete[: max(0, parts - len(plan.objects_to_apply))] if carried else ():
            if self._answer(reference.kind) is not None:
                failed = True
            else:
                self.delete(reference.kind, reference.name)
        if self._answer("Status") is not None:
            failed = True
        elif parts > len(plan.objects_to_apply) + len(plan.objects_to_delete):
            self.document["status"] = plan.status.to_dict()
        self.failures = self.failures + 1 if failed else 0
        return min(timedelta(seconds=0.5 * 2 ** min(self.failures, 9)), MINUTE) if failed else again

    def _answer(self, kind: str) -> int | None:
        """The error with which the API server answers to a write of the kind, if it does."""
        return next((one.code for one in self.refusing if one.kind == kind), None)

    def go_on(self, lasts: timedelta, until: Callable[[], bool] = lambda: False) -> bool:
        """So long, or until it holds; whether it does."""
        end = self.now + lasts
        while self.now < end:
            look = self.look()
            if until():
                return True
            moment = self.moment()
            if look.written and look.again == timedelta(0):
                self.quiet.writing += 1
                self._to(self.now + PASS)
                continue
            self.quiet.writing = 0
            wanted = None if look.again is None else self.now + look.again
            if wanted is None and moment is None:
                self._to(end)
                self.look()
                break
            if wanted is not None and (moment is None or wanted < moment) and not look.written:
                wanted = self._stretched(look.again or timedelta(0))
            else:
                self.quiet = Quiet()
            self._to(min(one for one in (wanted, moment, end) if one is not None))
        return until()

    def _stretched(self, again: timedelta) -> datetime:
        """An operator may be late: where nothing happens, it looks less and less often, so that a walk does not wait for it."""
        self.quiet.idle = self.quiet.idle + 1 if again < 5 * SECOND else 0
        if again >= 5 * SECOND:
            self.quiet.stretch += 1
        return self.now + max(min(again * (1 << max(0, min(self.quiet.stretch - 3, 8))), 20 * MINUTE), again)

    # ------------------------------------------------------------------------------------------------------------ the API server
    def edited(self, **spec: Any) -> bool:
        """An edit that the API server may refuse; whether it did not."""
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
        made = copy.deepcopy(item)
        made["metadata"]["uid"] = before["metadata"]["uid"] if before else f"c{next(self.counter)}"
        made["metadata"]["creationTimestamp"] = before["metadata"]["creationTimestamp"] if before else self.now.isoformat()
        if before and before.get("status"):
            made["status"] = before["status"]
        if kind == "HTTPRoute":
            same = before is not None and before["spec"] == made["spec"]
            generation = (before or {}).get("metadata", {}).get("generation", 0) + (not same)
            time = before["metadata"]["managedFields"][0]["time"] if before and same else self.now.isoformat()
            made["metadata"] |= {"generation": generation, "managedFields": [{"manager": naming.FIELD_MANAGER, "time": time}]}
        self.objects[kind, name] = made

    def delete(self, kind: str, name: str) -> None:
        gone = self.objects.pop((kind, name), None)
        if gone is not None and kind == "Job":
            uid = gone["metadata"]["uid"]
            self.checks = [pod for pod in self.checks if pod["metadata"]["ownerReferences"][0]["uid"] != uid]

    # ----------------------------------------------------------------------------------------------------------- its controllers
    def react(self) -> None:
        """What controllers, nodes and the gateway do at this moment."""
        self.refusing = [one for one in self.refusing if self.now < one.until]
        self.unlisted = {kind: until for kind, until in self.unlisted.items() if self.now < until}
        self.fleet = [pod for pod in self.fleet if pod.gone_at is None or self.now < pod.gone_at]
        deployments = {name: item for (kind, name), item in self.objects.items() if kind == "Deployment"}
        for pod in self.fleet:
            if pod.serves_at is not None and pod.serves_at <= self.now and pod.deleted is None:
                pod.become("Serving", pod.serves_at)
            if pod.of not in deployments and pod.deleted is None:
                self._remove(pod)
        for name, item in deployments.items():
            self._scale(name, item)
        self._place()
        for (kind, name), job in list(self.objects.items()):
            if kind == "Job" and not job.get("status") and self.now >= _made(job) + CHECK:
                self._conclude(name)
        self._answer_route()
        self._count()

    def _scale(self, name: str, item: dict[str, Any]) -> None:
        """maxSurge 1, maxUnavailable 0: a pod of an older template goes when one of the new serves in its place."""
        wanted, template = item["spec"]["replicas"], json.dumps(item["spec"]["template"], sort_keys=True)
        mine = [pod for pod in self.fleet if pod.of == name and pod.alive]
        old = [pod for pod in mine if pod.template != template]
        for pod in sorted(old, key=lambda pod: pod.serves)[: max(0, sum(pod.serves for pod in mine) - wanted) if old else 0]:
            self._remove(pod)
            mine.remove(pod)
        # Controllers give up what does not serve first, and of what does the youngest.
        order = sorted(mine, key=lambda pod: (pod.serves, pod.state != "Roomless", -pod.since.timestamp(), pod.name))
        for pod in order[: max(0, len(mine) - wanted - (1 if old else 0))]:
            self._remove(pod)
        missing = wanted + (1 if old and wanted else 0) - len(mine)
        room = max(0, self.places - self._held) if self.quota else missing
        for _ in range(min(missing, room)):
            self._make(name, item, template)
        self._say_refused(item, "exceeded quota: gpus" if missing > room else "")

    def _say_refused(self, item: dict[str, Any], why: str) -> None:
        before = next(iter((item.get("status") or {}).get("conditions") or []), None)
        truth = "True" if why else "False"
        if truth == (before["status"] if before else "False"):
            return
        condition = {"type": "ReplicaFailure", "status": truth, "reason": "FailedCreate", "message": f"pods are forbidden: {why}"}
        item["status"] = {"conditions": [condition | {"lastTransitionTime": self.now.isoformat()}]}

    @property
    def _held(self) -> int:
        return sum(pod.holds for pod in self.fleet)

    def _make(self, name: str, item: dict[str, Any], template: str) -> None:
        labels = item["spec"]["template"]["metadata"]["labels"]
        revision = labels[naming.REVISION_LABEL]
        self.drafters.setdefault(revision, _drafter(template))
        made = Pod(f"{name}-{next(self.counter):05d}", name, labels, template, self.now, "Roomless", self.now)
        self.fleet.append(made)
        if self.quota:
            self._start(made)

    def _place(self) -> None:
        """Nodes take what waits for room, the oldest first."""
        free = self.places - self._held
        for pod in self.fleet:
            if free <= 0:
                return
            if pod.state == "Roomless" and pod.deleted is None:
                self._start(pod)
                free -= 1

    def _start(self, pod: Pod) -> None:
        number = next(self.node_numbers)
        pod.node = f"{self.products[number % len(self.products)]}-{number}"
        if pod.revision in self.imageless:
            pod.become("Imageless", self.now)
            return
        state = BROKEN.get(self.drafters[pod.revision], "Loading")
        pod.restarts, pod.ended = (4, self.now) if state == "Crashing" else (0, None)
        late = timedelta(seconds=self.load + self.chance.randrange(4) * 10)
        loads = state == "Loading" and self.drafters[pod.revision] not in BROKEN
        pod.become(state, self.now, self.now + late if loads else None)

    def _remove(self, pod: Pod) -> None:
        pod.deleted = self.now
        if pod.state == "Failed" or not pod.holds:
            pod.gone_at = self.now
        else:
            pod.gone_at = self.now + timedelta(seconds=self.drain)

    def restart(self, pod: Pod) -> None:
        """Its engine's process ends, and is restarted."""
        pod.restarts, pod.ended = pod.restarts + 1, self.now
        pod.become("Loading", self.now, self.now + timedelta(seconds=self.load))

    def lose(self, pod: Pod) -> None:
        """Its node is lost: it is deleted, and its object stays."""
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
        changed = _changed(route)
        accepted = "True" if self.gateway == "Accepts" else "False"
        parents = (route.get("status") or {}).get("parents") or []
        known = parents[0]["conditions"][0] if parents else {}
        said = {"observedGeneration": route["metadata"]["generation"], "status": accepted}
        if self.now < changed + SEES or {key: known.get(key) for key in said} == said:
            return
        since = known["lastTransitionTime"] if known.get("status") == accepted else self.now.isoformat()
        reason = "Accepted" if accepted == "True" else "NoMatchingParent"
        condition = {"type": "Accepted", "reason": reason, "message": "no such listener", "lastTransitionTime": since, **said}
        route["status"] = {
            "parents": [{"parentRef": parent, "conditions": [condition]} for parent in route["spec"]["parentRefs"]]
        }

    # --------------------------------------------------------------------------------------------------------- clients and blocks
    def _arms(self) -> tuple[str, str | None] | None:
        """The Deployments that the present block compares, as controller/collection/blocks.py has them; the second is None where
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

    def _block_ends(self) -> datetime | None:
        arms, serving = self._arms(), sum(pod.serves for pod in self.fleet)
        if arms is None or self.counted is None or not serving:
            return None
        return self.counted + timedelta(seconds=max(120.0, 2000 / (DRAFTS * self.requests / serving)))

    def _count(self) -> None:
        """Close the block under way."""
        arms, ends = self._arms(), self._block_ends()
        if arms is None:
            self.counted, self.blocks = None, []
        elif self.counted is None:
            self.counted = self.now
        elif ends is not None and ends <= self.now:
            sides = [self._side(deployment) for deployment in arms]
            if sides[0] is not None and (sides[1] is not None or arms[1] is None):
                self.blocks = [*self.blocks[-3:], ClosedBlock(self.counted.timestamp(), self.now.timestamp(), sides[0], sides[1])]
            self.counted = self.now

    def _side(self, deployment: str | None) -> Any:
        serving = [pod for pod in self.fleet if pod.serves and pod.of == deployment]
        if not serving:
            return None
        status, revision = self.document["status"], serving[0].revision
        new = (status.get("canary") or status["stable"])["revision"] == revision
        effect = EFFECTS.get(self.drafters.get(revision, ""), 0.2) if new else 0.0
        noise = (1 + self.chance.gauss(0, 0.01)) * self.drift
        seconds = max(SECONDS[pod.product] for pod in serving)
        return side(2.5 * (1 + effect) * noise, seconds=seconds)

    # ---------------------------------------------------------------------------------------------------------------------- time
    def moment(self) -> datetime | None:
        """When anything changes next by itself."""
        return min((at for at in self._moments() if at > self.now), default=None)

    def _moments(self) -> Iterator[datetime]:
        for pod in self.fleet:
            if pod.gone_at is not None:
                yield pod.gone_at
            if pod.serves_at is not None and pod.deleted is None:
                yield pod.serves_at
        for (kind, _), item in self.objects.items():
            if kind == "Job" and not item.get("status"):
                yield _made(item) + CHECK
            elif kind == "HTTPRoute" and self.gateway != "Silent":
                yield _changed(item) + SEES
        yield from (one.until for one in self.refusing)
        yield from self.unlisted.values()
        if (ends := self._block_ends()) is not None:
            yield ends

    def _to(self, moment: datetime) -> None:
        self.now = max(self.now, moment)
        self.react()

    # ----------------------------------------------------------------------------------------------------------- what is asserted
    def serving_by_deployment(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for pod in self.fleet:
            if pod.serves:
                found[pod.of] = found.get(pod.of, 0) + 1
        return found

    def serving(self, revision: str | None = None) -> int:
        return sum(pod.serves for pod in self.fleet if revision in (None, pod.revision))

    def heal(self) -> None:
        """All that is wrong with the cluster passes. What is wrong with a drafter does not."""
        self.places, self.quota, self.gateway, self.failures = 10**6, False, "Accepts", 0
        self.products = ["H100"]
        self.imageless, self.lying, self.refusing, self.unlisted = set(), set(), [], {}
        for pod in self.fleet:
            broken = pod.state in ("NotReady", "Imageless") or (
                pod.state == "Crashing" and self.drafters[pod.revision] != "crashing"
            )
            if pod.alive and broken:
                pod.restarts = 0
                pod.become("Loading", self.now, self.now + timedelta(seconds=self.load))
        self.react()

    def cure(self) -> None:
        """What is wrong with drafters passes too."""
        for revision, drafter in self.drafters.items():
            self.drafters[revision] = "good" if drafter in BROKEN else drafter
        for pod in self.fleet:
            if pod.alive and pod.state == "Loading" and pod.serves_at is None:
                pod.become("Crashing", self.now)
        self.heal()

    def branch(self) -> Cluster:
        """A copy to try something on."""
        return copy.deepcopy(replace_callback(self))


def replace_callback(cluster: Cluster) -> Cluster:
    """Without what listens, which is not copied."""
    found = copy.copy(cluster)
    found.on_look = lambda _: None
    return found


def _made(item: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(str(item["metadata"]["creationTimestamp"]))


def _changed(route: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(str(route["metadata"]["managedFields"][0]["time"]))


def _drafter(template: str) -> str:
    """The drafter's path in a pod's template."""
    marks = ["crashing", "hanging", "worse", "equal", "refused"]
    return next((mark for mark in marks if f'"subPath": "{mark}"' in template), "good")
