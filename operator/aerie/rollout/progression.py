"""Progression of a rollout: which revisions have pods, and the condition Progressing.

    desired revision ─┬─ a canary of another revision is in progress ─► that one is rolled back first
                      ├─ previous pods are retained ──────────────────► post-promotion monitoring (canary/post_promotion.py);
                      │                                                 for a third revision, they are removed first
                      ├─ is the stable one ───────────────────────────► keep it
                      ├─ was rejected ────────────────────────────────► keep the stable one, say why, wait for a retry request
                      ├─ has found no resources ──────────────────────► keep the stable one, retry later
                      ├─ preflight: none yet, running, failed ────────► no engine pod; report the problem
                      └─ preflight passed ─┬─ a third revision has pods ─► these are removed first
                                           ├─ nothing is stable ───► its pods start; when all are ready, it is stable
                                           ├─ others come first ───► it waits for a slot (facts/concurrency.py)
                                           └─ otherwise ───────────► the canary (canary/transition.py)

Each line is a policy, tried from the top; the first one with an answer decides.

Guarantees: a function of its arguments; one transition at a time; at most two revisions have pods. A serving revision is
stable: a first revision with any ready pod is never deleted for a change of the spec. It is adopted, and a canary rolls out the
change. A new spec is taken up in every phase, even during a rollback that cannot end (canary/blocked_rollback.py). Not
guaranteed: that two changes in a row are both rolled out; the last one is, and the other is reported as superseded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from aerie.api import SpeculativeDeployment
from aerie.api.status import AnalysisStatus, Arm, CanaryArm, Phase, PreviousArm, RolloutOutcome, Status
from aerie.manifests import naming
from aerie.rollout.canary import blocked_rollback, post_promotion
from aerie.rollout.canary import transition as canary
from aerie.rollout.canary.transition import CanaryTransition, build_outcome
from aerie.rollout.capacity.arms import RolloutPods, count_missing_ready_pods
from aerie.rollout.capacity.replica_counts import ArmReplicas
from aerie.rollout.capacity.traffic_weights import TOTAL_WEIGHT, redirect_to_ready_arms
from aerie.rollout.conditions import PREFLIGHT_PASSED, PROGRESSING, ConditionUpdate
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.orphans import ORPHAN_REQUEUE_DELAY
from aerie.rollout.facts.snapshot import Snapshot, is_owned_by, read_labels
from aerie.rollout.revision.desired import DesiredRevision
from aerie.rollout.revision.preflight_result import PREFLIGHT_SKIPPED_REASON, PreflightResult
from aerie.rollout.revision.recovery import build_withdrawn_canary

RETRY_ANNOTATION = "aerie.dev/retry"
"""Annotation by which a user has a rejected revision tried again; each new value works once."""
_MAX_RETRY_VALUE_CHARACTERS = 64
"""Length up to which the status stores the annotation's value as it is."""


@dataclass(frozen=True)
class Progression:
    """State of the rollout after this step."""

    stable_revision: str | None
    phase: Phase
    progressing: ConditionUpdate
    preflight_passed: ConditionUpdate
    target_replicas: ArmReplicas
    """Pods to request."""
    canary: CanaryArm | None = None
    """The revision whose pods run beside the stable ones, or start before there are any."""
    weights: Mapping[str, int] = field(default_factory=lambda: {"stable": TOTAL_WEIGHT})
    analysis: AnalysisStatus | None = None
    outcome: RolloutOutcome | None = None
    needs_preflight_job: bool = False
    """Whether the preflight Job has to exist."""
    requeue_after: timedelta | None = None
    rejected_revision: str | None = None
    """The revision that is not tried again."""
    previous: PreviousArm | None = None
    """The previous revision, whose pods are retained for a while."""
    reference_acceptance_length: float | None = None
    """Acceptance length with which the revision passed that has just become stable."""
    claims_slot: bool = False
    """Whether the rollout would start, and claims a slot for that."""

    @property
    def routes_to_all_pods(self) -> bool:
        """Whether requests go to all existing pods."""
        return self.previous is None or self.previous.phase == "Verifying" or self.weights.get("previous", 0) > 0

    @property
    def exclusive_revision(self) -> str | None:
        """The revision that receives all requests, where others have pods too."""
        return None if self.routes_to_all_pods else self.stable_revision

    @property
    def canary_revision(self) -> str | None:
        """Revision of the canary."""
        return self.canary.revision if self.canary is not None else None


