"""Objects, pods and the gateway's endpoints of a minimal Kubernetes, without the operator and without time.

Guarantees: an object keeps its uid and its status when it is applied again. Endpoints follow the selector of a Service after
`LAG`. No route has a weight for an arm whose last pods are deleted: `apply` checks it.
Not guaranteed: any controller. Pods are created, start and crash when a test calls the method.
"""

from __future__ import annotations

import itertools
import pickle
from datetime import datetime, timedelta
from typing import Any

from aerie.manifests import naming
from aerie.rollout.capacity.service_handover import ENDPOINT_PROPAGATION_DELAY
from aerie.rollout.facts import pod_failures

LAG = timedelta(seconds=5)
"""Delay between a change of a Service and the endpoints of the gateway's proxies."""


class ClusterState:
    """The API server's objects of one resource, and its pods."""

    def __init__(self, document: dict[str, Any], now: datetime) -> None:
        self.now = now
        self.counter = itertools.count(1)
        self.document = document
        """The resource."""
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: list[dict[str, Any]] = []
        self.has_change_times = False
        """Whether Services and the route have the time of their change; else requests follow them immediately."""
        self.selector_history: dict[str, list[tuple[datetime, dict[str, str]]]] = {}
        """Selectors of each Service, by its uid, with the time since which the API server has them."""
        self.routed_services: set[str] = set()
        """Services that the route named before the last reconcile."""

    # -- the API server
    def apply(self, item: dict[str, Any]) -> None:
        key = (item["kind"], item["metadata"]["name"])
        uid = self.objects[key]["metadata"]["uid"] if key in self.objects else f"c{next(self.counter)}"
        old_item = self.objects.get(key, {})
        if item["kind"] == "Deployment" and item["spec"]["replicas"] == 0:
            self._check_no_weight(item)
        old_status = old_item.get("status")
        self.objects[key] = copied(item)
        metadata = self.objects[key]["metadata"]
        metadata["uid"] = uid
        if item["kind"] == "Service":
            history = self.selector_history.setdefault(uid, [])
            if not history or history[-1][1] != item["spec"]["selector"]:
                history.append((self.now, copied(item["spec"]["selector"])))
        if item["kind"] in ("HTTPRoute", "Service") and self.has_change_times:
            metadata["generation"] = old_item.get("metadata", {}).get("generation", 0) + 1
            metadata["managedFields"] = [{"manager": naming.FIELD_MANAGER, "time": self.now.isoformat()}]
        if old_status:
            self.objects[key]["status"] = old_status

    def _check_no_weight(self, deployment: dict[str, Any]) -> None:
        """Check that the route has no weight for an arm whose last pods are deleted: a gateway would answer with 503. Without
        desired pods or a route there is nothing to check."""
        traffic = self.document["spec"].get("rollout", {}).get("traffic", {})
        if self.document["spec"]["replicas"] == 0 or traffic.get("mode") != "Gateway":
            return
        ready_pods = [pod for pod in self.pods if is_pod_of(pod, deployment) and pod_failures.is_pod_ready(pod)]
        route = self.objects.get(("HTTPRoute", self.document["metadata"]["name"]))
        for backend in route["spec"]["rules"][0]["backendRefs"] if route and ready_pods else ():
            selector = self.objects["Service", backend["name"]]["spec"]["selector"]
            selects_own = any(selector.items() <= pod["metadata"]["labels"].items() for pod in ready_pods)
            others_serve = any(
                selector.items() <= pod["metadata"]["labels"].items()
                and pod_failures.is_pod_ready(pod)
                and not is_pod_of(pod, deployment)
                for pod in self.pods
            )
            assert not selects_own or others_serve or backend["weight"] == 0, f"{backend} gets requests, and its last pods go"

    # -- the gateway
    def route_weights(self) -> dict[str, int]:
        """Return the route's weight of each Service."""
        route = self.objects.get(("HTTPRoute", self.document["metadata"]["name"]))
        backends = route["spec"]["rules"][0]["backendRefs"] if route else ()
        return {backend["name"]: backend["weight"] for backend in backends}

    def endpoints(self, service: str, at: datetime, age: timedelta = LAG) -> int:
        """Return the number of serving pods among the proxies' endpoints of the Service at a time, if nothing changes until then;
        0 for a selector that is younger than `age` by then."""
        item = self.objects.get(("Service", service))
        history = [entry for entry in self.selector_history[item["metadata"]["uid"]] if entry[0] + LAG <= at] if item else []
        if not history or history[-1][0] + age > at:
            return 0
        return sum(
            history[-1][1].items() <= pod["metadata"]["labels"].items() and pod_failures.is_pod_ready(pod) for pod in self.pods
        )

    def unserved_services(self) -> list[str]:
        """Return the Services that get requests, now or when endpoints have followed, and have no serving pod then, while another
        established Service of the route has one."""
        unserved = []
        for at, age in ((self.now, ENDPOINT_PROPAGATION_DELAY), (self.now + LAG, ENDPOINT_PROPAGATION_DELAY + LAG)):
            others = [name for name in self.routed_services if self.endpoints(name, at, age)]
            unserved += [
                name for name, weight in self.route_weights().items() if weight and others and not self.endpoints(name, at)
            ]
        return unserved

    def max_pod_load(self) -> float:
        """Return the largest load of a pod, as a multiple of the load of equally loaded serving pods."""
        weights = self.route_weights()
        loads = [weight / sum(weights.values()) / max(1, self.endpoints(name, self.now)) for name, weight in weights.items()]
        return max(loads) * self.serving()

    # -- Deployments and pods
    def deployments(self, *, control: bool = False) -> dict[str, dict[str, Any]]:
        """Return the Deployments of stable and canary by revision, or those of control pods."""
        deployments = self.engine_deployments()
        control_label = "true" if control else "false"
        labels = [(item["metadata"]["labels"], item) for item in deployments]
        return {label[naming.REVISION_LABEL]: item for label, item in labels if label[naming.CONTROL_LABEL] == control_label}

    def engine_deployments(self) -> list[dict[str, Any]]:
        """Return the Deployments with engines; that of an evaluator has no revision."""
        deployments = (item for (kind, _), item in self.objects.items() if kind == "Deployment")
        return [item for item in deployments if naming.REVISION_LABEL in item["metadata"]["labels"]]

    def replicas(self) -> dict[str, int]:
        """Return each Deployment's replicas, by name."""
        return {name: item["spec"]["replicas"] for (kind, name), item in self.objects.items() if kind == "Deployment"}

    def schedule(self, places: int = 1000) -> None:
        """Create the missing pods, as far as there are places, and delete the surplus."""
        groups = self.engine_deployments()
        scheduled = []
        for item in groups:
            own_pods = [pod for pod in self.pods if is_pod_of(pod, item)]
            scheduled += sorted(own_pods, key=lambda pod: pod["status"].get("phase") != "Running")[: item["spec"]["replicas"]]
        for item in groups:
            own_pods = [pod for pod in scheduled if is_pod_of(pod, item)]
            for _ in range(min(item["spec"]["replicas"] - len(own_pods), places - len(scheduled))):
                name = f"{item['metadata']['name']}-{next(self.counter)}"
                labels = item["spec"]["template"]["metadata"]["labels"]
                metadata = {"name": name, "labels": labels, "creationTimestamp": self.now.isoformat()}
                env = item["spec"]["template"]["spec"]["containers"][0].get("env") or []
                spec = {"containers": [{"name": "engine", "env": env, "ports": [{"name": "http", "containerPort": 8000}]}]}
                scheduled.append({"kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": "Pending"}})
        self.pods = scheduled

    def ready(self, revision: str | None = None, value: str = "True") -> None:
        for pod in self.pods:
            if revision in (None, pod["metadata"]["labels"][naming.REVISION_LABEL]):
                condition = {"type": "Ready", "status": value, "lastTransitionTime": self.now.isoformat()}
                current = (pod["status"].get("conditions") or [{}])[0]
                if current.get("status") != value:
                    address = f"10.0.0.{pod['metadata']['name'].rpartition('-')[2]}"
                    pod["status"] = {"phase": "Running", "conditions": [condition], "podIP": address}

    def crash(self, revision: str, restarts: int) -> None:
        for pod in self.pods:
            if pod["metadata"]["labels"][naming.REVISION_LABEL] == revision:
                state = {"terminated": {"exitCode": 1, "reason": "Error"}}
                engine = {"name": "engine", "ready": False, "restartCount": restarts, "lastState": state}
                pod["status"] = {"phase": "Running", "containerStatuses": [engine]}

    def kill(self, revision: str, restarts: int, *, control: bool = False, most: int = 100) -> None:
        """End the engines of at most `most` of a revision's pods now, with this restart count; they serve again."""
        for pod in self.pods:
            labels = pod["metadata"]["labels"]
            if most and labels[naming.REVISION_LABEL] == revision and (labels[naming.CONTROL_LABEL] == "true") is control:
                most -= 1
                ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": self.now.isoformat()}}
                engine = {"name": "engine", "ready": True, "restartCount": restarts, "lastState": ended}
                pod["status"] = {**pod["status"], "containerStatuses": [engine]}

    def serving(self, revision: str | None = None) -> int:
        pods = [pod for pod in self.pods if revision in (None, pod["metadata"]["labels"][naming.REVISION_LABEL])]
        return sum(bool(pod_failures.is_pod_ready(pod)) for pod in pods)


def copied(value: Any) -> Any:
    """Return a deep copy, in a quarter of the time that copy.deepcopy takes."""
    return pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))  # noqa: S301 - its own


def is_pod_of(pod: dict[str, Any], deployment: dict[str, Any]) -> bool:
    selector: dict[str, str] = deployment["spec"]["selector"]["matchLabels"]
    labels: dict[str, str] = pod["metadata"]["labels"]
    return selector.items() <= labels.items()
