"""Comparison of a live object with what Aerie applied, so that nothing is written while nothing has changed.

The API server adds defaults, controllers add fields, injectors add containers and annotations; none of that is config drift.
Config drift is a field that Aerie set and that differs, or a field that Aerie set once and no longer sets. A digest of the
applied object, kept as an annotation, reveals the second kind. Server-side apply then removes such fields, because Aerie owned
them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from aerie.manifests.pod.strategic_merge import MERGE_KEYS

APPLIED_DIGEST_ANNOTATION = "aerie.dev/applied"

_QUANTITY_FIELDS = frozenset({"limits", "requests", "sizeLimit"})
"""Fields with quantities, which the API server normalises: 1000m becomes 1."""


def with_digest(desired: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object with the digest of its content as an annotation; an earlier digest is not part of the content."""
    metadata = desired["metadata"]
    if APPLIED_DIGEST_ANNOTATION in (annotations := metadata.get("annotations") or {}):
        others = {key: value for key, value in annotations.items() if key != APPLIED_DIGEST_ANNOTATION}
        metadata = {key: value for key, value in metadata.items() if key != "annotations"}
        metadata |= {"annotations": others} if others else {}
        desired = {**desired, "metadata": metadata}
    digest = hashlib.sha256(json.dumps(desired, sort_keys=True).encode()).hexdigest()[:16]
    return {
        **desired,
        "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), APPLIED_DIGEST_ANNOTATION: digest}},
    }


def needs_apply(live: Mapping[str, Any] | None, desired: Mapping[str, Any]) -> bool:
    """Return whether the object, which carries its digest, has to be applied."""
    return live is None or not _contains(live, desired)


def _contains(live: Any, desired: Any, field: str = "") -> bool:
    if live == desired:
        return True  # the usual case of a part to which nobody has added anything: far cheaper than field by field
    if isinstance(desired, Mapping):
        if field in _QUANTITY_FIELDS:
            return isinstance(live, Mapping) and all(_quantities_equal(live.get(key), value) for key, value in desired.items())
        # The API server drops an empty map or list, so absent equals empty.
        return all(_contains(live.get(key) if isinstance(live, Mapping) else None, value, key) for key, value in desired.items())
    if isinstance(desired, Sequence) and not isinstance(desired, str):
        return _contains_list(live or [], desired, field)
    if field in _QUANTITY_FIELDS:
        return _quantities_equal(live, desired)
    return False


def _contains_list(live: Any, desired: Sequence[Any], field: str) -> bool:
    if not isinstance(live, Sequence) or isinstance(live, str):
        return False
    key = MERGE_KEYS.get(field)
    if key is not None and all(isinstance(entry, Mapping) and key in entry for entry in desired):
        live_by_key = {entry.get(key): entry for entry in live if isinstance(entry, Mapping)}
        return all(entry[key] in live_by_key and _contains(live_by_key[entry[key]], entry) for entry in desired)
    return len(live) == len(desired) and all(
        _contains(live_entry, entry) for live_entry, entry in zip(live, desired, strict=True)
    )


def _quantities_equal(live: Any, desired: Any) -> bool:
    try:
        return bool(parse_quantity(live) == parse_quantity(desired))  # type: ignore[no-untyped-call]
    except (TypeError, ValueError):
        return bool(live == desired)
