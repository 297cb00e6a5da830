"""The status after a step: what people and the next step read.

Guarantee: pure; nothing in it follows the clock alone but that a gateway has been silent for too long, so that it is written only
when something has happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypeVar

from aerie.analysis import post_promotion
from aerie.api.status import Arm, CanaryArm, PreviousArm, Status
from aerie.manifests import naming
from aerie.rollout.capacity.traffic_weights import weight_to_percent
from aerie.rollout.conditions import DEGRADED, READY, ConditionUpdate, build_conditions
from aerie.rollout.facts.arm_metrics import MIN_ACCEPTANCE_LENGTH, with_arm_metrics
from aerie.rollout.facts.route_status import check_route_status_timeout, route_rejection_message
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.progression import Progression, read_retry_request
from aerie.rollout.revision.desired import DesiredRevision
from aerie.rollout.revision.recovery import read_recorded_arm
from aerie.rollout.status.hold import VERSION_SKEW, find_hold_condition
from aerie.rollout.trials.effective_setting import EffectiveSetting, TrialDecision
from aerie.rollout.trials.status import build_tuning_status

MAX_HISTORY_OUTCOMES = 10
METRICS_UNAVAILABLE = "MetricsUnavailable"
MAX_ACCEPTANCE_LENGTH_DROP = 0.15
"""Share by which the acceptance length may lie below that of the acceptance, before it is worth a warning. Beside the stable pods
there is nothing to compare with, and requests of another hour may well make some percent."""
_ArmT = TypeVar("_ArmT", bound=Arm)


def build_status(
    snapshot: Snapshot,
    desired: DesiredRevision,
    progression: Progression,
    name_conflicts: list[Any],
    now: datetime,
    effective: EffectiveSetting,
    trial_decision: TrialDecision,
) -> Status:
    """The status. `taken`: objects of others that bear a name which Aerie needs."""
    resource = snapshot.resource
    before = resource.status or Status()
    stable = _build_stable_arm(snapshot, desired, progression, before)
    canary = _build_canary_arm(snapshot, progression, before)
    control = canary.control if canary is not None else None
    previous = _build_previous_arm(snapshot, progression)
    arms = [arm for arm in (stable, canary, control, previous if progression.routes_to_all_pods else None) if arm is not None]
    tuning = build_tuning_status(snapshot, effective, trial_decision, progression, stable, now)
    findings = [
        _build_ready_condition(snapshot, stable, canary, progression),
        progression.progressing,
        progression.preflight_passed,
        _build_degraded_condition(snapshot, progression, name_conflicts, stable, now),
        *([tuning.condition] if tuning.condition is not None else []),
    ]
    return Status(
        observed_generation=resource.metadata.generation,
        phase=progression.phase,
        conditions=build_conditions(findings, resource.status, resource.metadata.generation, now),
        replicas=sum(arm.replicas for arm in arms),
        ready_replicas=sum(arm.ready_replicas for arm in arms),
        selector=",".join(
            f"{key}={value}"
            for key, value in naming.serving_selector_labels(resource.metadata.name, progression.exclusive_revision).items()
        ),
        stable=stable,
        canary=canary,
        previous=previous,
        analysis=progression.analysis,
        speculation=tuning.speculation,
        rejected=progression.rejected_revision,
        retry=read_retry_request(resource),
        history=([*([progression.outcome] if progression.outcome else []), *before.history])[:MAX_HISTORY_OUTCOMES],
    )


def _build_stable_arm(observed: Snapshot, wanted: DesiredRevision, course: Progression, before: Status) -> Arm | None:
    if course.stable_revision is None:
        return None
    if course.stable_revision == wanted.revision:
        arm = wanted.arm
    else:  # a spec of before: what is known of it is in the status
        known = _find_arm_status(before, course.stable_revision) or read_recorded_arm(observed, course.stable_revision)
        arm = Arm(**{name: getattr(known, name) for name in Arm.model_fields})
    arm = _with_pod_counts(observed, arm, course.target_replicas.stable)
    arm = arm.model_copy(update={"weight": _traffic_percent(observed, course, "stable")})
    last = _find_arm_status(before, arm.revision)
    accepted = course.reference_acceptance_length or (last.accepted_length if last is not None else None)
    arm = arm.model_copy(update={"accepted_length": accepted})
    found = observed.arm_metrics(arm.revision)
    return with_arm_metrics(arm, last, found, status_changes=_has_analysis_advanced(course, before))


def _has_analysis_advanced(course: Progression, before: Status) -> bool:
    """Whether the analysis has gone on, which is written in any case."""
    return course.canary is not None and course.analysis != before.analysis


def _find_arm_status(before: Status, revision: str) -> Arm | None:
    """What the status said of the revision, in whatever arm it was."""
    arms = (before.stable, before.canary, before.previous)
    return next((arm for arm in arms if arm is not None and arm.revision == revision), None)


def _build_previous_arm(observed: Snapshot, course: Progression) -> PreviousArm | None:
    if course.previous is None:
        return None
    arm = _with_pod_counts(observed, course.previous, course.previous.replicas)
    return arm.model_copy(update={"weight": _weight_percent(course.weights, "previous")})


def _weight_percent(weights: Mapping[str, int], arm: str) -> int:
    """The arm's share in whole percents, which sum to 100: the stable arm has what the others leave."""
    if arm != "stable":
        return weight_to_percent(weights.get(arm, 0))
    return max(0, 100 - sum(weight_to_percent(weight) for name, weight in weights.items() if name != "stable"))


