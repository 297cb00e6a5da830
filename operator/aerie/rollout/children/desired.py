"""The objects that have to exist for a progression, as they would be applied, and the objects that are no longer needed.

Guarantee: an object is deleted only if neither the status that was read nor the one that is written refers to it. So a crash
between the two loses nothing.
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
from aerie.rollout.facts.snapshot import KubernetesObject, Snapshot, is_owned_by, read_labels
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
    """Yield all objects that have to exist, in the order in which they are applied."""
    resource = snapshot.resource
    objects: list[dict[str, Any]] = [
        network.build_main_service(resource, progression.exclusive_revision),
        *_build_disruption_budgets(resource, progression),
    ]
    objects += _build_traffic_objects(snapshot, desired, progression)
    needs_record = progression.needs_preflight_job or desired.revision in (
        progression.stable_revision,
        progression.canary_revision,
    )
    template = resolve_pod_template(snapshot, desired, desired.revision)
    if needs_record and template is not None:
        objects.append(
            preflight_job.build_preflight_config_map(desired.resource, desired.revision, template, preflight_result.record)
        )
    if progression.needs_preflight_job and template is not None and preflight_result.state == "Absent":
        # A Job cannot be changed: an existing one is left as it is.
        objects.append(preflight_job.build_preflight_job(resource, desired.revision, template, runner))
    objects += _build_deployments(snapshot, desired, progression)
    calibration = snapshot.operator.baseline_calibration
    if calibration is not None and calibration_record.is_calibration_write_due(
        calibration, calibration_record.read_stored_calibration(snapshot), canary_active=progression.canary is not None
    ):
        objects.append(calibration_record.build_calibration_config_map(resource, calibration))
    if snapshot.operator.tuning_record is not None and tuning_record.is_tuning_write_due(snapshot):
        objects.append(tuning_record.build_tuning_config_map(resource, snapshot.operator.tuning_record))
    for manifest in objects:
        yield with_digest(_with_owner(resource, manifest))


def _build_disruption_budgets(resource: SpeculativeDeployment, progression: Progression) -> Iterator[dict[str, Any]]:
    """Yield one budget for each revision that has pods, unless the user wants none."""
    if resource.spec.rollout.disruption.budget == "None":
        return
    revisions = (
        progression.stable_revision,
        progression.canary_revision,
        progression.previous.revision if progression.previous is not None else None,
    )
    for revision in dict.fromkeys(revisions):
        if revision is not None:
            yield deployment.build_disruption_budget(resource, revision)


def _build_traffic_objects(snapshot: Snapshot, desired: DesiredRevision, progression: Progression) -> Iterator[dict[str, Any]]:
    """Yield, in mode Gateway, the Services of the arms and then the route that refers to them."""
    resource = snapshot.resource
    main_revision = progression.stable_revision or progression.canary_revision
    if resource.spec.rollout.traffic.gateway is None or main_revision is None:
        return
    yield network.build_arm_service(resource, "stable", main_revision)
    weights = dict(progression.weights)
    if progression.stable_revision is not None and progression.canary_revision is not None:
        yield network.build_arm_service(resource, "canary", progression.canary_revision)
        if _has_control(progression):
            yield network.build_arm_service(resource, "control", progression.stable_revision)
        else:
            weights.pop("control", None)
    elif progression.previous is not None and progression.routes_to_all_pods:
        yield network.build_arm_service(resource, "previous", progression.previous.revision)
    elif (
        progression.stable_revision is not None
        and (fallback := _find_fallback_arm(snapshot, desired, progression.stable_revision)) is not None
    ):
        arm, revision = fallback
        yield network.build_arm_service(resource, arm, revision)
        weights = {"stable": 0, arm: TOTAL_WEIGHT}
    else:
        weights = {"stable": TOTAL_WEIGHT}
    yield network.build_http_route(resource, weights)


def _build_deployments(snapshot: Snapshot, desired: DesiredRevision, progression: Progression) -> Iterator[dict[str, Any]]:
    resource, arms = snapshot.resource, progression.target_replicas
    if progression.stable_revision is None:
        first_template = (
            resolve_pod_template(snapshot, desired, progression.canary_revision)
            if progression.canary_revision is not None
            else None
        )
        if progression.canary_revision is not None and first_template is not None:
            yield deployment.build_deployment(resource, first_template, progression.canary_revision, "stable", arms.canary)
        return
    stable_template = resolve_pod_template(snapshot, desired, progression.stable_revision)
    if stable_template is not None:
        yield deployment.build_deployment(resource, stable_template, progression.stable_revision, "stable", arms.stable)
    if progression.previous is not None:
        previous_template = resolve_pod_template(snapshot, desired, progression.previous.revision)
        if previous_template is not None:
            yield deployment.build_deployment(
                resource, previous_template, progression.previous.revision, "previous", progression.previous.replicas
            )
    if progression.canary_revision is None:
        return
    canary_template = resolve_pod_template(snapshot, desired, progression.canary_revision)
    if canary_template is not None:
        yield deployment.build_deployment(resource, canary_template, progression.canary_revision, "canary", arms.canary)
    if stable_template is not None and _has_control(progression):
        control_template = resolve_control_pod_template(snapshot, stable_template, progression.stable_revision)
        yield deployment.build_deployment(resource, control_template, progression.stable_revision, "control", arms.control)


def _find_fallback_arm(snapshot: Snapshot, desired: DesiredRevision, stable: str) -> tuple[str, str] | None:
    """Return arm and revision of the pods that stand in where no stable pod is ready; None without such pods.

    A rollout has left these pods behind, they are ready, and they are not about to be deleted (`find_objects_to_delete`).
    Candidates are the pods of a control, first of the stable revision; then those of the desired revision; and any pods while the
    rollout is suspended.
    """
    if snapshot.cluster.ready_pod_count(stable):
        return None
    owner = snapshot.resource.metadata.uid
    candidates = []
    for child in snapshot.cluster.children_of_kind("Deployment"):
        revision, control = read_labels(child).get(naming.REVISION_LABEL), read_labels(child).get(naming.CONTROL_LABEL) == "true"
        if revision is None or not is_owned_by(child, owner) or child["metadata"].get("deletionTimestamp"):
            continue
        if (control or revision == desired.revision or snapshot.is_rollout_suspended) and snapshot.cluster.ready_pod_count(
            revision, control=control
        ):
            candidates.append((not control, revision != stable, revision))
    if not candidates:
        return None
    is_canary, _, revision = min(candidates)
    return ("canary" if is_canary else "control"), revision


def _has_control(progression: Progression) -> bool:
    return progression.target_replicas.control > 0


def is_preflight_job_outdated(
    snapshot: Snapshot, desired: DesiredRevision, preflight_result: PreflightResult, runner: preflight_job.PreflightJobConfig
) -> bool:
    """Return whether a Job without a result runs with an earlier config of the operator, such as its pull secrets or its
    image."""
    job = snapshot.cluster.child("Job", preflight_job.preflight_job_name(snapshot.resource.metadata.name, desired.revision))
    if job is None or preflight_result.state not in ("Running", "Error"):
        return False
    template = resolve_pod_template(snapshot, desired, desired.revision)
    if template is None:
        return False
    desired_job = with_digest(
        _with_owner(snapshot.resource, preflight_job.build_preflight_job(snapshot.resource, desired.revision, template, runner))
    )
    applied_digest = (job["metadata"].get("annotations") or {}).get(APPLIED_DIGEST_ANNOTATION)
    # Webhooks may have changed the Job; so only the requested content is compared.
    return bool(applied_digest != desired_job["metadata"]["annotations"][APPLIED_DIGEST_ANNOTATION])


def find_objects_to_delete(
    snapshot: Snapshot,
    desired: DesiredRevision,
    desired_objects: list[dict[str, Any]],
    progression: Progression,
    current_time: datetime,
    *,
    job_expired: bool,
) -> Iterator[ObjectReference]:
    """Yield the resource's own objects that are no longer needed. `job_expired`: the Job is to be recreated."""
    desired_keys = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in desired_objects}
    named_revisions = _find_named_revisions(snapshot.resource, progression)
    for child in snapshot.cluster.children:
        key, metadata = (child["kind"], child["metadata"]["name"]), child["metadata"]
        if key in desired_keys or not is_owned_by(child, snapshot.resource.metadata.uid) or metadata.get("deletionTimestamp"):
            continue
        if child["kind"] == "Deployment":
            is_needed = _is_deployment_needed(snapshot, desired, progression, child, named_revisions, current_time)
        else:
            is_needed = _is_companion_needed(snapshot.resource, desired, child, named_revisions, job_expired=job_expired)
        if not is_needed:
            yield ObjectReference(*key, metadata["uid"])


