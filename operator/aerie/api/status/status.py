"""The status as a whole: its conditions, and the parts of the other modules."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from aerie.api.status.analysis import AnalysisStatus, RolloutOutcome
from aerie.api.status.arms import Arm, CanaryArm, Phase, PreviousArm, QueueStatus
from aerie.api.status.in_place import InPlaceRollout
from aerie.api.status.tuning import SpeculationStatus
from aerie.api.status.types import Count, LongText, ShortText
from aerie.api.status.user_request import UserRequest
from aerie.api.types.base import JsonObject, ResourceModel, Timestamp


class Condition(ResourceModel):
    """One aspect of the state, as Kubernetes defines conditions."""

    type: Annotated[str, Field(min_length=1, max_length=316)]
    """Ready, Progressing, PreflightPassed, Degraded, SpeculationTuned, NotificationsSubscribed or CaptureReady."""
    status: Literal["True", "False", "Unknown"]
    """True, False or Unknown, as in all conditions."""
    reason: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?$")]
    """Reason for the status, as one word for programs."""
    message: Annotated[str, Field(max_length=8192)]
    """Explanation of the reason for users, with what to do about a problem."""
    last_transition_time: Timestamp
    """Time at which status last changed."""
    observed_generation: Count | None = None
    """Generation of the resource that the condition describes."""


MAX_SELECTED_DRAFTERS = 8
"""Targets whose drafters a status keeps."""


class SelectedDrafter(ResourceModel):
    """A drafter that Aerie selected from its catalog, because spec.drafter is missing."""

    target: LongText
    """Repository of the drafter's target."""
    repo: LongText
    """Repository of the drafter."""
    revision: ShortText
    """Commit of the repository."""
    kind: ShortText
    """Kind in the catalog: EAGLE 3.1 or EAGLE 3."""
    in_use: bool = False
    """Whether pods were created with it. From then on it is the drafter of this target, even if the catalog changes. To use
    another one, write spec.drafter."""


class Status(ResourceModel):
    """Observed state of the resource, and progress of its rollouts; only Aerie writes it."""

    observed_generation: Count | None = None
    """Generation of the resource that the status describes."""
    phase: Phase | None = None
    """Current phase, for display; the conditions have the details. Preflight to Promoting, and RollingBack: a rollout is in
    progress. Staging: pods read the drafter that is rolled out in place. Evaluating: shadow evaluation. Queued: it waits for a
    free slot. AwaitingApproval and Held: it waits for the annotation aerie.dev/promote or aerie.dev/rollback. Monitoring and
    Verifying: the revision is promoted, and pods of the previous one are retained for a while. RolledBack: the stable revision
    serves, and the revision of the spec was rolled back. Ready, Paused and Failed: see the conditions.
    docs/concepts/rollout-phases.md describes each phase."""
    conditions: Annotated[
        list[Condition],
        Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    ] = Field(default_factory=list)
    """Ready, Progressing, PreflightPassed, Degraded, SpeculationTuned once tuning has a result, NotificationsSubscribed if
    annotations subscribe to notifications, and CaptureReady if spec.capture is set."""
    replicas: Count | None = None
    """Desired pods of all arms, as far as they are created."""
    ready_replicas: Count | None = None
    """Ready pods of all arms."""
    selector: Annotated[str, Field(max_length=1024)] | None = None
    """Label selector of the pods, for autoscalers."""
    stable: Arm | None = None
    """The stable revision, which was promoted last and serves."""
    canary: CanaryArm | None = None
    """The revision under analysis, if there is one; also the first revision, until its pods are ready."""
    in_place_rollout: InPlaceRollout | None = None
    """The rollout in place, if there is one: it changes the drafter inside the stable pods, and has no canary."""
    previous: PreviousArm | None = None
    """The previous revision, while pods of it are retained for an immediate rollback."""
    queue: QueueStatus | None = None
    """The rollout or trial that waits for a free slot, if there is one."""
    analysis: AnalysisStatus | None = None
    """The analysis of the canary. After its end it stays until the next rollout."""
    speculation: SpeculationStatus | None = None
    """The speculation setting, and its tuning."""
    selected_drafters: Annotated[
        list[SelectedDrafter],
        Field(
            max_length=MAX_SELECTED_DRAFTERS,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["target"]},
        ),
    ] = Field(default_factory=list)
    """Drafters that Aerie selected from its catalog, because spec.drafter was missing: one for each target, newest first."""
    rejected_revision: ShortText | None = None
    """Revision of the spec that is not retried, because it was rolled back or its pods did not start. Cleared when the spec makes
    another revision, or when the annotation aerie.dev/retry gets a new value."""
    last_handled_retry: LongText | None = None
    """Value of the annotation aerie.dev/retry that was last handled; another value requests a retry."""
    last_request: UserRequest | None = None
    """The last promotion, rollback, retry or extension whose request names its user. It is attributed to the rollout that it
    decided."""
    rollout_history: Annotated[
        list[RolloutOutcome], Field(max_length=10, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    ] = Field(default_factory=list)
    """The last ten rollouts, newest first."""

    def to_dict(self) -> JsonObject:
        """Return the document for the API server; empty lists are left out, because `kubectl describe` prints a line for each."""
        document: JsonObject = _drop_empty_lists(super().to_dict())
        return document


def _drop_empty_lists(value: Any) -> Any:
    if isinstance(value, dict):
        fields = {name: _drop_empty_lists(item) for name, item in value.items()}
        return {name: item for name, item in fields.items() if item != []}
    return [_drop_empty_lists(item) for item in value] if isinstance(value, list) else value