@dataclass(frozen=True)
class _ProgressionContext:
    """Input of the policies, prepared once."""

    snapshot: Snapshot
    desired: DesiredRevision
    preflight_result: PreflightResult
    now: datetime
    status: Status
    stable: Arm | None
    canary_arm: CanaryArm | None
    """The canary of the status, or an unrecorded revision that is rolled back like one; None for a superseded first revision."""
    serving: Progression
    """The progression that keeps the serving pods; each policy changes it."""

    @property
    def replicas(self) -> int:
        """Replicas of the spec."""
        return self.snapshot.resource.spec.replicas


def next_progression(
    snapshot: Snapshot, desired: DesiredRevision, preflight_result: PreflightResult, now: datetime
) -> Progression:
    """Return the progression that follows from the snapshot: the answer of the first policy that has one."""
    status = snapshot.resource.status or Status()
    context = _ProgressionContext(
        snapshot,
        desired,
        preflight_result,
        now,
        status,
        status.stable,
        status.canary,
        _keep_serving(snapshot.resource, desired, preflight_result, status),
    )
    if (progression := _pause(context)) is not None:
        return progression
    context = _adopt_unrecorded_revision(context)
    for policy in _POLICIES_BEFORE_SUPERSEDING:
        if (progression := policy(context)) is not None:
            return progression
    context = _drop_superseded_first_revision(context)
    for policy in _POLICIES_OF_DESIRED_REVISION:
        if (progression := policy(context)) is not None:
            return progression
    return _progress_canary(context)


def _keep_serving(
    resource: SpeculativeDeployment, desired: DesiredRevision, preflight_result: PreflightResult, status: Status
) -> Progression:
    """Return the progression that keeps the serving pods and reports the desired revision as rolled out."""
    canary_arm, stable = status.canary, status.stable
    serving = Progression(
        stable_revision=stable.revision if stable else None,
        phase="Ready",
        progressing=ConditionUpdate(PROGRESSING, "False", "Complete", f"Revision {desired.revision} is rolled out."),
        preflight_passed=preflight_result.build_condition(desired.revision),
        target_replicas=ArmReplicas(resource.spec.replicas),
        analysis=status.analysis,
        rejected_revision=_read_rejected_revision(resource, desired),
    )
    if preflight_result.state in ("Passed", "Failed") or desired.revision not in (
        serving.stable_revision,
        canary_arm.revision if canary_arm else None,
    ):
        return serving
    # It has pods, so it has passed, or preflight was skipped. The later fate of the Job says nothing about it.
    condition = ConditionUpdate(PREFLIGHT_PASSED, "True", "Passed", "Preflight passed before this revision was rolled out.")
    record = preflight_result.record or {}
    if record.get("mode") == "Off" and record.get("passed") is not True:
        condition = ConditionUpdate(
            PREFLIGHT_PASSED,
            "Unknown",
            PREFLIGHT_SKIPPED_REASON,
            "Preflight was skipped: this revision was rolled out with spec.rollout.preflight.mode: Off.",
        )
    return replace(serving, preflight_passed=condition)


# ---------------------------------------------------------------------------------------------------------------------- policies
def _pause(context: _ProgressionContext) -> Progression | None:
    """Keep everything while the spec pauses the rollout."""
    if not context.snapshot.resource.spec.rollout.paused:
        return None
    condition = ConditionUpdate(
        PROGRESSING, "False", "Paused", "Rollout is paused by spec.rollout.paused: nothing is changed until it is false."
    )
    progression = replace(
        context.serving,
        phase="Paused",
        progressing=condition,
        canary=context.canary_arm,
        previous=context.status.previous,
    )
    return _with_current_replicas_and_weights(progression, context.snapshot, context.status, context.replicas)


