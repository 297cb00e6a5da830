"""What is known of one rollout: from the resource alone, and in full from the operator's records.

    status.canary, inPlaceRollout, analysis   a rollout in progress
    status.rolloutHistory                     how past rollouts have ended
    ConfigMap NAME-aerie-rollouts             how they continued: observations and phases of the last five

Guarantees: pure. A field that is absent, or has another type than expected, counts as absent: an operator of another release may
have written it. Times are in UTC.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from aerie.cli.console import CommandError
from aerie.cli.fleet.resource_view import Object, ResourceView, format_setting, parse_time
from aerie.manifests.rollout_history_config_map import Record, read_packed_records, unpack_record

DESIGNS = {
    "BetweenPods": "new pods against control pods",
    "ByTurns": "both drafters by turns in the same pods",
    "EqualRequests": "shadow evaluation: equal requests for both drafters",
}
"""Designs of comparisons, in words."""
TOKENS_PER_STEP, TIME_PER_OUTPUT_TOKEN = "TokensPerStep", "TimePerOutputToken"
MAX_EVENTS = 50
_MAX_CLOCK_SECONDS = 2.0


@dataclass(frozen=True)
class Comparison:
    """A criterion: new against stable."""

    metric: str
    estimate: float | None
    lower: float | None
    upper: float | None
    requirement: str
    """What an acceptance needs; empty if nothing, or unknown."""
    is_met: bool | None
    message: str
    """A result that no number expresses."""
    samples: int


@dataclass(frozen=True)
class Observation:
    """What the analysis showed at one moment."""

    seconds: float
    """Since the start of the rollout."""
    design: str
    phase: str
    samples: int
    weight: float | None
    """Percentage of the traffic on the new pods."""
    comparisons: Mapping[str, tuple[float | None, float | None, float | None]]
    """Estimate, lower and upper bound by metric."""
    arms: Mapping[str, Mapping[str, Any]]
    """Metrics of `new` and `stable`."""


@dataclass(frozen=True)
class PhaseChange:
    """A phase that began."""

    seconds: float
    phase: str
    message: str


@dataclass(frozen=True)
class Event:
    """An event of the resource during the rollout."""

    seconds: float
    kind: str
    """Normal or Warning."""
    reason: str
    message: str


@dataclass(frozen=True)
class Trial:
    """A trial of a number of draft tokens."""

    completed_at: str
    settings: str
    result: str
    predicted: tuple[float, float | None, float | None] | None
    """Estimate, lower and upper bound of the gain in tokens per second."""
    measured: tuple[float, float | None, float | None] | None


@dataclass(frozen=True)
class Contents:
    """One rollout."""

    namespace: str
    name: str
    revision: str
    change: str
    drafter: str
    replaced_drafter: str
    result: str
    """Promoted, RolledBack, ...; empty while it is in progress."""
    phase: str
    message: str
    """Reason for the result, or what is missing for one."""
    started_at: datetime
    ended_at: datetime | None
    design: str
    requested_by: Mapping[str, str]
    """Who decided manually, and why: user, action, reason, time; empty if nobody did."""
    comparisons: Sequence[Comparison] = ()
    observations: Sequence[Observation] = ()
    phases: Sequence[PhaseChange] = ()
    events: Sequence[Event] = ()
    trials: Sequence[Trial] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the analysis, frozen at its start."""
    identity: Sequence[tuple[str, str]] = ()
    """What was compared: names and values."""
    notes: Sequence[str] = ()
    """What the report lacks, and why."""

    @property
    def required_change(self) -> float | None:
        """Change of tokens per step that an acceptance has to exceed; None if the parameters do not say."""
        goal, margin = self.parameters.get("goal"), _number(self.parameters.get("margin"))
        if goal == "Superior":
            return 0.0
        return -margin if margin is not None else None


def build_contents(
    document: Object,
    config_map: Object | None,
    events: Sequence[Object] | None,
    *,
    revision: str = "",
    notes: Sequence[str] = (),
) -> Contents:
    """Return what is known of the latest rollout, or of that of a revision.

    `events`: None if they cannot be read. `notes`: what could not be read. Raises `CommandError` if there is no such rollout.
    """
    view = ResourceView(document)
    records = [record for text in read_packed_records(config_map).values() if (record := unpack_record(text)) is not None]
    rollouts = [_Rollout(view.candidate, {}, _find_record(records, view.candidate))] if _is_comparison(view) else []
    rollouts += [_Rollout({}, outcome, _find_record(records, outcome)) for outcome in view.history]
    rollouts = [item for item in rollouts if item.get_text("revision").startswith(revision) and item.started_at is not None]
    if not rollouts:
        raise CommandError(_describe_absence(view, revision))
    return _build(view, rollouts[0], events, notes)


