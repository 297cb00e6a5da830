"""A work queue whose turns are shared: among namespaces, and among the resources of each.

    namespace a ─┬─ resource 1: pod, pod, ...      a turn goes to the namespace that has waited longest,
                 └─ resource 2: pod                in it to the resource that has waited longest, there to the first key
    namespace b ─── resource 3: pod, pod, ...

Guarantees: a namespace has at most `each` turns at a time, and a resource at most half of them, rounded up; so one that needs
long for each turn, or has many keys, keeps no other waiting for more than the turns that are under way. What `WorkQueue`
guarantees holds. Not guaranteed: fairness between people who have several namespaces.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from aerie.controller.work_queue import Key, WorkQueue


class FairQueue(WorkQueue):
    """See the module. `owner` says whose a key is; it may answer otherwise later."""

    def __init__(self, owner: Callable[[Key], Key], each: int) -> None:
        super().__init__()
        self._ready = self._waiting = _Waiting(owner, each)  # type: ignore[assignment]  # all that is done with a deque there

    def done(self, key: Key, rest: float = 0.0) -> None:
        """The work on the key is over, and it is not handed out again for `rest` seconds."""
        self._waiting.over(key)
        super().done(key, rest)
        self._changed.set()  # a key that waited for this may have its turn


class _Waiting:
    """Keys that wait for their turn, and whose turns are under way. As long as the keys that may have a turn now are many."""

    def __init__(self, owner: Callable[[Key], Key], each: int) -> None:
        self._owner, self._each, self._each_owner = owner, each, (each + 1) // 2
        self._keys: OrderedDict[str, OrderedDict[Key, deque[Key]]] = OrderedDict()
        self._turns: dict[Key, Key] = {}
        """Under way: key and owner."""
        self._of_owner: Counter[Key] = Counter()
        self._of_namespace: Counter[str] = Counter()
        self._number = 0

    def __len__(self) -> int:
        return self._number

    def __bool__(self) -> bool:
        return self._next() is not None

    def append(self, key: Key) -> None:
        owner = self._owner(key)
        self._keys.setdefault(owner.namespace, OrderedDict()).setdefault(owner, deque()).append(key)
        self._number += 1

    def popleft(self) -> Key:
        owner = self._next()
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
        self._number -= 1
        self._turns[key] = owner
        self._of_owner[owner] += 1
        self._of_namespace[owner.namespace] += 1
        return key

    def over(self, key: Key) -> None:
        owner = self._turns.pop(key)
        self._of_owner = self._of_owner - Counter((owner,))  # without those that are 0
        self._of_namespace = self._of_namespace - Counter((owner.namespace,))

    def _next(self) -> Key | None:
        for namespace, owners in self._keys.items():
            if self._of_namespace[namespace] >= self._each:
                continue
            for owner in owners:
                if self._of_owner[owner] < self._each_owner:
                    return owner
        return None
