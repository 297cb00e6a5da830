"""Informer cache: resources, children and pods as last received, so that most reconciles need no call to the API server.

    watch events ─┐
    answers ──────┼─► ObjectCache ─► `on_change(key)` for each resource with a change
    lists ────────┘      └─────────► snapshot that a reconcile starts with

Why not read from the API server in every reconcile: there is a reconcile for every event, and one of all resources now and then.
Nearly all of them find nothing to do. Such a reconcile reads from this cache alone.

Guarantees: of each object the newest received version is kept, in whatever order events, answers and lists arrive. An older
version never restores an object that was deleted. Kubernetes promises that the resource versions of a kind are numbers that grow,
over all objects of that kind. So this also holds for an object of the same name with another uid. `on_change` is called for every
difference and for nothing else: a watch event that repeats the answer to an own write is no change. A complete list that is older
than the previous one means that etcd was restored from a backup. It replaces everything that is cached.

Not guaranteed: that the cache is current. An object that was deleted while no watch ran stays here as a stale entry until the
next list, because Kopf does not report its deletion. Hence one rule for all readers (reconciler.py): a reconcile may end on the
cache when it finds nothing to do, but nothing is written because of it. Before a write, everything is read live and decided
again. A stale cache can therefore delay a write until an event or the next list, and can cause a reconcile in vain. It cannot
cause a write: no second transition, no deletion of a needed object, no event posted twice.

Objects are kept as compressed JSON without the server's bookkeeping. This takes a small part of the memory of dictionaries, gives
the garbage collector nothing to traverse, and prevents one reader from changing what another one reads. Of a pod's spec only what
is read of it is kept: the node, the ports, what an evaluator's pod inherits, and, where the engine has an API key, the command,
arguments and variables. Of an immutable ConfigMap, as that of the plugin is, the data are not kept: it is there or not. For a
resource with many objects, unpacking them in each reconcile would block the event loop for longer than everything else together
(0.2 ms per object). Its dictionaries are kept as well, and must not be changed.
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
from aerie.manifests.engine_key import EngineKey, find_engine_key
from aerie.manifests.preflight_environment import SCHEDULING_FIELDS

_POD_FIELDS = ("nodeName", "imagePullSecrets", *SCHEDULING_FIELDS)
_CONTAINER_FIELDS = ("name", "ports")
_KEY_FIELDS = ("command", "args", "env")
"""Further fields of an engine's container that has an API key."""
_LAST_APPLIED_ANNOTATION = "kubectl.kubernetes.io/last-applied-configuration"
_KINDS_WITH_CHANGE_TIME = frozenset({"HTTPRoute", "Service"})
"""Kinds whose time of last change is used. Of their managed fields, manager and time are kept; of all other kinds, none are."""
MIN_OBJECTS_KEPT_UNPACKED = 100
"""Number of objects of one resource from which on they are kept unpacked too."""


class _ObjectKey(NamedTuple):
    """Identity of an object by its name; at most one object has it at a time."""

    kind: str
    namespace: str
    name: str


@dataclass(slots=True)
class _CacheEntry:
    version: int
    owner: NamespacedName
    """Resource that the object is, or that owns it."""
    packed: bytes
    unpacked: ObjectDict | None = None
    """Unpacked content, of a resource with many objects, after its first use."""


