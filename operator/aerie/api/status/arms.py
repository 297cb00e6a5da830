"""The pods of each revision, their speculation settings, and the phases that a rollout takes them through."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from aerie.api.speculation import MAX_SPECULATIVE_TOKENS, DraftSampling
from aerie.api.status.in_place import EvaluationResult, InPlaceDrafter
from aerie.api.status.types import Count, LongText, ShortText
from aerie.api.types.base import ResourceModel, Timestamp

Phase = Literal[
    "Preflight",
    "Queued",
    "Starting",
    "Staging",
    "Evaluating",
    "Ready",
    "WarmingUp",
    "Analyzing",
    "AwaitingApproval",
    "Ramping",
    "Promoting",
    "Monitoring",
    "Verifying",
    "RollingBack",
    "Held",
    "RolledBack",
    "Paused",
    "Failed",
]
RolloutPurpose = Literal["Rollout", "Trial"]
CanaryPhase = Literal[
    "Starting", "Evaluating", "WarmingUp", "Analyzing", "AwaitingApproval", "Held", "Ramping", "Promoting", "RollingBack"
]
TRAFFIC_SHIFT_PHASES: tuple[CanaryPhase, ...] = ("Ramping", "Promoting")
"""Phases in which a canary that passed its analysis is compared with the stable pods, whatever its control."""


class TierStatus(ResourceModel):
    """One tier of a schedule: the number of tokens for a range of batch sizes."""

    min_batch_size: Annotated[int, Field(ge=1)]
    """Smallest batch size of the tier."""
    max_batch_size: Annotated[int, Field(ge=1)]
    """Largest batch size of the tier."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=MAX_SPECULATIVE_TOKENS)]
    """Draft tokens per step."""


class SettingStatus(ResourceModel):
    """A speculation setting."""

    mode: Literal["Off", "Static", "Schedule", "Adaptive"]
    """Off: no drafter. Static: a constant number of draft tokens. Schedule: a number by batch size. Adaptive: up to
    numSpeculativeTokens, as the engine decides."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=MAX_SPECULATIVE_TOKENS)]
    """Maximum number of draft tokens per step (K); 0 when off."""
    schedule: Annotated[list[TierStatus], Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "atomic"})] | None = (
        None
    )
    """Tiers of mode Schedule, in ascending order of batch size."""


class Arm(ResourceModel):
    """The pods of one revision, and their metrics."""

    revision: ShortText
    """Hash of everything that determines the pods: target, engine, drafter and speculation setting. After a promotion in place,
    the pods are still those of this revision."""
    in_place: InPlaceDrafter | None = None
    """The drafter that the pods serve with, where it was promoted in place. Absent if it is that of the revision."""
    target: LongText | None = None
    """Source of the served model in short, such as owner/name@ and the first characters of its commit."""
    drafter: LongText | None = None
    """Source of the drafter in short, such as owner/name@ and the first characters of its commit. Absent without a drafter."""
    setting: SettingStatus | None = None
    """Speculation setting."""
    draft_sampling: DraftSampling | None = None
    """Sampling of draft tokens. Absent without a drafter, and if the spec leaves it to the engine."""
    replicas: Count = 0
    """Desired pods."""
    ready_replicas: Count = 0
    """Ready pods."""
    weight: Annotated[int, Field(ge=0, le=100)] | None = None
    """Percentage of the traffic; 1 if it is between 0 and 1."""
    acceptance_length: float | None = None
    """vLLM's mean acceptance length over the recent traffic, 1 + accepted draft tokens / drafts: 1 means that no draft token was
    accepted. It includes tokens accepted after the end of an answer, so requests get up to 4 % fewer tokens per step. Absent
    without a drafter and before the first traffic; updated after a change of 3 %."""
    time_per_output_token: float | None = None
    """Seconds per output token after a request's first, over the recent traffic; updated after a change of 10 %."""
    time_to_first_token: float | None = None
    """Seconds from a request's arrival to its first token, over the recent traffic; updated after a change of 20 %."""
    reference_acceptance_length: float | None = None
    """Acceptance length that later ones of the same revision are compared with: that of the analysis or trial by which it was
    promoted. Without one, it is that of the first traffic after the warm-up, from 100 requests and 1000 drafts on. It then stays.
    Absent before, and where the load decides how many tokens are drafted."""

    @property
    def served_revision(self) -> str:
        """Revision whose spec the pods serve: that of the drafter that was promoted in place, else their own."""
        return self.in_place.revision if self.in_place is not None else self.revision