def _find_named_revisions(resource: SpeculativeDeployment, progression: Progression) -> set[str]:
    """Return the revisions that the status that was read, or the one that is written, refers to."""
    status = resource.status or Status()
    old_revisions = {arm.revision for arm in (status.stable, status.canary, status.previous) if arm is not None}
    new_revisions = (
        progression.stable_revision,
        progression.canary_revision,
        progression.previous.revision if progression.previous is not None else None,
    )
    return old_revisions | {revision for revision in new_revisions if revision}


def _is_deployment_needed(
    snapshot: Snapshot,
    desired: DesiredRevision,
    progression: Progression,
    child: KubernetesObject,
    named_revisions: set[str],
    current_time: datetime,
) -> bool:
    """Return whether a Deployment that is not a desired object stays nevertheless."""
    status = snapshot.resource.status or Status()
    revision, is_control = read_labels(child).get(naming.REVISION_LABEL), read_labels(child).get(naming.CONTROL_LABEL) == "true"
    has_recorded_control = status.stable is not None and status.canary is not None and status.canary.control is not None
    if revision in named_revisions and (not is_control or has_recorded_control):
        return True  # after a crash, the status may lack what follows this revision
    # The control of the canary in progress is no desired object where its pod template is unknown.
    is_superseded_control = is_control and (
        progression.canary is None or revision != progression.stable_revision or _has_control(progression)
    )
    if not revision or not (revision == desired.revision or is_superseded_control):
        return False
    # It stands in until other pods are ready, although no arm needs it: for example the control of a removed canary.
    return bool(
        snapshot.cluster.ready_pod_count(revision, control=is_control)
        and count_missing_ready_pods(snapshot, named_revisions, current_time)
    )


