"""Closes paired blocks: stretches of time in which both arms were counted, pod by pod, from scrapes of ever-growing counters.

    scrapes  pod a  --o----o----o----o----o----o--      a block ends at the first scrape at which its time is over and
             pod b  ---o----o---------o----o----o-      both arms have drafts and finished requests enough
    blocks          |--------------|------------|

The rule for closing looks at counts and never at acceptance, so it cannot favour an arm. An arm that holds requests and in
twice the time has finished next to none of them keeps no block open: it is why. A pod's window runs from the scrape that ended
the last block to the one that ends this, and neither may be older than a scrape interval and a half. A pod whose window is not
whole is left out of its block, counted by reason: `Restarted` (its process began anew, or a counter fell), `Joined` (it was
first seen in mid-block), `Gone`, `Stale` (its last scrapes failed). A block in which an arm has no pod left is dropped.

Guarantees: nothing is counted twice; nothing between two blocks of a pod is lost unless it is counted as dropped. The state goes
through `to_dict` and `from_dict` unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from aerie.rollout.analysis.readings import Counts, Reading

Arm = Literal["canary", "control"]
Missing = Literal["Restarted", "Joined", "Gone", "Stale"]

STALLS = 2.0
"""Times as long as a block after which an arm that holds requests and finishes too few keeps it open no longer."""
HOLDS, NEXT_TO_NONE = 0.25, 0.2
"""Parts of the other arm's requests in flight that it holds at least, and of those finished that it finishes at most."""
LATE = 1.5
"""Scrape intervals by which a scrape may lie off a block's edge: one may fail."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When a block ends; fixed when an analysis begins."""

    seconds: float = 120.0
    interval: float = 15.0
    """Seconds between scrapes."""
    drafts: float = 2000.0
    """Drafts that each arm needs."""
    finished: float = 20.0
    """Finished requests that each arm needs."""
    per: int = 0
    """For how many pods these are; 0: for an arm, however many it has."""

    def enough(self, side: Side) -> bool:
        """Whether the side has drafts and finished requests enough."""
        times = side.pods / self.per if self.per else 1.0
        return side.counts.drafts >= times * self.drafts and side.counts.finished >= times * self.finished

    @property
    def late(self) -> float:
        return LATE * self.interval


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod in the open block."""

    arm: Arm
    first: tuple[float, Reading] | None = None
    """The scrape that its window begins with."""
    last: tuple[float, Reading] | None = None
    missing: Missing | None = None
    """Why it cannot be part of this block any more."""
    load: float = 0.0
    """Sum of its load over `scrapes`."""
    scrapes: int = 0


@dataclass(frozen=True, slots=True)
class Side:
    """One arm in a closed block."""

    pods: int
    counts: Counts
    load: float | None
    """Mean requests running and waiting on a pod; None where no page says."""
    by_pod: Mapping[str, Counts] = field(default_factory=dict)
    """The counts of each of them."""
    queued: float = 0.0
    """By how many the requests without a first token grew."""

    def stalls(self, other: Side) -> bool:
        """Whether it holds requests, finishes next to none of them, and the other does, pod by pod: of equal arms no chance makes
        the one finish a fifth of the other's where that is 20."""
        if self.load is None or other.load is None or self.load <= 0 or self.load < HOLDS * other.load:
            return False
        return self.counts.finished / self.pods < NEXT_TO_NONE * other.counts.finished / other.pods

    @property
    def begun(self) -> float:
        """Requests that came."""
        return self.counts.first_tokens + self.queued


