"""The record of a rollout, from which a report shows how its decision came about: curves, phases, traffic and outcome.

    status before, status after ─┐
    blocks, windows, metrics ────┼─► record, in memory ─► due? ─► ConfigMap NAME-aerie-rollouts ─► kubectl aerie report
    record so far ───────────────┘

An observation is what the analysis showed at one moment. One is added whenever comparisons, phase or traffic have changed. Beyond
`MAX_OBSERVATIONS`, that whose neighbours are closest is dropped, so that a record of any length is as dense everywhere.

The ConfigMap is written when a rollout begins, then at most once in `WRITE_INTERVAL`, and at once when it has ended. With 1,000
resources, only those with a rollout in progress are written: with 20 rollouts, the chart's limit, that is at most one write in
three seconds. A crash loses the observations since the last write. The first revision has nothing to compare with, and no record.

Fields of a record: format, revision, change, drafter, setting, digest, replacedRevision, replacedDrafter, replacedSetting,
replacedDigest, target, engineImage, engineVersion, replicas, purpose (Rollout or Trial), predicted (of a trial), startTime,
parameters, evaluation (result and message), outcome (as in status.rolloutHistory), earlierOutcomes, and the lists
    phases         seconds since the start, phase, step of the ramp, and the message of condition Progressing
    observations   seconds, design, phase, verdict, samples, weight (percentage of the traffic on the new pods), comparisons
                   (estimate, lower and upper by metric), arms (metrics of new and stable since the observation before)

Guarantees: pure. A record decides nothing, and a write that fails changes no rollout. Not guaranteed: an observation for each
block; and that arms have metrics in each observation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from aerie.analysis.measurement.counts import EngineCounts
from aerie.api.status import AnalysisStatus, CanaryArm, InPlaceRollout, RolloutOutcome, Status
from aerie.api.types.base import format_timestamp
from aerie.engine.metrics.sample import Counters
from aerie.manifests.rollout_history_config_map import (
    RECORD_FORMAT,
    Record,
    RolloutHistory,
    build_record_key,
    pack_record,
    read_packed_records,
    render_rollout_history_config_map,
    rollout_history_config_map_name,
    unpack_record,
)
from aerie.rollout.facts.snapshot import Snapshot, is_owned_by

MAX_OBSERVATIONS = 200
MAX_PHASES = 40
MAX_PHASE_MESSAGE_CHARACTERS = 300
MAX_EARLIER_OUTCOMES = 2
WRITE_INTERVAL = timedelta(minutes=1)
"""Time between two writes of one resource's ConfigMap, except at the start and the end of a rollout."""
WRITE_RETRY_PERIOD = timedelta(minutes=15)
"""Time after the end of a rollout within which a failed write of its record is repeated."""
Rollout = CanaryArm | InPlaceRollout


@dataclass(frozen=True)
class HistoryUpdate:
    """The record after a reconcile."""

    history: RolloutHistory | None = None
    """What the operator keeps in memory; None while no rollout is in progress and the cluster has all."""
    config_map: dict[str, Any] | None = None
    """The ConfigMap to write now, without an owner; None while none is due."""


def update_rollout_history(snapshot: Snapshot, status: Status, now: datetime) -> HistoryUpdate:
    """Return the record after a reconcile that leads to this status, and whether it is written."""
    resource, before = snapshot.resource, snapshot.resource.status or Status()
    rollout = _find_rollout(status)
    ended = next((outcome for outcome in status.rollout_history if outcome not in before.rollout_history), None)
    in_memory = snapshot.operator.rollout_history
    history = in_memory if in_memory is not None and in_memory.uid == resource.metadata.uid else None
    if ended is not None and (opened := _open_record(snapshot, history, ended.start_time, ended.revision, now)) is not None:
        history = _end(opened, snapshot, status, ended, now)
    if rollout is not None and status.stable is not None:
        key = build_record_key(rollout.start_time, rollout.revision)
        if ended is not None and history is not None and history.key != key:  # it was replaced by the next rollout at once
            packed = {**history.packed_records, history.key: pack_record(history.record)}
            history = replace(history, packed_records=packed)
        opened = _open_record(snapshot, history, rollout.start_time, rollout.revision, now)
        history = _add_observation(opened or _begin(snapshot, history, status, rollout, key), snapshot, status, rollout, now)
    return _write_if_due(snapshot, history, now)


