"""The objects that have to exist for a progression, as they would be applied, and the objects that are no longer needed.

Guarantee: an object is deleted only if neither the status that was read nor the one that is written refers to it. So a crash
between the two loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import islice
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.status import Status
from aerie.manifests import (
    deployment,
    evaluator,
    expected_drafter_config_map,
    naming,
    network,
    plugin_config_map,
    preflight_job,
    recorder,
)
from aerie.manifests.apply_diff import APPLIED_DIGEST_ANNOTATION, needs_apply, with_digest
from aerie.manifests.calibration_config_map import calibration_config_map_name
from aerie.manifests.rollout_history_config_map import rollout_history_config_map_name
from aerie.manifests.tuning_config_map import tuning_config_map_name
from aerie.rollout.canary.analysis_run import calibration_record
from aerie.rollout.capacity.arms import count_missing_ready_pods
from aerie.rollout.capacity.traffic_weights import TOTAL_WEIGHT
from aerie.rollout.children import tuning_record
from aerie.rollout.children.request_copies import find_copy_service, find_shadow_service
from aerie.rollout.facts.pod_address import find_engine_url
from aerie.rollout.facts.pod_failures import is_pod_ready
from aerie.rollout.facts.snapshot import KubernetesObject, Snapshot, is_owned_by, read_labels
from aerie.rollout.plan import ObjectReference
from aerie.rollout.progression.progression import Progression
from aerie.rollout.revision.desired import DesiredRevision
from aerie.rollout.revision.drafter_change import find_running_drafter
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
        network.build_main_service(resource, progression.build_serving_selector(snapshot.cluster)),
        *_build_disruption_budgets(resource, progression),
    ]
    objects += _build_evaluator(snapshot, progression, runner)
    objects += _build_recorder(resource, runner)
    objects += _build_traffic_objects(snapshot, desired, progression)
    needs_record = progression.needs_preflight_job or desired.revision in (
        progression.stable_revision,
        progression.canary_revision,
        *_find_in_place_revisions(progression),
    )
    template = resolve_pod_template(snapshot, desired, desired.revision)
    if needs_record and template is not None:
        objects.append(
            preflight_job.build_preflight_config_map(desired.resource, desired.revision, template, preflight_result.record)
        )
    if progression.needs_preflight_job and template is not None and preflight_result.state == "Absent":
        # A Job cannot be changed: an existing one is left as it is.
        running = find_running_drafter(snapshot, desired)
        objects.append(preflight_job.build_preflight_job(resource, desired.revision, template, runner, running))
    objects += _build_expected_drafters(resource.metadata.name, progression)
    deployments = list(_build_deployments(snapshot, desired, progression))
    objects += [*_build_plugin(snapshot, deployments), *deployments]
    calibration = snapshot.operator.baseline_calibration
    if calibration is not None and calibration_record.is_calibration_write_due(
        calibration, calibration_record.read_stored_calibration(snapshot), canary_active=progression.canary is not None
    ):
        objects.append(calibration_record.build_calibration_config_map(resource, calibration))
    if snapshot.operator.tuning_record is not None and tuning_record.is_tuning_write_due(snapshot):
        objects.append(tuning_record.build_tuning_config_map(resource, snapshot.operator.tuning_record))
    for manifest in objects:
        yield with_digest(with_owner(resource, manifest))


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
    yield network.build_http_route(resource, weights, find_copy_service(snapshot, progression))


def _build_evaluator(
    snapshot: Snapshot, progression: Progression, config: preflight_job.PreflightJobConfig
) -> Iterator[dict[str, Any]]:
    """Yield the objects of the evaluator during a shadow evaluation."""
    rollout, resource = progression.in_place, snapshot.resource
    if progression.stable_revision is not None and progression.evaluates_canary:
        assert progression.canary is not None, "it is the one that is evaluated"
        yield evaluator.build_evaluator_service(resource)
        # Without a ready pod of each arm there is no evaluator: requests to a pod that has ended would count as failed.
        canary_pods = _find_ready_pods(snapshot.cluster.live_pods(progression.canary.revision))
        control_pods = _find_control_pods(snapshot, progression.stable_revision, len(canary_pods))
        if canary_pods and control_pods:
            yield evaluator.build_paired_evaluator_deployment(
                resource, next(iter(canary_pods.values())), list(canary_pods), list(control_pods), config
            )
        return
    if rollout is None or rollout.phase != "Evaluating" or progression.stable_revision is None:
        return
    names = {(trial_pod.name, trial_pod.uid) for trial_pod in rollout.pods}
    for pod in snapshot.cluster.live_pods(progression.stable_revision):
        if (pod["metadata"]["name"], pod["metadata"].get("uid")) in names and (url := find_engine_url(pod)) is not None:
            assert rollout.first_window_seconds is not None, "it is set with the phase"
            yield evaluator.build_evaluator_deployment(resource, pod, url, rollout.first_window_seconds, config)
    if find_shadow_service(resource, progression) is not None:
        yield evaluator.build_evaluator_service(resource)


def _build_recorder(resource: SpeculativeDeployment, config: preflight_job.PreflightJobConfig) -> Iterator[dict[str, Any]]:
    """Yield the objects of the recorder, if there is a gateway that can send it copies of requests."""
    capture = resource.spec.capture
    if capture is not None and resource.spec.rollout.traffic.gateway is not None:
        yield recorder.build_recorder_service(resource)
        yield recorder.build_recorder_deployment(resource, capture, config)


def is_recorder_applied(snapshot: Snapshot, config: preflight_job.PreflightJobConfig) -> bool:
    """Return whether the live recorder is as the spec requests it."""
    resource = snapshot.resource
    return not any(
        needs_apply(snapshot.cluster.child(item["kind"], item["metadata"]["name"]), with_digest(with_owner(resource, item)))
        for item in _build_recorder(resource, config)
    )


def _find_control_pods(snapshot: Snapshot, stable_revision: str, count: int) -> dict[str, KubernetesObject]:
    """Return the ready control pods or, without any that are requested, as many stable ones, as `_find_ready_pods` does."""
    if snapshot.cluster.deployment(stable_revision, control=True) is not None:
        return _find_ready_pods(snapshot.cluster.live_pods(stable_revision, control=True))
    return dict(islice(_find_ready_pods(snapshot.cluster.live_pods(stable_revision)).items(), count))


def _find_ready_pods(pods: Iterable[KubernetesObject]) -> dict[str, KubernetesObject]:
    """Return the ready pods by the address of the engine, in the order of the pods' names."""
    ready = sorted(filter(is_pod_ready, pods), key=lambda pod: str(pod["metadata"]["name"]))
    return {url: pod for pod in ready if (url := find_engine_url(pod)) is not None}


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
        control_template = resolve_control_pod_template(
            snapshot, stable_template, progression.stable_revision, is_evaluated=progression.is_canary_isolated
        )
        yield deployment.build_deployment(resource, control_template, progression.stable_revision, "control", arms.control)


