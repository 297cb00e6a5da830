"""Shadow evaluation of a canary: canary and control answer the same requests before users are served by either.

    Starting ─► Evaluating ──(batches of pairs from the evaluator)──┬─► worse ────────────────────────► rolled back
       │            │                                               ├─► accepted ─────────────────────► Ramping
       │            │                                               └─► no verdict in time ───────────► WarmingUp
       └────────────┴─► skipped, with the reason ─► WarmingUp

An accepted canary goes to WarmingUp too where spec.rollout.analysis.shadow.only is false, and where times were not comparable:
a drafter may propose better and take longer for it.

The status has the sums, and the number of the last batch of each evaluator process. A batch is acknowledged only after it was
stored (controller/probes/pairs.py). So a batch counts once, whenever operator or evaluator end.

Guarantees: pure. A canary whose evaluation has no result is isolated: no user is served by it or its control, except while no
stable pod is ready (progression/progression.py, capacity/traffic_weights.py). An evaluation that cannot be carried out, or has
no verdict in time, does not end the rollout. Times are compared only between pods of the same hardware and load, tokens per step
only between equal settings, and answers only between engines that differ in how they draft. Not guaranteed: that the evaluator
runs; without it the evaluation is inconclusive after its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from aerie.analysis.measurement import codec
from aerie.analysis.paired.plan import PairedPlan
from aerie.analysis.paired.state import WITHOUT_METRICS, PairedState, add_batches
from aerie.analysis.paired.verdict import ANSWERS_DIFFER, PairedVerdict, evaluate_pairs
from aerie.api.rollout import RolloutSpec
from aerie.api.status import AnalysisStatus, Arm, CanaryArm, CanaryEvaluation, EvaluationResult
from aerie.engine import releases
from aerie.manifests import evaluator
from aerie.manifests.engine_key import find_engine_key
from aerie.manifests.pod import request_metrics
from aerie.rollout.canary.analysis_run.equivalence_probe import explain_incomparable_answers
from aerie.rollout.canary.analysis_run.run import explain_incomparable_acceptance, status_comparisons
from aerie.rollout.conditions import truncate_message
from aerie.rollout.facts import hardware
from aerie.rollout.facts.pairs import PairObservation
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.revision.desired import DesiredRevision
from aerie.rollout.revision.pod_template import resolve_pod_template
from aerie.rollout.revision.recovery import read_recorded_resource

MIN_ANSWERS_WITHOUT_METRICS = 20
"""Answers without counts of speculation, and none with them, after which an evaluation is skipped."""
MIN_ACCEPTANCE_SECONDS = 60.0
"""Least time of an evaluation that accepts a canary: a request that hangs is known to do so after half a minute."""
MAX_EVALUATOR_PROCESSES = 64
"""Processes of the evaluator after which an evaluation is skipped: the status has a number for each."""


@dataclass(frozen=True)
class EvaluationProgress:
    """How far a shadow evaluation is in one reconcile."""

    evaluation: CanaryEvaluation | None
    """The evaluation after this reconcile; None without one."""
    verdict: PairedVerdict | None = None
    """Verdict on new batches, or at the end; None without anything new."""
    ends_at: datetime | None = None
    """Time at which it ends without a verdict; None while it has not begun, and after its end."""
    problem: str = ""
    """Why the evaluator's counts cannot be read, as a sentence; empty if they can."""
    replaces_analysis: bool = False
    """Whether the canary was accepted now, and needs no analysis under the traffic of users."""

    @property
    def is_pending(self) -> bool:
        """Whether it has no result yet."""
        return self.evaluation is not None and self.evaluation.result is None

    @property
    def message(self) -> str:
        """Result as sentences; empty until it has ended."""
        return describe_result(self.evaluation) if self.evaluation is not None and self.evaluation.result else ""


def plan_evaluation(snapshot: Snapshot, desired: DesiredRevision, stable: Arm) -> CanaryEvaluation | None:
    """Return the evaluation with which a canary starts: None where the spec requests none, and for trials of settings."""
    if snapshot.resource.spec.rollout.shadow_source == "None" or desired.trial is not None:
        return None
    obstacle = desired.shadow_obstacle or _find_stable_obstacle(snapshot, desired, stable)
    return _end(CanaryEvaluation(), "Skipped", obstacle) if obstacle else CanaryEvaluation()


def begin_evaluation(
    snapshot: Snapshot, stable: Arm, canary_arm: CanaryArm, evaluation: CanaryEvaluation, now: datetime
) -> CanaryEvaluation:
    """Return the evaluation that begins now: canary and control are ready."""
    plan = _build_plan(snapshot, stable, canary_arm)
    return evaluation.model_copy(update={"start_time": now, "state": pack_counts(plan, PairedState())})


def skip_evaluation(evaluation: CanaryEvaluation | None, reason: str) -> CanaryEvaluation | None:
    """Return an evaluation that has ended without a result of its own, if it had none."""
    if evaluation is None or evaluation.result is not None:
        return evaluation
    return _end(evaluation, "Skipped", reason)


