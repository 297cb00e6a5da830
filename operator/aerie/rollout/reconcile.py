"""Decision about one resource: from the snapshot to the plan.

    drafter ─► setting ─► desired revision ─► preflight result ─► progression ─┬─► children ─► service_handover ─┬─► ReconcilePlan
                                                                               └─► status, events ───────────────┘

Guarantees: a function of its arguments. While the spec pauses the rollout, nothing is applied or deleted, and the status is
still updated. While a kind cannot be listed, or a field of the spec cannot be read (facts/last_valid_spec.py), the rollout is
suspended as if paused. Then nothing of that kind, or that follows from that field, is applied, nothing at all is deleted, and
no arm of a rollout loses pods; the rest is repaired and scaled. While the spec cannot be read, the status fields that follow
from it stay. A decision that writes nothing never requests another one immediately, so that reconciles never spin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.status import RolloutPurpose, Status
from aerie.engine.models.drafter_catalog import DrafterCatalog
from aerie.manifests.apply_diff import needs_apply, with_digest
from aerie.manifests.preflight_job import PreflightJobConfig
from aerie.rollout.capacity import drain_order, service_handover
from aerie.rollout.children.desired import (
    build_desired_objects,
    find_objects_to_delete,
    is_preflight_job_outdated,
    with_owner,
)
from aerie.rollout.conditions import DEGRADED, PROGRESSING, ConditionUpdate, build_condition_events, build_conditions
from aerie.rollout.facts import concurrency, hardware
from aerie.rollout.facts.orphans import ORPHAN_REQUEUE_DELAY, Orphans, exclude_orphans
from aerie.rollout.facts.route_status import check_route_status_timeout
from aerie.rollout.facts.snapshot import ClusterState, Snapshot, is_owned_by
from aerie.rollout.plan import Event, ObjectReference, ReconcilePlan
from aerie.rollout.progression.policy_chain import next_progression
from aerie.rollout.progression.progression import Progression
from aerie.rollout.progression.user_request import attribute_decision, read_user_request
from aerie.rollout.revision.desired import DesiredRevision, resolve_desired_revision
from aerie.rollout.revision.drafter_selection import DrafterSelection, select_drafter
from aerie.rollout.revision.preflight_result import PreflightResult, read_preflight_result
from aerie.rollout.revision.recovery import restore_stable_arm
from aerie.rollout.status.build import build_status
from aerie.rollout.status.hold import find_hold_condition
from aerie.rollout.status.rollout_record import update_rollout_history
from aerie.rollout.trials import effective_setting
from aerie.rollout.trials.effective_setting import EffectiveSetting, TrialDecision

EMPTY_CATALOG = DrafterCatalog(())
_STATUS_FIELDS_FROM_SPEC = ("speculation", "selected_drafters", "rejected_revision", "last_handled_retry", "last_request")
"""Fields of the status that follow from the spec, and are unknown where a part of it cannot be read."""
MIN_REQUEUE_DELAY = timedelta(seconds=1)
"""Minimum delay between a decision that writes nothing and the next one."""


@dataclass(frozen=True)
class _Decision:
    """Decision about the rollout, before it becomes objects and a status."""

    snapshot: Snapshot
    """The snapshot without orphans and lost pods, with a stable arm; paused while the rollout is suspended."""
    is_paused: bool
    """Whether the spec itself pauses the rollout."""
    setting: EffectiveSetting
    desired: DesiredRevision
    preflight_result: PreflightResult
    progression: Progression
    trial_decision: TrialDecision

    @property
    def previous_status(self) -> Status | None:
        """Status that was read."""
        return self.snapshot.resource.status


@dataclass(frozen=True)
class _ObjectChanges:
    """Objects to apply and to delete now."""

    to_apply: tuple[dict[str, Any], ...]
    to_delete: tuple[ObjectReference, ...]
    foreign: list[Any]
    """Objects of somebody else under the names of desired ones."""
    traffic_delay: timedelta | None
    """Time until Services or the route allow the next step; None where nothing waits for them."""


def build_reconcile_plan(
    snapshot: Snapshot, runner: PreflightJobConfig, now: datetime, catalog: DrafterCatalog = EMPTY_CATALOG
) -> ReconcilePlan:
    """Return the plan for the resource as of now. `runner` and `catalog` are the operator's own."""
    selection = select_drafter(snapshot.resource, catalog)
    snapshot, orphans = exclude_orphans(replace(snapshot, resource=selection.resource))
    snapshot, next_lost_at = snapshot.exclude_lost_pods(now)
    snapshot = restore_stable_arm(snapshot, now)
    decision = _decide(snapshot, selection, now)
    changes = _plan_object_changes(decision, orphans, runner, now)
    status = _build_next_status(decision, changes, selection, runner, now)
    events = _build_events(decision, status, selection)
    requeue_after = _compute_requeue_delay(decision, changes, orphans, next_lost_at, now)
    if requeue_after is not None and not (changes.to_apply or changes.to_delete or events or status != selection.resource.status):
        requeue_after = requeue_after if requeue_after > timedelta(0) else MIN_REQUEUE_DELAY
    record = update_rollout_history(replace(decision.snapshot, resource=snapshot.resource), status, now)
    history_config_map = record.config_map
    if history_config_map is not None:
        history_config_map = with_digest(with_owner(snapshot.resource, history_config_map))
    return ReconcilePlan(
        changes.to_apply,
        changes.to_delete,
        status,
        events,
        requeue_after,
        hardware.compared_node_names(decision.snapshot.cluster, status),
        decision.progression.drafters,
        record.history,
        history_config_map,
    )


