"""The status as a whole: its conditions, and the parts of the other modules."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from aerie.api.status.analysis import AnalysisStatus, RolloutOutcome
from aerie.api.status.arms import Arm, CanaryArm, Phase, PreviousArm, QueueStatus
from aerie.api.status.tuning import SpeculationStatus
from aerie.api.status.types import Count, LongText, ShortText
from aerie.api.types.base import JsonObject, ResourceModel, Timestamp


class Condition(ResourceModel):
    """One aspect of the state, as Kubernetes defines conditions."""

    type: Annotated[str, Field(min_length=1, max_length=316)]
    """Ready, Progressing, PreflightPassed, Degraded or Tuned."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?$")]
    """Why, as one word for programs."""
    message: Annotated[str, Field(max_length=8192)]
    """Why, as a sentence for people, with what to do where something is wrong."""
    last_transition_time: Timestamp
    """When status last changed."""
    observed_generation: Count | None = None
    """Generation of the resource that it speaks of."""


MAX_SELECTED_DRAFTERS = 8
"""Targets whose drafters a status keeps."""


class SelectedDrafter(ResourceModel):
    """A drafter that Aerie took from its catalog because spec.drafter is missing."""

    target: LongText
    """Repository of the target that it is for."""
    repo: LongText
    """Repository of the drafter."""
    revision: ShortText
    """Commit of the repository."""
    kind: ShortText
    """What the catalog says that it is: EAGLE 3.1 or EAGLE 3."""
    in_use: bool = False
    """Whether pods were made with it. From then on it is the drafter of this target, whatever the catalog says later; to take
    another one, write spec.drafter."""


class Status(ResourceModel):
    """What Aerie last saw and did; written by Aerie alone."""

    observed_generation: Count | None = None
    """Generation of the resource that the status speaks of."""
    phase: Phase | None = None
    """What is going on, in a word. Preflight to Promoting, and RollingBack, are a rollout, which waits for its turn while
    Queued; AwaitingApproval and Held wait for a person, by the annotation aerie.dev/promote or aerie.dev/rollback; Watching and
    Rechecking: it is promoted, and pods of the revision before stay for a while; RolledBack: the stable revision serves, and
    what the spec asks for was rejected; Ready, Paused and Failed are what the conditions explain. docs/rollouts.md has each."""
    conditions: Annotated[
        list[Condition],
        Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    ] = Field(default_factory=list)
    """Ready, Progressing, PreflightPassed, Degraded, and Tuned once tuning has something to say."""
    replicas: Count | None = None
    """Serving pods that there should be and are made, of all arms."""
    ready_replicas: Count | None = None
    """Pods that serve, of all arms."""
    selector: Annotated[str, Field(max_length=1024)] | None = None
    """Label selector of the pods, for autoscalers."""
    stable: Arm | None = None
    """The accepted revision."""
    canary: CanaryArm | None = None
    """The revision under judgement, while there is one; and the first one, until it serves."""
    previous: PreviousArm | None = None
    """The revision before the stable one, while pods of it stay for an instant return."""
    queue: QueueStatus | None = None
    """What waits for its turn, while something does."""
    analysis: AnalysisStatus | None = None
    """What decides about the canary; after its end, what has decided, until the next rollout."""
    speculation: SpeculationStatus | None = None
    """The speculation setting, and what tuning makes of it."""
    selected_drafters: Annotated[
        list[SelectedDrafter],
        Field(
            max_length=MAX_SELECTED_DRAFTERS,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["target"]},
        ),
    ] = Field(default_factory=list)
    """The drafters that Aerie took from its catalog where spec.drafter was missing, one for each target, the latest first."""
    rejected_revision: ShortText | None = None
    """The revision that the spec asks for, while it is not tried again: it was rolled back, or its pods did not start. Cleared
    when the spec asks for another revision, or when somebody annotates the resource with a new value of aerie.dev/retry."""
    last_handled_retry: LongText | None = None
    """The value of the annotation aerie.dev/retry that was last seen; another one means: try again."""
    rollout_history: Annotated[
        list[RolloutOutcome], Field(max_length=10, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    ] = Field(default_factory=list)
    """The last ten rollouts, the newest first."""

    def to_dict(self) -> JsonObject:
        """Return the document for the API server; empty lists are left out, because `kubectl describe` prints a line for each."""
        document: JsonObject = _drop_empty_lists(super().to_dict())
        return document


def _drop_empty_lists(value: Any) -> Any:
    if isinstance(value, dict):
        fields = {name: _drop_empty_lists(item) for name, item in value.items()}
        return {name: item for name, item in fields.items() if item != []}
    return [_drop_empty_lists(item) for item in value] if isinstance(value, list) else value
