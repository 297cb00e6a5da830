"""Metrics of one resource and its rollout: the values of the status as samples for Prometheus.

    status ─► build_samples ─► one sample per family, and per arm, criterion and bound

Guarantees: a function of the status alone. A value that the status lacks has no sample, so no sample is a guess. The number of
samples is bounded: labels are enumerations of this module, names of criteria and of arms, and the revision where a family is
there to join others by it. A family whose name ends in a state (phase, verdict, attention) has a sample only for the present
state, with value 1. Comparisons and the verdict have samples only while a rollout is in progress, because afterwards they would
describe pods that were removed.

Not guaranteed: that a sample is as current as a scrape of an engine. The status rounds metrics, and without traffic it keeps the
last ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Literal, NamedTuple, get_args

from aerie.api.status import Arm, Status
from aerie.metric_family import MetricFamily
from aerie.rollout.conditions import DEGRADED, PREFLIGHT_PASSED, PROGRESSING

RESOURCE_LABELS = ("namespace", "name")
"""Labels of all families: the resource."""
AttentionReason = Literal[
    "NotServing",
    "Failed",
    "InvalidSpec",
    "PreflightFailed",
    "Held",
    "AwaitingApproval",
    "RolledBack",
    "PodFailure",
    "NameTaken",
    "ApplyFailed",
    "RouteNotAccepted",
    "GatewayNotResponding",
    "MetricsUnavailable",
    "WrongDrafter",
    "DraftsRejected",
    "AcceptanceRegression",
    "VersionSkew",
    "UnreadableSpec",
    "ListFailed",
    "ListForbidden",
]
"""Why a user has to act. From PodFailure on, it is the reason of the condition Degraded; PodFailure stands for all reasons of
pods, such as CrashLoopBackOff, ImagePullBackOff or Unschedulable."""
ATTENTION_REASONS: tuple[AttentionReason, ...] = get_args(AttentionReason)
_WAITING_PHASES: tuple[AttentionReason, ...] = ("Held", "AwaitingApproval", "RolledBack")
_SECONDS_PER_HOUR = 3600.0


class StatusSample(NamedTuple):
    """One sample of a resource."""

    family: MetricFamily
    label_values: tuple[str, ...]
    """Values of the labels after those of the resource."""
    value: float


def _family(name: str, documentation: str, *labels: str) -> MetricFamily:
    return MetricFamily(name, "gauge", documentation, (*RESOURCE_LABELS, *labels))


PHASE = _family("aerie_resource_phase", "1 for the present phase (status.phase); other phases have no time series.", "phase")
ATTENTION = _family(
    "aerie_attention",
    "1 while a user has to act, by reason; no time series without a reason. NotServing: no pod that serves is ready. "
    "PodFailure: stable pods fail (CrashLoopBackOff, ImagePullBackOff, Unschedulable...). The other reasons are phases, or "
    "reasons of the conditions PreflightPassed and Degraded.",
    "reason",
)
ROLLOUT_INFO = _family(
    "aerie_rollout_info",
    "1 while a rollout is in progress. method: FirstRevision, Canary, InPlace, or PostPromotion (Monitoring and Verifying). "
    "purpose: Rollout, or Trial of a speculation setting.",
    "revision",
    "method",
    "purpose",
)
ROLLOUT_START_TIME = _family("aerie_rollout_start_time_seconds", "Unix time at which the rollout in progress began.")
PHASE_START_TIME = _family(
    "aerie_rollout_phase_start_time_seconds",
    "Unix time at which the phase of the rollout in progress began, or its present step. Absent in AwaitingApproval and "
    "RollingBack of a canary, whose begin is not in the status.",
)
LAST_PROGRESS_TIME = _family(
    "aerie_rollout_last_progress_time_seconds",
    "Unix time at which a pod that the canary waits for was last ready, or was requested. Absent while it waits for none.",
)
LAST_COMPLETION_TIME = _family(
    "aerie_rollout_last_completion_time_seconds", "Unix time at which the last rollout ended, by its result.", "result"
)
ARM_INFO = _family(
    "aerie_arm_info",
    "1 for each arm: stable, canary, control, previous. revision: that of its pods, by which their own metrics are found. "
    "speculation: mode of its setting (Off, Static, Schedule, Adaptive), Unknown if the status lacks it.",
    "arm",
    "revision",
    "speculation",
)
REPLICAS = _family("aerie_replicas", "Pods of an arm, by state: desired, ready.", "arm", "state")
TRAFFIC_WEIGHT = _family("aerie_traffic_weight_ratio", "Share of the traffic that an arm gets, from 0 to 1.", "arm")
ACCEPTANCE_LENGTH = _family(
    "aerie_acceptance_length",
    "Mean acceptance length of an arm: 1 + accepted draft tokens / drafts. 1: no draft token is accepted. It changes in steps of "
    "3 %.",
    "arm",
)
PROMOTED_ACCEPTANCE_LENGTH = _family(
    "aerie_promoted_acceptance_length",
    "Reference of the stable revision: acceptance length in the comparison that promoted it, else in its first traffic.",
)
TIME_PER_OUTPUT_TOKEN = _family(
    "aerie_time_per_output_token_seconds",
    "Seconds per output token after a request's first, of an arm. It changes in steps of 10 %.",
    "arm",
)
TIME_TO_FIRST_TOKEN = _family(
    "aerie_time_to_first_token_seconds",
    "Seconds from a request's arrival to its first token, of an arm. It changes in steps of 20 %.",
    "arm",
)
SPECULATIVE_TOKENS = _family(
    "aerie_speculative_tokens", "Maximum number of draft tokens per step (K) of an arm; 0 without speculation.", "arm"
)
COMPARISON_CHANGE = _family(
    "aerie_comparison_change_ratio",
    "Canary divided by control, minus one, by criterion: 0.05 is 5 % more. bound: lower, estimate, upper. The bounds hold "
    "however often they are read.",
    "criterion",
    "bound",
)
COMPARISON_SAMPLES = _family(
    "aerie_comparison_samples", "Blocks, pairs of windows or pairs of answers that a criterion has counted.", "criterion"
)
COMPARISON_MET = _family(
    "aerie_comparison_met",
    "1 while what an acceptance needs of a criterion is met, else 0. No time series for a criterion that decides no acceptance.",
    "criterion",
)
VERDICT = _family(
    "aerie_verdict",
    "1 for the present verdict of the analysis in progress: Continue, Promote, Rollback, Inconclusive.",
    "verdict",
)
ANALYSIS_START_TIME = _family(
    "aerie_analysis_start_time_seconds", "Unix time at which the first block or window of the analysis in progress began."
)
SHADOW_EVALUATION = _family(
    "aerie_shadow_evaluation",
    "1 for the result of the shadow evaluation of the rollout in progress: Accepted, Inconclusive, Skipped. No time series "
    "before its end.",
    "result",
)
TRIAL_PODS = _family("aerie_in_place_trial_pods", "Pods that alternate between two drafters, of the rollout in place.")
RECOMMENDED_GAIN = _family(
    "aerie_tuning_recommended_gain_ratio",
    "Predicted gain in tokens per second of the setting on trial, or of the one that tuning recommends: 0.05 is 5 % more.",
)
TRIAL_GAIN = _family(
    "aerie_tuning_trial_gain_ratio",
    "Gain in tokens per second of the setting that was tested last and measured. kind: predicted, measured.",
    "kind",
)
SAVINGS_RATIO = _family(
    "aerie_tuning_savings_ratio", "Present savings by the active setting, as a share of the replicas: 0.05 is 5 %."
)
REPLICA_SECONDS = _family(
    "aerie_tuning_replica_seconds",
    "Seconds of one replica that tuning has saved and its trials have cost until the end of the last trial. kind: saved, spent.",
    "kind",
)
STATUS_FAMILIES = (
    PHASE,
    ATTENTION,
    ROLLOUT_INFO,
    ROLLOUT_START_TIME,
    PHASE_START_TIME,
    LAST_PROGRESS_TIME,
    LAST_COMPLETION_TIME,
    ARM_INFO,
    REPLICAS,
    TRAFFIC_WEIGHT,
    ACCEPTANCE_LENGTH,
    PROMOTED_ACCEPTANCE_LENGTH,
    TIME_PER_OUTPUT_TOKEN,
    TIME_TO_FIRST_TOKEN,
    SPECULATIVE_TOKENS,
    COMPARISON_CHANGE,
    COMPARISON_SAMPLES,
    COMPARISON_MET,
    VERDICT,
    ANALYSIS_START_TIME,
    SHADOW_EVALUATION,
    TRIAL_PODS,
    RECOMMENDED_GAIN,
    TRIAL_GAIN,
    SAVINGS_RATIO,
    REPLICA_SECONDS,
)
"""All families of this module."""


def build_samples(status: Status) -> Iterator[StatusSample]:
    """Yield the samples of a resource with this status."""
    if status.phase is not None:
        yield StatusSample(PHASE, (status.phase,), 1.0)
    for reason in find_attention_reasons(status):
        yield StatusSample(ATTENTION, (reason,), 1.0)
    yield from _build_rollout_samples(status)
    for name, arm in _list_arms(status):
        yield from _build_arm_samples(name, arm)
    if status.stable is not None:
        yield from _optional(PROMOTED_ACCEPTANCE_LENGTH, (), status.stable.reference_acceptance_length)
    yield from _build_tuning_samples(status)


def find_attention_reasons(status: Status) -> list[AttentionReason]:
    """Return why a user has to act, without repetition. Empty: nobody has to."""
    conditions = {condition.type: condition for condition in status.conditions}
    reasons: list[AttentionReason] = []
    if status.stable is not None and status.replicas and not status.ready_replicas:
        reasons.append("NotServing")
    preflight_passed = conditions.get(PREFLIGHT_PASSED)
    if preflight_passed is not None and preflight_passed.status == "False":
        reasons.append("InvalidSpec" if preflight_passed.reason == "InvalidSpec" else "PreflightFailed")
    elif status.phase == "Failed":
        reasons.append("Failed")
    reasons += [phase for phase in _WAITING_PHASES if phase == status.phase]
    degraded = conditions.get(DEGRADED)
    if degraded is not None and degraded.status == "True":
        reasons.append(parse_degraded_reason(degraded.reason))
    return reasons


def parse_degraded_reason(reason: str) -> AttentionReason:
    """Return the reason of the condition Degraded as a label: any that is not Aerie's own is that of a pod."""
    own_reasons = ATTENTION_REASONS[ATTENTION_REASONS.index("PodFailure") :]
    return next((own_reason for own_reason in own_reasons if own_reason == reason), "PodFailure")


