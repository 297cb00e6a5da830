"""Inputs of the tuner for one resource, from its spec, its status and the records of its revisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from aerie.api.speculation import LatencyObjective, TuningSpec
from aerie.api.status import Arm, SettingStatus, SpeculationStatus, Status
from aerie.controller.tuning.revision_facts import RevisionFactsCache
from aerie.engine.speculation import SpeculationSetting, SpeculationSettingError
from aerie.manifests import naming
from aerie.rollout.capacity.replica_counts import Capacity
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.revision.desired import read_status_setting
from aerie.rollout.trials import failures
from aerie.rollout.trials.effective_setting import find_last_unsuccessful_start
from aerie.tuning.decision.policy import FailedTrial, LatencyObjectives, TrialHistory
from aerie.tuning.telemetry import TelemetryScale
from aerie.tuning.worker.protocol import EngineFacts


@dataclass(frozen=True, slots=True)
class TuningInputs:
    """Inputs of the tuner for one resource."""

    uid: str | None
    revision: str
    """Revision that the stable pods serve."""
    engine_family: str
    """Hash of everything about the engines except the setting; empty where there is no record of it."""
    current_setting: SpeculationSetting | None
    """Setting of the stable revision; None where the status has none."""
    settings_by_deployment: Mapping[str, SpeculationSetting]
    """Settings by Deployment, of those whose pods are of this engine family."""
    engine: EngineFacts | None
    api_servers: int
    interval: float
    horizon: float
    cooldown: float
    max_speculative_tokens: int
    """Maximum number of draft tokens."""
    replicas: int
    borrowed_replicas: int
    """Replicas whose capacity a canary and its control use."""
    surge_pods: int
    """Pods of canary and control in excess of the replicas."""
    failed_settings: tuple[FailedTrial, ...]
    """Settings whose trials have failed."""
    explored_setting: SpeculationSetting | None
    """Setting of a canary under analysis that explores."""
    objectives: LatencyObjectives
    history: TrialHistory

    @property
    def scale(self) -> TelemetryScale:
        """Lengths of blocks and cells."""
        return TelemetryScale.from_decision_interval(self.interval, self.horizon)


def build_tuning_inputs(snapshot: Snapshot, status: Status, stable: Arm, revision_facts: RevisionFactsCache) -> TuningInputs:
    """Return the inputs for tuning the resource."""
    resource, tuning = snapshot.resource, snapshot.resource.spec.speculation.tuning
    facts = revision_facts.get(snapshot, stable.served_revision)
    settings: dict[str, SpeculationSetting] = {}
    capacity = Capacity.from_spec(resource.spec.replicas, resource.spec.rollout.canary)
    for arm, control in _iter_tuned_arms(status):
        setting = parse_status_setting(arm.setting)
        if (
            setting is not None
            and facts is not None
            and revision_facts.engine_family(snapshot, arm.served_revision) == facts.engine_family
        ):
            settings[naming.deployment_name(resource.metadata.name, arm.revision, control=control)] = setting
    return TuningInputs(
        uid=resource.metadata.uid,
        revision=stable.served_revision,
        engine_family=facts.engine_family if facts else "",
        current_setting=parse_status_setting(stable.setting),
        settings_by_deployment=settings,
        engine=facts.engine if facts else None,
        api_servers=facts.api_servers if facts else 1,
        interval=tuning.decision_interval.total_seconds(),
        horizon=tuning.history_window.total_seconds(),
        cooldown=tuning.cooldown_duration.total_seconds(),
        max_speculative_tokens=max(tuning.max_speculative_tokens, stable.setting.num_speculative_tokens if stable.setting else 0),
        replicas=resource.spec.replicas,
        borrowed_replicas=resource.spec.replicas - capacity.min_ready_pods,
        surge_pods=capacity.max_total_pods - resource.spec.replicas,
        failed_settings=_list_failed_settings(status.speculation, tuning),
        explored_setting=_find_explored_setting(status),
        objectives=_build_objectives(tuning.slo),
        history=_build_tuning_history(status.speculation),
    )


def _find_explored_setting(status: Status) -> SpeculationSetting | None:
    trial, canary = status.speculation.trial if status.speculation else None, status.canary
    if trial is None or canary is None or (canary.revision, canary.phase) != (trial.revision, "Analyzing"):
        return None
    return parse_status_setting(trial.setting) if trial.purpose == "Explore" else None


def _build_objectives(slo: LatencyObjective | None) -> LatencyObjectives:
    if slo is None:
        return LatencyObjectives()
    per_token, first_token = slo.time_per_output_token, slo.time_to_first_token
    return LatencyObjectives(
        per_token.total_seconds() if per_token else None, first_token.total_seconds() if first_token else None, slo.percentile
    )


def _build_tuning_history(speculation_status: SpeculationStatus | None) -> TrialHistory:
    if speculation_status is None:
        return TrialHistory()
    return TrialHistory(
        changed_at=_to_timestamp(speculation_status.last_change_time),
        rolled_back_at=_to_timestamp(speculation_status.last_rollback_time),
        consecutive_failures=speculation_status.consecutive_failures or 0,
        inconclusive_at=_last_trial_ended_at(speculation_status, "Inconclusive"),
        inconclusive_count=max(1, sum(trial.result == "Inconclusive" for trial in speculation_status.trials)),
        trial_started_at=_to_timestamp(find_last_unsuccessful_start(speculation_status)),
        last_drafted_at=_to_timestamp(speculation_status.last_speculation_time),
        exploration_times=tuple(explored_at.timestamp() for explored_at in speculation_status.exploration_times),
    )


def _list_failed_settings(speculation_status: SpeculationStatus | None, tuning: TuningSpec) -> tuple[FailedTrial, ...]:
    """Return the settings with failed trials.

    Trials that failed for a lack of room in the cluster say nothing about their settings.
    """
    failed_trials = []
    for failure in speculation_status.failures if speculation_status is not None else ():
        setting = parse_status_setting(failure.setting)
        if setting is not None and failure.reason != "InsufficientCapacity":
            retry_at = failures.compute_retry_time(failure, tuning.cooldown_duration, tuning.decision_interval)
            failed_trials.append(
                FailedTrial(setting, retry_at.timestamp(), failure.last_start_time.timestamp(), failure.reason == "Regressed")
            )
    return tuple(failed_trials)


def _last_trial_ended_at(speculation_status: SpeculationStatus, result: str) -> float | None:
    """Return when a trial last ended with this result."""
    return _to_timestamp(next((trial.completion_time for trial in speculation_status.trials if trial.result == result), None))


def _to_timestamp(time: datetime | None) -> float | None:
    return None if time is None else time.timestamp()


def parse_status_setting(status_setting: SettingStatus | None) -> SpeculationSetting | None:
    """Return the status' setting as the tuner's type; None where it has no valid one."""
    try:
        return None if status_setting is None else read_status_setting(status_setting)
    except SpeculationSettingError:
        return None


def _iter_tuned_arms(status: Status) -> Iterator[tuple[Arm, bool]]:
    """Yield the arms whose windows count, and whether each is control.

    Canary and control on different hardware are left out, and all arms during a rollout in place: its pods change their drafter.
    """
    if status.in_place_rollout is not None:
        return
    canary = status.canary if status.analysis is None or not status.analysis.hardware_mismatch else None
    for arm in (status.stable, canary, status.previous):
        if arm is not None:
            yield arm, False
    if status.stable is not None and canary is not None and canary.control is not None:
        yield status.stable, True
