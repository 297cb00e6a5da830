"""The environment, command and arguments of a container, as a kubelet works them out. Pure.

Order, later wins: service variables, envFrom, env; `$(NAME)` in env, command and args expands to what is known by then,
`$$` is a dollar sign, and an unknown name stays as it is written (kubernetes.io: "Define Dependent Environment Variables").
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any

from aerie_lab.kube.client import KubeObject

_VARIABLE_REFERENCE = re.compile(r"\$(\$|\(([^)]*)\))")
_QUANTITY_SUFFIXES = {
    **{name: Decimal(10) ** power for name, power in zip(("n", "u", "m", "", "k", *"MGTPE"), range(-9, 19, 3), strict=True)},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
}


class ConfigError(Exception):
    """Something that the container refers to is missing: a kubelet's CreateContainerConfigError."""


def expand_variables(text: str, variables: Mapping[str, str]) -> str:
    """`text` with each $(NAME) that is known replaced.

    >>> expand("$(A)-$(B)-$$(A)", {"A": "1"})
    '1-$(B)-$(A)'
    """

    def replace(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return variables.get(match[2], match[0])

    return _VARIABLE_REFERENCE.sub(replace, text)


def parse_quantity(text: str) -> float:
    """Return a Kubernetes quantity as a number: '500m' is 0.5, '2Gi' is 2147483648."""
    return float(_parse_decimal_quantity(text))


def _parse_decimal_quantity(text: str) -> Decimal:
    match = re.fullmatch(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)(m|u|n|[kMGTPE]|[KMGTPE]i)?", str(text))
    if match is None:
        raise ConfigError(f"'{text}' is not a quantity")
    return Decimal(match[1]) * _QUANTITY_SUFFIXES[match[2] or ""]


def resolve_field_reference(pod: KubeObject, field: str, status: Mapping[str, str]) -> str:
    """Return the value of a downward API fieldRef. `status` holds podIP, hostIP, podIPs, hostIPs."""
    metadata, spec = pod["metadata"], pod["spec"]
    if match := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", field):
        value: str = (metadata.get(match[1]) or {}).get(match[2], "")
        return value
    if field in ("metadata.labels", "metadata.annotations"):
        pairs = metadata.get(field.removeprefix("metadata.")) or {}
        return "\n".join(f'{key}="{_quote(value)}"' for key, value in sorted(pairs.items()))
    simple = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", ""),
    } | {f"status.{name}": value for name, value in status.items()}
    if field not in simple:
        raise ConfigError(f"fieldRef '{field}' is not known")
    return str(simple[field])


