"""A promotion in place: the drafter becomes that of every pod, in batches.

The ConfigMap for new pods comes first, so that no pod starts with the drafter before. Then ready pods load the drafter as their
own. Pods that start meanwhile come to it from the ConfigMap.

Guarantees: pure. At most a batch of pods changes at once, and slow pods keep no place in it. So few failures that a node
explains them (`late_pods.max_tolerated_failures`) delay nothing: these pods are changed when they can be. More of them end the
promotion. A failure of an earlier attempt does not count. Not guaranteed: that a pod which is not ready has the drafter; it is
not waited for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from aerie.api.status import InPlaceDrafter
from aerie.engine.drafter_endpoint.calls import DrafterCall, LoadDrafter, PrepareDrafter
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.late_pods import max_tolerated_failures
from aerie.rollout.in_place.deadline import is_load_untried, is_time_over
from aerie.rollout.in_place.engine_pods import EnginePod
from aerie.rollout.in_place.return_pods import find_load_failure, plan_load
from aerie.rollout.revision.drafter_change import build_drafter_source

MIN_BATCH_PODS, BATCH_SHARE = 10, 0.1
"""Pods that change at once: this number, or this share of them if that is more."""
SLOW_CHANGE_SECONDS = 30.0
"""Seconds of a preparation or a change after which the pod keeps no place in the batch."""


@dataclass(frozen=True)
class PromotionProgress:
    """How far a promotion is."""

    pod_count: int
    promoted_count: int
    waiting: tuple[str, ...]
    """Ready pods that have not changed yet, by name."""
    failures: tuple[str, ...]
    """A clause for each pod that has failed."""
    calls: Mapping[str, DrafterCall]
    """Calls by name of the pod."""
    is_due: bool
    """Whether the time for it is over, so that pods which wait are late."""
    next_slow_at: datetime | None = None
    """When the next pod of the batch is slow, if it has not changed until then; None without a batch."""

    @property
    def is_complete(self) -> bool:
        """Whether it has succeeded: pods that are missing are few."""
        return not self.waiting and not self.has_failed

    @property
    def has_failed(self) -> bool:
        """Whether more pods have failed, or are late, than the fault of one node explains."""
        late_count = len(self.waiting) if self.is_due else 0
        return len(self.failures) + late_count > max_tolerated_failures(self.pod_count)

    @property
    def is_over(self) -> bool:
        """Whether it has succeeded with pods that are late."""
        return self.is_due and not self.has_failed


def check_promotion(
    pods: Sequence[EnginePod], drafter: InPlaceDrafter, started_at: datetime, progress_deadline: timedelta, now: datetime
) -> PromotionProgress:
    """Return the progress of a promotion that began at this time, with the calls that are due."""
    failures = {pod.name: failure for pod in pods if (failure := _find_failure(pod, drafter, started_at))}
    unchanged = [pod for pod in pods if pod.is_ready and not pod.serves_alone(drafter.digest)]
    waiting = [pod for pod in unchanged if pod.name not in failures]
    slow_at = {pod.name: _compute_slow_time(pod, drafter, now) for pod in waiting}
    slow = {pod.name for pod in waiting if pod.observation.failed_reads > 0 or slow_at[pod.name] <= now}
    batch_size = max(MIN_BATCH_PODS, math.ceil(BATCH_SHARE * len(pods)))
    batch = [pod for pod in waiting if pod.name not in slow][:batch_size]
    others = [pod for pod in unchanged if pod.name in slow or pod.name in failures]
    calls = {pod.name: call for pod in (*batch, *others) if (call := plan_load(pod, drafter, now)) is not None}
    return PromotionProgress(
        pod_count=len(pods),
        promoted_count=sum(pod.serves_alone(drafter.digest) for pod in pods),
        waiting=tuple(pod.name for pod in waiting),
        failures=tuple(f"pod {name} {failure.rstrip('.')}" for name, failure in failures.items()),
        calls=calls,
        is_due=is_time_over(
            started_at,
            progress_deadline,
            now,
            is_any_untried=any(is_load_untried(pod, drafter.digest, started_at) for pod in waiting),
        ),
        next_slow_at=min((slow_at[pod.name] for pod in batch), default=None),
    )


def _find_failure(pod: EnginePod, drafter: InPlaceDrafter, started_at: datetime) -> str:
    """Return why a pod has failed since the promotion began, as a clause; empty if it has not."""
    not_ready_since = pod_failures.not_ready_since(pod.document)
    if not_ready_since is not None and pod.placed_at is not None and pod.placed_at < started_at <= not_ready_since:
        return "is not ready any more"
    if pod.serves_alone(drafter.digest):
        return ""
    if pod.state is not None and pod.state.unfit is not None:
        return f"cannot change its drafter: {pod.state.unfit.message}"
    if drafter.location.folder is None:
        source, result = build_drafter_source(drafter.location), pod.observation.result
        prepared = pod.read_preparation(source)
        is_answered = result is not None and result.call == PrepareDrafter(source) and result.ended_at >= started_at
        if is_answered and prepared is not None and prepared.problem is not None:
            return f"cannot prepare the drafter: {prepared.problem.message}"
        if prepared is not None and prepared.drafter is not None and prepared.drafter.digest != drafter.digest:
            return "has other files of the drafter"
    failure = find_load_failure(pod, drafter.digest, started_at)
    return f"does not load the drafter: {failure}" if failure else ""


def _compute_slow_time(pod: EnginePod, drafter: InPlaceDrafter, now: datetime) -> datetime:
    """Return when a pod keeps no place in the batch any more. What it has not begun yet begins now."""
    observation, begun_at = pod.observation, now
    prepared = pod.read_preparation(build_drafter_source(drafter.location))
    if isinstance(observation.call, LoadDrafter):  # no state is read while it lasts
        begun_at = observation.call_started_at or now
    elif pod.state is not None and pod.state.change is not None:
        begun_at = (observation.state_read_at or now) - timedelta(seconds=pod.state.change.seconds)
    elif prepared is not None and prepared.phase == "Running":
        begun_at = (observation.state_read_at or now) - timedelta(seconds=prepared.seconds)
    return begun_at + timedelta(seconds=SLOW_CHANGE_SECONDS)