def _build_expected_drafters(resource_name: str, progression: Progression) -> Iterator[dict[str, Any]]:
    """Yield, for each revision whose new pods come to another drafter than that of the revision, the ConfigMap with it."""
    drafters = {progression.stable_revision: progression.expected_drafter}
    drafters |= {arm.revision: arm.in_place for arm in (progression.canary, progression.previous) if arm is not None}
    for revision, drafter in drafters.items():
        if revision is not None and drafter is not None:
            yield expected_drafter_config_map.build_expected_drafter_config_map(resource_name, revision, drafter)


def _build_plugin(snapshot: Snapshot, deployments: Iterable[KubernetesObject]) -> Iterator[dict[str, Any]]:
    """Yield the ConfigMap with the plugin where pods need it and it does not exist. An existing one cannot have changed."""
    name = plugin_config_map.plugin_config_map_name(snapshot.resource.metadata.name)
    if name in _find_mounted_plugins(deployments) and snapshot.cluster.child("ConfigMap", name) is None:
        yield plugin_config_map.build_plugin_config_map(snapshot.resource.metadata.name)


def _find_mounted_plugins(deployments: Iterable[KubernetesObject]) -> set[str | None]:
    """Return the names of the ConfigMaps from which pods of the Deployments have the plugin."""
    return {plugin_config_map.find_plugin_config_map(item["spec"]["template"]) for item in deployments}


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
        with_owner(
            snapshot.resource,
            preflight_job.build_preflight_job(
                snapshot.resource, desired.revision, template, runner, find_running_drafter(snapshot, desired)
            ),
        )
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
    recorded_revisions = {desired.revision, *named_revisions, *_find_in_place_revisions(progression)}
    recorded_revisions.update(_find_in_place_revisions(snapshot.resource.status or Status()))
    mounted_plugins = _find_mounted_plugins(
        [*snapshot.cluster.children_of_kind("Deployment"), *(item for item in desired_objects if item["kind"] == "Deployment")]
    )
    for child in snapshot.cluster.children:
        key, metadata = (child["kind"], child["metadata"]["name"]), child["metadata"]
        if key in desired_keys or not is_owned_by(child, snapshot.resource.metadata.uid) or metadata.get("deletionTimestamp"):
            continue
        if child["kind"] == "Deployment":
            is_needed = _is_deployment_needed(snapshot, desired, progression, child, named_revisions, current_time)
        elif child["kind"] == "ConfigMap":
            is_needed = _is_config_map_needed(snapshot.resource, child, mounted_plugins, recorded_revisions)
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


