"""A rollout in place, and the drafter that running pods serve with after it.

Guarantees: everything that a restarted operator needs to continue a rollout in place is here. Not guaranteed: that pods serve
with the drafter of the status; only their endpoints report what they have loaded.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from aerie.api.status.types import Count, LongText, ShortText
from aerie.api.types.base import ResourceModel, Timestamp

InPlacePhase = Literal["Staging", "Evaluating", "Analyzing", "AwaitingApproval", "Held", "Promoting", "RollingBack"]
MAX_DRAFTER_FILES = 64
"""Maximum number of files of a drafter."""
_DIGEST_PATTERN = r"^[0-9a-f]{64}$"
Sha256 = Annotated[str, Field(pattern=_DIGEST_PATTERN, max_length=64)]
"""A SHA-256 in hexadecimal digits."""
DrafterFileDigests = Annotated[dict[str, Sha256], Field(max_length=MAX_DRAFTER_FILES)]
"""SHA-256 by file name."""


class DrafterLocation(ResourceModel):
    """Where pods read a drafter: a folder, or a repository of the Hub at a commit."""

    folder: LongText | None = None
    """Absolute path of the folder in the pods; absent for a repository."""
    repository: LongText | None = None
    """Repository of the Hub, owner/name; absent for a folder."""
    commit: ShortText | None = None
    """Commit of the repository."""


class InPlaceDrafter(ResourceModel):
    """A drafter that was loaded into running pods of another revision."""

    revision: ShortText
    """Revision that has this drafter in its spec. The pods were built by the revision of the arm."""
    drafter: LongText
    """Source of the drafter in short, such as owner/name@ and the first characters of its commit."""
    digest: Sha256
    """Digest of the drafter's files, as the pods report it: the SHA-256 of their names and SHA-256."""
    files: DrafterFileDigests
    """SHA-256 of each file, by its name: config.json and the safetensors files."""
    location: DrafterLocation
    """Where pods read the files."""


class TrialPod(ResourceModel):
    """A pod on trial, which alternates between the two drafters."""

    name: Annotated[str, Field(max_length=253)]
    """Name of the pod."""
    uid: ShortText
    """UID of the pod."""
    index: Count
    """Index of the pod in the trial, from 0. It determines the order of the drafters, and passes to the pod's replacement."""
    first_pair: Count = 0
    """Number of the first pair of windows in which the pod takes part."""


EvaluationResult = Literal["Accepted", "Inconclusive", "Skipped"]
"""Result of a shadow evaluation that has not rolled back the drafter."""


class ShadowEvaluation(ResourceModel):
    """The shadow evaluation of a rollout in place, once it has ended."""

    result: EvaluationResult
    """Result. Accepted: the drafter is significantly good enough. Skipped: it could not be carried out. A drafter that is
    significantly worse is rolled back, and leaves no result here."""
    message: Annotated[str, Field(max_length=2048)]
    """Reason for the result."""


class PendingOutcome(ResourceModel):
    """Outcome of a rollout in place that is complete as soon as all pods have returned."""

    result: Literal["RolledBack", "Superseded", "Failed"]
    """Result of the rollout."""
    message: Annotated[str, Field(max_length=2048)]
    """Reason for the result."""


class InPlaceRollout(ResourceModel):
    """A rollout in place: the drafter of a revision is loaded into running pods of the stable one."""

    revision: ShortText
    """Revision whose drafter is rolled out."""
    change: LongText
    """Change that the revision contains, in short."""
    drafter: LongText
    """Source of the drafter in short."""
    location: DrafterLocation
    """Where pods read the drafter."""
    phase: InPlacePhase = "Staging"
    """Phase of the rollout. status.phase is the same, except for a paused rollout."""
    start_time: Timestamp
    """Time at which the rollout began."""
    phase_start_time: Timestamp
    """Time at which the phase began."""
    files: DrafterFileDigests | None = None
    """SHA-256 of each of the drafter's files, by its name. Absent until the first pod has read them."""
    digest: Sha256 | None = None
    """Digest of these files, which all pods have to agree on."""
    kind: ShortText | None = None
    """Kind of the drafter as the first pod reports it: eagle3, eagle3.1, or the name of another method."""
    replaced: InPlaceDrafter | None = None
    """The drafter that served when the rollout began, as the pods report it: a rollback loads it again. Absent until the first
    pod has reported it."""
    seed: ShortText
    """Seed of the order in which pods alternate between the drafters."""
    first_window_seconds: Annotated[float, Field(ge=0)] | None = None
    """Length of the shortest windows. Absent until the trial begins."""
    carryover_seconds: Annotated[float, Field(ge=0)] | None = None
    """Seconds for which a drafter is assumed to affect the next one. Absent until the trial begins. In phase Evaluating the
    trial is that of the shadow evaluation."""
    trial_start_time: Timestamp | None = None
    """Time at which the first window began. Absent until then."""
    growth_step: Count = 0
    """Number of times that the trial has grown by further pods."""
    pods: Annotated[
        list[TrialPod],
        Field(max_length=100, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["index"]}),
    ] = Field(default_factory=list)
    """Pods on trial."""
    evaluation: ShadowEvaluation | None = None
    """Result of the shadow evaluation. Absent until it has ended, and without one."""
    pending_outcome: PendingOutcome | None = None
    """Outcome in phase RollingBack, which is reported when the pods have returned."""
    state: Annotated[str, Field(max_length=65536)] = ""
    """Packed counts from which the analysis continues after a restart of the operator. Private: their format may change."""
