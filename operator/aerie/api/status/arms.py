"""The pods of each revision, their speculation settings, and the phases that a rollout takes them through."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from aerie.api.speculation import MAX_SPECULATIVE_TOKENS, DraftSampling
from aerie.api.status.types import Count, LongText, ShortText
from aerie.api.types.base import ResourceModel, Timestamp

Phase = Literal[
    "Preflight",
    "Queued",
    "Starting",
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
CanaryPhase = Literal["Starting", "WarmingUp", "Analyzing", "AwaitingApproval", "Held", "Ramping", "Promoting", "RollingBack"]
TRAFFIC_SHIFT_PHASES: tuple[CanaryPhase, ...] = ("Ramping", "Promoting")
"""Phases in which a canary that passed its analysis is compared with the stable pods, whatever its control."""


class TierStatus(ResourceModel):
    """One tier of a schedule: the number of tokens for a range of batch sizes."""

    min_batch_size: Annotated[int, Field(ge=1)]
    """Smallest batch size of the tier."""
    max_batch_size: Annotated[int, Field(ge=1)]
    """Largest batch size of the tier."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=MAX_SPECULATIVE_TOKENS)]
    """Tokens proposed per step."""


class SettingStatus(ResourceModel):
    """A speculation setting."""

    mode: Literal["Off", "Static", "Schedule", "Adaptive"]
    """Off: no drafter. Static: the same number of tokens always. Schedule: by batch size. Adaptive: up to tokens, as the
    engine decides."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=MAX_SPECULATIVE_TOKENS)]
    """Most tokens proposed per step (K); 0 when off."""
    schedule: Annotated[list[TierStatus], Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "atomic"})] | None = (
        None
    )
    """Tiers of mode Schedule, by rising batch size."""


class Arm(ResourceModel):
    """The pods of one revision and what they achieve."""

    revision: ShortText
    """Hash of all that determines the pods: target, engine, drafter and speculation setting."""
    target: LongText | None = None
    """The served model: its source in short, such as owner/name@ and the first characters of its commit."""
    drafter: LongText | None = None
    """The drafter: its source in short, such as owner/name@ and the first characters of its commit. Absent without one."""
    setting: SettingStatus | None = None
    """The speculation setting."""
    draft_sampling: DraftSampling | None = None
    """How the drafter chooses its tokens. Absent without a drafter, and where the spec leaves it to the engine."""
    replicas: Count = 0
    """Pods that there should be."""
    ready_replicas: Count = 0
    """Pods that serve."""
    weight: Annotated[int, Field(ge=0, le=100)] | None = None
    """Percent of the traffic; 1 where it is less and not nothing."""
    acceptance_length: float | None = None
    """vLLM's 1 + accepted / drafts over the latest traffic: 1 means that no proposed token was accepted. It counts what is
    accepted behind the end of an answer, too, so requests get up to 4 % fewer tokens per step. Absent without a drafter and
    before the first traffic; written again when it has moved by 3 %."""
    time_per_output_token: float | None = None
    """Seconds per output token after a request's first, over the latest traffic; written again when moved by 10 %."""
    time_to_first_token: float | None = None
    """Seconds from a request's arrival to its first token, over the latest traffic; written again when moved by 20 %."""
    reference_acceptance_length: float | None = None
    """The acceptance length with which it was accepted: the mean over the blocks of its analysis. Absent where it was not
    compared."""


class QueueStatus(ResourceModel):
    """A rollout or a trial that may not begin yet, because as many are under way as the operator allows."""

    purpose: RolloutPurpose
    """Rollout: of what the spec asks for. Trial: of a speculation setting, by tuning."""
    queued_time: Timestamp
    """Since when it waits. In a namespace, what has waited for longest comes first."""


class ReadinessProgress(ResourceModel):
    """Pods that are asked for and do not serve."""

    start_time: Timestamp
    """When they were asked for, or when one more of them served for the last time."""
    max_ready_replicas: Count
    """Most pods that served since then: more of them are progress."""


class CanaryArm(Arm):
    """The revision under judgement, with its control."""

    change: LongText
    """What is new in it, in a word: the drafter, K=5, the target, the engine."""
    phase: CanaryPhase = "Starting"
    """Where it is on its way. status.phase says the same, but for a rollout that is paused."""
    start_time: Timestamp
    """When its rollout began."""
    ready_time: Timestamp | None = None
    """When all pods of both arms were ready for the first time: warm-up and deadline count from here."""
    step_index: Count | None = None
    """Step of the ramp, from 0."""
    step_start_time: Timestamp | None = None
    """When the step, or the promotion, began."""
    control: Arm | None = None
    """The control pods: the stable revision, started together with the canary. Absent where the running pods are the control, and
    from the ramp on."""
    readiness: ReadinessProgress | None = None
    """What the phase waits for. Absent while all pods that it asks for serve."""


class PreviousArm(Arm):
    """The revision before the stable one, while pods of it stay after the promotion."""

    phase: Literal["Monitoring", "Verifying"] = "Monitoring"
    """Watching: its pods get no requests. Rechecking: they do, because tokens per step have fallen since the promotion."""
    phase_start_time: Timestamp
    """When this phase began."""
    change: LongText
    """What is new in the stable revision, in a word."""
    start_time: Timestamp
    """When the rollout of the stable revision began."""
