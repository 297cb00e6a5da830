"""Recovery of the stable arm where the status has lost it: after a restore without status, or `status: null` by hand.

The status is the only record of what is stable, but the ready pods are visible. A resource without a status that has ready
pods gets the revision of most of those pods back as its stable one. Among revisions with equally many, the formerly stable one
wins. The content of the revision comes from its preflight record. Another revision with ready pods becomes a canary that is
rolled back, so that its pods stay as long as they are needed. From there on everything proceeds as usual: where another
revision is desired, it is rolled out by a canary.

The same holds where the status has no stable revision yet, and there are ready pods that it does not know. If these all belong
to the desired revision, however, they are a first revision's, and become stable as such (rollout/progression.py).

Guarantees: pure; ready pods are not deleted because no status names them. Not guaranteed: the rest of what was lost, such as
the history and a canary in progress, which restarts.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime

from aerie.api import ResourceError, SpeculativeDeployment
from aerie.api.status import Arm, CanaryArm, Status
from aerie.manifests import naming, preflight_job
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
    update: dict[str, Arm] = {"stable": read_recorded_arm(snapshot, stable_revision)}
    if other_revisions and first_canary is None:
        update["canary"] = build_withdrawn_canary(snapshot, other_revisions[0], now)
    status = status.model_copy(update=update)
    return replace(snapshot, resource=resource.model_copy(update={"status": status}))


def build_withdrawn_canary(snapshot: Snapshot, revision: str, now: datetime) -> CanaryArm:
    """Return a canary that is rolled back, for a revision with ready pods that no status names."""
    recorded_arm = dict(read_recorded_arm(snapshot, revision))
    return CanaryArm(**recorded_arm, change="", phase="RollingBack", start_time=now, ready_time=now, step_start_time=now)


def read_recorded_arm(snapshot: Snapshot, revision: str) -> Arm:
    """Return the recorded arm of the revision; only its name and replicas where the record is lost too."""
    record = snapshot.cluster.child("ConfigMap", preflight_job.preflight_job_name(snapshot.resource.metadata.name, revision))
    resource_json = ((record or {}).get("data") or {}).get(preflight_job.RESOURCE_KEY)
    replicas = ((snapshot.cluster.deployment(revision) or {}).get("spec") or {}).get("replicas") or 0
    try:
        desired = resolve_desired_revision(SpeculativeDeployment.from_dict(json.loads(resource_json or "")))
    except (ValueError, ResourceError):
        return Arm(revision=revision, replicas=replicas)
    return desired.arm.model_copy(update={"revision": revision, "replicas": replicas})
