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

from aerie.analysis.measurement.counts import CounterSnapshot, EngineCounts

ArmName = Literal["canary", "control"]
ExclusionReason = Literal["Restarted", "Joined", "Gone", "Stale"]

MAX_STALLED_BLOCK_LENGTHS = 2.0
"""Times as long as a block after which an arm that holds requests and finishes too few keeps it open no longer."""
MIN_STALLED_LOAD_RATIO, MAX_STALLED_FINISHED_RATIO = 0.25, 0.2
"""Parts of the other arm's requests in flight that it holds at least, and of those finished that it finishes at most."""
MAX_SCRAPE_AGE_INTERVALS = 1.5
"""Scrape intervals by which a scrape may lie off a block's edge: one may fail."""


@dataclass(frozen=True, slots=True)
class BlockRule:
    """When a block ends; fixed when an analysis begins."""

    block_seconds: float = 120.0
    scrape_interval_seconds: float = 15.0
    """Seconds between scrapes."""
    min_drafts: float = 2000.0
    """Drafts that each arm needs."""
    min_finished_requests: float = 20.0
    """Finished requests that each arm needs."""
    pods_per_minimum: int = 0
    """For how many pods these are; 0: for an arm, however many it has."""

    def has_enough(self, arm_counts: ArmCounts) -> bool:
        """Whether the side has drafts and finished requests enough."""
        times = arm_counts.pod_count / self.pods_per_minimum if self.pods_per_minimum else 1.0
        return (
            arm_counts.counts.drafts >= times * self.min_drafts
            and arm_counts.counts.finished >= times * self.min_finished_requests
        )

    @property
    def max_scrape_age_seconds(self) -> float:
        return MAX_SCRAPE_AGE_INTERVALS * self.scrape_interval_seconds


@dataclass(frozen=True, slots=True)
class PodWindow:
    """A pod in the open block."""

    arm: ArmName
    first: tuple[float, CounterSnapshot] | None = None
    """The scrape that its window begins with."""
    last: tuple[float, CounterSnapshot] | None = None
    exclusion_reason: ExclusionReason | None = None
    """Why it cannot be part of this block any more."""
    load_sum: float = 0.0
    """Sum of its load over `scrapes`."""
    scrape_count: int = 0


@dataclass(frozen=True, slots=True)
class ArmCounts:
    """One arm in a closed block."""

    pod_count: int
    counts: EngineCounts
    mean_load: float | None
    """Mean requests running and waiting on a pod; None where no page says."""
    counts_by_pod: Mapping[str, EngineCounts] = field(default_factory=dict)
    """The counts of each of them."""
    queue_growth: float = 0.0
    """By how many the requests without a first token grew."""

    def is_stalled_against(self, other: ArmCounts) -> bool:
        """Whether it holds requests, finishes next to none of them, and the other does, pod by pod: of equal arms no chance makes
        the one finish a fifth of the other's where that is 20."""
        if (
            self.mean_load is None
            or other.mean_load is None
            or self.mean_load <= 0
            or self.mean_load < MIN_STALLED_LOAD_RATIO * other.mean_load
        ):
            return False
        return self.counts.finished / self.pod_count < MAX_STALLED_FINISHED_RATIO * other.counts.finished / other.pod_count

    @property
    def arrived_requests(self) -> float:
        """Requests that came."""
        return self.counts.first_tokens + self.queue_growth


@dataclass(frozen=True, slots=True)
class ClosedBlock:
    """A closed block. An arm is None when none of its pods had a whole window; the block then counts for nothing."""

    start_time: float
    end_time: float
    canary: ArmCounts | None
    control: ArmCounts | None
    excluded_pods: Mapping[str, int] = field(default_factory=dict)
    """Pods left out, by reason."""


@dataclass(frozen=True, slots=True)
class OpenBlock:
    """The block that is being filled."""

    start_time: float
    windows: Mapping[str, PodWindow] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"began": self.start_time, "pods": {name: _window_to_dict(pod) for name, pod in self.windows.items()}}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> OpenBlock:
        return cls(document["began"], {name: _window_from_dict(pod) for name, pod in document["pods"].items()})


@dataclass(frozen=True, slots=True)
class PodSample:
    """What one round of scraping brought of a pod."""

    arm: ArmName
    counters: CounterSnapshot | None
    """None when the scrape failed."""


def add_scrapes(
    block: OpenBlock, now: float, samples: Mapping[str, PodSample], rule: BlockRule
) -> tuple[OpenBlock, ClosedBlock | None]:
    """The open block after one round of scraping at `now`, and the block that it closed, if any.

    `seen` has every pod that belongs to an arm now, whether or not its scrape came.
    """
    pods = {
        name: _add_scrape(block.windows.get(name, PodWindow(one.arm)), one.counters, now, block.start_time, rule)
        for name, one in samples.items()
    }
    gone = {name: replace(pod, exclusion_reason="Gone") for name, pod in block.windows.items() if name not in samples}
    filled = OpenBlock(block.start_time, gone | pods)
    if now - block.start_time < rule.block_seconds:
        return filled, None
    sides = {arm: _arm_counts(filled, arm, now, rule) for arm in ("canary", "control")}
    for arm, side in sides.items():
        if side is None and _may_become_whole(filled, arm, now, rule):
            return filled, None
        if side is not None and not rule.has_enough(side):
            other = sides["control" if arm == "canary" else "canary"]
            if now - block.start_time < MAX_STALLED_BLOCK_LENGTHS * rule.block_seconds or not _is_arm_stalled(side, other, rule):
                return filled, None
    dropped: Counter[str] = Counter(reason for pod in filled.windows.values() if (reason := _exclusion_reason(pod, now, rule)))
    closed = ClosedBlock(block.start_time, now, sides["canary"], sides["control"], dict(dropped))
    return OpenBlock(now, {name: _next_window(pod, now, rule) for name, pod in pods.items()}), closed


