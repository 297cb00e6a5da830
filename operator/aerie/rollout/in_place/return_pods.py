"""Every pod comes back to the drafter that it should serve with: after a trial, after a promotion that failed, and at any time.

    on trial            ─► ReturnToOwn: its own drafter is still the right one
    another own drafter ─► the right one is loaded as its own: it was late, or its process began with an older expectation

Guarantees: pure; a pod that serves as it should gets no call. A load in progress is withdrawn. A pod that is not ready gets no
load: its process comes to the expected drafter as it starts. Not guaranteed: that a pod answers; its lease bounds a trial.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from aerie.api.status import Arm, InPlaceDrafter, InPlaceRollout
from aerie.engine.drafter_endpoint.calls import DrafterCall, DrafterFiles, LoadDrafter, PrepareDrafter, ReturnToOwn
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.in_place.engine_pods import EnginePod, list_engine_pods
from aerie.rollout.in_place.evidence import build_cursor
from aerie.rollout.in_place.staging import REJECTION_STATUSES
from aerie.rollout.in_place.turns import is_load_of
from aerie.rollout.plan import PodDrafterPlan
from aerie.rollout.revision.drafter_change import build_drafter_source

MAX_FAILED_ATTEMPTS = 3
"""Failed loads in a row after which a pod counts as failed; a rejection of the drafter itself counts at once."""
MAX_LISTED_PODS = 5
STARTING_REASON = "Starting"
"""Reason by which a pod reports that its process has just started (plugin/aerie_vllm/control.py)."""
PREPARATION_RETRY_DELAY = timedelta(minutes=1)
"""Delay until a preparation that failed is repeated."""


@dataclass(frozen=True)
class ServedDrafters:
    """Plans by which stable pods serve with their drafter while no rollout in place advances."""

    plans: tuple[PodDrafterPlan, ...] = ()
    requeue_after: timedelta | None = None
    problem: str = ""
    """Which pods cannot come to their drafter, as a sentence; empty if all can."""


def plan_served_drafters(snapshot: Snapshot, stable: Arm | None, rollout: InPlaceRollout | None, now: datetime) -> ServedDrafters:
    """Return the plans of the stable pods.

    Without a promotion in place and without a rollout there are none, and no pod is read. A promotion that is suspended stays
    as it is: some pods have the one drafter, and some the other.
    """
    if stable is None or (stable.in_place is None and rollout is None):
        return ServedDrafters()
    pods = list_engine_pods(snapshot, stable.revision)
    if rollout is not None and rollout.phase == "Promoting":
        return ServedDrafters(tuple(PodDrafterPlan(pod.name, None, build_cursor(pod.state, None)) for pod in pods))
    return ServedDrafters(*plan_returns(pods, stable.in_place, now), _describe_wrong_drafters(pods, stable.in_place))


def plan_returns(
    pods: Iterable[EnginePod], served: InPlaceDrafter | None, now: datetime
) -> tuple[tuple[PodDrafterPlan, ...], timedelta | None]:
    """Return the plans by which pods come to the served drafter, and the delay until another one may be due without an event.

    `served`: None for the drafter of the pods' arguments.
    """
    plans = tuple(PodDrafterPlan(pod.name, plan_return(pod, served, now), build_cursor(pod.state, None)) for pod in pods)
    is_waiting = served is not None and any(
        pod.is_ready and plan.call is None and pod.own_digest not in (None, served.digest)
        for pod, plan in zip(pods, plans, strict=True)
    )
    return plans, PREPARATION_RETRY_DELAY if is_waiting else None


def plan_return(pod: EnginePod, served: InPlaceDrafter | None, now: datetime) -> DrafterCall | None:
    """Return the call by which a pod comes to the served drafter; None if it needs none, or cannot take one."""
    state = pod.state
    if state is None or state.own is None:
        return None
    if state.isolation is not None:
        return ReturnToOwn()
    if served is not None and pod.own_digest != served.digest:
        return plan_load(pod, served, now) if pod.is_ready else None
    is_changing = state.change is not None or isinstance(pod.observation.call, LoadDrafter)
    return ReturnToOwn() if state.lease is not None or pod.loaded_digest != pod.own_digest or is_changing else None


def plan_load(pod: EnginePod, drafter: InPlaceDrafter, now: datetime) -> DrafterCall | None:
    """Return the call that makes a drafter a pod's own, or that prepares it; None while neither is possible."""
    folder = drafter.location.folder
    if pod.loaded_digest is None:
        return None
    if folder is None:  # only the pod knows where its files of the Hub are
        source, result = build_drafter_source(drafter.location), pod.observation.result
        prepared = pod.read_preparation(source)
        if prepared is None or prepared.phase == "Failed":
            is_recent = (
                result is not None and result.call == PrepareDrafter(source) and now < result.ended_at + PREPARATION_RETRY_DELAY
            )
            return None if is_recent and prepared is not None else PrepareDrafter(source)
        if prepared.drafter is None:
            return None
        folder = prepared.drafter.folder
    return LoadDrafter(DrafterFiles(drafter.files, folder), None, expected_digest=pod.loaded_digest)


def find_load_failure(pod: EnginePod, digest: str, since: datetime | None = None) -> str:
    """Return why a pod does not make a drafter its own, by its answers to the call; empty while it may yet.

    `since`: answers of earlier attempts do not count.
    """
    result = pod.observation.result
    if result is None or result.problem is None or not is_load_of(result.call, digest, is_trial=False):
        return ""
    if since is not None and result.ended_at < since:
        return ""
    is_final = result.problem.status in REJECTION_STATUSES or result.attempts >= MAX_FAILED_ATTEMPTS
    return result.problem.message if is_final else ""


def _describe_wrong_drafters(pods: Iterable[EnginePod], served: InPlaceDrafter | None) -> str:
    """Return which pods cannot come to the served drafter."""
    if served is None:
        return ""
    reasons = []
    for pod in pods:
        problem = pod.state.problem if pod.state is not None and not pod.is_ready else None
        is_starting = problem is not None and problem.reason == STARTING_REASON
        reason = problem.message if problem is not None and not is_starting else find_load_failure(pod, served.digest)
        if reason and not pod.serves_alone(served.digest):
            reasons.append(f"pod {pod.name}: {reason.rstrip('.')}")
    others = f"; and {len(reasons) - MAX_LISTED_PODS} others" if len(reasons) > MAX_LISTED_PODS else ""
    pods_text = "; ".join(reasons[:MAX_LISTED_PODS])
    return f"Pods do not come to the drafter of revision {served.revision}: {pods_text}{others}." if reasons else ""


def find_unreturned_pods(pods: Iterable[EnginePod], served: InPlaceDrafter | None) -> list[EnginePod]:
    """Return the ready or isolated pods of which it is not known that they serve with the right drafter and nothing else."""
    digest = served.digest if served is not None else None
    return [pod for pod in pods if (pod.is_ready or pod.is_isolated) and not pod.serves_alone(digest)]
