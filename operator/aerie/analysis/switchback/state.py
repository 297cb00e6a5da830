"""The counts of a trial by turns so far, and the change by each further window.

    add_window   adds the counts of one pod in one window, or that they are lost
    close_pair   closes a pair of windows: computes the scores and adds them to every test

The pairs of the partners in the same two windows are one unit, because one coin draws their orders. A pod's pair is lost if
either window is. Its loss is counted, and a partner's pair alone remains a unit. A late pair, whose first window the pod did not
begin because the call was not sent in time, is not lost: that was decided before the pair's coin had any effect, so it favours
neither drafter.

Guarantees: a window that is added twice, or after its pair was closed, changes nothing; neither does closing a pair twice. The
order in which windows arrive makes no difference. State and dict convert into each other without loss, so a trial resumes after
a crash at any moment with the windows that were saved.
Not guaranteed: if a drafter itself causes the loss of windows (crashes), pairs without them flatter it. Lost pairs and crashes
are therefore evidence of their own (`verdict`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aerie.analysis.reference import AcceptanceCounts
from aerie.analysis.state import VerdictOutcome
from aerie.analysis.statistics.confidence_sequence import PairedMoments, RareEvents
from aerie.analysis.statistics.crash_rate import SECONDS_PER_HOUR, CrashCounts
from aerie.analysis.statistics.field_values import field_values
from aerie.analysis.statistics.shares import ShareCounts
from aerie.analysis.switchback.carryover import shown_share
from aerie.analysis.switchback.design import begins_with_repeat, drafter_in_window, partnership
from aerie.analysis.switchback.plan import CRITERIA, TOKENS_PER_STEP_CRITERION, Criterion, SwitchbackPlan, WindowCounts
from aerie.analysis.switchback.sign_flip import SignFlipTest


@dataclass(frozen=True, slots=True)
class WindowResult:
    """What is known of one pod in one window."""

    counts: WindowCounts | None
    """None if they are lost: the process restarted, a scrape failed, or the pod had another drafter for a part of the window."""
    restarts: int = 0
    """Processes of the engine that ended in the window."""


@dataclass(frozen=True, slots=True)
class SwitchbackState:
    """Counts of all closed pairs, the windows of open ones, and the verdict once there is one."""

    closed_pair_count: int = 0
    """Pairs closed: the number of the first open one."""
    open_windows: Mapping[str, WindowResult] = field(default_factory=dict)
    """Windows of pairs that are not closed, by "window number/pod index"."""
    tests: Mapping[str, SignFlipTest] = field(default_factory=dict)
    """Evidence, by name of the test."""
    moments: Mapping[str, PairedMoments] = field(default_factory=dict)
    """Weighted costs of the units, by criterion: for estimates and their intervals. As users see the criterion, the ratio is
    canary over control."""
    carryover_moments: Mapping[str, PairedMoments] = field(default_factory=dict)
    """The same for tokens per step, of the pods' pairs that begin with a "repeat" of a drafter, and with a "change"."""
    failed_requests: RareEvents = field(default_factory=RareEvents)
    request_shares: ShareCounts = field(default_factory=ShareCounts)
    """Failed and all requests of both drafters."""
    crashes: CrashCounts = field(default_factory=CrashCounts)
    """Engine processes that ended while they had the drafter, and its pod-hours. Begins with the earlier hours and restarts of
    the pods on trial (`start_trial`)."""
    canary_acceptance: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    """Acceptance of the canary's drafter, by vLLM's counters as the status shows it for every arm."""
    counted_pairs: int = 0
    """Pairs of a pod's windows that count."""
    lost_pairs: int = 0
    """Pairs of a pod's windows that are lost."""
    late_pairs: int = 0
    """Pairs of a pod's windows that were not begun in time: no evidence."""
    outcome: VerdictOutcome = "Continue"
    message: str = ""
    """Message of a verdict other than Continue."""

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a dict for JSON. Counts are lists, in the order of their fields."""
        return {
            "closed_pair_count": self.closed_pair_count,
            "open_windows": {
                key: [None if result.counts is None else field_values(result.counts), result.restarts]
                for key, result in self.open_windows.items()
            },
            "tests": {name: [*field_values(test)[:-1], list(test.log_wealth)] for name, test in self.tests.items()},
            "moments": {name: field_values(pairs) for name, pairs in self.moments.items()},
            "carryover_moments": {name: field_values(pairs) for name, pairs in self.carryover_moments.items()},
            "failed_requests": field_values(self.failed_requests),
            "request_shares": field_values(self.request_shares),
            "crashes": self.crashes.to_dict(),
            "canary_acceptance": list(self.canary_acceptance),
            "counted_pairs": self.counted_pairs,
            "lost_pairs": self.lost_pairs,
            "late_pairs": self.late_pairs,
            "outcome": self.outcome,
            "message": self.message,
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> SwitchbackState:
        parsed = {
            "open_windows": {
                key: WindowResult(None if counts is None else WindowCounts(*counts), restarts)
                for key, (counts, restarts) in document["open_windows"].items()
            },
            "tests": {
                name: SignFlipTest(units, score_sum, squares, seconds, tuple(log_wealth))
                for name, (units, score_sum, squares, seconds, log_wealth) in document["tests"].items()
            },
            "moments": {name: PairedMoments(*values) for name, values in document["moments"].items()},
            "carryover_moments": {name: PairedMoments(*values) for name, values in document["carryover_moments"].items()},
            "failed_requests": RareEvents(*document["failed_requests"]),
            "request_shares": ShareCounts(*document["request_shares"]),
            "crashes": CrashCounts(**document["crashes"]),
            "canary_acceptance": AcceptanceCounts(*document.get("canary_acceptance", ())),  # an earlier release has none
        }
        return cls(**{**document, **parsed})


def start_trial(earlier_pod_hours: float, earlier_restarts: int) -> SwitchbackState:
    """Return the state at the start of a trial on pods that have been up with the stable drafter for these hours in all.

    Their restarts tell how often engines end in this cluster whatever they draft with. Without them two early crashes in windows
    with the canary's drafter, which a coin brings about in a quarter of cases, would roll it back in a cluster full of crashes.
    """
    return SwitchbackState(crashes=CrashCounts(control_crashes=earlier_restarts, control_pod_hours=earlier_pod_hours))


def add_window(
    state: SwitchbackState, pod_index: int, window_number: int, counts: WindowCounts | None, restarts: int = 0
) -> SwitchbackState:
    """Return the state with the counts of one pod in one window after its wash-out; None if they are lost.

    The first result of a window is final: return the same state for a further one, and for a window of a closed pair.
    """
    key = _key(window_number, pod_index)
    if window_number // 2 < state.closed_pair_count or key in state.open_windows:
        return state
    return replace(state, open_windows={**state.open_windows, key: WindowResult(counts, restarts)})


def close_pair(
    state: SwitchbackState, plan: SwitchbackPlan, pair_number: int, pod_indexes: Iterable[int], late_pairs: int = 0
) -> SwitchbackState:
    """Return the state with a closed pair. `pod_indexes` are the pods that were on trial in both of its windows, without those
    whose pair is late; `late_pairs` is their number.

    A window that was not added is lost. Earlier pairs that are still open are dropped: the operator did not run then. Return
    the same state for a closed pair.
    """
    if pair_number < state.closed_pair_count:
        return state
    window = plan.schedule.window(2 * pair_number)
    results = {
        pod: [state.open_windows.get(_key(2 * pair_number + position, pod), WindowResult(None)) for position in (0, 1)]
        for pod in sorted(set(pod_indexes))
    }
    units: dict[int, dict[int, dict[str, WindowCounts]]] = {}
    for pod, (first, second) in results.items():
        state = _add_exposure(state, plan, pod, pair_number, (first, second), window.length_seconds)
        if first.counts is None or second.counts is None:
            state = replace(state, lost_pairs=state.lost_pairs + 1)
            continue
        drafters = (drafter_in_window(plan.seed, pod, 2 * pair_number + position) for position in (0, 1))
        counts_by_drafter: dict[str, WindowCounts] = dict(zip(drafters, (first.counts, second.counts), strict=True))
        units.setdefault(partnership(pod), {})[pod] = counts_by_drafter
        canary = counts_by_drafter["canary"]
        acceptance = state.canary_acceptance.add(AcceptanceCounts(canary.first_tokens, canary.drafts, canary.accepted_tokens))
        state = replace(state, counted_pairs=state.counted_pairs + 1, canary_acceptance=acceptance)
        state = _add_requests(state, counts_by_drafter)
    for pods in units.values():
        state = _add_unit(state, plan, pair_number, pods)
    open_windows = {key: result for key, result in state.open_windows.items() if int(key.split("/")[0]) // 2 > pair_number}
    late_pairs += state.late_pairs
    return replace(state, closed_pair_count=pair_number + 1, open_windows=open_windows, late_pairs=late_pairs)


def _key(window_number: int, pod_index: int) -> str:
    return f"{window_number}/{pod_index}"


def _add_exposure(
    state: SwitchbackState,
    plan: SwitchbackPlan,
    pod: int,
    pair_number: int,
    results: tuple[WindowResult, WindowResult],
    seconds: float,
) -> SwitchbackState:
    """Return the state with the pod-hours and the ended processes of a pod's pair."""
    restarts = {"stable": 0, "canary": 0}
    for position, result in enumerate(results):
        restarts[drafter_in_window(plan.seed, pod, 2 * pair_number + position)] += result.restarts
    crashes = replace(
        state.crashes,
        canary_crashes=state.crashes.canary_crashes + restarts["canary"],
        control_crashes=state.crashes.control_crashes + restarts["stable"],
        canary_pod_hours=state.crashes.canary_pod_hours + seconds / SECONDS_PER_HOUR,
        control_pod_hours=state.crashes.control_pod_hours + seconds / SECONDS_PER_HOUR,
    )
    return replace(state, crashes=crashes)