def _adopt_unrecorded_revision(context: _ProgressionContext) -> _ProgressionContext:
    """Return the context with an unrecorded revision as its canary, where the status has none."""
    if context.canary_arm is not None or context.stable is None:
        return context
    revision = _find_unrecorded_revision(context.snapshot, context.desired, context.status, context.stable, context.now)
    if revision is None:
        return context
    return replace(context, canary_arm=build_withdrawn_canary(context.snapshot, revision, context.now))


def _reverse_blocked_rollback(context: _ProgressionContext) -> Progression | None:
    """Turn a rollback round that does not end, where something else is requested."""
    canary_arm, stable = context.canary_arm, context.stable
    if canary_arm is None or stable is None or canary_arm.phase != "RollingBack":
        return None
    reversal = blocked_rollback.reverse_blocked_rollback(context.snapshot, context.desired, stable, canary_arm, context.now)
    if reversal is None:
        return None
    return replace(_from_transition(context.serving, reversal.transition, None), stable_revision=reversal.stable.revision)


def _roll_back_superseded_canary(context: _ProgressionContext) -> Progression | None:
    """Continue a rollback, or start that of a canary whose revision is no longer desired."""
    canary_arm, stable, serving, status = context.canary_arm, context.stable, context.serving, context.status
    if canary_arm is None or stable is None:
        return None
    is_rolling_back = canary_arm.phase == "RollingBack"
    is_superseded = canary_arm.revision != context.desired.revision or bool(context.desired.problem)
    if not (is_rolling_back or is_superseded):
        return None
    outcome = None if is_rolling_back else _build_superseded_outcome(canary_arm, context.desired, status, context.now)
    transition = canary.roll_back_canary(context.snapshot, stable, canary_arm, status.analysis, outcome, context.now)
    if transition.canary is None and serving.rejected_revision is not None:  # reported immediately, without Ready in between
        return replace(
            _keep_stable_revision(serving, status),
            target_replicas=transition.arms,
            weights=transition.weights,
            requeue_after=transition.requeue_after,
        )
    return _from_transition(serving, transition, serving.rejected_revision if outcome is None else None)


def _monitor_promotion(context: _ProgressionContext) -> Progression | None:
    """Advance post-promotion monitoring while pods of the previous revision are retained."""
    if context.status.previous is None or context.stable is None:
        return None
    return _progress_post_promotion(
        context.snapshot, context.desired, context.serving, context.stable, context.status.previous, context.now
    )


def _keep_desired_revision(context: _ProgressionContext) -> Progression | None:
    """Keep the stable revision where it is the desired one."""
    return context.serving if context.desired.revision == context.serving.stable_revision else None


def _adopt_serving_first_revision(context: _ProgressionContext) -> Progression | None:
    """Make a superseded first revision stable where any of its pods is ready."""
    canary_arm = context.canary_arm
    if canary_arm is None or canary_arm.revision == context.desired.revision:
        return None
    ready_pods = context.snapshot.cluster.ready_pod_count(canary_arm.revision)
    if not ready_pods:
        return None
    return _adopt_superseded_first_revision(context.serving, context.desired, canary_arm, context.status, ready_pods, context.now)


def _drop_superseded_first_revision(context: _ProgressionContext) -> _ProgressionContext:
    """Return the context without a superseded first revision, none of whose pods is ready."""
    canary_arm = context.canary_arm
    if canary_arm is None or canary_arm.revision == context.desired.revision:
        return context
    outcome = _build_superseded_outcome(canary_arm, context.desired, context.status, context.now)
    return replace(context, serving=replace(context.serving, outcome=outcome), canary_arm=None)


def _report_invalid_spec(context: _ProgressionContext) -> Progression | None:
    """Report a spec whose pods could not run."""
    problem = context.desired.problem
    if not problem:
        return None
    return replace(
        context.serving,
        phase="Failed",
        progressing=ConditionUpdate(PROGRESSING, "False", "InvalidSpec", problem),
        preflight_passed=ConditionUpdate(PREFLIGHT_PASSED, "False", "InvalidSpec", problem),
    )


