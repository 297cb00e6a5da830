"""Controllers, nodes and the gateway of a simulated cluster: Deployments, pods, preflight Jobs and the route's status.

Guarantees: Deployments have maxSurge 1 and maxUnavailable 0, and delete pods that do not serve first. `react` does all that is
due at the current time, and everything follows from the seed and from the calls, in their order.
Not guaranteed: quota and scheduling by anything but a number of places.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, Literal

from aerie.manifests import naming
from tests.unit.rollout.pods import Pod, State
from tests.unit.rollout.world import World

PREFLIGHT_DURATION = timedelta(seconds=20)
"""Duration of a preflight Job."""
KUBELET_DELAY = timedelta(seconds=2)
"""Time from the node of a pod that has waited for it to the first report of its kubelet. Others are reported immediately."""
GATEWAY_DELAY = timedelta(seconds=1)
"""Delay until a gateway's controller observes a change of its route."""
BROKEN_DRAFTERS: Mapping[str, State] = {"crashing": "Crashing", "hanging": "Loading"}
"""Drafters whose engines never serve."""


class SimulatedControllers(World):
    """A world whose pods and Jobs proceed in time, see the module's docstring."""

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
        self.gateway: Literal["Accepts", "Refuses", "Silent"] = "Accepts"
        self.drafters: dict[str, str] = {}
        """Drafter of each revision."""

    def react(self) -> None:
        """Run controllers, nodes and the gateway at the current time."""
        self.fleet = [pod for pod in self.fleet if pod.gone_at is None or self.now < pod.gone_at]
        deployments = {item["metadata"]["name"]: item for item in self.engine_deployments()}
        for pod in self.fleet:
            if not pod.is_reported and self.now >= pod.since + KUBELET_DELAY:
                pod.is_reported, pod.since = True, self.now
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
        pod.placed_at, pod.is_reported = self.now, pod.since == self.now
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

    def _event_times(self) -> Iterator[datetime]:
        """Yield the times at which something is due."""
        for pod in self.fleet:
            if pod.gone_at is not None:
                yield pod.gone_at
            if pod.serves_at is not None and pod.deleted is None:
                yield pod.serves_at
            if not pod.is_reported:
                yield pod.since + KUBELET_DELAY
        for (kind, _), item in self.objects.items():
            if kind == "Job" and not item.get("status"):
                yield _creation_time(item) + PREFLIGHT_DURATION
            elif kind == "HTTPRoute" and self.gateway != "Silent":
                yield _change_time(item) + GATEWAY_DELAY


def _creation_time(item: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(str(item["metadata"]["creationTimestamp"]))


def _change_time(route: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(str(route["metadata"]["managedFields"][0]["time"]))


def _drafter_name(template: str) -> str:
    """Return the drafter's name in a pod's template."""
    marks = ["crashing", "hanging", "worse", "equal", "refused"]
    return next((mark for mark in marks if f'"subPath": "{mark}"' in template), "good")
