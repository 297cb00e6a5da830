"""A world for the operator's decisions, that does what Kubernetes would: it keeps objects, its pods start, crash and go.

The operator may crash after any part of a plan. Endpoints follow the selector of a Service after `LAG`. Blocks of an analysis
come from `measure`, as a scraper would have closed them.
"""

from __future__ import annotations

import itertools
import json
import pickle
import random
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from aerie.analysis.baseline import BaselineCalibration
from aerie.analysis.equivalence import EquivalenceResult, PromptDifference
from aerie.analysis.measurement.blocks import ArmCounts, ClosedBlock
from aerie.analysis.measurement.counts import EngineCounts
from aerie.engine.models.drafter_catalog import DrafterCatalog
from aerie.manifests import naming
from aerie.manifests.preflight_job import PreflightJobConfig
from aerie.rollout.capacity.service_handover import ENDPOINT_PROPAGATION_DELAY
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.concurrency import StartPermission
from aerie.rollout.facts.context_length import ContextLengths
from aerie.rollout.facts.last_valid_spec import read_resource
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.plan import ReconcilePlan
from aerie.rollout.reconcile import build_reconcile_plan
from aerie.rollout.revision.desired import resolve_desired_revision
from aerie.rollout.revision.drafter_selection import select_drafter
from aerie.rollout.trials.effective_setting import resolve_effective_setting
from aerie.tuning.recommendation import Recommendation
from tests.snapshots import build_snapshot

IMAGE = PreflightJobConfig("aerie.dev/aerie:test")
START = datetime(2026, 1, 1, tzinfo=UTC)
DRAFTERS = ("eagle3", "eagle31", "refused")
LAG = timedelta(seconds=5)
"""From a change of a Service until the gateway's proxies know the pods behind it."""
K_OF_SPEC = 3
"""Where the spec names none."""