def _keep_stable_after_rejection(context: _ProgressionContext) -> Progression | None:
    """Keep the stable revision while the desired one is rejected."""
    if context.serving.rejected_revision is None:
        return None
    return _keep_stable_revision(context.serving, context.status)


def _wait_for_capacity(context: _ProgressionContext) -> Progression | None:
    """Keep the stable revision until the desired one, which the cluster had no resources for, is retried."""
    if context.canary_arm is not None:
        return None
    delay = _capacity_retry_delay(context.snapshot, context.desired, context.status, context.now)
    if delay is None:
        return None
    return replace(_keep_stable_revision(context.serving, context.status), requeue_after=delay)


def _wait_for_preflight(context: _ProgressionContext) -> Progression | None:
    """Start no pods before preflight has passed."""
    if context.canary_arm is not None or context.preflight_result.allows_start:  # the record of a running canary may be lost
        return None
    has_failed = context.preflight_result.state == "Failed"
    preflight_condition = context.serving.preflight_passed
    condition = ConditionUpdate(
        PROGRESSING, "False" if has_failed else "True", preflight_condition.reason, preflight_condition.message
    )
    return replace(
        context.serving,
        phase="Failed" if has_failed else "Preflight",
        progressing=condition,
        needs_preflight_job=True,
        requeue_after=context.preflight_result.requeue_after,
    )


def _remove_unexpected_revisions(context: _ProgressionContext) -> Progression | None:
    """Start no pods while a third revision has pods."""
    if context.canary_arm is not None:
        return None
    revisions = _find_unexpected_revisions(context.snapshot, context.desired, context.stable)
    if not revisions:
        return None
    message = f"Deleting pods of orphaned revision {' and '.join(revisions)} before revision {context.desired.revision} starts."
    return replace(
        context.serving,
        phase="Preflight",
        progressing=ConditionUpdate(PROGRESSING, "True", "Preflight", message),
        needs_preflight_job=True,
        requeue_after=ORPHAN_REQUEUE_DELAY,
    )


def _start_first_revision(context: _ProgressionContext) -> Progression | None:
    """Start the pods of the first revision."""
    if context.stable is not None:
        return None
    serving = replace(context.serving, needs_preflight_job=True)
    return _progress_first_revision(context.snapshot, context.desired, serving, context.canary_arm, context.now)


def _adopt_without_pods(context: _ProgressionContext) -> Progression | None:
    """Make the desired revision stable without a canary where spec.replicas is 0."""
    if context.replicas != 0 or context.canary_arm is not None:
        return None
    return _adopt_as_stable(context.serving, context.desired, None, context.status, "spec.replicas is 0", context.now)


def _wait_for_start_permission(context: _ProgressionContext) -> Progression | None:
    """Start no canary while the concurrency limits are reached."""
    stable = context.stable
    if context.canary_arm is not None or stable is None or _may_start_canary(context.snapshot, context.desired, stable):
        return None
    return _wait_for_slot(context.serving, context.desired, context.snapshot.operator.start_permission.wait_reason)


_Policy = Callable[[_ProgressionContext], Progression | None]
_POLICIES_BEFORE_SUPERSEDING: tuple[_Policy, ...] = (
    _reverse_blocked_rollback,
    _roll_back_superseded_canary,
    _monitor_promotion,
    _keep_desired_revision,
    _adopt_serving_first_revision,
)
"""Policies that first finish what is in progress, tried in this order."""
_POLICIES_OF_DESIRED_REVISION: tuple[_Policy, ...] = (
    _report_invalid_spec,
    _keep_stable_after_rejection,
    _wait_for_capacity,
    _wait_for_preflight,
    _remove_unexpected_revisions,
    _start_first_revision,
    _adopt_without_pods,
    _wait_for_start_permission,
)
"""Policies that hold the desired revision back, or make it stable without a canary, tried in this order."""