class ObjectCache:
    """Informer cache.

    `on_change` is called with a resource's key, once or more, whenever one of its objects has changed.
    """

    def __init__(self, on_change: Callable[[NamespacedName], None]) -> None:
        self._on_change = on_change
        self._entries: dict[_ObjectKey, _CacheEntry] = {}
        self._keys_by_owner: dict[NamespacedName, set[_ObjectKey]] = {}
        self._tombstones: dict[_ObjectKey, int] = {}
        """Versions of deleted objects; a version of the object up to it is ignored."""
        self._relist_versions: dict[tuple[str, str | None], int] = {}
        """Version of the last complete list, by kind, and by namespace or None for all.

        An object that is older and was not in it is deleted.
        """

    # ------------------------------------------------------------------------------------------------------------- reading
    def get_resource(self, key: NamespacedName) -> ObjectDict | None:
        """Return the resource itself, or None when it is not cached."""
        entry = self._entries.get(_ObjectKey(SPECULATIVE_DEPLOYMENTS.kind, *key))
        return None if entry is None else _unpack(entry.packed)

    def list_resources(self) -> list[NamespacedName]:
        """Return the keys of all resources."""
        return [entry.owner for object_key, entry in self._entries.items() if object_key.kind == SPECULATIVE_DEPLOYMENTS.kind]

    def list_owned_objects(self, key: NamespacedName) -> list[ObjectDict]:
        """Return the objects owned by the resource, by kind and name, without the resource itself. They must not be changed."""
        object_keys = self._keys_by_owner.get(key, ())
        keep_unpacked = len(object_keys) >= MIN_OBJECTS_KEPT_UNPACKED
        return [
            _get_content(self._entries[object_key], keep=keep_unpacked)
            for object_key in sorted(object_keys)
            if object_key.kind != SPECULATIVE_DEPLOYMENTS.kind
        ]

    def count_objects(self, key: NamespacedName) -> int:
        """Return the number of objects that are owned by the resource, with the resource itself."""
        return len(self._keys_by_owner.get(key, ()))

    # ------------------------------------------------------------------------------------------------------------- updates
    def put(self, item: ObjectDict) -> None:
        """Store an object that was received from the API server, unless a newer version of it is known."""
        object_key, version = _object_key(item), _resource_version(item)
        entry = self._entries.get(object_key)
        if version <= (entry.version if entry is not None else self._tombstone_version(object_key)):
            return
        owner = find_owner(item)
        if owner is None:
            self._remove(object_key, version)
            return
        if entry is not None and entry.owner != owner:
            self._unlink(object_key, entry.owner)
        self._tombstones.pop(object_key, None)
        self._entries[object_key] = _CacheEntry(version, owner, _pack(item))
        self._keys_by_owner.setdefault(owner, set()).add(object_key)
        self._on_change(owner)

    def handle_deletion(self, item: ObjectDict) -> None:
        """Remove an object whose deletion a watch has reported; its version is that of the deletion."""
        self._remove(_object_key(item), _resource_version(item))

    def handle_not_found(self, key: NamespacedName, version: str) -> None:
        """Remove the resource, cached in this version, because the API server does not have it."""
        self._remove(_ObjectKey(SPECULATIVE_DEPLOYMENTS.kind, *key), int(version))

    def start_relist(self, kind: ResourceKind, namespace: str | None = None, owner: NamespacedName | None = None) -> Relist:
        """Start a list of the kind: of a namespace, of all namespaces, or of the objects of one resource."""
        return Relist(self, kind.kind, namespace, owner)

    # ------------------------------------------------------------------------------------------------------------- internals
    def _tombstone_version(self, object_key: _ObjectKey) -> int:
        all_namespaces, own_namespace = (
            self._relist_versions.get((object_key.kind, None), 0),
            self._relist_versions.get((object_key.kind, object_key.namespace), 0),
        )
        return max(self._tombstones.get(object_key, 0), all_namespaces, own_namespace)

    def _remove(self, object_key: _ObjectKey, version: int) -> None:
        entry = self._entries.get(object_key)
        if entry is not None and entry.version > version:
            return  # an object of the same name was created since
        self._tombstones[object_key] = max(version, self._tombstones.get(object_key, 0))
        if entry is not None:
            del self._entries[object_key]
            self._unlink(object_key, entry.owner)

    def _unlink(self, object_key: _ObjectKey, owner: NamespacedName) -> None:
        object_keys = self._keys_by_owner[owner]
        object_keys.discard(object_key)
        if not object_keys:
            del self._keys_by_owner[owner]
        self._on_change(owner)

    def _begin_relist(self, relist: Relist, version: int) -> bool:
        scope = (relist.kind, relist.namespace)
        if relist.owner is not None or version >= self._relist_versions.get(scope, 0):
            return False
        del self._relist_versions[scope]
        for object_key, entry in self._entries.items():
            if object_key.kind == relist.kind and relist.covers(object_key.namespace):
                entry.version = 0
        for object_key in [
            object_key
            for object_key in self._tombstones
            if object_key.kind == relist.kind and relist.covers(object_key.namespace)
        ]:
            del self._tombstones[object_key]
        return True

    def _end_relist(self, relist: Relist, version: int | None) -> None:
        if relist.owner is not None:
            covered_keys = [
                object_key for object_key in self._keys_by_owner.get(relist.owner, ()) if object_key.kind == relist.kind
            ]
        else:
            covered_keys = [
                object_key
                for object_key in self._entries
                if object_key.kind == relist.kind and relist.covers(object_key.namespace)
            ]
        for object_key in covered_keys:
            if object_key not in relist.listed_keys:
                self._remove(object_key, self._entries[object_key].version if version is None else version)
        if relist.owner is None and version is not None:
            self._relist_versions[relist.kind, relist.namespace] = version
            for object_key, deleted_version in list(self._tombstones.items()):
                if deleted_version <= version and object_key.kind == relist.kind and relist.covers(object_key.namespace):
                    del self._tombstones[object_key]