def _list_arms(status: Status) -> Iterator[tuple[str, Arm]]:
    control = status.canary.control if status.canary is not None else None
    arms = {"stable": status.stable, "canary": status.canary, "control": control, "previous": status.previous}
    return ((name, arm) for name, arm in arms.items() if arm is not None)


def _build_rollout_samples(status: Status) -> Iterator[StatusSample]:
    if status.rollout_history:
        last = status.rollout_history[0]
        yield StatusSample(LAST_COMPLETION_TIME, (last.result,), last.completion_time.timestamp())
    yield from _optional(PHASE_START_TIME, (), _find_phase_start_time(status))
    rollout = status.in_place_rollout or status.canary or status.previous
    if rollout is None:
        return
    purpose = "Trial" if status.speculation is not None and status.speculation.trial is not None else "Rollout"
    if rollout is status.in_place_rollout:
        revision, method = rollout.revision, "InPlace"
    elif rollout is status.canary:
        revision, method = rollout.revision, "Canary" if status.stable is not None else "FirstRevision"
    else:
        revision, method = status.stable.revision if status.stable is not None else "", "PostPromotion"
    yield StatusSample(ROLLOUT_INFO, (revision, method, purpose), 1.0)
    yield StatusSample(ROLLOUT_START_TIME, (), rollout.start_time.timestamp())
    if status.canary is not None and status.canary.readiness is not None:
        yield StatusSample(LAST_PROGRESS_TIME, (), status.canary.readiness.start_time.timestamp())
    if status.in_place_rollout is not None and status.in_place_rollout.pods:
        yield StatusSample(TRIAL_PODS, (), float(len(status.in_place_rollout.pods)))
    evaluated = status.in_place_rollout or status.canary
    evaluation = evaluated.evaluation if evaluated is not None else None
    if evaluation is not None and evaluation.result is not None:
        yield StatusSample(SHADOW_EVALUATION, (evaluation.result,), 1.0)
    yield from _build_analysis_samples(status)


