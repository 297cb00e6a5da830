"""Comparison of a canary with its control, and the outcomes of rollouts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from aerie.api.rollout import AnalysisSpec
from aerie.api.status.types import Count, LongText, ShortText
from aerie.api.status.user_request import RequestedBy
from aerie.api.types.base import ResourceModel, Timestamp


class MetricComparison(ResourceModel):
    """One metric of the canary compared with the control, as of the last closed block. By turns: of the new drafter compared with
    the stable one, as of the last pair of windows. With equal requests: as of the last counted pairs of answers."""

    metric: ShortText
    """Name of the metric."""
    sample_count: Count
    """Number of blocks, or by turns of pairs of windows, or of pairs of answers to equal requests, counted so far; for
    OutputEquivalence, number of answered prompts."""
    message: LongText | None = None
    """Result that no number expresses."""
    estimate: float | None = None
    """Canary divided by control, minus one: 0.05 is 5 % more."""
    lower: float | None = None
    """Lower bound of the estimate. It is anytime-valid: it holds however often it is evaluated. Absent while there is none."""
    upper: float | None = None
    """Upper bound of the estimate, also anytime-valid. Absent while there is none."""
    requirement: ShortText | None = None
    """What an acceptance needs of the metric: that it is significantly so or, with "measured", that the estimate is. A share of
    requests is compared itself, and all else relative to the control. Absent if the metric decides no acceptance."""
    met: bool | None = None
    """Whether the requirement is met, by the tests of the verdict: they may use other bounds than those shown. An acceptance
    needs all requirements met, and more: see analysis.message. Absent together with requirement."""


class AnalysisStatus(ResourceModel):
    """The current analysis, or the last one."""

    design: Literal["BetweenPods", "ByTurns", "EqualRequests"] = "BetweenPods"
    """BetweenPods: pods of the canary are compared with control pods. ByTurns: in a rollout in place, the two drafters are
    compared in the same pods, which alternate between them in windows. EqualRequests: the shadow evaluation, with the same
    requests for both drafters: ByTurns in one pod that users do not reach or, by pods, in canary and control."""
    parameters: AnalysisSpec
    """Parameters, frozen when the analysis began: a later change of the spec does not affect it. ByTurns, only goal, margin,
    maxDuration and onInconclusive have an effect."""
    verdict: Literal["Continue", "Promote", "Rollback", "Inconclusive"]
    """Verdict after the last closed block or pair of windows. Continue: none yet."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Reason for the verdict. Without a verdict: what is missing for one, and the estimated time to it."""
    start_time: Timestamp | None = None
    """Time at which the first block or window began."""
    comparisons: Annotated[
        list[MetricComparison],
        Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["metric"]}),
    ] = Field(default_factory=list)
    """Metrics that are compared. Once the canary has passed or is Held, they stay as they were then."""
    hardware_mismatch: Annotated[str, Field(max_length=4096)] | None = None
    """Differences in hardware between the compared pods, by the labels of their nodes. Latency, tokens per busy second and
    preemptions are then not compared. Absent if the hardware is the same, or unknown, and ByTurns."""
    calibration_blocks: Count | None = None
    """Blocks in which stable pods were counted before the analysis began, each pod separately. They show the dispersion of
    metrics between equal pods. Absent below 120 blocks: the bounds then follow from conservative defaults, and are wider. Absent
    ByTurns, which compares no pods with each other."""
    variance_inflation: float | None = None
    """Number of blocks of the first metric that count as one independent block, because neighbouring blocks are correlated; 3 is
    the conservative default. Absent ByTurns."""
    state: Annotated[str, Field(max_length=65536)] = ""
    """Packed accumulators from which the analysis continues after a restart of the operator. Private: their format may change."""


BlockedRollbackCause = Literal["StableUnavailable", "Abandoned"]
"""Why a rollback that could not complete was reversed."""


class RolloutOutcome(ResourceModel):
    """Outcome of a past rollout."""

    revision: ShortText
    """Revision that was rolled out."""
    change: LongText
    """Change that the revision contained."""
    result: Literal["Promoted", "RolledBack", "Superseded", "Failed", "Explored"]
    """Result. Superseded: replaced by another spec, or by that of the stable revision. Failed: its pods did not start, or the
    spec became invalid. Explored: a trial by tuning that only measured its setting is complete."""
    message: Annotated[str, Field(max_length=2048)]
    """Reason for the result."""
    requested_by: RequestedBy | None = None
    """User who requested the promotion, the rollback, or the retry that the rollout began with. Absent if nobody did, or if the
    request names no user."""
    reversal_cause: BlockedRollbackCause | None = None
    """Cause of the reversal of a rollback that could not complete, as one word for programs. StableUnavailable: pods of this
    revision, which was the stable one, could no longer start, and those of the other revision were ready. Abandoned: those of the
    other revision could not start either, so this revision was abandoned for a third. Absent for all other outcomes, and in
    outcomes that releases without this field wrote."""
    start_time: Timestamp
    """Time at which it began."""
    completion_time: Timestamp
    """Time at which it ended."""
    drafter: LongText | None = None
    """Drafter of the revision, in short."""
    replaced_drafter: LongText | None = None
    """Drafter of the revision that it was to replace, in short."""
    comparisons: Annotated[
        list[MetricComparison],
        Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["metric"]}),
    ] = Field(default_factory=list)
    """Comparisons at its end, if it was analyzed."""
    retry_time: Timestamp | None = None
    """Time of the automatic retry after a lack of capacity, which is no fault of the revision. Absent if it waits for another
    spec or the annotation aerie.dev/retry."""
