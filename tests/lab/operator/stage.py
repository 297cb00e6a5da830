"""What scenarios of rollouts are played on: one namespace, one operator after another, and a witness of all that happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aerie.rollout.canary.messages import PROMOTE_ANNOTATION, ROLLBACK_ANNOTATION
from aerie.rollout.progression import RETRY_ANNOTATION
from aerie_lab.cluster import Lab
from aerie_lab.faults import Fault, FaultInjector
from aerie_lab.kube.client import KubeClient, core_path
from tests.lab.operator.witness import RESOURCES, Witness, ready

Object = dict[str, Any]
PATIENCE = 600.0
"""Seconds for one wait. A minute or two is usual."""


class Reign:
    """The operator, one after another: whenever one is dead the next begins, with a lease of its own, as the dead hold theirs."""

    def __init__(self, nursery: Any, namespace: str, notify: str) -> None:
        self._nursery, self._namespace, self._notify = nursery, namespace, notify
        self.kills = self.starts = 0
        self._living: Any = None

    async def run(self) -> None:
        """Keep one running until cancelled."""
        while True:
            if self._living is None or not self._living.alive():
                self._begin()
            await asyncio.sleep(0.2)

    def _begin(self) -> None:
        self.starts += 1
        self._living = self._nursery.start(self._namespace, lease=f"operator-{self.starts}", notify=self._notify)

    def kill(self) -> None:
        """SIGKILL, and the next one."""
        self._living.kill()
        self.kills += 1
        self._begin()


@dataclass
class Case:
    """One resource of a scenario."""

    name: str
    stage: Stage
    faults: list[Fault] = field(default_factory=list)

    # -- what is
    @property
    def item(self) -> Object:
        return self.stage.witness.now.get(self.name) or {}

    @property
    def status(self) -> Object:
        found: Object = self.item.get("status") or {}
        return found

    @property
    def canary(self) -> Object:
        found: Object = self.status.get("canary") or {}
        return found

    @property
    def last(self) -> Object:
        """How its latest rollout has ended."""
        found: Object = self.status["rolloutHistory"][0]
        return found

    def pods(self, revision: str) -> list[Object]:
        """Pods of a revision that stay, but for control pods."""
        wanted = {"aerie.dev/name": self.name, "aerie.dev/revision": revision, "aerie.dev/control": "false"}
        found = self.stage.witness.pods.values()
        return [pod for pod in found if wanted.items() <= pod["metadata"]["labels"].items() and not deleted(pod)]

    # -- what a user does
    async def apply(self, document: Object) -> None:
        await self.stage.client.apply({**document, "metadata": {**document["metadata"], "namespace": self.stage.namespace}})

    async def first(self, document: Object) -> str:
        """Its first revision, once it serves."""
        await self.apply(document)
        await self.until(lambda status: status.get("phase") == "Ready", "the first revision serves")
        self.stage.served(self.name)
        return str(self.status["stable"]["revision"])

    async def say(self, **words: str | None) -> None:
        """Annotate: promote, rollback, retry."""
        names = {"promote": PROMOTE_ANNOTATION, "rollback": ROLLBACK_ANNOTATION, "retry": RETRY_ANNOTATION}
        body = {"metadata": {"annotations": {names[word]: value for word, value in words.items()}}}
        await self.stage.client.patch(self._where(), body)

    async def scale(self, replicas: int) -> None:
        """As an autoscaler does."""
        await self.stage.client.patch(self._where("scale"), {"spec": {"replicas": replicas}})

    def _where(self, sub: str = "") -> str:
        where = f"{RESOURCES.replace('NAMESPACE', self.stage.namespace)}/{self.name}"
        return f"{where}/{sub}" if sub else where

    # -- what the world does
    async def open(self, revision: str) -> str:
        """Let the first pod of the revision that waits at its gate be scheduled; its name."""
        await self.until(lambda _: self.pods(revision), "the pod is there")
        name = str(self.pods(revision)[0]["metadata"]["name"])
        await self.stage.client.patch(core_path("pods", self.stage.namespace, name), {"spec": {"schedulingGates": None}})
        return name

    async def corrupt_metrics(self, corruption: Any, revision: str | None = None) -> None:
        """Corrupt the metrics of all ready pods of the canary, or of the revision; waits until there is one."""
        revision = str(revision or self.canary["revision"])
        await self.until(lambda _: any(map(ready, self.pods(revision))), "a pod is ready")
        for pod in filter(ready, self.pods(revision)):
            made = await asyncio.to_thread(
                self.stage.faults.corrupt_metrics, pod["metadata"]["name"], corruption, namespace=self.stage.namespace
            )
            self.faults.append(made)

    async def truth(self) -> None:
        """They do no longer, whatever it was that they showed."""
        for pod in self.pods(self.canary["revision"]):
            request = {"namespace": self.stage.namespace, "pod": pod["metadata"]["name"], "corruption": None}
            await asyncio.to_thread(self.stage.lab.call_agent, "corrupt_metrics", **request)

    # -- waits
    async def until(self, look: Callable[[Object], Any], what: str) -> None:
        await self.stage.witness.until(
            lambda: look(self.status), lambda: f"{self.name}: {what}; it is {self.status or 'without a status'}", PATIENCE
        )

    async def phase(self, *phases: str) -> str:
        """Until its canary is in one of these phases; the canary's revision."""
        await self.until(lambda _: self.canary.get("phase") in phases, f"it is in {' or '.join(phases)}")
        return str(self.canary["revision"])

    async def watched(self) -> None:
        """Until it is promoted, and pods of the revision before are kept."""
        await self.until(lambda status: status["phase"] == "Monitoring", "old pods are kept")

    async def open_all(self, revision: str) -> None:
        """Let each pod of the revision that waits at its gate be scheduled, until cancelled."""
        while True:
            for pod in self.pods(revision):
                if pod["spec"].get("schedulingGates"):
                    where = core_path("pods", self.stage.namespace, str(pod["metadata"]["name"]))
                    await self.stage.client.patch(where, {"spec": {"schedulingGates": None}})
            await asyncio.sleep(1)

    async def ended(self, result: str, *, drafter: str, words: str = "", verdict: str = "") -> None:
        """Until the rollout has ended, and nothing is left of it but what serves; `words`: what the message contains;
        `verdict`: that of the analysis."""

        def over(status: Object) -> bool:
            phases = {"Promoted": "Ready", "RolledBack": "RolledBack", "Failed": "Failed", "Superseded": "Ready"}
            if case_drafter(status) != drafter or self.last["result"] != result:
                return False
            stable = status["stable"]
            here = [
                one for one in self.stage.witness.deployments.values() if one["metadata"]["labels"]["aerie.dev/name"] == self.name
            ]
            return (
                status["phase"] == phases[result]
                and not status.get("canary")
                and [one["metadata"]["labels"]["aerie.dev/revision"] for one in here] == [stable["revision"]]
                and len(self.pods(stable["revision"])) == self.item["spec"]["replicas"]
            )

        await self.until(over, f"its rollout has ended as {result}")
        assert words in self.last["message"], self.last
        assert not verdict or self.status["analysis"]["verdict"] == verdict, self.last


@dataclass
class Stage:
    """What all scenarios share."""

    lab: Lab
    namespace: str
    client: KubeClient
    witness: Witness
    reign: Reign
    faults: FaultInjector
    killed_in: dict[str, str] = field(default_factory=dict)
    """By phase, the resource whose coming into it had the operator killed."""
    waiting: set[str] = field(default_factory=set)
    """Scenarios whose first revision does not serve yet."""
    all_serve: asyncio.Event = field(default_factory=asyncio.Event)

    def served(self, name: str) -> None:
        self.waiting.discard(name)
        if not self.waiting:
            self.all_serve.set()

    def heard(self, item: Object) -> None:
        """Kill the operator when the first canary comes into a phase."""
        status = item.get("status") or {}
        phase = (status.get("canary") or status.get("previous") or {}).get("phase")
        if phase and status.get("stable") and phase not in self.killed_in:
            self.killed_in[phase] = item["metadata"]["name"]
            self.reign.kill()


def deleted(item: Object) -> bool:
    return bool(item["metadata"].get("deletionTimestamp"))


def case_drafter(status: Object) -> str:
    """The drafter of what serves."""
    return str(status["stable"]["drafter"]).removeprefix("models.example/")