def _build_analysis_samples(status: Status) -> Iterator[StatusSample]:
    analysis = status.analysis
    if analysis is None:
        return
    yield StatusSample(VERDICT, (analysis.verdict,), 1.0)
    yield from _optional(ANALYSIS_START_TIME, (), analysis.start_time)
    for comparison in analysis.comparisons:
        yield StatusSample(COMPARISON_SAMPLES, (comparison.metric,), float(comparison.sample_count))
        if comparison.met is not None:
            yield StatusSample(COMPARISON_MET, (comparison.metric,), float(comparison.met))
        for bound in ("lower", "estimate", "upper"):
            yield from _optional(COMPARISON_CHANGE, (comparison.metric, bound), getattr(comparison, bound))


def _find_phase_start_time(status: Status) -> datetime | None:
    """Return when the phase of the rollout in progress began, where the status has it."""
    if status.in_place_rollout is not None:
        return status.in_place_rollout.phase_start_time
    canary = status.canary
    if canary is None:
        if status.phase == "Queued" and status.queue is not None:
            return status.queue.queued_time
        return status.previous.phase_start_time if status.previous is not None else None
    if canary.phase == "Held" or canary.is_extended:
        return next((condition.last_transition_time for condition in status.conditions if condition.type == PROGRESSING), None)
    time_by_phase = {
        "Starting": canary.start_time,
        "Evaluating": canary.evaluation.start_time if canary.evaluation is not None else None,
        "WarmingUp": canary.ready_time,
        "Analyzing": status.analysis.start_time if status.analysis is not None else None,
        "Ramping": canary.step_start_time,
        "Promoting": canary.step_start_time,
    }
    return time_by_phase.get(canary.phase)


