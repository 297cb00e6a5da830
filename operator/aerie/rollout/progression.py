"""Where a resource's rollout goes from here: which revisions have pods, and what is said about it.

    revision of the spec ─┬─ a canary of another revision is under way ─► that one is withdrawn first
                          ├─ pods of the revision before are kept ─────► the watch (watch.py); of another one, they go first
                          ├─ is the stable one ────────────────────────► keep it
                          ├─ was rejected ─────────────────────────────► keep the stable one, say why, wait for a new word
                          ├─ has found no room ────────────────────────► keep the stable one, try again later
                          ├─ preflight: none yet, running, refused ────► no engine pod; say what is wrong
                          └─ preflight passed ─┬─ a third revision has pods ─► these go first
                                               ├─ nothing is stable ───► its pods start; when all serve, it is stable
                                               ├─ others come first ───► it waits for its turn (slots.py)
                                               └─ otherwise ───────────► the canary (canary.py)

Guarantees: a function of its arguments; one transition at a time; at most two revisions have pods. What serves is stable: a
first revision of which any pod serves is never deleted for a change of the spec, but adopted, and the change goes out by a
canary. A new spec is taken up in every phase, a rollback that cannot end included (rollback.py). Not guaranteed: that two changes
in a row are both rolled out; the last one is, and the other is told as superseded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

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
"""Annotation by which a person has a rejected revision tried again; each new value once."""
_MAX_RETRY_VALUE_CHARACTERS = 64
"""Characters of an annotation's value that the status remembers as they are."""


@dataclass(frozen=True)
class Progression:
    """Where the rollout stands after this step."""

    stable_revision: str | None
    phase: Phase
    progressing: ConditionUpdate
    preflight_passed: ConditionUpdate
    target_replicas: ArmReplicas
    """Pods to ask for."""
    canary: CanaryArm | None = None
    """The revision whose pods are beside the stable ones, or start before there are any."""
    weights: Mapping[str, int] = field(default_factory=lambda: {"stable": TOTAL_WEIGHT})
    analysis: AnalysisStatus | None = None
    outcome: RolloutOutcome | None = None
    needs_preflight_job: bool = False
    """Whether the Job has to be there."""
    requeue_after: timedelta | None = None
    rejected_revision: str | None = None
    """The revision that is not tried again."""
    previous: PreviousArm | None = None
    """The revision before the stable one, of which pods stay for a while."""
    reference_acceptance_length: float | None = None
    """The acceptance length with which the revision was accepted that has become stable just now."""
    claims_slot: bool = False
    """Whether the rollout would begin, and claims a slot for that."""

    @property
    def routes_to_all_pods(self) -> bool:
        """Whether requests are for all pods that there are."""
        return self.previous is None or self.previous.phase == "Rechecking" or self.weights.get("previous", 0) > 0

    @property
    def exclusive_revision(self) -> str | None:
        """The revision that all requests are for, where others have pods too."""
        return None if self.routes_to_all_pods else self.stable_revision

    @property
    def canary_revision(self) -> str | None:
        """The canary's revision."""
        return self.canary.revision if self.canary is not None else None