@dataclass(frozen=True, slots=True)
class Block:
    """A closed block. An arm is None when none of its pods had a whole window; the block then counts for nothing."""

    began: float
    ended: float
    canary: Side | None
    control: Side | None
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Pods left out, by reason."""


@dataclass(frozen=True, slots=True)
class Open:
    """The block that is being filled."""

    began: float
    pods: Mapping[str, Pod] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"began": self.began, "pods": {name: _pod_to_dict(pod) for name, pod in self.pods.items()}}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Open:
        return cls(found["began"], {name: _pod_from_dict(pod) for name, pod in found["pods"].items()})


@dataclass(frozen=True, slots=True)
class Seen:
    """What one round of scraping brought of a pod."""

    arm: Arm
    reading: Reading | None
    """None when the scrape failed."""


def observe(block: Open, now: float, seen: Mapping[str, Seen], rule: Rule) -> tuple[Open, Block | None]:
    """The open block after one round of scraping at `now`, and the block that it closed, if any.

    `seen` has every pod that belongs to an arm now, whether or not its scrape came.
    """
    pods = {name: _with(block.pods.get(name, Pod(one.arm)), one.reading, now, block.began, rule) for name, one in seen.items()}
    gone = {name: replace(pod, missing="Gone") for name, pod in block.pods.items() if name not in seen}
    filled = Open(block.began, gone | pods)
    if now - block.began < rule.seconds:
        return filled, None
    sides = {arm: _side(filled, arm, now, rule) for arm in ("canary", "control")}
    for arm, side in sides.items():
        if side is None and _may_come(filled, arm, now, rule):
            return filled, None
        if side is not None and not rule.enough(side):
            other = sides["control" if arm == "canary" else "canary"]
            if now - block.began < STALLS * rule.seconds or not _stalls(side, other, rule):
                return filled, None
    dropped: Counter[str] = Counter(reason for pod in filled.pods.values() if (reason := _missing(pod, now, rule)))
    closed = Block(block.began, now, sides["canary"], sides["control"], dict(dropped))
    return Open(now, {name: _next(pod, now, rule) for name, pod in pods.items()}), closed


def _stalls(side: Side, other: Side | None, rule: Rule) -> bool:
    """Whether the side gets hardly anything done of what it holds, while the other gets enough done."""
    return other is not None and rule.enough(other) and side.stalls(other)


def start(now: float, seen: Mapping[str, Seen], rule: Rule) -> Open:
    """The first open block, from a first round of scraping."""
    return observe(Open(now), now, seen, rule)[0]


def _with(pod: Pod, reading: Reading | None, now: float, began: float, rule: Rule) -> Pod:
    """The pod after one scrape."""
    if reading is None:
        return pod
    load, scrapes = (pod.load, pod.scrapes) if reading.load is None else (pod.load + reading.load, pod.scrapes + 1)
    pod = replace(pod, load=load, scrapes=scrapes)
    if pod.first is None or pod.last is None:
        missing = pod.missing or ("Joined" if now > began + rule.late else None)
        return replace(pod, first=(now, reading), last=(now, reading), missing=missing)
    if restarted(pod.last[1], reading):
        return replace(pod, last=(now, reading), missing="Restarted")
    return replace(pod, last=(now, reading))


def restarted(before: Reading, after: Reading) -> bool:
    """Whether two readings of a pod are not of one run of one engine."""
    if before.started is not None and after.started is not None and before.started != after.started:
        return True
    return before.engines != after.engines or (after.counts - before.counts).fell is not None


def _missing(pod: Pod, now: float, rule: Rule) -> Missing | None:
    """Why the pod has no whole window that ends at `now`."""
    if pod.missing:
        return pod.missing
    return "Stale" if pod.last is None or now - pod.last[0] > rule.late else None


def _side(block: Open, arm: str, now: float, rule: Rule) -> Side | None:
    whole = {name: pod for name, pod in block.pods.items() if pod.arm == arm and _missing(pod, now, rule) is None}
    if not whole:
        return None
    by_pod = {name: pod.last[1].counts - pod.first[1].counts for name, pod in whole.items() if pod.first and pod.last}
    loads = [pod.load / pod.scrapes for pod in whole.values() if pod.scrapes]
    load = sum(loads) / len(loads) if loads else None
    return Side(len(whole), sum(by_pod.values(), Counts()), load, by_pod, sum(map(_queued, whole.values())))


def _queued(pod: Pod) -> float:
    """By how many more requests wait than when its window began; 0 where a page does not say."""
    waiting = [scrape[1].waiting if scrape else None for scrape in (pod.first, pod.last)]
    return 0.0 if waiting[0] is None or waiting[1] is None else waiting[1] - waiting[0]


def _may_come(block: Open, arm: str, now: float, rule: Rule) -> bool:
    """Whether the next scrapes may yet make a pod's window whole: it is only stale, and not for long."""
    stale = any(pod.arm == arm and pod.missing is None and pod.first is not None for pod in block.pods.values())
    return stale and now - block.began < 2 * rule.seconds


def _next(pod: Pod, now: float, rule: Rule) -> Pod:
    """The pod in the block that begins at `now`."""
    fresh = pod.last is not None and now - pod.last[0] <= rule.late
    return Pod(pod.arm, pod.last, pod.last) if fresh else Pod(pod.arm)


def _pod_to_dict(pod: Pod) -> dict[str, Any]:
    found: dict[str, Any] = {"arm": pod.arm, "load": pod.load, "scrapes": pod.scrapes}
    if pod.missing:
        found["missing"] = pod.missing
    for name in ("first", "last"):
        if scrape := getattr(pod, name):
            found[name] = {"time": scrape[0], **scrape[1].to_dict()}
    return found


def _pod_from_dict(found: Mapping[str, Any]) -> Pod:
    scrapes = {name: (found[name]["time"], Reading.from_dict(found[name])) for name in ("first", "last") if name in found}
    return Pod(found["arm"], missing=found.get("missing"), load=found["load"], scrapes=found["scrapes"], **scrapes)
