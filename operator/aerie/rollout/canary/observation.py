"""Observation of a canary: what the state machine needs to know of its pods, its route and a user's requests.

    pods and engines ────┐
    route of a gateway ──┼─► CanaryObservation
    verdict ─────────────┤
    shadow evaluation ───┤
    a user's annotation ─┘

Guarantees: pure. Not guaranteed: that a fault lasts; an abort reason counts when it is first observed.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from aerie.analysis.verdict import Verdict
from aerie.api import SpeculativeDeployment
from aerie.api.status import Arm, CanaryArm
from aerie.rollout.canary.abort_rules import find_abort_reasons
from aerie.rollout.canary.evaluation import EvaluationProgress, describe_verdict
from aerie.rollout.canary.extension_request import read_extension_request
from aerie.rollout.canary.messages import PROMOTE_ANNOTATION, ROLLBACK_ANNOTATION
from aerie.rollout.canary.state_machine import CanaryObservation, CanaryState, StateMachinePhase
from aerie.rollout.capacity.arms import RolloutPods
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.context_length import shorter_context_message
from aerie.rollout.facts.route_status import route_rejected_since, route_rejection_message
from aerie.rollout.facts.snapshot import ClusterState, Snapshot

_PHASES_WITHOUT_POD_DEADLINE = ("Evaluating", "WarmingUp", "Analyzing", "AwaitingApproval", "Held")


def build_observation(
    snapshot: Snapshot,
    canary_arm: CanaryArm,
    state: CanaryState,
    fleet: RolloutPods,
    abort_reasons: Sequence[str],
    verdict: Verdict | None,
    evaluation: EvaluationProgress,
    now: datetime,
) -> CanaryObservation:
    """Return what the state machine observes of the canary in this reconcile."""
    spec = snapshot.resource.spec
    ramp, by_pods = spec.rollout.canary.step_weights, spec.rollout.traffic.gateway is None
    has_route = state.phase == "Promoting" or not route_rejection_message(snapshot)
    route_deadline, next_late_at = _route_deadline(snapshot, canary_arm), fleet.next_late_at(state.phase)
    outcome, message = (verdict.outcome, verdict.message) if verdict else ("Continue", "")
    if evaluation.verdict is not None and evaluation.verdict.outcome == "Rollback":
        outcome, message = "Rollback", describe_verdict(evaluation.verdict)
    if evaluation.replaces_analysis:
        outcome, message = "Promote", evaluation.message
    return CanaryObservation(
        ready=fleet.has_ready_pods(state.phase, ramp, state.step, by_pods=by_pods) and has_route,
        deadline_exceeded=fleet.exceeds_deadline(state.phase) or (route_deadline is not None and now >= route_deadline),
        next_deadline_at=next_late_at if route_deadline is None else min(route_deadline, next_late_at or route_deadline),
        abort_message=" ".join(abort_reasons),
        verdict=outcome,
        verdict_message=message,
        manual_action=read_manual_action(snapshot.resource, canary_arm.revision),
        # Without a verdict there are no counts to continue from.
        extension_ends_at=read_extension_request(snapshot.resource, canary_arm.revision).end_at(now) if verdict else None,
        needs_evaluation=evaluation.is_pending,
        evaluated_message=evaluation.message,
        evaluation_ends_at=evaluation.ends_at,
    )


def collect_abort_reasons(snapshot: Snapshot, phase: StateMachinePhase, fleet: RolloutPods, now: datetime) -> list[str]:
    """Return the messages about abort conditions of the canary; empty without any."""
    reference = fleet.control if fleet.control.live_pods else fleet.stable
    # In other phases the deadline of the state machine applies.
    not_ready_timeout = snapshot.resource.spec.rollout.progress_deadline if phase in _PHASES_WITHOUT_POD_DEADLINE else None
    reasons = list(
        find_abort_reasons(
            fleet.canary, reference, snapshot.engines.invalid_metrics, not_ready_timeout, snapshot.cluster.last_log_lines, now
        )
    )
    context_message = shorter_context_message(snapshot.engines.context_lengths, snapshot.resource.spec.engine.args)
    return [*reasons, context_message] if context_message else reasons


def read_manual_action(resource: SpeculativeDeployment, revision: str) -> Literal["promote", "rollback"] | None:
    """Return the action that a user has requested for this very revision."""
    annotations = resource.metadata.annotations
    if annotations.get(ROLLBACK_ANNOTATION) == revision:
        return "rollback"
    return "promote" if annotations.get(PROMOTE_ANNOTATION) == revision else None


def is_stable_broken(cluster: ClusterState, stable: Arm) -> bool:
    """Return whether no stable pod is ready, and each of them for a reason that does not pass automatically."""
    stable_pods = cluster.live_pods(stable.revision)
    return bool(stable_pods) and all(map(pod_failures.is_pod_unrecoverable, stable_pods))


def find_most_severe_failure(cluster: ClusterState, stable: Arm, canary_arm: CanaryArm) -> pod_failures.PodFailure | None:
    """Return the failure that keeps pods of canary and control from being ready."""
    arm_failures = (
        cluster.pod_failure(canary_arm.revision),
        cluster.pod_failure(stable.revision, control=True),
    )
    return pod_failures.select_most_severe(*(pod_failure for pod_failure in arm_failures if pod_failure is not None))


def _route_deadline(snapshot: Snapshot, canary_arm: CanaryArm) -> datetime | None:
    """Return until when a gateway that rejects the route is waited for; None where a gateway accepts it."""
    since = route_rejected_since(snapshot)
    if since is None:
        return None
    return max(since, canary_arm.step_start_time or canary_arm.start_time) + snapshot.resource.spec.rollout.progress_deadline