@dataclass(frozen=True)
class _Rollout:
    """One rollout, by its sources."""

    candidate: Object
    """Its part of the status while it is in progress; else empty."""
    outcome: Object
    """Its entry of the history once it has ended; else empty."""
    record: Record | None

    def get_text(self, name: str) -> str:
        """Return a field of whatever source has it."""
        for source in (self.outcome, self.candidate, self.record or {}):
            if source.get(name):
                return str(source[name])
        return ""

    @property
    def started_at(self) -> datetime | None:
        return _time(self.get_text("startTime"))


def _is_comparison(view: ResourceView) -> bool:
    """Return whether a rollout is in progress, and not the start of the first revision."""
    return bool(view.candidate) and bool(view.status.get("stable"))


def _find_record(records: Sequence[Record], rollout: Object) -> Record | None:
    started_at = _time(rollout.get("startTime"))
    for record in reversed(records):
        recorded_at = _time(record.get("startTime"))
        if started_at is None or recorded_at is None or record.get("revision") != rollout.get("revision"):
            continue
        if abs((recorded_at - started_at).total_seconds()) < _MAX_CLOCK_SECONDS:
            return record
    return None


def _describe_absence(view: ResourceView, revision: str) -> str:
    revisions = list(dict.fromkeys(str(item.get("revision")) for item in view.history))
    if revision and revisions:
        return f"--revision is {revision}: no rollout of it is known. Known revisions: {', '.join(revisions)}."
    return (
        f"{view.namespace}/{view.name} has had no rollout yet, so there is no decision to report: change the spec, such as its "
        "drafter, and repeat."
    )


def _build(view: ResourceView, rollout: _Rollout, events: Sequence[Object] | None, notes: Sequence[str]) -> Contents:
    record, outcome, started_at = rollout.record or {}, rollout.outcome, rollout.started_at
    assert started_at is not None
    ended_at = _time(outcome.get("completionTime"))
    analysis = view.analysis if not outcome or outcome is view.history[0] else {}
    analysis_start = _time(analysis.get("startTime"))
    if analysis_start is None or analysis_start < started_at - timedelta(seconds=1):
        analysis = {}
    observations = tuple(_read_observations(record))
    comparisons = tuple(_read_comparisons(outcome.get("comparisons") or analysis.get("comparisons")))
    designs = [item.design for item in observations if item.design] or [str(analysis.get("design") or "")]
    further_notes = []
    if record == {} and comparisons:
        further_notes.append(
            "Curves over time are missing: the operator has no record of this rollout. It keeps those of the last five rollouts."
        )
    if comparisons and not any(item.requirement for item in comparisons):
        further_notes.append("The status does not say what each criterion requires.")
    if not comparisons:
        further_notes.append("The drafters were not compared, so there is no decision table.")
    is_ended = bool(outcome)
    message = outcome.get("message") or view.condition("Progressing").get("message") or ""
    return Contents(
        view.namespace,
        view.name,
        rollout.get_text("revision"),
        rollout.get_text("change"),
        rollout.get_text("drafter"),
        str(outcome.get("replacedDrafter") or record.get("replacedDrafter") or _read_stable_drafter(view, is_ended)),
        str(outcome.get("result") or ""),
        view.phase if not is_ended else str(outcome.get("result")),
        str(message),
        started_at,
        ended_at,
        designs[-1],
        _read_requested_by(outcome),
        comparisons,
        observations,
        tuple(_read_phases(record)),
        tuple(_read_events(events or (), started_at, ended_at)),
        tuple(_read_trials(view)),
        _mapping(record.get("parameters")) or _mapping(analysis.get("parameters")),
        tuple(_list_identity(view, rollout, record)),
        (*notes, *further_notes),
    )


def _read_stable_drafter(view: ResourceView, is_ended: bool) -> str:
    stable = next((arm for arm in view.arms if arm.role == "stable"), None)
    return stable.drafter if stable is not None and not is_ended else ""


def _read_requested_by(outcome: Object) -> dict[str, str]:
    requested_by = _mapping(outcome.get("requestedBy"))
    return {name: str(requested_by[name]) for name in ("user", "action", "reason", "time") if requested_by.get(name)}


def _read_comparisons(items: Any) -> Iterator[Comparison]:
    for item in items or ():
        is_met = item.get("met")
        yield Comparison(
            str(item.get("metric") or ""),
            _number(item.get("estimate")),
            _number(item.get("lower")),
            _number(item.get("upper")),
            str(item.get("requirement") or ""),
            is_met if isinstance(is_met, bool) else None,
            str(item.get("message") or ""),
            int(_number(item.get("sampleCount")) or 0),
        )


