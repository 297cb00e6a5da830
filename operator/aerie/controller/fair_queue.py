"""Work queue that shares its turns among namespaces, and among the resources of each namespace.

    namespace a ─┬─ resource 1: pod, pod, ...      a turn goes to the namespace that has waited longest,
                 └─ resource 2: pod                in it to the resource that has waited longest, there to the first key
    namespace b ─── resource 3: pod, pod, ...

Guarantees: a namespace has at most `max_per_namespace` turns at a time, and a resource at most half of them, rounded up. A
resource with long turns or many keys therefore delays others by no more than the turns in progress. The guarantees of `WorkQueue`
hold. Not guaranteed: fairness between users who own several namespaces.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from aerie.controller.work_queue import NamespacedName, WorkQueue


class FairQueue(WorkQueue):
    """Fair work queue.

    `find_owner` returns the resource that a key belongs to. It is called once each time a key becomes ready; the key stays with
    that owner until its turn, even if `find_owner` would return another one later.
    """

    def __init__(self, find_owner: Callable[[NamespacedName], NamespacedName], max_per_namespace: int) -> None:
        super().__init__()
        self._ready = self._round_robin = _RoundRobinKeys(find_owner, max_per_namespace)  # type: ignore[assignment]  # has all deque methods that WorkQueue uses

    def done(self, key: NamespacedName, rest_seconds: float = 0.0) -> None:
        """Mark the work on the key as finished. The key is not handed out again for `rest_seconds`."""
        self._round_robin.release(key)
        super().done(key, rest_seconds)
        self._changed.set()  # a key that waited for this turn to end may be ready now


class _RoundRobinKeys:
    """Keys that wait for a turn, and keys whose turn is in progress. It is true when a key may have a turn now; its length counts
    all waiting keys.
    """

    def __init__(self, find_owner: Callable[[NamespacedName], NamespacedName], max_per_namespace: int) -> None:
        self._find_owner, self._max_per_namespace, self._max_per_owner = (
            find_owner,
            max_per_namespace,
            (max_per_namespace + 1) // 2,
        )
        self._keys: OrderedDict[str, OrderedDict[NamespacedName, deque[NamespacedName]]] = OrderedDict()
        self._active: dict[NamespacedName, NamespacedName] = {}
        """Owner of each key whose turn is in progress."""
        self._active_by_owner: Counter[NamespacedName] = Counter()
        self._active_by_namespace: Counter[str] = Counter()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __bool__(self) -> bool:
        return self._next_owner() is not None

    def append(self, key: NamespacedName) -> None:
        owner = self._find_owner(key)
        self._keys.setdefault(owner.namespace, OrderedDict()).setdefault(owner, deque()).append(key)
        self._size += 1

    def popleft(self) -> NamespacedName:
        owner = self._next_owner()
        if owner is None:
            raise IndexError("no key may have a turn")
        owners = self._keys[owner.namespace]
        key = owners[owner].popleft()
        owners.move_to_end(owner)
        self._keys.move_to_end(owner.namespace)
        if not owners[owner]:
            del owners[owner]
        if not owners:
            del self._keys[owner.namespace]
        self._size -= 1
        self._active[key] = owner
        self._active_by_owner[owner] += 1
        self._active_by_namespace[owner.namespace] += 1
        return key

    def release(self, key: NamespacedName) -> None:
        owner = self._active.pop(key)
        self._active_by_owner = self._active_by_owner - Counter((owner,))  # drops counts of 0
        self._active_by_namespace = self._active_by_namespace - Counter((owner.namespace,))

    def _next_owner(self) -> NamespacedName | None:
        for namespace, owners in self._keys.items():
            if self._active_by_namespace[namespace] >= self._max_per_namespace:
                continue
            for owner in owners:
                if self._active_by_owner[owner] < self._max_per_owner:
                    return owner
        return None