def next_progression(
    snapshot: Snapshot, desired: DesiredRevision, preflight_result: PreflightResult, now: datetime
) -> Progression:
    """The course from what was observed."""
    resource = snapshot.resource
    status, replicas = resource.status or Status(), resource.spec.replicas
    known, stable = status.canary, status.stable
    serving = Progression(
        stable_revision=stable.revision if stable else None,
        phase="Ready",
        progressing=ConditionUpdate(PROGRESSING, "False", "Complete", f"revision {desired.revision} is rolled out"),
        preflight_passed=preflight_result.build_condition(desired.revision),
        target_replicas=ArmReplicas(replicas),
        analysis=status.analysis,
        rejected_revision=_read_rejected_revision(snapshot, desired),
    )
    if preflight_result.state not in ("Passed", "Refused") and desired.revision in (
        serving.stable_revision,
        known.revision if known else None,
    ):
        # It has pods, so it has passed, or nobody has looked; what became of the Job since says nothing about it.
        before = ConditionUpdate(PREFLIGHT_PASSED, "True", "Passed", "passed before it was rolled out")
        record = preflight_result.record or {}
        if record.get("mode") == "Off" and record.get("ok") is not True:
            before = ConditionUpdate(
                PREFLIGHT_PASSED, "Unknown", PREFLIGHT_SKIPPED_REASON, "it was rolled out with spec.rollout.preflight.mode: Off"
            )
        serving = replace(serving, preflight_passed=before)
    if resource.spec.rollout.paused:
        finding = ConditionUpdate(
            PROGRESSING, "False", "Paused", "spec.rollout.paused is true: nothing is changed until it is false"
        )
        kept = {"canary": known, "previous": status.previous, **_current_replicas_and_weights(snapshot, status, replicas)}
        return replace(serving, phase="Paused", progressing=finding, **kept)
    if (
        known is None
        and stable is not None
        and (stray := _find_unrecorded_revision(snapshot, desired, status, stable, now)) is not None
    ):
        known = build_withdrawn_canary(snapshot, stray, now)
    unwanted = known is not None and (known.revision != desired.revision or bool(desired.problem))
    if known is not None and stable is not None and known.phase == "RollingBack":
        turn = blocked_rollback.reverse_blocked_rollback(snapshot, desired, stable, known, now)
        if turn is not None:
            return replace(_from_transition(serving, turn.transition, None), stable_revision=turn.stable.revision)
    if known is not None and stable is not None and (known.phase == "RollingBack" or unwanted):
        ended = None if known.phase == "RollingBack" else _build_superseded_outcome(known, desired, status, now)
        way = canary.roll_back_canary(snapshot, stable, known, status.analysis, ended, now)
        if way.canary is None and serving.rejected_revision is not None:  # said at once, without a moment of Ready in between
            return replace(
                _keep_stable_revision(serving, status),
                target_replicas=way.arms,
                weights=way.weights,
                requeue_after=way.requeue_after,
            )
        return _from_transition(serving, way, serving.rejected_revision if ended is None else None)
    if status.previous is not None and stable is not None:
        return _progress_post_promotion(snapshot, desired, serving, stable, status.previous, now)
    if desired.revision == serving.stable_revision:
        return serving
    if known is not None and known.revision != desired.revision:  # the first one
        if count := snapshot.ready_pod_count(known.revision):
            return _adopt_superseded_first_revision(serving, desired, known, status, count, now)
        serving = replace(serving, outcome=_build_superseded_outcome(known, desired, status, now))
        known = None
    if desired.problem:
        finding = ConditionUpdate(PROGRESSING, "False", "InvalidSpec", desired.problem)
        told = ConditionUpdate(PREFLIGHT_PASSED, "False", "InvalidSpec", desired.problem)
        return replace(serving, phase="Failed", progressing=finding, preflight_passed=told)
    if serving.rejected_revision is not None:
        return _keep_stable_revision(serving, status)
    if known is None and (pause := _capacity_retry_delay(snapshot, desired, status, now)) is not None:
        return replace(_keep_stable_revision(serving, status), requeue_after=pause)
    if known is None and not preflight_result.allows_start:  # of a canary under way, the record may be gone
        refused, again = preflight_result.state == "Refused", preflight_result.requeue_after
        told = serving.preflight_passed
        finding = ConditionUpdate(PROGRESSING, "False" if refused else "True", told.reason, told.message)
        phase: Phase = "Failed" if refused else "Preflight"
        return replace(serving, phase=phase, progressing=finding, needs_preflight_job=True, requeue_after=again)
    if known is None and (others := _find_unexpected_revisions(snapshot, desired, stable)):
        message = f"pods of revision {' and '.join(others)}, which nothing asks for any more, go first"
        finding = ConditionUpdate(PROGRESSING, "True", "Preflight", message)
        return replace(
            serving, phase="Preflight", progressing=finding, needs_preflight_job=True, requeue_after=ORPHAN_REQUEUE_DELAY
        )
    if stable is None:
        return _progress_first_revision(snapshot, desired, replace(serving, needs_preflight_job=True), known, now)
    if replicas == 0 and known is None:
        return _adopt_as_stable(serving, desired, known, status, "no pods are asked for", now)
    if known is None and not _may_start_canary(snapshot, desired, stable):
        return _wait_for_slot(serving, desired, snapshot.start_permission.wait_reason)
    way = (
        canary.start_canary(snapshot, desired, stable, now)
        if known is None
        else canary.advance_canary(snapshot, desired, stable, known, now)
    )
    ended = way.outcome
    if ended is not None and ended.result == "Promoted":
        assert known is not None
        begun = post_promotion.start_monitoring(snapshot, stable, known, way.analysis, now)
        promoted = replace(
            _from_transition(serving, way, None), stable_revision=desired.revision, target_replicas=ArmReplicas(replicas)
        )
        return _from_post_promotion(promoted, begun, accepted=post_promotion.read_reference_acceptance_length(way.analysis))
    rejected = desired.revision if ended is not None and ended.retry_at is None else None
    return replace(_from_transition(serving, way, rejected), needs_preflight_job=True)


