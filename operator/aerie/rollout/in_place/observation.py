"""Observation of a rollout in place: what the pods have done in its phase, the verdict, and a user's requests.

Guarantees: pure. The analysis changes with a pair of windows or a verdict, and not with the clock. Not guaranteed: that a fault
lasts; a pod that is broken, or rejects the drafter, counts when that is first observed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from aerie.analysis.switchback.verdict import SwitchbackVerdict, evaluate_switchback
from aerie.api.rollout import AnalysisSpec, RolloutSpec
from aerie.api.status import AnalysisStatus, InPlaceDrafter, InPlaceRollout, Status
from aerie.manifests import naming
from aerie.manifests.expected_drafter_config_map import read_in_place_drafter
from aerie.rollout.canary.analysis_run.run import status_comparisons
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.in_place.engine_pods import EnginePod
from aerie.rollout.in_place.evidence import count_pairs
from aerie.rollout.in_place.staging import REJECTION_STATUSES
from aerie.rollout.in_place.trial import Trial, resume_trial
from aerie.rollout.in_place.turns import is_load_of

BROKEN_REASON = "Broken"
"""Reason by which a pod reports that a change failed, and that the drafter before could not be restored."""


@dataclass(frozen=True)
class TrialProgress:
    """How far a trial is."""

    trial: Trial
    analysis: AnalysisStatus
    """The analysis for the status; its state is with the rollout."""
    has_closed_pair: bool
    """Whether a pair of windows was closed in this reconcile."""


def observe_trial(snapshot: Snapshot, rollout: InPlaceRollout, pods: Sequence[EnginePod], now: datetime) -> TrialProgress | None:
    """Return the progress of the trial; None before it has begun."""
    spec, status = snapshot.resource.spec.rollout, snapshot.resource.status or Status()
    parameters = status.analysis.parameters if status.analysis is not None else spec.analysis
    is_shadow = rollout.phase == "Evaluating"
    max_duration = parameters.shadow.max_duration if is_shadow else parameters.max_duration
    resumed = resume_trial(rollout, parameters.model_copy(update={"max_duration": max_duration}))
    if resumed is None:
        return None
    analysis = status.analysis or start_analysis(rollout, parameters)
    trial = count_pairs(resumed, rollout, {pod.name: pod for pod in pods}, now)
    has_closed_pair = trial.state != resumed.state
    elapsed = trial.elapsed_seconds(now)
    if not has_closed_pair and elapsed < trial.plan.max_duration_seconds:
        return TrialProgress(trial, analysis, has_closed_pair=False)
    state, verdict = evaluate_switchback(trial.state, trial.plan, elapsed)
    # In an isolated pod, no user is at risk.
    min_duration = timedelta(0) if is_shadow else compute_min_duration(spec, is_accepted=trial.plan.is_accepted)
    min_seconds = min(min_duration.total_seconds(), trial.plan.max_duration_seconds)
    if verdict.outcome == "Promote" and elapsed < min_seconds:  # the next pair decides again
        awaited = "the ramp (spec.rollout.canary.stepDuration)" if trial.plan.is_accepted else "spec.rollout.inPlace.minDuration"
        message = f"{verdict.message.rstrip('.')}. Waiting for {awaited}."
        verdict = replace(verdict, outcome="Continue", message=message)
    else:
        trial = replace(trial, state=state)
    return TrialProgress(trial, _with_verdict(analysis, verdict), has_closed_pair)


def compute_min_duration(spec: RolloutSpec, *, is_accepted: bool) -> timedelta:
    """Return the time for which pods alternate at least. For a drafter that its shadow evaluation has accepted, it is that of the
    ramp: it takes the place of evidence."""
    ramp_duration = len(spec.canary.step_weights) * spec.canary.step_duration if is_accepted else timedelta(0)
    return max(spec.in_place.min_duration, ramp_duration)


def start_analysis(rollout: InPlaceRollout, parameters: AnalysisSpec) -> AnalysisStatus:
    """Return the analysis at the start of a trial."""
    return AnalysisStatus(
        design="EqualRequests" if rollout.phase == "Evaluating" else "ByTurns",
        parameters=parameters,
        verdict="Continue",
        message="No pair of windows is counted yet.",
        start_time=rollout.trial_start_time,
    )


def find_trial_failure(rollout: InPlaceRollout, pods: Sequence[EnginePod]) -> str:
    """Return why a trial ends without statistics, as sentences; empty while there is no reason.

    Only pods on trial count: another one may have been broken long before.
    """
    trial_keys = {(pod.name, pod.uid) for pod in rollout.pods}
    for pod in pods:
        if (pod.name, pod.uid) not in trial_keys:
            continue
        problem, result = pod.state.problem if pod.state is not None else None, pod.observation.result
        if problem is not None and problem.reason == BROKEN_REASON:
            return f"Pod {pod.name} is broken by a change of its drafter ({problem.message.rstrip('.')}): delete the pod."
        if (
            result is not None
            and result.problem is not None
            and result.problem.status in REJECTION_STATUSES
            and is_load_of(result.call, rollout.digest, is_trial=True)
            and result.ended_at >= rollout.phase_start_time
        ):
            return f"Pod {pod.name} rejects the drafter: {result.problem.message}"
    return ""


def is_expectation_observed(snapshot: Snapshot, revision: str, drafter: InPlaceDrafter) -> bool:
    """Return whether new pods of the revision come to this drafter, by the ConfigMap that exists."""
    name = naming.expected_drafter_config_map_name(snapshot.resource.metadata.name, revision)
    config_map = snapshot.cluster.child("ConfigMap", name)
    return config_map is not None and read_in_place_drafter(config_map.get("data") or {}) == drafter


def _with_verdict(analysis: AnalysisStatus, verdict: SwitchbackVerdict) -> AnalysisStatus:
    return analysis.model_copy(
        update={
            "verdict": verdict.outcome,
            "message": verdict.message,
            "comparisons": status_comparisons(verdict.comparisons) or analysis.comparisons,
        }
    )
