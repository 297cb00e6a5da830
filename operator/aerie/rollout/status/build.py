"""The status after a step, which users and the next step read.

Guarantee: pure. Nothing in it follows the clock alone, except that a gateway has not responded for too long. So it is written
only when something has happened.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, TypeVar

from aerie.analysis import post_promotion
from aerie.analysis.reference import has_regressed
from aerie.api.status import Arm, CanaryArm, Condition, PreviousArm, Status
from aerie.manifests.preflight_job import PreflightJobConfig
from aerie.rollout.capacity.traffic_weights import weight_to_percent
from aerie.rollout.conditions import DEGRADED, READY, ConditionUpdate, build_conditions
from aerie.rollout.facts.arm_metrics import (
    MIN_ACCEPTANCE_LENGTH,
    ArmMetrics,
    awaits_reference,
    identify_counted_drafter,
    with_arm_metrics,
)
from aerie.rollout.facts.route_status import check_route_status_timeout, route_rejection_message
from aerie.rollout.facts.snapshot import ClusterState, Snapshot
from aerie.rollout.progression.progression import Progression
from aerie.rollout.progression.retry_request import read_retry_request
from aerie.rollout.progression.user_request import read_user_request
from aerie.rollout.revision.desired import DesiredRevision
from aerie.rollout.revision.recovery import read_recorded_arm, with_served_drafter
from aerie.rollout.status.capture import build_capture_condition
from aerie.rollout.status.hold import VERSION_SKEW, find_hold_condition
from aerie.rollout.status.subscriptions import build_subscribed_condition
from aerie.rollout.trials.effective_setting import EffectiveSetting, TrialDecision
from aerie.rollout.trials.status import build_tuning_status

MAX_HISTORY_OUTCOMES = 10
METRICS_UNAVAILABLE: Final = "MetricsUnavailable"
_ArmT = TypeVar("_ArmT", bound=Arm)


def build_status(
    snapshot: Snapshot,
    desired: DesiredRevision,
    progression: Progression,
    name_conflicts: list[Any],
    now: datetime,
    effective: EffectiveSetting,
    trial_decision: TrialDecision,
    runner: PreflightJobConfig,
) -> Status:
    """Return the status. `name_conflicts`: objects of other owners that have a name which Aerie needs. `runner`: the operator's
    own config of Jobs and of the recorder."""
    resource = snapshot.resource
    previous_status = resource.status or Status()
    stable = _build_stable_arm(snapshot, desired, progression, previous_status)
    canary = _build_canary_arm(snapshot, progression, previous_status)
    control = canary.control if canary is not None else None
    previous = _build_previous_arm(snapshot.cluster, progression)
    serving_arms = (stable, *(() if progression.is_canary_isolated else (canary, control)))
    arms = [arm for arm in (*serving_arms, previous if progression.routes_to_all_pods else None) if arm is not None]
    tuning = build_tuning_status(snapshot, effective, trial_decision, progression, stable, now)
    subscribed = build_subscribed_condition(resource, snapshot.operator.notification_receivers)
    capture = build_capture_condition(snapshot, progression, name_conflicts, runner)
    conditions = [
        _build_ready_condition(snapshot, stable, canary, progression),
        progression.progressing,
        progression.preflight_passed,
        _build_degraded_condition(snapshot, progression, name_conflicts, stable, now),
        *([tuning.condition] if tuning.condition is not None else []),
        *([subscribed] if subscribed is not None else []),
        *([capture] if capture is not None else []),
    ]
    return Status(
        observed_generation=resource.metadata.generation,
        phase=progression.phase,
        conditions=build_conditions(conditions, resource.status, resource.metadata.generation, now),
        replicas=sum(arm.replicas for arm in arms),
        ready_replicas=sum(arm.ready_replicas for arm in arms),
        selector=",".join(f"{key}={value}" for key, value in progression.build_serving_selector(snapshot.cluster).items()),
        stable=stable,
        canary=canary,
        in_place_rollout=progression.in_place,
        previous=previous,
        analysis=progression.analysis,
        speculation=tuning.speculation,
        rejected_revision=progression.rejected_revision,
        last_handled_retry=read_retry_request(resource),
        # A definition that lacks the field would drop it, so that each status would be written again.
        last_request=previous_status.last_request
        if snapshot.cluster.crd_problem
        else read_user_request(resource, desired.revision, now),
        rollout_history=([*([progression.outcome] if progression.outcome else []), *previous_status.rollout_history])[
            :MAX_HISTORY_OUTCOMES
        ],
    )


def _build_stable_arm(
    snapshot: Snapshot, desired: DesiredRevision, progression: Progression, previous_status: Status
) -> Arm | None:
    if progression.stable_revision is None:
        return None
    if progression.stable_revision == desired.revision:
        arm = desired.arm
    else:  # an earlier spec: the status contains what is known of its arm
        recorded_arm = _find_arm_status(previous_status, progression.stable_revision)
        if recorded_arm is None or (recorded_arm.in_place is not None and progression.stable_in_place is None):
            recorded_arm = read_recorded_arm(snapshot, progression.stable_revision)  # with the revision's own drafter
        arm = Arm(**{name: getattr(recorded_arm, name) for name in Arm.model_fields}).model_copy(update={"in_place": None})
    arm = with_served_drafter(arm, progression.stable_in_place)
    arm = _with_pod_counts(snapshot.cluster, arm, progression.target_replicas.stable)
    arm = arm.model_copy(update={"weight": _traffic_percent(snapshot, progression, "stable")})
    last_arm = _find_arm_status(previous_status, arm.revision)
    reference_acceptance_length = progression.reference_acceptance_length or (
        last_arm.reference_acceptance_length if last_arm is not None and last_arm.served_revision == arm.served_revision else None
    )
    arm = arm.model_copy(update={"reference_acceptance_length": reference_acceptance_length})
    metrics = _find_stable_metrics(snapshot, arm, progression, previous_status)
    if metrics is not None and awaits_reference(arm, progression.in_place):
        arm = arm.model_copy(update={"reference_acceptance_length": metrics.reference_acceptance_length})
    return with_arm_metrics(arm, last_arm, metrics, status_changes=_has_analysis_advanced(progression, previous_status))


def _find_stable_metrics(snapshot: Snapshot, stable: Arm, progression: Progression, previous_status: Status) -> ArmMetrics | None:
    """Return the metrics of the stable pods as far as they are of one drafter.

    Pods that alternate between two drafters say nothing about either of them, and neither do windows from before a change.
    """
    counted = identify_counted_drafter(stable.revision, previous_status.stable, previous_status.in_place_rollout)
    is_of_drafter = identify_counted_drafter(stable.revision, stable, progression.in_place) == counted and counted.trial is None
    return snapshot.arm_metrics(stable.revision) if is_of_drafter else None


def _has_analysis_advanced(progression: Progression, previous_status: Status) -> bool:
    """Return whether the analysis has advanced, which is written in any case."""
    return progression.canary is not None and progression.analysis != previous_status.analysis


def _find_arm_status(previous_status: Status, revision: str) -> Arm | None:
    """Return the arm of the revision in the previous status, in whatever role it was."""
    arms = (previous_status.stable, previous_status.canary, previous_status.previous)
    return next((arm for arm in arms if arm is not None and arm.revision == revision), None)


def _build_previous_arm(cluster: ClusterState, progression: Progression) -> PreviousArm | None:
    if progression.previous is None:
        return None
    arm = _with_pod_counts(cluster, progression.previous, progression.previous.replicas)
    return arm.model_copy(update={"weight": _weight_percent(progression.weights, "previous")})


def _weight_percent(weights: Mapping[str, int], arm: str) -> int:
    """Return the arm's share in whole percents, which sum to 100: the stable arm gets the rest."""
    if arm != "stable":
        return weight_to_percent(weights.get(arm, 0))
    return max(0, 100 - sum(weight_to_percent(weight) for name, weight in weights.items() if name != "stable"))