def _find_in_place_revisions(state: Progression | Status) -> set[str]:
    """Return the revisions without pods of their own whose drafter pods serve with, or change to."""
    drafters = [arm.in_place for arm in (state.canary, state.previous) if arm is not None]
    if isinstance(state, Progression):
        drafters.append(state.stable_in_place)
        rollout = state.in_place
    else:
        drafters.append(state.stable.in_place if state.stable is not None else None)
        rollout = state.in_place_rollout
    return {item.revision for item in (*drafters, rollout) if item is not None}


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


def _is_config_map_needed(
    resource: SpeculativeDeployment, child: KubernetesObject, mounted_plugins: set[str | None], recorded_revisions: set[str]
) -> bool:
    """Return whether a ConfigMap that is not a desired object stays nevertheless."""
    resource_name, name = resource.metadata.name, child["metadata"]["name"]
    revision = read_labels(child).get(naming.REVISION_LABEL)
    if plugin_config_map.is_plugin_config_map(resource_name, name):
        return name in mounted_plugins
    if name in (calibration_config_map_name(resource_name), rollout_history_config_map_name(resource_name)):
        return True  # the calibration of stable pods, of whatever revision; and the records of rollouts
    if name == tuning_config_map_name(resource_name) and tuning_record.is_tuning_enabled(resource):
        return True  # the tuner state
    if revision is not None and name == naming.expected_drafter_config_map_name(resource_name, revision):
        return False  # new pods are to come to the drafter of their revision, before the status changes
    return revision in recorded_revisions  # the record of the revision's pods


def _is_companion_needed(
    resource: SpeculativeDeployment,
    desired: DesiredRevision,
    child: KubernetesObject,
    named_revisions: set[str],
    *,
    job_expired: bool,
) -> bool:
    """Return whether an object without pods of its own, and that is not a desired object, stays nevertheless."""
    kind, revision = child["kind"], read_labels(child).get(naming.REVISION_LABEL)
    if kind == "PodDisruptionBudget":  # the budget of the revision's pods
        return revision in named_revisions and resource.spec.rollout.disruption.budget != "None"
    return bool(kind == "Job" and revision == desired.revision and not job_expired)  # the record of the preflight result


def with_owner(resource: SpeculativeDeployment, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the object as the resource owns it."""
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
