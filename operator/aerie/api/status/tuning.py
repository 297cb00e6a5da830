"""The active speculation setting, its trials, and their savings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from aerie.api.speculation import DraftSampling, LatencyObjective
from aerie.api.status.arms import SettingStatus
from aerie.api.status.types import Count, ShortText
from aerie.api.types.base import ResourceModel, Timestamp

MAX_TRIAL_RECORDS = 5
"""Trials that a status keeps."""


class PerformanceGain(ResourceModel):
    """By how much faster tokens come to the same requests, as a share: 0.05 is 5 % more of them a second."""

    estimate: float
    """The middle of what is thought likely, or was measured."""
    lower: float | None = None
    """A prediction: reached with 95 %. A measurement: the lower bound of its comparison."""
    upper: float | None = None
    """A prediction: not exceeded with 95 %. A measurement: the upper bound of its comparison."""


class AppliedSetting(ResourceModel):
    """A setting that is in force in place of spec.speculation.numSpeculativeTokens, because a canary has proven it."""

    setting: SettingStatus
    """The setting."""
    revision: ShortText
    """The revision of the pods that run it."""
    spec_revision: ShortText
    """The revision that the spec alone would make. When it makes another one, the choice is void: the spec is what counts."""
    slo: LatencyObjective | None = None
    """spec.speculation.tuning.slo when its trial began. Where that is stricter now, the choice is void."""


class Trial(ResourceModel):
    """A setting on its way through a canary."""

    setting: SettingStatus
    """The setting."""
    purpose: Literal["Improve", "Explore"]
    """Change: to be kept if it is certainly faster. Explore: to be measured for spec.speculation.tuning.interval, then given
    up; or it becomes a Change, if what it shows by then speaks for its setting."""
    revision: ShortText
    """The revision of the pods that run it: the canary's, once there is one."""
    spec_revision: ShortText
    """The revision that the spec alone would make. When it makes another one, the trial is over."""
    slo: LatencyObjective | None = None
    """spec.speculation.tuning.slo when it began. When that becomes stricter, the trial is over."""
    predicted: PerformanceGain | None = None
    """What is expected of it."""
    start_time: Timestamp
    """When it was decided on; the canary follows."""


TrialResult = Literal["Promoted", "RolledBack", "Inconclusive", "Explored", "Superseded", "Failed"]
"""How a trial may end."""


class TrialRecord(ResourceModel):
    """How a trial has ended."""

    from_setting: SettingStatus
    """The setting that was in force."""
    to_setting: SettingStatus
    """The setting that was tried."""
    purpose: Literal["Improve", "Explore"]
    """What it was tried for."""
    result: TrialResult
    """How it ended. Undecided: until the deadline it was neither proven nor refuted, or it
    ran on unlike hardware. Explored: it was measured, as was meant.
    Superseded: by another spec."""
    revision: ShortText
    """The revision that was tried."""
    predicted: PerformanceGain | None = None
    """What was expected of it."""
    measured: PerformanceGain | None = None
    """What the canary has shown against its control; absent where it was not compared."""
    start_time: Timestamp | None = None
    """When it began."""
    completion_time: Timestamp
    """When it ended."""


TrialFailureReason = Literal["InsufficientCapacity", "Regressed", "Failed"]
"""Why a trial counts as failed."""
MAX_TRIAL_FAILURES = 16
"""Settings whose failures a status keeps."""


class TrialFailure(ResourceModel):
    """A setting whose trials have failed, with what has to be before the next one of it."""

    setting: SettingStatus
    """The setting."""
    reason: TrialFailureReason
    """NoRoom: the cluster had no node or quota for its pods. Worse: it was measured, and rolled back. Failed: it never served,
    crashed, preflight refused it, or its pods ran on other hardware than those that they were compared with."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """How the last one ended, as a sentence."""
    failure_count: Annotated[int, Field(ge=1)] = 1
    """How often it has failed for this reason: the pause doubles each time."""
    spec_revision: ShortText
    """The revision that the spec alone makes. With another one the failure is forgotten."""
    first_failure_time: Timestamp
    """When the last trial began."""
    last_failure_time: Timestamp
    """When it ended."""
    required_pods: Count | None = None
    """Of NoRoom: pods that all arms together needed. With as many that serve, or a trial that needs fewer, there is room."""


class TuningSavings(ResourceModel):
    """What tuning has brought and cost, in hours of one replica; as of the end of the last trial, so that it does not change all
    the time. Since then, `rate` times replicas times hours have come on top."""

    saved: float = 0.0
    """What chosen settings have saved against spec.speculation.numSpeculativeTokens, by what their canaries have shown."""
    spent: float = 0.0
    """What trials have cost: each hour of each pod beyond spec.replicas that canary, control and pods kept after a promotion
    took, and what pods in the place of replicas have spent on loading."""
    net: float = 0.0
    """What was gained, less what was spent."""
    current_rate: float = 0.0
    """What the setting in force saves now, as a share: 0.05 is 5 % of the replicas. 0 while it is that of the spec."""
    update_time: Timestamp
    """When this was reckoned."""


MAX_EXPLORATION_TIMES = 8
"""Explorations whose times a status keeps."""


class SpeculationStatus(ResourceModel):
    """The speculation setting in force, and the one that tuning would choose."""

    current: SettingStatus
    """The setting of the stable pods."""
    recommended: SettingStatus | None = None
    """The setting that tuning finds best, when it is another one."""
    predicted: PerformanceGain | None = None
    """What the recommended setting is expected to gain over the current one."""
    recommended_draft_sampling: DraftSampling | None = None
    """What to write in spec.speculation.draftSampling: for spec.speculation.tuning.traffic Sampled, where that is not written and
    the engine knows it. Its canary decides; nothing tries it by itself."""
    message: Annotated[str, Field(max_length=4096)] | None = None
    """What speaks for it, or what is missing for a recommendation."""
    applied: AppliedSetting | None = None
    """The setting that is in force in place of spec.speculation.numSpeculativeTokens. Absent where that is in force."""
    trial: Trial | None = None
    """The setting under trial. In mode Auto it is tried by a canary, which ends like any other, by a person's word too."""
    last_change_time: Timestamp | None = None
    """When the setting of the stable pods last changed, by tuning or by the spec: tuning.cooldownDuration counts from here."""
    last_rollback_time: Timestamp | None = None
    """When a trial was last taken back or failed: four times tuning.cooldownDuration count from here, twice that after a second failure
    in a row, and so on."""
    consecutive_failures: Count | None = None
    """Trials in a row that failed without being measured; those that found no room are not counted. Absent for none."""
    failures: Annotated[
        list[TrialFailure], Field(max_length=MAX_TRIAL_FAILURES, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    ] = Field(default_factory=list)
    """Settings whose trials have failed, the latest first."""
    exploration_times: Annotated[
        list[Timestamp], Field(max_length=MAX_EXPLORATION_TIMES, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    ] = Field(default_factory=list)
    """When canaries have explored, the newest first."""
    last_speculation_time: Timestamp | None = None
    """While the setting is Off: when drafts were last verified."""
    trials: Annotated[
        list[TrialRecord], Field(max_length=MAX_TRIAL_RECORDS, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    ] = Field(default_factory=list)
    """The last trials, the newest first."""
    savings: TuningSavings | None = None
    """What trials have brought and cost so far. Absent before the first one."""
