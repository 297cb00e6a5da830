"""Records all events of a namespace's resources, and finds violations of the rollout's invariants afterwards.

    watches of resources, Deployments and pods ─► events by resourceVersion ─► replay ─► violations, transitions taken

Invariants, over the whole time and for each resource:

* capacity: no serving pod is deleted if that leaves fewer serving pods than the spec allows (`min_serving_pods`)
* promotion: a revision becomes stable only from the canary's last phase, and with significant evidence or a manual promotion
* one transition at a time: from one status to the next, at most one transition of the state machine's table; never do three
  revisions request pods; when a canary is in the status, an earlier canary requests none any more

Guarantee: no version of an object is missed: a watch that cannot continue at its version is an error of the test. Pods that the
cluster removes (a lost node) are no violation; deleted pods are. Transitions are derived from two successive statuses, so they
are those that the operator wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aerie.rollout.canary.messages import PROMOTE_ANNOTATION
from aerie.rollout.canary.state_machine import MANUAL_ROLLBACK_MESSAGE, TRANSITIONS, Trigger
from aerie_lab.errors import KubeError
from aerie_lab.kube.client import KubeClient, resource_path

Object = dict[str, Any]
RESOURCES = resource_path("aerie.dev/v1alpha1", "speculativedeployments", "NAMESPACE")
WATCHED = (RESOURCES, resource_path("apps/v1", "deployments", "NAMESPACE"), resource_path("v1", "pods", "NAMESPACE"))
PHASE_OF_END = {"RolledBack": "RollingBack", "Failed": "RollingBack", "Promoted": None, "Completed": None}
"""Phase of the canary that shows each end state of the table."""


@dataclass(frozen=True)
class ObjectVersion:
    """One version of one object."""

    version: int
    kind: str
    is_deleted: bool
    item: Object


class EventRecorder:
    """Records events, see the module's docstring. `resources` has the latest version of each resource by name."""

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self._client, self._namespace = client, namespace
        self.versions: list[ObjectVersion] = []
        self.resources: dict[str, Object] = {}
        self.pods: dict[str, Object] = {}
        self.deployments: dict[str, Object] = {}
        self.listeners: list[Callable[[Object], None]] = []
        """Called with each version of a resource."""
        self._event = asyncio.Event()
        self._broken = ""

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for path in WATCHED:
                    tasks.create_task(self._follow(path.replace("NAMESPACE", self._namespace)))
        except* Exception as group:
            self._broken = repr(group.exceptions)
            self._notify()
            raise

    async def _follow(self, path: str) -> None:
        listed: Object | None = None
        while listed is None:
            try:
                listed = await self._client.get(path)
            except KubeError:
                await asyncio.sleep(0.5)
        version = listed["metadata"]["resourceVersion"]
        kind = listed["kind"].removesuffix("List")
        for item in listed["items"]:
            self._take("ADDED", {"kind": kind, **item})
        while True:
            try:
                async for event_type, item in self._client.watch(path, version):
                    version = item["metadata"]["resourceVersion"]
                    if event_type != "BOOKMARK":
                        self._take(event_type, item)
            except KubeError as error:
                if error.status == 410:  # something may have been missed
                    raise
                await asyncio.sleep(0.2)

    def _take(self, event_type: str, item: Object) -> None:
        name, is_deleted = item["metadata"]["name"], event_type == "DELETED"
        item["metadata"].pop("managedFields", None)
        self.versions.append(ObjectVersion(int(item["metadata"]["resourceVersion"]), item["kind"], is_deleted, item))
        objects = {"SpeculativeDeployment": self.resources, "Pod": self.pods, "Deployment": self.deployments}[item["kind"]]
        if is_deleted:
            objects.pop(name, None)
        else:
            objects[name] = item
        if item["kind"] == "SpeculativeDeployment" and not is_deleted:
            for listener in self.listeners:
                listener(item)
        self._notify()

    def _notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, condition: Callable[[], Any], description: Callable[[], str], timeout: float) -> Any:
        """Wait until the condition returns a true value, and return that value; it is checked after each event."""
        try:
            async with asyncio.timeout(timeout):
                while not (match := condition()):
                    assert not self._broken, self._broken
                    await self._event.wait()
                return match
        except TimeoutError:
            raise AssertionError(f"not within {timeout:g} s: {description()}") from None

    # -- evaluation
    def violations(self) -> list[str]:
        """Return a sentence for each violation."""
        return [sentence for replay in self._replays().values() for sentence in replay.violations]

    def transitions_taken(self) -> dict[tuple[str, Trigger], set[str]]:
        """Return the transitions of the table that were taken, with their resources."""
        resources_by_transition: dict[tuple[str, Trigger], set[str]] = defaultdict(set)
        for name, replay in self._replays().items():
            for transition in replay.transitions_taken:
                resources_by_transition[transition].add(name)
        return resources_by_transition

    def phase_changes(self) -> int:
        """Return the number of changes of phase."""
        return sum(replay.phase_changes for replay in self._replays().values())

    def _replays(self) -> dict[str, Replay]:
        replays: dict[str, Replay] = defaultdict(Replay)
        for version in sorted(self.versions, key=lambda version: version.version):
            labels = version.item["metadata"].get("labels") or {}
            name = version.item["metadata"]["name"] if version.kind == "SpeculativeDeployment" else labels.get("aerie.dev/name")
            if name:
                replays[name].take(version)
        return replays