def _from_transition(serving: Progression, way: CanaryTransition, rejected: str | None) -> Progression:
    phase: Phase = way.canary.phase if way.canary is not None else "Ready"
    return replace(
        serving,
        phase=phase,
        progressing=way.progressing,
        target_replicas=way.arms,
        canary=way.canary,
        weights=way.weights,
        analysis=way.analysis,
        outcome=way.outcome,
        requeue_after=way.requeue_after,
        rejected_revision=rejected,
    )


def _progress_post_promotion(
    observed: Snapshot, wanted: DesiredRevision, serving: Progression, stable: Arm, previous: PreviousArm, now: datetime
) -> Progression:
    """Pods of the revision before are kept."""
    status = observed.resource.status or Status()
    if wanted.revision == stable.revision:
        return _from_post_promotion(
            serving, post_promotion.advance_monitoring(observed, stable, previous, now), rejected=wanted.revision
        )
    if wanted.revision == previous.revision and not wanted.problem:
        why = "The spec is that of the revision before again."
        found = post_promotion.revert_promotion(observed, stable, previous, why, status.analysis, now, "Superseded")
        return _from_post_promotion(serving, found)
    fleet = RolloutPods.from_snapshot(observed, previous.revision, stable.revision, now)
    if post_promotion.count_required_previous_pods(
        fleet
    ):  # the promoted pods cannot do without them, so one of the two has to become whole first
        why = f"The spec has changed, and only {fleet.canary.counts.ready} of its pods serve."
        return _from_post_promotion(
            serving, post_promotion.revert_promotion(observed, stable, previous, why, status.analysis, now, "Superseded")
        )
    message = f"pods of revision {previous.revision}, which were kept since the promotion of {stable.revision}, go first"
    over = post_promotion.PostPromotionTransition(
        None,
        post_promotion.close_analysis(status.analysis),
        serving.weights,
        ConditionUpdate(PROGRESSING, "True", "Preflight", message),
    )
    return replace(_from_post_promotion(serving, over), phase="Preflight", requeue_after=timedelta(0))


def _from_post_promotion(
    serving: Progression,
    found: post_promotion.PostPromotionTransition,
    rejected: str | None = None,
    accepted: float | None = None,
) -> Progression:
    """`rejected`: what is not tried again if the promotion is taken back."""
    if found.rollback is not None:
        assert found.rollback_revision is not None
        return replace(_from_transition(serving, found.rollback, rejected), stable_revision=found.rollback_revision)
    return replace(
        serving,
        phase=found.previous.phase if found.previous else "Ready",
        progressing=found.progressing,
        weights=found.weights,
        analysis=found.analysis,
        previous=found.previous,
        reference_acceptance_length=accepted,
        requeue_after=found.requeue_after,
    )


def _find_unexpected_revisions(observed: Snapshot, wanted: DesiredRevision, stable: Arm | None) -> list[str]:
    """Revisions beside the stable and the wanted one that have a Deployment: an operator that was killed may have left them."""
    owner, known = observed.resource.metadata.uid, {wanted.revision, stable.revision if stable else None}
    found = [read_labels(one) for one in observed.children_of_kind("Deployment") if is_owned_by(one, owner)]
    # A control that is left stands in as long as it is needed (children.py), and holds nothing up.
    there = {one.get(naming.REVISION_LABEL) for one in found if one.get(naming.CONTROL_LABEL) != "true"}
    return sorted(revision for revision in there - known if revision is not None)


def _find_unrecorded_revision(
    observed: Snapshot, wanted: DesiredRevision, status: Status, stable: Arm, now: datetime
) -> str | None:
    """A revision that the status does not name, because it was lost or could not be written, and whose pods serve for stable
    ones. One that the last rollout gave up is such a revision only where no stable pod serves."""
    if status.previous is not None:
        return None
    others = _find_unexpected_revisions(observed, wanted, stable)
    takes_its_place = canary.is_stable_broken(observed, stable) and _read_rejected_revision(observed, wanted) is None
    if wanted.revision != stable.revision and not takes_its_place:
        others.append(wanted.revision)
    if observed.ready_pod_count(stable.revision):
        others = [one for one in others if one != blocked_rollback.find_abandoned_revision(status)]
    found = next((one for one in others if observed.ready_pod_count(one)), None)
    return found if found is not None and count_missing_ready_pods(observed, (stable.revision,), now) else None


