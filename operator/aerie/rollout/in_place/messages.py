"""Messages of the condition Progressing for a rollout in place.

Guarantee: a message follows from the state and not from the clock, so that no status is written only because time has passed.
"""

from __future__ import annotations

from collections.abc import Sequence

from aerie.api import SpeculativeDeployment
from aerie.api.status import AnalysisStatus, InPlaceRollout
from aerie.rollout.canary.messages import build_waiting_message
from aerie.rollout.conditions import PROGRESSING, ConditionUpdate
from aerie.rollout.in_place.engine_pods import EnginePod
from aerie.rollout.in_place.evaluation import EvaluationProgress
from aerie.rollout.in_place.promotion import PromotionProgress
from aerie.rollout.in_place.return_pods import MAX_LISTED_PODS
from aerie.rollout.in_place.staging import StagingProgress


def build_staging_condition(rollout: InPlaceRollout, staging: StagingProgress) -> ConditionUpdate:
    """Return the condition while pods read the drafter."""
    prepared = sum(item.drafter is not None for item in staging.preparations)
    awaited = describe_awaited_pods(staging)
    message = (
        f"In place: {prepared}/{max(1, len(staging.preparations))} pods on trial have read the drafter "
        f"({rollout.change}, revision {rollout.revision}){f': {awaited}' if awaited else ''}."
    )
    return ConditionUpdate(PROGRESSING, "True", "Staging", message)


def describe_awaited_pods(staging: StagingProgress) -> str:
    """Return what the start waits for, as clauses; empty for nothing."""
    if not staging.preparations:
        return "no stable pod is ready"
    waiting = [f"pod {item.pod.name} {item.waiting.rstrip('.')}" for item in staging.preparations if item.waiting]
    return "; ".join(waiting[:MAX_LISTED_PODS])


def build_evaluation_condition(
    rollout: InPlaceRollout, evaluation: EvaluationProgress, analysis: AnalysisStatus | None
) -> ConditionUpdate:
    """Return the condition during the shadow evaluation."""
    name = rollout.pods[0].name
    if evaluation.waiting or analysis is None:
        message = f"In place: the shadow evaluation has not begun: pod {name} {evaluation.waiting or 'is isolated'}."
        return ConditionUpdate(PROGRESSING, "True", "Evaluating", message)
    message = f"In place: both drafters answer the same requests in pod {name}, which users do not reach."
    return ConditionUpdate(PROGRESSING, "True", "Evaluating", f"{message} {analysis.message}")


def build_analysis_condition(rollout: InPlaceRollout, analysis: AnalysisStatus | None) -> ConditionUpdate:
    """Return the condition while pods alternate."""
    names = list_names([pod.name for pod in rollout.pods])
    subject = "1 pod alternates" if len(rollout.pods) == 1 else f"{len(rollout.pods)} pods alternate"
    evaluation = f"Shadow evaluation: {rollout.evaluation.result}. " if rollout.evaluation is not None else ""
    if rollout.evaluation is not None and rollout.evaluation.result != "Accepted":
        evaluation = f"Shadow evaluation: {rollout.evaluation.result} ({rollout.evaluation.message.rstrip('.')}). "
    message = f"In place: {evaluation}{subject} between the drafters ({names})."
    return ConditionUpdate(PROGRESSING, "True", "Analyzing", f"{message} {analysis.message}" if analysis else message)


def build_waiting_condition(
    resource: SpeculativeDeployment, rollout: InPlaceRollout, analysis: AnalysisStatus | None
) -> ConditionUpdate:
    """Return the condition while a user decides."""
    explanation = f"{analysis.message} " if analysis else ""
    message = f"{explanation}All pods serve with the stable drafter. {build_waiting_message(resource, rollout.revision)}"
    if rollout.phase == "Held":
        return ConditionUpdate(PROGRESSING, "False", "InconclusiveAnalysis", message)
    return ConditionUpdate(PROGRESSING, "True", rollout.phase, message)


def build_promotion_condition(rollout: InPlaceRollout, promotion: PromotionProgress | None) -> ConditionUpdate:
    """Return the condition while pods are promoted. `promotion`: None until new pods come to the drafter."""
    message = f"Promoting the drafter of revision {rollout.revision} in place"
    if promotion is not None:
        message = f"{message}: {promotion.promoted_count}/{promotion.pod_count} pods have it"
        if promotion.failures:
            message = f"{message}; {'; '.join(promotion.failures[:MAX_LISTED_PODS])}"
    return ConditionUpdate(PROGRESSING, "True", "Promoting", f"{message.rstrip('.')}.")


def build_return_condition(rollout: InPlaceRollout, unreturned: Sequence[EnginePod]) -> ConditionUpdate:
    """Return the condition while pods return."""
    reason = f"{rollout.pending_outcome.message} " if rollout.pending_outcome is not None else ""
    names = list_names([pod.name for pod in unreturned])
    pods = f"Pods return to the stable drafter: {names}." if unreturned else "Pods return to the stable drafter."
    return ConditionUpdate(PROGRESSING, "True", "RollingBack", f"{reason}{pods}")


def build_promotion_failure_message(promotion: PromotionProgress) -> str:
    """Return why a promotion has failed."""
    late = f"{len(promotion.waiting)} pods are late ({list_names(promotion.waiting)})" if promotion.waiting else ""
    clauses = [*promotion.failures[:MAX_LISTED_PODS], *([late] if promotion.is_due and late else [])]
    count = len(promotion.failures) + (len(promotion.waiting) if promotion.is_due else 0)
    return f"{count} of {promotion.pod_count} pods cannot be promoted in place: {'; '.join(clauses).rstrip('.')}."


def list_names(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many others there are."""
    others = len(names) - MAX_LISTED_PODS
    return ", ".join(names[:MAX_LISTED_PODS]) + (f" and {others} others" if others > 0 else "")