def _add_requests(state: SwitchbackState, counts: Mapping[str, WindowCounts]) -> SwitchbackState:
    """Return the state with the finished and failed requests of a pod's pair."""
    canary, stable = counts["canary"], counts["stable"]
    shares = state.request_shares.add_block(
        (canary.failed_requests, canary.finished_requests), (stable.failed_requests, stable.finished_requests)
    )
    if canary.finished_requests <= 0 or stable.finished_requests <= 0:
        return replace(state, request_shares=shares)
    canary_share = canary.finished_requests / (canary.finished_requests + stable.finished_requests)
    failed_requests = state.failed_requests.add_block(canary.failed_requests, stable.failed_requests, canary_share)
    return replace(state, request_shares=shares, failed_requests=failed_requests)


def weighted_costs(criterion: Criterion, canary: WindowCounts, stable: WindowCounts) -> tuple[float, float]:
    """Return the weighted costs whose ratio is the canary's to the stable drafter's, as users see the criterion.

    Both are 0 where a window has no tokens, or no requests, to divide by.
    """
    (canary_cost, canary_base), (stable_cost, stable_base) = criterion.fraction(canary), criterion.fraction(stable)
    if canary_base <= 0 or stable_base <= 0:
        return 0.0, 0.0
    canary_part = canary_cost * stable_base / (canary_base + stable_base)
    stable_part = stable_cost * canary_base / (canary_base + stable_base)
    return (stable_part, canary_part) if criterion.is_inverse else (canary_part, stable_part)


