"""What preflight takes over of the engine's pod, so that it reads the Hub by the way that the engine will take: a mirror, a
proxy, certificate authorities, a token, a cache for work without a network.

Guarantees: a function of the engine's pod as it is made, podTemplate included. Preflight gets the engine's variables, apart from
those that are about programs of the engine's image, and each volume that holds a path which a variable of `_PATHS` names, for
reading only. The cache that Aerie gives an engine is among them only where the engine is offline: a claim that one node at a time
may mount would otherwise hold preflight up for nothing. So the pod needs no more of Pod Security than the engine's own.
Not guaranteed: paths in variables whose values are in Secrets or ConfigMaps are not seen, and what an init container writes into
an emptyDir is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aerie.manifests import naming

JsonObject = dict[str, Any]

_ENGINE_ONLY_PREFIXES = ("VLLM_", "LD_", "PYTHON", "CUDA_", "NVIDIA_", "NCCL_", "TORCH_")
"""Beginnings of variables for programs of the engine's image; with some of them, such as PYTHONPATH, no other program starts."""
_ENGINE_ONLY_NAMES = frozenset({"PATH", "VIRTUAL_ENV"})
_PATH_VARIABLES = frozenset(
    {
        *("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "HF_TOKEN_PATH"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    }
)
"""Variables that preflight reads a path from (checkpoints/)."""
_OFFLINE_VARIABLES = frozenset({"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"})
_INHERITED_POD_FIELDS = ("nodeSelector", "tolerations", "serviceAccountName", "hostAliases", "dnsPolicy", "dnsConfig")
"""Where the engine's volumes can be mounted, and how it finds addresses."""
_INHERITED_GROUP_FIELDS = ("fsGroup", "fsGroupChangePolicy", "supplementalGroups")
"""Of the pod's security context: groups by which files of volumes can be read."""


def select_env(pod_template: Mapping[str, Any], default_variables: Sequence[Mapping[str, Any]] = ()) -> list[JsonObject]:
    """The variables: those in `given`, unless the engine has others of the same names, and then the engine's."""
    mine = [variable for variable in _engine_container(pod_template).get("env") or [] if _is_for_preflight(variable)]
    taken = {variable["name"] for variable in mine}
    return [dict(variable) for variable in default_variables if variable["name"] not in taken] + mine


def select_env_from(pod_template: Mapping[str, Any]) -> list[JsonObject]:
    """Secrets and ConfigMaps that are variables as a whole: `envFrom`."""
    return [dict(source) for source in _engine_container(pod_template).get("envFrom") or []]


def select_volumes(
    pod_template: Mapping[str, Any], variables: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[JsonObject, JsonObject]]:
    """(volume, mount) for each volume of the engine that a variable names a path of."""
    engine = _engine_container(pod_template)
    mounts = sorted(engine.get("volumeMounts") or [], key=lambda mount: len(mount["mountPath"]))
    known = {volume["name"]: volume for volume in pod_template["spec"].get("volumes") or []}
    named = [
        str(one["value"])
        for one in variables
        if one["name"] in _PATH_VARIABLES and one.get("value") and not _is_unneeded_cache(one, variables)
    ]
    # Of mounts inside each other, the innermost has the file.
    holding = [next((mount for mount in reversed(mounts) if _is_inside(path, mount["mountPath"])), None) for path in named]
    for mount in mounts:
        volume = known.get(mount["name"], {})
        if mount in holding and volume and "emptyDir" not in volume:  # an empty one has nothing to read
            yield _make_read_only(volume), {**mount, "readOnly": True}


def select_pod_fields(pod_template: Mapping[str, Any]) -> tuple[JsonObject, JsonObject]:
    """What is taken over of the pod's spec, and of its security context."""
    spec = pod_template["spec"]
    groups = spec.get("securityContext") or {}
    return {key: spec[key] for key in _INHERITED_POD_FIELDS if key in spec}, {
        key: groups[key] for key in _INHERITED_GROUP_FIELDS if key in groups
    }


def _engine_container(pod_template: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(one for one in pod_template["spec"]["containers"] if one["name"] == naming.ENGINE_CONTAINER)
    return found


def _is_for_preflight(variable: Mapping[str, Any]) -> bool:
    name = variable["name"]
    # A share of a container's resources is that of the engine's.
    counted = "resourceFieldRef" in (variable.get("valueFrom") or {})
    return not (counted or name.startswith(_ENGINE_ONLY_PREFIXES) or name in _ENGINE_ONLY_NAMES)


def _is_unneeded_cache(variable: Mapping[str, Any], variables: Sequence[Mapping[str, Any]]) -> bool:
    """Whether it names the cache that Aerie gives each engine, and nothing has to be read from it."""
    return variable["name"] == "HF_HOME" and variable["value"] == naming.HF_HOME_PATH and not _is_offline(variables)


def _is_offline(variables: Sequence[Mapping[str, Any]]) -> bool:
    return any(one["name"] in _OFFLINE_VARIABLES and (one.get("value") or "valueFrom" in one) for one in variables)


def _is_inside(path: str, folder: str) -> bool:
    return path.rstrip("/") == folder.rstrip("/") or path.startswith(folder.rstrip("/") + "/")


def _make_read_only(volume: Mapping[str, Any]) -> JsonObject:
    claim = volume.get("persistentVolumeClaim")
    return dict(volume) if claim is None else {**volume, "persistentVolumeClaim": {**claim, "readOnly": True}}
