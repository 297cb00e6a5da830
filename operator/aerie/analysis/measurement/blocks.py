"""Closes paired blocks: time windows in which both arms are counted, pod by pod, from scrapes of ever-growing counters.

    scrapes  pod a  --o----o----o----o----o----o--      a block ends at the first scrape at which its time is over and
             pod b  ---o----o---------o----o----o-      both arms have enough drafts and finished requests
    blocks          |--------------|------------|

The rule that closes a block reads counts and never acceptance, so it cannot favour an arm. A stalled arm does not keep a block
open: one that, in twice the time, holds requests and has finished next to none of them.

A pod's window runs from the scrape that ended the last block to the scrape that ends this one. Neither may be older than a scrape
interval and a half. A pod whose window is not whole is excluded from its block, and counted by reason:

    Restarted   its process restarted, or a counter decreased
    Joined      its first scrape was in mid-block
    Gone        it left its arm
    Stale       its last scrapes failed

A block in which canary or control has no pod left is dropped.

Where the control has pods of its own, the other stable pods are counted too (arm "stable"). They are compared with one another
alone (`statistics.peer_dispersion`). So they neither keep a block open nor drop it, and their excluded windows are not counted.

Guarantees: nothing is counted twice; nothing between two blocks of a pod is lost unless it is counted as excluded. The open block
is not saved: a restart of the operator begins a new one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from aerie.analysis.measurement.counts import CounterSnapshot, EngineCounts

ArmName = Literal["canary", "control", "stable"]
"""Arm of a pod. "stable": the stable pods beside a control that has pods of its own."""
ExclusionReason = Literal["Restarted", "Joined", "Gone", "Stale"]

MAX_STALLED_BLOCK_LENGTHS = 2.0
"""Block lengths after which a stalled arm, one that holds requests and finishes too few, no longer keeps a block open."""
MIN_STALLED_LOAD_RATIO, MAX_STALLED_FINISHED_RATIO = 0.25, 0.2
"""Limits of a stalled arm, relative to the other arm: least requests in flight that it holds, most requests that it finishes."""
MAX_SCRAPE_AGE_INTERVALS = 1.5
"""Scrape intervals by which a scrape may lie off a block's start or end: one scrape may fail."""


@dataclass(frozen=True, slots=True)
class BlockRule:
    """The rule that closes a block; fixed when an analysis begins."""

    block_seconds: float = 120.0
    scrape_interval_seconds: float = 15.0
    """Seconds between scrapes."""
    min_drafts: float = 2000.0
    """Drafts that each arm needs."""
    min_finished_requests: float = 20.0
    """Finished requests that each arm needs."""
    pods_per_minimum: int = 0
    """Pods that the two minima are for; 0: they are for an arm, however many pods it has."""

    def has_enough(self, arm_counts: ArmCounts) -> bool:
        """Return whether the arm has enough drafts and finished requests."""
        factor = arm_counts.pod_count / self.pods_per_minimum if self.pods_per_minimum else 1.0
        return (
            arm_counts.counts.drafts >= factor * self.min_drafts
            and arm_counts.counts.finished_requests >= factor * self.min_finished_requests
        )

    @property
    def max_scrape_age_seconds(self) -> float:
        """Age of a scrape, in seconds, up to which it may start or end a window."""
        return MAX_SCRAPE_AGE_INTERVALS * self.scrape_interval_seconds


@dataclass(frozen=True, slots=True)
class PodWindow:
    """The window of one pod in the open block."""

    arm: ArmName
    first_scrape: tuple[float, CounterSnapshot] | None = None
    """Time and counters of the scrape that the window begins with."""
    last_scrape: tuple[float, CounterSnapshot] | None = None
    """Time and counters of the latest scrape."""
    exclusion_reason: ExclusionReason | None = None
    """Reason for which the pod can no longer be part of this block."""
    load_sum: float = 0.0
    """Sum of the pod's load over `scrape_count` scrapes."""
    scrape_count: int = 0
    """Scrapes of the window that reported a load."""