def min_serving_pods(spec: Object) -> int:
    """Return the minimum of serving pods that the spec allows."""
    replicas, canary = spec["replicas"], spec["rollout"]["canary"]
    size = min(canary["replicas"], max(1, replicas))
    borrowed = size * (2 if canary["control"] == "Fresh" else 1)
    return int(replicas if canary["capacity"] == "Surge" else max(0, replicas - borrowed))


def ready(pod: Object) -> bool:
    """Return whether the pod serves."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    serves = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
    return serves and not pod["metadata"].get("deletionTimestamp")


def _allowed_phases() -> dict[str, set[str | None]]:
    """Return the phases that may follow each phase of the canary, by the table. An empty ramp is skipped."""
    allowed_phases: dict[str, set[str | None]] = defaultdict(set)
    for (phase, _), target in TRANSITIONS.items():
        allowed_phases[phase].add(PHASE_OF_END.get(target, target))
        if target == "Ramping":
            allowed_phases[phase].add("Promoting")
        allowed_phases[phase].add("RollingBack")  # another spec
    allowed_phases["RollingBack"].add(None)
    return allowed_phases


ALLOWED_PHASES = _allowed_phases()


@dataclass
class Replay:
    """The events of one resource, replayed."""

    violations: list[str] = field(default_factory=list)
    transitions_taken: list[tuple[str, Trigger]] = field(default_factory=list)
    phase_changes: int = 0
    _item: Object | None = None
    _minima: dict[int, int] = field(default_factory=dict)
    """Minimum of serving pods by generation, since the observed one."""
    _serving: set[str] = field(default_factory=set)
    _requested: dict[str, str] = field(default_factory=dict)
    """Revisions of the Deployments that request pods, by name."""

    def take(self, version: ObjectVersion) -> None:
        match version.kind:
            case "SpeculativeDeployment":
                if version.is_deleted:
                    self._item = None
                else:
                    self._resource(version)
            case "Pod":
                self._pod(version)
            case "Deployment":
                self._deployment(version)

    def _pod(self, version: ObjectVersion) -> None:
        name = version.item["metadata"]["name"]
        serves = ready(version.item) and not version.is_deleted
        is_removed = name in self._serving and (version.is_deleted or "deletionTimestamp" in version.item["metadata"])
        (self._serving.add if serves else self._serving.discard)(name)
        if not is_removed or self._item is None or not (self._item.get("status") or {}).get("stable"):
            return
        minimum = min(self._minima.values(), default=0)
        if len(self._serving) < minimum:
            self._add_violation(version, f"pod {name} was deleted, and {len(self._serving)} pods serve where {minimum} should")

    def _deployment(self, version: ObjectVersion) -> None:
        self._requested.pop(version.item["metadata"]["name"], None)
        if not version.is_deleted and version.item["spec"]["replicas"]:
            self._requested[version.item["metadata"]["name"]] = version.item["metadata"]["labels"]["aerie.dev/revision"]
        if len(revisions := set(self._requested.values())) > 2:
            self._add_violation(version, f"three revisions request pods: {sorted(revisions)}")

    def _resource(self, version: ObjectVersion) -> None:
        before, after = self._item, version.item
        self._item = after
        status = after.get("status") or {}
        self._minima[after["metadata"]["generation"]] = min_serving_pods(after["spec"])
        observed_generation = status.get("observedGeneration", 0)
        self._minima = {number: minimum for number, minimum in self._minima.items() if number >= observed_generation}
        if before is None or before.get("status") == after.get("status"):
            return
        self._check_change(version, before.get("status") or {}, status)

    def _check_change(self, version: ObjectVersion, old: Object, new: Object) -> None:
        old_canary, new_canary = old.get("canary"), new.get("canary")
        old_stable, new_stable = revision(old.get("stable")), revision(new.get("stable"))
        others = set(self._requested.values()) - {revision(new.get(arm)) for arm in ("stable", "canary", "previous")}
        if new_canary is not None and others:
            self._add_violation(version, f"{new_canary['revision']} is the canary, and there are pods of {sorted(others)}")
        old_previous, new_previous = old.get("previous"), new.get("previous")
        if old_previous is not None:
            self.transitions_taken += self._check_monitoring(
                version, old_previous, new_previous, new, is_rolled_back=new_stable == old_previous["revision"]
            )
        if (
            old_stable is not None
            and new_stable != old_stable
            and (old_previous is None or new_stable != old_previous["revision"])
        ):
            self._check_promotion(version, old, new)
        if old_canary is None or old_stable is None:
            return
        if new_canary is not None and (old_canary["revision"], old_canary["startTime"]) != (
            new_canary["revision"],
            new_canary["startTime"],
        ):
            self._add_violation(
                version, f"canary {old_canary['revision']} was followed by {new_canary['revision']} without an end"
            )
            return
        before, after = old_canary["phase"], new_canary["phase"] if new_canary else None
        step = (new_canary or {}).get("stepIndex")
        if (before, old_canary.get("stepIndex")) == (after, step):
            return
        self.phase_changes += 1
        if after not in ALLOWED_PHASES[before]:
            self._add_violation(version, f"from {before} to {after}, which is no transition of the table")
        if before == after == "Ramping" and step != old_canary["stepIndex"] + 1:
            self._add_violation(version, f"from step {old_canary['stepIndex']} of the ramp to {step}")
        self.transitions_taken += find_transition(before, after, new)

    def _check_monitoring(
        self, version: ObjectVersion, previous: Object, new_previous: Object | None, new: Object, *, is_rolled_back: bool
    ) -> Iterator[tuple[str, Trigger]]:
        """Yield the transitions after a promotion, while pods of the previous revision are retained."""
        if is_rolled_back:
            if new["rolloutHistory"][0]["result"] not in ("RolledBack", "Superseded"):
                self._add_violation(
                    version,
                    f"{previous['revision']} is stable again, and the history's last is {new['rolloutHistory'][0]['result']}",
                )
            if new["rolloutHistory"][0]["result"] == "RolledBack":
                yield previous["phase"], _rollback_trigger(new["rolloutHistory"][0], {})
        elif new_previous is None and new["phase"] == "Ready":
            yield previous["phase"], Trigger.TIMER
        elif new_previous is not None and new_previous["phase"] != previous["phase"]:
            yield previous["phase"], Trigger.REGRESSED

    def _check_promotion(self, version: ObjectVersion, old: Object, new: Object) -> None:
        promoted, record = revision(new.get("stable")), new["rolloutHistory"][0]
        if (record["result"], record["revision"]) != ("Promoted", promoted):
            self._add_violation(
                version, f"{promoted} is stable, and the history's last is {record['result']} of {record['revision']}"
            )
        if revision(old.get("canary")) != promoted or old["canary"]["phase"] != "Promoting":
            self._add_violation(version, f"{promoted} is stable, and was no canary that is promoted: {old.get('canary')}")
        is_requested = (version.item["metadata"].get("annotations") or {}).get(PROMOTE_ANNOTATION) == promoted
        comparisons = {comparison["metric"]: comparison for comparison in record.get("comparisons") or []}
        margin = version.item["spec"]["rollout"]["analysis"]["margin"]
        lower = comparisons.get("TokensPerStep", comparisons.get("AcceptanceLength", {})).get("lower")
        is_proven = (new.get("analysis") or {}).get("verdict") == "Promote" and lower is not None and lower >= -margin
        if not is_requested and not is_proven:
            self._add_violation(version, f"{promoted} is promoted without a manual action and without evidence: {comparisons}")

    def _add_violation(self, version: ObjectVersion, sentence: str) -> None:
        name = (self._item or version.item)["metadata"]["name"]
        self.violations.append(f"{name}, version {version.version}: {sentence}")


def revision(arm: Object | None) -> str | None:
    """Return the revision of an arm of the status, or None."""
    return None if arm is None else str(arm["revision"])


def find_transition(before: str, after: str | None, status: Object) -> Iterator[tuple[str, Trigger]]:
    """Yield the transition between two statuses; none if another spec caused it."""
    analysis = status.get("analysis") or {}
    match before, after:
        case "RollingBack", _:
            return
        case _, "RollingBack":
            record = status["rolloutHistory"][0]
            if record["result"] != "Superseded":
                yield before, _rollback_trigger(record, analysis)
        case (("WarmingUp" | "Analyzing" | "AwaitingApproval" | "Held"), ("Ramping" | "Promoting")):
            accepted = before == "Analyzing" and analysis.get("verdict") == "Promote"
            yield before, Trigger.BETTER if accepted else Trigger.PROMOTE_REQUESTED
        case "Analyzing", "AwaitingApproval":
            yield before, Trigger.NEEDS_APPROVAL
        case "Analyzing", "Held":
            yield before, Trigger.INCONCLUSIVE_HOLD
        case "Held", "Analyzing":
            yield before, Trigger.EXTENDED
        case "Ramping", "Promoting":
            yield before, Trigger.LAST_RAMP_STEP
        case (("Starting" | "Promoting"), _):
            yield before, Trigger.READY
        case _:
            yield before, Trigger.TIMER


def _rollback_trigger(record: Object, analysis: Object) -> Trigger:
    """Return the trigger that ended a canary."""
    message = record["message"]
    if message.endswith(MANUAL_ROLLBACK_MESSAGE):
        return Trigger.ROLLBACK_REQUESTED
    if record["result"] == "Failed" or message.startswith("Required pods have not been ready"):
        return Trigger.DEADLINE_EXCEEDED
    if any(failure in message for failure in ("are in a crash loop", "are invalid", "None of its pods has been ready")):
        return Trigger.ABORTED
    return Trigger.INCONCLUSIVE_ROLLBACK if analysis.get("verdict") == "Inconclusive" else Trigger.WORSE


@contextlib.asynccontextmanager
async def record_events(client: KubeClient, namespace: str) -> AsyncIterator[EventRecorder]:
    """Run a recorder."""
    recorder = EventRecorder(client, namespace)
    running = asyncio.create_task(recorder.run())
    try:
        yield recorder
        if running.done():
            running.result()  # raises its error: then its records are incomplete
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
