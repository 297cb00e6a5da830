"""What the tuner holds of one resource: what is tuned there, the last scrape of each pod, and the windows between scrapes.

    reading of a pod ─► window since the one before, of the same run ─► Telemetry since the last decision
                        with the setting of the pod's Deployment

Guarantees: a window is of one run of one pod of an arm that differs from the stable one in its setting alone, and is not known to
be compared on unlike hardware; one over a gap or a restart is left out and counted. A pod costs one scrape, which the reader of
figures holds anyway; a resource without requests costs no telemetry at all, and what is said of it here. Not guaranteed: that a
Deployment's pods run the setting that the status says; the windows themselves tell (`telemetry.wrong_setting`).

Windows of engines of unlike image, version, arguments, variables, target or drafter (`Facts.family`) are never added up: vLLM
0.33 skips drafts that nobody can use (v1/core/sched/scheduler.py, `_drafts_unused`), so that a step of 0.32 tells nothing of a
step of 0.33. Not guaranteed: that a tag stays with one release where no version is written.
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
"""Seconds of a window, where the pods are not read more often than that."""
MAX_TUNING_WINDOW_INTERVALS = 5.0
"""Intervals of a window; beyond them requests may have come and gone unseen."""


@dataclass(frozen=True, slots=True)
class TuningInputs:
    """What is tuned."""

    uid: str | None
    revision: str
    """The stable one."""
    engine_family: str
    """A hash of what the engines are, the setting apart; empty where no record tells."""
    current_setting: SpeculationSetting | None
    """None where the status does not say."""
    settings_by_deployment: Mapping[str, SpeculationSetting]
    """By Deployment, of those whose pods tell something of this family."""
    engine: EngineFacts | None
    api_servers: int
    interval: float
    horizon: float
    cooldown: float
    max_speculative_tokens: int
    """Draft tokens."""
    replicas: int
    borrowed_replicas: int
    """Of them, those whose places a canary and its control take."""
    surge_pods: int
    """Pods that canary and control take beyond the replicas."""
    failed_settings: tuple[FailedTrial, ...]
    """Settings whose trials have failed."""
    explored_setting: SpeculationSetting | None
    """What a canary under analysis runs to explore."""
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
    """Of one resource. Times are seconds of Unix time."""

    inputs: TuningInputs
    startup_seconds: float | None = None
    """Seconds from the start of an engine until it served, where known."""
    tuning_record: TuningRecord | None = None
    recommendation: Recommendation | None = None
    pending_telemetry: TuningTelemetry | None = None
    """What came since the last decision; None for nothing."""
    sample_count: int = 0
    """Readings since then."""
    last_scrapes: dict[str, _LastScrape] = field(default_factory=dict)

    def record_sample(self, pod: str, endpoint: EngineEndpoint, sampled_at: float, sample: Sample, interval: float) -> None:
        """A reading of a pod, which is read each `interval` seconds."""
        setting, tail = self.inputs.settings_by_deployment.get(endpoint.deployment), self.last_scrapes.get(pod)
        self.sample_count += 1
        if setting is None:
            self.last_scrapes.pop(pod, None)
            return
        if (
            tail is not None
            and tail.run_id == endpoint.run_id
            and sampled_at - tail.sampled_at < min(MIN_TUNING_WINDOW_SECONDS, 0.9 * interval)
        ):
            return  # too short to tell anything: from the same scrape to the next one
        self.last_scrapes[pod] = _LastScrape(endpoint.run_id, sampled_at, sample)
        if tail is None:
            return
        if tail.run_id != endpoint.run_id or isinstance(window := diff_samples(tail.sample, sample), CounterReset):
            self._ensure_telemetry().record_exclusion("between two scrapes the engine began anew, or its counters fell.")
            return
        if sampled_at - tail.sampled_at > MAX_TUNING_WINDOW_INTERVALS * interval:
            self._ensure_telemetry().record_exclusion("the pod was not read for more than five intervals.")
            return
        if not window.request_steps and not window.first_tokens:
            return
        started = (
            sample.process_start_time if sample.process_start_time is not None else tail.sampled_at - 2 * self.inputs.scale.warm
        )
        self._ensure_telemetry().add(ReplicaWindow(pod, sampled_at, setting, window, tail.sampled_at - started))

    def retain_pods(self, pods: frozenset[str]) -> None:
        """Only these pods are there."""
        for gone in self.last_scrapes.keys() - pods:
            del self.last_scrapes[gone]

    @property
    def queued_requests(self) -> float:
        """Requests in the queues, of all pods as they were read last."""
        return sum(tail.sample.gauges.waiting_requests or 0.0 for tail in self.last_scrapes.values())

    def take_telemetry(self) -> TuningTelemetry | None:
        """What came since the last decision; from now on it begins anew."""
        found, self.pending_telemetry, self.sample_count = self.pending_telemetry, None, 0
        return found

    def restore_telemetry(self, telemetry: TuningTelemetry) -> None:
        """Nothing was decided on that."""
        if self.pending_telemetry is not None and self.pending_telemetry.scale == telemetry.scale:
            telemetry.merge(self.pending_telemetry)
        self.pending_telemetry = telemetry

    def _ensure_telemetry(self) -> TuningTelemetry:
        if self.pending_telemetry is None:
            subject = self.inputs
            self.pending_telemetry = TuningTelemetry(subject.horizon, subject.api_servers, subject.scale)
        return self.pending_telemetry


def build_tuning_inputs(snapshot: Snapshot, status: Status, stable: Arm, revision_facts: RevisionFactsCache) -> TuningInputs:
    """What there is to be tuned."""
    resource, tuning = snapshot.resource, snapshot.resource.spec.speculation.tuning
    facts = revision_facts.get(snapshot, stable.revision)
    settings: dict[str, SpeculationSetting] = {}
    places = Capacity.from_spec(resource.spec.replicas, resource.spec.rollout.canary)
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
        interval=tuning.interval.total_seconds(),
        horizon=tuning.history.total_seconds(),
        cooldown=tuning.cooldown.total_seconds(),
        max_speculative_tokens=max(tuning.max_tokens, stable.setting.tokens if stable.setting else 0),
        replicas=resource.spec.replicas,
        borrowed_replicas=resource.spec.replicas - places.min_ready_pods,
        surge_pods=places.max_total_pods - resource.spec.replicas,
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
    per_token, first = slo.time_per_output_token, slo.time_to_first_token
    return LatencyObjectives(
        per_token.total_seconds() if per_token else None, first.total_seconds() if first else None, slo.percentile
    )


def _build_tuning_history(speculation_status: SpeculationStatus | None) -> TrialHistory:
    if speculation_status is None:
        return TrialHistory()
    return TrialHistory(
        changed=_to_timestamp(speculation_status.changed_at),
        rolled_back=_to_timestamp(speculation_status.rolled_back_at),
        failed=speculation_status.failed or 0,
        undecided=_last_trial_ended_at(speculation_status, "Undecided"),
        undecided_times=max(1, sum(one.result == "Undecided" for one in speculation_status.changes)),
        tried=_to_timestamp(find_last_unsuccessful_start(speculation_status)),
        speculated=_to_timestamp(speculation_status.speculated_at),
        explored=tuple(one.timestamp() for one in speculation_status.explored),
    )


def _list_failed_settings(speculation_status: SpeculationStatus | None, tuning: TuningSpec) -> tuple[FailedTrial, ...]:
    """Of settings that the cluster has had room for: a lack of that says nothing of them."""
    found = []
    for one in speculation_status.failures if speculation_status is not None else ():
        setting = parse_status_setting(one.setting)
        if setting is not None and one.reason != "NoRoom":
            until = failures.compute_retry_time(one, tuning.cooldown, tuning.interval)
            found.append(FailedTrial(setting, until.timestamp(), one.began_at.timestamp(), one.reason == "Worse"))
    return tuple(found)


def _last_trial_ended_at(speculation_status: SpeculationStatus, result: str) -> float | None:
    """When a trial last ended so."""
    return _to_timestamp(next((one.ended_at for one in speculation_status.changes if one.result == result), None))


def _to_timestamp(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()


@dataclass(frozen=True, slots=True)
class RevisionFacts:
    """Of a revision, from its record."""

    engine_family: str
    """A hash of spec.engine (image and version in it), target, drafter, draft sampling and engine options."""
    engine: EngineFacts
    api_servers: int


class RevisionFactsCache:
    """Reads what each revision of a resource is, once."""

    def __init__(self) -> None:
        self._facts_by_revision: dict[str, RevisionFacts | None] = {}

    def engine_family(self, snapshot: Snapshot, revision: str) -> str | None:
        """What its engines are, the setting apart."""
        found = self.get(snapshot, revision)
        return None if found is None else found.engine_family

    def get(self, snapshot: Snapshot, revision: str) -> RevisionFacts | None:
        """None where there is no record of it, or one that cannot be read."""
        if revision not in self._facts_by_revision:
            child = snapshot.child("ConfigMap", preflight_job.preflight_job_name(snapshot.resource.metadata.name, revision))
            if child is None:
                return None
            self._facts_by_revision = {
                **dict(list(self._facts_by_revision.items())[-3:]),
                revision: _parse_revision_facts((child.get("data") or {}).get("resource.json")),
            }
        return self._facts_by_revision[revision]


def _parse_revision_facts(text: str | None) -> RevisionFacts | None:
    try:
        document = json.loads(text or "")
        spec = SpeculativeDeployment.from_dict(document).spec
        flags = list(spec.engine.args)
        servers = arguments.parse_arguments(flags).api_server_count
        version = releases.resolve_engine_version(spec.engine.image, spec.engine.version)
        told = {name: document["spec"].get(name) for name in ("model", "engine", "drafter")}
        # What decides about acceptance and step times besides; where it is not written, families stay what they were.
        added = {"draftSampling": spec.speculation.draft_sampling, "engineOptions": spec.speculation.engine_options}
        told |= {name: value for name, value in added.items() if value}
    except (ValueError, LookupError, TypeError):
        return None
    if isinstance(version, releases.UnknownVersion):
        return None
    engine = EngineFacts(
        version=str(version.version),
        arguments=tuple(flags),
        method=spec.drafter.method if spec.drafter is not None else "eagle3",
        environment={one.name: one.value or "" for one in spec.engine.env if one.value_from is None},
    )
    family = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
    return RevisionFacts(family, engine, servers)


def parse_status_setting(status_setting: SettingStatus | None) -> SpeculationSetting | None:
    """The status' setting as the tuner has it; None where it says none that is one."""
    try:
        return None if status_setting is None else read_status_setting(status_setting)
    except SpeculationSettingError:
        return None


