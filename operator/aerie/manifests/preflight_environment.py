"""Parts of the engine's pod that preflight inherits, so that it reads the Hub the way the engine does: a mirror, a proxy, CA
certificates, a token, a cache for work without a network.

Guarantees: a function of the engine's final pod template, podTemplate included. Preflight gets the engine's variables, except
those for programs of the engine's image. It gets each volume with a path that a variable of `_PATH_VARIABLES` names, mounted
read-only. The cache that Aerie gives an engine is included only where the engine is offline: a claim that only one node may
mount would otherwise delay preflight for nothing. So the pod needs no more of Pod Security than the engine's own. Not
guaranteed: paths in variables with values from Secrets or ConfigMaps are not seen. Files that an init container writes into an
emptyDir are absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aerie.api.types.base import JsonObject
from aerie.manifests import naming

_ENGINE_ONLY_PREFIXES = ("VLLM_", "LD_", "PYTHON", "CUDA_", "NVIDIA_", "NCCL_", "TORCH_", "AERIE_DRAFTER_")
"""Prefixes of variables for programs of the engine's image; some of them, such as PYTHONPATH, break other programs."""
_ENGINE_ONLY_NAMES = frozenset({"PATH", "VIRTUAL_ENV"})
_PATH_VARIABLES = frozenset(
    {
        *("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "HF_TOKEN_PATH"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    }
)
"""Variables from which preflight reads a path (checkpoints/)."""
_OFFLINE_VARIABLES = frozenset({"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"})
SCHEDULING_FIELDS = ("nodeSelector", "tolerations")
"""Fields of the pod's spec by which there is a node for it: some clusters run the pods of a namespace on certain nodes only."""
_INHERITED_POD_FIELDS = (*SCHEDULING_FIELDS, "serviceAccountName", "hostAliases", "dnsPolicy", "dnsConfig")
"""Fields of the pod's spec: where the engine's volumes can be mounted, and how names are resolved."""
_INHERITED_GROUP_FIELDS = ("fsGroup", "fsGroupChangePolicy", "supplementalGroups")
"""Fields of the pod's security context: groups that may read the files of volumes."""


def select_env(pod_template: Mapping[str, Any], default_variables: Sequence[Mapping[str, Any]] = ()) -> list[JsonObject]:
    """Return the variables: the engine's, and those of `default_variables` with names that the engine does not set."""
    engine_variables = [variable for variable in _engine_container(pod_template).get("env") or [] if _is_for_preflight(variable)]
    engine_names = {variable["name"] for variable in engine_variables}
    return [dict(variable) for variable in default_variables if variable["name"] not in engine_names] + engine_variables


def select_env_from(pod_template: Mapping[str, Any]) -> list[JsonObject]:
    """Return the engine's `envFrom`: Secrets and ConfigMaps that are variables as a whole."""
    return [dict(source) for source in _engine_container(pod_template).get("envFrom") or []]


def select_volumes(
    pod_template: Mapping[str, Any], variables: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[JsonObject, JsonObject]]:
    """Yield (volume, mount) for each volume of the engine that holds the path of a variable."""
    engine = _engine_container(pod_template)
    mounts = sorted(engine.get("volumeMounts") or [], key=lambda mount: len(mount["mountPath"]))
    volumes_by_name = {volume["name"]: volume for volume in pod_template["spec"].get("volumes") or []}
    paths = [
        str(variable["value"])
        for variable in variables
        if variable["name"] in _PATH_VARIABLES and variable.get("value") and not _is_unneeded_cache(variable, variables)
    ]
    # Where mounts are nested, the innermost one holds the file.
    path_mounts = [next((mount for mount in reversed(mounts) if _is_inside(path, mount["mountPath"])), None) for path in paths]
    for mount in mounts:
        volume = volumes_by_name.get(mount["name"], {})
        if mount in path_mounts and volume and "emptyDir" not in volume:  # an emptyDir holds nothing to read
            yield _make_read_only(volume), {**mount, "readOnly": True}


def select_pod_fields(pod_template: Mapping[str, Any]) -> tuple[JsonObject, JsonObject]:
    """Return the inherited fields of the pod's spec, and those of its security context."""
    spec = pod_template["spec"]
    security_context = spec.get("securityContext") or {}
    return {key: spec[key] for key in _INHERITED_POD_FIELDS if key in spec}, {
        key: security_context[key] for key in _INHERITED_GROUP_FIELDS if key in security_context
    }


def _engine_container(pod_template: Mapping[str, Any]) -> Mapping[str, Any]:
    engine: Mapping[str, Any] = next(
        container for container in pod_template["spec"]["containers"] if container["name"] == naming.ENGINE_CONTAINER
    )
    return engine


def _is_for_preflight(variable: Mapping[str, Any]) -> bool:
    name = variable["name"]
    # A variable with a share of a container's resources is about the engine's container.
    is_resource_share = "resourceFieldRef" in (variable.get("valueFrom") or {})
    return not (is_resource_share or name.startswith(_ENGINE_ONLY_PREFIXES) or name in _ENGINE_ONLY_NAMES)


def _is_unneeded_cache(variable: Mapping[str, Any], variables: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the variable names the cache that Aerie gives each engine, and nothing has to be read from it."""
    return variable["name"] == "HF_HOME" and variable["value"] == naming.HF_HOME_PATH and not _is_offline(variables)


def _is_offline(variables: Sequence[Mapping[str, Any]]) -> bool:
    return any(
        variable["name"] in _OFFLINE_VARIABLES and (variable.get("value") or "valueFrom" in variable) for variable in variables
    )


def _is_inside(path: str, folder: str) -> bool:
    return path.rstrip("/") == folder.rstrip("/") or path.startswith(folder.rstrip("/") + "/")


def _make_read_only(volume: Mapping[str, Any]) -> JsonObject:
    claim = volume.get("persistentVolumeClaim")
    return dict(volume) if claim is None else {**volume, "persistentVolumeClaim": {**claim, "readOnly": True}}