def _is_arm_stalled(side: ArmCounts, other: ArmCounts | None, rule: BlockRule) -> bool:
    """Whether the side gets hardly anything done of what it holds, while the other gets enough done."""
    return other is not None and rule.has_enough(other) and side.is_stalled_against(other)


def start_block(now: float, samples: Mapping[str, PodSample], rule: BlockRule) -> OpenBlock:
    """The first open block, from a first round of scraping."""
    return add_scrapes(OpenBlock(now), now, samples, rule)[0]


def _add_scrape(pod: PodWindow, reading: CounterSnapshot | None, now: float, began: float, rule: BlockRule) -> PodWindow:
    """The pod after one scrape."""
    if reading is None:
        return pod
    load, scrapes = (
        (pod.load_sum, pod.scrape_count) if reading.load is None else (pod.load_sum + reading.load, pod.scrape_count + 1)
    )
    pod = replace(pod, load_sum=load, scrape_count=scrapes)
    if pod.first is None or pod.last is None:
        missing = pod.exclusion_reason or ("Joined" if now > began + rule.max_scrape_age_seconds else None)
        return replace(pod, first=(now, reading), last=(now, reading), exclusion_reason=missing)
    if has_restarted(pod.last[1], reading):
        return replace(pod, last=(now, reading), exclusion_reason="Restarted")
    return replace(pod, last=(now, reading))


def has_restarted(before: CounterSnapshot, after: CounterSnapshot) -> bool:
    """Whether two readings of a pod are not of one run of one engine."""
    if (
        before.process_start_time is not None
        and after.process_start_time is not None
        and before.process_start_time != after.process_start_time
    ):
        return True
    return before.engine_count != after.engine_count or (after.counts - before.counts).decreased_counter is not None


def _exclusion_reason(pod: PodWindow, now: float, rule: BlockRule) -> ExclusionReason | None:
    """Why the pod has no whole window that ends at `now`."""
    if pod.exclusion_reason:
        return pod.exclusion_reason
    return "Stale" if pod.last is None or now - pod.last[0] > rule.max_scrape_age_seconds else None


def _arm_counts(block: OpenBlock, arm: str, now: float, rule: BlockRule) -> ArmCounts | None:
    whole = {name: pod for name, pod in block.windows.items() if pod.arm == arm and _exclusion_reason(pod, now, rule) is None}
    if not whole:
        return None
    by_pod = {name: pod.last[1].counts - pod.first[1].counts for name, pod in whole.items() if pod.first and pod.last}
    loads = [pod.load_sum / pod.scrape_count for pod in whole.values() if pod.scrape_count]
    load = sum(loads) / len(loads) if loads else None
    return ArmCounts(len(whole), sum(by_pod.values(), EngineCounts()), load, by_pod, sum(map(_queue_growth, whole.values())))


def _queue_growth(pod: PodWindow) -> float:
    """By how many more requests wait than when its window began; 0 where a page does not say."""
    waiting = [scrape[1].waiting_requests if scrape else None for scrape in (pod.first, pod.last)]
    return 0.0 if waiting[0] is None or waiting[1] is None else waiting[1] - waiting[0]


def _may_become_whole(block: OpenBlock, arm: str, now: float, rule: BlockRule) -> bool:
    """Whether the next scrapes may yet make a pod's window whole: it is only stale, and not for long."""
    stale = any(pod.arm == arm and pod.exclusion_reason is None and pod.first is not None for pod in block.windows.values())
    return stale and now - block.start_time < 2 * rule.block_seconds


def _next_window(pod: PodWindow, now: float, rule: BlockRule) -> PodWindow:
    """The pod in the block that begins at `now`."""
    fresh = pod.last is not None and now - pod.last[0] <= rule.max_scrape_age_seconds
    return PodWindow(pod.arm, pod.last, pod.last) if fresh else PodWindow(pod.arm)


def _window_to_dict(pod: PodWindow) -> dict[str, Any]:
    found: dict[str, Any] = {"arm": pod.arm, "load": pod.load_sum, "scrapes": pod.scrape_count}
    if pod.exclusion_reason:
        found["missing"] = pod.exclusion_reason
    for name in ("first", "last"):
        if scrape := getattr(pod, name):
            found[name] = {"time": scrape[0], **scrape[1].to_dict()}
    return found


def _window_from_dict(found: Mapping[str, Any]) -> PodWindow:
    scrapes = {name: (found[name]["time"], CounterSnapshot.from_dict(found[name])) for name in ("first", "last") if name in found}
    return PodWindow(
        found["arm"], exclusion_reason=found.get("missing"), load_sum=found["load"], scrape_count=found["scrapes"], **scrapes
    )