def _add_unit(
    state: SwitchbackState, plan: SwitchbackPlan, pair_number: int, pods: Mapping[int, Mapping[str, WindowCounts]]
) -> SwitchbackState:
    """Return the state with the scores of one unit: the pairs of the partners, by pod index and drafter."""
    window = plan.schedule.window(2 * pair_number)
    is_repeat = {pod: begins_with_repeat(plan.seed, pod, pair_number) for pod in pods}
    shares = {pod: shown_share(window, plan.schedule.carryover_seconds, is_repeat=is_repeat[pod]) for pod in pods}
    costs = {
        criterion.name: {pod: weighted_costs(criterion, counts["canary"], counts["stable"]) for pod, counts in pods.items()}
        for criterion in CRITERIA
    }
    tests, moments, carryover_moments = dict(state.tests), dict(state.moments), dict(state.carryover_moments)
    for name, test in plan.tests.items():
        score = sum(
            upper - (1 + test.limit * (shares[pod] if test.is_attenuated else 1.0)) * lower
            for pod, (upper, lower) in costs[test.criterion.name].items()
        )
        tests[name] = tests.get(name, SignFlipTest()).add_unit(test.sign * score, window.counted_seconds, plan.tuned_times)
    for criterion in CRITERIA:
        pair = tuple(sum(values) for values in zip(*costs[criterion.name].values(), strict=True))
        if pair[1] > 0:
            moments[criterion.name] = moments.get(criterion.name, PairedMoments()).add_pair(pair[0], pair[1])
    for pod, (upper, lower) in costs[TOKENS_PER_STEP_CRITERION.name].items():
        if lower > 0:
            group = "repeat" if is_repeat[pod] else "change"
            carryover_moments[group] = carryover_moments.get(group, PairedMoments()).add_pair(upper, lower)
    return replace(state, tests=tests, moments=moments, carryover_moments=carryover_moments)
