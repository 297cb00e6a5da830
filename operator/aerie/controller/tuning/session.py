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
from aerie.api.speculation import LatencyObjective, Tuning
from aerie.api.status import Arm, SpeculationStatus, Status
from aerie.api.status import Setting as StatusSetting
from aerie.controller.scraping.targets import Target
from aerie.engine import arguments, releases
from aerie.engine.metrics.sample import Reset, Sample, between
from aerie.engine.speculation import Setting, SettingError
from aerie.manifests import naming, preflight_job
from aerie.manifests.tuning_config_map import Kept
from aerie.rollout.capacity.replica_counts import Places
from aerie.rollout.facts.snapshot import Object, Observed
from aerie.rollout.revision.desired import read_shown
from aerie.rollout.trials import failures
from aerie.rollout.trials.effective_setting import unproven
from aerie.tuning.decision.policy import Failed, History, Objectives
from aerie.tuning.recommendation import Advice
from aerie.tuning.telemetry import Reading, Scale, Telemetry
from aerie.tuning.worker.protocol import EngineFacts

_NOTHING: Object = {}
SHORTEST = 10.0
"""Seconds of a window, where the pods are not read more often than that."""
LONGEST = 5.0
"""Intervals of a window; beyond them requests may have come and gone unseen."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is tuned."""

    uid: str | None
    revision: str
    """The stable one."""
    family: str
    """A hash of what the engines are, the setting apart; empty where no record tells."""
    current: Setting | None
    """None where the status does not say."""
    settings: Mapping[str, Setting]
    """By Deployment, of those whose pods tell something of this family."""
    engine: EngineFacts | None
    api_servers: int
    interval: float
    horizon: float
    cooldown: float
    most: int
    """Draft tokens."""
    replicas: int
    lent: int
    """Of them, those whose places a canary and its control take."""
    extra: int
    """Pods that canary and control take beyond the replicas."""
    failed: tuple[Failed, ...]
    """Settings whose trials have failed."""
    exploring: Setting | None
    """What a canary under analysis runs to explore."""
    objectives: Objectives
    history: History

    @property
    def scale(self) -> Scale:
        """Lengths of blocks and cells."""
        return Scale.of(self.interval, self.horizon)


@dataclass(slots=True)
class _Tail:
    run: str
    at: float
    sample: Sample


@dataclass(eq=False, slots=True)
class Tuned:
    """Of one resource. Times are seconds of Unix time."""

    subject: Subject
    reload: float | None = None
    """Seconds from the start of an engine until it served, where known."""
    kept: Kept | None = None
    advice: Advice | None = None
    since: Telemetry | None = None
    """What came since the last decision; None for nothing."""
    read: int = 0
    """Readings since then."""
    tails: dict[str, _Tail] = field(default_factory=dict)

    def hear(self, pod: str, target: Target, at: float, sample: Sample, interval: float) -> None:
        """A reading of a pod, which is read each `interval` seconds."""
        setting, tail = self.subject.settings.get(target.group), self.tails.get(pod)
        self.read += 1
        if setting is None:
            self.tails.pop(pod, None)
            return
        if tail is not None and tail.run == target.run and at - tail.at < min(SHORTEST, 0.9 * interval):
            return  # too short to tell anything: from the same scrape to the next one
        self.tails[pod] = _Tail(target.run, at, sample)
        if tail is None:
            return
        if tail.run != target.run or isinstance(window := between(tail.sample, sample), Reset):
            self._telemetry().leave_out("between two scrapes the engine began anew, or its counters fell.")
            return
        if at - tail.at > LONGEST * interval:
            self._telemetry().leave_out("the pod was not read for more than five intervals.")
            return
        if not window.request_steps and not window.first_tokens:
            return
        started = sample.started if sample.started is not None else tail.at - 2 * self.subject.scale.warm
        self._telemetry().add(Reading(pod, at, setting, window, tail.at - started))

    def forget_others(self, pods: frozenset[str]) -> None:
        """Only these pods are there."""
        for gone in self.tails.keys() - pods:
            del self.tails[gone]

    @property
    def waiting(self) -> float:
        """Requests in the queues, of all pods as they were read last."""
        return sum(tail.sample.gauges.waiting or 0.0 for tail in self.tails.values())

    def taken(self) -> Telemetry | None:
        """What came since the last decision; from now on it begins anew."""
        found, self.since, self.read = self.since, None, 0
        return found

    def given_back(self, telemetry: Telemetry) -> None:
        """Nothing was decided on that."""
        if self.since is not None and self.since.scale == telemetry.scale:
            telemetry.merge(self.since)
        self.since = telemetry

    def _telemetry(self) -> Telemetry:
        if self.since is None:
            subject = self.subject
            self.since = Telemetry(subject.horizon, subject.api_servers, subject.scale)
        return self.since