def _progress_canary(context: _ProgressionContext) -> Progression:
    """Start or advance the canary; start post-promotion monitoring once it is promoted."""
    snapshot, desired, stable, canary_arm = context.snapshot, context.desired, context.stable, context.canary_arm
    assert stable is not None  # else it is a first revision
    transition = (
        canary.start_canary(snapshot, desired, stable, context.now)
        if canary_arm is None
        else canary.advance_canary(snapshot, desired, stable, canary_arm, context.now)
    )
    outcome = transition.outcome
    if outcome is not None and outcome.result == "Promoted":
        assert canary_arm is not None
        monitoring = post_promotion.start_monitoring(snapshot, stable, canary_arm, transition.analysis, context.now)
        promoted = replace(
            _from_transition(context.serving, transition, None),
            stable_revision=desired.revision,
            target_replicas=ArmReplicas(context.replicas),
        )
        return _from_post_promotion(
            promoted,
            monitoring,
            reference_acceptance_length=post_promotion.read_reference_acceptance_length(transition.analysis),
        )
    rejected_revision = desired.revision if outcome is not None and outcome.retry_time is None else None
    return replace(_from_transition(context.serving, transition, rejected_revision), needs_preflight_job=True)


# -------------------------------------------------------------------------------------------------------- results of other parts
def _from_transition(serving: Progression, transition: CanaryTransition, rejected_revision: str | None) -> Progression:
    """Return the progression with the result of a canary transition."""
    phase: Phase = transition.canary.phase if transition.canary is not None else "Ready"
    return replace(
        serving,
        phase=phase,
        progressing=transition.progressing,
        target_replicas=transition.arms,
        canary=transition.canary,
        weights=transition.weights,
        analysis=transition.analysis,
        outcome=transition.outcome,
        requeue_after=transition.requeue_after,
        rejected_revision=rejected_revision,
    )


def _progress_post_promotion(
    snapshot: Snapshot, desired: DesiredRevision, serving: Progression, stable: Arm, previous: PreviousArm, now: datetime
) -> Progression:
    """Return the progression while pods of the previous revision are retained."""
    status = snapshot.resource.status or Status()
    if desired.revision == stable.revision:
        return _from_post_promotion(
            serving, post_promotion.advance_monitoring(snapshot, stable, previous, now), rejected_revision=desired.revision
        )
    if desired.revision == previous.revision and not desired.problem:
        reason = "The spec was reverted to the previous revision."
        transition = post_promotion.revert_promotion(snapshot, stable, previous, reason, status.analysis, now, "Superseded")
        return _from_post_promotion(serving, transition)
    rollout_pods = RolloutPods.from_snapshot(snapshot, previous.revision, stable.revision, now)
    if post_promotion.count_required_previous_pods(rollout_pods):
        # The promoted pods cannot do without them, so one of the two revisions has to become complete first.
        reason = f"The spec has changed, and only {rollout_pods.canary.counts.ready} promoted pods are ready."
        return _from_post_promotion(
            serving, post_promotion.revert_promotion(snapshot, stable, previous, reason, status.analysis, now, "Superseded")
        )
    message = (
        f"Deleting the pods of revision {previous.revision}, retained since the promotion of {stable.revision}, "
        "before the next canary."
    )
    transition = post_promotion.PostPromotionTransition(
        None,
        post_promotion.close_analysis(status.analysis),
        serving.weights,
        ConditionUpdate(PROGRESSING, "True", "Preflight", message),
    )
    return replace(_from_post_promotion(serving, transition), phase="Preflight", requeue_after=timedelta(0))


def _from_post_promotion(
    serving: Progression,
    transition: post_promotion.PostPromotionTransition,
    rejected_revision: str | None = None,
    reference_acceptance_length: float | None = None,
) -> Progression:
    """Return the progression with the result of post-promotion monitoring. `rejected_revision`: not tried again if the
    promotion is reverted."""
    if transition.rollback is not None:
        assert transition.rollback_revision is not None
        return replace(
            _from_transition(serving, transition.rollback, rejected_revision), stable_revision=transition.rollback_revision
        )
    return replace(
        serving,
        phase=transition.previous.phase if transition.previous else "Ready",
        progressing=transition.progressing,
        weights=transition.weights,
        analysis=transition.analysis,
        previous=transition.previous,
        reference_acceptance_length=reference_acceptance_length,
        requeue_after=transition.requeue_after,
    )