class World:
    """One resource, its children and pods, and a clock."""

    def __init__(self, **spec: Any) -> None:
        self.now = START
        self.counter = itertools.count(1)
        whole = {
            "replicas": 2,
            "model": {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "target"}}},
            "engine": {"image": "vllm/vllm-openai:v0.33.0"},
            "drafter": {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "eagle3"}}},
            **spec,
        }
        self.document: dict[str, Any] = {
            "apiVersion": "aerie.dev/v1alpha1",
            "kind": "SpeculativeDeployment",
            "metadata": {"name": "chat", "namespace": "default", "uid": "u1", "generation": 1},
            "spec": whole,
        }
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        self.foreign: list[dict[str, Any]] = []
        self.catalog = DrafterCatalog(())
        self.blocks: list[ClosedBlock] = []
        self.source_trouble: str | None = ""
        self.memory: BaselineCalibration | None = None
        self.answers: EquivalenceResult | None = None
        self.contexts: ContextLengths | None = None
        self.advice: Recommendation | None = None
        self.turn = StartPermission()
        self.nodes: dict[str, dict[str, str]] = {}
        """Labels of the nodes whose hardware the operator knows."""
        self.dated = False
        """Whether Services and the route tell when they were changed; else requests follow them at once."""
        self.led: dict[str, list[tuple[datetime, dict[str, str]]]] = {}
        """Selectors of each Service, by its uid, and since when the API server has them."""
        self.named: set[str] = set()
        """Services that the route named before the last pass."""
        self.chance = random.Random(1)  # noqa: S311 - no secrets

    # -- the user
    def edit(self, **spec: Any) -> None:
        self.document["spec"] |= spec
        self.document["metadata"]["generation"] += 1

    def drafter(self, path: str) -> None:
        self.edit(drafter={"source": {"persistentVolumeClaim": {"claimName": "models", "path": path}}})

    def annotate(self, **said: str) -> None:
        annotations = self.document["metadata"].setdefault("annotations", {})
        annotations |= {f"aerie.dev/{word}": value for word, value in said.items()}

    # -- the operator
    def observed(self) -> Snapshot:
        children = tuple(copied(list(self.objects.values())))
        resource, substitute = read_resource(copied(self.document), children)
        return build_snapshot(
            resource=resource,
            spec_substitution=substitute,
            children=children,
            name_conflicts=tuple(self.foreign),
            pods=tuple(copied(self.pods)),
            preflight_pods=tuple(copied(self.checks)),
            blocks=tuple(self.blocks),
            metrics_source_error=self.source_trouble,
            baseline_calibration=self.memory,
            equivalence_result=self.answers,
            context_lengths=self.contexts,
            recommendation=self.advice,
            start_permission=self.turn,
            node_labels=self.nodes,
        )

    def plan(self) -> ReconcilePlan:
        return build_reconcile_plan(self.observed(), IMAGE, self.now, self.catalog)

    def step(self, parts: int = 1000) -> ReconcilePlan:
        """One pass, which crashes after `parts` of its writes."""
        plan, self.named = self.plan(), set(self.sent())
        writes: list[Any] = [("apply", item) for item in plan.objects_to_apply]
        writes += [("delete", reference) for reference in plan.objects_to_delete]
        writes += [("status", plan.status)]
        for what, item in writes[:parts]:
            if what == "apply":
                self.apply(item)
            elif what == "delete":
                found = self.objects.get((item.kind, item.name))
                assert found is not None
                assert found["metadata"]["uid"] == item.uid
                del self.objects[item.kind, item.name]
            else:
                self.document["status"] = item.to_dict()
        return plan

    def apply(self, item: dict[str, Any]) -> None:
        key = (item["kind"], item["metadata"]["name"])
        uid = self.objects[key]["metadata"]["uid"] if key in self.objects else f"c{next(self.counter)}"
        before = self.objects.get(key, {})
        if item["kind"] == "Deployment" and item["spec"]["replicas"] == 0:
            self._nobody_is_sent_to(item)
        kept = before.get("status")
        self.objects[key] = copied(item)
        metadata = self.objects[key]["metadata"]
        metadata["uid"] = uid
        if item["kind"] == "Service":
            led = self.led.setdefault(uid, [])
            if not led or led[-1][1] != item["spec"]["selector"]:
                led.append((self.now, copied(item["spec"]["selector"])))
        if item["kind"] in ("HTTPRoute", "Service") and self.dated:
            metadata["generation"] = before.get("metadata", {}).get("generation", 0) + 1
            metadata["managedFields"] = [{"manager": naming.FIELD_MANAGER, "time": self.now.isoformat()}]
        if kept:
            self.objects[key]["status"] = kept

    def _nobody_is_sent_to(self, deployment: dict[str, Any]) -> None:
        """The route gives nothing to an arm whose last pods go: a gateway would answer with 503. But where no pod is wanted any
        more, or no route."""
        traffic = self.document["spec"].get("rollout", {}).get("traffic", {})
        if self.document["spec"]["replicas"] == 0 or traffic.get("mode") != "Gateway":
            return
        mine = [pod["metadata"]["labels"] for pod in self.pods if of(pod, deployment) and pod_failures.is_pod_ready(pod)]
        route = self.objects.get(("HTTPRoute", self.document["metadata"]["name"]))
        for backend in route["spec"]["rules"][0]["backendRefs"] if route and mine else ():
            selector = self.objects["Service", backend["name"]]["spec"]["selector"]
            hit = any(selector.items() <= labels.items() for labels in mine)
            left = any(
                selector.items() <= pod["metadata"]["labels"].items()
                and pod_failures.is_pod_ready(pod)
                and not of(pod, deployment)
                for pod in self.pods
            )
            assert not hit or left or backend["weight"] == 0, f"{backend} gets requests, and its last pods go"

    # -- the gateway
    def sent(self) -> dict[str, int]:
        """What the route gives each Service."""
        route = self.objects.get(("HTTPRoute", self.document["metadata"]["name"]))
        backends = route["spec"]["rules"][0]["backendRefs"] if route else ()
        return {backend["name"]: backend["weight"] for backend in backends}

    def endpoints(self, service: str, at: datetime, age: timedelta = LAG) -> int:
        """Pods that serve, of those that proxies know to be behind the Service at a time, if nothing changes until then. Of a
        Service that leads to them for less than `age` by then, none."""
        item = self.objects.get(("Service", service))
        known = [one for one in self.led[item["metadata"]["uid"]] if one[0] + LAG <= at] if item else []
        if not known or known[-1][0] + age > at:
            return 0
        return sum(
            known[-1][1].items() <= pod["metadata"]["labels"].items() and pod_failures.is_pod_ready(pod) for pod in self.pods
        )

    def lost(self) -> list[str]:
        """Arms that get requests, now or when endpoints have followed, and of which nobody serves then, while another one could
        serve them that has long been there and that the route has known."""
        found = []
        for at, age in ((self.now, ENDPOINT_PROPAGATION_DELAY), (self.now + LAG, ENDPOINT_PROPAGATION_DELAY + LAG)):
            others = [name for name in self.named if self.endpoints(name, at, age)]
            found += [name for name, weight in self.sent().items() if weight and others and not self.endpoints(name, at)]
        return found

    def heaviest(self) -> float:
        """The largest load of a pod, of all that proxies send to now, as a multiple of what it would be if all that serve had
        the same."""
        sent = self.sent()
        each = [weight / sum(sent.values()) / max(1, self.endpoints(name, self.now)) for name, weight in sent.items()]
        return max(each) * self.serving()

    # -- the cluster
    def deployments(self, *, control: bool = False) -> dict[str, dict[str, Any]]:
        """By revision, those of stable and canary, or those of control pods."""
        found = [item for (kind, _), item in self.objects.items() if kind == "Deployment"]
        wanted = "true" if control else "false"
        labels = [(item["metadata"]["labels"], item) for item in found]
        return {label[naming.REVISION_LABEL]: item for label, item in labels if label[naming.CONTROL_LABEL] == wanted}

    def replicas(self) -> dict[str, int]:
        """What each Deployment asks for, by name."""
        return {name: item["spec"]["replicas"] for (kind, name), item in self.objects.items() if kind == "Deployment"}

    def schedule(self, places: int = 1000) -> None:
        """Make the pods that there should be, as far as there are places, and remove those that there should not."""
        groups = [item for (kind, _), item in self.objects.items() if kind == "Deployment"]
        kept = []
        for item in groups:
            mine = [pod for pod in self.pods if of(pod, item)]
            kept += sorted(mine, key=lambda pod: pod["status"].get("phase") != "Running")[: item["spec"]["replicas"]]
        for item in groups:
            mine = [pod for pod in kept if of(pod, item)]
            for _ in range(min(item["spec"]["replicas"] - len(mine), places - len(kept))):
                name = f"{item['metadata']['name']}-{next(self.counter)}"
                labels = item["spec"]["template"]["metadata"]["labels"]
                metadata = {"name": name, "labels": labels, "creationTimestamp": self.now.isoformat()}
                kept.append({"kind": "Pod", "metadata": metadata, "status": {"phase": "Pending"}})
        self.pods = kept

    def ready(self, revision: str | None = None, value: str = "True") -> None:
        for pod in self.pods:
            if revision in (None, pod["metadata"]["labels"][naming.REVISION_LABEL]):
                condition = {"type": "Ready", "status": value, "lastTransitionTime": self.now.isoformat()}
                known = (pod["status"].get("conditions") or [{}])[0]
                if known.get("status") != value:
                    pod["status"] = {"phase": "Running", "conditions": [condition]}

    def crash(self, revision: str, restarts: int) -> None:
        for pod in self.pods:
            if pod["metadata"]["labels"][naming.REVISION_LABEL] == revision:
                state = {"terminated": {"exitCode": 1, "reason": "Error"}}
                engine = {"name": "engine", "ready": False, "restartCount": restarts, "lastState": state}
                pod["status"] = {"phase": "Running", "containerStatuses": [engine]}

    def kill(self, revision: str, restarts: int, *, control: bool = False, most: int = 100) -> None:
        """The engines of a revision's pods, at most so many, have ended just now, for the so many-th time, and serve again."""
        for pod in self.pods:
            labels = pod["metadata"]["labels"]
            if most and labels[naming.REVISION_LABEL] == revision and (labels[naming.CONTROL_LABEL] == "true") is control:
                most -= 1
                ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": self.now.isoformat()}}
                engine = {"name": "engine", "ready": True, "restartCount": restarts, "lastState": ended}
                pod["status"] = {**pod["status"], "containerStatuses": [engine]}

    def serving(self, revision: str | None = None) -> int:
        found = [pod for pod in self.pods if revision in (None, pod["metadata"]["labels"][naming.REVISION_LABEL])]
        return sum(bool(pod_failures.is_pod_ready(pod)) for pod in found)

    def measure(self, blocks: int, better: float, *, scatter: float = 0.01, seconds: float = 120, step: bool = True) -> None:
        """So many blocks in which the canary's acceptance length is the control's times (1 + better), each looked at."""
        for _ in range(blocks):
            began = self.now.timestamp()
            self.now += timedelta(seconds=seconds)
            length = 2.5 * (1 + self.chance.gauss(0, scatter))
            mine = side(length * (1 + better) * (1 + self.chance.gauss(0, scatter)))
            self.blocks = [*self.blocks[-3:], ClosedBlock(began, self.now.timestamp(), mine, side(length))]
            if step:
                self.step()

    def measure_time(self, blocks: int, slower: float, *, scatter: float = 0.01, step: bool = True) -> None:
        """So many blocks in which the canary's time per output token is the control's times (1 + slower), each looked at."""
        for _ in range(blocks):
            began = self.now.timestamp()
            self.now += timedelta(seconds=120)
            seconds = 50 * (1 + self.chance.gauss(0, scatter))
            mine = side(2.5, seconds=seconds * (1 + slower) * (1 + self.chance.gauss(0, scatter)))
            self.blocks = [*self.blocks[-3:], ClosedBlock(began, self.now.timestamp(), mine, side(2.5, seconds=seconds))]
            if step:
                self.step()

    def measure_alone(self, blocks: int, length: float, *, scatter: float = 0.01) -> None:
        """So many blocks of the stable pods alone, each looked at."""
        for _ in range(blocks):
            began = self.now.timestamp()
            self.now += timedelta(seconds=120)
            mine = side(length * (1 + self.chance.gauss(0, scatter)))
            self.blocks = [*self.blocks[-3:], ClosedBlock(began, self.now.timestamp(), mine, None)]
            self.step()

    def check(self) -> None:
        """Every preflight Job that runs comes to its verdict: the drafter named `refused` is refused."""
        for (kind, name), item in self.objects.items():
            if kind != "Job" or item.get("status") or ("ConfigMap", name) not in self.objects:
                continue  # over, or its pod waits for the volume
            data = json.loads(self.objects["ConfigMap", name]["data"]["resource.json"])
            drafter = data["spec"].get("drafter") or {}
            bad = drafter.get("source", {}).get("persistentVolumeClaim", {}).get("path") == "refused"
            self.conclude(name, {"passed": not bad, "summary": "checked.", "errors": ["✗ C9 weights: torn."] if bad else []})

    def conclude(self, name: str, told: dict[str, Any]) -> None:
        job = self.objects["Job", name]
        kind = "Complete" if told["passed"] else "Failed"
        job["status"] = {"conditions": [{"type": kind, "status": "True", "lastTransitionTime": self.now.isoformat()}]}
        state = {"terminated": {"exitCode": 0 if told["passed"] else 1, "message": json.dumps(told)}}
        labels = job["spec"]["template"]["metadata"]["labels"]
        owner = {"controller": True, "uid": job["metadata"]["uid"]}
        metadata = {"name": f"{name}-x", "labels": labels, "creationTimestamp": self.now.isoformat(), "ownerReferences": [owner]}
        self.checks.append(
            {"kind": "Pod", "metadata": metadata, "status": {"containerStatuses": [{"name": "preflight", "state": state}]}}
        )

    def settle(self) -> None:
        """Passes, pods and Jobs, until nothing changes any more."""
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
        """Passes and Jobs, without pods, until the resource is in the phase."""
        for _ in range(20):
            self.step()
            if self.status["phase"] == phase:
                return
            self.check()
        raise AssertionError(f"{self.status['phase']} instead of {phase}: {self.message('Progressing')}")

    # -- what is asserted
    @property
    def status(self) -> dict[str, Any]:
        return dict(self.document.get("status") or {})

    def condition(self, kind: str) -> tuple[str, str]:
        found = next(condition for condition in self.status["conditions"] if condition["type"] == kind)
        return found["status"], found["reason"]

    def message(self, kind: str) -> str:
        return str(next(condition for condition in self.status["conditions"] if condition["type"] == kind)["message"])

    @property
    def wanted(self) -> str:
        """The revision that is asked for: by the spec, or by a choice or a trial of tuning that holds."""
        observed = self.observed()
        observed = replace(observed, resource=select_drafter(observed.resource, self.catalog).resource)
        return resolve_desired_revision(observed.resource, setting=resolve_effective_setting(observed, self.now).setting).revision


