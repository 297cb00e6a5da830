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

from aerie.controller.kubernetes.client import PODS, RESOURCES, Kind, Object
from aerie.controller.work_queue import Key
from aerie.manifests import naming

_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_DATED = frozenset({"HTTPRoute", "Service"})
"""Kinds of which it matters when they were last changed; of all others that is dropped, and of these what it was."""
MANY = 100
"""Objects of one resource from which on they are kept unpacked too."""


class _Place(NamedTuple):
    """Where one object is at most."""

    kind: str
    namespace: str
    name: str


@dataclass(slots=True)
class _Held:
    version: int
    owner: Key
    """The resource that it is, or belongs to."""
    packed: bytes
    unpacked: Object | None = None
    """The same, of a resource with many objects, once it was asked for."""


class Mirror:
    """See the module. `changed` is called with the resource's key, once or more, whenever something of it has changed."""

    def __init__(self, changed: Callable[[Key], None]) -> None:
        self._changed = changed
        self._held: dict[_Place, _Held] = {}
        self._of: dict[Key, set[_Place]] = {}
        self._gone: dict[_Place, int] = {}
        """Versions up to which nothing is believed of objects that were deleted."""
        self._listed: dict[tuple[str, str | None], int] = {}
        """By kind, and namespace or None for all: the version of the last whole list. What is older and not in it is gone."""

    def __len__(self) -> int:
        """Objects of all kinds."""
        return len(self._held)

    # ------------------------------------------------------------------------------------------------------------- looking
    def resource(self, key: Key) -> Object | None:
        """The resource itself."""
        held = self._held.get(_Place(RESOURCES.kind, *key))
        return None if held is None else _unpacked(held.packed)

    def resources(self) -> list[Key]:
        """All resources."""
        return [held.owner for place, held in self._held.items() if place.kind == RESOURCES.kind]

    def belonging(self, key: Key) -> list[Object]:
        """What belongs to the resource, by kind and name; not the resource itself. To be read only."""
        places = self._of.get(key, ())
        many = len(places) >= MANY
        return [_content(self._held[place], keep=many) for place in sorted(places) if place.kind != RESOURCES.kind]

    def count(self, key: Key) -> int:
        """Objects that are, or belong to, the resource."""
        return len(self._of.get(key, ()))

    # ------------------------------------------------------------------------------------------------------------- hearing
    def put(self, item: Object) -> None:
        """The object exists, or did a moment ago."""
        place, version = _place(item), _version(item)
        held = self._held.get(place)
        if version <= (held.version if held is not None else self._forgotten(place)):
            return
        owner = owner_of(item)
        if owner is None:
            self._remove(place, version)
            return
        if held is not None and held.owner != owner:
            self._unlink(place, held.owner)
        self._gone.pop(place, None)
        self._held[place] = _Held(version, owner, _packed(item))
        self._of.setdefault(owner, set()).add(place)
        self._changed(owner)

    def deleted(self, item: Object) -> None:
        """A watch told that the object is gone; its version is that of its deletion."""
        self._remove(_place(item), _version(item))

    def missed(self, key: Key, version: str) -> None:
        """The resource, held in this version, was asked for and is not there."""
        self._remove(_Place(RESOURCES.kind, *key), int(version))

    def listing(self, kind: Kind, namespace: str | None = None, of: Key | None = None) -> Listing:
        """A list of the kind begins: of a namespace or of all, or of what belongs to one resource."""
        return Listing(self, kind.kind, namespace, of)

    # -------------------------------------------------------------------------------------------------------------- inside
    def _forgotten(self, place: _Place) -> int:
        everywhere, here = self._listed.get((place.kind, None), 0), self._listed.get((place.kind, place.namespace), 0)
        return max(self._gone.get(place, 0), everywhere, here)

    def _remove(self, place: _Place, version: int) -> None:
        held = self._held.get(place)
        if held is not None and held.version > version:
            return  # a namesake that came since
        self._gone[place] = max(version, self._gone.get(place, 0))
        if held is not None:
            del self._held[place]
            self._unlink(place, held.owner)

    def _unlink(self, place: _Place, owner: Key) -> None:
        places = self._of[owner]
        places.discard(place)
        if not places:
            del self._of[owner]
        self._changed(owner)

    def _begin(self, listing: Listing, version: int) -> bool:
        place = (listing.kind, listing.namespace)
        if listing.of is not None or version >= self._listed.get(place, 0):
            return False
        del self._listed[place]
        for one, held in self._held.items():
            if one.kind == listing.kind and listing.covers(one.namespace):
                held.version = 0
        for one in [one for one in self._gone if one.kind == listing.kind and listing.covers(one.namespace)]:
            del self._gone[one]
        return True

    def _end(self, listing: Listing, version: int | None) -> None:
        if listing.of is not None:
            within = [place for place in self._of.get(listing.of, ()) if place.kind == listing.kind]
        else:
            within = [place for place in self._held if place.kind == listing.kind and listing.covers(place.namespace)]
        for place in within:
            if place not in listing.seen:
                self._remove(place, self._held[place].version if version is None else version)
        if listing.of is None and version is not None:
            self._listed[listing.kind, listing.namespace] = version
            for place, gone in list(self._gone.items()):
                if gone <= version and place.kind == listing.kind and listing.covers(place.namespace):
                    del self._gone[place]


