"""Revisions that have pods without being in the status: an operator that was killed may have left them.

    ready pods that stand in for stable ones ─► the revision is rolled back like a canary, so that they stay while they are needed
    any other pods ───────────────────────────► they are removed before another revision starts

Guarantees: no revision starts while a third one has pods. Not guaranteed: that an unrecorded revision becomes stable; where the
status has no stable revision, one is restored before (revision/recovery.py).
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from aerie.api.status import Arm, Status
from aerie.manifests import naming
from aerie.rollout.canary import blocked_rollback
from aerie.rollout.canary.observation import is_stable_broken
from aerie.rollout.capacity.arms import count_missing_ready_pods
from aerie.rollout.conditions import PROGRESSING, ConditionUpdate
from aerie.rollout.facts.orphans import ORPHAN_REQUEUE_DELAY
from aerie.rollout.facts.snapshot import Snapshot, is_owned_by, read_labels
from aerie.rollout.progression.context import ProgressionContext
from aerie.rollout.progression.progression import Progression
from aerie.rollout.progression.retry_request import read_rejected_revision
from aerie.rollout.revision.desired import DesiredRevision
from aerie.rollout.revision.recovery import build_withdrawn_canary


def adopt_unrecorded_revision(context: ProgressionContext) -> ProgressionContext:
    """Return the context with an unrecorded revision as its canary, where the status has none."""
    if context.canary_arm is not None or context.stable is None:
        return context
    revision = _find_unrecorded_revision(context.snapshot, context.desired, context.status, context.stable, context.now)
    if revision is None:
        return context
    return replace(context, canary_arm=build_withdrawn_canary(context.snapshot, revision, context.now))


def remove_unexpected_revisions(context: ProgressionContext) -> Progression | None:
    """Start no pods while a third revision has pods."""
    if context.canary_arm is not None:
        return None
    revisions = _find_unexpected_revisions(context.snapshot, context.desired, context.stable)
    if not revisions:
        return None
    message = f"Deleting pods of orphaned revision {' and '.join(revisions)} before revision {context.desired.revision} starts."
    return replace(
        context.serving,
        phase="Preflight",
        progressing=ConditionUpdate(PROGRESSING, "True", "Preflight", message),
        needs_preflight_job=True,
        requeue_after=ORPHAN_REQUEUE_DELAY,
    )


def _find_unrecorded_revision(
    snapshot: Snapshot, desired: DesiredRevision, status: Status, stable: Arm, now: datetime
) -> str | None:
    """Return a revision that the status does not name and whose ready pods stand in for stable ones.

    The status may have been lost, or could not be written. The revision that the last rollout abandoned counts only where no
    stable pod is ready.
    """
    if status.previous is not None:
        return None
    candidates = _find_unexpected_revisions(snapshot, desired, stable)
    stands_in_for_stable = (
        is_stable_broken(snapshot.cluster, stable) and read_rejected_revision(snapshot.resource, desired) is None
    )
    if desired.revision != stable.revision and not stands_in_for_stable:
        candidates.append(desired.revision)
    if snapshot.cluster.ready_pod_count(stable.revision):
        candidates = [revision for revision in candidates if revision != blocked_rollback.find_abandoned_revision(status)]
    unrecorded = next((revision for revision in candidates if snapshot.cluster.ready_pod_count(revision)), None)
    return unrecorded if unrecorded is not None and count_missing_ready_pods(snapshot, (stable.revision,), now) else None


def _find_unexpected_revisions(snapshot: Snapshot, desired: DesiredRevision, stable: Arm | None) -> list[str]:
    """Return revisions with a Deployment beside the stable and the desired one: an operator that was killed may have left
    them."""
    owner_uid, expected = snapshot.resource.metadata.uid, {desired.revision, stable.revision if stable else None}
    deployment_labels = [
        read_labels(deployment)
        for deployment in snapshot.cluster.children_of_kind("Deployment")
        if is_owned_by(deployment, owner_uid)
    ]
    # A remaining control stands in as long as it is needed (children/desired.py), and delays nothing.
    existing = {labels.get(naming.REVISION_LABEL) for labels in deployment_labels if labels.get(naming.CONTROL_LABEL) != "true"}
    return sorted(revision for revision in existing - expected if revision is not None)