def _build_canary_arm(snapshot: Snapshot, progression: Progression, previous_status: Status) -> CanaryArm | None:
    if progression.canary is None:
        return None
    arm = _with_pod_counts(snapshot.cluster, progression.canary, progression.target_replicas.canary)
    last_canary = previous_status.canary if previous_status.canary and previous_status.canary.revision == arm.revision else None
    control = None
    if progression.target_replicas.control and progression.stable_revision is not None:
        control_base = last_canary.control if last_canary and last_canary.control else Arm(revision=progression.stable_revision)
        control = _with_pod_counts(snapshot.cluster, control_base, progression.target_replicas.control, control=True)
        control = with_served_drafter(control, progression.stable_in_place)
        control = control.model_copy(update={"weight": _traffic_percent(snapshot, progression, "control")})
        last_control = last_canary.control if last_canary else None
        control_metrics = snapshot.arm_metrics(progression.stable_revision, control=True)
        control = with_arm_metrics(
            control, last_control, control_metrics, status_changes=_has_analysis_advanced(progression, previous_status)
        )
    weight = _traffic_percent(snapshot, progression, "canary") if progression.stable_revision is not None else None
    arm = arm.model_copy(update={"control": control, "weight": weight})
    return with_arm_metrics(
        arm, last_canary, snapshot.arm_metrics(arm.revision), status_changes=_has_analysis_advanced(progression, previous_status)
    )


