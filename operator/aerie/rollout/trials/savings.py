"""GPU time that tuning has saved and spent: the cost of trials and of the pods retained after them, and the gain since.

Guarantee: pure. Savings are in hours of a pod, and accrue at the rate of the measured gains of the applied setting.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from aerie.api import SpeculativeDeployment
from aerie.api.status import Arm, SpeculationStatus, Status, Trial, TuningSavings
from aerie.rollout.capacity.replica_counts import Capacity
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.progression.progression import Progression
from aerie.rollout.trials.effective_setting import EffectiveSetting


def charge_trial(
    speculation_status: SpeculationStatus,
    snapshot: Snapshot,
    previous_status: Status,
    trial: Trial,
    *,
    promoted: bool,
    now: datetime,
) -> TuningSavings:
    """Return the savings with the cost of the trial.

    The cost is the time of its pods beyond spec.replicas, and the loading time of pods that replaced replicas. After a promotion
    without extra pods, each other replica has that loading time too.
    """
    canary_arm = (
        previous_status.canary
        if previous_status.canary is not None and previous_status.canary.revision == trial.revision
        else None
    )
    savings = _accrue_savings(speculation_status.savings, snapshot.resource, now)
    if canary_arm is None:
        return savings
    canary_hours = max(timedelta(0), now - canary_arm.start_time) / timedelta(hours=1)
    loading_hours = max(timedelta(0), (canary_arm.ready_time or now) - canary_arm.start_time) / timedelta(hours=1)
    spec = snapshot.resource.spec
    capacity = Capacity.from_spec(spec.replicas, spec.rollout.canary)
    stable_revision = previous_status.stable.revision if previous_status.stable is not None else ""
    trial_pods = (*snapshot.cluster.live_pods(trial.revision), *snapshot.cluster.live_pods(stable_revision, control=True))
    scheduled_pods = sum(not pod_failures.is_pod_unschedulable(pod) for pod in trial_pods)  # a pod without a node costs nothing
    extra_pods = min(capacity.max_total_pods - spec.replicas, scheduled_pods)
    replaced_pods = capacity.canary_replicas + capacity.control_replicas - extra_pods if canary_arm.ready_time is not None else 0
    if promoted and not extra_pods:
        replaced_pods += spec.replicas
    return _add_cost(savings, extra_pods * canary_hours + max(0, replaced_pods) * loading_hours)


def with_retention_cost(
    speculation_status: SpeculationStatus,
    resource: SpeculativeDeployment,
    previous_status: Status,
    progression: Progression,
    now: datetime,
) -> SpeculationStatus:
    """Return the status with the cost of the pods that were retained after the promotion of a trial, once they are scaled
    down."""
    previous, last_record = previous_status.previous, next(iter(speculation_status.trials), None)
    if (
        previous is None
        or progression.previous is not None
        or last_record is None
        or previous_status.stable is None
        or speculation_status.savings is None
    ):
        return speculation_status
    if last_record.result != "Promoted" or last_record.revision != previous_status.stable.revision:
        return speculation_status
    hours = max(timedelta(0), now - last_record.completion_time) / timedelta(hours=1)
    savings = _add_cost(_accrue_savings(speculation_status.savings, resource, now), previous.replicas * hours)
    return speculation_status.model_copy(update={"savings": savings})


def _add_cost(savings: TuningSavings, hours: float) -> TuningSavings:
    spent = round(savings.spent + hours, 2)
    return savings.model_copy(update={"spent": spent, "net": round(savings.saved - spent, 2)})


def _accrue_savings(savings: TuningSavings | None, resource: SpeculativeDeployment, now: datetime) -> TuningSavings:
    """Return the savings with those since the last update."""
    if savings is None:
        return TuningSavings(update_time=now)
    hours = max(timedelta(0), now - savings.update_time) / timedelta(hours=1)
    gained = round(savings.saved + savings.current_rate * resource.spec.replicas * hours, 2)
    return savings.model_copy(update={"saved": gained, "net": round(gained - savings.spent, 2), "update_time": now})


def with_savings_rate(
    speculation_status: SpeculationStatus,
    resource: SpeculativeDeployment,
    effective: EffectiveSetting,
    stable: Arm,
    now: datetime,
) -> SpeculationStatus:
    """Return the status with what the applied setting saves against the spec's: the product of the measured gains of the trials
    that led to it. These may be of an earlier drafter."""
    if speculation_status.savings is None:
        return speculation_status
    factor, revision = 1.0, stable.served_revision
    if (
        speculation_status.applied is not None
        and speculation_status.applied.revision == revision
        and speculation_status.applied.spec_revision in effective.specs
    ):
        setting = speculation_status.applied.setting
        for record in speculation_status.trials:
            if record.result == "Promoted" and record.to_setting == setting:
                factor *= 1 + (record.measured.estimate if record.measured is not None else 0.0)
                setting = record.from_setting
    rate = round(factor - 1, 4)
    if rate == speculation_status.savings.current_rate:
        return speculation_status
    return speculation_status.model_copy(
        update={"savings": _accrue_savings(speculation_status.savings, resource, now).model_copy(update={"current_rate": rate})}
    )