def _find_unexpected_revisions(snapshot: Snapshot, desired: DesiredRevision, stable: Arm | None) -> list[str]:
    """Return revisions with a Deployment beside the stable and the desired one: an operator that was killed may have left
    them."""
    owner_uid, expected = snapshot.resource.metadata.uid, {desired.revision, stable.revision if stable else None}
    deployment_labels = [
        read_labels(deployment)
        for deployment in snapshot.cluster.children_of_kind("Deployment")
        if is_owned_by(deployment, owner_uid)
    ]
    # A remaining control stands in as long as it is needed (children/desired.py), and delays nothing.
    existing = {labels.get(naming.REVISION_LABEL) for labels in deployment_labels if labels.get(naming.CONTROL_LABEL) != "true"}
    return sorted(revision for revision in existing - expected if revision is not None)


def _find_unrecorded_revision(
    snapshot: Snapshot, desired: DesiredRevision, status: Status, stable: Arm, now: datetime
) -> str | None:
    """Return a revision that the status does not name and whose ready pods stand in for stable ones.

    The status may have been lost, or could not be written. The revision that the last rollout abandoned counts only where no
    stable pod is ready.
    """
    if status.previous is not None:
        return None
    candidates = _find_unexpected_revisions(snapshot, desired, stable)
    stands_in_for_stable = (
        canary.is_stable_broken(snapshot.cluster, stable) and _read_rejected_revision(snapshot.resource, desired) is None
    )
    if desired.revision != stable.revision and not stands_in_for_stable:
        candidates.append(desired.revision)
    if snapshot.cluster.ready_pod_count(stable.revision):
        candidates = [revision for revision in candidates if revision != blocked_rollback.find_abandoned_revision(status)]
    unrecorded = next((revision for revision in candidates if snapshot.cluster.ready_pod_count(revision)), None)
    return unrecorded if unrecorded is not None and count_missing_ready_pods(snapshot, (stable.revision,), now) else None


def _with_current_replicas_and_weights(
    progression: Progression, snapshot: Snapshot, status: Status, replicas: int
) -> Progression:
    """Return the progression with the replicas and weights of the arms as they were last requested.

    Where the rollout is suspended without being paused, they are applied again: then an arm without a ready pod gets no
    weight.
    """
    stable, canary, previous = status.stable, status.canary, status.previous
    if stable is not None and previous is not None:
        weights = _read_status_weights(snapshot, stable=(stable, False), previous=(previous, False))
        return replace(progression, target_replicas=ArmReplicas(replicas), weights=weights)
    if stable is None or canary is None:
        return replace(progression, target_replicas=ArmReplicas(replicas) if canary is None else ArmReplicas(0, canary.replicas))
    arms: dict[str, tuple[Arm, bool]] = {"stable": (stable, False), "canary": (canary, False)}
    control_replicas = canary.control.replicas if canary.control else 0
    if canary.control is not None:
        arms["control"] = (canary.control, True)
    elif (
        snapshot.is_rollout_suspended
        and (control_deployment := snapshot.cluster.deployment(stable.revision, control=True)) is not None
    ):
        # It was to be removed, and no arm loses pods now: its pods can stand in for stable ones.
        arms["control"] = (stable.model_copy(update={"weight": 0}), True)
        control_replicas = control_deployment["spec"]["replicas"]
    return replace(
        progression,
        target_replicas=ArmReplicas(stable.replicas, canary.replicas, control_replicas),
        weights=_read_status_weights(snapshot, **arms),
    )