def _find_rollout(status: Status) -> Rollout | None:
    return status.in_place_rollout or status.canary


def _read_stored(snapshot: Snapshot) -> dict[str, str]:
    metadata = snapshot.resource.metadata
    config_map = snapshot.cluster.child("ConfigMap", rollout_history_config_map_name(metadata.name))
    # A ConfigMap left by a deleted resource of the same name describes other rollouts.
    return read_packed_records(config_map if config_map is not None and is_owned_by(config_map, metadata.uid) else None)


def _open_record(
    snapshot: Snapshot, history: RolloutHistory | None, start_time: datetime, revision: str, now: datetime
) -> RolloutHistory | None:
    """Return the record of a rollout: that in memory, or the one that was written; None where there is none.

    An operator that has just started takes the record as written now: writes are never closer than `WRITE_INTERVAL`.
    """
    key = build_record_key(start_time, revision)
    if history is not None and history.key == key:
        return history
    packed = dict(history.packed_records) if history is not None else _read_stored(snapshot)
    record = unpack_record(packed.get(key, ""))
    return None if record is None else RolloutHistory(snapshot.resource.metadata.uid or "", key, record, packed, now)


def _begin(snapshot: Snapshot, history: RolloutHistory | None, status: Status, rollout: Rollout, key: str) -> RolloutHistory:
    """Return the record of a rollout that begins: what is fixed from its start on."""
    spec, stable = snapshot.resource.spec, status.stable
    assert stable is not None
    trial = status.speculation.trial if status.speculation is not None else None
    is_trial = trial is not None and trial.revision == rollout.revision
    setting = rollout.setting if isinstance(rollout, CanaryArm) else stable.setting
    record = {
        "format": RECORD_FORMAT,
        "revision": rollout.revision,
        "change": rollout.change,
        "drafter": rollout.drafter,
        "setting": setting.to_dict() if setting is not None else None,
        "replacedRevision": stable.served_revision,
        "replacedDrafter": stable.in_place.drafter if stable.in_place is not None else stable.drafter,
        "replacedSetting": stable.setting.to_dict() if stable.setting is not None else None,
        "target": stable.target,
        "engineImage": spec.engine.image,
        "engineVersion": spec.engine.version,
        "replicas": spec.replicas,
        "purpose": "Trial" if is_trial else "Rollout",
        "predicted": trial.predicted.to_dict() if trial is not None and is_trial and trial.predicted is not None else None,
        "startTime": format_timestamp(rollout.start_time),
        "phases": [],
        "observations": [],
    }
    packed = history.packed_records if history is not None else _read_stored(snapshot)
    written_at = history.written_at if history is not None else None
    return RolloutHistory(snapshot.resource.metadata.uid or "", key, _drop_missing(record), packed, written_at)


def _add_observation(
    history: RolloutHistory, snapshot: Snapshot, status: Status, rollout: Rollout, now: datetime
) -> RolloutHistory:
    """Return the record of a rollout in progress, with an observation if anything has changed."""
    record, started_at = history.record, rollout.start_time
    if "outcome" in record and rollout.phase == "RollingBack":
        return history  # its pods are about to go, and nothing is compared any more
    facts: dict[str, Any] = {}
    if isinstance(rollout, InPlaceRollout):
        facts |= {"digest": rollout.digest, "replacedDigest": rollout.replaced.digest if rollout.replaced is not None else None}
    if rollout.evaluation is not None and rollout.evaluation.result is not None:
        facts["evaluation"] = {"result": rollout.evaluation.result, "message": rollout.evaluation.message}
    analysis = _find_analysis(status, started_at)
    if analysis is not None:
        facts["parameters"] = analysis.parameters.to_dict()
    step = rollout.step_index if isinstance(rollout, CanaryArm) else None
    phases = _with_phase(record["phases"], rollout.phase, step, _read_message(status), _seconds(started_at, now))
    observation = _build_observation(snapshot, status, analysis, rollout, record["observations"], now)
    observations = (
        thin_observations((*record["observations"], observation))
        if _has_news(record["observations"], observation)
        else record["observations"]
    )
    updated = {**record, **_drop_missing(facts), "phases": phases, "observations": observations}
    return history if updated == record else replace(history, record=updated, is_changed=True)