def _build_canary_arm(observed: Snapshot, course: Progression, before: Status) -> CanaryArm | None:
    if course.canary is None:
        return None
    arm = _with_pod_counts(observed, course.canary, course.target_replicas.canary)
    known = before.canary if before.canary and before.canary.revision == arm.revision else None
    control = None
    if course.target_replicas.control and course.stable_revision is not None:
        base = known.control if known and known.control else Arm(revision=course.stable_revision)
        control = _with_pod_counts(observed, base, course.target_replicas.control, control=True)
        control = control.model_copy(update={"weight": _traffic_percent(observed, course, "control")})
        last = known.control if known else None
        found = observed.arm_metrics(course.stable_revision, control=True)
        control = with_arm_metrics(control, last, found, status_changes=_has_analysis_advanced(course, before))
    weight = _traffic_percent(observed, course, "canary") if course.stable_revision is not None else None
    arm = arm.model_copy(update={"control": control, "weight": weight})
    return with_arm_metrics(arm, known, observed.arm_metrics(arm.revision), status_changes=_has_analysis_advanced(course, before))


def _with_pod_counts(observed: Snapshot, arm: _ArmT, replicas: int, *, control: bool = False) -> _ArmT:
    serving = observed.ready_pod_count(arm.revision, control=control)
    return arm.model_copy(update={"replicas": replicas, "ready_replicas": serving})


def _traffic_percent(observed: Snapshot, course: Progression, arm: str) -> int:
    """Percent of the traffic: by the route in mode Gateway, by serving pods in mode Service."""
    if observed.resource.spec.rollout.traffic.gateway is not None or course.canary is None or course.stable_revision is None:
        weights: Mapping[str, int] = course.weights
        return _weight_percent(weights, arm)
    serving = {
        "stable": observed.ready_pod_count(course.stable_revision),
        "canary": observed.ready_pod_count(course.canary.revision),
        "control": observed.ready_pod_count(course.stable_revision, control=True),
    }
    return round(100 * serving[arm] / max(1, sum(serving.values())))


def _build_ready_condition(
    observed: Snapshot, stable: Arm | None, canary: CanaryArm | None, course: Progression
) -> ConditionUpdate:
    replicas = observed.resource.spec.replicas
    if stable is None:
        told = course.progressing.message  # with pods under way it counts them
        return ConditionUpdate(READY, "False", course.progressing.reason, told if canary else f"no pod has been started: {told}")
    if replicas == 0:
        return ConditionUpdate(READY, "True", "ScaledToZero", "spec.replicas is 0: no pod is asked for")
    arms = [arm for arm in (stable, canary, canary.control if canary else None) if arm is not None]
    serving, owed = sum(arm.ready_replicas for arm in arms), stable.replicas if canary is None else min(replicas, stable.replicas)
    counted = stable.ready_replicas if canary is None else serving
    told = f"{min(counted, replicas) if canary else counted} of {replicas} pods serve"
    if stable.ready_replicas >= owed and counted >= replicas:
        return ConditionUpdate(READY, "True", "Serving", told)
    trouble = observed.pod_failure(stable.revision)
    return ConditionUpdate(
        READY, "False", trouble.reason if trouble else "Starting", f"{told}: {trouble.message}" if trouble else told
    )


