"""What the API server was last heard to hold: the resources, their children and their pods, so that a look costs no call.

    watch events ─┐
    answers ──────┼─► Mirror ─► `changed(key)` for each resource that something new was heard of
    lists ────────┘      └────► what a pass begins with

Why not ask the API server in every pass: a pass is made for every event and, now and then, for all resources, and nearly all of
them find nothing to do. Such a pass reads here alone.

Guarantees: of each object the newest version that was heard of is kept, in whatever order events, answers and lists come, and
one that was deleted is not brought back by anything older. Kubernetes promises that resource versions of a kind are numbers that
grow, over all objects of that kind, so this holds for a namesake with another uid too. `changed` is told of every difference and
of nothing else: what an own write's answer has shown already is no news when the watch brings it. A whole list that is older
than the one before it tells that etcd was restored from a backup: it is believed, whatever was known.

Not guaranteed: that it is current. An object that was deleted while no watch ran stays here, a ghost, until the next list; Kopf
tells nothing of it. Hence the one rule of those who read it (reconcile.py): a pass that finds nothing to do may end on what is
here, but nothing is written on its strength. Whoever would write reads everything live and decides again. So a stale mirror can
delay a write, until an event or the next list, and can cause a look in vain; it cannot cause a write: no second transition, no
deletion of what is needed, no event told twice.

Objects are kept as compressed JSON without the server's bookkeeping: a small part of the memory of dictionaries, nothing for the
garbage collector to walk through, and nobody can change what another one reads. Of a pod's spec only node and ports are kept,
which is all that decisions read of it. Where a resource has many objects, unpacking them for each pass would hold up the event
loop for longer than everything else together (0.2 ms each), so there the dictionaries are kept as well; nobody may change them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from aerie.controller.kubernetes.client import PODS, SPECULATIVE_DEPLOYMENTS, ObjectDict, ResourceKind
from aerie.controller.work_queue import NamespacedName
from aerie.manifests import naming

_LAST_APPLIED_ANNOTATION = "kubectl.kubernetes.io/last-applied-configuration"
_KINDS_WITH_CHANGE_TIME = frozenset({"HTTPRoute", "Service"})
"""Kinds of which it matters when they were last changed; of all others that is dropped, and of these what it was."""
MIN_OBJECTS_KEPT_UNPACKED = 100
"""Objects of one resource from which on they are kept unpacked too."""


class _ObjectKey(NamedTuple):
    """Where one object is at most."""

    kind: str
    namespace: str
    name: str


@dataclass(slots=True)
class _CacheEntry:
    version: int
    owner: NamespacedName
    """The resource that it is, or belongs to."""
    packed: bytes
    unpacked: ObjectDict | None = None
    """The same, of a resource with many objects, once it was asked for."""


class ObjectCache:
    """See the module. `changed` is called with the resource's key, once or more, whenever something of it has changed."""

    def __init__(self, on_change: Callable[[NamespacedName], None]) -> None:
        self._on_change = on_change
        self._entries: dict[_ObjectKey, _CacheEntry] = {}
        self._keys_by_owner: dict[NamespacedName, set[_ObjectKey]] = {}
        self._tombstones: dict[_ObjectKey, int] = {}
        """Versions up to which nothing is believed of objects that were deleted."""
        self._relist_versions: dict[tuple[str, str | None], int] = {}
        """By kind, and namespace or None for all: the version of the last whole list. What is older and not in it is gone."""

    def __len__(self) -> int:
        """Objects of all kinds."""
        return len(self._entries)

    # ------------------------------------------------------------------------------------------------------------- looking
    def get_resource(self, key: NamespacedName) -> ObjectDict | None:
        """The resource itself."""
        held = self._entries.get(_ObjectKey(SPECULATIVE_DEPLOYMENTS.kind, *key))
        return None if held is None else _unpack(held.packed)

    def list_resources(self) -> list[NamespacedName]:
        """All resources."""
        return [held.owner for place, held in self._entries.items() if place.kind == SPECULATIVE_DEPLOYMENTS.kind]

    def list_owned_objects(self, key: NamespacedName) -> list[ObjectDict]:
        """What belongs to the resource, by kind and name; not the resource itself. To be read only."""
        places = self._keys_by_owner.get(key, ())
        many = len(places) >= MIN_OBJECTS_KEPT_UNPACKED
        return [
            _get_content(self._entries[place], keep=many)
            for place in sorted(places)
            if place.kind != SPECULATIVE_DEPLOYMENTS.kind
        ]

    def count_objects(self, key: NamespacedName) -> int:
        """Objects that are, or belong to, the resource."""
        return len(self._keys_by_owner.get(key, ()))

    # ------------------------------------------------------------------------------------------------------------- hearing
    def put(self, item: ObjectDict) -> None:
        """The object exists, or did a moment ago."""
        place, version = _object_key(item), _resource_version(item)
        held = self._entries.get(place)
        if version <= (held.version if held is not None else self._tombstone_version(place)):
            return
        owner = find_owner(item)
        if owner is None:
            self._remove(place, version)
            return
        if held is not None and held.owner != owner:
            self._unlink(place, held.owner)
        self._tombstones.pop(place, None)
        self._entries[place] = _CacheEntry(version, owner, _pack(item))
        self._keys_by_owner.setdefault(owner, set()).add(place)
        self._on_change(owner)

    def handle_deletion(self, item: ObjectDict) -> None:
        """A watch told that the object is gone; its version is that of its deletion."""
        self._remove(_object_key(item), _resource_version(item))

    def handle_not_found(self, key: NamespacedName, version: str) -> None:
        """The resource, held in this version, was asked for and is not there."""
        self._remove(_ObjectKey(SPECULATIVE_DEPLOYMENTS.kind, *key), int(version))

    def start_relist(self, kind: ResourceKind, namespace: str | None = None, owner: NamespacedName | None = None) -> Relist:
        """A list of the kind begins: of a namespace or of all, or of what belongs to one resource."""
        return Relist(self, kind.kind, namespace, owner)

    # -------------------------------------------------------------------------------------------------------------- inside
    def _tombstone_version(self, object_key: _ObjectKey) -> int:
        everywhere, here = (
            self._relist_versions.get((object_key.kind, None), 0),
            self._relist_versions.get((object_key.kind, object_key.namespace), 0),
        )
        return max(self._tombstones.get(object_key, 0), everywhere, here)

    def _remove(self, object_key: _ObjectKey, version: int) -> None:
        held = self._entries.get(object_key)
        if held is not None and held.version > version:
            return  # a namesake that came since
        self._tombstones[object_key] = max(version, self._tombstones.get(object_key, 0))
        if held is not None:
            del self._entries[object_key]
            self._unlink(object_key, held.owner)

    def _unlink(self, object_key: _ObjectKey, owner: NamespacedName) -> None:
        places = self._keys_by_owner[owner]
        places.discard(object_key)
        if not places:
            del self._keys_by_owner[owner]
        self._on_change(owner)

    def _begin_relist(self, relist: Relist, version: int) -> bool:
        place = (relist.kind, relist.namespace)
        if relist.owner is not None or version >= self._relist_versions.get(place, 0):
            return False
        del self._relist_versions[place]
        for one, held in self._entries.items():
            if one.kind == relist.kind and relist.covers(one.namespace):
                held.version = 0
        for one in [one for one in self._tombstones if one.kind == relist.kind and relist.covers(one.namespace)]:
            del self._tombstones[one]
        return True

    def _end_relist(self, relist: Relist, version: int | None) -> None:
        if relist.owner is not None:
            within = [place for place in self._keys_by_owner.get(relist.owner, ()) if place.kind == relist.kind]
        else:
            within = [place for place in self._entries if place.kind == relist.kind and relist.covers(place.namespace)]
        for place in within:
            if place not in relist.listed_keys:
                self._remove(place, self._entries[place].version if version is None else version)
        if relist.owner is None and version is not None:
            self._relist_versions[relist.kind, relist.namespace] = version
            for place, gone in list(self._tombstones.items()):
                if gone <= version and place.kind == relist.kind and relist.covers(place.namespace):
                    del self._tombstones[place]


