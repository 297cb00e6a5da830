"""Whether a live object still is what Aerie applied: so that nothing is written while nothing has changed.

The API server adds defaults, controllers add fields, injectors add containers and annotations; none of that is drift. Drift
is a field that Aerie set and that differs, or a field that Aerie set once and no longer wants. The second is told by a digest
of what was applied, kept as an annotation; server-side apply then removes such fields, because Aerie owned them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from aerie.manifests.pod.strategic_merge import KEYS

APPLIED = "aerie.dev/applied"

_AMOUNTS = frozenset({"limits", "requests", "sizeLimit"})
"""Fields with quantities, which the API server writes in its own way: 1000m is 1."""


def stamped(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The object with the digest of its content; a digest of before is not part of that."""
    metadata = wanted["metadata"]
    if APPLIED in (annotations := metadata.get("annotations") or {}):
        others = {key: value for key, value in annotations.items() if key != APPLIED}
        metadata = {key: value for key, value in metadata.items() if key != "annotations"}
        metadata |= {"annotations": others} if others else {}
        wanted = {**wanted, "metadata": metadata}
    digest = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:16]
    return {**wanted, "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), APPLIED: digest}}}


def drifted(live: Mapping[str, Any] | None, stamped_wanted: Mapping[str, Any]) -> bool:
    """Whether the stamped object has to be applied (again)."""
    return live is None or not _holds(live, stamped_wanted)


def _holds(live: Any, wanted: Any, field: str = "") -> bool:
    if isinstance(wanted, Mapping):
        if field in _AMOUNTS:
            return isinstance(live, Mapping) and all(_same_amount(live.get(key), value) for key, value in wanted.items())
        # An empty map or list is not kept by the server; absent is the same.
        return all(_holds(live.get(key) if isinstance(live, Mapping) else None, value, key) for key, value in wanted.items())
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return _holds_list(live or [], wanted, field)
    if field in _AMOUNTS:
        return _same_amount(live, wanted)
    return bool(live == wanted)


def _holds_list(live: Any, wanted: Sequence[Any], field: str) -> bool:
    if not isinstance(live, Sequence) or isinstance(live, str):
        return False
    key = KEYS.get(field)
    if key is not None and all(isinstance(entry, Mapping) and key in entry for entry in wanted):
        found = {entry.get(key): entry for entry in live if isinstance(entry, Mapping)}
        return all(entry[key] in found and _holds(found[entry[key]], entry) for entry in wanted)
    return len(live) == len(wanted) and all(_holds(one, other) for one, other in zip(live, wanted, strict=True))


def _same_amount(live: Any, wanted: Any) -> bool:
    try:
        return bool(parse_quantity(live) == parse_quantity(wanted))  # type: ignore[no-untyped-call]
    except (TypeError, ValueError):
        return bool(live == wanted)