def _with_pod_counts(cluster: ClusterState, arm: _ArmT, replicas: int, *, control: bool = False) -> _ArmT:
    ready_pods = cluster.ready_pod_count(arm.revision, control=control)
    return arm.model_copy(update={"replicas": replicas, "ready_replicas": ready_pods})


def _traffic_percent(snapshot: Snapshot, progression: Progression, arm: str) -> int:
    """Return the arm's percentage of the traffic: by the route in mode Gateway, by ready pods in mode Service."""
    if (
        snapshot.resource.spec.rollout.traffic.gateway is not None
        or progression.canary is None
        or progression.stable_revision is None
    ):
        weights: Mapping[str, int] = progression.weights
        return _weight_percent(weights, arm)
    if progression.is_canary_isolated:
        return _weight_percent(progression.weights, arm)
    ready_pods = {
        "stable": snapshot.cluster.ready_pod_count(progression.stable_revision),
        "canary": snapshot.cluster.ready_pod_count(progression.canary.revision),
        "control": snapshot.cluster.ready_pod_count(progression.stable_revision, control=True),
    }
    return round(100 * ready_pods[arm] / max(1, sum(ready_pods.values())))


def _build_ready_condition(
    snapshot: Snapshot, stable: Arm | None, canary: CanaryArm | None, progression: Progression
) -> ConditionUpdate:
    replicas = snapshot.resource.spec.replicas
    if stable is None:
        message = progression.progressing.message  # while pods start, this message counts them
        return ConditionUpdate(
            READY, "False", progression.progressing.reason, message if canary else f"No pod has been started yet. {message}"
        )
    if replicas == 0:
        return ConditionUpdate(READY, "True", "ScaledToZero", "spec.replicas is 0: no pods are requested.")
    arms = [arm for arm in (stable, canary, canary.control if canary else None) if arm is not None]
    ready_pods, expected_ready_pods = (
        sum(arm.ready_replicas for arm in arms),
        stable.replicas if canary is None else min(replicas, stable.replicas),
    )
    counted_pods = stable.ready_replicas if canary is None else ready_pods
    message = f"{min(counted_pods, replicas) if canary else counted_pods}/{replicas} pods ready"
    if stable.ready_replicas >= expected_ready_pods and counted_pods >= replicas:
        return ConditionUpdate(READY, "True", "AllPodsReady", message)
    isolated = snapshot.isolated_pod_names(stable.revision)
    if isolated and counted_pods + len(isolated) >= replicas:
        names = ", ".join(isolated)
        return ConditionUpdate(READY, "True", "PodIsolated", f"{message}: {names} is isolated for the shadow evaluation.")
    pod_failure = snapshot.cluster.pod_failure(stable.revision)
    return ConditionUpdate(
        READY,
        "False",
        pod_failure.reason if pod_failure else "Starting",
        f"{message}: {pod_failure.message}" if pod_failure else message,
    )


def _build_degraded_condition(
    snapshot: Snapshot, progression: Progression, name_conflicts: list[Any], stable: Arm | None, now: datetime
) -> ConditionUpdate:
    if (hold_condition := find_hold_condition(snapshot)) is not None:
        return hold_condition
    if name_conflicts:
        conflict_text = " and ".join(
            f"{item['kind']} {item['metadata']['name']} belongs to {_owner_name(item)}" for item in name_conflicts
        )
        pronoun, name_text = ("it", "the name") if len(name_conflicts) == 1 else ("them", "the names")
        message = f"{conflict_text}. Aerie needs {name_text}: delete or rename {pronoun}, or rename the resource."
        return ConditionUpdate(DEGRADED, "True", "NameTaken", message)
    pod_failure = snapshot.cluster.pod_failure(progression.stable_revision) if progression.stable_revision else None
    if (pod_failure is None or pod_failure.is_transient) and (route_rejection := route_rejection_message(snapshot)):
        return ConditionUpdate(DEGRADED, "True", "RouteNotAccepted", route_rejection)
    if pod_failure is not None and not pod_failure.is_transient:
        return ConditionUpdate(DEGRADED, "True", pod_failure.reason, pod_failure.message)
    if progression.drafter_problem:
        return ConditionUpdate(DEGRADED, "True", "WrongDrafter", progression.drafter_problem)
    if route_timeout := check_route_status_timeout(snapshot, now)[0]:
        return ConditionUpdate(DEGRADED, "True", "GatewayNotResponding", route_timeout)
    if source_error := _metrics_source_error(snapshot):
        return ConditionUpdate(DEGRADED, "True", METRICS_UNAVAILABLE, source_error)
    if snapshot.cluster.crd_problem:
        return ConditionUpdate(DEGRADED, "True", VERSION_SKEW, snapshot.cluster.crd_problem)
    if stable is not None and (regression := _find_regression(snapshot, progression, stable)) is not None:
        return regression
    return ConditionUpdate(DEGRADED, "False", "AsExpected", "No problems detected.")