def advance_evaluation(snapshot: Snapshot, stable: Arm, canary_arm: CanaryArm, now: datetime) -> EvaluationProgress:
    """Return the progress of the canary's evaluation with what was observed."""
    evaluation = canary_arm.evaluation
    if evaluation is None or evaluation.result is not None:
        return EvaluationProgress(evaluation)
    if snapshot.resource.spec.rollout.shadow_source == "None":
        return EvaluationProgress(_end(evaluation, "Skipped", "spec.rollout.analysis.shadow.source has become None."))
    if canary_arm.phase == "Starting":
        obstacle = _find_pod_obstacle(snapshot, stable, canary_arm)
        return EvaluationProgress(_end(evaluation, "Skipped", obstacle) if obstacle else evaluation)
    if canary_arm.phase != "Evaluating" or evaluation.start_time is None:
        return EvaluationProgress(evaluation)
    return _evaluate(snapshot, stable, canary_arm, evaluation, evaluation.start_time, now)


def read_counted_batches(evaluation: CanaryEvaluation) -> dict[str, int]:
    """Return the number of the last counted batch by evaluator process, the latest process last."""
    _, state = _unpack(evaluation)
    return dict(state.counted_batches)


def describe_result(evaluation: CanaryEvaluation) -> str:
    """Return the result as sentences."""
    return f"Shadow evaluation: {evaluation.result}. {evaluation.message}".rstrip()


def build_evaluation_analysis(
    previous: AnalysisStatus | None, rollout: RolloutSpec, progress: EvaluationProgress
) -> AnalysisStatus | None:
    """Return the evaluation as the status shows it. It changes with a batch or a verdict, and not with the clock."""
    verdict = progress.verdict
    if verdict is None or progress.evaluation is None:
        return previous
    return AnalysisStatus(
        design="EqualRequests",
        parameters=rollout.analysis,
        verdict=verdict.outcome,
        message=describe_verdict(verdict),
        start_time=progress.evaluation.start_time,
        comparisons=status_comparisons(verdict.comparisons),
    )


def describe_verdict(verdict: PairedVerdict) -> str:
    """Return the message of a verdict; that of changed answers begins with its reason."""
    return f"{ANSWERS_DIFFER}: {verdict.message}" if verdict.rollback_reason == ANSWERS_DIFFER else verdict.message


def _evaluate(
    snapshot: Snapshot, stable: Arm, canary_arm: CanaryArm, evaluation: CanaryEvaluation, started_at: datetime, now: datetime
) -> EvaluationProgress:
    """Return the progress in phase Evaluating."""
    plan, state = _unpack(evaluation)
    if plan is None:  # of another release: its counts are lost
        plan = _build_plan(snapshot, stable, canary_arm)
    if hardware.compared_hardware_difference(snapshot):  # pods have been replaced
        plan = replace(plan, compares_time=False)
    observation = snapshot.engines.pairs or PairObservation()
    counted = add_batches(state, observation.process, observation.batches)
    elapsed, ends_at = now - started_at, started_at + timedelta(seconds=plan.max_duration_seconds)
    if counted == state and now < ends_at:
        return EvaluationProgress(evaluation, None, ends_at, observation.problem)
    state, verdict = evaluate_pairs(counted, plan, elapsed.total_seconds())
    evaluation = evaluation.model_copy(update={"state": pack_counts(plan, state)})
    if verdict.outcome == "Rollback":
        return EvaluationProgress(evaluation, verdict)
    if verdict.outcome == "Promote":
        accepted = _end(evaluation, "Accepted", verdict.message)
        is_only = snapshot.resource.spec.rollout.analysis.shadow.only
        return EvaluationProgress(accepted, verdict, replaces_analysis=is_only and plan.compares_time)
    if obstacle := _find_counting_obstacle(snapshot, state, plan):
        return EvaluationProgress(_end(evaluation, "Skipped", obstacle), verdict)
    if verdict.outcome == "Inconclusive":
        message = f"{verdict.message} {observation.problem}".rstrip()
        return EvaluationProgress(_end(evaluation, "Inconclusive", message), verdict)
    return EvaluationProgress(evaluation, verdict, ends_at)


def _build_plan(snapshot: Snapshot, stable: Arm, canary_arm: CanaryArm) -> PairedPlan:
    """Return the plan of an evaluation that begins now, of what is comparable between these pods."""
    analysis = snapshot.resource.spec.rollout.analysis
    has_control = bool(snapshot.cluster.live_pods(stable.revision, control=True))  # stable pods have the load of users
    return PairedPlan(
        goal=analysis.goal,
        margin=analysis.margin,
        max_duration_seconds=analysis.shadow.max_duration.total_seconds(),
        min_acceptance_seconds=MIN_ACCEPTANCE_SECONDS,
        compares_tokens=not explain_incomparable_acceptance(canary_arm, stable),
        compares_time=has_control and not hardware.compared_hardware_difference(snapshot),
        compares_answers=not explain_incomparable_answers(snapshot, stable, canary_arm),
    )