def _current_replicas_and_weights(observed: Snapshot, status: Status, replicas: int) -> dict[str, Any]:
    """Pods and weights of the arms as they were asked for last; where that is put into force again, because the rollout rests
    without being paused, without weight for an arm of which nobody serves."""
    stable, canary, previous = status.stable, status.canary, status.previous
    if stable is not None and previous is not None:
        weights = _read_status_weights(observed, stable=(stable, False), previous=(previous, False))
        return {"arms": ArmReplicas(replicas), "weights": weights}
    if stable is None or canary is None:
        return {"arms": ArmReplicas(replicas) if canary is None else ArmReplicas(0, canary.replicas)}
    arms: dict[str, tuple[Arm, bool]] = {"stable": (stable, False), "canary": (canary, False)}
    control = canary.control.replicas if canary.control else 0
    if canary.control is not None:
        arms["control"] = (canary.control, True)
    elif observed.is_rollout_suspended and (left := observed.deployment(stable.revision, control=True)) is not None:
        # It was to go, and no arm loses pods now: its pods can stand in for stable ones.
        arms["control"] = (stable.model_copy(update={"weight": 0}), True)
        control = left["spec"]["replicas"]
    return {"arms": ArmReplicas(stable.replicas, canary.replicas, control), "weights": _read_status_weights(observed, **arms)}


