"""The decision about one resource: from what was observed to what is to be done.

    choice ─► tuned ─► wanted ─► verdict ─► course ─► children ─► handover ─► Plan
                                                └──► report ──►

Guarantees: a function of its arguments. Paused, nothing is applied or deleted, and the status goes on. While a kind cannot be
listed, or a field of the spec cannot be read (last_spec.py), the rollout rests as if paused: nothing of that kind, or that
follows from that field, is applied, nothing at all deleted, and no arm of a rollout loses pods; the rest is repaired and scaled.
What the status says of the rollout stays while the spec cannot be read. A decision that writes nothing never asks for another one
at once, so that nothing spins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.status import RolloutPurpose, Status
from aerie.engine.models.drafter_catalog import DrafterCatalog
from aerie.manifests.apply_diff import needs_apply
from aerie.manifests.preflight_job import PreflightJobConfig
from aerie.rollout.capacity import drain_order, service_handover
from aerie.rollout.children.desired import build_desired_objects, find_objects_to_delete, is_preflight_job_outdated
from aerie.rollout.conditions import DEGRADED, PROGRESSING, ConditionUpdate, build_condition_events, build_conditions
from aerie.rollout.facts import concurrency, hardware
from aerie.rollout.facts.orphans import ORPHAN_REQUEUE_DELAY, exclude_orphans
from aerie.rollout.facts.route_status import check_route_status_timeout
from aerie.rollout.facts.snapshot import Snapshot, is_owned_by
from aerie.rollout.plan import Event, ReconcilePlan
from aerie.rollout.progression import Progression, next_progression
from aerie.rollout.revision.desired import resolve_desired_revision
from aerie.rollout.revision.drafter_selection import select_drafter
from aerie.rollout.revision.preflight_result import read_preflight_result
from aerie.rollout.revision.recovery import restore_stable_arm
from aerie.rollout.status.build import build_status
from aerie.rollout.status.hold import find_hold_condition
from aerie.rollout.trials import effective_setting

EMPTY_CATALOG = DrafterCatalog(())
_STATUS_FIELDS_FROM_SPEC = ("speculation", "drafters", "rejected", "retry")
"""Fields of the status that follow from what the spec asks for, which is not known where a part of it cannot be read."""
MIN_REQUEUE_DELAY = timedelta(seconds=1)
"""Between a decision that writes nothing and the next one."""


def build_reconcile_plan(
    snapshot: Snapshot, runner: PreflightJobConfig, now: datetime, catalog: DrafterCatalog = EMPTY_CATALOG
) -> ReconcilePlan:
    """What is to be done about the resource now. `runner` and catalog are the operator's own."""
    choice = select_drafter(snapshot.resource, catalog)
    resource = choice.resource
    snapshot, leftovers = exclude_orphans(replace(snapshot, resource=resource))
    snapshot, overdue = snapshot.exclude_lost_pods(now)
    snapshot = restore_stable_arm(snapshot, now)
    paused = snapshot.resource.spec.rollout.paused
    if snapshot.is_rollout_suspended:
        snapshot = replace(snapshot, resource=_with_rollout_paused(snapshot.resource))
    resource = snapshot.resource
    asked = effective_setting.resolve_effective_setting(snapshot, now)
    wanted = resolve_desired_revision(resource, choice.problem, asked.setting, asked.trial)
    verdict = read_preflight_result(snapshot, wanted.revision, now)
    way = effective_setting.with_trial_outcome(next_progression(snapshot, wanted, verdict, now), snapshot, asked, now)
    intent = effective_setting.decide_next_trial(snapshot, asked, way, now)
    if (why := find_hold_condition(snapshot)) is not None and not paused:
        way = replace(way, progressing=ConditionUpdate(PROGRESSING, "False", why.reason, why.message))
    made = [] if paused else list(build_desired_objects(snapshot, wanted, way, verdict, runner))
    made = [item for item in made if item["kind"] not in snapshot.unmanaged_kinds]
    made, handed_over = service_handover.order_service_changes(snapshot, made, now)
    held_up = min(filter(None, (handed_over, drain_order.route_propagation_remaining(snapshot, made, now))), default=None)
    halted = snapshot.is_rollout_suspended and (way.canary is not None or way.previous is not None)
    taken, missing = [], []
    for item in made:
        if item in leftovers or ((held_up or halted) and drain_order.scales_down(snapshot, item)):
            continue
        live = snapshot.child(item["kind"], item["metadata"]["name"]) or _find_name_conflict(snapshot, item)
        if live is not None and not is_owned_by(live, resource.metadata.uid):
            taken.append(live)
        elif item["kind"] == "HTTPRoute" and _routes_to_any(item, taken):
            continue  # its requests would go to somebody else's pods
        elif needs_apply(live, item):
            missing.append(item)
    over = verdict.is_expired or is_preflight_job_outdated(snapshot, wanted, verdict, runner)
    delete = (
        ()
        if paused or snapshot.is_rollout_suspended
        else tuple(find_objects_to_delete(snapshot, wanted, made, way, now, job_expired=over))
    )
    if held_up:
        delete = tuple(filter(drain_order.is_safe_to_delete, delete))
    chosen = choice.build_status_drafters(in_use=wanted.revision in (way.stable_revision, way.canary_revision))
    claims: RolloutPurpose | None = "Rollout" if way.claims_slot else "Trial" if intent.queued else None
    queued = concurrency.build_queued_status(claims, resource.status or Status(), now)
    status = build_status(snapshot, wanted, way, taken, now, asked, intent)
    status = status.model_copy(update={"drafters": chosen, "queued": queued})
    if snapshot.spec_substitution is not None:
        status = status.model_copy(update={name: getattr(resource.status or Status(), name) for name in _STATUS_FIELDS_FROM_SPEC})
    news = (
        *(() if snapshot.spec_substitution is not None else choice.build_events()),
        *build_condition_events(resource.status, status),
        *_build_outcome_events(way),
        *_build_ramp_step_events(resource.status, status),
    )
    told = dict.fromkeys(news)  # two conditions may say the same
    soon = (
        timedelta(0) if intent.trial is not None else effective_setting.compute_time_until_trial_expiry(snapshot, asked, way, now)
    )
    lost = overdue - now if overdue is not None else None
    waits = (
        soon,
        way.requeue_after,
        held_up,
        ORPHAN_REQUEUE_DELAY if leftovers.keys else None,
        check_route_status_timeout(snapshot, now)[1],
        lost,
    )
    again = min((one for one in waits if one is not None), default=None)
    if again is not None and not (missing or delete or told) and status == choice.resource.status:
        again = again if again > timedelta(0) else MIN_REQUEUE_DELAY
    return ReconcilePlan(tuple(missing), delete, status, tuple(told), again, hardware.compared_node_names(snapshot, status))


