"""The engine's container: image and version, arguments, environment, resources, and what is merged into its pod.

Flags of vLLM that Aerie sets itself, or that would remove what it relies on, are rejected one by one, each with the field to
use instead (`RESERVED_FLAG_FIXES`). vLLM's parser (vllm/utils/argparse_utils.py) reads `_` as `-`. It takes `--flag value`,
`--flag=value` and, for flags that hold JSON, `--flag.key value`; like any argparse parser, it takes the unambiguous beginning
of a name. The rules match all of these (`--model` and `--config` are themselves the beginnings of other names). `--tokenizer`
and `--tokenizer-revision` stay with the user: Aerie has no field for another tokenizer.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from aerie.api.pod_template import PodTemplate
from aerie.api.types.base import ObjectName, Quantity, ResourceModel, ValidationRule, schema_extra

_VERSION_PATTERN = r"[0-9]+[.][0-9]+[.][0-9]+"
_OFFICIAL_IMAGE_PATTERN = f"([^@]*/)?vllm-openai(-cpu|-rocm|-xpu)?:v?{_VERSION_PATTERN}[^/@]*"
_VLLM_TAG_PATTERN = f"[^@]*:([^/@]*[-_.])?vllm[-_]?v?{_VERSION_PATTERN}([-_][^/@]*)?"
VERSIONED_IMAGE_PATTERN = f"^({_OFFICIAL_IMAGE_PATTERN}|{_VLLM_TAG_PATTERN})(@.*)?$"
"""Image reference whose tag is a version of vLLM; for Python's `re` and for RE2 alike. `aerie.engine.releases` extracts the
version, and knows the few tags that only look like one."""
LMCACHE_IMAGE_PATTERN = "(^|/)lmcache/vllm-openai:v?[0-9]"
"""LMCache's image has the name of vLLM's image, and is tagged with LMCache's versions."""

_SERVICE_HINT = "and clients use the Service with the name of the resource"
RESERVED_FLAG_FIXES = {
    "--model": "the model belongs in spec.model.source",
    "--revision": "the commit belongs in spec.model.source.huggingFace.revision",
    "--served-model-name": "the name belongs in spec.model.servedName",
    "--speculative-config": "the drafter belongs in spec.drafter, K in spec.speculation.numSpeculativeTokens",
    "--host": f"engines listen on the address of their pod, {_SERVICE_HINT}",
    "--port": f"engines listen on a port that Aerie sets, {_SERVICE_HINT}",
    "--uds": f"engines listen on the address of their pod, {_SERVICE_HINT}",
    "--shutdown-timeout": "it follows spec.engine.podTemplate.spec.terminationGracePeriodSeconds",
    "--hf-token": "a token does not belong on a command line, its Secret belongs in spec.engine.tokenSecretRef",
    "--config": "Aerie does not see when a file in the pod changes, its flags belong in spec.engine.args one by one",
    "--disable-log-stats": "without the engine's metrics no canary can be analyzed",
    "--ssl-*": "probes and metrics use plain HTTP, TLS belongs at the gateway",
}
"""What users do instead, by the flag that Aerie reserves; `aerie.engine.command_line` uses the same sentences."""

_FLAG_NAME_REST = "[^=.]*"  # the rest of a name, for flags whose beginning is reserved as a whole
_RESERVED_FLAG_PATTERNS = {
    "--model": "--model",
    "--revision": f"--rev{_FLAG_NAME_REST}",
    "--served-model-name": f"--served{_FLAG_NAME_REST}",
    "--speculative-config": f"(--spec(u{_FLAG_NAME_REST}|[-_]{_FLAG_NAME_REST})?|-sc)",
    "--host": f"--hos{_FLAG_NAME_REST}",
    "--port": f"--por{_FLAG_NAME_REST}",
    "--uds": f"--ud{_FLAG_NAME_REST}",
    "--shutdown-timeout": f"--shut{_FLAG_NAME_REST}",
    "--hf-token": f"--hf[-_]t{_FLAG_NAME_REST}",
    "--config": "--config",
    "--disable-log-stats": f"--disable[-_]log[-_]s{_FLAG_NAME_REST}",
    "--ssl-*": f"--ssl{_FLAG_NAME_REST}",
}
"""Regular expression of all names by which vLLM accepts the flag."""


def _reserved_flag_rule(flag: str, fix: str) -> ValidationRule:
    # The character after the name ends it: `--model` must not match `--model-impl`.
    return ValidationRule(
        f"!self.matches('^{_RESERVED_FLAG_PATTERNS[flag]}([=.]|$)')", f"{flag} is reserved for Aerie: remove it; {fix}"
    )


EngineArgument = Annotated[
    str,
    Field(
        min_length=1,
        max_length=4096,
        json_schema_extra=schema_extra(*(_reserved_flag_rule(flag, fix) for flag, fix in RESERVED_FLAG_FIXES.items())),
    ),
]

ConfigDataKey = Annotated[str, Field(min_length=1, max_length=253)]


class KeySelector(ResourceModel):
    """One key of a Secret or ConfigMap in the namespace of the resource."""

    name: ObjectName
    """Name of the object."""
    key: ConfigDataKey
    """Key in its data."""
    optional: bool | None = None
    """Whether pods start when the key does not exist."""


class FieldSelector(ResourceModel):
    """A field of the pod."""

    field_path: Annotated[str, Field(min_length=1, max_length=253)]
    """Path of the field, such as status.podIP."""


