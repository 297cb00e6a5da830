"""The Service that gets copies of users' requests: that of a shadow evaluation, else that of the recorder.

A route mirrors to one Service at most. Gateways need not support several mirrors in a rule, and one that does not may reject the
whole route. So a capture pauses while a shadow evaluation gets the copies.

Guarantee: copies go to the recorder only after its Service exists and belongs to the resource. A gateway may reject a route whose
mirror it does not find, and users would notice.
"""

from __future__ import annotations

from aerie.api import SpeculativeDeployment
from aerie.manifests import evaluator, recorder
from aerie.rollout.facts.snapshot import Snapshot, is_owned_by
from aerie.rollout.progression.progression import Progression


def find_copy_service(snapshot: Snapshot, progression: Progression) -> str | None:
    """Return the Service that gets copies of users' requests; None for none."""
    return find_shadow_service(snapshot.resource, progression) or _find_recorder_service(snapshot)


def find_shadow_service(resource: SpeculativeDeployment, progression: Progression) -> str | None:
    """Return the Service of the shadow evaluation in progress; None without copies for it."""
    is_evaluating = (
        progression.in_place is not None and progression.in_place.phase == "Evaluating"
    ) or progression.evaluates_canary
    is_mirrored = resource.spec.rollout.shadow_source == "Mirror"
    return evaluator.evaluator_name(resource.metadata.name) if is_evaluating and is_mirrored else None


def _find_recorder_service(snapshot: Snapshot) -> str | None:
    resource = snapshot.resource
    if resource.spec.capture is None:
        return None
    name = recorder.recorder_name(resource.metadata.name)
    live = snapshot.cluster.child("Service", name)
    is_usable = live is not None and is_owned_by(live, resource.metadata.uid) and not live["metadata"].get("deletionTimestamp")
    return name if is_usable else None
