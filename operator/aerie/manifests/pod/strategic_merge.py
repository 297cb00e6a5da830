"""Strategic merge of the user's podTemplate into a pod.

Maps are merged key by key, and null removes a key. Lists that Kubernetes keys are merged entry by entry; all other lists are
replaced. An entry `{"$patch": "delete", KEY: ...}` removes the entry of that key. `{"$patch": "replace"}` among the entries
replaces the whole list. Source of the keys: `patchMergeKey` of PodSpec and Container in Kubernetes' API reference.

Guarantee: neither argument is changed. Not guaranteed: that the result is a valid pod; the API server decides that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "volumes": "name",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "schedulingGates": "name",
}
"""List fields of a pod's spec that are merged by a key, and the key."""

_PATCH_DIRECTIVE = "$patch"


def apply_strategic_merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `patch` merged over it."""
    if patch.get(_PATCH_DIRECTIVE) == "replace":
        return {key: value for key, value in patch.items() if key != _PATCH_DIRECTIVE}
    result = dict(base)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            base_value = result.get(key)
            result[key] = apply_strategic_merge(base_value if isinstance(base_value, Mapping) else {}, value)
        elif isinstance(value, Sequence) and not isinstance(value, str) and key in MERGE_KEYS:
            result[key] = _merge_list(result.get(key) or [], value, MERGE_KEYS[key])
        else:
            result[key] = value
    return result


def _merge_list(base: Sequence[Any], patch: Sequence[Any], merge_key: str) -> list[Any]:
    entries = [entry for entry in patch if entry != {_PATCH_DIRECTIVE: "replace"}]
    merged = {} if len(entries) < len(patch) else {entry[merge_key]: entry for entry in base if merge_key in entry}
    keyless = []
    for entry in entries:
        if not isinstance(entry, Mapping) or merge_key not in entry:
            keyless.append(entry)  # the API server rejects it with a message of its own
        elif entry.get(_PATCH_DIRECTIVE) == "delete":
            merged.pop(entry[merge_key], None)
        else:
            merged[entry[merge_key]] = apply_strategic_merge(merged.get(entry[merge_key], {}), entry)
    return [*merged.values(), *keyless]
