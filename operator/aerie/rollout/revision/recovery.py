"""What is stable where the status does not say it any more: after a restore without status, or `status: null` by hand.

The status is the only record of what is stable, but the pods that serve are there to be seen. A resource without a status, of
which pods serve, gets the revision of most of those pods back as its stable one, and of as many the one that was it; what the
revision is, its preflight's record says. Another revision of which pods serve is a canary on its way out, so that its pods stay
as long as they are needed. From there on all is as ever: where the spec asks for another revision, it goes out by a canary.

The same holds where the status says that nothing is stable yet, and pods serve of which it knows nothing; but if these are all of
the revision that the spec asks for, they are a first revision's, and become stable as such (course.py).

Guarantees: pure; pods that serve are not deleted because nobody remembers them. Not guaranteed: the rest of what was lost, such
as a canary under way, which begins anew, and the history.
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
    """The same, with a stable arm in the status where it has none and pods serve that it does not know."""
    resource, status = snapshot.resource, snapshot.resource.status or Status()
    first = status.canary
    if status.stable is not None or (first is not None and snapshot.ready_pod_count(first.revision)):
        return snapshot
    serving: dict[str, tuple[int, bool]] = {}
    for item in snapshot.children_of_kind("Deployment"):
        revision = read_labels(item).get(naming.REVISION_LABEL)
        if revision is None or not is_owned_by(item, resource.metadata.uid):
            continue
        control = read_labels(item).get(naming.CONTROL_LABEL) == "true"  # it is of the stable revision too
        count, was_stable = serving.get(revision, (0, False))
        count += snapshot.ready_pod_count(revision, control=control)
        if count:
            serving[revision] = (count, was_stable or control or read_labels(item).get(naming.ARM_LABEL) == "stable")
    if not serving or (status.phase is not None and set(serving) == {resolve_desired_revision(resource).revision}):
        return snapshot
    stable, *others = sorted(serving, key=lambda each: (*serving[each], each), reverse=True)
    update: dict[str, Arm] = {"stable": read_recorded_arm(snapshot, stable)}
    if others and first is None:
        update["canary"] = build_withdrawn_canary(snapshot, others[0], now)
    status = status.model_copy(update=update)
    return replace(snapshot, resource=resource.model_copy(update={"status": status}))


def build_withdrawn_canary(snapshot: Snapshot, revision: str, now: datetime) -> CanaryArm:
    """A revision of which pods serve and that nothing names: a canary on its way out."""
    known = dict(read_recorded_arm(snapshot, revision))
    return CanaryArm(**known, change="", phase="RollingBack", started_at=now, ready_at=now, step_started_at=now)


def read_recorded_arm(snapshot: Snapshot, revision: str) -> Arm:
    """What is recorded of the revision; nothing but its name where that is lost too."""
    record = snapshot.child("ConfigMap", preflight_job.preflight_job_name(snapshot.resource.metadata.name, revision))
    text = ((record or {}).get("data") or {}).get(preflight_job.RESOURCE_KEY)
    replicas = ((snapshot.deployment(revision) or {}).get("spec") or {}).get("replicas") or 0
    try:
        wanted = resolve_desired_revision(SpeculativeDeployment.from_dict(json.loads(text or "")))
    except (ValueError, ResourceError):
        return Arm(revision=revision, replicas=replicas)
    return wanted.arm.model_copy(update={"revision": revision, "replicas": replicas})
