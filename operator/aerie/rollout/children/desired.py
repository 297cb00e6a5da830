"""The objects that have to be there for a course, as they would be applied, and those that nothing asks for any more.

Guarantees: what is deleted is named by neither the status that was read nor the one that is written, so that a crash between the
two loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.status import Status
from aerie.manifests import deployment, naming, network, preflight_job
from aerie.manifests.apply_diff import APPLIED_DIGEST_ANNOTATION, with_digest
from aerie.manifests.calibration_config_map import calibration_config_map_name
from aerie.manifests.tuning_config_map import tuning_config_map_name
from aerie.rollout.canary import calibration_record
from aerie.rollout.capacity.arms import count_missing_ready_pods
from aerie.rollout.capacity.traffic_weights import TOTAL_WEIGHT
from aerie.rollout.children import tuning_record
from aerie.rollout.facts.snapshot import Snapshot, is_owned_by, read_labels
from aerie.rollout.plan import ObjectReference
from aerie.rollout.progression import Progression
from aerie.rollout.revision.desired import DesiredRevision
from aerie.rollout.revision.pod_template import resolve_control_pod_template, resolve_pod_template
from aerie.rollout.revision.preflight_result import PreflightResult


def build_desired_objects(
    snapshot: Snapshot,
    desired: DesiredRevision,
    progression: Progression,
    preflight_result: PreflightResult,
    runner: preflight_job.PreflightJobConfig,
) -> Iterator[dict[str, Any]]:
    """All that has to be there, in the order in which it is applied."""
    resource = snapshot.resource
    made: list[dict[str, Any]] = [
        network.build_main_service(resource, progression.exclusive_revision),
        *_build_disruption_budgets(resource, progression),
    ]
    made += _build_traffic_objects(snapshot, desired, progression)
    needed = progression.needs_preflight_job or desired.revision in (progression.stable_revision, progression.canary_revision)
    template = resolve_pod_template(snapshot, desired, desired.revision)
    if needed and template is not None:
        made.append(
            preflight_job.build_preflight_config_map(desired.resource, desired.revision, template, preflight_result.record)
        )
    if progression.needs_preflight_job and template is not None and preflight_result.state == "Absent":
        # A Job cannot be changed: one that is there is left as it is.
        made.append(preflight_job.build_preflight_job(resource, desired.revision, template, runner))
    made += _build_deployments(snapshot, desired, progression)
    memory = snapshot.baseline_calibration
    if memory is not None and calibration_record.is_calibration_write_due(
        memory, calibration_record.read_stored_calibration(snapshot), canary_active=progression.canary is not None
    ):
        made.append(calibration_record.build_calibration_config_map(resource, memory))
    if snapshot.tuning_record is not None and tuning_record.is_tuning_write_due(snapshot):
        made.append(tuning_record.build_tuning_config_map(resource, snapshot.tuning_record))
    for item in made:
        yield with_digest(_with_owner(resource, item))


def _build_disruption_budgets(resource: SpeculativeDeployment, course: Progression) -> Iterator[dict[str, Any]]:
    """One for each revision that has pods, unless the user wants none."""
    if resource.spec.rollout.disruption.budget == "None":
        return
    revisions = (
        course.stable_revision,
        course.canary_revision,
        course.previous.revision if course.previous is not None else None,
    )
    for revision in dict.fromkeys(revisions):
        if revision is not None:
            yield deployment.build_disruption_budget(resource, revision)


def _build_traffic_objects(observed: Snapshot, wanted: DesiredRevision, course: Progression) -> Iterator[dict[str, Any]]:
    """In mode Gateway the Services of the arms, and after them the route that sends to them."""
    resource = observed.resource
    serving = course.stable_revision or course.canary_revision
    if resource.spec.rollout.traffic.gateway is None or serving is None:
        return
    yield network.build_arm_service(resource, "stable", serving)
    weights = dict(course.weights)
    if course.stable_revision is not None and course.canary_revision is not None:
        yield network.build_arm_service(resource, "canary", course.canary_revision)
        if _has_control(course):
            yield network.build_arm_service(resource, "control", course.stable_revision)
        else:
            weights.pop("control", None)
    elif course.previous is not None and course.routes_to_all_pods:
        yield network.build_arm_service(resource, "previous", course.previous.revision)
    elif (
        course.stable_revision is not None and (alone := _find_fallback_arm(observed, wanted, course.stable_revision)) is not None
    ):
        arm, revision = alone
        yield network.build_arm_service(resource, arm, revision)
        weights = {"stable": 0, arm: TOTAL_WEIGHT}
    else:
        weights = {"stable": TOTAL_WEIGHT}
    yield network.build_http_route(resource, weights)


def _build_deployments(observed: Snapshot, wanted: DesiredRevision, course: Progression) -> Iterator[dict[str, Any]]:
    resource, arms = observed.resource, course.target_replicas
    if course.stable_revision is None:
        first = resolve_pod_template(observed, wanted, course.canary_revision) if course.canary_revision is not None else None
        if course.canary_revision is not None and first is not None:
            yield deployment.build_deployment(resource, first, course.canary_revision, "stable", arms.canary)
        return
    stable = resolve_pod_template(observed, wanted, course.stable_revision)
    if stable is not None:
        yield deployment.build_deployment(resource, stable, course.stable_revision, "stable", arms.stable)
    if course.previous is not None:
        before = resolve_pod_template(observed, wanted, course.previous.revision)
        if before is not None:
            yield deployment.build_deployment(resource, before, course.previous.revision, "previous", course.previous.replicas)
    if course.canary_revision is None:
        return
    mine = resolve_pod_template(observed, wanted, course.canary_revision)
    if mine is not None:
        yield deployment.build_deployment(resource, mine, course.canary_revision, "canary", arms.canary)
    if stable is not None and _has_control(course):
        beside = resolve_control_pod_template(observed, stable, course.stable_revision)
        yield deployment.build_deployment(resource, beside, course.stable_revision, "control", arms.control)


def _find_fallback_arm(observed: Snapshot, wanted: DesiredRevision, stable: str) -> tuple[str, str] | None:
    """Where no stable pod serves: the arm and the revision of what a rollout has left behind and serves, and is not about to be
    deleted (`superfluous`): the pods of a control, first of the stable revision; those of the desired revision; any pods while
    the rollout rests."""
    if observed.ready_pod_count(stable):
        return None
    owner = observed.resource.metadata.uid
    found = []
    for one in observed.children_of_kind("Deployment"):
        revision, control = read_labels(one).get(naming.REVISION_LABEL), read_labels(one).get(naming.CONTROL_LABEL) == "true"
        if revision is None or not is_owned_by(one, owner) or one["metadata"].get("deletionTimestamp"):
            continue
        if (control or revision == wanted.revision or observed.is_rollout_suspended) and observed.ready_pod_count(
            revision, control=control
        ):
            found.append((not control, revision != stable, revision))
    if not found:
        return None
    canary, _, revision = min(found)
    return ("canary" if canary else "control"), revision


def _has_control(course: Progression) -> bool:
    return course.target_replicas.control > 0


def is_preflight_job_outdated(
    snapshot: Snapshot, desired: DesiredRevision, preflight_result: PreflightResult, runner: preflight_job.PreflightJobConfig
) -> bool:
    """Whether a Job without a verdict runs with what the operator was given before, such as pull secrets or an image."""
    job = snapshot.child("Job", preflight_job.preflight_job_name(snapshot.resource.metadata.name, desired.revision))
    if job is None or preflight_result.state not in ("Running", "Error"):
        return False
    template = resolve_pod_template(snapshot, desired, desired.revision)
    if template is None:
        return False
    made = with_digest(
        _with_owner(snapshot.resource, preflight_job.build_preflight_job(snapshot.resource, desired.revision, template, runner))
    )
    applied = (job["metadata"].get("annotations") or {}).get(APPLIED_DIGEST_ANNOTATION)
    # What webhooks have changed in the Job is theirs; only what was asked for is compared.
    return bool(applied != made["metadata"]["annotations"][APPLIED_DIGEST_ANNOTATION])


def find_objects_to_delete(
    snapshot: Snapshot,
    desired: DesiredRevision,
    desired_objects: list[dict[str, Any]],
    progression: Progression,
    current_time: datetime,
    *,
    job_expired: bool,
) -> Iterator[ObjectReference]:
    """Our own objects that nothing asks for any more. `over`: the Job is to be made anew."""
    resource = snapshot.resource
    status = resource.status or Status()
    before = {arm.revision for arm in (status.stable, status.canary, status.previous) if arm is not None}
    now = (
        progression.stable_revision,
        progression.canary_revision,
        progression.previous.revision if progression.previous is not None else None,
    )
    named = before | {revision for revision in now if revision}
    controlled = status.stable is not None and status.canary is not None and status.canary.control is not None
    there = {(item["kind"], item["metadata"]["name"]) for item in desired_objects}
    for child in snapshot.children:
        key = (child["kind"], child["metadata"]["name"])
        if key in there or not is_owned_by(child, resource.metadata.uid) or child["metadata"].get("deletionTimestamp"):
            continue
        of, kind = read_labels(child).get(naming.REVISION_LABEL), child["kind"]
        if kind == "Deployment" and of in named and (read_labels(child).get(naming.CONTROL_LABEL) != "true" or controlled):
            continue  # a crash may have kept what comes after it out of the status
        control = read_labels(child).get(naming.CONTROL_LABEL) == "true"
        # A control that the canary under way has use for is missing from what is made where nothing tells what its pods are.
        unmade = progression.canary is None or of != progression.stable_revision or _has_control(progression)
        stays = of == desired.revision or (control and unmade)
        if (
            kind == "Deployment"
            and of
            and stays
            and snapshot.ready_pod_count(of, control=control)
            and count_missing_ready_pods(snapshot, named, current_time)
        ):
            continue  # it stands in until other pods serve, though nothing asks for it: the control of a canary that is gone
        if kind == "PodDisruptionBudget" and of in named and resource.spec.rollout.disruption.budget != "None":
            continue  # that of its pods
        if kind == "ConfigMap" and (of in named or of == desired.revision):
            continue  # the record of its pods
        if key == ("ConfigMap", calibration_config_map_name(resource.metadata.name)):
            continue  # what stable pods told, of whatever revision
        if key == ("ConfigMap", tuning_config_map_name(resource.metadata.name)) and tuning_record.is_tuning_enabled(resource):
            continue  # what the tuner knows
        if kind == "Job" and of == desired.revision and not job_expired:
            continue  # the record of the verdict
        yield ObjectReference(*key, child["metadata"]["uid"])


def _with_owner(resource: SpeculativeDeployment, item: dict[str, Any]) -> dict[str, Any]:
    owner = {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "name": resource.metadata.name,
        "uid": resource.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    metadata = {**item["metadata"], "namespace": resource.metadata.namespace, "ownerReferences": [owner]}
    return {**item, "metadata": metadata}
