"""The state machine of a canary, as a table: which trigger leads from which phase to which.

    Starting ───────────┬─► WarmingUp ─► Analyzing ─┬─────────────► Ramping ─► Promoting ─► PROMOTED
       └─► Evaluating ──┘                    │      ├► AwaitingApproval ─┘
           (shadow evaluation) ── accepted ──┼──────┘
                                             ├─► Held (inconclusive, and the spec says to hold) ─► Analyzing (extended by a user)
                                             ├─► EXPLORED (a trial that was only to be measured has been measured)
        from every phase ────────────────────┴─► ROLLED BACK or FAILED

    PROMOTED, with previous pods retained ─► Monitoring ─┬─────────────┬─► COMPLETED
                                                         └► Verifying ─┴─► ROLLED BACK

One reconcile takes at most one trigger: the most urgent one that is active. A user's request comes before the metrics, and
evidence against the canary comes before evidence for it.

A promoted canary is stable. The post-promotion monitoring, with previous pods retained for an immediate rollback, is a second
path through the same table. There, tokens per step below the level of the promotion may also come from a change in traffic. So
this regression leads no further than to Verifying: the previous pods get requests again. The promotion is rolled back only if
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
from enum import StrEnum
from typing import Literal

from aerie.api.rollout import AnalysisSpec, CanarySpec
from aerie.api.types import duration
from aerie.rollout.capacity.replica_counts import ramp_step_percent

StateMachinePhase = Literal[
    "Starting",
    "Evaluating",
    "WarmingUp",
    "Analyzing",
    "AwaitingApproval",
    "Held",
    "Ramping",
    "Promoting",
    "Monitoring",
    "Verifying",
]
EndState = Literal["Promoted", "RolledBack", "Failed", "Explored", "Completed"]


class Trigger(StrEnum):
    """What may cause a transition."""

    ROLLBACK_REQUESTED = "RollbackRequested"
    """A user requests the rollback."""
    ABORTED = "Aborted"
    """A hard failure, which needs no statistics: a crash loop, no accepted token, invalid metrics."""
    WORSE = "Worse"
    """The verdict is Rollback."""
    REGRESSED = "Regressed"
    """Tokens per step are significantly below the level of the promotion."""
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    """The pods of this phase are not ready, and its deadline has passed."""
    PROMOTE_REQUESTED = "PromoteRequested"
    """A user requests the promotion."""
    EXTENDED = "Extended"
    """A user extends the inconclusive analysis."""
    BETTER = "Better"
    """The verdict is Promote, and no approval is needed."""
    NEEDS_APPROVAL = "NeedsApproval"
    """The verdict is Promote, and approval is needed."""
    EXPLORED = "Explored"
    """A canary that is only to be measured has been measured for long enough."""
    INCONCLUSIVE_HOLD = "InconclusiveHold"
    """The verdict is Inconclusive, and the spec says to hold."""
    INCONCLUSIVE_ROLLBACK = "InconclusiveRollback"
    """The verdict is Inconclusive, and the spec says to roll back."""
    NEEDS_EVALUATION = "NeedsEvaluation"
    """The pods of this phase are ready, and a shadow evaluation comes first."""
    READY = "Ready"
    """The pods of this phase are ready."""
    EVALUATED = "Evaluated"
    """The shadow evaluation has ended, and has not shown that the canary is worse."""
    TIMER = "Timer"
    """The time of this phase is over."""
    LAST_RAMP_STEP = "LastRampStep"
    """The last step of the ramp has been held."""


TRANSITIONS: dict[tuple[StateMachinePhase, Trigger], StateMachinePhase | EndState] = {
    ("Starting", Trigger.ROLLBACK_REQUESTED): "RolledBack",
    ("Starting", Trigger.ABORTED): "RolledBack",
    ("Starting", Trigger.DEADLINE_EXCEEDED): "Failed",
    ("Starting", Trigger.NEEDS_EVALUATION): "Evaluating",
    ("Starting", Trigger.READY): "WarmingUp",
    ("Evaluating", Trigger.ROLLBACK_REQUESTED): "RolledBack",
    ("Evaluating", Trigger.ABORTED): "RolledBack",
    ("Evaluating", Trigger.WORSE): "RolledBack",
    ("Evaluating", Trigger.PROMOTE_REQUESTED): "Ramping",
    ("Evaluating", Trigger.BETTER): "Ramping",
    ("Evaluating", Trigger.NEEDS_APPROVAL): "AwaitingApproval",
    ("Evaluating", Trigger.EVALUATED): "WarmingUp",
    ("WarmingUp", Trigger.ROLLBACK_REQUESTED): "RolledBack",
    ("WarmingUp", Trigger.ABORTED): "RolledBack",
    ("WarmingUp", Trigger.PROMOTE_REQUESTED): "Ramping",
    ("WarmingUp", Trigger.TIMER): "Analyzing",
    ("Analyzing", Trigger.ROLLBACK_REQUESTED): "RolledBack",
    ("Analyzing", Trigger.ABORTED): "RolledBack",
    ("Analyzing", Trigger.WORSE): "RolledBack",
    ("Analyzing", Trigger.PROMOTE_REQUESTED): "Ramping",
    ("Analyzing", Trigger.BETTER): "Ramping",
    ("Analyzing", Trigger.NEEDS_APPROVAL): "AwaitingApproval",
    ("Analyzing", Trigger.EXPLORED): "Explored",
    ("Analyzing", Trigger.INCONCLUSIVE_HOLD): "Held",
    ("Analyzing", Trigger.INCONCLUSIVE_ROLLBACK): "RolledBack",
    ("AwaitingApproval", Trigger.ROLLBACK_REQUESTED): "RolledBack",
    ("AwaitingApproval", Trigger.ABORTED): "RolledBack",
    ("AwaitingApproval", Trigger.WORSE): "RolledBack",
    ("AwaitingApproval", Trigger.PROMOTE_REQUESTED): "Ramping",
    ("Held", Trigger.ROLLBACK_REQUESTED): "RolledBack",
    ("Held", Trigger.ABORTED): "RolledBack",
    ("Held", Trigger.WORSE): "RolledBack",
    ("Held", Trigger.PROMOTE_REQUESTED): "Ramping",
    ("Held", Trigger.EXTENDED): "Analyzing",
    ("Ramping", Trigger.ROLLBACK_REQUESTED): "RolledBack",
    ("Ramping", Trigger.ABORTED): "RolledBack",
    ("Ramping", Trigger.WORSE): "RolledBack",
    ("Ramping", Trigger.DEADLINE_EXCEEDED): "RolledBack",
    ("Ramping", Trigger.TIMER): "Ramping",
    ("Ramping", Trigger.LAST_RAMP_STEP): "Promoting",
    ("Promoting", Trigger.ROLLBACK_REQUESTED): "RolledBack",
    ("Promoting", Trigger.ABORTED): "RolledBack",
    ("Promoting", Trigger.WORSE): "RolledBack",
    ("Promoting", Trigger.DEADLINE_EXCEEDED): "RolledBack",
    ("Promoting", Trigger.READY): "Promoted",
    ("Monitoring", Trigger.ROLLBACK_REQUESTED): "RolledBack",
    ("Monitoring", Trigger.ABORTED): "RolledBack",
    ("Monitoring", Trigger.REGRESSED): "Verifying",
    ("Monitoring", Trigger.TIMER): "Completed",
    ("Verifying", Trigger.ROLLBACK_REQUESTED): "RolledBack",
    ("Verifying", Trigger.ABORTED): "RolledBack",
    ("Verifying", Trigger.WORSE): "RolledBack",
    ("Verifying", Trigger.TIMER): "Completed",
}
"""The complete transition table. A trigger without a row for a phase has no effect in that phase."""

MANUAL_PROMOTION_MESSAGE, MANUAL_ROLLBACK_MESSAGE = "Promoted manually.", "Rollback requested manually."
VERIFICATION_DURATION = timedelta(hours=1)
"""Time for which previous pods get requests again: enough for a regression of some percent to show in pairs
(docs/measurements/canary-decisions.md)."""
MIN_RETENTION_AFTER_CRASH = timedelta(hours=1)
"""Minimum time for which previous pods stay once engines of the promoted revision have crashed: in a fleet that crashes, other
crashes follow."""


@dataclass(frozen=True)
class CanaryState:
    """State of a canary; the status stores all of it."""

    phase: StateMachinePhase
    started_at: datetime
    ready_at: datetime | None = None
    """Time when all pods of canary and control were ready for the first time, and users were first served by them."""
    step: int | None = None
    """Index of the ramp step, from 0."""
    step_started_at: datetime | None = None
    """Start of this step of the ramp, of the promotion, or of a phase after the promotion."""
    extension_ends_at: datetime | None = None
    """End of the last extension of the analysis; None without one."""

    @property
    def is_extended(self) -> bool:
        """Whether the analysis was inconclusive, and continues because a user has extended it."""
        return self.phase == "Analyzing" and self.extension_ends_at is not None


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
    extension_ends_at: datetime | None = None
    """End of the extension that a user has requested for this very canary; None without one that is still to come."""
    needs_evaluation: bool = False
    """True if a shadow evaluation has to come before users are served by the canary."""
    evaluated_message: str = ""
    """Result of the shadow evaluation, as sentences; empty until it has ended."""
    evaluation_ends_at: datetime | None = None
    """Time at which the shadow evaluation ends without a verdict; None outside of one."""


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
            case "Promoted" | "RolledBack" | "Failed" | "Explored" | "Completed":
                return StateTransition(state, target, message)
            case _:
                return _enter_phase(state, target, observation, policy, message, now)
    return StateTransition(state, requeue_after=_time_remaining(state, observation, policy, now))


def _enter_phase(
    state: CanaryState,
    phase: StateMachinePhase,
    observation: CanaryObservation,
    policy: CanaryPolicy,
    message: str,
    now: datetime,
) -> StateTransition:
    """Return the transition that enters the phase."""
    match phase:
        case "WarmingUp":
            entered = replace(state, phase=phase, ready_at=now)
        case "Analyzing" if state.phase == "Held":
            entered = replace(state, phase=phase, extension_ends_at=observation.extension_ends_at)
        case "Ramping":
            step = 0 if state.phase != "Ramping" or state.step is None else state.step + 1
            entered = replace(state, phase=phase, ready_at=state.ready_at or now, step=step, step_started_at=now)
            if not policy.canary.step_weights:
                entered = replace(entered, phase="Promoting", step=None)
        case "AwaitingApproval":
            entered = replace(state, phase=phase, ready_at=state.ready_at or now)
        case "Promoting" | "Verifying":
            entered = replace(state, phase=phase, step=None, step_started_at=now)
        case _:
            entered = replace(state, phase=phase)
    return StateTransition(entered, message=message, requeue_after=timedelta(0))


def _active_triggers(
    state: CanaryState, observation: CanaryObservation, policy: CanaryPolicy, now: datetime
) -> Iterator[Trigger]:
    """Yield the active triggers, the most urgent first."""
    if observation.manual_action == "rollback":
        yield Trigger.ROLLBACK_REQUESTED
    if observation.abort_message:
        yield Trigger.ABORTED
    if observation.verdict == "Rollback":
        yield Trigger.WORSE
    if observation.regression_message:
        yield Trigger.REGRESSED
    if observation.deadline_exceeded and not observation.ready:
        yield Trigger.DEADLINE_EXCEEDED
    if observation.manual_action == "promote":
        yield Trigger.PROMOTE_REQUESTED
    if observation.extension_ends_at is not None:
        yield Trigger.EXTENDED
    if observation.verdict == "Promote":
        yield Trigger.BETTER if policy.canary.approval == "Automatic" else Trigger.NEEDS_APPROVAL
    if _is_exploration_over(state, policy, now):
        yield Trigger.EXPLORED
    if observation.verdict == "Inconclusive":
        yield Trigger.INCONCLUSIVE_HOLD if policy.analysis.on_inconclusive == "Hold" else Trigger.INCONCLUSIVE_ROLLBACK
    if observation.ready:
        yield Trigger.NEEDS_EVALUATION if observation.needs_evaluation else Trigger.READY
    if observation.evaluated_message:
        yield Trigger.EVALUATED
    if _is_phase_time_over(state, observation, policy, now):
        yield Trigger.LAST_RAMP_STEP if state.phase == "Ramping" and _is_last_ramp_step(state, policy) else Trigger.TIMER


def _phase_started_at(state: CanaryState) -> datetime:
    """Return when the phase began."""
    match state.phase:
        case "Ramping" | "Promoting" | "Monitoring" | "Verifying":
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
        case "Monitoring":
            return now >= compute_retention_end(
                _phase_started_at(state), policy.canary, has_suspicious_crashes=observation.has_suspicious_crashes
            )
        case "Verifying":
            return now >= _phase_started_at(state) + VERIFICATION_DURATION
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
        case "Analyzing" if state.extension_ends_at is not None:
            phase_end = state.extension_ends_at
        case "Analyzing" if policy.exploration_duration is not None:
            phase_end = _exploration_end(state, policy.exploration_duration, policy)
        case "Evaluating" if observation.evaluation_ends_at is not None:
            phase_end = observation.evaluation_ends_at
        case "Monitoring":
            phase_end = compute_retention_end(
                _phase_started_at(state), policy.canary, has_suspicious_crashes=observation.has_suspicious_crashes
            )
        case "Verifying":
            phase_end = _phase_started_at(state) + VERIFICATION_DURATION
        case "Starting" | "Ramping" | "Promoting" if observation.next_deadline_at is not None:
            phase_end = observation.next_deadline_at
        case _:
            return None
    return max(timedelta(0), phase_end - now)


def _transition_message(trigger: Trigger, state: CanaryState, observation: CanaryObservation, policy: CanaryPolicy) -> str:
    match trigger:
        case Trigger.ROLLBACK_REQUESTED:
            return MANUAL_ROLLBACK_MESSAGE
        case Trigger.PROMOTE_REQUESTED:
            return MANUAL_PROMOTION_MESSAGE
        case Trigger.EXTENDED:
            return f"The analysis is extended until {observation.extension_ends_at:%Y-%m-%d %H:%M:%S} UTC."
        case Trigger.ABORTED:
            return observation.abort_message
        case Trigger.REGRESSED:
            return observation.regression_message
        case Trigger.EXPLORED:
            return f"Exploration complete: the setting was measured, and is not promoted. {observation.verdict_message}".rstrip()
        case Trigger.DEADLINE_EXCEEDED:
            progress_deadline = duration.format_duration(policy.progress_deadline)
            return f"Required pods have not been ready for spec.rollout.progressDeadline ({progress_deadline})."
        case Trigger.WORSE | Trigger.BETTER | Trigger.NEEDS_APPROVAL | Trigger.INCONCLUSIVE_HOLD | Trigger.INCONCLUSIVE_ROLLBACK:
            return observation.verdict_message
        case Trigger.READY:
            return "All pods are ready."
        case Trigger.NEEDS_EVALUATION:
            return "All pods are ready; the shadow evaluation begins."
        case Trigger.EVALUATED:
            return observation.evaluated_message
        case Trigger.TIMER if state.phase == "WarmingUp":
            return "Warm-up complete."
        case Trigger.TIMER if state.phase in ("Monitoring", "Verifying"):
            return "Post-promotion monitoring found no regression."
        case Trigger.TIMER | Trigger.LAST_RAMP_STEP:
            if not policy.canary.step_weights:
                return "spec.rollout.canary.stepWeights has become empty: the ramp ends."
            percent = ramp_step_percent(policy.canary.step_weights, state.step)
            return f"The ramp step at {percent} % of the traffic has lasted for spec.rollout.canary.stepDuration."