def _read_status_weights(snapshot: Snapshot, **arms: tuple[Arm, bool]) -> dict[str, int]:
    """Return the arms' weights as the status shows them. Each arm comes with a flag that its pods are control pods."""
    weights = {name: TOTAL_WEIGHT * (arm.weight or 0) // 100 for name, (arm, _) in arms.items()}
    if not snapshot.is_rollout_suspended:
        return weights
    ready_pods = {
        name: snapshot.cluster.ready_pod_count(arm.revision, control=is_control) for name, (arm, is_control) in arms.items()
    }
    return redirect_to_ready_arms(weights, ready_pods)


def _read_rejected_revision(resource: SpeculativeDeployment, desired: DesiredRevision) -> str | None:
    """Return the desired revision where it was rejected and nobody has requested a retry; else None."""
    status = resource.status or Status()
    retry_request = read_retry_request(resource)
    if status.rejected_revision != desired.revision or (retry_request is not None and retry_request != status.last_handled_retry):
        return None
    return status.rejected_revision


def read_retry_request(resource: SpeculativeDeployment) -> str | None:
    """Return the value of the annotation by which a user has a revision tried again, as the status stores it.

    Of a long value that is a digest, because it only matters whether the value differs.
    """
    value = resource.metadata.annotations.get(RETRY_ANNOTATION)
    return value if value is None or len(value) <= _MAX_RETRY_VALUE_CHARACTERS else hashlib.sha256(value.encode()).hexdigest()


def _capacity_retry_delay(snapshot: Snapshot, desired: DesiredRevision, status: Status, now: datetime) -> timedelta | None:
    """Return the time until the revision, for which the cluster had no resources, is retried; None when it may be."""
    last_outcome = status.rollout_history[0] if status.rollout_history else None
    if (
        last_outcome is None
        or last_outcome.revision != desired.revision
        or last_outcome.retry_time is None
        or now >= last_outcome.retry_time
    ):
        return None
    retry_request = read_retry_request(snapshot.resource)
    return None if retry_request is not None and retry_request != status.last_handled_retry else last_outcome.retry_time - now


def _keep_stable_revision(serving: Progression, status: Status) -> Progression:
    """Return the progression in which the desired revision was rejected, or waits for resources, and the stable one keeps
    serving."""
    last_outcome = next(
        (outcome for outcome in status.rollout_history if serving.rejected_revision in (None, outcome.revision)), None
    )
    revision = serving.rejected_revision or (last_outcome.revision if last_outcome is not None else "")
    retry_message = (
        f"Revision {revision} is not retried until the spec changes or the annotation {RETRY_ANNOTATION} gets a new value."
    )
    if serving.rejected_revision is None and last_outcome is not None and last_outcome.retry_time is not None:
        retry_message = (
            f"Revision {revision} is retried at {last_outcome.retry_time:%H:%M:%S} UTC, or when the annotation "
            f"{RETRY_ANNOTATION} gets a new value."
        )
    message = f"{last_outcome.message} {retry_message}" if last_outcome else retry_message
    if last_outcome is not None and last_outcome.result == "Failed":
        condition = ConditionUpdate(PROGRESSING, "False", "ProgressDeadlineExceeded", message)
        return replace(serving, phase="Failed", progressing=condition)
    return replace(serving, phase="RolledBack", progressing=ConditionUpdate(PROGRESSING, "False", "RolledBack", message))


def _may_start_canary(snapshot: Snapshot, desired: DesiredRevision, stable: Arm) -> bool:
    """Return whether the canary may start, however many others are in progress."""
    if (
        "Rollout" in snapshot.operator.start_permission.allowed_purposes or desired.trial is not None
    ):  # a trial already holds its slot
        return True
    is_promotion_requested = canary.read_manual_action(snapshot.resource, desired.revision) == "promote"
    return is_promotion_requested or not snapshot.cluster.ready_pod_count(stable.revision)


def _wait_for_slot(serving: Progression, desired: DesiredRevision, wait_reason: str) -> Progression:
    """Return the progression in which preflight has passed and the canary has to wait."""
    message = f"Revision {desired.revision} passed preflight"
    if not wait_reason:  # the claim is not written yet, so its rank is unknown
        condition = ConditionUpdate(PROGRESSING, "True", "Preflight", f"{message}.")
        return replace(serving, phase="Preflight", progressing=condition, needs_preflight_job=True, claims_slot=True)
    condition = ConditionUpdate(PROGRESSING, "True", "Queued", f"{message} and is queued: {wait_reason}.")
    return replace(serving, phase="Queued", progressing=condition, needs_preflight_job=True, claims_slot=True)


def _progress_first_revision(
    snapshot: Snapshot, desired: DesiredRevision, serving: Progression, canary_arm: CanaryArm | None, now: datetime
) -> Progression:
    """Start pods of the first revision; it is stable when all are ready, or some once its deadline has passed."""
    resource = snapshot.resource
    spec, status = resource.spec, resource.status or Status()
    live_pods = snapshot.cluster.live_pods(desired.revision)
    ready_pods = sum(pod_failures.is_pod_ready(pod) for pod in live_pods)
    if canary_arm is not None and ready_pods >= spec.replicas:
        reason = f"{ready_pods}/{spec.replicas} pods ready" if spec.replicas else "spec.replicas is 0"
        return _adopt_as_stable(serving, desired, canary_arm, status, reason, now)
    arm = canary_arm or CanaryArm(**dict(desired.arm), change=desired.describe_change(status), start_time=now)
    failure = snapshot.cluster.pod_failure(desired.revision)
    message = f"First revision {desired.revision}: {ready_pods}/{spec.replicas} pods ready" + (
        f": {failure.message}" if failure else ""
    )
    target_replicas = ArmReplicas(0, spec.replicas)
    remaining = arm.start_time + spec.rollout.progress_deadline - now
    if remaining > timedelta(0):
        condition = ConditionUpdate(PROGRESSING, "True", failure.reason if failure else "Starting", message)
        return replace(
            serving, phase="Starting", progressing=condition, canary=arm, target_replicas=target_replicas, requeue_after=remaining
        )
    if canary_arm is not None and ready_pods:
        reason = f"{ready_pods}/{spec.replicas} pods ready after spec.rollout.progressDeadline"
        return _adopt_as_stable(serving, desired, canary_arm, status, reason, now)
    # Its pods stay: nothing else serves, and they show the problem.
    late_message = (
        f"{message.rstrip('.')}. spec.rollout.progressDeadline has passed; its pods stay, because they show the problem."
    )
    condition = ConditionUpdate(PROGRESSING, "False", "ProgressDeadlineExceeded", late_message)
    return replace(serving, phase="Failed", progressing=condition, canary=arm, target_replicas=target_replicas)


def _adopt_as_stable(
    serving: Progression, desired: DesiredRevision, canary_arm: CanaryArm | None, status: Status, reason: str, now: datetime
) -> Progression:
    """Return the progression in which the revision is stable without a comparison."""
    arm = canary_arm or CanaryArm(**dict(desired.arm), change=desired.describe_change(status), start_time=now)
    outcome = build_outcome(arm, "Promoted", f"Revision {desired.revision} is stable: {reason}.", status, None, now)
    return replace(serving, stable_revision=desired.revision, outcome=outcome)


def _adopt_superseded_first_revision(
    serving: Progression, desired: DesiredRevision, canary_arm: CanaryArm, status: Status, ready_pods: int, now: datetime
) -> Progression:
    """Return the progression in which a superseded first revision with ready pods is stable, and the desired one follows by a
    canary."""
    message = (
        f"Revision {canary_arm.revision} is stable: {ready_pods}/{serving.target_replicas.stable} pods ready. "
        f"The desired revision {desired.revision} follows with a canary."
    )
    outcome = build_outcome(canary_arm, "Promoted", message, status, None, now)
    condition = ConditionUpdate(PROGRESSING, "True", "Preflight", message)
    return replace(
        serving,
        stable_revision=canary_arm.revision,
        phase="Preflight",
        progressing=condition,
        outcome=outcome,
        requeue_after=timedelta(0),
    )


def _build_superseded_outcome(canary_arm: CanaryArm, desired: DesiredRevision, status: Status, now: datetime) -> RolloutOutcome:
    """Return the outcome of the rollout in progress when another revision is desired."""
    if desired.problem:
        return build_outcome(canary_arm, "Failed", desired.problem, status, status.analysis, now)
    is_reverted = status.stable is not None and status.stable.revision == desired.revision
    reason = "The spec was reverted to the stable revision." if is_reverted else "The spec has changed."
    return build_outcome(canary_arm, "Superseded", reason, status, status.analysis, now)
