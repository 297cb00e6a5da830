"""Source of a model's files, and the two models of a resource: the target and its drafter.

A source that can change under its name is rejected where the schema can detect it. A pod reads its files when it starts. Pods
of one revision would otherwise serve different weights, and a canary would be compared with something other than what it
replaces. The schema cannot see the content of a volume claim: there the path has to name a version.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from aerie.api.types.base import ExactlyOneRule, ObjectName, ResourceModel, ValidationRule, schema_extra


class HuggingFaceSource(ResourceModel):
    """A repository of the Hugging Face Hub at one commit."""

    repo: Annotated[str, Field(min_length=1, max_length=192, pattern=r"^[\w.-]+(/[\w.-]+)?$")]
    """Repository, as owner/name."""

    revision: Annotated[
        str,
        Field(
            max_length=64,
            json_schema_extra=schema_extra(
                ValidationRule(
                    "self.matches('^[0-9a-f]{40}$')",
                    "write the full commit of the repository (40 characters of 0-9 and a-f; its page on the Hub lists them "
                    "under Files, History): a branch, a tag or a short commit can move to other files, and pods of one "
                    "revision would then serve different weights",
                )
            ),
        ),
    ]
    """Commit of the repository, in full: 40 hexadecimal characters. A branch or a tag is rejected, because it can move."""


class VolumeClaimSource(ResourceModel):
    """A folder of a persistent volume claim."""

    claim_name: ObjectName
    """Name of the PersistentVolumeClaim, in the namespace of the resource. It is mounted read-only into every pod, so
    more than one pod needs a claim that several nodes may mount."""

    path: Annotated[
        str,
        Field(
            max_length=512,
            json_schema_extra=schema_extra(
                ValidationRule(
                    "!self.startsWith('/') && !self.split('/').exists(part, part == '..')",
                    "write the folder relative to the root of the claim, without .., such as models/llama-3.1-8b",
                )
            ),
        ),
    ] = ""
    """Folder with the model's files, relative to the root of the claim; empty for the root itself. A changed model needs a new
    folder, because Aerie cannot detect changed files below the same path."""


class ImageSource(ResourceModel):
    """A folder of an OCI image, mounted as an image volume."""

    reference: Annotated[
        str,
        Field(
            min_length=1,
            max_length=512,
            json_schema_extra=schema_extra(
                ValidationRule(
                    "self.matches('^[^@ ]+@sha256:[0-9a-f]{64}$')",
                    "write the image with its digest, as registry/name@sha256:<64 hexadecimal characters>: a tag can move to "
                    "other files, and pods of one revision would then serve different weights",
                )
            ),
        ),
    ]
    """Image by digest, such as registry.example/llama@sha256:... A tag alone is rejected, because it can move."""

    path: Annotated[
        str,
        Field(
            max_length=512,
            json_schema_extra=schema_extra(
                ValidationRule(
                    "self.startsWith('/') && !self.split('/').exists(part, part == '..')",
                    "write the folder as an absolute path inside the image, without .., such as / or /models/llama-3.1-8b",
                )
            ),
        ),
    ] = "/"
    """Folder with the model's files inside the image."""


_ONE_SOURCE = ExactlyOneRule(("huggingFace", "persistentVolumeClaim", "image"))


class ModelSource(ResourceModel):
    """Source of a model's files: exactly one of three."""

    model_config = ConfigDict(json_schema_extra=schema_extra(_ONE_SOURCE.to_validation_rule()))

    hugging_face: HuggingFaceSource | None = None
    """A repository of the Hugging Face Hub. Every pod downloads it unless engine.cache keeps the files."""

    persistent_volume_claim: VolumeClaimSource | None = None
    """A folder of a persistent volume claim in the same namespace."""

    image: ImageSource | None = None
    """A folder of an OCI image. It requires a cluster with image volumes (Kubernetes 1.35, or 1.31 with the feature gate)."""

    @model_validator(mode="after")
    def _check_exactly_one(self) -> Self:
        _ONE_SOURCE.check(self)
        return self

    @property
    def variant(self) -> HuggingFaceSource | VolumeClaimSource | ImageSource:
        """The one source that is set."""
        variant = self.hugging_face or self.persistent_volume_claim or self.image
        assert variant is not None  # by the validator above
        return variant


class TargetSpec(ResourceModel):
    """The target: the model that is served."""

    served_name: (
        Annotated[
            str,
            Field(
                min_length=1,
                max_length=253,
                json_schema_extra=schema_extra(
                    ValidationRule(
                        "self.matches('^[A-Za-z0-9][A-Za-z0-9._:/-]*$')",
                        "write letters, digits and . _ : / - only, a letter or digit first: clients send it as `model`",
                    )
                ),
            ),
        ]
        | None
    ) = None
    """Name by which clients request the model. Default: the name of the resource."""

    source: ModelSource
    """Source of the target's files: exactly one of three."""


class DrafterSpec(ResourceModel):
    """The small model that proposes draft tokens for the target."""

    method: Literal["eagle3"] = "eagle3"
    """Speculation method of the engine. EAGLE 3 and EAGLE 3.1 are both `eagle3`: the drafter's own config distinguishes them."""

    source: ModelSource
    """Source of the drafter's files: exactly one of three."""
