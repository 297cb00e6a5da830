"""Recovery of the stable arm where the status has lost it: after a restore without status, or `status: null` by hand.

The status is the only record of what is stable, but the ready pods are visible. A resource without a status that has ready
pods gets the revision of most of those pods back as its stable one. Among revisions with equally many, the formerly stable one
wins. The content of the revision comes from its preflight record, and the drafter that was promoted in place from the ConfigMap
by which new pods come to it. Another revision with ready pods becomes a canary that is
rolled back, so that its pods stay as long as they are needed. From there on everything proceeds as usual: where another
revision is desired, it is rolled out by a canary.

The same holds where the status has no stable revision yet, and there are ready pods that it does not know. If these all belong
to the desired revision, however, they are a first revision's, and become stable as such (rollout/progression).

Guarantees: pure; ready pods are not deleted because no status names them. Not guaranteed: the rest of what was lost, such as
the history and a canary in progress, which restarts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from aerie.api import ResourceError, SpeculativeDeployment
from aerie.api.status import Arm, CanaryArm, InPlaceDrafter, Status
from aerie.manifests import expected_drafter_config_map, naming, preflight_job
from aerie.rollout.facts.snapshot import Snapshot, is_owned_by, read_labels
from aerie.rollout.revision.desired import resolve_desired_revision


def restore_stable_arm(snapshot: Snapshot, now: datetime) -> Snapshot:
    """Return the snapshot with a stable arm in its status, where the status has none and there are ready pods unknown to it."""
    resource, status = snapshot.resource, snapshot.resource.status or Status()
    first_canary = status.canary
    if status.stable is not None or (first_canary is not None and snapshot.cluster.ready_pod_count(first_canary.revision)):
        return snapshot
    ready_by_revision: dict[str, tuple[int, bool]] = {}
    for deployment in snapshot.cluster.children_of_kind("Deployment"):
        revision = read_labels(deployment).get(naming.REVISION_LABEL)
        if revision is None or not is_owned_by(deployment, resource.metadata.uid):
            continue
        is_control = read_labels(deployment).get(naming.CONTROL_LABEL) == "true"  # control pods have the stable revision too
        ready_pods, was_stable = ready_by_revision.get(revision, (0, False))
        ready_pods += snapshot.cluster.ready_pod_count(revision, control=is_control)
        if ready_pods:
            ready_by_revision[revision] = (
                ready_pods,
                was_stable or is_control or read_labels(deployment).get(naming.ARM_LABEL) == "stable",
            )
    if not ready_by_revision or (
        status.phase is not None and set(ready_by_revision) == {resolve_desired_revision(resource).revision}
    ):
        return snapshot
    stable_revision, *other_revisions = sorted(ready_by_revision, key=lambda name: (*ready_by_revision[name], name), reverse=True)
    update: dict[str, Arm] = {"stable": _recover_arm(snapshot, stable_revision)}
    if other_revisions and first_canary is None:
        update["canary"] = build_withdrawn_canary(snapshot, other_revisions[0], now)
    status = status.model_copy(update=update)
    return replace(snapshot, resource=resource.model_copy(update={"status": status}))


def build_withdrawn_canary(snapshot: Snapshot, revision: str, now: datetime) -> CanaryArm:
    """Return a canary that is rolled back, for a revision with ready pods that no status names."""
    recorded_arm = dict(_recover_arm(snapshot, revision))
    return CanaryArm(**recorded_arm, change="", phase="RollingBack", start_time=now, ready_time=now, step_start_time=now)


def read_recorded_arm(snapshot: Snapshot, revision: str) -> Arm:
    """Return the recorded arm of the revision, with the revision's own drafter; only its name and replicas where the record is
    lost too."""
    replicas = ((snapshot.cluster.deployment(revision) or {}).get("spec") or {}).get("replicas") or 0
    resource = read_recorded_resource(snapshot, revision)
    arm = Arm(revision=revision) if resource is None else resolve_desired_revision(resource).arm
    return arm.model_copy(update={"revision": revision, "replicas": replicas})


def with_served_drafter(arm: Arm, in_place: InPlaceDrafter | None) -> Arm:
    """Return the arm of a revision with the drafter that its pods serve with; None: that of the revision."""
    return arm if in_place is None else arm.model_copy(update={"in_place": in_place, "drafter": in_place.drafter})


def read_recorded_resource(snapshot: Snapshot, revision: str) -> SpeculativeDeployment | None:
    """Return the resource as the revision's record has it: what its pods were built from; None without a readable record."""
    data = _read_config_map(snapshot, preflight_job.preflight_job_name(snapshot.resource.metadata.name, revision))
    try:
        return SpeculativeDeployment.from_dict(json.loads(data.get(preflight_job.RESOURCE_KEY) or ""))
    except (ValueError, ResourceError):
        return None


def _recover_arm(snapshot: Snapshot, revision: str) -> Arm:
    """Return the recorded arm of the revision, with the drafter that its new pods come to."""
    name = naming.expected_drafter_config_map_name(snapshot.resource.metadata.name, revision)
    drafter = expected_drafter_config_map.read_in_place_drafter(_read_config_map(snapshot, name))
    return with_served_drafter(read_recorded_arm(snapshot, revision), drafter)


def _read_config_map(snapshot: Snapshot, name: str) -> Mapping[str, str]:
    """Return the data of a ConfigMap of the resource's; empty without one."""
    config_map = snapshot.cluster.child("ConfigMap", name)
    owned = config_map is not None and is_owned_by(config_map, snapshot.resource.metadata.uid)
    return (config_map.get("data") or {}) if config_map is not None and owned else {}