class Relist:
    """A list that is under way, page after page; what is heard meanwhile is not lost."""

    def __init__(self, cache: ObjectCache, kind: str, namespace: str | None, owner: NamespacedName | None) -> None:
        self._cache, self.kind, self.namespace, self.owner = cache, kind, namespace, owner
        self.listed_keys: set[_ObjectKey] = set()

    def begin(self, version: str) -> bool:
        """The version of the list, before its first page; whether it is older than the last one: then etcd was restored from a
        backup, and what was believed so far is believed no longer than until the list says otherwise."""
        return self._cache._begin_relist(self, int(version))

    def add(self, items: Iterable[ObjectDict]) -> None:
        """A page, or part of one."""
        for item in items:
            self.listed_keys.add(_object_key(item))
            self._cache.put(item)

    def end(self, version: str | None) -> None:
        """The list was whole, as of this version: of what it covers, all that is older and was not in it is gone.

        Without a version, the cluster does not know the kind (any more).
        """
        self._cache._end_relist(self, None if version is None else int(version))

    def covers(self, namespace: str) -> bool:
        """Whether objects of the namespace are listed."""
        return self.namespace is None or self.namespace == namespace


def find_owner(item: ObjectDict) -> NamespacedName | None:
    """The resource that the object is, or belongs to by its label."""
    metadata = item["metadata"]
    if item["kind"] == SPECULATIVE_DEPLOYMENTS.kind:
        return NamespacedName(metadata["namespace"], metadata["name"])
    labels = metadata.get("labels") or {}
    name = labels.get(naming.NAME_LABEL) or labels.get(naming.PREFLIGHT_LABEL)
    return NamespacedName(metadata["namespace"], name) if name else None


