"""Watches everything that happens to the resources of a namespace, and says afterwards what should never have happened.

    watches of resources, Deployments and pods ─► events, in the order of their resourceVersions ─► replay ─► offences, rows

Looked for, over the whole time and for each resource:

* capacity: no pod that serves is given up while that leaves fewer of them than the spec allows (`floor`)
* promotion: a revision becomes stable only from the canary's last phase, and with figures that speak for it or a person's word
* one transition at a time: from one status to the next, at most one row of the machine's table; never do three
  revisions ask for pods; when a canary is in the status, what was before it asks for none any more

Guarantee: no version of an object is missed: a watch that cannot go on where it stood is an error of the test's. Pods that the
world takes away (a lost node) are nobody's offence; pods that are deleted are. The rows are read off two statuses that follow one
another, so they say what the operator wrote, whatever it was that it thought.
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
ENDS = {"RolledBack": "RollingBack", "Failed": "RollingBack", "Promoted": None, "Completed": None}
"""Where each end of the table shows in the phase of the canary."""


@dataclass(frozen=True)
class Seen:
    """One version of one object."""

    version: int
    kind: str
    gone: bool
    item: Object


class Witness:
    """See the module. `now` has the latest version of each resource by name."""

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self._client, self._namespace = client, namespace
        self.seen: list[Seen] = []
        self.now: dict[str, Object] = {}
        self.pods: dict[str, Object] = {}
        self.deployments: dict[str, Object] = {}
        self.listeners: list[Callable[[Object], None]] = []
        """Called with each version of a resource."""
        self._news = asyncio.Event()
        self._broken = ""

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for where in WATCHED:
                    tasks.create_task(self._follow(where.replace("NAMESPACE", self._namespace)))
        except* Exception as group:
            self._broken = repr(group.exceptions)
            self._tell()
            raise

    async def _follow(self, where: str) -> None:
        listed: Object | None = None
        while listed is None:
            try:
                listed = await self._client.get(where)
            except KubeError:
                await asyncio.sleep(0.5)
        version = listed["metadata"]["resourceVersion"]
        kind = listed["kind"].removesuffix("List")
        for item in listed["items"]:
            self._take("ADDED", {"kind": kind, **item})
        while True:
            try:
                async for what, item in self._client.watch(where, version):
                    version = item["metadata"]["resourceVersion"]
                    if what != "BOOKMARK":
                        self._take(what, item)
            except KubeError as error:
                if error.status == 410:  # something may have been missed
                    raise
                await asyncio.sleep(0.2)

    def _take(self, what: str, item: Object) -> None:
        name, gone = item["metadata"]["name"], what == "DELETED"
        item["metadata"].pop("managedFields", None)
        self.seen.append(Seen(int(item["metadata"]["resourceVersion"]), item["kind"], gone, item))
        kept = {"SpeculativeDeployment": self.now, "Pod": self.pods, "Deployment": self.deployments}[item["kind"]]
        if gone:
            kept.pop(name, None)
        else:
            kept[name] = item
        if item["kind"] == "SpeculativeDeployment" and not gone:
            for listener in self.listeners:
                listener(item)
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def until(self, look: Callable[[], Any], what: Callable[[], str], within: float) -> Any:
        """Waits until `look` returns something true, and returns that; looked at after each event."""
        try:
            async with asyncio.timeout(within):
                while not (found := look()):
                    assert not self._broken, self._broken
                    await self._news.wait()
                return found
        except TimeoutError:
            raise AssertionError(f"not within {within:g} s: {what()}") from None

    # -- afterwards
    def offences(self) -> list[str]:
        """What should never have happened, as sentences."""
        return [sentence for replay in self._replays().values() for sentence in replay.offences]

    def rows(self) -> dict[tuple[str, Trigger], set[str]]:
        """The rows of the table that were passed, with the resources that passed them."""
        found: dict[tuple[str, Trigger], set[str]] = defaultdict(set)
        for name, replay in self._replays().items():
            for row in replay.rows:
                found[row].add(name)
        return found

    def transitions(self) -> int:
        """How many changes of phase were seen."""
        return sum(replay.transitions for replay in self._replays().values())

    def _replays(self) -> dict[str, Replay]:
        replays: dict[str, Replay] = defaultdict(Replay)
        for one in sorted(self.seen, key=lambda one: one.version):
            labels = one.item["metadata"].get("labels") or {}
            name = one.item["metadata"]["name"] if one.kind == "SpeculativeDeployment" else labels.get("aerie.dev/name")
            if name:
                replays[name].take(one)
        return replays


def floor(spec: Object) -> int:
    """Serving pods that the spec wants to be left at all times."""
    replicas, canary = spec["replicas"], spec["rollout"]["canary"]
    size = min(canary["replicas"], max(1, replicas))
    lent = size * (2 if canary["control"] == "Fresh" else 1)
    return int(replicas if canary["capacity"] == "Surge" else max(0, replicas - lent))


def ready(pod: Object) -> bool:
    """Whether it serves."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    serves = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return serves and not pod["metadata"].get("deletionTimestamp")