def subject(observed: Observed, status: Status, stable: Arm, records: Records) -> Subject:
    """What there is to be tuned."""
    resource, tuning = observed.resource, observed.resource.spec.speculation.tuning
    facts = records.of(observed, stable.revision)
    settings: dict[str, Setting] = {}
    places = Places.of(resource.spec.replicas, resource.spec.rollout.canary)
    for arm, control in _arms(status):
        setting = setting_of(arm.setting)
        if setting is not None and facts is not None and records.family(observed, arm.revision) == facts.family:
            settings[naming.deployment(resource.metadata.name, arm.revision, control=control)] = setting
    return Subject(
        uid=resource.metadata.uid,
        revision=stable.revision,
        family=facts.family if facts else "",
        current=setting_of(stable.setting),
        settings=settings,
        engine=facts.engine if facts else None,
        api_servers=facts.api_servers if facts else 1,
        interval=tuning.interval.total_seconds(),
        horizon=tuning.history.total_seconds(),
        cooldown=tuning.cooldown.total_seconds(),
        most=max(tuning.max_tokens, stable.setting.tokens if stable.setting else 0),
        replicas=resource.spec.replicas,
        lent=resource.spec.replicas - places.floor,
        extra=places.total - resource.spec.replicas,
        failed=_failed(status.speculation, tuning),
        exploring=_exploring(status),
        objectives=_objectives(tuning.slo),
        history=_history(status.speculation),
    )


def _exploring(status: Status) -> Setting | None:
    trial, canary = status.speculation.trial if status.speculation else None, status.canary
    if trial is None or canary is None or (canary.revision, canary.phase) != (trial.revision, "Analyzing"):
        return None
    return setting_of(trial.setting) if trial.purpose == "Explore" else None


def _objectives(slo: LatencyObjective | None) -> Objectives:
    if slo is None:
        return Objectives()
    per_token, first = slo.time_per_output_token, slo.time_to_first_token
    return Objectives(per_token.total_seconds() if per_token else None, first.total_seconds() if first else None, slo.percentile)


def _history(told: SpeculationStatus | None) -> History:
    if told is None:
        return History()
    return History(
        changed=_seconds(told.changed_at),
        rolled_back=_seconds(told.rolled_back_at),
        failed=told.failed or 0,
        undecided=_last(told, "Undecided"),
        undecided_times=max(1, sum(one.result == "Undecided" for one in told.changes)),
        tried=_seconds(unproven(told)),
        speculated=_seconds(told.speculated_at),
        explored=tuple(one.timestamp() for one in told.explored),
    )


def _failed(told: SpeculationStatus | None, tuning: Tuning) -> tuple[Failed, ...]:
    """Of settings that the cluster has had room for: a lack of that says nothing of them."""
    found = []
    for one in told.failures if told is not None else ():
        setting = setting_of(one.setting)
        if setting is not None and one.reason != "NoRoom":
            until = failures.until(one, tuning.cooldown, tuning.interval)
            found.append(Failed(setting, until.timestamp(), one.began_at.timestamp(), one.reason == "Worse"))
    return tuple(found)


