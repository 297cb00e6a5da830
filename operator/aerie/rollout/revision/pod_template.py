"""Pod template of a revision: as it was built when the revision was first rolled out, whatever release of Aerie reads it now.

    Deployment exists ───┬─ its annotation names the template it was created from: the recorded one, or the current one
                         └─ neither is that one ─────────────────────────────────► as the Deployment has it
    no Deployment ───────► as the spec says now; for a revision that the spec no longer describes, as recorded
    control pods ────────► those of the stable revision, plus their placement (manifests/pod/placement.py) and, for a shadow
                           evaluation, the counts of their answers (manifests/pod/request_metrics.py)

Guarantees: pure; the template of a Deployment is never changed, so that no upgrade of Aerie replaces a pod. A record counts
only where the Deployment bears its digest, because more people may write ConfigMaps than Deployments. Not guaranteed: that,
where the Deployment was deleted too and the spec has changed since.
"""

from __future__ import annotations

import json
from typing import Any

from aerie.manifests import deployment, naming, preflight_job
from aerie.manifests.pod import placement, request_metrics
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.revision.desired import DesiredRevision


def resolve_pod_template(snapshot: Snapshot, desired: DesiredRevision, revision: str) -> dict[str, Any] | None:
    """Return the pod template of a revision; None where it is unknown."""
    current = desired.pod_template if revision == desired.revision else None
    recorded = _read_recorded_template(snapshot, revision)
    live = snapshot.cluster.deployment(revision)
    if live is None:
        return current or recorded
    template_digest = (live["metadata"].get("annotations") or {}).get(naming.TEMPLATE_DIGEST_ANNOTATION)
    if template_digest is None and (current or recorded):  # created by a release that did not write it
        return current or recorded
    for template in (recorded, current):
        if template is not None and deployment.template_digest(template) == template_digest:
            return template
    return dict(live["spec"]["template"])


def resolve_control_pod_template(
    snapshot: Snapshot, stable_template: dict[str, Any], revision: str, *, is_evaluated: bool
) -> dict[str, Any]:
    """Return the template of the control pods of a stable revision with `stable_template`. It stays while they exist.

    `is_evaluated`: whether the canary has a shadow evaluation, which needs counts of the control's answers.
    """
    placed = placement.prefer_canary_gpu_product(stable_template, snapshot.resource.metadata.name, revision)
    measured = request_metrics.add_request_metrics(placed)
    live = snapshot.cluster.deployment(revision, control=True)
    if live is None:
        return measured if is_evaluated else placed
    live_digest = (live["metadata"].get("annotations") or {}).get(naming.TEMPLATE_DIGEST_ANNOTATION)
    for template in (placed, measured):
        if live_digest == deployment.template_digest(template):
            return template
    # Another release placed them differently or not at all, or the API server has since added defaults to `stable_template`.
    spec_without_affinity = {key: value for key, value in stable_template["spec"].items() if key != "affinity"}
    affinity = live["spec"]["template"]["spec"].get("affinity")
    spec = {**spec_without_affinity, "affinity": affinity} if affinity else spec_without_affinity
    template = {**stable_template, "spec": spec}
    is_measured = request_metrics.has_request_metrics(live["spec"]["template"])
    return request_metrics.add_request_metrics(template) if is_measured else template


def _read_recorded_template(snapshot: Snapshot, revision: str) -> dict[str, Any] | None:
    record = snapshot.cluster.child("ConfigMap", preflight_job.preflight_job_name(snapshot.resource.metadata.name, revision))
    text = ((record or {}).get("data") or {}).get(preflight_job.POD_TEMPLATE_KEY)
    template: dict[str, Any] | None = json.loads(text) if text is not None else None
    return template
