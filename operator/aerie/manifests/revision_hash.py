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
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.engine.speculation import Adaptive, Off, Schedule, SpeculationSetting, Static

RENEW_ANNOTATION = "aerie.dev/renew"
"""Annotation of the resource: each new value makes a new revision of the same spec."""
REVISION_CHARACTERS = 10


def compute_revision(resource: SpeculativeDeployment, setting: SpeculationSetting) -> str:
    """Return ten characters of 0-9a-f: equal for equal pods and, apart from chance, different for others."""
    spec = resource.spec
    content = {
        "contentVersion": 1,  # never changed, so that revisions stay the same
        "servedName": resource.served_name,
        "target": spec.model.source.to_dict(),
        "engine": spec.engine.to_dict(),
        "drafter": spec.drafter.to_dict() if spec.drafter else None,
        "setting": _setting_content(setting),
    }
    if not isinstance(setting, Off):  # unset fields are not hashed: a field that a later release adds leaves revisions unchanged
        optional_fields = {"draftSampling": spec.speculation.draft_sampling, "engineOptions": spec.speculation.engine_options}
        content |= {name: value for name, value in optional_fields.items() if value}
    if renewal := resource.metadata.annotations.get(RENEW_ANNOTATION):
        content["renew"] = renewal
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:REVISION_CHARACTERS]


def _setting_content(setting: SpeculationSetting) -> dict[str, Any]:
    """Return the setting with names of its own, so that a renamed class or attribute leaves revisions unchanged."""
    match setting:
        case Off():
            return {"mode": "Off"}
        case Static(num_speculative_tokens):
            return {"mode": "Static", "numSpeculativeTokens": num_speculative_tokens}
        case Schedule(tiers, max_speculative_tokens):
            schedule = [
                {"minBatchSize": tier.first, "maxBatchSize": tier.last, "numSpeculativeTokens": tier.tokens} for tier in tiers
            ]
            return {"mode": "Schedule", "numSpeculativeTokens": max_speculative_tokens, "schedule": schedule}
        case Adaptive(max_speculative_tokens):
            return {"mode": "Adaptive", "numSpeculativeTokens": max_speculative_tokens}
