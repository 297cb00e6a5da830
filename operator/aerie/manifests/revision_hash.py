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
from aerie.api.source import DrafterSpec
from aerie.engine.speculation import Adaptive, Off, Schedule, SpeculationSetting, Static

RENEW_ANNOTATION = "aerie.dev/renew"
"""Annotation of the resource: each new value makes a new revision of the same spec."""
REVISION_CHARACTERS = 10


def compute_revision(resource: SpeculativeDeployment, setting: SpeculationSetting) -> str:
    """Return ten characters of 0-9a-f: equal for equal pods and, apart from chance, different for others."""
    text = json.dumps(_build_content(resource, setting), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:REVISION_CHARACTERS]


def list_changed_fields(
    resource: SpeculativeDeployment,
    setting: SpeculationSetting,
    other: SpeculativeDeployment,
    other_setting: SpeculationSetting,
) -> list[str]:
    """Return the fields by which two resources make different revisions, except for spec.drafter."""
    contents = _build_content(resource, setting), _build_content(other, other_setting)
    return [name for key, name in _FIELD_BY_KEY.items() if contents[0].get(key) != contents[1].get(key)]


_FIELD_BY_KEY = {
    "servedName": "spec.model.servedName",
    "target": "spec.model.source",
    "engine": "spec.engine",
    "setting": "the speculation setting",
    "draftSampling": "spec.speculation.draftSampling",
    "engineOptions": "spec.speculation.engineOptions",
    "renew": f"the annotation {RENEW_ANNOTATION}",
}


def _build_content(resource: SpeculativeDeployment, setting: SpeculationSetting) -> dict[str, Any]:
    spec = resource.spec
    content: dict[str, Any] = {
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
    return content


def is_drafter_change_alone(
    resource: SpeculativeDeployment, setting: SpeculationSetting, served_drafter: DrafterSpec | None, served_revision: str
) -> bool:
    """Return whether the resource is the served revision with another drafter: the same pods, apart from the drafter.

    Args:
        resource: the desired one.
        setting: the desired one.
        served_drafter: spec.drafter of the served revision.
        served_revision: as `compute_revision` returned it.
    """
    with_served_drafter = resource.model_copy(update={"spec": resource.spec.model_copy(update={"drafter": served_drafter})})
    return served_revision == compute_revision(with_served_drafter, setting) != compute_revision(resource, setting)


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