@dataclass(frozen=True, slots=True)
class ArmCounts:
    """The counts of one arm in a closed block."""

    pod_count: int
    """Pods with a whole window."""
    counts: EngineCounts
    """Sums over these pods."""
    mean_load: float | None
    """Mean number of requests running and waiting on a pod; None where no exposition has it."""
    counts_by_pod: Mapping[str, EngineCounts] = field(default_factory=dict)
    """Counts of each of these pods, by name."""
    queue_growth: float = 0.0
    """Growth of the number of requests without a first token."""

    def is_stalled_against(self, other: ArmCounts) -> bool:
        """Return whether this arm holds requests and finishes next to none of them, while the other finishes its own.

        Both are compared per pod. Where the other arm finishes 20 requests, chance does not make an equal arm finish a fifth.
        """
        if (
            self.mean_load is None
            or other.mean_load is None
            or self.mean_load <= 0
            or self.mean_load < MIN_STALLED_LOAD_RATIO * other.mean_load
        ):
            return False
        return (
            self.counts.finished_requests / self.pod_count
            < MAX_STALLED_FINISHED_RATIO * other.counts.finished_requests / other.pod_count
        )

    @property
    def arrived_requests(self) -> float:
        """Requests that arrived."""
        return self.counts.first_tokens + self.queue_growth


@dataclass(frozen=True, slots=True)
class ClosedBlock:
    """A closed block. An arm is None when none of its pods had a whole window; the block is then dropped."""

    start_time: float
    end_time: float
    canary: ArmCounts | None
    control: ArmCounts | None
    excluded_pods: Mapping[str, int] = field(default_factory=dict)
    """Number of excluded pods, by reason."""
    stable: ArmCounts | None = None
    """Counts of the stable pods beside a control that has pods of its own; None where there are none."""

    @property
    def peers(self) -> ArmCounts | None:
        """Equal pods that can be compared with one another: of the control's and the other stable pods, those that are more."""
        return max((self.control, self.stable), key=lambda arm: 0 if arm is None else arm.pod_count)


@dataclass(frozen=True, slots=True)
class OpenBlock:
    """The block that is being filled."""

    start_time: float
    windows: Mapping[str, PodWindow] = field(default_factory=dict)
    """Windows of the pods, by pod name."""


@dataclass(frozen=True, slots=True)
class PodSample:
    """Result of one scrape cycle for one pod."""

    arm: ArmName
    counters: CounterSnapshot | None
    """None when the scrape failed."""


def add_scrapes(
    block: OpenBlock, now: float, samples: Mapping[str, PodSample], rule: BlockRule
) -> tuple[OpenBlock, ClosedBlock | None]:
    """Return the open block after one scrape cycle at `now`, and the block that it closed, if any.

    `samples` has every pod that belongs to an arm now, whether or not its scrape succeeded.
    """
    windows = {
        name: _add_scrape(block.windows.get(name, PodWindow(sample.arm)), sample.counters, now, block.start_time, rule)
        for name, sample in samples.items()
    }
    gone_windows = {
        name: replace(window, exclusion_reason="Gone") for name, window in block.windows.items() if name not in samples
    }
    filled_block = OpenBlock(block.start_time, gone_windows | windows)
    if now - block.start_time < rule.block_seconds:
        return filled_block, None
    compared_arms = ("canary", "control")
    arms = {arm: _arm_counts(filled_block, arm, now, rule) for arm in compared_arms}
    for arm, arm_counts in arms.items():
        if arm_counts is None and _may_become_whole(filled_block, arm, now, rule):
            return filled_block, None
        if arm_counts is not None and not rule.has_enough(arm_counts):
            other = arms["control" if arm == "canary" else "canary"]
            if now - block.start_time < MAX_STALLED_BLOCK_LENGTHS * rule.block_seconds or not _is_arm_stalled(
                arm_counts, other, rule
            ):
                return filled_block, None
    excluded_pods: Counter[str] = Counter(
        reason
        for window in filled_block.windows.values()
        if window.arm in compared_arms and (reason := _exclusion_reason(window, now, rule))
    )
    stable = _arm_counts(filled_block, "stable", now, rule)
    closed = ClosedBlock(block.start_time, now, arms["canary"], arms["control"], dict(excluded_pods), stable)
    return OpenBlock(now, {name: _next_window(window, now, rule) for name, window in windows.items()}), closed


