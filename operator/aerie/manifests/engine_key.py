"""Where a pod's engine has its API key from, so that the evaluator reads the key from the same object.

    --api-key=$(NAME) ─┐
                       ├─► variable of the container ─► key of a Secret or ConfigMap ─► a file in the evaluator's pod
    VLLM_API_KEY ──────┘

vLLM takes the values of `--api-key`, and without that flag VLLM_API_KEY. Kubernetes replaces `$(NAME)` in arguments, and in the
values of later variables.

Guarantees: only the reference is read, and only the reference is written. A key whose value is in the pod itself is a problem
that is explained, because a copy of it would be readable in another object. Not guaranteed: a key from `envFrom` is not seen,
since its names are in the Secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aerie.engine.arguments import ArgumentError, parse_flags
from aerie.manifests import naming

FILE_NAME = "key"
"""Name of the file in the volume."""
_VARIABLE, _FLAG = "VLLM_API_KEY", "--api-key"
_REFERENCE = re.compile(r"\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")
_FIX = "Set VLLM_API_KEY with valueFrom.secretKeyRef in spec.engine.env, and remove --api-key."


@dataclass(frozen=True)
class EngineKey:
    """An engine's API key: neither field is set for an engine without one."""

    volume_source: Mapping[str, Any] | None = None
    """Source of a volume with the key in FILE_NAME."""
    problem: str = ""
    """Why there is no reference to the key, and what to do, as sentences."""


def find_engine_key(pod: Mapping[str, Any]) -> EngineKey:
    """Return where the engine of a pod, or of a pod template, has its API key from."""
    engine: Mapping[str, Any] = next(
        (container for container in pod["spec"]["containers"] if container["name"] == naming.ENGINE_CONTAINER), {}
    )
    variables = {variable["name"]: variable for variable in engine.get("env") or []}  # the last of several wins
    values = _read_flag_values([*(engine.get("command") or []), *(engine.get("args") or [])])
    if values:
        return _resolve(values[0], f"The argument {_FLAG}", variables)
    return _find_in_variable(variables[_VARIABLE], variables) if _VARIABLE in variables else EngineKey()


def _read_flag_values(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the values of the last flag with keys."""
    try:
        flags = parse_flags(arguments)
    except ArgumentError:  # nor can the engine read them
        return ()
    return next((flag.values for flag in reversed(flags) if flag.name == _FLAG), ())


def _find_in_variable(variable: Mapping[str, Any], variables: Mapping[str, Mapping[str, Any]]) -> EngineKey:
    name, source = variable["name"], variable.get("valueFrom") or {}
    if (reference := source.get("secretKeyRef")) is not None:
        return EngineKey({"secret": {"secretName": reference["name"], "items": [_build_item(reference)]}})
    if (reference := source.get("configMapKeyRef")) is not None:
        return EngineKey({"configMap": {"name": reference["name"], "items": [_build_item(reference)]}})
    if source:
        return EngineKey(problem=f"The engine's API key is in {name}, from no Secret or ConfigMap. {_FIX}")
    earlier = {key: value for key, value in variables.items() if key != name}
    return _resolve(variable.get("value") or "", f"The variable {name}", earlier)


def _build_item(reference: Mapping[str, Any]) -> dict[str, str]:
    return {"key": reference["key"], "path": FILE_NAME}


def _resolve(value: str, holder: str, variables: Mapping[str, Mapping[str, Any]]) -> EngineKey:
    """Return where a value that refers to one of these variables comes from. `holder`: what has it, for the message."""
    if not value:
        return EngineKey()
    match = _REFERENCE.fullmatch(value)
    if match is None:
        return EngineKey(problem=f"{holder} of the engine has an API key as plain text, which Aerie copies nowhere. {_FIX}")
    if match[1] not in variables:
        return EngineKey(problem=f"{holder} of the engine has the API key of {match[1]}, which is no variable in env. {_FIX}")
    return _find_in_variable(variables[match[1]], variables)
