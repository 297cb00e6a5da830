"""What is remembered of trials that failed, and when their setting may be tried again.

    Worse     the canary was measured, and rolled back: lifted by other traffic ─┐
    Failed    it never served, crashed, was refused by preflight,               ─┴─► a pause that doubles with each time
              or ran on other hardware than its control
    NoRoom    the cluster had no node or no quota for its pods ──────────────────► nothing is tried until there is room

One record per setting, for one spec: with another basis all are forgotten, and a new value of the annotation aerie.dev/retry
forgets them too. There is room again when a trial would need fewer pods than the one that found none, or as many pods serve.

Guarantee: pure. Not guaranteed: that room which appears is noticed where no pod of the resource takes it; the annotation is for
that.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from aerie.api.status import MOST_FAILURES, AnalysisStatus, Ended, Failure, FailureReason, Outcome, SpeculationStatus, Trial
from aerie.engine.speculation import named
from aerie.rollout.capacity.replica_counts import Places
from aerie.rollout.conditions import shortened
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.snapshot import Observed
from aerie.rollout.revision.desired import read_shown
from aerie.tuning.decision.policy import lengthened

AFTER_ROLLBACK = 4
"""Cooldowns after a trial that was taken back or failed."""


def until(failure: Failure, cooldown: timedelta, interval: timedelta) -> datetime:
    """From when on the setting may be tried again."""
    return failure.last_at + AFTER_ROLLBACK * lengthened(failure.times) * max(cooldown, interval)


def reason_of(result: Ended, outcome: Outcome | None, analysis: AnalysisStatus | None) -> FailureReason | None:
    """Why a trial counts as failed; None where it does not."""
    if result == "Undecided" and analysis is not None and analysis.unlike:
        return "Failed"
    if result not in ("RolledBack", "Failed"):
        return None
    if outcome is not None and outcome.retry_at is not None:
        return "NoRoom"
    measured = analysis is not None and analysis.verdict == "Rollback"
    return "Worse" if result == "RolledBack" and measured else "Failed"


def recorded(
    said: SpeculationStatus, trial: Trial, reason: FailureReason | None, message: str, observed: Observed, now: datetime
) -> dict[str, object]:
    """The fields of the status after this trial has ended: with its failure, or without any of its setting."""
    others = [one for one in said.failures if one.setting != trial.setting]
    if reason is None:
        return {"failures": others, "failed": None}
    before = next((one for one in said.failures if one.setting == trial.setting and one.reason == reason), None)
    failure = Failure(
        setting=trial.setting,
        reason=reason,
        message=shortened(message),
        times=1 + (before.times if before is not None else 0),
        basis=trial.basis,
        began_at=trial.started_at,
        last_at=now,
        pods=_needed(observed) if reason == "NoRoom" else None,
    )
    failed = {"Failed": 1 + (said.failed or 0), "Worse": None, "NoRoom": said.failed}[reason]
    return {"failures": [failure, *others][:MOST_FAILURES], "failed": failed}


def standing(failures: Iterable[Failure], observed: Observed, basis: str, *, again: bool) -> list[Failure]:
    """Those that still count. `again`: a person has asked to try again."""
    return [one for one in failures if one.basis == basis and not again and not _has_room(observed, one)]


def without_room(said: SpeculationStatus, observed: Observed, basis: str) -> str:
    """That the cluster has no room for a trial, with the ways out; empty where nothing says so."""
    found = next((one for one in standing(said.failures, observed, basis, again=False) if one.reason == "NoRoom"), None)
    if found is None:
        return ""
    more = _needed(observed) - observed.resource.spec.replicas
    return (
        f"the cluster had no room for the {more} pods on top of spec.replicas that a trial needs; it was of "
        f"{named(read_shown(found.setting))} ({found.message.rstrip('.')}). Nothing is tried until there is room: write "
        "spec.rollout.canary.capacity: Reuse, which needs none; or add nodes or raise the quota, and annotate the resource with "
        "a new value of aerie.dev/retry"
    )


def _needed(observed: Observed) -> int:
    """Pods of all arms while a trial is under way."""
    spec = observed.resource.spec
    return Places.of(spec.replicas, spec.rollout.canary).total


def _has_room(observed: Observed, failure: Failure) -> bool:
    if failure.reason != "NoRoom" or failure.pods is None:
        return False
    return _needed(observed) < failure.pods or sum(map(pod_failures.ready, observed.pods)) >= failure.pods