def _decide(snapshot: Snapshot, selection: DrafterSelection, now: datetime) -> _Decision:
    """Decide on the setting, the desired revision, its progression and the next trial."""
    is_paused = snapshot.resource.spec.rollout.paused
    if snapshot.is_rollout_suspended:
        snapshot = replace(snapshot, resource=_with_rollout_paused(snapshot.resource))
    setting = effective_setting.resolve_effective_setting(snapshot, now)
    desired = resolve_desired_revision(snapshot.resource, selection.problem, setting.setting, setting.trial)
    preflight_result = read_preflight_result(snapshot, desired.revision, now)
    progression = effective_setting.with_trial_outcome(
        next_progression(snapshot, desired, preflight_result, now), snapshot.resource, setting, now
    )
    request = read_user_request(snapshot.resource, desired.revision, now)
    progression = attribute_decision(progression, request, snapshot.resource.status or Status(), now)
    trial_decision = effective_setting.decide_next_trial(snapshot, setting, progression, now)
    if (hold := find_hold_condition(snapshot)) is not None and not is_paused:
        progression = replace(progression, progressing=ConditionUpdate(PROGRESSING, "False", hold.reason, hold.message))
    return _Decision(snapshot, is_paused, setting, desired, preflight_result, progression, trial_decision)


def _plan_object_changes(decision: _Decision, orphans: Orphans, runner: PreflightJobConfig, now: datetime) -> _ObjectChanges:
    """Build the desired objects, order their changes, and compare them with the live ones."""
    snapshot, desired, progression = decision.snapshot, decision.desired, decision.progression
    preflight_result = decision.preflight_result
    desired_objects = (
        [] if decision.is_paused else list(build_desired_objects(snapshot, desired, progression, preflight_result, runner))
    )
    desired_objects = [item for item in desired_objects if item["kind"] not in snapshot.unmanaged_kinds]
    desired_objects, handover_delay = service_handover.order_service_changes(snapshot, desired_objects, now)
    traffic_delay = min(
        filter(None, (handover_delay, drain_order.route_propagation_remaining(snapshot, desired_objects, now))), default=None
    )
    is_rollout_halted = snapshot.is_rollout_suspended and (progression.canary is not None or progression.previous is not None)
    to_apply, foreign = _diff_objects(snapshot, desired_objects, orphans, may_scale_down=not (traffic_delay or is_rollout_halted))
    is_job_expired = preflight_result.is_expired or is_preflight_job_outdated(snapshot, desired, preflight_result, runner)
    to_delete = (
        ()
        if decision.is_paused or snapshot.is_rollout_suspended
        else tuple(find_objects_to_delete(snapshot, desired, desired_objects, progression, now, job_expired=is_job_expired))
    )
    if traffic_delay:
        to_delete = tuple(filter(drain_order.is_safe_to_delete, to_delete))
    return _ObjectChanges(to_apply, to_delete, foreign, traffic_delay)


def _diff_objects(
    snapshot: Snapshot, desired_objects: list[dict[str, Any]], orphans: Orphans, *, may_scale_down: bool
) -> tuple[tuple[dict[str, Any], ...], list[Any]]:
    """Return the desired objects that have to be applied, and the objects of somebody else under their names."""
    foreign: list[Any] = []
    to_apply = []
    for item in desired_objects:
        if item in orphans or (not may_scale_down and drain_order.scales_down(snapshot.cluster, item)):
            continue
        live = snapshot.cluster.child(item["kind"], item["metadata"]["name"]) or _find_name_conflict(snapshot.cluster, item)
        if live is not None and not is_owned_by(live, snapshot.resource.metadata.uid):
            foreign.append(live)
        elif item["kind"] == "HTTPRoute" and _routes_to_any(item, foreign):
            continue  # its requests would go to somebody else's pods
        elif needs_apply(live, item):
            to_apply.append(item)
    return tuple(to_apply), foreign