def _is_companion_needed(
    resource: SpeculativeDeployment,
    desired: DesiredRevision,
    child: KubernetesObject,
    named_revisions: set[str],
    *,
    job_expired: bool,
) -> bool:
    """Return whether an object without pods of its own, and that is not a desired object, stays nevertheless."""
    kind, name, revision = child["kind"], child["metadata"]["name"], read_labels(child).get(naming.REVISION_LABEL)
    if kind == "PodDisruptionBudget":  # the budget of the revision's pods
        return revision in named_revisions and resource.spec.rollout.disruption.budget != "None"
    if kind == "ConfigMap":
        if name == calibration_config_map_name(resource.metadata.name):
            return True  # the calibration of stable pods, of whatever revision
        if name == tuning_config_map_name(resource.metadata.name) and tuning_record.is_tuning_enabled(resource):
            return True  # the tuner state
        return revision in named_revisions or revision == desired.revision  # the record of the revision's pods
    return bool(kind == "Job" and revision == desired.revision and not job_expired)  # the record of the preflight result


def _with_owner(resource: SpeculativeDeployment, manifest: dict[str, Any]) -> dict[str, Any]:
    owner = {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "name": resource.metadata.name,
        "uid": resource.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    metadata = {**manifest["metadata"], "namespace": resource.metadata.namespace, "ownerReferences": [owner]}
    return {**manifest, "metadata": metadata}