def _end(history: RolloutHistory, snapshot: Snapshot, status: Status, outcome: RolloutOutcome, now: datetime) -> RolloutHistory:
    """Return the record of a rollout that has ended: with its last observation, and the outcome."""
    record, before = history.record, snapshot.resource.status or Status()
    rollout = _find_rollout(before)
    observations = record["observations"]
    if rollout is not None and (rollout.revision, rollout.start_time) == (outcome.revision, outcome.start_time):
        analysis = _find_analysis(status, rollout.start_time)
        observation = _build_observation(snapshot, status, analysis, rollout, observations, now) | {"phase": outcome.result}
        if isinstance(rollout, CanaryArm):
            observation["weight"] = 100 if outcome.result == "Promoted" else 0
        observation.pop("arms", None)  # the stable arm is another one by now
        observations = thin_observations((*observations, observation))
    seconds = _seconds(outcome.start_time, outcome.completion_time)
    phases = _with_phase(record["phases"], outcome.result, None, outcome.message, seconds)
    # An outcome whose status could not be written is none: it is replaced.
    is_recorded = record.get("outcome") in [item.to_dict() for item in before.rollout_history]
    earlier = [*record.get("earlierOutcomes", ()), *([record["outcome"]] if is_recorded else [])]
    updated = {**record, "outcome": outcome.to_dict(), "phases": phases, "observations": observations}
    if earlier:
        updated["earlierOutcomes"] = earlier[-MAX_EARLIER_OUTCOMES:]
    return replace(history, record=updated, is_changed=True, is_urgent=True)


def _write_if_due(snapshot: Snapshot, history: RolloutHistory | None, now: datetime) -> HistoryUpdate:
    """Return what stays in memory, and the ConfigMap if it is due."""
    if history is None:
        return HistoryUpdate()
    has_ended = "outcome" in history.record
    if has_ended and not history.is_changed:
        is_stored = _read_stored(snapshot).get(history.key) == pack_record(history.record)
        if is_stored or now > datetime.fromisoformat(history.record["outcome"]["completionTime"]) + WRITE_RETRY_PERIOD:
            return HistoryUpdate()
    # What has ended is written until the cluster has it: the write may have failed.
    needs_write = history.is_changed or has_ended
    is_due = needs_write and (history.is_urgent or history.written_at is None or now >= history.written_at + WRITE_INTERVAL)
    name = rollout_history_config_map_name(snapshot.resource.metadata.name)
    is_foreign = any((item["kind"], item["metadata"]["name"]) == ("ConfigMap", name) for item in snapshot.cluster.name_conflicts)
    stored = snapshot.cluster.child("ConfigMap", name)
    is_foreign = is_foreign or (stored is not None and not is_owned_by(stored, snapshot.resource.metadata.uid))
    if is_foreign:  # not tried again before the next write would be due
        return HistoryUpdate(None if has_ended else replace(history, written_at=now, is_urgent=False))
    if not is_due or snapshot.resource.spec.rollout.paused or "ConfigMap" in snapshot.unmanaged_kinds:
        return HistoryUpdate(history)
    packed = {**history.packed_records, history.key: pack_record(history.record)}
    config_map = render_rollout_history_config_map(snapshot.resource.metadata.name, packed)
    written = replace(history, packed_records=config_map["binaryData"], written_at=now, is_changed=False, is_urgent=False)
    return HistoryUpdate(written, config_map)