def _build_next_status(
    decision: _Decision, changes: _ObjectChanges, selection: DrafterSelection, runner: PreflightJobConfig, now: datetime
) -> Status:
    """Return the status after this reconcile."""
    progression, previous_status = decision.progression, decision.previous_status or Status()
    rollout = progression.in_place
    in_use = decision.desired.revision in (
        progression.stable_revision,
        progression.served_revision,
        progression.canary_revision,
        rollout.revision if rollout is not None else None,
    )
    claim: RolloutPurpose | None = "Rollout" if progression.claims_slot else "Trial" if decision.trial_decision.queued else None
    status = build_status(
        decision.snapshot,
        decision.desired,
        progression,
        changes.foreign,
        now,
        decision.setting,
        decision.trial_decision,
        runner,
    )
    status = status.model_copy(
        update={
            "selected_drafters": selection.build_status_drafters(in_use=in_use),
            "queue": concurrency.build_queued_status(claim, previous_status, now),
        }
    )
    if decision.snapshot.spec_substitution is None:
        return status
    return status.model_copy(update={name: getattr(previous_status, name) for name in _STATUS_FIELDS_FROM_SPEC})


def _build_events(decision: _Decision, status: Status, selection: DrafterSelection) -> tuple[Event, ...]:
    """Return the events of this reconcile, each once: two conditions may have the same."""
    events = (
        *(() if decision.snapshot.spec_substitution is not None else selection.build_events()),
        *build_condition_events(decision.previous_status, status),
        *_build_outcome_events(decision.progression),
        *_build_ramp_step_events(decision.previous_status, status),
    )
    return tuple(dict.fromkeys(events))


def _compute_requeue_delay(
    decision: _Decision, changes: _ObjectChanges, orphans: Orphans, next_lost_at: datetime | None, now: datetime
) -> timedelta | None:
    """Return the delay until the earliest moment at which the decision may change without an event; None: only by an event."""
    trial_delay = (
        timedelta(0)
        if decision.trial_decision.trial is not None
        else effective_setting.compute_time_until_trial_expiry(
            decision.snapshot.resource, decision.setting, decision.progression, now
        )
    )
    delays = (
        trial_delay,
        decision.progression.requeue_after,
        changes.traffic_delay,
        ORPHAN_REQUEUE_DELAY if orphans.keys else None,
        check_route_status_timeout(decision.snapshot, now)[1],
        next_lost_at - now if next_lost_at is not None else None,
    )
    return min((delay for delay in delays if delay is not None), default=None)


def _with_rollout_paused(resource: SpeculativeDeployment) -> SpeculativeDeployment:
    rollout = resource.spec.rollout.model_copy(update={"paused": True})
    return resource.model_copy(update={"spec": resource.spec.model_copy(update={"rollout": rollout})})


def with_apply_errors(
    plan: ReconcilePlan, previous_status: Status | None, apply_errors: list[str], now: datetime
) -> ReconcilePlan:
    """Return the plan after the API server has rejected some of its objects: the status reports it."""
    condition = ConditionUpdate(DEGRADED, "True", "ApplyFailed", "The API server rejected " + "; ".join(sorted(apply_errors)))
    other_conditions = [item for item in plan.status.conditions if item.type != DEGRADED]
    conditions = [
        *other_conditions,
        *build_conditions([condition], previous_status, plan.status.observed_generation, now),
    ]
    status = plan.status.model_copy(update={"conditions": conditions})
    error_events = tuple(event for event in build_condition_events(previous_status, status) if event.reason == "ApplyFailed")
    return replace(plan, status=status, events=plan.events + error_events, requeue_after=timedelta(minutes=1))


def _routes_to_any(route: dict[str, Any], foreign: list[Any]) -> bool:
    """Return whether the route sends requests, or copies of them, to a Service that is somebody else's."""
    services = {item["metadata"]["name"] for item in foreign if item["kind"] == "Service"}
    rules = route["spec"]["rules"]
    mirrors = [entry["requestMirror"]["backendRef"] for rule in rules for entry in rule.get("filters") or []]
    backends = [backend for rule in rules for backend in rule["backendRefs"]]
    return any(backend["name"] in services for backend in (*backends, *mirrors))


def _build_outcome_events(progression: Progression) -> Iterator[Event]:
    """Return the event of a rollout that has ended."""
    if progression.outcome is not None:
        is_success = progression.outcome.result in ("Promoted", "Superseded", "Explored")
        yield Event("Normal" if is_success else "Warning", progression.outcome.result, progression.outcome.message)


def _build_ramp_step_events(before: Status | None, after: Status) -> Iterator[Event]:
    """Return the event of a ramp step that follows another: the condition's reason stays, and it is an event all the same."""
    if before is None or before.canary is None or after.canary is None or before.canary.step_index is None:
        return
    if after.canary.phase == "Ramping" and after.canary.step_index != before.canary.step_index:
        message = next(condition.message for condition in after.conditions if condition.type == "Progressing")
        yield Event("Normal", "Ramping", message)


def _find_name_conflict(cluster: ClusterState, item: dict[str, Any]) -> Any:
    kind_and_name = (item["kind"], item["metadata"]["name"])
    return next(
        (conflict for conflict in cluster.name_conflicts if (conflict["kind"], conflict["metadata"]["name"]) == kind_and_name),
        None,
    )
