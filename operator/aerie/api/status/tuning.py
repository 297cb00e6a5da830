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
    """Gain in the rate of tokens for the same requests, as a fraction: 0.05 is 5 % more tokens per second."""

    estimate: float
    """Median of the prediction, or estimate of the measurement."""
    lower: float | None = None
    """Lower bound. A prediction exceeds it with 95 % probability; for a measurement it is the bound of the comparison."""
    upper: float | None = None
    """Upper bound. A prediction stays below it with 95 % probability; for a measurement it is the bound of the comparison."""


class AppliedSetting(ResourceModel):
    """A setting that applies instead of spec.speculation.numSpeculativeTokens, because a canary has shown that it is better."""

    setting: SettingStatus
    """The setting."""
    revision: ShortText
    """Revision of the pods that run it."""
    spec_revision: ShortText
    """Revision that the spec alone makes. When the spec makes another one, the setting is void and the spec applies. Exception:
    if only the drafter differs and spec.rollout.inPlace.mode is not Off, the setting is kept, and the new drafter's promotion
    updates this field."""
    slo: LatencyObjective | None = None
    """spec.speculation.tuning.slo at the start of its trial. Stricter limits void the setting."""


class Trial(ResourceModel):
    """A setting that a canary tests."""

    setting: SettingStatus
    """The setting."""
    purpose: Literal["Improve", "Explore"]
    """Improve: the setting is kept if it is significantly faster. Explore: it is measured for
    spec.speculation.tuning.decisionInterval, then discarded. Explore becomes Improve if the measurement by then favours the
    setting."""
    revision: ShortText
    """Revision of the pods that run it: the canary's, once there is one."""
    spec_revision: ShortText
    """Revision that the spec alone makes. When the spec makes another one, the trial ends."""
    slo: LatencyObjective | None = None
    """spec.speculation.tuning.slo at its start. Stricter limits end the trial."""
    predicted: PerformanceGain | None = None
    """Predicted gain."""
    start_time: Timestamp
    """Time of the decision; the canary follows."""


TrialResult = Literal["Promoted", "RolledBack", "Inconclusive", "Explored", "Superseded", "Failed"]
"""How a trial may end."""


class TrialRecord(ResourceModel):
    """Record of a trial that has ended."""

    from_setting: SettingStatus
    """Setting that was active."""
    to_setting: SettingStatus
    """Setting that was tested."""
    purpose: Literal["Improve", "Explore"]
    """Purpose of the trial."""
    result: TrialResult
    """Result. Inconclusive: shown neither better nor worse by the deadline, or run on different hardware. Explored: measured, as
    intended. Superseded: replaced by another spec."""
    revision: ShortText
    """Revision that was tested."""
    predicted: PerformanceGain | None = None
    """Gain that was predicted."""
    measured: PerformanceGain | None = None
    """Gain of the canary over its control; absent if it was not compared."""
    start_time: Timestamp | None = None
    """Time at which it began."""
    completion_time: Timestamp
    """Time at which it ended."""


TrialFailureReason = Literal["InsufficientCapacity", "Regressed", "Failed"]
"""Why a trial counts as failed."""
MAX_TRIAL_FAILURES = 16
"""Settings whose failures a status keeps."""


class TrialFailure(ResourceModel):
    """A setting whose trials have failed, with what its next trial requires."""

    setting: SettingStatus
    """The setting."""
    reason: TrialFailureReason
    """InsufficientCapacity: the cluster had no node or quota for its pods. Regressed: it was measured, and rolled back. Failed:
    its pods were never ready, crashed, failed preflight, or ran on other hardware than the pods that they were compared with."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Explanation of the last failure."""
    failure_count: Annotated[int, Field(ge=1)] = 1
    """Number of failures for this reason: the pause doubles each time."""
    spec_revision: ShortText
    """Revision that the spec alone makes. When the spec makes another one, the failure is forgotten: if only the drafter
    differs and spec.rollout.inPlace.mode is not Off, when it is promoted."""
    last_start_time: Timestamp
    """Time at which the last failed trial began."""
    last_completion_time: Timestamp
    """Time at which the last failed trial ended."""
    required_pods: Count | None = None
    """Number of pods that all arms together needed, for InsufficientCapacity. A trial is possible again with as many ready pods,
    or if it needs fewer."""


class TuningSavings(ResourceModel):
    """Savings and costs of tuning, in hours of one replica, as of the end of the last trial, so that they do not change all the
    time. The savings since then are currentRate times replicas times hours."""

    saved: float = 0.0
    """Savings of applied settings against spec.speculation.numSpeculativeTokens, by the measurements of their canaries."""
    spent: float = 0.0
    """Costs of trials: each hour of each canary, control and retained pod beyond spec.replicas, and the loading time of pods in
    place of replicas."""
    net: float = 0.0
    """Savings minus costs."""
    current_rate: float = 0.0
    """Present savings of the active setting, as a fraction: 0.05 is 5 % of the replicas. 0 while it is that of the spec."""
    update_time: Timestamp
    """Time of the calculation."""


MAX_EXPLORATION_TIMES = 8
"""Explorations whose times a status keeps."""


class SpeculationStatus(ResourceModel):
    """The active speculation setting, and the one that tuning recommends."""

    current: SettingStatus
    """Setting of the stable pods."""
    recommended: SettingStatus | None = None
    """Setting that tuning finds best, if it differs."""
    predicted: PerformanceGain | None = None
    """Predicted gain of the recommended setting over the current one."""
    recommended_draft_sampling: DraftSampling | None = None
    """Recommended value of spec.speculation.draftSampling, if that is not set, spec.speculation.tuning.trafficSampling is
    Sampled, and the engine supports it. Its canary decides; no trial tests it automatically."""
    message: Annotated[str, Field(max_length=4096)] | None = None
    """Reason for the recommendation, or what is missing for one."""
    applied: AppliedSetting | None = None
    """Setting that applies instead of spec.speculation.numSpeculativeTokens. Absent while the spec's applies."""
    trial: Trial | None = None
    """Setting under trial. In mode Auto a canary tests it, which ends like any other canary, also by a manual promotion or
    rollback."""
    last_change_time: Timestamp | None = None
    """Time at which the setting of the stable pods last changed, by tuning or by the spec: tuning.cooldownDuration counts from
    here."""
    last_rollback_time: Timestamp | None = None
    """Time at which a trial was last rolled back or failed. Four times tuning.cooldownDuration count from here, twice that after
    a second failure in a row, and so on."""
    consecutive_failures: Count | None = None
    """Number of trials in a row that failed without a measurement, except for lack of capacity. Absent for none."""
    failures: Annotated[
        list[TrialFailure], Field(max_length=MAX_TRIAL_FAILURES, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    ] = Field(default_factory=list)
    """Settings whose trials have failed, newest first."""
    exploration_times: Annotated[
        list[Timestamp], Field(max_length=MAX_EXPLORATION_TIMES, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    ] = Field(default_factory=list)
    """Times of explorations, newest first."""
    last_speculation_time: Timestamp | None = None
    """Time of the last verified drafts, while the setting is Off."""
    trials: Annotated[
        list[TrialRecord], Field(max_length=MAX_TRIAL_RECORDS, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    ] = Field(default_factory=list)
    """The last trials, newest first."""
    savings: TuningSavings | None = None
    """Savings and costs of trials so far. Absent before the first trial."""
