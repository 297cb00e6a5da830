"""The time of a phase in which pods do something: progressDeadline, and once more for pods that have not been tried yet.

An operator that was away knows nothing of its pods, and has called none of them: that is no fault of theirs.

Guarantees: pure. Every phase is over after two deadlines. Not guaranteed: that it is over after one; a pod of which nothing is
known, or that the operator has not called yet, gets an attempt.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from aerie.engine.drafter_endpoint.calls import DrafterSource
from aerie.rollout.in_place.engine_pods import EnginePod
from aerie.rollout.in_place.staging import PodPreparation
from aerie.rollout.in_place.turns import is_load_of


def time_until(moment: datetime, now: datetime) -> timedelta:
    """Return the delay until just after a moment: a timer that is early by its rounding would be set again."""
    return max(moment - now, timedelta(0)) + timedelta(milliseconds=10)


def is_time_over(started_at: datetime, deadline: timedelta, now: datetime, *, is_any_untried: bool) -> bool:
    """Return whether the time of a phase is over. `is_any_untried`: whether it waits for a pod that has not been tried yet."""
    return now >= started_at + (2 * deadline if is_any_untried else deadline)


def time_until_deadline(started_at: datetime, deadline: timedelta, now: datetime) -> timedelta | None:
    """Return the delay until the next moment at which `is_time_over` changes without an event; None after the last one."""
    moments = (started_at + deadline, started_at + 2 * deadline)
    return next((time_until(moment, now) for moment in moments if moment > now), None)


def is_load_untried(pod: EnginePod, digest: str, started_at: datetime) -> bool:
    """Return whether a promotion that began at this time has not tried the pod yet: no load of the drafter has ended."""
    result = pod.observation.result
    if pod.state is None or pod.observation.failed_reads > 0:
        return pod.observation.failed_reads == 0
    is_tried = result is not None and result.ended_at >= started_at and is_load_of(result.call, digest, is_trial=False)
    return pod.loaded_digest is not None and not is_tried


def is_preparation_untried(item: PodPreparation, source: DrafterSource, started_at: datetime, deadline: timedelta) -> bool:
    """Return whether a start that began at this time has not tried the pod yet: no preparation has had time to end."""
    result = item.pod.observation.result
    if item.pod.state is None or item.pod.observation.failed_reads > 0:
        return item.pod.observation.failed_reads == 0
    if item.call is not None:
        return result is None or result.ended_at < started_at or result.call != item.call
    prepared = item.pod.read_preparation(source)
    return prepared is not None and prepared.phase == "Running" and prepared.seconds < deadline.total_seconds() / 2
