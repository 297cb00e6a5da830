"""The pods of a revision: as they were built when it was first rolled out, whatever release of Aerie looks at it now.

    Deployment is there ─┬─ its annotation names the template that it was made of: the recorded one, or the one of today
                         └─ neither is that one ────────────────────────────────► as the Deployment has it
    no Deployment ───────► as the spec says today; of a revision that the spec no longer says, as was recorded
    control pods ────────► those of the stable revision, and where they are to run (manifests/pod/placement.py)

Guarantees: pure; the template of a Deployment is never changed, so that no upgrade of Aerie replaces a pod. What a record says
counts only where the Deployment bears its digest, because more people may write ConfigMaps than Deployments. Not guaranteed:
that, where the Deployment is gone too and the spec is another one by now.
"""

from __future__ import annotations

import json
from typing import Any

from aerie.manifests import deployment, naming, preflight_job
from aerie.manifests.pod import placement
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.revision.desired import DesiredRevision


def resolve_pod_template(snapshot: Snapshot, desired: DesiredRevision, revision: str) -> dict[str, Any] | None:
    """The pods of a revision; None where nothing tells what they are."""
    today = desired.pod_template if revision == desired.revision else None
    recorded = _read_recorded_template(snapshot, revision)
    live = snapshot.deployment(revision)
    if live is None:
        return today or recorded
    made_of = (live["metadata"].get("annotations") or {}).get(naming.TEMPLATE_DIGEST_ANNOTATION)
    if made_of is None and (today or recorded):  # of a release that did not write it
        return today or recorded
    for template in (recorded, today):
        if template is not None and deployment.template_digest(template) == made_of:
            return template
    return dict(live["spec"]["template"])


def resolve_control_pod_template(snapshot: Snapshot, stable_template: dict[str, Any], revision: str) -> dict[str, Any]:
    """The control pods of a stable revision, whose template is `stable`: where they run is part of it while they are there."""
    placed = placement.prefer_canary_gpu_product(stable_template, snapshot.resource.metadata.name, revision)
    live = snapshot.deployment(revision, control=True)
    if live is None or (live["metadata"].get("annotations") or {}).get(
        naming.TEMPLATE_DIGEST_ANNOTATION
    ) == deployment.template_digest(placed):
        return placed
    # Of a release that placed them otherwise or nowhere, or `stable` is by now what the API server has made of it.
    rest = {key: value for key, value in stable_template["spec"].items() if key != "affinity"}
    affinity = live["spec"]["template"]["spec"].get("affinity")
    return {**stable_template, "spec": {**rest, "affinity": affinity} if affinity else rest}


def _read_recorded_template(observed: Snapshot, revision: str) -> dict[str, Any] | None:
    record = observed.child("ConfigMap", preflight_job.preflight_job_name(observed.resource.metadata.name, revision))
    text = ((record or {}).get("data") or {}).get(preflight_job.POD_TEMPLATE_KEY)
    found: dict[str, Any] | None = json.loads(text) if text is not None else None
    return found