class Relist:
    """List in progress, page by page. Changes that are received meanwhile are not lost."""

    def __init__(self, cache: ObjectCache, kind: str, namespace: str | None, owner: NamespacedName | None) -> None:
        self._cache, self.kind, self.namespace, self.owner = cache, kind, namespace, owner
        self.listed_keys: set[_ObjectKey] = set()

    def begin(self, version: str) -> bool:
        """Record the list's version, before its first page. Return True when it is older than that of the last list.

        In that case etcd was restored from a backup, and any version in this list replaces the cached one.
        """
        return self._cache._begin_relist(self, int(version))

    def add(self, items: Iterable[ObjectDict]) -> None:
        """Store the objects of a page, or of a part of one."""
        for item in items:
            self.listed_keys.add(_object_key(item))
            self._cache.put(item)

    def end(self, version: str | None) -> None:
        """Complete the list, as of this version: remove covered objects that are older and were not in it.

        `version` is None when the cluster does not, or no longer, know the kind.
        """
        self._cache._end_relist(self, None if version is None else int(version))

    def covers(self, namespace: str) -> bool:
        """Return True when the list covers the namespace."""
        return self.namespace is None or self.namespace == namespace


def find_owner(item: ObjectDict) -> NamespacedName | None:
    """Return the resource that the object is, or that its label names as the owner; None when there is none."""
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
    content = {**item, "metadata": metadata}
    if item.get("immutable"):
        del content["data"]
    if item["kind"] == PODS.kind and (spec := item.get("spec")):
        content["spec"] = _reduce_pod_spec(spec)
    return zlib.compress(json.dumps(content, separators=(",", ":")).encode(), level=1)


def _reduce_pod_spec(spec: ObjectDict) -> ObjectDict:
    containers = spec.get("containers") or []
    has_key = find_engine_key({"spec": {"containers": containers}}) != EngineKey()

    def list_fields(container: ObjectDict) -> tuple[str, ...]:
        is_read = has_key and container["name"] == naming.ENGINE_CONTAINER
        return (*_CONTAINER_FIELDS, *_KEY_FIELDS) if is_read else _CONTAINER_FIELDS

    reduced = [{field: container[field] for field in list_fields(container) if field in container} for container in containers]
    return {**{field: spec[field] for field in _POD_FIELDS if spec.get(field)}, "containers": reduced}


def _get_content(entry: _CacheEntry, *, keep: bool) -> ObjectDict:
    content = entry.unpacked if entry.unpacked is not None else _unpack(entry.packed)
    entry.unpacked = content if keep else None
    return content


def _unpack(packed: bytes) -> ObjectDict:
    content: ObjectDict = json.loads(zlib.decompress(packed))
    return content
