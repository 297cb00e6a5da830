"""Whether the desired revision differs from the served one in its drafter alone, and whether running pods can read that drafter.

The served revision is that of the arm's drafter (`Arm.served_revision`); the pods were built by the arm's revision. What each of
them had in its spec is in the revision's record (manifests/preflight_job.py).

Guarantees: pure. Not guaranteed: an answer without the records; a change is then not of the drafter alone.
"""

from __future__ import annotations

from aerie.api import SpeculativeDeployment
from aerie.api.source import HuggingFaceSource, ModelSource, VolumeClaimSource
from aerie.api.status import Arm, DrafterLocation
from aerie.engine.drafter_endpoint.calls import DrafterSource
from aerie.manifests.pod.drafter_plugin import DRAFTERS_PATH
from aerie.manifests.preflight_job import RunningDrafter
from aerie.manifests.revision_hash import is_drafter_change_alone
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.revision.desired import DesiredRevision
from aerie.rollout.revision.recovery import read_recorded_resource


def is_of_drafter_alone(snapshot: Snapshot, desired: DesiredRevision, stable: Arm) -> bool:
    """Return whether the desired revision is the served one with another drafter."""
    served = read_recorded_resource(snapshot, stable.served_revision)
    return (
        served is not None
        and desired.resource.spec.drafter is not None
        and is_drafter_change_alone(desired.resource, desired.setting, served.spec.drafter, stable.served_revision)
    )


def find_running_drafter(snapshot: Snapshot, desired: DesiredRevision) -> RunningDrafter | None:
    """Return the drafter that preflight compares with the desired one, so that the change can be rolled out in place.

    It is that of the arguments of the running engines. None where the change cannot be rolled out in place, or the engines have
    run with the desired drafter from their start.
    """
    stable = snapshot.resource.status.stable if snapshot.resource.status is not None else None
    if stable is None or desired.resource.spec.rollout.in_place.mode == "Off" or stable.revision == desired.revision:
        return None
    running = read_recorded_resource(snapshot, stable.revision)
    if running is None or not is_of_drafter_alone(snapshot, desired, stable) or find_source_obstacle(running, desired):
        return None
    location = stable.in_place.location if stable.in_place is not None else DrafterLocation()
    promoted = f"{location.repository}@{location.commit}" if location.repository else ""
    return RunningDrafter(stable.revision, running, promoted)


def find_source_obstacle(running: SpeculativeDeployment, desired: DesiredRevision) -> str | None:
    """Return why pods that were built from the resource `running` cannot read the desired drafter; None if they can."""
    spec = desired.resource.spec
    drafter = spec.drafter
    if drafter is not None and drafter.source == spec.model.source:
        return (
            "spec.drafter.source is that of spec.model, and a drafter inside the target's checkpoint cannot change alone: copy "
            "it into a folder or a repository of its own."
        )
    running_source, source = (None if model is None else model.source.variant for model in (running.spec.drafter, drafter))
    match running_source, source:
        case HuggingFaceSource() | VolumeClaimSource(), HuggingFaceSource():
            return None  # into the Hub's cache, which pods with a claim have too
        case VolumeClaimSource(claim_name=mounted), VolumeClaimSource(claim_name=claim):
            return (
                None
                if mounted == claim
                else f"spec.drafter.source.persistentVolumeClaim.claimName is {claim}, and running pods mount {mounted}: copy "
                f"the drafter into a folder of {mounted}, and name it by path."
            )
        case HuggingFaceSource(), VolumeClaimSource(claim_name=claim):
            return (
                f"spec.drafter.source.persistentVolumeClaim.claimName is {claim}, and running pods mount no claim for drafters, "
                "because theirs is from the Hub: use huggingFace for a change in place."
            )
        case _:
            return (
                f"spec.drafter.source is {_describe_kind(source)}, and running pods read drafters from "
                f"{_describe_kind(running_source)}: use persistentVolumeClaim for both, or huggingFace."
            )


def locate_drafter(source: ModelSource) -> DrafterLocation | None:
    """Return where pods that can change their drafter in place read it; None for an image, which they cannot."""
    match source.variant:
        case HuggingFaceSource(repo=repository, revision=commit):
            return DrafterLocation(repository=repository, commit=commit)
        case VolumeClaimSource(path=path):
            return DrafterLocation(folder=f"{DRAFTERS_PATH}/{path.strip('/')}".rstrip("/"))
        case _:
            return None


def build_drafter_source(location: DrafterLocation) -> DrafterSource:
    """Return the location as pods get it in calls."""
    return DrafterSource(location.folder, location.repository, location.commit)


def _describe_kind(source: object) -> str:
    match source:
        case HuggingFaceSource():
            return "huggingFace"
        case VolumeClaimSource():
            return "persistentVolumeClaim"
        case None:
            return "no source"
        case _:
            return "image"