def _owner_name(item: Any) -> str:
    references = item["metadata"].get("ownerReferences") or []
    return next((f"{owner['kind']} {owner['name']}" for owner in references if owner.get("controller")), "another owner")


def _metrics_source_error(snapshot: Snapshot) -> str:
    """Return what is wrong with the source of the metrics. While an operator that has just started does not know it, the error of
    the status is returned."""
    if snapshot.engines.metrics_source_error is not None or snapshot.resource.spec.metrics.source is None:
        return snapshot.engines.metrics_source_error or ""
    status = snapshot.resource.status
    previous_messages = (
        condition.message
        for condition in (status.conditions if status else [])
        if (condition.type, condition.reason) == (DEGRADED, METRICS_UNAVAILABLE)
    )
    return next(previous_messages, "")


def _find_regression(snapshot: Snapshot, progression: Progression, stable: Arm) -> ConditionUpdate | None:
    """Return the warning about the acceptance length of the stable pods, from the present metrics and the status before."""
    previous_status = snapshot.resource.status or Status()
    last_stable = previous_status.stable
    is_same_drafter = last_stable is not None and last_stable.served_revision == stable.served_revision
    reported = (item for item in previous_status.conditions if (item.type, item.reason) == (DEGRADED, "AcceptanceRegression"))
    metrics = _find_stable_metrics(snapshot, stable, progression, previous_status)
    standard_error = metrics.standard_error if metrics is not None else math.inf
    return _build_regression_condition(stable, standard_error, next(reported, None) if is_same_drafter else None)


def _build_regression_condition(
    stable: Arm, standard_error: float = 0.0, reported: Condition | None = None
) -> ConditionUpdate | None:
    """Return the warning that the stable pods' acceptance length is 1.00, or far below the reference; None if neither is so.

    `standard_error`: of the acceptance length. `reported`: the warning of the status about the same drafter. It stays while too
    little is counted.
    """
    if stable.acceptance_length is None:
        return None
    # In mode Adaptive, drafts that the engine trims count as rejected.
    is_adaptive = stable.setting is not None and stable.setting.mode == "Adaptive"
    if (
        stable.acceptance_length <= MIN_ACCEPTANCE_LENGTH
        and stable.reference_acceptance_length != MIN_ACCEPTANCE_LENGTH
        and not is_adaptive
    ):
        return ConditionUpdate(DEGRADED, "True", "DraftsRejected", _no_acceptance_message(stable))
    reference = stable.reference_acceptance_length
    if reference is None or not has_regressed(stable.acceptance_length, reference, standard_error, before=reported is not None):
        return None
    if reported is not None and math.isinf(standard_error):
        return ConditionUpdate(DEGRADED, "True", "AcceptanceRegression", reported.message)
    message = (
        f"Acceptance length dropped to {stable.acceptance_length:.2f}, {100 * (1 - stable.acceptance_length / reference):.0f} % "
        f"below the {reference:.2f} that revision {stable.served_revision} had before. The requests have changed, "
        "or the drafter fits them less well. Aerie takes no action; consider a rollout of a drafter trained on current requests."
    )
    return ConditionUpdate(DEGRADED, "True", "AcceptanceRegression", message)


def _no_acceptance_message(stable: Arm) -> str:
    """Return what an acceptance length of 1.00 means."""
    if stable.reference_acceptance_length:
        before = f"revision {stable.served_revision} had {stable.reference_acceptance_length:.2f} before"
        return f"Acceptance length is 1.00; {before}. {post_promotion.LOST_DRAFTER_WEIGHTS_MESSAGE}"
    return (
        "Acceptance length is 1.00: the target accepts almost no draft token of revision "
        f"{stable.served_revision}. If this was so from the start, the drafter does not fit the target or is not loaded "
        f"correctly. Otherwise: {post_promotion.LOST_DRAFTER_WEIGHTS_MESSAGE}"
    )
