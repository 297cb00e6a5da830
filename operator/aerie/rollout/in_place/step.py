"""One rollout in place in one reconcile: what is known of it, and what follows from that alone.

Guarantees: pure. Not guaranteed: a decision; `advance` makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from aerie.api.rollout import RolloutSpec
from aerie.api.status import AnalysisStatus, Arm, DrafterLocation, InPlacePhase, InPlaceRollout, Status
from aerie.engine.drafter_endpoint.calls import DrafterSource
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.in_place import trial_pods
from aerie.rollout.in_place.engine_pods import EnginePod
from aerie.rollout.in_place.evaluation import EvaluationProgress
from aerie.rollout.in_place.observation import TrialProgress
from aerie.rollout.in_place.promotion import PromotionProgress
from aerie.rollout.in_place.return_pods import find_unreturned_pods
from aerie.rollout.in_place.staging import StagingProgress, check_preparation, order_for_trial
from aerie.rollout.in_place.trial import Trial
from aerie.rollout.in_place.turns import MAX_LEASE_SECONDS, compute_lease_seconds
from aerie.rollout.revision.desired import DesiredRevision
from aerie.rollout.revision.drafter_change import build_drafter_source, locate_drafter
from aerie.rollout.revision.recovery import read_recorded_resource


@dataclass(frozen=True)
class Step:
    """Input of one reconcile, and what it has found out."""

    snapshot: Snapshot
    desired: DesiredRevision
    stable: Arm
    rollout: InPlaceRollout
    pods: Sequence[EnginePod]
    now: datetime
    staging: StagingProgress | None = None
    progress: TrialProgress | None = None
    evaluation: EvaluationProgress | None = None
    promotion: PromotionProgress | None = None

    @property
    def spec(self) -> RolloutSpec:
        return self.snapshot.resource.spec.rollout

    @property
    def status(self) -> Status:
        return self.snapshot.resource.status or Status()

    @property
    def source(self) -> DrafterSource:
        return build_drafter_source(self.rollout.location)

    @property
    def analysis(self) -> AnalysisStatus | None:
        """The analysis of this rollout."""
        if self.progress is not None:
            return self.progress.analysis
        return self.status.analysis if self.rollout.trial_start_time is not None else None

    def in_phase(self, phase: InPlacePhase, **update: object) -> Step:
        """Return the step whose rollout enters a phase now."""
        return replace(self, rollout=self.rollout.model_copy(update={"phase": phase, "phase_start_time": self.now, **update}))


def with_trial_state(step: Step) -> Step:
    """Return the step whose rollout has the counts of its trial, and the pods that are on trial now."""
    if step.progress is None:
        return step
    trial, rollout = step.progress.trial, step.rollout
    update: dict[str, object] = {"state": trial.pack_state()}
    if step.progress.has_closed_pair and rollout.phase != "Evaluating":
        growth_step = compute_growth_step(step, trial)
        desired_count = trial_pods.count_desired_pods(step.spec, step.snapshot.resource.spec.replicas, growth_step)
        next_pair = trial.window_at(step.now).number // 2 + 1
        pods = trial_pods.update_trial_pods(rollout.pods, _find_available(step), desired_count, next_pair)
        update |= {"growth_step": growth_step, "pods": pods}
    return replace(step, rollout=rollout.model_copy(update=update))


def _find_available(step: Step) -> list[EnginePod]:
    """Return the pods that can be on trial."""
    served = step.rollout.replaced.digest if step.rollout.replaced is not None else None
    available = []
    for pod in order_for_trial(step.pods, served):
        preparation = check_preparation(pod, step.source, served, step.rollout.phase_start_time)
        prepared = preparation.drafter.drafter if preparation.drafter is not None else None
        if pod.is_ready and prepared is not None and prepared.digest == step.rollout.digest:
            available.append(pod)
    return available


def compute_growth_step(step: Step, trial: Trial) -> int:
    elapsed = timedelta(seconds=trial.elapsed_seconds(step.now))
    return max(step.rollout.growth_step, trial_pods.compute_growth_step(step.spec, elapsed))


def find_unreturned(step: Step) -> list[EnginePod]:
    """Return the pods that a rollback waits for; none where no pod was changed."""
    return find_unreturned_pods(step.pods, step.stable.in_place) if step.rollout.trial_start_time is not None else []


def compute_return_deadline(rollout: InPlaceRollout) -> datetime:
    """Return when the last lease has ended."""
    seconds = MAX_LEASE_SECONDS
    if rollout.first_window_seconds is not None and rollout.carryover_seconds is not None:
        seconds = compute_lease_seconds(max(rollout.first_window_seconds, 2 * rollout.carryover_seconds))
    return rollout.phase_start_time + timedelta(seconds=seconds)


def find_stable_location(step: Step) -> DrafterLocation | None:
    """Return where the drafter of the pods' arguments is; None where the revision's record is lost."""
    recorded = read_recorded_resource(step.snapshot, step.stable.revision)
    drafter = recorded.spec.drafter if recorded is not None else None
    return locate_drafter(drafter.source) if drafter is not None else None
