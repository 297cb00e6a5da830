"""The resource itself, `SpeculativeDeployment` of aerie.dev/v1alpha1.

Every field of the spec may change, except the name by which clients request the model. A change makes a new revision that is
rolled out. The name is fixed because two revisions serve side by side during a rollout, and each would reject requests with the
other's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from aerie.api.capture import CaptureSpec
from aerie.api.engine import EngineSpec
from aerie.api.metrics import MetricsSpec
from aerie.api.rollout import RolloutSpec
from aerie.api.source import DrafterSpec, TargetSpec
from aerie.api.speculation import SpeculationSpec
from aerie.api.status import Status
from aerie.api.types.base import ResourceModel, Timestamp, ValidationRule, cel_any_malformed_duration, schema_extra

GROUP = "aerie.dev"
VERSION = "v1alpha1"
KIND = "SpeculativeDeployment"
PLURAL = "speculativedeployments"
API_VERSION = f"{GROUP}/{VERSION}"


class Spec(ResourceModel):
    """Desired state: a model, the engine that serves it, a drafter, and the rollout of changes."""

    model_config = ConfigDict(
        json_schema_extra=schema_extra(
            ValidationRule(
                f"{cel_any_malformed_duration('self.metrics.scrapeInterval', 'self.rollout.analysis.blockDuration')} || "
                "duration(self.metrics.scrapeInterval) + duration(self.metrics.scrapeInterval) "
                "<= duration(self.rollout.analysis.blockDuration)",
                "metrics.scrapeInterval is more than half of rollout.analysis.blockDuration, and a block needs two scrapes at "
                "least: shorten metrics.scrapeInterval or lengthen rollout.analysis.blockDuration",
                field_path=".metrics.scrapeInterval",
            ),
        )
    )

    replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    """Pods that serve the model. Canary and control pods are additional, or are among them if rollout.canary.capacity is
    Reuse."""
    model: TargetSpec
    engine: EngineSpec
    drafter: DrafterSpec | None = None
    """The small model that proposes draft tokens. Default: the first drafter for the target in Aerie's catalog that may be
    selected automatically, EAGLE 3.1 before EAGLE 3. status.selectedDrafters names it, and the selection is kept."""
    speculation: SpeculationSpec = SpeculationSpec()
    rollout: RolloutSpec = RolloutSpec()
    metrics: MetricsSpec = MetricsSpec()
    capture: CaptureSpec | None = None
    """Recording of users' prompts for the training of drafters. Default: nothing is recorded."""


class ObjectMeta(ResourceModel):
    """Metadata of an object, as far as Aerie reads it. All other fields are ignored."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the resource; the names of its children begin with it."""
    namespace: str | None = None
    uid: str | None = None
    generation: int | None = None
    resource_version: str | None = None
    creation_timestamp: Timestamp | None = None
    deletion_timestamp: Timestamp | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown_fields(cls, document: object) -> object:
        if not isinstance(document, Mapping):
            return document
        aliases = {field.alias for field in cls.model_fields.values()}
        return {key: value for key, value in document.items() if key in aliases and value is not None}


MAX_NAME_CHARACTERS = 40
"""Characters of the longest name. A Job's name is a label of its pods, at most 63 characters, and Aerie's Jobs add a revision
to it."""

_SERVED_NAME_CEL = "(has({0}.spec.model.servedName) ? {0}.spec.model.servedName : {0}.metadata.name)"


class SpeculativeDeployment(ResourceModel):
    """A model served by vLLM with a drafter. A canary with live traffic tests each change before its promotion."""

    model_config = ConfigDict(
        json_schema_extra=schema_extra(
            ValidationRule(
                "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                "metadata.name becomes part of the names of Services and Jobs: write a-z, 0-9 and - only, a letter first and no "
                "- last",
            ),
            ValidationRule(
                f"{_SERVED_NAME_CEL.format('self')} == {_SERVED_NAME_CEL.format('oldSelf')}",
                "spec.model.servedName cannot change, because old and new pods serve side by side during a rollout, and each "
                "would reject requests for the other's name: write the old name, or create another SpeculativeDeployment",
                field_path=".spec.model.servedName",
            ),
        )
    )

    api_version: Literal["aerie.dev/v1alpha1"] = "aerie.dev/v1alpha1"
    kind: Literal["SpeculativeDeployment"] = "SpeculativeDeployment"
    metadata: ObjectMeta
    spec: Spec
    status: Status | None = None

    @property
    def served_name(self) -> str:
        """Name by which clients request the model."""
        return self.spec.model.served_name or self.metadata.name