def _with_rollout_paused(resource: SpeculativeDeployment) -> SpeculativeDeployment:
    rollout = resource.spec.rollout.model_copy(update={"paused": True})
    return resource.model_copy(update={"spec": resource.spec.model_copy(update={"rollout": rollout})})


def with_apply_errors(
    plan: ReconcilePlan, previous_status: Status | None, apply_errors: list[str], now: datetime
) -> ReconcilePlan:
    """The plan after the API server has refused some of its objects: the status says so."""
    finding = ConditionUpdate(DEGRADED, "True", "Refused", "the API server refused " + "; ".join(sorted(apply_errors)))
    others = [ConditionUpdate(c.type, c.status, c.reason, c.message) for c in plan.status.conditions if c.type != DEGRADED]
    made = build_conditions([*others, finding], previous_status, plan.status.observed_generation, now)
    status = plan.status.model_copy(update={"conditions": made})
    news = tuple(event for event in build_condition_events(previous_status, status) if event.reason == "Refused")
    return replace(plan, status=status, events=plan.events + news, requeue_after=timedelta(minutes=1))


def _routes_to_any(route: dict[str, Any], taken: list[Any]) -> bool:
    """Whether the route sends requests to a Service that is somebody else's."""
    services = {item["metadata"]["name"] for item in taken if item["kind"] == "Service"}
    return any(backend["name"] in services for rule in route["spec"]["rules"] for backend in rule["backendRefs"])


def _build_outcome_events(way: Progression) -> Iterator[Event]:
    """How a rollout has ended."""
    if way.outcome is not None:
        good = way.outcome.result in ("Promoted", "Superseded", "Explored")
        yield Event("Normal" if good else "Warning", way.outcome.result, way.outcome.reason)


def _build_ramp_step_events(before: Status | None, after: Status) -> Iterator[Event]:
    """A step of the ramp that follows another: the condition's reason stays, and it is news all the same."""
    if before is None or before.canary is None or after.canary is None or before.canary.step is None:
        return
    if after.canary.phase == "Ramping" and after.canary.step != before.canary.step:
        message = next(one.message for one in after.conditions if one.type == "Progressing")
        yield Event("Normal", "Ramping", message)


def _find_name_conflict(observed: Snapshot, item: dict[str, Any]) -> Any:
    wanted = (item["kind"], item["metadata"]["name"])
    return next((one for one in observed.name_conflicts if (one["kind"], one["metadata"]["name"]) == wanted), None)