def _find_stable_obstacle(snapshot: Snapshot, desired: DesiredRevision, stable: Arm) -> str:
    """Return why pods of the stable revision could not be compared with, as sentences; empty where they could."""
    template = resolve_pod_template(snapshot, desired, stable.revision)
    recorded = read_recorded_resource(snapshot, stable.revision)
    if template is None or recorded is None:
        return f"The record of stable revision {stable.revision} is missing, so its pods cannot be compared with."
    if desired.pod_template is not None and (obstacle := _find_key_obstacle(desired.pod_template, template)):
        return obstacle
    if snapshot.resource.spec.rollout.canary.control == "Stable":
        return "" if request_metrics.has_request_metrics(template) else _describe_missing_counts("stable")
    engine = releases.resolve_engine_version(recorded.spec.engine.image, recorded.spec.engine.version)
    if isinstance(engine, releases.UnknownVersion):
        return engine.message
    obstacle = request_metrics.find_request_metrics_obstacle(engine.version, template)
    return f"Of stable revision {stable.revision}: {obstacle}" if obstacle else ""


def _find_key_obstacle(canary_template: Mapping[str, Any], stable_template: Mapping[str, Any]) -> str:
    """Return why the evaluator cannot have the API key of both engines, as sentences; empty where it can."""
    keys = [find_engine_key(template) for template in (canary_template, stable_template)]
    if problem := next((key.problem for key in keys if key.problem), ""):
        return problem
    if keys[0].volume_source != keys[1].volume_source:
        return (
            "Canary and stable pods have their API keys from different objects, and the evaluator has a single key. The next "
            "rollout is evaluated."
        )
    return ""


def _find_pod_obstacle(snapshot: Snapshot, stable: Arm, canary_arm: CanaryArm) -> str:
    """Return why the pods that start cannot be compared, as a sentence; empty where they can, and while none exists."""
    has_control = snapshot.resource.spec.rollout.canary.control == "Fresh"
    deployments = {
        "canary": snapshot.cluster.deployment(canary_arm.revision),
        "control" if has_control else "stable": snapshot.cluster.deployment(stable.revision, control=has_control),
    }
    for name, deployment in deployments.items():
        if deployment is not None and not request_metrics.has_request_metrics(deployment["spec"]["template"]):
            return _describe_missing_counts(name)
    has_time = has_control and not hardware.compared_hardware_difference(snapshot)
    if not has_time and (reason := explain_incomparable_acceptance(canary_arm, stable)):
        return f"Neither times nor tokens per step are comparable: {reason}"
    return ""


def _describe_missing_counts(arm: str) -> str:
    renewal = "set spec.rollout.canary.control: Fresh, or renew the pods with the annotation aerie.dev/renew"
    fix = renewal if arm == "stable" else "the next rollout is evaluated"
    return f"The {arm} pods were created without {request_metrics.SPECULATION_FLAG}, before shadow was set: {fix}."


def _find_counting_obstacle(snapshot: Snapshot, state: PairedState, plan: PairedPlan) -> str:
    """Return why further pairs would not help, as a sentence; empty where they would."""
    answers = state.skipped.get(WITHOUT_METRICS, 0)
    if not state.steps.pairs and answers >= MIN_ANSWERS_WITHOUT_METRICS:
        return (
            f"None of {answers} answers has counts of speculation: use an image whose vLLM reports them with "
            f"{request_metrics.SPECULATION_FLAG}."
        )
    if len(state.counted_batches) >= MAX_EVALUATOR_PROCESSES:
        name = evaluator.evaluator_name(snapshot.resource.metadata.name)
        return f"The evaluator has restarted {len(state.counted_batches)} times: read the log of Deployment {name}."
    if not (plan.compares_tokens or plan.compares_time):
        return "Neither times nor tokens per step are comparable any more."
    return ""


def _end(evaluation: CanaryEvaluation, result: EvaluationResult, message: str) -> CanaryEvaluation:
    return evaluation.model_copy(update={"result": result, "message": truncate_message(message), "state": ""})


def pack_counts(plan: PairedPlan, state: PairedState) -> str:
    """Return the plan and the counts as the status has them."""
    return codec.pack({"plan": plan.to_dict(), "state": state.to_dict()})


def _unpack(evaluation: CanaryEvaluation) -> tuple[PairedPlan | None, PairedState]:
    """Return the plan and the counts; no plan for any text that is not of this release."""
    try:
        document = codec.unpack(evaluation.state)
        return PairedPlan.from_dict(document["plan"]), PairedState.from_dict(document["state"])
    except (ValueError, KeyError, TypeError):
        return None, PairedState()