def _build_arm_samples(name: str, arm: Arm) -> Iterator[StatusSample]:
    mode = arm.setting.mode if arm.setting is not None else "Unknown"
    yield StatusSample(ARM_INFO, (name, arm.revision, mode), 1.0)
    yield StatusSample(REPLICAS, (name, "desired"), float(arm.replicas))
    yield StatusSample(REPLICAS, (name, "ready"), float(arm.ready_replicas))
    yield from _optional(TRAFFIC_WEIGHT, (name,), arm.weight / 100 if arm.weight is not None else None)
    yield from _optional(ACCEPTANCE_LENGTH, (name,), arm.acceptance_length)
    yield from _optional(TIME_PER_OUTPUT_TOKEN, (name,), arm.time_per_output_token)
    yield from _optional(TIME_TO_FIRST_TOKEN, (name,), arm.time_to_first_token)
    yield from _optional(SPECULATIVE_TOKENS, (name,), arm.setting.num_speculative_tokens if arm.setting is not None else None)


def _build_tuning_samples(status: Status) -> Iterator[StatusSample]:
    speculation = status.speculation
    if speculation is None:
        return
    predicted = speculation.trial.predicted if speculation.trial is not None else speculation.predicted
    yield from _optional(RECOMMENDED_GAIN, (), predicted.estimate if predicted is not None else None)
    record = next((record for record in speculation.trials if record.measured is not None), None)
    if record is not None and record.measured is not None:
        yield from _optional(TRIAL_GAIN, ("predicted",), record.predicted.estimate if record.predicted is not None else None)
        yield StatusSample(TRIAL_GAIN, ("measured",), record.measured.estimate)
    if speculation.savings is not None:
        yield StatusSample(SAVINGS_RATIO, (), speculation.savings.current_rate)
        yield StatusSample(REPLICA_SECONDS, ("saved",), speculation.savings.saved * _SECONDS_PER_HOUR)
        yield StatusSample(REPLICA_SECONDS, ("spent",), speculation.savings.spent * _SECONDS_PER_HOUR)


def _optional(family: MetricFamily, label_values: tuple[str, ...], value: float | datetime | None) -> Iterator[StatusSample]:
    """Yield a sample of the value, a time as seconds since 1970; nothing if the status lacks it."""
    if value is not None:
        yield StatusSample(family, label_values, value.timestamp() if isinstance(value, datetime) else float(value))