def _last(told: SpeculationStatus, result: str) -> float | None:
    """When a trial last ended so."""
    return _seconds(next((one.ended_at for one in told.changes if one.result == result), None))


def _seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()


@dataclass(frozen=True, slots=True)
class Facts:
    """Of a revision, from its record."""

    family: str
    """A hash of spec.engine (image and version in it), target, drafter, draft sampling and engine options."""
    engine: EngineFacts
    api_servers: int


class Records:
    """Reads what each revision of a resource is, once."""

    def __init__(self) -> None:
        self._known: dict[str, Facts | None] = {}

    def family(self, observed: Observed, revision: str) -> str | None:
        """What its engines are, the setting apart."""
        found = self.of(observed, revision)
        return None if found is None else found.family

    def of(self, observed: Observed, revision: str) -> Facts | None:
        """None where there is no record of it, or one that cannot be read."""
        if revision not in self._known:
            child = observed.child("ConfigMap", preflight_job.name(observed.resource.metadata.name, revision))
            if child is None:
                return None
            self._known = {
                **dict(list(self._known.items())[-3:]),
                revision: _facts((child.get("data") or {}).get("resource.json")),
            }
        return self._known[revision]


def _facts(text: str | None) -> Facts | None:
    try:
        document = json.loads(text or "")
        spec = SpeculativeDeployment.from_dict(document).spec
        flags = list(spec.engine.args)
        servers = arguments.read(flags).api_servers
        version = releases.resolve(spec.engine.image, spec.engine.version)
        told = {name: document["spec"].get(name) for name in ("model", "engine", "drafter")}
        # What decides about acceptance and step times besides; where it is not written, families stay what they were.
        added = {"draftSampling": spec.speculation.draft_sampling, "engineOptions": spec.speculation.engine_options}
        told |= {name: value for name, value in added.items() if value}
    except (ValueError, LookupError, TypeError):
        return None
    if isinstance(version, releases.NoVersion):
        return None
    engine = EngineFacts(
        version=str(version.version),
        arguments=tuple(flags),
        method=spec.drafter.method if spec.drafter is not None else "eagle3",
        environment={one.name: one.value or "" for one in spec.engine.env if one.value_from is None},
    )
    family = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
    return Facts(family, engine, servers)


def setting_of(found: StatusSetting | None) -> Setting | None:
    """The status' setting as the tuner has it; None where it says none that is one."""
    try:
        return None if found is None else read_shown(found)
    except SettingError:
        return None


def _arms(status: Status) -> Iterator[tuple[Arm, bool]]:
    """The arms that tell of their settings, and whether each is control; not canary and control on unlike hardware."""
    canary = status.canary if status.analysis is None or not status.analysis.unlike else None
    for arm in (status.stable, canary, status.previous):
        if arm is not None:
            yield arm, False
    if status.stable is not None and canary is not None and canary.control is not None:
        yield status.stable, True


def reload_of(pods: tuple[Object, ...]) -> float | None:
    """Seconds from the start of an engine's container until its pod was ready, the median of pods that never restarted."""
    found = [seconds for pod in pods if (seconds := _seconds_to_ready(pod)) is not None]
    return statistics.median(found) if found else None


def _seconds_to_ready(pod: Object) -> float | None:
    status: Mapping[str, Any] = pod.get("status") or {}
    containers: list[Object] = status.get("containerStatuses") or []
    conditions: list[Object] = status.get("conditions") or []
    engine = next((one for one in containers if one.get("name") == naming.ENGINE), _NOTHING)
    ready = next((one for one in conditions if (one.get("type"), one.get("status")) == ("Ready", "True")), _NOTHING)
    started = ((engine.get("state") or {}).get("running") or {}).get("startedAt")
    at = ready.get("lastTransitionTime")
    if engine.get("restartCount") or not started or not at:
        return None
    seconds = (datetime.fromisoformat(at) - datetime.fromisoformat(started)).total_seconds()
    return seconds if seconds > 0 else None
