"""The revision: a hash of all that determines an engine's pod.

Target, engine, drafter, served name, speculation setting, draft sampling and engine options are in it; replicas, rollout, metrics
and pausing are not, so that changing those touches no pod. Nor is how a release of Aerie builds a pod of them: pods of a revision
stay as they were built when it was first rolled out (rollout/revision/pod_template.py), so that an upgrade of Aerie rolls out nothing. Who
wants pods as the present release builds them asks for a renewal, by the annotation `RENEW`, which is a change like any other.
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
    """Ten characters of 0-9a-f; equal for equal pods and, but for chance, for no others."""
    spec = resource.spec
    content = {
        "form": 1,  # of the first release; what is hashed stays what it was
        "servedName": resource.served_name,
        "target": spec.model.source.to_dict(),
        "engine": spec.engine.to_dict(),
        "drafter": spec.drafter.to_dict() if spec.drafter else None,
        "setting": [type(setting).__name__, asdict(setting)],
    }
    if not isinstance(setting, Off):  # what is not written is not hashed: fields that came later leave revisions as they were
        added = {"draftSampling": spec.speculation.draft_sampling, "engineOptions": spec.speculation.engine_options}
        content |= {name: value for name, value in added.items() if value}
    if renewed := resource.metadata.annotations.get(RENEW_ANNOTATION):
        content["renewed"] = renewed
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:REVISION_CHARACTERS]