# ----------------------------------------------------------------------------------------------------- parts of an observation
def _build_observation(
    snapshot: Snapshot,
    status: Status,
    analysis: AnalysisStatus | None,
    rollout: Rollout,
    observations: Sequence[Record],
    now: datetime,
) -> dict[str, Any]:
    started_at = rollout.start_time
    seconds = _seconds(started_at, now)
    since = started_at + timedelta(seconds=observations[-1]["seconds"] if observations else 0.0)
    canary = status.canary
    observation: dict[str, Any] = {
        "seconds": seconds,
        "phase": rollout.phase,
        "weight": canary.weight if canary is not None else None,
    }
    if analysis is not None:
        comparisons = {
            item.metric: [item.estimate, item.lower, item.upper] for item in analysis.comparisons if item.estimate is not None
        }
        samples = max((item.sample_count for item in analysis.comparisons if item.estimate is not None), default=0)
        observation |= {"design": analysis.design, "verdict": analysis.verdict, "samples": samples, "comparisons": comparisons}
    arms = (
        _measure_in_place(snapshot, rollout)
        if isinstance(rollout, InPlaceRollout)
        else _measure_pods(snapshot, status, rollout, since.timestamp())
    )
    return _drop_missing(observation | {"arms": {name: metrics for name, metrics in arms.items() if metrics} or None})


def _has_news(observations: Sequence[Record], observation: Record) -> bool:
    """Return whether an observation differs from the last one by more than its time and the metrics of the arms."""
    if not observations:
        return True
    return any(
        observations[-1].get(name) != observation.get(name) for name in ("phase", "weight", "design", "verdict", "comparisons")
    )


def thin_observations(observations: Iterable[Record]) -> list[Record]:
    """Return at most `MAX_OBSERVATIONS`: the first, the last, and of the others those that are far from their neighbours."""
    dense = list(observations)
    while len(dense) > MAX_OBSERVATIONS:
        del dense[min(range(1, len(dense) - 1), key=lambda index: dense[index + 1]["seconds"] - dense[index - 1]["seconds"])]
    return dense


def _find_analysis(status: Status, started_at: datetime) -> AnalysisStatus | None:
    """Return the analysis if it is that of this rollout: the status keeps the last one until the next begins."""
    analysis = status.analysis
    is_own = analysis is not None and analysis.start_time is not None and analysis.start_time >= started_at.replace(microsecond=0)
    return analysis if is_own else None


def _with_phase(phases: Sequence[Record], phase: str, step: int | None, message: str, seconds: float) -> Sequence[Record]:
    """Return the phases with this one, unless it is the last; of too many, the first and the latest stay."""
    if phases and (phases[-1]["phase"], phases[-1].get("step")) == (phase, step):
        return phases
    text = message if len(message) <= MAX_PHASE_MESSAGE_CHARACTERS else message[: MAX_PHASE_MESSAGE_CHARACTERS - 1] + "…"
    extended = [*phases, _drop_missing({"seconds": seconds, "phase": phase, "step": step, "message": text or None})]
    return [extended[0], *extended[-MAX_PHASES + 1 :]] if len(extended) > MAX_PHASES else extended


def _read_message(status: Status) -> str:
    return next((condition.message for condition in status.conditions if condition.type == "Progressing"), "")


def _seconds(start: datetime, end: datetime) -> float:
    return round(max(0.0, (end.astimezone(UTC) - start).total_seconds()), 1)


def _drop_missing(document: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if value is not None}


