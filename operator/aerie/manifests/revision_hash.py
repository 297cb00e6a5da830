"""The revision: a hash of all that determines an engine's pod.

It covers target, engine, drafter, served name, speculation setting, draft sampling and engine options. It does not cover
replicas, rollout, metrics and pausing, so that changing those touches no pod. The way in which a release of Aerie builds a pod
is not covered either. Pods of a revision stay as they were built at its first rollout (rollout/revision/pod_template.py), so an
upgrade of Aerie rolls out nothing. The annotation `RENEW_ANNOTATION` requests pods as the present release builds them; its
value is a change like any other.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from aerie.api import SpeculativeDeployment
from aerie.engine.speculation import Off, SpeculationSetting

RENEW_ANNOTATION = "aerie.dev/renew"
"""Annotation of the resource: each new value makes a new revision of the same spec."""
REVISION_CHARACTERS = 10


def compute_revision(resource: SpeculativeDeployment, setting: SpeculationSetting) -> str:
    """Return ten characters of 0-9a-f: equal for equal pods and, apart from chance, different for others."""
    spec = resource.spec
    content = {
        "form": 1,  # of the first release; never changed, so that revisions stay the same
        "servedName": resource.served_name,
        "target": spec.model.source.to_dict(),
        "engine": spec.engine.to_dict(),
        "drafter": spec.drafter.to_dict() if spec.drafter else None,
        "setting": [type(setting).__name__, asdict(setting)],
    }
    if not isinstance(setting, Off):  # unset fields are not hashed: a field that a later release adds leaves revisions unchanged
        optional_fields = {"draftSampling": spec.speculation.draft_sampling, "engineOptions": spec.speculation.engine_options}
        content |= {name: value for name, value in optional_fields.items() if value}
    if renewal := resource.metadata.annotations.get(RENEW_ANNOTATION):
        content["renewed"] = renewal
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:REVISION_CHARACTERS]
