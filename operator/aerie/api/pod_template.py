"""Fields that a user may merge into the engine's pods, and those that are rejected at apply.

A pod's spec is not repeated here: any field is preserved as it is written and merged (aerie.manifests.pod.strategic_merge).
Declared are only the fields without which Aerie would not find its engine, or would run an engine other than the one that
preflight checks. So the API server can run rules on them. manifests/pod/pod_template_policy.py rejects what is visible only in
the merged pod. A rejection of the rest by Kubernetes is shown in a condition.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from aerie.api.types.base import JsonObject, ResourceModel, ValidationRule, schema_extra

_IS_ENGINE_CONTAINER_CEL = "has(self.name) && self.name == 'engine'"

_PORT_SCHEMA: JsonObject = {
    "type": "object",
    "description": "A port, as in any container.",
    "properties": {
        "name": {"type": "string", "maxLength": 63, "description": "Name of the port; the engine's port is named http."},
        "containerPort": {
            "type": "integer",
            "minimum": 1,
            "maximum": 65535,
            "description": "Number of the port; the engine's port is 8000.",
        },
    },
    "x-kubernetes-preserve-unknown-fields": True,
}

_CONTAINER_SCHEMA: JsonObject = {
    "type": "object",
    "properties": {
        "name": {
            "type": "string",
            "maxLength": 63,
            "description": "Name of the container: engine, or that of a further one.",
        },
        "image": {"type": "string", "maxLength": 512, "description": "Image; only for further containers."},
        "args": {
            "type": "array",
            "maxItems": 256,
            "items": {"type": "string", "maxLength": 4096},
            "description": "Arguments; only for further containers.",
        },
        "ports": {"type": "array", "maxItems": 32, "items": _PORT_SCHEMA, "description": "Further ports."},
    },
    "x-kubernetes-preserve-unknown-fields": True,
    **schema_extra(
        ValidationRule(
            f"!({_IS_ENGINE_CONTAINER_CEL} && has(self.args))",
            "args would replace the arguments that give the engine its model and drafter: write further arguments in "
            "spec.engine.args",
            field_path=".args",
        ),
        ValidationRule(
            f"!({_IS_ENGINE_CONTAINER_CEL} && has(self.image))",
            "the engine's image belongs in spec.engine.image, because it determines the version of vLLM",
            field_path=".image",
        ),
        ValidationRule(
            f"!({_IS_ENGINE_CONTAINER_CEL} && has(self.ports)) || "
            "self.ports.all(port, !has(port.name) || !has(port.containerPort) || "
            "(port.name == 'http') == (port.containerPort == 8000))",
            "the engine listens on port 8000, and Services, probes and metrics find it by the name http: use other names and "
            "numbers for other ports",
            field_path=".ports",
        ),
    ),
}

_POD_SPEC_SCHEMA: JsonObject = {
    "properties": {
        "containers": {
            "type": "array",
            "maxItems": 32,
            "items": {
                "description": "The engine's container, if its name is engine, or a further one. Any field of a container may be "
                "written. command of the engine's container replaces its image's entry point, and gets the engine's arguments.",
                **_CONTAINER_SCHEMA,
            },
            "description": "Changes to the engine's container, and further containers.",
        },
        "restartPolicy": {
            "type": "string",
            "maxLength": 32,
            "description": "Always.",
            **schema_extra(
                ValidationRule("self == 'Always'", "engines are always restarted: leave restartPolicy out, or write Always")
            ),
        },
    },
    "x-kubernetes-preserve-unknown-fields": True,
}


class PodTemplateMetadata(ResourceModel):
    """Labels and annotations for the engine's pods."""

    labels: Annotated[
        dict[str, Annotated[str, Field(max_length=63)]],
        Field(
            max_length=64,
            json_schema_extra=schema_extra(
                ValidationRule(
                    "self.all(key, !key.startsWith('aerie.dev/'))",
                    "labels that begin with aerie.dev/ are reserved, because Aerie finds its pods by them: leave them out",
                )
            ),
        ),
    ] = Field(default_factory=dict)
    """Labels to add. Those that begin with aerie.dev/ are Aerie's own."""
    annotations: Annotated[dict[str, Annotated[str, Field(max_length=16384)]], Field(max_length=64)] = Field(default_factory=dict)
    """Annotations to add."""


class PodTemplate(ResourceModel):
    """Fields that are merged into the pods: scheduling, volumes, further containers, and any other field of a pod's spec."""

    metadata: PodTemplateMetadata | None = None
    """Labels and annotations to add."""
    spec: Annotated[dict[str, Any], Field(json_schema_extra=_POD_SPEC_SCHEMA)] = Field(default_factory=dict)
    """Any fields of a pod's spec: nodeSelector, tolerations, affinity, volumes, serviceAccountName, further containers... They
    are merged as `kubectl patch` merges: an entry of a named list changes the entry of the same name. The engine's container has
    the name engine. The conditions show the API server's answer if it rejects the pod."""