def _read_status_weights(observed: Snapshot, **arms: tuple[Arm, bool]) -> dict[str, int]:
    """The arms' weights as the status shows them; with each arm, whether its pods are control pods."""
    weights = {name: TOTAL_WEIGHT * (arm.weight or 0) // 100 for name, (arm, _) in arms.items()}
    if not observed.is_rollout_suspended:
        return weights
    serving = {name: observed.ready_pod_count(arm.revision, control=control) for name, (arm, control) in arms.items()}
    return redirect_to_ready_arms(weights, serving)


def _read_rejected_revision(observed: Snapshot, wanted: DesiredRevision) -> str | None:
    """The wanted revision, where it was rejected and nobody has asked to try it again."""
    status = observed.resource.status or Status()
    retry = read_retry_request(observed.resource)
    if status.rejected != wanted.revision or (retry is not None and retry != status.retry):
        return None
    return status.rejected


def read_retry_request(resource: SpeculativeDeployment) -> str | None:
    """The value of the annotation by which a person has a revision tried again, as the status remembers it: a digest of a long
    value, because what matters is only whether it is another one."""
    said = resource.metadata.annotations.get(RETRY_ANNOTATION)
    return said if said is None or len(said) <= _MAX_RETRY_VALUE_CHARACTERS else hashlib.sha256(said.encode()).hexdigest()


def _capacity_retry_delay(observed: Snapshot, wanted: DesiredRevision, status: Status, now: datetime) -> timedelta | None:
    """Until the revision, for which the cluster had no room, is tried again; None when it may be."""
    last = status.history[0] if status.history else None
    if last is None or last.revision != wanted.revision or last.retry_at is None or now >= last.retry_at:
        return None
    retry = read_retry_request(observed.resource)
    return None if retry is not None and retry != status.retry else last.retry_at - now


def _keep_stable_revision(serving: Progression, status: Status) -> Progression:
    """The wanted revision was rejected, or waits for room; the stable one goes on serving."""
    last = next((one for one in status.history if serving.rejected_revision in (None, one.revision)), None)
    how = f"It is not tried again until the spec changes, or the resource is annotated with a new value of {RETRY_ANNOTATION}."
    if serving.rejected_revision is None and last is not None and last.retry_at is not None:
        how = f"It is tried again at {last.retry_at:%H:%M:%S} UTC, or when the resource is annotated with a new value of {RETRY_ANNOTATION}."
    why = f"{last.reason} {how}" if last else how
    if last is not None and last.result == "Failed":
        finding = ConditionUpdate(PROGRESSING, "False", "ProgressDeadlineExceeded", why)
        return replace(serving, phase="Failed", progressing=finding)
    return replace(serving, phase="RolledBack", progressing=ConditionUpdate(PROGRESSING, "False", "RolledBack", why))


def _may_start_canary(observed: Snapshot, wanted: DesiredRevision, stable: Arm) -> bool:
    """Whether its canary may begin, however many others are under way."""
    if "Rollout" in observed.start_permission.allowed_purposes or wanted.trial is not None:  # a trial has had its turn
        return True
    asked_for = canary.read_manual_action(observed.resource, wanted.revision) == "promote"
    return asked_for or not observed.ready_pod_count(stable.revision)


def _wait_for_slot(serving: Progression, wanted: DesiredRevision, waits_for: str) -> Progression:
    """Preflight has passed, and the canary has to wait."""
    told = f"revision {wanted.revision} has passed preflight"
    if not waits_for:  # the claim is not written yet, and whether anybody comes first is not known
        finding = ConditionUpdate(PROGRESSING, "True", "Preflight", told)
        return replace(serving, phase="Preflight", progressing=finding, needs_preflight_job=True, claims_slot=True)
    finding = ConditionUpdate(PROGRESSING, "True", "Queued", f"{told} and waits for its turn: {waits_for}")
    return replace(serving, phase="Queued", progressing=finding, needs_preflight_job=True, claims_slot=True)


def _progress_first_revision(
    observed: Snapshot, wanted: DesiredRevision, serving: Progression, known: CanaryArm | None, now: datetime
) -> Progression:
    """Pods of the first revision start; when all serve, or some when the time for it is over, it is stable."""
    resource = observed.resource
    spec, status = resource.spec, resource.status or Status()
    group = observed.live_pods(wanted.revision)
    count = sum(pod_failures.is_pod_ready(one) for one in group)
    if known is not None and count >= spec.replicas:
        why = f"all {spec.replicas} pods serve" if spec.replicas else "no pods are asked for"
        return _adopt_as_stable(serving, wanted, known, status, why, now)
    arm = known or CanaryArm(**dict(wanted.arm), change=wanted.describe_change(status), started_at=now)
    trouble = observed.pod_failure(wanted.revision)
    told = f"{count} of {spec.replicas} pods of revision {wanted.revision} serve" + (f": {trouble.message}" if trouble else "")
    arms = ArmReplicas(0, spec.replicas)
    left = arm.started_at + spec.rollout.progress_deadline - now
    if left > timedelta(0):
        finding = ConditionUpdate(PROGRESSING, "True", trouble.reason if trouble else "Starting", told)
        return replace(serving, phase="Starting", progressing=finding, canary=arm, target_replicas=arms, requeue_after=left)
    if known is not None and count:
        why = f"{count} of {spec.replicas} pods serve, and spec.rollout.progressDeadline is over"
        return _adopt_as_stable(serving, wanted, known, status, why, now)
    # Its pods stay: nothing else serves, and they show what is wrong.
    late = f"{told}, and spec.rollout.progressDeadline is over."
    finding = ConditionUpdate(PROGRESSING, "False", "ProgressDeadlineExceeded", late)
    return replace(serving, phase="Failed", progressing=finding, canary=arm, target_replicas=arms)


def _adopt_as_stable(
    serving: Progression, wanted: DesiredRevision, known: CanaryArm | None, status: Status, why: str, now: datetime
) -> Progression:
    """The revision is stable without a comparison."""
    arm = known or CanaryArm(**dict(wanted.arm), change=wanted.describe_change(status), started_at=now)
    outcome = build_outcome(arm, "Promoted", f"Revision {wanted.revision}: {why}.", status, None, now)
    return replace(serving, stable_revision=wanted.revision, outcome=outcome)


def _adopt_superseded_first_revision(
    serving: Progression, wanted: DesiredRevision, known: CanaryArm, status: Status, count: int, now: datetime
) -> Progression:
    """The first revision, of which some pods serve while another one is asked for already: that goes out by a canary."""
    why = (
        f"{count} of {serving.target_replicas.stable} pods serve; revision {wanted.revision}, which is asked for by now, follows"
    )
    outcome = build_outcome(known, "Promoted", f"Revision {known.revision}: {why}.", status, None, now)
    finding = ConditionUpdate(PROGRESSING, "True", "Preflight", f"revision {known.revision}: {why}")
    return replace(
        serving,
        stable_revision=known.revision,
        phase="Preflight",
        progressing=finding,
        outcome=outcome,
        requeue_after=timedelta(0),
    )


def _build_superseded_outcome(known: CanaryArm, wanted: DesiredRevision, status: Status, now: datetime) -> RolloutOutcome:
    """How the rollout under way ends when something else is wanted."""
    if wanted.problem:
        return build_outcome(known, "Failed", wanted.problem, status, status.analysis, now)
    back = status.stable is not None and status.stable.revision == wanted.revision
    why = "The spec is that of the stable revision again." if back else "The spec has changed."
    return build_outcome(known, "Superseded", why, status, status.analysis, now)
