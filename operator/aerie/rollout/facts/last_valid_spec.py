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
from aerie.api.types.base import Json
from aerie.manifests import preflight_job

_RECORDED = frozenset({"model", "engine", "drafter", "speculation"})
_MADE_OF = {"traffic": "HTTPRoute", "disruption": "PodDisruptionBudget"}
"""Fields of spec.rollout, and the kind that follows from each."""


@dataclass(frozen=True)
class Substitute:
    """What stands in for fields that cannot be read."""

    fault: str
    """The fields, with their values and what is expected, as sentences."""
    instead: str
    """What is taken instead, as a part of a sentence."""
    kinds: frozenset[str]
    """Kinds of which nothing tells how they are to be."""


def read_resource(document: Json, children: Iterable[Mapping[str, Any]]) -> tuple[SpeculativeDeployment, Substitute | None]:
    """The resource, and what in it is not as its spec says. Raises ResourceError."""
    try:
        return SpeculativeDeployment.from_dict(document), None
    except ResourceError as error:
        fault = error
    found, places = _Spec(document, children), fault.places
    while found.replaces(places):
        try:
            resource = SpeculativeDeployment.from_dict({**document, "spec": found.spec})
        except ResourceError as another:  # one that shows only now, or of what was recorded
            places = another.places
        else:
            told = str(fault).replace("\n", " ")
            return resource, Substitute(told, "; ".join(found.instead), frozenset(found.kinds))
    raise fault


class _Spec:
    """A spec whose unreadable fields are replaced, each once."""

    def __init__(self, document: Json, children: Iterable[Mapping[str, Any]]) -> None:
        self.spec: Json = dict(document["spec"])
        self.instead: list[str] = []
        self.kinds: set[str] = set()
        self._document, self._children = document, children
        self._arm = _serving(document)
        self._replaced: set[tuple[str, ...]] = set()

    def replaces(self, places: Iterable[tuple[str | int, ...]]) -> bool:
        """Whether all that cannot be read could be replaced."""
        fields = {_field(place) for place in places}
        if not fields or fields & self._replaced or any(field == () for field in fields):
            return False
        self._replaced |= fields
        return all(self._replace(*field) for field in sorted(fields))

    def _replace(self, name: str, below: str | None = None) -> bool:
        if name in _RECORDED:
            return self._recorded(name)
        if name == "replicas":
            return self._of_status()
        return self._default_of_rollout(below) if name == "rollout" else self._default(name)

    def _recorded(self, name: str) -> bool:
        spec = self._record.get("spec")
        if self._arm is None or not isinstance(spec, dict):
            return False
        self.spec.pop(name, None)
        if name in spec:
            self.spec[name] = spec[name]
        self.instead.append(f"spec.{name} is taken from the record of revision {self._arm.revision}")
        return True

    @property
    def _record(self) -> Json:
        name = preflight_job.name(self._document["metadata"]["name"], self._arm.revision if self._arm is not None else "")
        item = next((one for one in self._children if (one["kind"], one["metadata"]["name"]) == ("ConfigMap", name)), {})
        try:
            found = json.loads((item.get("data") or {}).get(preflight_job.RESOURCE) or "{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _of_status(self) -> bool:
        if self._arm is None:
            return False
        self.spec["replicas"] = self._arm.replicas
        self.instead.append(f"spec.replicas stays at {self._arm.replicas}")
        return True

    def _default_of_rollout(self, below: str | None) -> bool:
        if below is None:
            self.kinds |= set(_MADE_OF.values())
            return self._default("rollout")
        self.spec["rollout"] = {name: value for name, value in self.spec["rollout"].items() if name != below}
        if below in _MADE_OF:
            self.kinds.add(_MADE_OF[below])
            self.instead.append(f"{_MADE_OF[below]}s stay as they are")
        else:
            self.instead.append(f"spec.rollout.{below} counts as left out")
        return True

    def _default(self, name: str) -> bool:
        self.spec.pop(name, None)
        self.instead.append(f"spec.{name} counts as left out")
        return True


def _field(place: tuple[str | int, ...]) -> tuple[str, ...]:
    """The part of the spec that is replaced as a whole where this cannot be read; empty where there is none."""
    root, *path = map(str, place) if place else [""]
    if root != "spec":
        return ()
    return tuple(path[:2] if path[:1] == ["rollout"] else path[:1])


def _serving(document: Json) -> Arm | None:
    """The arm that serves, or the first one while it starts."""
    try:
        status = Status.from_dict(document.get("status") or {})
    except ResourceError:
        return None
    return status.stable or status.canary