def _build_degraded_condition(
    observed: Snapshot, course: Progression, taken: list[Any], stable: Arm | None, now: datetime
) -> ConditionUpdate:
    if (why := find_hold_condition(observed)) is not None:
        return why
    if taken:
        named = " and ".join(f"{item['kind']} {item['metadata']['name']} belongs to {_owner_name(item)}" for item in taken)
        it, name = ("it", "the name") if len(taken) == 1 else ("them", "the names")
        message = f"{named}, and Aerie needs {name}: delete or rename {it}, or rename the resource"
        return ConditionUpdate(DEGRADED, "True", "NameTaken", message)
    trouble = observed.pod_failure(course.stable_revision) if course.stable_revision else None
    if (trouble is None or trouble.is_transient) and (unrouted := route_rejection_message(observed)):
        return ConditionUpdate(DEGRADED, "True", "RouteNotAccepted", unrouted)
    if trouble is not None and not trouble.is_transient:
        return ConditionUpdate(DEGRADED, "True", trouble.reason, trouble.message)
    if unheard := check_route_status_timeout(observed, now)[0]:
        return ConditionUpdate(DEGRADED, "True", "RouteNotAnswered", unheard)
    if source := _metrics_source_error(observed):
        return ConditionUpdate(DEGRADED, "True", METRICS_UNAVAILABLE, source)
    if observed.crd_problem:
        return ConditionUpdate(DEGRADED, "True", VERSION_SKEW, observed.crd_problem)
    if (drifted := _build_regression_condition(stable)) is not None:
        return drifted
    return ConditionUpdate(DEGRADED, "False", "AsExpected", "nothing is amiss")


def _owner_name(item: Any) -> str:
    references = item["metadata"].get("ownerReferences") or []
    return next((f"{owner['kind']} {owner['name']}" for owner in references if owner.get("controller")), "somebody else")


def _metrics_source_error(observed: Snapshot) -> str:
    """What is wrong with the source of the metrics; as the status has it, while an operator that has just begun does not know."""
    if observed.metrics_source_error is not None or observed.resource.spec.metrics.source is None:
        return observed.metrics_source_error or ""
    status = observed.resource.status
    known = (one for one in (status.conditions if status else []) if (one.type, one.reason) == (DEGRADED, METRICS_UNAVAILABLE))
    return next((one.message for one in known), "")


def _build_regression_condition(stable: Arm | None) -> ConditionUpdate | None:
    """That the stable pods' acceptance length is 1.00, or far below that with which they were accepted; None while neither is."""
    if stable is None or stable.acceptance_length is None:
        return None
    trimmed = stable.setting is not None and stable.setting.mode == "Adaptive"  # drafts that the engine trims count as rejected
    if stable.acceptance_length <= MIN_ACCEPTANCE_LENGTH and stable.accepted_length != MIN_ACCEPTANCE_LENGTH and not trimmed:
        return ConditionUpdate(DEGRADED, "True", "DraftsRejected", _no_acceptance_message(stable))
    fall = 1 - stable.acceptance_length / stable.accepted_length if stable.accepted_length else 0.0
    if fall <= MAX_ACCEPTANCE_LENGTH_DROP:
        return None
    message = (
        f"acceptance length is {stable.acceptance_length:.2f}, {100 * fall:.0f} % below the {stable.accepted_length:.2f} with "
        f"which revision {stable.revision} was accepted: requests have changed, or its drafter fits them less than it did. "
        "Nothing is done about it by itself; a drafter trained on today's requests may be worth a canary"
    )
    return ConditionUpdate(DEGRADED, "True", "DriftSuspected", message)


def _no_acceptance_message(stable: Arm) -> str:
    """What an acceptance length of 1.00 means."""
    if stable.accepted_length:
        was = f"acceptance length is 1.00, and was {stable.accepted_length:.2f} when revision {stable.revision} was accepted"
        return f"{was}. {post_promotion.LOST_DRAFTER_WEIGHTS_MESSAGE}"
    return (
        f"acceptance length is 1.00: next to none of the tokens that the drafter of revision {stable.revision} proposes is "
        "accepted. If that was so from the start, it does not fit the target, or does not load as it should. If not: "
        f"{post_promotion.LOST_DRAFTER_WEIGHTS_MESSAGE}"
    )
