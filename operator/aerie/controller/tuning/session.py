"""State of the tuner for one resource: its inputs, the last scrape of each pod, and the windows between scrapes.

    sample of a pod ─► window since the previous one, of the same run ─► TuningTelemetry since the last decision
                       with the setting of the pod's Deployment

Guarantees: a window is of one run of one pod. Its arm differs from the stable one in the setting alone, and is not known to be
compared on different hardware. A window over a gap or a restart is excluded and counted. A pod costs one sample, which the
scraper holds anyway. A resource without requests costs only this module's state, and no telemetry. Not guaranteed: that a
Deployment's pods run the setting in the status; the windows themselves show it
(`telemetry.setting_mismatch_reason`).

Windows of engines with a different image, version, arguments, variables, target or drafter (`RevisionFacts.engine_family`) are
never added up. For example, vLLM 0.33 skips drafts that cannot be used (v1/core/sched/scheduler.py, `_drafts_unused`), so the
step times of 0.32 do not apply to 0.33. Not guaranteed: that a tag stays with one release where no version is written.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.speculation import LatencyObjective, TuningSpec
from aerie.api.status import Arm, SettingStatus, SpeculationStatus, Status
from aerie.controller.scraping.targets import EngineEndpoint
from aerie.engine import arguments, releases
from aerie.engine.metrics.sample import CounterReset, Sample, diff_samples
from aerie.engine.speculation import SpeculationSetting, SpeculationSettingError
from aerie.manifests import naming, preflight_job
from aerie.manifests.tuning_config_map import TuningRecord
from aerie.rollout.capacity.replica_counts import Capacity
from aerie.rollout.facts.snapshot import KubernetesObject, Snapshot
from aerie.rollout.revision.desired import read_status_setting
from aerie.rollout.trials import failures
from aerie.rollout.trials.effective_setting import find_last_unsuccessful_start
from aerie.tuning.decision.policy import FailedTrial, LatencyObjectives, TrialHistory
from aerie.tuning.recommendation import Recommendation
from aerie.tuning.telemetry import ReplicaWindow, TelemetryScale, TuningTelemetry
from aerie.tuning.worker.protocol import EngineFacts

_EMPTY_OBJECT: KubernetesObject = {}
MIN_TUNING_WINDOW_SECONDS = 10.0
"""Minimum duration of a window in seconds, unless the pods are scraped less often."""
MAX_TUNING_WINDOW_INTERVALS = 5.0
"""Maximum duration of a window in intervals; during longer ones requests may have come and gone unseen."""


@dataclass(frozen=True, slots=True)
class TuningInputs:
    """Inputs of the tuner for one resource."""

    uid: str | None
    revision: str
    """Stable revision."""
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


@dataclass(slots=True)
class _LastScrape:
    run_id: str
    sampled_at: float
    sample: Sample


@dataclass(eq=False, slots=True)
class TuningSession:
    """State of the tuner for one resource. Times are seconds of Unix time."""

    inputs: TuningInputs
    startup_seconds: float | None = None
    """Seconds from the start of an engine until it was ready, where known."""
    tuning_record: TuningRecord | None = None
    recommendation: Recommendation | None = None
    pending_telemetry: TuningTelemetry | None = None
    """Telemetry since the last decision; None when there is none."""
    sample_count: int = 0
    """Samples since the last decision."""
    last_scrapes: dict[str, _LastScrape] = field(default_factory=dict)

    def record_sample(self, pod: str, endpoint: EngineEndpoint, sampled_at: float, sample: Sample, interval: float) -> None:
        """Record a sample of a pod that is scraped each `interval` seconds."""
        setting, last_scrape = self.inputs.settings_by_deployment.get(endpoint.deployment), self.last_scrapes.get(pod)
        self.sample_count += 1
        if setting is None:
            self.last_scrapes.pop(pod, None)
            return
        if (
            last_scrape is not None
            and last_scrape.run_id == endpoint.run_id
            and sampled_at - last_scrape.sampled_at < min(MIN_TUNING_WINDOW_SECONDS, 0.9 * interval)
        ):
            return  # too short: the window continues from the same scrape to the next one
        self.last_scrapes[pod] = _LastScrape(endpoint.run_id, sampled_at, sample)
        if last_scrape is None:
            return
        if last_scrape.run_id != endpoint.run_id or isinstance(window := diff_samples(last_scrape.sample, sample), CounterReset):
            self._ensure_telemetry().record_exclusion("between two scrapes the engine restarted, or its counters decreased.")
            return
        if sampled_at - last_scrape.sampled_at > MAX_TUNING_WINDOW_INTERVALS * interval:
            self._ensure_telemetry().record_exclusion("the pod was not scraped for more than five intervals.")
            return
        if not window.request_steps and not window.first_tokens:
            return
        engine_started_at = (
            sample.process_start_time
            if sample.process_start_time is not None
            else last_scrape.sampled_at - 2 * self.inputs.scale.warm_up_seconds
        )
        self._ensure_telemetry().add(ReplicaWindow(pod, sampled_at, setting, window, last_scrape.sampled_at - engine_started_at))

    def retain_pods(self, pods: frozenset[str]) -> None:
        """Drop the state of all pods but these."""
        for removed in self.last_scrapes.keys() - pods:
            del self.last_scrapes[removed]

    @property
    def queued_requests(self) -> float:
        """Requests in the queues of all pods, as of their last scrapes."""
        return sum(scrape.sample.gauges.waiting_requests or 0.0 for scrape in self.last_scrapes.values())

    def take_telemetry(self) -> TuningTelemetry | None:
        """Return the telemetry since the last decision, and start with an empty one."""
        telemetry, self.pending_telemetry, self.sample_count = self.pending_telemetry, None, 0
        return telemetry

    def restore_telemetry(self, telemetry: TuningTelemetry) -> None:
        """Put back telemetry that no decision was made on."""
        if self.pending_telemetry is not None and self.pending_telemetry.scale == telemetry.scale:
            telemetry.merge(self.pending_telemetry)
        self.pending_telemetry = telemetry

    def _ensure_telemetry(self) -> TuningTelemetry:
        if self.pending_telemetry is None:
            inputs = self.inputs
            self.pending_telemetry = TuningTelemetry(inputs.horizon, inputs.api_servers, inputs.scale)
        return self.pending_telemetry


def build_tuning_inputs(snapshot: Snapshot, status: Status, stable: Arm, revision_facts: RevisionFactsCache) -> TuningInputs:
    """Return the inputs for tuning the resource."""
    resource, tuning = snapshot.resource, snapshot.resource.spec.speculation.tuning
    facts = revision_facts.get(snapshot, stable.revision)
    settings: dict[str, SpeculationSetting] = {}
    capacity = Capacity.from_spec(resource.spec.replicas, resource.spec.rollout.canary)
    for arm, control in _iter_tuned_arms(status):
        setting = parse_status_setting(arm.setting)
        if (
            setting is not None
            and facts is not None
            and revision_facts.engine_family(snapshot, arm.revision) == facts.engine_family
        ):
            settings[naming.deployment_name(resource.metadata.name, arm.revision, control=control)] = setting
    return TuningInputs(
        uid=resource.metadata.uid,
        revision=stable.revision,
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
                FailedTrial(setting, retry_at.timestamp(), failure.first_failure_time.timestamp(), failure.reason == "Regressed")
            )
    return tuple(failed_trials)


def _last_trial_ended_at(speculation_status: SpeculationStatus, result: str) -> float | None:
    """Return when a trial last ended with this result."""
    return _to_timestamp(next((trial.completion_time for trial in speculation_status.trials if trial.result == result), None))


def _to_timestamp(time: datetime | None) -> float | None:
    return None if time is None else time.timestamp()


@dataclass(frozen=True, slots=True)
class RevisionFacts:
    """Facts about a revision, from its record."""

    engine_family: str
    """Hash of spec.engine (with image and version), target, drafter, draft sampling and engine options."""
    engine: EngineFacts
    api_servers: int


class RevisionFactsCache:
    """Cache of the facts about a resource's revisions, each read once."""

    def __init__(self) -> None:
        self._facts_by_revision: dict[str, RevisionFacts | None] = {}

    def engine_family(self, snapshot: Snapshot, revision: str) -> str | None:
        """Return the hash of the revision's engines, except for the setting; None without a record."""
        facts = self.get(snapshot, revision)
        return None if facts is None else facts.engine_family

    def get(self, snapshot: Snapshot, revision: str) -> RevisionFacts | None:
        """Return the facts about the revision; None where there is no record of it, or an unreadable one."""
        if revision not in self._facts_by_revision:
            record = snapshot.child("ConfigMap", preflight_job.preflight_job_name(snapshot.resource.metadata.name, revision))
            if record is None:
                return None
            self._facts_by_revision = {
                **dict(list(self._facts_by_revision.items())[-3:]),
                revision: _parse_revision_facts((record.get("data") or {}).get("resource.json")),
            }
        return self._facts_by_revision[revision]


