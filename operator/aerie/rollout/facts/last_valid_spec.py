"""The resource as it is read where its spec has a value that the API server took and this operator cannot read.

    model, engine, drafter, speculation ─► as recorded of the revision that serves (manifests/preflight_job.py), or that starts
    replicas ────────────────────────────► those of the status
    a field of rollout; metrics ─────────► its default; kinds that are made of it are not applied
    all other fields ────────────────────► as the spec has them

So what serves is cared for (decide.py): it is repaired and, while no rollout is under way, scaled; the rollout is held.

Guarantees: pure. Nothing that stands in here makes another pod than those that are there: templates are those of templates.py,
and a record that somebody has changed makes another revision, which is not rolled out. Not guaranteed: anything where the status
cannot be read either, or where the record is missing or is one that this release cannot read; then ResourceError is raised, as
for a whole resource. While spec.rollout.traffic cannot be read, neither the route nor the Services of the arms are repaired.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aerie.api import ResourceError, SpeculativeDeployment
from aerie.api.status import Arm, Status
from aerie.api.types.base import JsonObject
from aerie.manifests import preflight_job

_RECORDED_FIELDS = frozenset({"model", "engine", "drafter", "speculation"})
_KIND_BY_ROLLOUT_FIELD = {"traffic": "HTTPRoute", "disruption": "PodDisruptionBudget"}
"""Fields of spec.rollout, and the kind that follows from each."""


@dataclass(frozen=True)
class SpecSubstitution:
    """What stands in for fields that cannot be read."""

    error_message: str
    """The fields, with their values and what is expected, as sentences."""
    replacement_message: str
    """What is taken instead, as a part of a sentence."""
    unmanaged_kinds: frozenset[str]
    """Kinds of which nothing tells how they are to be."""


def read_resource(
    document: JsonObject, children: Iterable[Mapping[str, Any]]
) -> tuple[SpeculativeDeployment, SpecSubstitution | None]:
    """The resource, and what in it is not as its spec says. Raises ResourceError."""
    try:
        return SpeculativeDeployment.from_dict(document), None
    except ResourceError as error:
        fault = error
    found, places = _SpecRepair(document, children), fault.paths
    while found.replace_fields(places):
        try:
            resource = SpeculativeDeployment.from_dict({**document, "spec": found.spec})
        except ResourceError as another:  # one that shows only now, or of what was recorded
            places = another.paths
        else:
            told = str(fault).replace("\n", " ")
            return resource, SpecSubstitution(told, "; ".join(found.replacement_messages), frozenset(found.unmanaged_kinds))
    raise fault


class _SpecRepair:
    """A spec whose unreadable fields are replaced, each once."""

    def __init__(self, document: JsonObject, children: Iterable[Mapping[str, Any]]) -> None:
        self.spec: JsonObject = dict(document["spec"])
        self.replacement_messages: list[str] = []
        self.unmanaged_kinds: set[str] = set()
        self._document, self._children = document, children
        self._arm = _read_serving_arm(document)
        self._replaced_fields: set[tuple[str, ...]] = set()

    def replace_fields(self, field_paths: Iterable[tuple[str | int, ...]]) -> bool:
        """Whether all that cannot be read could be replaced."""
        fields = {_replaceable_field(place) for place in field_paths}
        if not fields or fields & self._replaced_fields or any(field == () for field in fields):
            return False
        self._replaced_fields |= fields
        return all(self._replace_field(*field) for field in sorted(fields))

    def _replace_field(self, name: str, below: str | None = None) -> bool:
        if name in _RECORDED_FIELDS:
            return self._replace_from_record(name)
        if name == "replicas":
            return self._replace_replicas_from_status()
        return self._reset_rollout_field(below) if name == "rollout" else self._reset_field(name)

    def _replace_from_record(self, name: str) -> bool:
        spec = self._record.get("spec")
        if self._arm is None or not isinstance(spec, dict):
            return False
        self.spec.pop(name, None)
        if name in spec:
            self.spec[name] = spec[name]
        self.replacement_messages.append(f"spec.{name} is taken from the record of revision {self._arm.revision}")
        return True

    @property
    def _record(self) -> JsonObject:
        name = preflight_job.preflight_job_name(
            self._document["metadata"]["name"], self._arm.revision if self._arm is not None else ""
        )
        item = next((one for one in self._children if (one["kind"], one["metadata"]["name"]) == ("ConfigMap", name)), {})
        try:
            found = json.loads((item.get("data") or {}).get(preflight_job.RESOURCE_KEY) or "{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _replace_replicas_from_status(self) -> bool:
        if self._arm is None:
            return False
        self.spec["replicas"] = self._arm.replicas
        self.replacement_messages.append(f"spec.replicas stays at {self._arm.replicas}")
        return True

    def _reset_rollout_field(self, below: str | None) -> bool:
        if below is None:
            self.unmanaged_kinds |= set(_KIND_BY_ROLLOUT_FIELD.values())
            return self._reset_field("rollout")
        self.spec["rollout"] = {name: value for name, value in self.spec["rollout"].items() if name != below}
        if below in _KIND_BY_ROLLOUT_FIELD:
            self.unmanaged_kinds.add(_KIND_BY_ROLLOUT_FIELD[below])
            self.replacement_messages.append(f"{_KIND_BY_ROLLOUT_FIELD[below]}s stay as they are")
        else:
            self.replacement_messages.append(f"spec.rollout.{below} counts as left out")
        return True

    def _reset_field(self, name: str) -> bool:
        self.spec.pop(name, None)
        self.replacement_messages.append(f"spec.{name} counts as left out")
        return True


def _replaceable_field(place: tuple[str | int, ...]) -> tuple[str, ...]:
    """The part of the spec that is replaced as a whole where this cannot be read; empty where there is none."""
    root, *path = map(str, place) if place else [""]
    if root != "spec":
        return ()
    return tuple(path[:2] if path[:1] == ["rollout"] else path[:1])


def _read_serving_arm(document: JsonObject) -> Arm | None:
    """The arm that serves, or the first one while it starts."""
    try:
        status = Status.from_dict(document.get("status") or {})
    except ResourceError:
        return None
    return status.stable or status.canary
