"""The call that a pod on trial needs in the present window, and that of the next window.

One load per window names the drafter, the window, a lease and the wash-out. The wash-out counts from the change and not from the
start of the window: so a late change has a complete one, and the call stays the same while it is repeated. A change that has not
been made by the end of the wash-out is not made any more (`evidence` says what becomes of its pair). The call of the next window
is planned ahead, because the reconciles of a large fleet are further apart than a wash-out lasts.

Guarantees: pure. Every load has a lease and the drafter that it replaces. A lease lasts for three windows at least, so each
window's call renews it in time, and two of them may fail. Not guaranteed: that the call arrives; `evidence` counts what the pod
reports.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from aerie.analysis.switchback.design import Window, drafter_in_window
from aerie.api.status import InPlaceRollout, TrialPod
from aerie.engine.drafter_endpoint.calls import DrafterCall, DrafterFiles, DrafterSource, LoadDrafter, PrepareDrafter
from aerie.rollout.in_place.engine_pods import EnginePod
from aerie.rollout.in_place.trial import Trial
from aerie.rollout.plan import ScheduledCall

MIN_LEASE_SECONDS, MAX_LEASE_SECONDS, WINDOWS_PER_LEASE = 60.0, 900.0, 3


def compute_lease_seconds(window_seconds: float) -> float:
    """Return the seconds of a lease in windows of this length."""
    return min(max(MIN_LEASE_SECONDS, WINDOWS_PER_LEASE * window_seconds), MAX_LEASE_SECONDS)


def plan_turn(
    trial: Trial,
    rollout: InPlaceRollout,
    source: DrafterSource,
    trial_pod: TrialPod,
    pod: EnginePod,
    now: datetime,
    *,
    isolated: bool = False,
) -> tuple[DrafterCall | None, ScheduledCall | None]:
    """Return the call that a pod on trial needs now, and that of the next window. None for none, or if it cannot take one.

    `isolated`: whether the pod takes them only while it is isolated.
    """
    window, state = trial.window_at(now), pod.state
    prepared = pod.read_preparation(source)
    if state is None or state.own is None or rollout.replaced is None:
        return None, None
    if prepared is None:  # its process has restarted
        return PrepareDrafter(source), None
    if prepared.drafter is None or prepared.drafter.digest != rollout.digest or pod.own_digest != rollout.replaced.digest:
        return None, None
    loaded = pod.loaded_digest
    if loaded is None:
        return None, None
    # The engine holds its own drafter in memory.
    drafters = {"canary": prepared.drafter, "stable": DrafterFiles(state.own.files)}

    def build_load(window: Window, expected_digest: str) -> LoadDrafter:
        return LoadDrafter(
            drafters[drafter_in_window(trial.plan.seed, trial_pod.index, window.number)],
            compute_lease_seconds(window.length_seconds),
            expected_digest=expected_digest,
            turn=trial.name_turn(window.number),
            settle_seconds=window.washout_seconds,
            isolated=isolated,
        )

    call, next_call = None, None
    is_begun = any(reported.turn == trial.name_turn(window.number) for reported in state.windows)
    is_late = trial.elapsed_seconds(now) >= window.start_seconds + window.washout_seconds
    if trial_pod.first_pair <= window.number // 2 and not is_begun and not is_late:
        call = build_load(window, loaded)
        loaded = call.drafter.digest
    following = trial.plan.schedule.window(window.number + 1)
    if trial_pod.first_pair <= following.number // 2 and following.start_seconds < trial.plan.max_duration_seconds:
        due_at = trial.started_at + timedelta(seconds=following.start_seconds)
        next_call = ScheduledCall(build_load(following, loaded), due_at)
    return call, next_call


def is_load_of(call: DrafterCall, digest: str | None, *, is_trial: bool) -> bool:
    """Return whether a call loads this drafter, for the time of a lease or as the pod's own."""
    return isinstance(call, LoadDrafter) and call.drafter.digest == digest and (call.lease_seconds is not None) == is_trial