def _object_key(item: ObjectDict) -> _ObjectKey:
    return _ObjectKey(item["kind"], item["metadata"]["namespace"], item["metadata"]["name"])


def _resource_version(item: ObjectDict) -> int:
    return int(item["metadata"]["resourceVersion"])


def _pack(item: ObjectDict) -> bytes:
    metadata: dict[str, Any] = {key: value for key, value in item["metadata"].items() if key != "managedFields"}
    if item["kind"] in _KINDS_WITH_CHANGE_TIME and (entries := item["metadata"].get("managedFields")):
        metadata["managedFields"] = [{key: entry.get(key) for key in ("manager", "time")} for entry in entries]
    if _LAST_APPLIED_ANNOTATION in (metadata.get("annotations") or {}):
        metadata["annotations"] = {
            key: value for key, value in metadata["annotations"].items() if key != _LAST_APPLIED_ANNOTATION
        }
    kept = {**item, "metadata": metadata}
    if item["kind"] == PODS.kind and (spec := item.get("spec")):
        containers = [{key: one[key] for key in ("name", "ports") if key in one} for one in spec.get("containers") or []]
        kept["spec"] = {**({"nodeName": spec["nodeName"]} if spec.get("nodeName") else {}), "containers": containers}
    return zlib.compress(json.dumps(kept, separators=(",", ":")).encode(), level=1)


def _get_content(entry: _CacheEntry, *, keep: bool) -> ObjectDict:
    content = entry.unpacked if entry.unpacked is not None else _unpack(entry.packed)
    entry.unpacked = content if keep else None
    return content


def _unpack(packed: bytes) -> ObjectDict:
    found: ObjectDict = json.loads(zlib.decompress(packed))
    return found