# ------------------------------------------------------------------------------------------------------------------- the arms
@dataclass(frozen=True)
class _ArmSums:
    """Sums from which the metrics of an arm follow."""

    drafts: float = 0.0
    accepted: float = 0.0
    accepted_by_position: tuple[float, ...] = ()
    decode_tokens: float = 0.0
    steps: float = 0.0
    step_seconds: float = 0.0
    first_tokens: float = 0.0
    first_token_seconds: float = 0.0

    def __add__(self, other: _ArmSums) -> _ArmSums:
        positions = itertools.zip_longest(self.accepted_by_position, other.accepted_by_position, fillvalue=0.0)
        return _ArmSums(
            self.drafts + other.drafts,
            self.accepted + other.accepted,
            tuple(left + right for left, right in positions),
            self.decode_tokens + other.decode_tokens,
            self.steps + other.steps,
            self.step_seconds + other.step_seconds,
            self.first_tokens + other.first_tokens,
            self.first_token_seconds + other.first_token_seconds,
        )

    def to_metrics(self) -> dict[str, Any]:
        """Return the metrics that the sums determine, rounded."""
        shares = [_divide(accepted, self.drafts, 3) for accepted in self.accepted_by_position]
        return _drop_missing(
            {
                "acceptanceLength": _divide(self.drafts + self.accepted, self.drafts, 3),
                "tokensPerStep": _divide(self.decode_tokens, self.steps, 3),
                "timePerOutputToken": _divide(self.step_seconds, self.decode_tokens, 5),
                "timeToFirstToken": _divide(self.first_token_seconds, self.first_tokens, 4),
                "acceptanceByPosition": shares if shares and None not in shares else None,
            }
        )


def _divide(total: float, count: float, digits: int) -> float | None:
    return round(total / count, digits) if count > 0 else None


def _sum_counters(counters: Counters) -> _ArmSums:
    speculation = counters.speculation
    return _ArmSums(
        speculation.drafts if speculation is not None else 0.0,
        speculation.accepted if speculation is not None else 0.0,
        speculation.accepted_per_position if speculation is not None else (),
        max(0.0, counters.generation_tokens - counters.first_tokens),
        counters.request_steps,
        counters.step_seconds,
        counters.first_tokens,
        counters.time_to_first_token.sum,
    )


def _sum_counts(counts: EngineCounts) -> _ArmSums:
    return _ArmSums(
        counts.drafts,
        counts.accepted_tokens,
        (),
        counts.decode_tokens,
        counts.request_steps,
        counts.decode_seconds,
        counts.first_tokens,
        counts.first_token_seconds,
    )


def _measure_pods(snapshot: Snapshot, status: Status, canary: CanaryArm, since: float) -> dict[str, dict[str, Any]]:
    """Return the metrics of canary and control: of the blocks since then, or of the recent traffic where there is none."""
    assert status.stable is not None
    has_control = canary.control is not None
    measured = {
        "new": snapshot.arm_metrics(canary.revision),
        "stable": snapshot.arm_metrics(status.stable.revision, control=has_control),
    }
    arms: dict[str, dict[str, Any]] = {}
    for name, metrics in measured.items():
        if metrics is not None:
            shares = [round(share, 3) for share in metrics.acceptance_by_position]
            arms[name] = _drop_missing(
                {
                    "acceptanceLength": metrics.acceptance_length,
                    "timePerOutputToken": metrics.time_per_output_token,
                    "timeToFirstToken": metrics.time_to_first_token,
                    "acceptanceByPosition": shares or None,
                }
            )
    blocks = [block for block in snapshot.engines.blocks if block.end_time > since and block.canary and block.control]
    if blocks:
        sums = {
            "new": sum((_sum_counts(block.canary.counts) for block in blocks if block.canary is not None), _ArmSums()),
            "stable": sum((_sum_counts(block.control.counts) for block in blocks if block.control is not None), _ArmSums()),
        }
        arms = {name: arms.get(name, {}) | sums[name].to_metrics() for name in sums}
    return arms


def _measure_in_place(snapshot: Snapshot, rollout: InPlaceRollout) -> dict[str, dict[str, Any]]:
    """Return the metrics with each drafter: of the windows of the trial that have ended and that pods still report."""
    digests = {"new": rollout.digest, "stable": rollout.replaced.digest if rollout.replaced is not None else None}
    observations = [snapshot.engines.drafters[pod.name] for pod in rollout.pods if pod.name in snapshot.engines.drafters]
    windows = [
        window
        for observation in observations
        for window in (observation.state.windows if observation.state is not None else ())
        if window.turn is not None and window.ended is not None and window.counters is not None
    ]
    return {
        name: sum(
            (_sum_counters(window.counters) for window in windows if window.digest == digest and window.counters is not None),
            _ArmSums(),
        ).to_metrics()
        for name, digest in digests.items()
        if digest is not None
    }
