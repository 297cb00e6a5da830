"""The pods of a revision: as they were built when it was first rolled out, whatever release of Aerie looks at it now.

    Deployment is there ─┬─ its annotation names the template that it was made of: the recorded one, or the one of today
                         └─ neither is that one ────────────────────────────────► as the Deployment has it
    no Deployment ───────► as the spec says today; of a revision that the spec no longer says, as was recorded
    control pods ────────► those of the stable revision, and where they are to run (resources/placement.py)

Guarantees: pure; the template of a Deployment is never changed, so that no upgrade of Aerie replaces a pod. What a record says
counts only where the Deployment bears its digest, because more people may write ConfigMaps than Deployments. Not guaranteed:
that, where the Deployment is gone too and the spec is another one by now.
"""

from __future__ import annotations

import json
from typing import Any

from aerie.resources import names, placement, preflight, workload
from aerie.rollout.observed import Observed
from aerie.rollout.wanted import Wanted


def template_of(observed: Observed, wanted: Wanted, revision: str) -> dict[str, Any] | None:
    """The pods of a revision; None where nothing tells what they are."""
    today = wanted.template if revision == wanted.revision else None
    recorded = _recorded(observed, revision)
    live = observed.deployment(revision)
    if live is None:
        return today or recorded
    made_of = (live["metadata"].get("annotations") or {}).get(names.TEMPLATE)
    if made_of is None and (today or recorded):  # of a release that did not write it
        return today or recorded
    for template in (recorded, today):
        if template is not None and workload.digest(template) == made_of:
            return template
    return dict(live["spec"]["template"])


def template_of_control(observed: Observed, stable: dict[str, Any], revision: str) -> dict[str, Any]:
    """The control pods of a stable revision, whose template is `stable`: where they run is part of it while they are there."""
    placed = placement.beside_canary(stable, observed.resource.metadata.name, revision)
    live = observed.deployment(revision, control=True)
    if live is None or (live["metadata"].get("annotations") or {}).get(names.TEMPLATE) == workload.digest(placed):
        return placed
    # Of a release that placed them otherwise or nowhere, or `stable` is by now what the API server has made of it.
    rest = {key: value for key, value in stable["spec"].items() if key != "affinity"}
    affinity = live["spec"]["template"]["spec"].get("affinity")
    return {**stable, "spec": {**rest, "affinity": affinity} if affinity else rest}


def _recorded(observed: Observed, revision: str) -> dict[str, Any] | None:
    record = observed.child("ConfigMap", preflight.name(observed.resource.metadata.name, revision))
    text = ((record or {}).get("data") or {}).get(preflight.TEMPLATE)
    found: dict[str, Any] | None = json.loads(text) if text is not None else None
    return found