def _is_arm_stalled(arm_counts: ArmCounts, other: ArmCounts | None, rule: BlockRule) -> bool:
    """Return whether the arm finishes hardly any of the requests that it holds, while the other arm finishes enough."""
    return other is not None and rule.has_enough(other) and arm_counts.is_stalled_against(other)


def start_block(now: float, samples: Mapping[str, PodSample], rule: BlockRule) -> OpenBlock:
    """Return the first open block, from a first scrape cycle at `now`."""
    return add_scrapes(OpenBlock(now), now, samples, rule)[0]


def _add_scrape(
    window: PodWindow, counters: CounterSnapshot | None, now: float, block_start_time: float, rule: BlockRule
) -> PodWindow:
    """Return the window after one scrape; unchanged when the scrape failed."""
    if counters is None:
        return window
    if counters.load is not None:
        window = replace(window, load_sum=window.load_sum + counters.load, scrape_count=window.scrape_count + 1)
    if window.first_scrape is None or window.last_scrape is None:
        joined_late = now > block_start_time + rule.max_scrape_age_seconds
        exclusion_reason = window.exclusion_reason or ("Joined" if joined_late else None)
        return replace(window, first_scrape=(now, counters), last_scrape=(now, counters), exclusion_reason=exclusion_reason)
    if has_restarted(window.last_scrape[1], counters):
        return replace(window, last_scrape=(now, counters), exclusion_reason="Restarted")
    return replace(window, last_scrape=(now, counters))


def has_restarted(before: CounterSnapshot, after: CounterSnapshot) -> bool:
    """Return whether two snapshots of a pod are not of one run of one engine."""
    if (
        before.process_start_time is not None
        and after.process_start_time is not None
        and before.process_start_time != after.process_start_time
    ):
        return True
    return before.engine_count != after.engine_count or (after.counts - before.counts).decreased_counter is not None


def _exclusion_reason(window: PodWindow, now: float, rule: BlockRule) -> ExclusionReason | None:
    """Return the reason for which the pod has no whole window that ends at `now`; None where it has one."""
    if window.exclusion_reason:
        return window.exclusion_reason
    return "Stale" if window.last_scrape is None or now - window.last_scrape[0] > rule.max_scrape_age_seconds else None


def _arm_counts(block: OpenBlock, arm: str, now: float, rule: BlockRule) -> ArmCounts | None:
    """Return the counts of the arm's pods with a whole window; None when it has no such pod."""
    whole_windows = {
        name: window
        for name, window in block.windows.items()
        if window.arm == arm and _exclusion_reason(window, now, rule) is None
    }
    if not whole_windows:
        return None
    counts_by_pod = {
        name: window.last_scrape[1].counts - window.first_scrape[1].counts
        for name, window in whole_windows.items()
        if window.first_scrape and window.last_scrape
    }
    loads = [window.load_sum / window.scrape_count for window in whole_windows.values() if window.scrape_count]
    return ArmCounts(
        pod_count=len(whole_windows),
        counts=sum(counts_by_pod.values(), EngineCounts()),
        mean_load=sum(loads) / len(loads) if loads else None,
        counts_by_pod=counts_by_pod,
        queue_growth=sum(map(_queue_growth, whole_windows.values())),
    )


def _queue_growth(window: PodWindow) -> float:
    """Return by how many the waiting requests have grown since the window began; 0 where an exposition does not have them."""
    waiting = [scrape[1].waiting_requests if scrape else None for scrape in (window.first_scrape, window.last_scrape)]
    return 0.0 if waiting[0] is None or waiting[1] is None else waiting[1] - waiting[0]


def _may_become_whole(block: OpenBlock, arm: str, now: float, rule: BlockRule) -> bool:
    """Return whether the next scrapes may still make a window of the arm whole: it is only stale, and the block not yet long."""
    has_stale_window = any(
        window.arm == arm and window.exclusion_reason is None and window.first_scrape is not None
        for window in block.windows.values()
    )
    return has_stale_window and now - block.start_time < 2 * rule.block_seconds


def _next_window(window: PodWindow, now: float, rule: BlockRule) -> PodWindow:
    """Return the pod's window in the block that begins at `now`."""
    is_fresh = window.last_scrape is not None and now - window.last_scrape[0] <= rule.max_scrape_age_seconds
    return PodWindow(window.arm, window.last_scrape, window.last_scrape) if is_fresh else PodWindow(window.arm)
