"""The resource with substitutes for values in its spec that the API server admitted and this operator cannot read.

    model, engine, drafter, speculation ─► as recorded of the serving revision (manifests/preflight_job.py), or the starting one
    replicas ────────────────────────────► those of the status
    a field of rollout; metrics ─────────► its default; kinds that are built from it are not applied
    all other fields ────────────────────► as in the spec

So the serving pods are still reconciled (rollout/reconcile.py): they are repaired and, while no rollout is in progress, scaled.
The rollout is suspended.

Guarantees: pure. No substitute makes a pod that differs from the existing ones: templates are those of
revision/pod_template.py, and a record that somebody has edited makes another revision, which is not rolled out. Not
guaranteed: anything where the status cannot be read either, or where the record is missing or unreadable for this release.
Then ResourceError is raised, as for a whole resource. While spec.rollout.traffic cannot be read, neither the route nor the
Services of the arms are repaired.
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
"""Fields of spec.rollout, and the kind that is built from each."""


@dataclass(frozen=True)
class SpecSubstitution:
    """Substitutes for fields that cannot be read."""

    error_message: str
    """The fields, with their values and what is expected, as sentences."""
    replacement_message: str
    """The substitutes, as a part of a sentence."""
    unmanaged_kinds: frozenset[str]
    """Kinds whose desired state is unknown."""


def read_resource(
    document: JsonObject, children: Iterable[Mapping[str, Any]]
) -> tuple[SpeculativeDeployment, SpecSubstitution | None]:
    """Return the resource, and the substitutes in it, if any. Raises ResourceError."""
    try:
        return SpeculativeDeployment.from_dict(document), None
    except ResourceError as error:
        first_error = error
    repair, field_paths = _SpecRepair(document, children), first_error.paths
    while repair.replace_fields(field_paths):
        try:
            resource = SpeculativeDeployment.from_dict({**document, "spec": repair.spec})
        except ResourceError as next_error:  # one that appears only now, or is in the record
            field_paths = next_error.paths
        else:
            error_message = str(first_error).replace("\n", " ")
            return resource, SpecSubstitution(
                error_message, "; ".join(repair.replacement_messages), frozenset(repair.unmanaged_kinds)
            )
    raise first_error


class _SpecRepair:
    """A spec whose unreadable fields are replaced, each at most once."""

    def __init__(self, document: JsonObject, children: Iterable[Mapping[str, Any]]) -> None:
        self.spec: JsonObject = dict(document["spec"])
        self.replacement_messages: list[str] = []
        self.unmanaged_kinds: set[str] = set()
        self._document, self._children = document, children
        self._arm = _read_serving_arm(document)
        self._replaced_fields: set[tuple[str, ...]] = set()

    def replace_fields(self, field_paths: Iterable[tuple[str | int, ...]]) -> bool:
        """Replace the unreadable fields; return whether all of them could be replaced."""
        fields = {_replaceable_field(path) for path in field_paths}
        if not fields or fields & self._replaced_fields or any(field == () for field in fields):
            return False
        self._replaced_fields |= fields
        return all(self._replace_field(*field) for field in sorted(fields))

    def _replace_field(self, name: str, subfield: str | None = None) -> bool:
        if name in _RECORDED_FIELDS:
            return self._replace_from_record(name)
        if name == "replicas":
            return self._replace_replicas_from_status()
        return self._reset_rollout_field(subfield) if name == "rollout" else self._reset_field(name)

    def _replace_from_record(self, name: str) -> bool:
        spec = self._record.get("spec")
        if self._arm is None or not isinstance(spec, dict):
            return False
        self.spec.pop(name, None)
        if name in spec:
            self.spec[name] = spec[name]
        self.replacement_messages.append(f"spec.{name} is taken from the record of revision {self._arm.served_revision}")
        return True

    @property
    def _record(self) -> JsonObject:
        name = preflight_job.preflight_job_name(
            self._document["metadata"]["name"], self._arm.served_revision if self._arm is not None else ""
        )
        config_map = next(
            (child for child in self._children if (child["kind"], child["metadata"]["name"]) == ("ConfigMap", name)), {}
        )
        try:
            record = json.loads((config_map.get("data") or {}).get(preflight_job.RESOURCE_KEY) or "{}")
        except ValueError:
            return {}
        return record if isinstance(record, dict) else {}

    def _replace_replicas_from_status(self) -> bool:
        if self._arm is None:
            return False
        self.spec["replicas"] = self._arm.replicas
        self.replacement_messages.append(f"spec.replicas is kept at {self._arm.replicas}")
        return True

    def _reset_rollout_field(self, subfield: str | None) -> bool:
        if subfield is None:
            self.unmanaged_kinds |= set(_KIND_BY_ROLLOUT_FIELD.values())
            return self._reset_field("rollout")
        self.spec["rollout"] = {name: value for name, value in self.spec["rollout"].items() if name != subfield}
        if subfield in _KIND_BY_ROLLOUT_FIELD:
            self.unmanaged_kinds.add(_KIND_BY_ROLLOUT_FIELD[subfield])
            self.replacement_messages.append(f"{_KIND_BY_ROLLOUT_FIELD[subfield]}s are left unchanged")
        else:
            self.replacement_messages.append(f"spec.rollout.{subfield} is treated as unset")
        return True

    def _reset_field(self, name: str) -> bool:
        self.spec.pop(name, None)
        self.replacement_messages.append(f"spec.{name} is treated as unset")
        return True


def _replaceable_field(field_path: tuple[str | int, ...]) -> tuple[str, ...]:
    """Return the part of the spec that is replaced as a whole where this path is unreadable; empty where there is none."""
    root, *path = map(str, field_path) if field_path else [""]
    if root != "spec":
        return ()
    return tuple(path[:2] if path[:1] == ["rollout"] else path[:1])


def _read_serving_arm(document: JsonObject) -> Arm | None:
    """Return the arm that serves, or the first revision while it starts."""
    try:
        status = Status.from_dict(document.get("status") or {})
    except ResourceError:
        return None
    return status.stable or status.canary
