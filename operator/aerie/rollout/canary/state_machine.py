"""The state machine of a canary, as a table: which trigger leads from which phase to which.

    Starting ─► WarmingUp ─► Analyzing ─┬─────────────► Ramping ─► Promoting ─► PROMOTED
                                 │      └► AwaitingApproval ─┘
                                 ├─► Held (inconclusive, and the spec says to hold)
                                 ├─► EXPLORED (a trial that was only to be measured has been measured)
        from every phase ────────┴─► ROLLED BACK or FAILED

    PROMOTED, with previous pods retained ─► Watching ─┬──────────────┬─► OVER
                                                       └► Rechecking ─┴─► ROLLED BACK

One reconcile takes at most one trigger: the most urgent one that is active. A user's request comes before the metrics, and
evidence against the canary comes before evidence for it.

A promoted canary is stable. The post-promotion monitoring, with previous pods retained for an immediate rollback, is a second
path through the same table. There, tokens per step below the level of the promotion may also come from a change in traffic. So
this regression leads no further than to Rechecking: the previous pods get requests again. The promotion is rolled back only if
it is worse than they are at the same time.

Guarantees: a pure function. There is no promotion without the verdict Promote or a user's request. An ended canary stays ended.
Each phase that waits for its pods or for time has a deadline, with three exceptions: Held and AwaitingApproval wait for a user,
and a passed canary without capacity in the cluster waits for the cluster. The length of a step makes nothing late: only pods are
late (late_pods.py). The spec may change in every phase, the ramp too. Not here: which spec is desired (superseded and reverted
canaries are ended by the caller), pods (replica_counts.py), weights (traffic_weights.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal

from aerie.api.rollout import AnalysisSpec, CanarySpec
from aerie.api.types import duration
from aerie.rollout.capacity.replica_counts import ramp_step_percent

StateMachinePhase = Literal[
    "Starting", "WarmingUp", "Analyzing", "AwaitingApproval", "Held", "Ramping", "Promoting", "Watching", "Rechecking"
]
EndState = Literal["Promoted", "RolledBack", "Failed", "Explored", "Over"]
Trigger = Literal[
    "rejected",  # a user requests the rollback
    "stopped",  # a hard failure, which needs no statistics: a crash loop, no accepted token, invalid metrics
    "worse",  # the verdict is Rollback
    "fallen",  # tokens per step are significantly below the level of the promotion
    "late",  # the pods of this phase are not ready, and its deadline has passed
    "approved",  # a user requests the promotion
    "better",  # the verdict is Promote, and no approval is needed
    "better, ask",  # the verdict is Promote, and approval is needed
    "explored",  # a canary that is only to be measured has been measured for long enough
    "undecided, hold",  # the verdict is Inconclusive, and the spec says to hold
    "undecided, end",  # the verdict is Inconclusive, and the spec says to roll back
    "ready",  # the pods of this phase are ready
    "due",  # the time of this phase is over
    "topped",  # the last step of the ramp has been held
]

TRANSITIONS: dict[tuple[StateMachinePhase, Trigger], StateMachinePhase | EndState] = {
    ("Starting", "rejected"): "RolledBack",
    ("Starting", "stopped"): "RolledBack",
    ("Starting", "late"): "Failed",
    ("Starting", "ready"): "WarmingUp",
    ("WarmingUp", "rejected"): "RolledBack",
    ("WarmingUp", "stopped"): "RolledBack",
    ("WarmingUp", "approved"): "Ramping",
    ("WarmingUp", "due"): "Analyzing",
    ("Analyzing", "rejected"): "RolledBack",
    ("Analyzing", "stopped"): "RolledBack",
    ("Analyzing", "worse"): "RolledBack",
    ("Analyzing", "approved"): "Ramping",
    ("Analyzing", "better"): "Ramping",
    ("Analyzing", "better, ask"): "AwaitingApproval",
    ("Analyzing", "explored"): "Explored",
    ("Analyzing", "undecided, hold"): "Held",
    ("Analyzing", "undecided, end"): "RolledBack",
    ("AwaitingApproval", "rejected"): "RolledBack",
    ("AwaitingApproval", "stopped"): "RolledBack",
    ("AwaitingApproval", "worse"): "RolledBack",
    ("AwaitingApproval", "approved"): "Ramping",
    ("Held", "rejected"): "RolledBack",
    ("Held", "stopped"): "RolledBack",
    ("Held", "worse"): "RolledBack",
    ("Held", "approved"): "Ramping",
    ("Ramping", "rejected"): "RolledBack",
    ("Ramping", "stopped"): "RolledBack",
    ("Ramping", "worse"): "RolledBack",
    ("Ramping", "late"): "RolledBack",
    ("Ramping", "due"): "Ramping",
    ("Ramping", "topped"): "Promoting",
    ("Promoting", "rejected"): "RolledBack",
    ("Promoting", "stopped"): "RolledBack",
    ("Promoting", "worse"): "RolledBack",
    ("Promoting", "late"): "RolledBack",
    ("Promoting", "ready"): "Promoted",
    ("Watching", "rejected"): "RolledBack",
    ("Watching", "stopped"): "RolledBack",
    ("Watching", "fallen"): "Rechecking",
    ("Watching", "due"): "Over",
    ("Rechecking", "rejected"): "RolledBack",
    ("Rechecking", "stopped"): "RolledBack",
    ("Rechecking", "worse"): "RolledBack",
    ("Rechecking", "due"): "Over",
}
"""The complete transition table. A trigger without a row for a phase has no effect in that phase."""

RECHECK_DURATION = timedelta(hours=1)
"""Time for which previous pods get requests again: enough for a regression of some percent to show in pairs
(docs/canary-decisions.md)."""
MIN_RETENTION_AFTER_CRASH = timedelta(hours=1)
"""Minimum time for which previous pods stay once engines of the promoted revision have crashed: in a fleet that crashes, other
crashes follow."""


@dataclass(frozen=True)
class CanaryState:
    """State of a canary; the status stores all of it."""

    phase: StateMachinePhase
    started_at: datetime
    ready_at: datetime | None = None
    """Time when all pods of canary and control were ready for the first time."""
    step: int | None = None
    """Index of the ramp step, from 0."""
    step_started_at: datetime | None = None
    """Start of this step of the ramp, of the promotion, or of a phase after the promotion."""


@dataclass(frozen=True)
class CanaryObservation:
    """Observation of one reconcile."""

    ready: bool
    """True if the pods that this phase needs are ready."""
    deadline_exceeded: bool = False
    """True if pods that the phase needs have not been ready for spec.rollout.progressDeadline, and more of them than the fault of
    one node explains."""
    next_deadline_at: datetime | None = None
    """Time when the next pod becomes late; None while no pod is waited for."""
    abort_message: str = ""
    """Message about a hard failure that ends the canary immediately; empty without one."""
    verdict: Literal["Continue", "Promote", "Rollback", "Inconclusive"] = "Continue"
    verdict_message: str = ""
    """Reason of the verdict."""
    regression_message: str = ""
    """Message that tokens per step are significantly below the level of the promotion; empty without such a regression."""
    has_suspicious_crashes: bool = False
    """True if engines of the canary have crashed, and it is unknown whether by accident."""
    manual_action: Literal["promote", "rollback"] | None = None
    """Action that a user has requested for this very canary."""


@dataclass(frozen=True)
class CanaryPolicy:
    """Rollout part of the spec; the analysis as it was when this analysis began."""

    canary: CanarySpec
    analysis: AnalysisSpec
    progress_deadline: timedelta
    exploration_duration: timedelta | None = None
    """Time for which a canary is analyzed that is only to be measured; None for all others."""


@dataclass(frozen=True)
class StateTransition:
    """Result of one reconcile."""

    state: CanaryState
    end_state: EndState | None = None
    """End state of a canary that has ended; `state` is then the one that it ended in."""
    message: str = ""
    """Reason of the end or of the change of phase; empty without either."""
    requeue_after: timedelta | None = None
    """Delay after which time alone would lead to a transition; None: never."""


def advance_state(state: CanaryState, observation: CanaryObservation, policy: CanaryPolicy, now: datetime) -> StateTransition:
    """Return the transition of this reconcile: at most one row of the table."""
    for trigger in _active_triggers(state, observation, policy, now):
        target = TRANSITIONS.get((state.phase, trigger))
        if target is None:
            continue
        message = _transition_message(trigger, state, observation, policy)
        match target:
            case "Promoted" | "RolledBack" | "Failed" | "Explored" | "Over":
                return StateTransition(state, target, message)
            case _:
                return _enter_phase(state, target, policy, message, now)
    return StateTransition(state, requeue_after=_time_remaining(state, observation, policy, now))


def _enter_phase(
    state: CanaryState, phase: StateMachinePhase, policy: CanaryPolicy, message: str, now: datetime
) -> StateTransition:
    """Return the transition that enters the phase."""
    match phase:
        case "WarmingUp":
            entered = replace(state, phase=phase, ready_at=now)
        case "Ramping":
            step = 0 if state.phase != "Ramping" or state.step is None else state.step + 1
            entered = replace(state, phase=phase, step=step, step_started_at=now)
            if not policy.canary.step_weights:
                entered = replace(entered, phase="Promoting", step=None)
        case "Promoting" | "Rechecking":
            entered = replace(state, phase=phase, step=None, step_started_at=now)
        case _:
            entered = replace(state, phase=phase)
    return StateTransition(entered, message=message, requeue_after=timedelta(0))


def _active_triggers(
    state: CanaryState, observation: CanaryObservation, policy: CanaryPolicy, now: datetime
) -> Iterator[Trigger]:
    """Yield the active triggers, the most urgent first."""
    if observation.manual_action == "rollback":
        yield "rejected"
    if observation.abort_message:
        yield "stopped"
    if observation.verdict == "Rollback":
        yield "worse"
    if observation.regression_message:
        yield "fallen"
    if observation.deadline_exceeded and not observation.ready:
        yield "late"
    if observation.manual_action == "promote":
        yield "approved"
    if observation.verdict == "Promote":
        yield "better" if policy.canary.approval == "Automatic" else "better, ask"
    if _is_exploration_over(state, policy, now):
        yield "explored"
    if observation.verdict == "Inconclusive":
        yield "undecided, hold" if policy.analysis.on_inconclusive == "Hold" else "undecided, end"
    if observation.ready:
        yield "ready"
    if _is_phase_time_over(state, observation, policy, now):
        yield "topped" if state.phase == "Ramping" and _is_last_ramp_step(state, policy) else "due"


def _phase_started_at(state: CanaryState) -> datetime:
    """Return when the phase began."""
    match state.phase:
        case "Ramping" | "Promoting" | "Watching" | "Rechecking":
            return state.step_started_at or state.started_at
        case "Starting":
            return state.started_at
        case _:
            return state.ready_at or state.started_at


def _is_last_ramp_step(state: CanaryState, policy: CanaryPolicy) -> bool:
    """Return whether this is the last step of the ramp."""
    return (state.step or 0) + 1 >= len(policy.canary.step_weights)


def _is_phase_time_over(state: CanaryState, observation: CanaryObservation, policy: CanaryPolicy, now: datetime) -> bool:
    match state.phase:
        case "WarmingUp":
            return now >= _phase_started_at(state) + policy.analysis.warmup_duration
        case "Ramping" if not policy.canary.step_weights:  # the ramp was removed from the spec: there is no share to hold
            return True
        case "Ramping":  # a share for which pods are not ready yet is not being held
            return observation.ready and now >= _phase_started_at(state) + policy.canary.step_duration
        case "Watching":
            return now >= compute_retention_end(
                _phase_started_at(state), policy.canary, has_suspicious_crashes=observation.has_suspicious_crashes
            )
        case "Rechecking":
            return now >= _phase_started_at(state) + RECHECK_DURATION
        case _:
            return False


def compute_retention_end(since: datetime, canary: CanarySpec, *, has_suspicious_crashes: bool) -> datetime:
    """Return when pods retained after a promotion are scaled down."""
    return since + (
        max(canary.scale_down_delay, MIN_RETENTION_AFTER_CRASH) if has_suspicious_crashes else canary.scale_down_delay
    )


def _is_exploration_over(state: CanaryState, policy: CanaryPolicy, now: datetime) -> bool:
    """Return whether a canary that is only to be measured has been measured for long enough."""
    return policy.exploration_duration is not None and now >= _exploration_end(state, policy.exploration_duration, policy)


def _exploration_end(state: CanaryState, exploration_duration: timedelta, policy: CanaryPolicy) -> datetime:
    return _phase_started_at(state) + min(policy.analysis.warmup_duration + exploration_duration, policy.analysis.max_duration)


def _time_remaining(state: CanaryState, observation: CanaryObservation, policy: CanaryPolicy, now: datetime) -> timedelta | None:
    """Return the time until time alone would lead to a transition; None where it never would."""
    match state.phase:
        case "WarmingUp":
            phase_end = _phase_started_at(state) + policy.analysis.warmup_duration
        case "Ramping" if observation.ready:
            phase_end = _phase_started_at(state) + policy.canary.step_duration
        case "Analyzing" if policy.exploration_duration is not None:
            phase_end = _exploration_end(state, policy.exploration_duration, policy)
        case "Watching":
            phase_end = compute_retention_end(
                _phase_started_at(state), policy.canary, has_suspicious_crashes=observation.has_suspicious_crashes
            )
        case "Rechecking":
            phase_end = _phase_started_at(state) + RECHECK_DURATION
        case "Starting" | "Ramping" | "Promoting" if observation.next_deadline_at is not None:
            phase_end = observation.next_deadline_at
        case _:
            return None
    return max(timedelta(0), phase_end - now)


def _transition_message(trigger: Trigger, state: CanaryState, observation: CanaryObservation, policy: CanaryPolicy) -> str:
    match trigger:
        case "rejected":
            return "A person asked for the rollback."
        case "approved":
            return "A person asked for the promotion."
        case "stopped":
            return observation.abort_message
        case "fallen":
            return observation.regression_message
        case "explored":
            return f"It was to be measured and given up, and has been. {observation.verdict_message}".rstrip()
        case "late":
            progress_deadline = duration.format_duration(policy.progress_deadline)
            return f"Pods that it needs have not served for spec.rollout.progressDeadline ({progress_deadline})."
        case "worse" | "better" | "better, ask" | "undecided, hold" | "undecided, end":
            return observation.verdict_message
        case "ready":
            return "All its pods serve."
        case "due" if state.phase == "WarmingUp":
            return "The warm-up is over."
        case "due" if state.phase in ("Watching", "Rechecking"):
            return "Nothing has spoken against it while pods of the revision before were kept."
        case "due" | "topped":
            if not policy.canary.step_weights:
                return "spec.rollout.canary.stepWeights has become empty: there is no share to hold."
            percent = ramp_step_percent(policy.canary.step_weights, state.step)
            return f"{percent} % of the traffic have been held for spec.rollout.canary.stepDuration."