def _read_observations(record: Record) -> Iterator[Observation]:
    for item in record.get("observations") or ():
        seconds = _number(item.get("seconds"))
        if seconds is None:
            continue
        comparisons = {
            str(name): (_number(values[0]), _number(values[1]), _number(values[2]))
            for name, values in _mapping(item.get("comparisons")).items()
            if isinstance(values, list) and len(values) == 3
        }
        yield Observation(
            seconds,
            str(item.get("design") or ""),
            str(item.get("phase") or ""),
            int(_number(item.get("samples")) or 0),
            _number(item.get("weight")),
            comparisons,
            {str(name): _mapping(metrics) for name, metrics in _mapping(item.get("arms")).items()},
        )


def _read_phases(record: Record) -> Iterator[PhaseChange]:
    for item in record.get("phases") or ():
        seconds = _number(item.get("seconds"))
        if seconds is not None:
            step = item.get("step")
            phase = str(item.get("phase") or "")
            yield PhaseChange(seconds, f"{phase} {step + 1}" if isinstance(step, int) else phase, str(item.get("message") or ""))


def _read_events(events: Sequence[Object], started_at: datetime, ended_at: datetime | None) -> Iterator[Event]:
    """Yield the events between start and end, the oldest first, without repetitions."""
    items = []
    for item in events:
        time = _time(item.get("eventTime") or item.get("lastTimestamp") or item.get("firstTimestamp"))
        is_within = time is not None and started_at - timedelta(seconds=5) <= time
        if time is None or not is_within or (ended_at is not None and time > ended_at + timedelta(seconds=5)):
            continue
        seconds = max(0.0, round((time - started_at).total_seconds(), 1))
        message = str(item.get("message") or item.get("note") or "")
        items.append(Event(seconds, str(item.get("type") or ""), str(item.get("reason") or ""), message))
    yield from sorted(items, key=lambda event: (event.seconds, event.reason, event.message))[-MAX_EVENTS:]


def _read_trials(view: ResourceView) -> Iterator[Trial]:
    """Yield the trials of draft tokens, the oldest first."""
    speculation = _mapping(view.status.get("speculation"))
    for item in reversed(speculation.get("trials") or ()):
        settings = f"{format_setting(item.get('fromSetting')) or '?'} to {format_setting(item.get('toSetting')) or '?'}"
        completed_at = _time(item.get("completionTime"))
        yield Trial(
            f"{completed_at:%Y-%m-%d %H:%M}" if completed_at is not None else "",
            settings,
            str(item.get("result") or ""),
            _read_gain(item.get("predicted")),
            _read_gain(item.get("measured")),
        )


def _read_gain(gain: Any) -> tuple[float, float | None, float | None] | None:
    document = _mapping(gain)
    estimate = _number(document.get("estimate"))
    return None if estimate is None else (estimate, _number(document.get("lower")), _number(document.get("upper")))


def _list_identity(view: ResourceView, rollout: _Rollout, record: Record) -> Iterator[tuple[str, str]]:
    """Yield what was compared, as names and values; without those that are unknown."""
    evaluation = _mapping(record.get("evaluation"))
    engine = _mapping(view.spec.get("engine"))
    facts = {
        "New revision": rollout.get_text("revision"),
        "New drafter": rollout.get_text("drafter"),
        "Digest of its files": record.get("digest"),
        "New setting (K)": format_setting(record.get("setting")),
        "Replaced revision": record.get("replacedRevision"),
        "Replaced drafter": rollout.get_text("replacedDrafter"),
        "Digest of its files, replaced": record.get("replacedDigest"),
        "Replaced setting (K)": format_setting(record.get("replacedSetting")),
        "Target": record.get("target"),
        "Replicas": record.get("replicas"),
        "Engine": record.get("engineImage") or engine.get("image"),
        "Engine version": record.get("engineVersion") or engine.get("version"),
        "Shadow evaluation": f"{evaluation['result']}. {evaluation.get('message', '')}" if evaluation.get("result") else None,
        "Resource": f"{view.namespace}/{view.name}, UID {view.metadata.get('uid', 'unknown')}",
        "API version": view.document.get("apiVersion"),
    }
    for name, value in facts.items():
        if value not in (None, ""):
            yield name, str(value)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def _time(value: Any) -> datetime | None:
    try:
        time = parse_time(str(value)) if value else None
    except ValueError:
        return None
    return time if time is not None and time.tzinfo is not None else None