def copied(value: Any) -> Any:
    """Return a deep copy, in a quarter of the time that copy.deepcopy takes."""
    return pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))  # noqa: S301 - its own


def of(pod: dict[str, Any], deployment: dict[str, Any]) -> bool:
    wanted: dict[str, str] = deployment["spec"]["selector"]["matchLabels"]
    labels: dict[str, str] = pod["metadata"]["labels"]
    return wanted.items() <= labels.items()


def side(length: float, drafts: float = 2000, seconds: float = 50) -> ArmCounts:
    """One pod in a block with this acceptance length, of which requests got all, and time for 5,000 tokens at a length of 2.5:
    steps take as long whatever they bring. Nothing else is worth a remark."""
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


def masked(text: str, **revisions: str) -> str:
    """The text with names in place of these and all other revisions, which change with every template of a pod."""
    for name, revision in revisions.items():
        text = text.replace(revision, name)
    return re.sub(r"\b[0-9a-f]{10}\b", "REVISION", text)


def told(odd: int, usual: int = 0, asked: int = 24) -> EquivalenceResult:
    """Greedy answers of which so many are the canary's or the stable pod's alone."""
    prompts = [
        *[PromptDifference(canary_position=2)] * odd,
        *[PromptDifference(control_position=7)] * usual,
        *[PromptDifference()] * (asked - odd - usual),
    ]
    return EquivalenceResult(tuple(prompts), asked)


def serving(**spec: Any) -> World:
    world = World(**spec)
    world.settle()
    return world


def canarying(phase: str, **spec: Any) -> tuple[World, str]:
    """A world with two stable pods whose canary has come to this phase, and the stable revision."""
    world = serving(**spec)
    old = world.wanted
    world.drafter("eagle31")
    for _ in range(3):
        world.step()
        world.check()
    if phase == "Starting":
        return world, old
    world.schedule()
    world.ready()
    world.step()
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


def watching(**spec: Any) -> tuple[World, str]:
    """A world whose canary has just been promoted, and the revision before, of which pods are kept."""
    rollout = spec.pop("rollout", {})
    rollout = {**rollout, "canary": {"scaleDownDelay": "10m", **rollout.get("canary", {})}}
    world, old = canarying("Promoting", **{"replicas": 4, **spec}, rollout=rollout)
    for _ in range(20):
        world.schedule()
        world.ready()
        world.step()
        if world.status["phase"] != "Promoting":
            return world, old
    raise AssertionError("it is not promoted")
