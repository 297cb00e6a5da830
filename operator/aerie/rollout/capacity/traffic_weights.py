"""Weight of each arm in the HTTPRoute of mode Gateway, in parts of `TOTAL_WEIGHT`.

Guarantees: the weights sum to `TOTAL_WEIGHT`. An arm without a ready pod has none while another arm has one, because a gateway
answers 503 for its share. Neither has an arm that is to have no pods from now on. The control, which has the same revision,
stands in for the stable arm before the canary does. While all arms have ready pods, each pod of canary and control has the
load of a stable pod, for up to 1,000 replicas to within 1 %. Where no arm has a ready pod, the stable arm has all.

Not guaranteed in mode Service, where the pods are the shares; nor that the gateway already knows the endpoints of a Service:
capacity/service_handover.py decides when the route may follow these weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aerie.rollout.capacity.replica_counts import ArmReplicas, PodCounts

TOTAL_WEIGHT = 100_000
"""Weight of all traffic together. A percent of it is too much for one pod of a thousand; the Gateway API allows 1,000,000."""


def weight_to_percent(weight: int) -> int:
    """Return the percentage that the status shows: a weight of less than one percent is shown as one, because it is not zero."""
    return max(1, round(100 * weight / TOTAL_WEIGHT)) if weight else 0


def single_arm_weights(stable: PodCounts, canary: PodCounts, control: PodCounts) -> dict[str, int]:
    """Return the weights while traffic is not split: all of it to the first arm with a ready pod."""
    if not stable.ready and control.ready:
        return {"stable": 0, "canary": 0, "control": TOTAL_WEIGHT}
    if not stable.ready and canary.ready:
        return {"stable": 0, "canary": TOTAL_WEIGHT, "control": 0}
    return {"stable": TOTAL_WEIGHT, "canary": 0, "control": 0}


def weights_by_replicas(target: ArmReplicas, stable: PodCounts, canary: PodCounts, control: PodCounts) -> dict[str, int]:
    """Return the weights during the analysis: the share of each arm is that of its pods, so that every pod has the same load.

    The weights of canary and control are equal: arms that are compared must not differ in load.
    """
    total_replicas = target.stable + target.canary + target.control
    if not canary.ready or (target.control and not control.ready) or total_replicas == 0:
        return single_arm_weights(stable, canary, control)
    if not stable.ready:  # the two arms share all traffic equally
        canary_weight = TOTAL_WEIGHT if not target.control else TOTAL_WEIGHT // 2
        return {"stable": 0, "canary": canary_weight, "control": TOTAL_WEIGHT - canary_weight}
    weight = max(1, round(TOTAL_WEIGHT * target.canary / total_replicas))
    control_weight = weight if target.control else 0
    return {"stable": TOTAL_WEIGHT - weight - control_weight, "canary": weight, "control": control_weight}


def ramp_weights(canary_weight: int, stable: PodCounts, canary: PodCounts) -> dict[str, int]:
    """Return the weights during the ramp: `canary_weight` (of `TOTAL_WEIGHT`) for the canary, as long as both arms have ready
    pods."""
    if not canary.ready:
        canary_weight = 0
    elif not stable.ready:
        canary_weight = TOTAL_WEIGHT
    return {"stable": TOTAL_WEIGHT - canary_weight, "canary": canary_weight, "control": 0}


def capped_canary_weights(
    max_canary_weight: int, replicas: int, target: ArmReplicas, stable: PodCounts, canary: PodCounts
) -> dict[str, int]:
    """Return the weights while the canary scales up or down.

    Its share of the traffic is that of its ready pods in the replicas, at most `max_canary_weight` (of `TOTAL_WEIGHT`).
    """
    servable_weight = TOTAL_WEIGHT * min(canary.ready, replicas) // max(1, replicas)
    return ramp_weights(
        min(max_canary_weight, servable_weight), _cap_ready_pods(stable, target.stable), _cap_ready_pods(canary, target.canary)
    )


def rollback_weights(
    replicas: int, target: ArmReplicas, stable: PodCounts, canary: PodCounts, control: PodCounts
) -> dict[str, int]:
    """Return the weights during a rollback.

    The canary has the traffic that the ready pods of the stable revision cannot serve, if any of its pods stays.
    """
    stable_revision = PodCounts(ready=stable.ready + min(control.ready, target.control))
    missing_weight = TOTAL_WEIGHT - TOTAL_WEIGHT * min(stable_revision.ready, replicas) // max(1, replicas)
    revision_target = ArmReplicas(target.stable + target.control, target.canary)
    weights = capped_canary_weights(missing_weight, replicas, revision_target, stable_revision, canary)
    control_weight = weights["stable"] * (stable_revision.ready - stable.ready) // max(1, stable_revision.ready)
    return {"stable": weights["stable"] - control_weight, "canary": weights["canary"], "control": control_weight}


def redirect_to_ready_arms(weights: Mapping[str, int], ready_pods: Mapping[str, int]) -> dict[str, int]:
    """Return earlier weights adjusted to the arms that have ready pods now.

    An arm without a ready pod loses its weight. Where that leaves none, an arm with a ready pod has all, the canary last.
    Where no arm has a ready pod, or all arms with a weight have one, the weights stay.
    """
    if not any(ready_pods.values()) or all(ready_pods[arm] for arm, weight in weights.items() if weight):
        return dict(weights)
    redirected = {arm: weight if ready_pods[arm] else 0 for arm, weight in weights.items()}
    if not any(redirected.values()):
        redirected[min((arm for arm in weights if ready_pods[arm]), key=lambda arm: arm == "canary")] = TOTAL_WEIGHT
    return redirected


def _cap_ready_pods(pods: PodCounts, target_replicas: int) -> PodCounts:
    """Return the counts with at most the target replicas as ready pods."""
    return replace(pods, ready=min(pods.ready, target_replicas))
