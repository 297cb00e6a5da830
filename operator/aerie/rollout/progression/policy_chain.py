"""Chain of the policies that decide on a rollout: which revisions have pods, and the condition Progressing.

    desired revision ─┬─ a canary of another revision is in progress ─► that one is rolled back first
                      ├─ previous pods are retained ──────────────────► post-promotion monitoring (canary/post_promotion.py);
                      │                                                 for a third revision, they are removed first
                      ├─ a rollout in place is in progress ───────────► it advances; for another revision, its pods return first
                      ├─ is served by the stable pods ────────────────► keep it
                      ├─ was rejected ────────────────────────────────► keep the stable one, say why, wait for a retry request
                      ├─ has found no resources ──────────────────────► keep the stable one, retry later
                      ├─ preflight: none yet, running, failed ────────► no engine pod; report the problem
                      └─ preflight passed ─┬─ a third revision has pods ─► these are removed first
                                           ├─ nothing is stable ───► its pods start; when all are ready, it is stable
                                           ├─ must be in place, and cannot ► report the reason
                                           ├─ others come first ───► it waits for a slot (facts/concurrency.py)
                                           ├─ the drafter alone ───► the rollout in place, where pods can (in_place/)
                                           └─ otherwise ───────────► the canary (canary/advance.py)

Each line is a policy, tried from the top; the first one with an answer decides.

Guarantees: a function of its arguments; one transition at a time; at most two revisions have pods. A serving revision is
stable: a first revision with any ready pod is never deleted for a change of the spec. It is adopted, and a canary rolls out the
change. A new spec is taken up in every phase, even during a rollback that cannot end (canary/blocked_rollback.py). Not
guaranteed: that two changes in a row are both rolled out; the last one is, and the other is reported as superseded.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from aerie.api.status import Status
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.progression import (
    canary_rollout,
    first_revision,
    in_place_rollout,
    pause,
    promotion,
    stable_revision,
    start_gates,
    superseded_revisions,
    unrecorded_revisions,
)
from aerie.rollout.progression.context import ProgressionContext
from aerie.rollout.progression.progression import Progression
from aerie.rollout.progression.stable_revision import keep_serving
from aerie.rollout.revision.desired import DesiredRevision
from aerie.rollout.revision.preflight_result import PreflightResult

_Policy = Callable[[ProgressionContext], Progression | None]
_POLICIES_BEFORE_SUPERSEDING: tuple[_Policy, ...] = (
    superseded_revisions.reverse_blocked_rollback,
    superseded_revisions.roll_back_superseded_canary,
    promotion.monitor_promotion,
    in_place_rollout.advance_in_place,
    stable_revision.keep_desired_revision,
    superseded_revisions.adopt_serving_first_revision,
)
"""Policies that first finish what is in progress, tried in this order."""
_POLICIES_OF_DESIRED_REVISION: tuple[_Policy, ...] = (
    start_gates.report_invalid_spec,
    start_gates.keep_stable_after_rejection,
    start_gates.wait_for_capacity,
    start_gates.wait_for_preflight,
    unrecorded_revisions.remove_unexpected_revisions,
    first_revision.start_first_revision,
    first_revision.adopt_without_pods,
    in_place_rollout.fail_impossible_rollout,
    start_gates.wait_for_start_permission,
    in_place_rollout.start_in_place,
)
"""Policies that hold the desired revision back, or make it stable without a canary, tried in this order."""


def next_progression(
    snapshot: Snapshot, desired: DesiredRevision, preflight_result: PreflightResult, now: datetime
) -> Progression:
    """Return the progression that follows from the snapshot: the answer of the first policy that has one."""
    status = snapshot.resource.status or Status()
    context = ProgressionContext(
        snapshot,
        desired,
        preflight_result,
        now,
        status,
        status.stable,
        status.canary,
        keep_serving(snapshot, desired, preflight_result, now),
    )
    return in_place_rollout.keep_drafter_of_stable_pods(_find_progression(context), status)


def _find_progression(context: ProgressionContext) -> Progression:
    if (progression := pause.pause_rollout(context)) is not None:
        return progression
    context = unrecorded_revisions.adopt_unrecorded_revision(context)
    for policy in _POLICIES_BEFORE_SUPERSEDING:
        if (progression := policy(context)) is not None:
            return progression
    context = superseded_revisions.drop_superseded_first_revision(context)
    for policy in _POLICIES_OF_DESIRED_REVISION:
        if (progression := policy(context)) is not None:
            return progression
    return canary_rollout.progress_canary(context)