def _edges() -> dict[str, set[str | None]]:
    """Phases of the canary that may follow one another, by the table. An empty ramp is passed over."""
    found: dict[str, set[str | None]] = defaultdict(set)
    for (phase, _), target in TRANSITIONS.items():
        found[phase].add(ENDS.get(target, target))
        if target == "Ramping":
            found[phase].add("Promoting")
        found[phase].add("RollingBack")  # another spec
    found["RollingBack"].add(None)
    return found


EDGES = _edges()


@dataclass
class Replay:
    """One resource, event by event."""

    offences: list[str] = field(default_factory=list)
    rows: list[tuple[str, Trigger]] = field(default_factory=list)
    transitions: int = 0
    _item: Object | None = None
    _floors: dict[int, int] = field(default_factory=dict)
    """By generation, since the one that the status is of."""
    _serving: set[str] = field(default_factory=set)
    _asked: dict[str, str] = field(default_factory=dict)
    """Revisions of the Deployments that ask for pods, by name."""

    def take(self, one: Seen) -> None:
        match one.kind:
            case "SpeculativeDeployment":
                if one.gone:
                    self._item = None
                else:
                    self._resource(one)
            case "Pod":
                self._pod(one)
            case "Deployment":
                self._deployment(one)

    def _pod(self, one: Seen) -> None:
        name = one.item["metadata"]["name"]
        serves = ready(one.item) and not one.gone
        given_up = name in self._serving and (one.gone or "deletionTimestamp" in one.item["metadata"])
        (self._serving.add if serves else self._serving.discard)(name)
        if not given_up or self._item is None or not (self._item.get("status") or {}).get("stable"):
            return
        least = min(self._floors.values(), default=0)
        if len(self._serving) < least:
            self._offend(one, f"pod {name} was given up, and {len(self._serving)} pods serve where {least} should")

    def _deployment(self, one: Seen) -> None:
        self._asked.pop(one.item["metadata"]["name"], None)
        if not one.gone and one.item["spec"]["replicas"]:
            self._asked[one.item["metadata"]["name"]] = one.item["metadata"]["labels"]["aerie.dev/revision"]
        if len(asking := set(self._asked.values())) > 2:
            self._offend(one, f"three revisions ask for pods: {sorted(asking)}")

    def _resource(self, one: Seen) -> None:
        before, after = self._item, one.item
        self._item = after
        status = after.get("status") or {}
        self._floors[after["metadata"]["generation"]] = floor(after["spec"])
        read = status.get("observedGeneration", 0)
        self._floors = {number: least for number, least in self._floors.items() if number >= read}
        if before is None or before.get("status") == after.get("status"):
            return
        self._change(one, before.get("status") or {}, status)

    def _change(self, one: Seen, old: Object, new: Object) -> None:
        was, now = old.get("canary"), new.get("canary")
        served, serves = revision(old.get("stable")), revision(new.get("stable"))
        others = set(self._asked.values()) - {revision(new.get(arm)) for arm in ("stable", "canary", "previous")}
        if now is not None and others:
            self._offend(one, f"{now['revision']} is the canary, and there are pods of {sorted(others)}")
        kept, keeps = old.get("previous"), new.get("previous")
        if kept is not None:
            self.rows += self._kept(one, kept, keeps, new, back=serves == kept["revision"])
        if served is not None and serves != served and (kept is None or serves != kept["revision"]):
            self._promoted(one, old, new)
        if was is None or served is None:
            return
        if now is not None and (was["revision"], was["startTime"]) != (now["revision"], now["startTime"]):
            self._offend(one, f"canary {was['revision']} was followed by {now['revision']} without an end")
            return
        before, after = was["phase"], now["phase"] if now else None
        step = (now or {}).get("stepIndex")
        if (before, was.get("stepIndex")) == (after, step):
            return
        self.transitions += 1
        if after not in EDGES[before]:
            self._offend(one, f"from {before} to {after}, which is no row of the table")
        if before == after == "Ramping" and step != was["stepIndex"] + 1:
            self._offend(one, f"from step {was['stepIndex']} of the ramp to {step}")
        self.rows += row(before, after, new)

    def _kept(self, one: Seen, kept: Object, keeps: Object | None, new: Object, *, back: bool) -> Iterator[tuple[str, Trigger]]:
        """While pods of the revision before are kept: the rows after a promotion."""
        if back:
            if new["rolloutHistory"][0]["result"] not in ("RolledBack", "Superseded"):
                self._offend(
                    one, f"{kept['revision']} is stable again, and the history's last is {new['rolloutHistory'][0]['result']}"
                )
            if new["rolloutHistory"][0]["result"] == "RolledBack":
                yield kept["phase"], _against(new["rolloutHistory"][0], {})
        elif keeps is None and new["phase"] == "Ready":
            yield kept["phase"], Trigger.TIMER
        elif keeps is not None and keeps["phase"] != kept["phase"]:
            yield kept["phase"], Trigger.REGRESSED

    def _promoted(self, one: Seen, old: Object, new: Object) -> None:
        made, last = revision(new.get("stable")), new["rolloutHistory"][0]
        if (last["result"], last["revision"]) != ("Promoted", made):
            self._offend(one, f"{made} is stable, and the history's last is {last['result']} of {last['revision']}")
        if revision(old.get("canary")) != made or old["canary"]["phase"] != "Promoting":
            self._offend(one, f"{made} is stable, and was no canary that is promoted: {old.get('canary')}")
        word = (one.item["metadata"].get("annotations") or {}).get(PROMOTE_ANNOTATION) == made
        known = {each["metric"]: each for each in last.get("comparisons") or []}
        margin = one.item["spec"]["rollout"]["analysis"]["margin"]
        lower = known.get("TokensPerStep", known.get("AcceptanceLength", {})).get("lower")
        shown = (new.get("analysis") or {}).get("verdict") == "Promote" and lower is not None and lower >= -margin
        if not word and not shown:
            self._offend(one, f"{made} is promoted without a word and without evidence: {known}")

    def _offend(self, one: Seen, sentence: str) -> None:
        name = (self._item or one.item)["metadata"]["name"]
        self.offences.append(f"{name}, version {one.version}: {sentence}")