def _iter_tuned_arms(status: Status) -> Iterator[tuple[Arm, bool]]:
    """The arms that tell of their settings, and whether each is control; not canary and control on unlike hardware."""
    canary = status.canary if status.analysis is None or not status.analysis.unlike else None
    for arm in (status.stable, canary, status.previous):
        if arm is not None:
            yield arm, False
    if status.stable is not None and canary is not None and canary.control is not None:
        yield status.stable, True


def median_startup_seconds(pods: tuple[KubernetesObject, ...]) -> float | None:
    """Seconds from the start of an engine's container until its pod was ready, the median of pods that never restarted."""
    found = [seconds for pod in pods if (seconds := _seconds_to_ready(pod)) is not None]
    return statistics.median(found) if found else None


def _seconds_to_ready(pod: KubernetesObject) -> float | None:
    status: Mapping[str, Any] = pod.get("status") or {}
    containers: list[KubernetesObject] = status.get("containerStatuses") or []
    conditions: list[KubernetesObject] = status.get("conditions") or []
    engine = next((one for one in containers if one.get("name") == naming.ENGINE_CONTAINER), _EMPTY_OBJECT)
    ready = next((one for one in conditions if (one.get("type"), one.get("status")) == ("Ready", "True")), _EMPTY_OBJECT)
    started = ((engine.get("state") or {}).get("running") or {}).get("startedAt")
    at = ready.get("lastTransitionTime")
    if engine.get("restartCount") or not started or not at:
        return None
    seconds = (datetime.fromisoformat(at) - datetime.fromisoformat(started)).total_seconds()
    return seconds if seconds > 0 else None