class Listing:
    """A list that is under way, page after page; what is heard meanwhile is not lost."""

    def __init__(self, mirror: Mirror, kind: str, namespace: str | None, of: Key | None) -> None:
        self._mirror, self.kind, self.namespace, self.of = mirror, kind, namespace, of
        self.seen: set[_Place] = set()

    def begin(self, version: str) -> bool:
        """The version of the list, before its first page; whether it is older than the last one: then etcd was restored from a
        backup, and what was believed so far is believed no longer than until the list says otherwise."""
        return self._mirror._begin(self, int(version))

    def add(self, items: Iterable[Object]) -> None:
        """A page, or part of one."""
        for item in items:
            self.seen.add(_place(item))
            self._mirror.put(item)

    def end(self, version: str | None) -> None:
        """The list was whole, as of this version: of what it covers, all that is older and was not in it is gone.

        Without a version, the cluster does not know the kind (any more).
        """
        self._mirror._end(self, None if version is None else int(version))

    def covers(self, namespace: str) -> bool:
        """Whether objects of the namespace are listed."""
        return self.namespace is None or self.namespace == namespace


def owner_of(item: Object) -> Key | None:
    """The resource that the object is, or belongs to by its label."""
    metadata = item["metadata"]
    if item["kind"] == RESOURCES.kind:
        return Key(metadata["namespace"], metadata["name"])
    labels = metadata.get("labels") or {}
    name = labels.get(naming.NAME) or labels.get(naming.PREFLIGHT)
    return Key(metadata["namespace"], name) if name else None


def _place(item: Object) -> _Place:
    return _Place(item["kind"], item["metadata"]["namespace"], item["metadata"]["name"])


def _version(item: Object) -> int:
    return int(item["metadata"]["resourceVersion"])


def _packed(item: Object) -> bytes:
    metadata: dict[str, Any] = {key: value for key, value in item["metadata"].items() if key != "managedFields"}
    if item["kind"] in _DATED and (entries := item["metadata"].get("managedFields")):
        metadata["managedFields"] = [{key: entry.get(key) for key in ("manager", "time")} for entry in entries]
    if _LAST_APPLIED in (metadata.get("annotations") or {}):
        metadata["annotations"] = {key: value for key, value in metadata["annotations"].items() if key != _LAST_APPLIED}
    kept = {**item, "metadata": metadata}
    if item["kind"] == PODS.kind and (spec := item.get("spec")):
        containers = [{key: one[key] for key in ("name", "ports") if key in one} for one in spec.get("containers") or []]
        kept["spec"] = {**({"nodeName": spec["nodeName"]} if spec.get("nodeName") else {}), "containers": containers}
    return zlib.compress(json.dumps(kept, separators=(",", ":")).encode(), level=1)


def _content(held: _Held, *, keep: bool) -> Object:
    content = held.unpacked if held.unpacked is not None else _unpacked(held.packed)
    held.unpacked = content if keep else None
    return content


def _unpacked(packed: bytes) -> Object:
    found: Object = json.loads(zlib.decompress(packed))
    return found
