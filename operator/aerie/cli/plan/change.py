"""What the operator would start for a resource as it would be after an apply: its own decision on a snapshot of the cluster.

    resource after the apply, its objects and pods ─► without what is in progress of another revision
                                                  ─► reconcile, until it starts the desired revision or rests ─► PlannedChange

The decision is `build_reconcile_plan`, with preflight skipped and without a pause: `PlannedChange` is what follows once preflight
has passed and the rollout is resumed.

Guarantees: pure. A change without a rollout names the objects that differ from those of the live resource. Not guaranteed: a
rollback in progress that cannot end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from aerie.api import ResourceError, SpeculativeDeployment
from aerie.api.rollout import PreflightSpec
from aerie.api.status import Arm, Status
from aerie.engine.models.drafter_catalog import DrafterCatalog
from aerie.manifests import naming
from aerie.manifests.apply_diff import APPLIED_DIGEST_ANNOTATION
from aerie.manifests.preflight_job import PreflightJobConfig
from aerie.rollout.facts.orphans import exclude_orphans
from aerie.rollout.facts.snapshot import ClusterState, Snapshot, read_labels
from aerie.rollout.in_place.eligibility import find_in_place_obstacle
from aerie.rollout.plan import ReconcilePlan
from aerie.rollout.reasons import ProgressingReason
from aerie.rollout.reconcile import build_reconcile_plan
from aerie.rollout.revision.desired import DesiredRevision, resolve_desired_revision
from aerie.rollout.revision.drafter_selection import select_drafter
from aerie.rollout.revision.pod_template import resolve_pod_template
from aerie.rollout.revision.preflight_result import PreflightResult, read_preflight_result
from aerie.rollout.revision.recovery import restore_stable_arm
from aerie.rollout.trials.effective_setting import resolve_effective_setting

ChangeKind = Literal[
    "Unchanged",
    "Settings",
    "Network",
    "Scaling",
    "InPlace",
    "Canary",
    "FirstRevision",
    "Continues",
    "Adopted",
    "Reverted",
    "Withdrawn",
    "Rejected",
    "Delayed",
    "Impossible",
]
"""What follows an apply. Continues: the rollout in progress is the desired one. Adopted: the revision becomes stable without a
comparison. Reverted: the previous revision, whose pods are retained, serves again. Withdrawn: the rollout in progress ends, and
the stable revision serves on. Delayed: it is retried when there may be capacity."""
ROLLOUT_KINDS: frozenset[ChangeKind] = frozenset({"InPlace", "Canary", "FirstRevision"})
"""Changes that start pods, or change them."""
_NETWORK_KINDS = frozenset({"Service", "HTTPRoute", "PodDisruptionBudget"})
_IN_PLACE_IMPOSSIBLE: ProgressingReason = "InPlaceImpossible"
_MAX_RECONCILES = 8
_RUNNER = PreflightJobConfig("")
"""No Job is created, so its image matters only in objects that are left out here."""


@dataclass(frozen=True)
class Superseded:
    """A rollout in progress that the apply ends."""

    revision: str
    change: str
    phase: str


@dataclass(frozen=True)
class PlannedChange:
    """What follows an apply."""

    kind: ChangeKind
    desired: DesiredRevision
    snapshot: Snapshot
    """The snapshot from which the change starts."""
    status: Status
    """Status with which it starts."""
    message: str
    """What the operator would report, as sentences."""
    stable: Arm | None = None
    """The arm that serves before; None for a first revision."""
    superseded: Superseded | None = None
    is_paused: bool = False
    """Whether nothing of this happens before spec.rollout.paused is false."""
    in_place_obstacle: str = ""
    """Why a canary is needed, as a sentence; empty where none is."""
    changed_fields: tuple[str, ...] = ()
    """Fields that the apply changes, except in the status."""
    objects: tuple[str, ...] = ()
    """Objects that change, without those of a rollout, as Kind/name."""
    recorded_preflight: PreflightResult | None = None
    """Result of the operator's preflight of the desired revision, where there is one."""

    @property
    def description(self) -> str:
        """What is new in the revision; empty where nothing is rolled out."""
        candidate = self.status.canary or self.status.in_place_rollout
        return candidate.change if candidate is not None and candidate.revision == self.desired.revision else ""

    def read_templates(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Return the pod templates of the stable and of the desired revision."""
        before = resolve_pod_template(self.snapshot, self.desired, self.stable.revision) if self.stable is not None else None
        return before, resolve_pod_template(self.snapshot, self.desired, self.desired.revision)


def plan_change(
    document: Mapping[str, Any], cluster: ClusterState, live: Mapping[str, Any] | None, now: datetime, catalog: DrafterCatalog
) -> PlannedChange:
    """Return what follows an apply. `document`: the resource after it; `live`: before it, or None. Raises ResourceError."""
    resource = SpeculativeDeployment.from_dict(dict(document))
    snapshot = restore_stable_arm(exclude_orphans(Snapshot(_without_gates(resource), cluster))[0], now)
    before = snapshot.resource.status or Status()
    desired = _resolve_desired(snapshot, now, catalog)
    recorded = read_preflight_result(replace(snapshot, resource=resource), desired.revision, now)
    current = _end_other_rollout(snapshot, desired)
    first_plan = plan = build_reconcile_plan(current, _RUNNER, now, catalog)
    for _ in range(_MAX_RECONCILES):
        is_at_rest = plan.status == current.resource.status and not plan.objects_to_delete
        if is_at_rest or _starts(plan.status, desired):
            break
        current = _end_other_rollout(_apply_plan(current, plan), desired)
        plan = build_reconcile_plan(current, _RUNNER, now, catalog)
    status = plan.status
    kind = _classify(before, status, desired)
    superseded = _find_superseded(before, status, desired)
    objects: tuple[str, ...] = ()
    if kind is None and superseded is not None:
        kind = "Withdrawn"
    elif kind is None:
        objects, kind = _find_changed_objects(first_plan, cluster, live, now, catalog)
    changed_fields = tuple(_iter_changed_fields(live or {}, document)) if live is not None else ()
    if kind == "Unchanged" and changed_fields:
        kind = "Settings"
    stable = (current.resource.status or Status()).stable
    obstacle = None
    if kind == "Canary" and stable is not None:
        with_drafter = replace(current, resource=select_drafter(current.resource, catalog).resource)
        obstacle = find_in_place_obstacle(with_drafter, desired, stable, PreflightResult("Skipped", ""))
    progressing = next((item for item in status.conditions if item.type == "Progressing"), None)
    return PlannedChange(
        kind,
        desired,
        current,
        status,
        progressing.message if progressing is not None else "",
        stable,
        superseded,
        resource.spec.rollout.paused,
        obstacle or "",
        changed_fields,
        objects,
        recorded if recorded.state in ("Passed", "Failed") else None,
    )


def _without_gates(resource: SpeculativeDeployment) -> SpeculativeDeployment:
    """Return the resource whose desired revision starts now: preflight and pause are shown apart."""
    rollout = resource.spec.rollout.model_copy(update={"paused": False, "preflight": PreflightSpec(mode="Off")})
    return resource.model_copy(update={"spec": resource.spec.model_copy(update={"rollout": rollout})})


def _resolve_desired(snapshot: Snapshot, now: datetime, catalog: DrafterCatalog) -> DesiredRevision:
    selection = select_drafter(snapshot.resource, catalog)
    setting = resolve_effective_setting(replace(snapshot, resource=selection.resource), now)
    return resolve_desired_revision(selection.resource, selection.problem, setting.setting, setting.trial)


def _end_other_rollout(snapshot: Snapshot, desired: DesiredRevision) -> Snapshot:
    """Return the snapshot after the end of a rollout of another revision than the desired one."""
    status = snapshot.resource.status or Status()
    candidate = status.canary or status.in_place_rollout
    if status.stable is None or candidate is None or candidate.revision == desired.revision:
        return snapshot  # a first revision is adopted or replaced, without a rollback
    ended_status = status.model_copy(update={"canary": None, "in_place_rollout": None, "analysis": None})
    revisions = {candidate.revision} - {status.stable.revision}
    return replace(
        snapshot,
        resource=snapshot.resource.model_copy(update={"status": ended_status}),
        cluster=_without_arms(snapshot.cluster, revisions, with_control=status.canary is not None),
    )


def _find_superseded(before: Status, after: Status, desired: DesiredRevision) -> Superseded | None:
    """Return the rollout in progress that ends, or the promotion that is reverted because of a third revision."""
    candidate = before.canary or before.in_place_rollout
    if candidate is not None and candidate.revision != desired.revision:
        if after.stable is not None and after.stable.revision == candidate.revision:
            return None  # a first revision that serves already, and is adopted
        return Superseded(candidate.revision, candidate.change, candidate.phase)
    stable, previous = before.stable, before.previous
    if stable is None or previous is None or _returns_to_previous(before, desired):
        return None
    is_reverted = after.stable is not None and after.stable.revision == previous.revision
    return Superseded(stable.revision, previous.change, previous.phase) if is_reverted else None


def _without_arms(cluster: ClusterState, revisions: set[str], *, with_control: bool) -> ClusterState:
    def remains(item: Mapping[str, Any]) -> bool:
        labels = read_labels(item)
        is_control = with_control and labels.get(naming.CONTROL_LABEL) == "true"
        return not (is_control or labels.get(naming.REVISION_LABEL) in revisions)

    children = tuple(child for child in cluster.children if child["kind"] != "Deployment" or remains(child))
    return replace(cluster, children=children, pods=tuple(filter(remains, cluster.pods)))


def _starts(status: Status, desired: DesiredRevision) -> bool:
    return any(arm is not None and arm.revision == desired.revision for arm in (status.canary, status.in_place_rollout))


def _apply_plan(snapshot: Snapshot, plan: ReconcilePlan) -> Snapshot:
    """Return the snapshot after a reconcile: its status is written, and the Deployments that it deletes have ended."""
    resource = snapshot.resource.model_copy(update={"status": plan.status})
    deleted = {(reference.kind, reference.name) for reference in plan.objects_to_delete}
    cluster = snapshot.cluster
    gone = [child for child in cluster.children if (child["kind"], child["metadata"]["name"]) in deleted]
    revisions = {str(read_labels(child).get(naming.REVISION_LABEL)) for child in gone if child["kind"] == "Deployment"}
    serving = {arm.revision for arm in (plan.status.stable, plan.status.canary, plan.status.previous) if arm is not None}
    cluster = _without_arms(cluster, revisions - serving, with_control=False)
    children = tuple(child for child in cluster.children if (child["kind"], child["metadata"]["name"]) not in deleted)
    return replace(snapshot, resource=resource, cluster=replace(cluster, children=children))


def _classify(before: Status, after: Status, desired: DesiredRevision) -> ChangeKind | None:
    """Return what the operator starts; None: the stable pods serve the desired revision already."""
    reason = next((item.reason for item in after.conditions if item.type == "Progressing"), "")
    if desired.problem or reason == _IN_PLACE_IMPOSSIBLE:
        return "Impossible"
    if _starts(after, desired):
        if _starts(before, desired):
            return "Rejected" if after.rejected_revision == desired.revision else "Continues"
        if after.stable is None:
            return "FirstRevision"
        return "Canary" if after.canary is not None else "InPlace"
    if after.rejected_revision == desired.revision:
        return "Rejected"
    if after.stable is None or after.stable.served_revision != desired.revision:
        return "Reverted" if _returns_to_previous(before, desired) else "Delayed"
    if before.stable is not None and before.stable.served_revision == desired.revision:
        return None
    return "Reverted" if _returns_to_previous(before, desired) else "Adopted"


def _returns_to_previous(before: Status, desired: DesiredRevision) -> bool:
    return before.previous is not None and before.previous.served_revision == desired.revision


def _find_changed_objects(
    plan: ReconcilePlan, cluster: ClusterState, live: Mapping[str, Any] | None, now: datetime, catalog: DrafterCatalog
) -> tuple[tuple[str, ...], ChangeKind]:
    """Return the objects that the apply changes or deletes, and the kind of that change. What the operator would do to the live
    resource anyway does not count."""
    pending: list[Mapping[str, Any]] = []
    if live is not None:
        try:
            before = _without_gates(SpeculativeDeployment.from_dict(dict(live)))
        except ResourceError:
            pass  # a spec that this release cannot read has nothing to compare with
        else:
            snapshot = restore_stable_arm(exclude_orphans(Snapshot(before, cluster))[0], now)
            pending = list(_iter_changes(build_reconcile_plan(snapshot, _RUNNER, now, catalog)))
    changed = [item for item in _iter_changes(plan) if item not in pending]
    deployments = [item for item in changed if item["kind"] == "Deployment"]
    network = [item for item in changed if item["kind"] in _NETWORK_KINDS]
    kind: ChangeKind = "Scaling" if deployments else "Network" if network else "Unchanged"
    return tuple(f"{item['kind']}/{item['metadata']['name']}" for item in (*deployments, *network)), kind


def _iter_changes(plan: ReconcilePlan) -> Iterator[Mapping[str, Any]]:
    """Yield the objects that a reconcile applies, and the names of those that it deletes."""
    yield from map(_strip_digest, plan.objects_to_apply)
    for reference in plan.objects_to_delete:
        yield {"kind": reference.kind, "metadata": {"name": reference.name}}


def _strip_digest(item: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = item["metadata"]
    annotations = {key: value for key, value in (metadata.get("annotations") or {}).items() if key != APPLIED_DIGEST_ANNOTATION}
    return {**item, "metadata": {**metadata, "annotations": annotations}}


def _iter_changed_fields(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield the paths of fields of the spec, and Aerie's annotations, that differ."""
    yield from _iter_differences(before.get("spec"), after.get("spec"), "spec")
    annotations = [(item.get("metadata") or {}).get("annotations") or {} for item in (before, after)]
    for name in sorted({name for each in annotations for name in each if name.startswith("aerie.dev/")}):
        if annotations[0].get(name) != annotations[1].get(name):
            yield f"metadata.annotations[{name}]"


def _iter_differences(before: Any, after: Any, path: str) -> Iterator[str]:
    if before == after:
        return
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys((*before, *after)):
            yield from _iter_differences(before.get(key), after.get(key), f"{path}.{key}")
    else:
        yield path
