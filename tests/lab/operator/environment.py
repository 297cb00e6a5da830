"""The environment of rollout scenarios: one namespace, a series of operators, and a recorder of all events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aerie.rollout.canary.extension_request import EXTEND_ANNOTATION
from aerie.rollout.canary.messages import PROMOTE_ANNOTATION, ROLLBACK_ANNOTATION
from aerie.rollout.progression.retry_request import RETRY_ANNOTATION
from aerie_lab.cluster import Lab
from aerie_lab.faults import Fault, FaultInjector
from aerie_lab.kube.client import KubeClient, core_path
from tests.lab.operator.event_recorder import RESOURCES, EventRecorder, ready

Object = dict[str, Any]
TIMEOUT_SECONDS = 600.0
"""Seconds for one wait. A minute or two is usual."""


class OperatorSeries:
    """A series of operators: whenever one is dead, the next starts with a lease of its own, since the dead hold theirs."""

    def __init__(self, launcher: Any, namespace: str, notify: str) -> None:
        self._launcher, self._namespace, self._notify = launcher, namespace, notify
        self.kills = self.starts = 0
        self._operator: Any = None

    async def run(self) -> None:
        """Keep one running until cancelled."""
        while True:
            if self._operator is None or not self._operator.alive():
                self._start_next()
            await asyncio.sleep(0.2)

    def _start_next(self) -> None:
        self.starts += 1
        self._operator = self._launcher.start(self._namespace, lease=f"operator-{self.starts}", notify=self._notify)

    def kill(self) -> None:
        """Kill the operator with SIGKILL and start the next one."""
        self._operator.kill()
        self.kills += 1
        self._start_next()


@dataclass
class Case:
    """One resource of a scenario."""

    name: str
    environment: Environment
    faults: list[Fault] = field(default_factory=list)

    # -- state
    @property
    def item(self) -> Object:
        return self.environment.recorder.resources.get(self.name) or {}

    @property
    def status(self) -> Object:
        status: Object = self.item.get("status") or {}
        return status

    @property
    def canary(self) -> Object:
        canary: Object = self.status.get("canary") or {}
        return canary

    @property
    def last(self) -> Object:
        """Return the record of its latest ended rollout."""
        record: Object = self.status["rolloutHistory"][0]
        return record

    def pods(self, revision: str) -> list[Object]:
        """Return the pods of a revision that are not being deleted, without control pods."""
        labels = {"aerie.dev/name": self.name, "aerie.dev/revision": revision, "aerie.dev/control": "false"}
        all_pods = self.environment.recorder.pods.values()
        return [pod for pod in all_pods if labels.items() <= pod["metadata"]["labels"].items() and not is_deleted(pod)]

    # -- actions of the user
    async def apply(self, document: Object) -> None:
        await self.environment.client.apply(
            {**document, "metadata": {**document["metadata"], "namespace": self.environment.namespace}}
        )

    async def apply_first_revision(self, document: Object) -> str:
        """Apply the resource and wait until its first revision serves; return the revision."""
        await self.apply(document)
        await self.until(lambda status: status.get("phase") == "Ready", "the first revision serves")
        return str(self.status["stable"]["revision"])

    async def annotate(self, **actions: str | None) -> None:
        """Set the annotations of manual actions: promote, rollback, retry, extend."""
        names = {
            "promote": PROMOTE_ANNOTATION,
            "rollback": ROLLBACK_ANNOTATION,
            "retry": RETRY_ANNOTATION,
            "extend": EXTEND_ANNOTATION,
        }
        body = {"metadata": {"annotations": {names[action]: value for action, value in actions.items()}}}
        await self.environment.client.patch(self._path(), body)

    async def scale(self, replicas: int) -> None:
        """Set the replicas like an autoscaler."""
        await self.environment.client.patch(self._path("scale"), {"spec": {"replicas": replicas}})

    def _path(self, subresource: str = "") -> str:
        path = f"{RESOURCES.replace('NAMESPACE', self.environment.namespace)}/{self.name}"
        return f"{path}/{subresource}" if subresource else path

    # -- events of the cluster
    async def open_gate(self, revision: str) -> str:
        """Remove the scheduling gate of the revision's first gated pod; return its name."""
        await self.until(lambda _: self.pods(revision), "the pod is there")
        name = str(self.pods(revision)[0]["metadata"]["name"])
        await self.environment.client.patch(
            core_path("pods", self.environment.namespace, name), {"spec": {"schedulingGates": None}}
        )
        return name

    async def corrupt_metrics(self, corruption: Any, revision: str | None = None) -> None:
        """Wait for a ready pod, and corrupt the metrics of all ready pods of the canary, or of the revision."""
        revision = str(revision or self.canary["revision"])
        await self.until(lambda _: any(map(ready, self.pods(revision))), "a pod is ready")
        for pod in filter(ready, self.pods(revision)):
            fault = await asyncio.to_thread(
                self.environment.faults.corrupt_metrics, pod["metadata"]["name"], corruption, namespace=self.environment.namespace
            )
            self.faults.append(fault)

    async def repair_metrics(self) -> None:
        """End the corruption of the canary's metrics."""
        for pod in self.pods(self.canary["revision"]):
            request = {"namespace": self.environment.namespace, "pod": pod["metadata"]["name"], "corruption": None}
            await asyncio.to_thread(self.environment.lab.call_agent, "corrupt_metrics", **request)

    # -- waits
    async def until(self, condition: Callable[[Object], Any], description: str) -> None:
        await self.environment.recorder.until(
            lambda: condition(self.status),
            lambda: f"{self.name}: {description}; it is {self.status or 'without a status'}",
            TIMEOUT_SECONDS,
        )

    async def until_phase(self, *phases: str) -> str:
        """Wait until its canary is in one of these phases; return the canary's revision."""
        await self.until(lambda _: self.canary.get("phase") in phases, f"it is in {' or '.join(phases)}")
        return str(self.canary["revision"])

    async def until_monitoring(self) -> None:
        """Wait until it is promoted and pods of the previous revision are retained."""
        await self.until(lambda status: status["phase"] == "Monitoring", "old pods are retained")

    async def open_gates(self, revision: str) -> None:
        """Remove the scheduling gates of the revision's pods until cancelled."""
        while True:
            for pod in self.pods(revision):
                if pod["spec"].get("schedulingGates"):
                    path = core_path("pods", self.environment.namespace, str(pod["metadata"]["name"]))
                    await self.environment.client.patch(path, {"spec": {"schedulingGates": None}})
            await asyncio.sleep(1)

    async def until_ended(self, result: str, *, drafter: str, message: str = "", verdict: str = "") -> None:
        """Wait until the rollout has ended and only the serving pods are left; the outcome contains `message`, and the analysis
        has the `verdict`."""

        def is_ended(status: Object) -> bool:
            phases = {"Promoted": "Ready", "RolledBack": "RolledBack", "Failed": "Failed", "Superseded": "Ready"}
            if stable_drafter(status) != drafter or self.last["result"] != result:
                return False
            stable = status["stable"]
            deployments = [
                item
                for item in self.environment.recorder.deployments.values()
                if item["metadata"]["labels"]["aerie.dev/name"] == self.name
            ]
            return (
                status["phase"] == phases[result]
                and not status.get("canary")
                and [item["metadata"]["labels"]["aerie.dev/revision"] for item in deployments] == [stable["revision"]]
                and len(self.pods(stable["revision"])) == self.item["spec"]["replicas"]
            )

        await self.until(is_ended, f"its rollout has ended as {result}")
        assert message in self.last["message"], self.last
        assert not verdict or self.status["analysis"]["verdict"] == verdict, self.last


@dataclass
class Environment:
    """The common objects of all scenarios."""

    lab: Lab
    namespace: str
    client: KubeClient
    recorder: EventRecorder
    operators: OperatorSeries
    faults: FaultInjector
    killed_in: dict[str, str] = field(default_factory=dict)
    """Resource whose change of phase killed the operator, by phase."""

    def kill_in_new_phase(self, item: Object) -> None:
        """Kill the operator when the first canary enters a phase."""
        status = item.get("status") or {}
        phase = (status.get("canary") or status.get("previous") or {}).get("phase")
        if phase and status.get("stable") and phase not in self.killed_in:
            self.killed_in[phase] = item["metadata"]["name"]
            self.operators.kill()


def is_deleted(item: Object) -> bool:
    return bool(item["metadata"].get("deletionTimestamp"))


def stable_drafter(status: Object) -> str:
    """Return the drafter of the stable revision."""
    return str(status["stable"]["drafter"]).removeprefix("models.example/")