def revision(arm: Object | None) -> str | None:
    """Of an arm of the status, if it is there."""
    return None if arm is None else str(arm["revision"])


def row(before: str, after: str | None, status: Object) -> Iterator[tuple[str, Trigger]]:
    """The row of the table by which a status followed another; none for what other specs cause."""
    analysis = status.get("analysis") or {}
    match before, after:
        case "RollingBack", _:
            return
        case _, "RollingBack":
            last = status["rolloutHistory"][0]
            if last["result"] != "Superseded":
                yield before, _against(last, analysis)
        case (("WarmingUp" | "Analyzing" | "AwaitingApproval" | "Held"), ("Ramping" | "Promoting")):
            accepted = before == "Analyzing" and analysis.get("verdict") == "Promote"
            yield before, Trigger.BETTER if accepted else Trigger.PROMOTE_REQUESTED
        case "Analyzing", "AwaitingApproval":
            yield before, Trigger.NEEDS_APPROVAL
        case "Analyzing", "Held":
            yield before, Trigger.INCONCLUSIVE_HOLD
        case "Ramping", "Promoting":
            yield before, Trigger.LAST_RAMP_STEP
        case (("Starting" | "Promoting"), _):
            yield before, Trigger.READY
        case _:
            yield before, Trigger.TIMER


def _against(last: Object, analysis: Object) -> Trigger:
    """What ended a canary."""
    message = last["message"]
    if message.endswith(MANUAL_ROLLBACK_MESSAGE):
        return Trigger.ROLLBACK_REQUESTED
    if last["result"] == "Failed" or message.startswith("Required pods have not been ready"):
        return Trigger.DEADLINE_EXCEEDED
    if any(failure in message for failure in ("are in a crash loop", "are invalid", "None of its pods has been ready")):
        return Trigger.ABORTED
    return Trigger.INCONCLUSIVE_ROLLBACK if analysis.get("verdict") == "Inconclusive" else Trigger.WORSE


@contextlib.asynccontextmanager
async def witness(client: KubeClient, namespace: str) -> AsyncIterator[Witness]:
    """A witness at work."""
    found = Witness(client, namespace)
    running = asyncio.create_task(found.run())
    try:
        yield found
        if running.done():
            running.result()  # raises what ended it: then nothing that it saw is worth anything
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
