"""Whether a change is rolled out in place, or the reason why not.

    not of the drafter alone ──────────────────────► by pods, in every mode
    the drafter with which the pods were started ──► in place, in every mode: there are no other pods to roll it out by
    mode Off; preflight; pods that cannot change ──► by pods; with mode Required the rollout fails

Guarantees: pure; each reason has the field, its value and what to do. Not guaranteed: that a pod accepts the drafter. It checks
the files itself in the phase Staging.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aerie.api.status import Arm
from aerie.manifests import plugin_config_map, preflight_job
from aerie.manifests.revision_hash import RENEW_ANNOTATION, list_changed_fields
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.drafters import DrafterObservation
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.revision.desired import DesiredRevision, read_status_setting
from aerie.rollout.revision.drafter_change import find_source_obstacle, is_of_drafter_alone
from aerie.rollout.revision.preflight_result import PreflightResult
from aerie.rollout.revision.recovery import read_recorded_resource


def find_in_place_obstacle(
    snapshot: Snapshot, desired: DesiredRevision, stable: Arm, preflight_result: PreflightResult
) -> str | None:
    """Return why the desired revision is not rolled out in place, as a sentence; None if it is.

    In mode Required, an obstacle fails the rollout only if the change is of the drafter alone
    (`revision.drafter_change.is_of_drafter_alone`).
    """
    if desired.revision == stable.revision:
        return None
    return next(_iter_obstacles(snapshot, desired, stable, preflight_result), None)


def _iter_obstacles(
    snapshot: Snapshot, desired: DesiredRevision, stable: Arm, preflight_result: PreflightResult
) -> Iterator[str]:
    if desired.resource.spec.rollout.in_place.mode == "Off":
        yield "spec.rollout.inPlace.mode is Off: set it to Auto for changes in place."
    if not is_of_drafter_alone(snapshot, desired, stable):
        yield _describe_other_changes(snapshot, desired, stable)
    ready_pods = [pod for pod in snapshot.cluster.live_pods(stable.revision) if pod_failures.is_pod_ready(pod)]
    if not ready_pods:
        yield f"No pod of the stable revision {stable.revision} is ready, so there is no engine to change."
    running = read_recorded_resource(snapshot, stable.revision)
    if running is None:
        yield (
            f"There is no record of revision {stable.revision} (ConfigMap {_record_name(snapshot, stable.revision)}), so it is "
            "unknown which drafters its pods can read: the next rollout by pods writes one."
        )
    elif (obstacle := find_source_obstacle(running, desired)) is not None:
        yield obstacle
    deployment = snapshot.cluster.deployment(stable.revision)
    if deployment is None or plugin_config_map.find_plugin_config_map(deployment["spec"]["template"]) is None:
        cause = desired.plugin_obstacle or (
            f"the next rollout by pods adds it; a new value of the annotation {RENEW_ANNOTATION} makes such pods now."
        )
        yield f"Pods of revision {stable.revision} run without Aerie's plugin of vLLM: {cause}"
    yield from _find_preflight_problems(preflight_result.record or {}, stable)
    yield from _find_pod_problems(ready_pods, snapshot.engines.drafters)


def _describe_other_changes(snapshot: Snapshot, desired: DesiredRevision, stable: Arm) -> str:
    """Return what changes beside the drafter."""
    served = read_recorded_resource(snapshot, stable.served_revision)
    if served is None:
        return (
            f"There is no record of revision {stable.served_revision} (ConfigMap "
            f"{_record_name(snapshot, stable.served_revision)}), so it is unknown whether only the drafter changes: the next "
            "rollout by pods writes one."
        )
    setting = desired.setting if stable.setting is None else read_status_setting(stable.setting)
    changed = list_changed_fields(desired.resource, desired.setting, served, setting)
    if not changed:
        return (
            f"The record of revision {stable.served_revision} (ConfigMap {_record_name(snapshot, stable.served_revision)}) was "
            "edited, so it is unknown whether only the drafter changes: the next rollout by pods writes one."
        )
    text = ", ".join(changed)
    return f"The change is not of the drafter alone (also {text}): change spec.drafter by itself for a change in place."


def _record_name(snapshot: Snapshot, revision: str) -> str:
    return preflight_job.preflight_job_name(snapshot.resource.metadata.name, revision)


def _find_preflight_problems(record: Mapping[str, Any], stable: Arm) -> Iterator[str]:
    """Yield why preflight has found that the drafter does not fit the engines that run now."""
    problems = record.get("inPlaceProblems")
    if problems and record.get("inPlaceRunning") == stable.revision:
        yield f"Preflight: the drafter does not fit the running engines: {' '.join(map(str, problems))}"


def _find_pod_problems(ready_pods: Sequence[Mapping[str, Any]], observations: Mapping[str, DrafterObservation]) -> Iterator[str]:
    """Yield why pods can never change their drafter. A failure of an earlier attempt is no reason: the pod tries again."""
    for name in sorted(pod["metadata"]["name"] for pod in ready_pods):
        observation = observations.get(name, DrafterObservation())
        if observation.problem is not None and observation.problem.reason == "NoEndpoint":
            yield f"Pod {name}: {observation.problem.message}"
        elif observation.state is not None and observation.state.unfit is not None:
            yield f"Pod {name}: {observation.state.unfit.message}"