def _quote(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def resolve_resource_reference(
    pod: KubeObject, container: KubeObject, reference: Mapping[str, Any], node_allocatable: Mapping[str, str]
) -> str:
    """Return the value of a resourceFieldRef; a limit that is not set is the node's, as a kubelet has it."""
    name = reference.get("containerName") or container["name"]
    target = next((c for c in _all_containers(pod) if c["name"] == name), container)
    kind, _, resource = reference["resource"].partition(".")
    resources = target.get("resources") or {}
    text = (resources.get(kind) or {}).get(resource)
    if text is None:
        text = node_allocatable.get(resource, "0") if kind == "limits" else (resources.get("limits") or {}).get(resource, "0")
    divisor = _parse_decimal_quantity(reference.get("divisor") or "1") or Decimal(1)
    return str(math.ceil(_parse_decimal_quantity(text) / divisor))


def _all_containers(pod: KubeObject) -> Iterable[KubeObject]:
    return [*(pod["spec"].get("initContainers") or []), *pod["spec"]["containers"]]


def build_service_variables(services: Iterable[KubeObject], namespace: str, enable_service_links: bool) -> dict[str, str]:
    """Return the service variables of a pod in `namespace`: the API server's, and with `enable_service_links` its neighbours'."""
    variables: dict[str, str] = {}
    for service in services:
        metadata, spec = service["metadata"], service["spec"]
        is_api = metadata["namespace"] == "default" and metadata["name"] == "kubernetes"
        address = spec.get("clusterIP")
        if not address or address == "None" or not (is_api or (enable_service_links and metadata["namespace"] == namespace)):
            continue
        prefix = metadata["name"].upper().replace("-", "_")
        ports = spec.get("ports") or []
        if not ports:
            continue
        variables[f"{prefix}_SERVICE_HOST"] = address
        variables[f"{prefix}_SERVICE_PORT"] = str(ports[0]["port"])
        first = f"{ports[0].get('protocol', 'TCP').lower()}://{address}:{ports[0]['port']}"
        variables[f"{prefix}_PORT"] = first
        for port in ports:
            if port.get("name"):
                variables[f"{prefix}_SERVICE_PORT_{port['name'].upper().replace('-', '_')}"] = str(port["port"])
            protocol = port.get("protocol", "TCP")
            stem = f"{prefix}_PORT_{port['port']}_{protocol}"
            variables[stem] = f"{protocol.lower()}://{address}:{port['port']}"
            variables |= {f"{stem}_PROTO": protocol.lower(), f"{stem}_PORT": str(port["port"]), f"{stem}_ADDR": address}
    return variables


ObjectLookup = Callable[[str, str], KubeObject | None]
"""(plural, name) -> the config map or secret of the pod's namespace, or None."""


def decode_object_data(plural: str, item: KubeObject) -> dict[str, bytes]:
    """Return all keys of a config map or secret with their bytes."""
    binary = item.get("data" if plural == "secrets" else "binaryData") or {}
    text = (item.get("data") or {}) if plural == "configmaps" else {}
    return {k: v.encode() for k, v in text.items()} | {k: base64.b64decode(v) for k, v in binary.items()}


def build_environment(
    pod: KubeObject,
    container: KubeObject,
    *,
    service_variables: Mapping[str, str],
    lookup: ObjectLookup,
    status: Mapping[str, str],
    node: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables that Kubernetes gives a container; `service_variables` are those of services. Raises ConfigError.

    Those of the image are not among them: a kubelet does not know them, so $(NAME) does not expand to them either.
    """
    variables = dict(service_variables)
    for source in container.get("envFrom") or []:
        for field, plural in (("configMapRef", "configmaps"), ("secretRef", "secrets")):
            if reference := source.get(field):
                item = _find_referenced_object(lookup, plural, reference)
                for key, raw in (decode_object_data(plural, item) if item else {}).items():
                    variables[(source.get("prefix") or "") + key] = raw.decode(errors="replace")
    for entry in container.get("env") or []:
        value = _resolve_env_value(entry, pod, container, variables, lookup, status, node)
        if value is not None:
            variables[entry["name"]] = value
    return variables


def _resolve_env_value(
    entry: KubeObject,
    pod: KubeObject,
    container: KubeObject,
    variables: Mapping[str, str],
    lookup: ObjectLookup,
    status: Mapping[str, str],
    node_allocatable: Mapping[str, str],
) -> str | None:
    source = entry.get("valueFrom")
    if not source:
        return expand_variables(entry.get("value", ""), variables)
    if reference := source.get("fieldRef"):
        return resolve_field_reference(pod, reference["fieldPath"], status)
    if reference := source.get("resourceFieldRef"):
        return resolve_resource_reference(pod, container, reference, node_allocatable)
    for field, plural in (("configMapKeyRef", "configmaps"), ("secretKeyRef", "secrets")):
        if reference := source.get(field):
            item = _find_referenced_object(lookup, plural, reference)
            values = decode_object_data(plural, item) if item else {}
            if reference["key"] in values:
                return values[reference["key"]].decode(errors="replace")
            if reference.get("optional"):
                return None
            raise ConfigError(f"couldn't find key {reference['key']} in {plural.removesuffix('s')} {reference['name']}")
    raise ConfigError(f"env {entry['name']}: valueFrom {', '.join(source)} is not offered by the lab")


def _find_referenced_object(lookup: ObjectLookup, plural: str, reference: Mapping[str, Any]) -> KubeObject | None:
    item = lookup(plural, reference["name"])
    if item is None and not reference.get("optional"):
        raise ConfigError(f'{plural.removesuffix("s")} "{reference["name"]}" not found')
    return item


def build_command_line(
    container: KubeObject, image_entrypoint: list[str], image_arguments: list[str], variables: Mapping[str, str]
) -> list[str]:
    """Return the command line: `command` replaces entrypoint and arguments of the image, `args` its arguments."""
    command = [expand_variables(part, variables) for part in container.get("command") or []]
    arguments = [expand_variables(part, variables) for part in container.get("args") or []]
    if command:
        return command + arguments
    return image_entrypoint + (arguments or image_arguments)