def _parse_revision_facts(text: str | None) -> RevisionFacts | None:
    try:
        document = json.loads(text or "")
        spec = SpeculativeDeployment.from_dict(document).spec
        engine_arguments = list(spec.engine.args)
        api_servers = arguments.parse_arguments(engine_arguments).api_server_count
        version = releases.resolve_engine_version(spec.engine.image, spec.engine.version)
        family_facts = {name: document["spec"].get(name) for name in ("model", "engine", "drafter")}
        # These affect acceptance and step times too. Where they are not set, the hash is that of earlier operators.
        optional_facts = {"draftSampling": spec.speculation.draft_sampling, "engineOptions": spec.speculation.engine_options}
        family_facts |= {name: value for name, value in optional_facts.items() if value}
    except (ValueError, LookupError, TypeError):
        return None
    if isinstance(version, releases.UnknownVersion):
        return None
    engine = EngineFacts(
        version=str(version.version),
        arguments=tuple(engine_arguments),
        method=spec.drafter.method if spec.drafter is not None else "eagle3",
        environment={variable.name: variable.value or "" for variable in spec.engine.env if variable.value_from is None},
    )
    family = hashlib.sha256(json.dumps(family_facts, sort_keys=True).encode()).hexdigest()[:16]
    return RevisionFacts(family, engine, api_servers)