class EnvVarSource(ResourceModel):
    """Source of the value of an environment variable: exactly one of three."""

    model_config = ConfigDict(
        json_schema_extra=schema_extra(
            ValidationRule(
                "[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)].filter(given, given).size() == 1",
                "write exactly one of secretKeyRef, configMapKeyRef and fieldRef",
            )
        )
    )

    secret_key_ref: KeySelector | None = None
    """A key of a Secret."""
    config_map_key_ref: KeySelector | None = None
    """A key of a ConfigMap."""
    field_ref: FieldSelector | None = None
    """A field of the pod."""


class EnvVar(ResourceModel):
    """An environment variable of the engine's container."""

    model_config = ConfigDict(
        json_schema_extra=schema_extra(
            ValidationRule("!(has(self.value) && has(self.valueFrom))", "write either value or valueFrom, not both"),
        )
    )

    name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")]
    """Name of the variable."""
    value: Annotated[str, Field(max_length=4096)] | None = None
    """Value of the variable. Default: empty."""
    value_from: EnvVarSource | None = None
    """Source of the value, instead of value."""


class ContainerResourceClaim(ResourceModel):
    """A claim of dynamic resource allocation that the container uses."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    """Name of an entry of resourceClaims in the pod."""
    request: Annotated[str, Field(max_length=253)] | None = None
    """Name of one request in the claim. Default: all of it."""


class ResourceRequirements(ResourceModel):
    """Compute resources of the engine's container, as in any container. Write at least the GPUs, as limits."""

    limits: Annotated[dict[str, Quantity], Field(max_length=32)] | None = None
    """Maximum amounts, by resource name. GPUs belong here, as nvidia.com/gpu."""
    requests: Annotated[dict[str, Quantity], Field(max_length=32)] | None = None
    """Requested amounts, by resource name. Default: the limits."""
    claims: Annotated[
        list[ContainerResourceClaim],
        Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}),
    ] = Field(default_factory=list)
    """Claims of dynamic resource allocation, for devices that are not counted."""


class TokenSecret(ResourceModel):
    """Secret with the Hugging Face token, which pods need to download a target or drafter that is not public."""

    name: ObjectName
    """Name of the Secret, in the namespace of the resource."""
    key: ConfigDataKey = "token"
    """Key in its data that holds the token."""


class CacheVolume(ResourceModel):
    """Volume for the engine's downloads and compiled code. Default: a volume of the pod, empty in every new pod."""

    claim_name: ObjectName | None = None
    """Name of a PersistentVolumeClaim that outlives the pod. Pods on several nodes need a claim that many nodes may mount for
    writing. Default: a volume of the pod, empty in every new pod."""
    size_limit: Quantity | None = None
    """Maximum size of the pod's own volume, when no claim is named. Default: no limit."""


class EngineSpec(ResourceModel):
    """The vLLM container that serves the model."""

    model_config = ConfigDict(
        json_schema_extra=schema_extra(
            ValidationRule(
                f"has(self.version) || (self.image.matches('{VERSIONED_IMAGE_PATTERN}') "
                f"&& !self.image.matches('{LMCACHE_IMAGE_PATTERN}'))",
                "engine.version is missing, and the tag of engine.image names no version of vLLM that Aerie recognizes (tags "
                "of vllm-openai do, also in a mirror): write the version of vLLM in the image, "
                "such as 0.33.0, because flags and metrics differ between versions",
                field_path=".version",
                is_missing_field=True,
            ),
            ValidationRule(
                "!has(self.tokenSecretRef) || !has(self.env) || !self.env.exists(variable, variable.name == 'HF_TOKEN')",
                "tokenSecretRef sets the variable HF_TOKEN, which env sets too: leave one of them out",
                field_path=".env",
            ),
        )
    )

    image: Annotated[
        str,
        Field(
            min_length=1,
            max_length=512,
            json_schema_extra=schema_extra(
                ValidationRule(
                    "self.matches('^[^\\\\s@]+(@sha256:[0-9a-f]{64})?$')",
                    "write an image reference, as registry/name:tag or registry/name:tag@sha256:<64 hexadecimal characters>",
                )
            ),
        ),
    ]
    """Image with vLLM's OpenAI server, such as vllm/vllm-openai:v0.33.0."""

    version: (
        Annotated[
            str,
            Field(
                max_length=64,
                json_schema_extra=schema_extra(
                    ValidationRule(
                        f"self.matches('^{_VERSION_PATTERN}[0-9A-Za-z.+-]*$')",
                        "write the version of vLLM with three numbers and no v, such as 0.33.0",
                    )
                ),
            ),
        ]
        | None
    ) = None
    """Version of vLLM in the image. Default: the version in the tag of a vllm-openai image, or after vllm_ in any other tag, such
    as vllm_0.33.0. Other images require it."""

    args: Annotated[
        list[EngineArgument],
        Field(
            max_length=64,
            json_schema_extra=schema_extra(
                ValidationRule(
                    "self.size() == 0 || self[0].startsWith('-')",
                    "the first argument is a value without a flag: write a flag first; the model belongs in spec.model.source",
                ),
                **{"x-kubernetes-list-type": "atomic"},
            ),
        ),
    ] = Field(default_factory=list)
    """Further arguments of `vllm serve`, such as --max-model-len=8192. Flags that Aerie sets itself are rejected, each with the
    field to use instead."""

    env: Annotated[
        list[EnvVar],
        Field(max_length=64, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}),
    ] = Field(default_factory=list)
    """Environment variables of the engine's container."""

    resources: ResourceRequirements | None = None
    token_secret_ref: TokenSecret | None = None
    cache: CacheVolume | None = None
    pod_template: PodTemplate | None = None
