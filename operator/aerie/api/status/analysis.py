"""Comparison of a canary with its control, and the outcomes of rollouts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from aerie.api.rollout import AnalysisSpec
from aerie.api.status.types import Count, LongText, ShortText
from aerie.api.types.base import ResourceModel, Timestamp


class MetricComparison(ResourceModel):
    """One metric of the canary against the control, as of the last closed block."""

    metric: ShortText
    """Name of the metric."""
    sample_count: Count
    """Blocks counted so far; of GreedyAnswers, prompts that were answered."""
    message: LongText | None = None
    """What was found, where no figure says it."""
    estimate: float | None = None
    """Canary over control, less one: 0.05 is 5 % more."""
    lower: float | None = None
    """Lower bound of the estimate. It holds at every moment, however often it is looked at."""
    upper: float | None = None
    """Upper bound of the estimate, likewise."""


class AnalysisStatus(ResourceModel):
    """The running analysis, or the last one."""

    parameters: AnalysisSpec
    """The parameters, frozen when the analysis began: a later change of the spec does not move the bar."""
    verdict: Literal["Continue", "Promote", "Rollback", "Inconclusive"]
    """What the figures say. Continue: nothing yet."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Why, as a sentence; while there is no decision, what is missing for one and how much longer it takes."""
    start_time: Timestamp | None = None
    """When the first block began."""
    comparisons: Annotated[
        list[MetricComparison],
        Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["metric"]}),
    ] = Field(default_factory=list)
    """The metrics that are compared. Once the canary is accepted or Held, those that it was accepted or held with."""
    hardware_mismatch: Annotated[str, Field(max_length=4096)] | None = None
    """On what unlike hardware the pods that are compared run, by the labels of their nodes. Latency, tokens per busy second and
    preemptions are not judged then. Absent where it is alike, or nothing tells."""
    calibration_blocks: Count | None = None
    """Blocks in which stable pods were counted before the analysis began, each of them: these tell how metrics scatter between
    equal pods. Absent while there were fewer than 120: then the bounds are those of a cautious guess, and wider."""
    variance_inflation: float | None = None
    """How many blocks of the first metric count as one, because neighbours are alike; 3 is the cautious guess."""
    state: Annotated[str, Field(max_length=65536)] = ""
    """Accumulators from which the analysis goes on after a restart of the operator, packed. Private: their form may change."""


BlockedRollbackCause = Literal["StableUnavailable", "Abandoned"]
"""Why a rollback that could not complete was reversed."""


class RolloutOutcome(ResourceModel):
    """How a past rollout ended."""

    revision: ShortText
    """The revision that was rolled out."""
    change: LongText
    """What was new in it."""
    result: Literal["Promoted", "RolledBack", "Superseded", "Failed", "Explored"]
    """How it ended. Superseded: by another spec, or by that of the stable revision. Failed: its pods did not start, or the spec
    became one that cannot run. Explored: a trial by tuning that was to be measured and given up has been."""
    message: Annotated[str, Field(max_length=2048)]
    """Why, as a sentence."""
    reversal_cause: BlockedRollbackCause | None = None
    """Why a rollback that could not end was turned round, as one word for programs. StableLost: pods of this revision, which was
    the stable one, could not start any more, and the other one's serve. GivenUp: nor could the other one's, so this one was given
    up for a third. Absent for all other ends, and in outcomes that releases before this field wrote."""
    start_time: Timestamp
    """When it began."""
    completion_time: Timestamp
    """When it ended."""
    drafter: LongText | None = None
    """Its drafter, in short."""
    replaced_drafter: LongText | None = None
    """The drafter of the revision that it was to replace."""
    comparisons: Annotated[
        list[MetricComparison],
        Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["metric"]}),
    ] = Field(default_factory=list)
    """What was known of it in the end, if it was analyzed."""
    retry_time: Timestamp | None = None
    """When it is tried again by itself: the cluster had no room for it, which says nothing of the revision. Absent where it
    waits for another spec or the annotation aerie.dev/retry."""
