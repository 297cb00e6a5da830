"""A paused rollout: every arm keeps the replicas and the traffic that were last requested for it.

Guarantees: no revision starts, none is removed, and no verdict takes effect. Not guaranteed: that the weights of a suspended
rollout stay as they were, because an arm without a ready pod gets no traffic.
"""

from __future__ import annotations

from dataclasses import replace

from aerie.api.status import Arm, Status
from aerie.rollout.capacity.replica_counts import ArmReplicas
from aerie.rollout.capacity.traffic_weights import TOTAL_WEIGHT, redirect_to_ready_arms
from aerie.rollout.conditions import PROGRESSING, ConditionUpdate
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.progression.context import ProgressionContext
from aerie.rollout.progression.progression import Progression


def pause_rollout(context: ProgressionContext) -> Progression | None:
    """Keep everything while the spec pauses the rollout."""
    if not context.snapshot.resource.spec.rollout.paused:
        return None
    condition = ConditionUpdate(
        PROGRESSING, "False", "Paused", "Rollout is paused by spec.rollout.paused: nothing is changed until it is false."
    )
    progression = replace(
        context.serving,
        phase="Paused",
        progressing=condition,
        canary=context.canary_arm,
        previous=context.status.previous,
    )
    return _with_current_replicas_and_weights(progression, context.snapshot, context.status, context.replicas)


def _with_current_replicas_and_weights(
    progression: Progression, snapshot: Snapshot, status: Status, replicas: int
) -> Progression:
    """Return the progression with the replicas and weights of the arms as they were last requested.

    Where the rollout is suspended without being paused, they are applied again: then an arm without a ready pod gets no
    weight.
    """
    stable, canary, previous = status.stable, status.canary, status.previous
    if stable is not None and previous is not None:
        weights = _read_status_weights(snapshot, stable=(stable, False), previous=(previous, False))
        return replace(progression, target_replicas=ArmReplicas(replicas), weights=weights)
    if stable is None or canary is None:
        return replace(progression, target_replicas=ArmReplicas(replicas) if canary is None else ArmReplicas(0, canary.replicas))
    arms: dict[str, tuple[Arm, bool]] = {"stable": (stable, False), "canary": (canary, False)}
    control_replicas = canary.control.replicas if canary.control else 0
    if canary.control is not None:
        arms["control"] = (canary.control, True)
    elif (
        snapshot.is_rollout_suspended
        and (control_deployment := snapshot.cluster.deployment(stable.revision, control=True)) is not None
    ):
        # It was to be removed, and no arm loses pods now: its pods can stand in for stable ones.
        arms["control"] = (stable.model_copy(update={"weight": 0}), True)
        control_replicas = control_deployment["spec"]["replicas"]
    return replace(
        progression,
        target_replicas=ArmReplicas(stable.replicas, canary.replicas, control_replicas),
        weights=_read_status_weights(snapshot, **arms),
    )


def _read_status_weights(snapshot: Snapshot, **arms: tuple[Arm, bool]) -> dict[str, int]:
    """Return the arms' weights as the status shows them. Each arm comes with a flag that its pods are control pods."""
    weights = {name: TOTAL_WEIGHT * (arm.weight or 0) // 100 for name, (arm, _) in arms.items()}
    if not snapshot.is_rollout_suspended:
        return weights
    ready_pods = {
        name: snapshot.cluster.ready_pod_count(arm.revision, control=is_control) for name, (arm, is_control) in arms.items()
    }
    return redirect_to_ready_arms(weights, ready_pods)
