"""Fields of the engine's pod that podTemplate must keep, checked on the merged pod, however the merge removed them.

Guarantee: a pod that passes is the engine that the resource describes (image, arguments, model files). Services, probes and the
scraper find it at its port and container name. Not guaranteed: that the API server accepts it; a rejection is shown in a
condition. A command of the user's runs before the engine's arguments, and its effect on them is not visible here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from aerie.manifests import naming

_POD_SPEC_FIELD = "spec.engine.podTemplate.spec"
_ENGINE_CONTAINER_FIELD = f"{_POD_SPEC_FIELD}.containers[{naming.ENGINE_CONTAINER}]"
_MODEL_VOLUMES = frozenset({"target", "drafter"})


class PodTemplateError(ValueError):
    """podTemplate removes something that the engine needs; the message names the field and what to write instead."""


def check_merged_pod_spec(base_spec: Mapping[str, Any], merged_spec: Mapping[str, Any]) -> None:
    """Check the spec of the merged pod against Aerie's own. Raises PodTemplateError with all problems."""
    if problems := list(_find_problems(base_spec, merged_spec)):
        raise PodTemplateError(" ".join(problems))


def _find_problems(base_spec: Mapping[str, Any], merged_spec: Mapping[str, Any]) -> Iterator[str]:
    if merged_spec.get("restartPolicy", "Always") != "Always":
        policy = merged_spec["restartPolicy"]
        yield f"{_POD_SPEC_FIELD}.restartPolicy is {policy}, but engines are always restarted: leave it out."
    before, after = _find_engine_container(base_spec), _find_engine_container(merged_spec)
    if after is None or before is None:
        yield (
            f"{_POD_SPEC_FIELD}.containers removes the container {naming.ENGINE_CONTAINER}, which runs the engine: "
            "change it instead."
        )
        return
    if after.get("args") != before["args"]:
        yield (
            f"{_ENGINE_CONTAINER_FIELD}.args would replace the arguments that give the engine its model and drafter: "
            "write spec.engine.args."
        )
    if after.get("image") != before["image"]:
        yield f"{_ENGINE_CONTAINER_FIELD}.image hides the version of vLLM: write spec.engine.image."
    engine_ports = [port for port in after.get("ports") or [] if port.get("name") == naming.ENGINE_PORT_NAME]
    if engine_ports != before["ports"]:
        yield (
            f"{_ENGINE_CONTAINER_FIELD}.ports changes the port {naming.ENGINE_PORT} named {naming.ENGINE_PORT_NAME}, "
            "by which Services, probes and metrics find the engine: use other names and numbers for other ports."
        )
    for probe, consequence in (
        ("readinessProbe", "engines would get requests while they load"),
        ("startupProbe", "engines would be killed while they load"),
    ):
        if probe not in after:
            yield (
                f"{_ENGINE_CONTAINER_FIELD}.{probe} cannot be removed, because {consequence}: change its periodSeconds or "
                "failureThreshold."
            )
    if _model_mounts_and_volumes(base_spec, before) != _model_mounts_and_volumes(merged_spec, after):
        yield (
            f"{_POD_SPEC_FIELD} changes the volumes or mounts of the model's files, which preflight does not check: write "
            "spec.model.source or spec.drafter.source, and use other names and folders for other volumes."
        )


def _find_engine_container(spec: Mapping[str, Any]) -> Mapping[str, Any] | None:
    containers = spec.get("containers") or []
    return next(
        (
            container
            for container in containers
            if isinstance(container, Mapping) and container.get("name") == naming.ENGINE_CONTAINER
        ),
        None,
    )


def _model_mounts_and_volumes(spec: Mapping[str, Any], engine: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the engine's mounts of the model volumes, and those volumes that are mounted."""
    mounts = [entry for entry in engine.get("volumeMounts") or [] if entry.get("name") in _MODEL_VOLUMES]
    mounted_names = {entry["name"] for entry in mounts}
    return mounts, [entry for entry in spec.get("volumes") or [] if entry.get("name") in mounted_names]
