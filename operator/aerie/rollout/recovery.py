"""What is stable where the status does not say it any more: after a restore without status, or `status: null` by hand.

The status is the only record of what is stable, but the pods that serve are there to be seen. A resource without a status, of
which pods serve, gets the revision of those pods back as its stable one; what the revision is, its preflight's record
says. From there on all is as ever: where the spec asks for another revision, it goes out by a canary.

Guarantees: pure; pods that serve are not deleted because nobody remembers them. Not guaranteed: the rest of what was lost, such
as a canary under way, which is withdrawn and begins anew, and the history.
"""

from __future__ import annotations

import json
from dataclasses import replace

from aerie.api import ResourceError, SpeculativeDeployment
from aerie.api.status import Arm, Status
from aerie.resources import names, preflight
from aerie.rollout import pods
from aerie.rollout.observed import Observed, labels, owned
from aerie.rollout.wanted import read_wanted


def recovered(observed: Observed) -> Observed:
    """The same, with a stable arm in the status where there is no status and pods serve."""
    resource, status = observed.resource, observed.resource.status or Status()
    if status.phase is not None:  # written by Aerie, and so whole: an arm that is not there has not begun
        return observed
    serving: dict[str, tuple[bool, int]] = {}
    for item in observed.of("Deployment"):
        revision = labels(item).get(names.REVISION)
        if revision is None or labels(item).get(names.CONTROL) == "true" or not owned(item, resource.metadata.uid):
            continue
        count = sum(map(pods.ready, observed.group(revision)))
        if count:
            serving[revision] = (labels(item).get(names.ARM) == "stable", count)
    if not serving:
        return observed
    revision = max(serving, key=lambda each: (*serving[each], each))
    status = status.model_copy(update={"stable": _arm(observed, revision)})
    return replace(observed, resource=resource.model_copy(update={"status": status}))


def _arm(observed: Observed, revision: str) -> Arm:
    """What is recorded of the revision; nothing but its name where that is lost too."""
    record = observed.child("ConfigMap", preflight.name(observed.resource.metadata.name, revision))
    text = ((record or {}).get("data") or {}).get(preflight.RESOURCE)
    try:
        wanted = read_wanted(SpeculativeDeployment.from_dict(json.loads(text or "")))
    except (ValueError, ResourceError):
        return Arm(revision=revision)
    return wanted.arm.model_copy(update={"revision": revision})