class QueueStatus(ResourceModel):
    """A rollout or trial that waits, because the operator's limit of concurrent ones is reached."""

    purpose: RolloutPurpose
    """Rollout: the revision of the spec. Trial: a speculation setting that tuning tests."""
    queued_time: Timestamp
    """Time since when it waits. Within a namespace, the longest wait comes first."""


class ReadinessProgress(ResourceModel):
    """Desired pods that are not ready yet."""

    start_time: Timestamp
    """Time at which they were requested, or at which one more of them was last ready."""
    max_ready_replicas: Count
    """Maximum number of ready pods since then: a higher number is progress."""


class CanaryEvaluation(ResourceModel):
    """Shadow evaluation of a canary. Until it has a result, users are served neither by the canary nor by its control."""

    start_time: Timestamp | None = None
    """Time at which canary and control were ready, and phase Evaluating began. Absent until then."""
    result: EvaluationResult | None = None
    """Result. Accepted: the canary is significantly good enough. Skipped: it could not be carried out. Absent until it has ended,
    and if the canary was rolled back meanwhile."""
    message: Annotated[str, Field(max_length=2048)] = ""
    """Reason for the result."""
    state: Annotated[str, Field(max_length=65536)] = ""
    """Packed counts from which it continues after a restart of the operator. Private: their format may change."""


class CanaryArm(Arm):
    """The revision under analysis, with its control."""

    change: LongText
    """Change that the revision contains, in short: the drafter, K=5, the target, the engine."""
    phase: CanaryPhase = "Starting"
    """Phase of the canary. status.phase is the same, except for a paused rollout."""
    start_time: Timestamp
    """Time at which its rollout began."""
    ready_time: Timestamp | None = None
    """Time at which all pods of both arms were first ready, or at which their shadow evaluation ended: warmupDuration and
    maxDuration count from here."""
    step_index: Count | None = None
    """Index of the ramp step, from 0."""
    step_start_time: Timestamp | None = None
    """Time at which the step, or the promotion, began."""
    extension_end_time: Timestamp | None = None
    """Time at which the extension of an inconclusive analysis ends, or at which the last one was to end. Absent without one."""
    control: Arm | None = None
    """The control pods: the stable revision, started together with the canary. Absent if the running pods are the control, and
    from the ramp on."""
    readiness: ReadinessProgress | None = None
    """Progress of the pods that the phase waits for. Absent while all desired pods are ready."""
    evaluation: CanaryEvaluation | None = None
    """The shadow evaluation. Absent without one."""

    @property
    def is_extended(self) -> bool:
        """Whether its analysis was inconclusive, and continues because a user has extended it."""
        return self.phase == "Analyzing" and self.extension_end_time is not None

    @property
    def is_isolated(self) -> bool:
        """Whether no user may be served by it yet, because its shadow evaluation has no result."""
        return self.evaluation is not None and self.evaluation.result is None


class PreviousArm(Arm):
    """The previous revision, while pods of it are retained after the promotion of the stable one."""

    phase: Literal["Monitoring", "Verifying"] = "Monitoring"
    """Monitoring: its pods get no requests. Verifying: they do, because tokens per step have decreased since the promotion."""
    phase_start_time: Timestamp
    """Time at which this phase began."""
    change: LongText
    """Change that the stable revision contains, in short."""
    start_time: Timestamp
    """Time at which the rollout of the stable revision began."""