def parse_status_setting(status_setting: SettingStatus | None) -> SpeculationSetting | None:
    """Return the status' setting as the tuner's type; None where it has no valid one."""
    try:
        return None if status_setting is None else read_status_setting(status_setting)
    except SpeculationSettingError:
        return None


def _iter_tuned_arms(status: Status) -> Iterator[tuple[Arm, bool]]:
    """Yield the arms whose windows count, and whether each is control. Canary and control on different hardware are left out."""
    canary = status.canary if status.analysis is None or not status.analysis.hardware_mismatch else None
    for arm in (status.stable, canary, status.previous):
        if arm is not None:
            yield arm, False
    if status.stable is not None and canary is not None and canary.control is not None:
        yield status.stable, True


def median_startup_seconds(pods: tuple[KubernetesObject, ...]) -> float | None:
    """Return the seconds from the start of an engine's container until its pod was ready: the median of pods that
    never restarted.
    """
    startup_seconds = [seconds for pod in pods if (seconds := _seconds_to_ready(pod)) is not None]
    return statistics.median(startup_seconds) if startup_seconds else None


def _seconds_to_ready(pod: KubernetesObject) -> float | None:
    status: Mapping[str, Any] = pod.get("status") or {}
    containers: list[KubernetesObject] = status.get("containerStatuses") or []
    conditions: list[KubernetesObject] = status.get("conditions") or []
    engine = next((item for item in containers if item.get("name") == naming.ENGINE_CONTAINER), _EMPTY_OBJECT)
    ready = next((item for item in conditions if (item.get("type"), item.get("status")) == ("Ready", "True")), _EMPTY_OBJECT)
    started_at = ((engine.get("state") or {}).get("running") or {}).get("startedAt")
    ready_at = ready.get("lastTransitionTime")
    if engine.get("restartCount") or not started_at or not ready_at:
        return None
    seconds = (datetime.fromisoformat(ready_at) - datetime.fromisoformat(started_at)).total_seconds()
    return seconds if seconds > 0 else None
