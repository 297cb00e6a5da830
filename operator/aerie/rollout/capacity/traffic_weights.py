"""The weight of each arm in the HTTPRoute of mode Gateway, in parts of `ALL`.

Guarantees: the weights sum to `ALL`; an arm without a serving pod gets none while another arm serves, because a gateway answers
503 for its share, and neither does one that is to have no pods from now on; the arm that stands in for the stable one is the
control, of the same revision, before the canary. While all arms serve, each pod of canary and control has the load of a stable
pod, in fleets of up to 1,000 pods to within 1 %. Where nobody serves, the stable arm has all. Not guaranteed in mode Service,
where the pods are the shares; nor that the gateway knows the endpoints of a Service already: when the route may follow these
weights is the matter of handover.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aerie.rollout.capacity.replica_counts import ArmReplicas, PodCounts

TOTAL_WEIGHT = 100_000
"""All of the traffic. A percent of it is too much for one pod of a thousand; the Gateway API allows 1,000,000."""


def weight_to_percent(weight: int) -> int:
    """As the status shows it: a weight of less than one percent is shown as one, because it is not nothing."""
    return max(1, round(100 * weight / TOTAL_WEIGHT)) if weight else 0


def single_arm_weights(stable: PodCounts, canary: PodCounts, control: PodCounts) -> dict[str, int]:
    """While nothing is shared: all for the first arm that serves."""
    if not stable.ready and control.ready:
        return {"stable": 0, "canary": 0, "control": TOTAL_WEIGHT}
    if not stable.ready and canary.ready:
        return {"stable": 0, "canary": TOTAL_WEIGHT, "control": 0}
    return {"stable": TOTAL_WEIGHT, "canary": 0, "control": 0}


def weights_by_replicas(target: ArmReplicas, stable: PodCounts, canary: PodCounts, control: PodCounts) -> dict[str, int]:
    """While judging: each arm as its pods are of all, so that every pod has the same load.

    The canary's and the control's weights are equal: what is compared must not differ in load.
    """
    everyone = target.stable + target.canary + target.control
    if not canary.ready or (target.control and not control.ready) or everyone == 0:
        return single_arm_weights(stable, canary, control)
    if not stable.ready:  # all of it stands on the two arms, half and half
        half = TOTAL_WEIGHT if not target.control else TOTAL_WEIGHT // 2
        return {"stable": 0, "canary": half, "control": TOTAL_WEIGHT - half}
    each = max(1, round(TOTAL_WEIGHT * target.canary / everyone))
    control_weight = each if target.control else 0
    return {"stable": TOTAL_WEIGHT - each - control_weight, "canary": each, "control": control_weight}


def ramp_weights(canary_weight: int, stable: PodCounts, canary: PodCounts) -> dict[str, int]:
    """While ramping: `share` (of `ALL`) for the canary, as long as both arms serve."""
    if not canary.ready:
        canary_weight = 0
    elif not stable.ready:
        canary_weight = TOTAL_WEIGHT
    return {"stable": TOTAL_WEIGHT - canary_weight, "canary": canary_weight, "control": 0}


def capped_canary_weights(
    max_canary_weight: int, replicas: int, target: ArmReplicas, stable: PodCounts, canary: PodCounts
) -> dict[str, int]:
    """While the canary grows or goes: as much of the traffic as its serving pods are of the fleet, at most `most` (of `ALL`)."""
    able = TOTAL_WEIGHT * min(canary.ready, replicas) // max(1, replicas)
    return ramp_weights(
        min(max_canary_weight, able), _cap_ready_pods(stable, target.stable), _cap_ready_pods(canary, target.canary)
    )


def rollback_weights(
    replicas: int, target: ArmReplicas, stable: PodCounts, canary: PodCounts, control: PodCounts
) -> dict[str, int]:
    """While the canary goes: it has what the serving pods of the stable revision cannot bear, if any of its pods stays."""
    both = PodCounts(ready=stable.ready + min(control.ready, target.control))
    owed = TOTAL_WEIGHT - TOTAL_WEIGHT * min(both.ready, replicas) // max(1, replicas)
    asked = ArmReplicas(target.stable + target.control, target.canary)
    weights = capped_canary_weights(owed, replicas, asked, both, canary)
    of_control = weights["stable"] * (both.ready - stable.ready) // max(1, both.ready)
    return {"stable": weights["stable"] - of_control, "canary": weights["canary"], "control": of_control}


def redirect_to_ready_arms(weights: Mapping[str, int], ready_pods: Mapping[str, int]) -> dict[str, int]:
    """Weights that were given before, for the arms that serve now: an arm without a serving pod loses its own, and where that
    leaves none, an arm that serves has all, the canary last. Where no arm serves, or all that have a weight do, they stay as they
    are."""
    if not any(ready_pods.values()) or all(ready_pods[arm] for arm, weight in weights.items() if weight):
        return dict(weights)
    able = {arm: weight if ready_pods[arm] else 0 for arm, weight in weights.items()}
    if not any(able.values()):
        able[min((arm for arm in weights if ready_pods[arm]), key=lambda arm: arm == "canary")] = TOTAL_WEIGHT
    return able


def _cap_ready_pods(pods: PodCounts, asked: int) -> PodCounts:
    """Of an arm's pods, those that are asked for."""
    return replace(pods, ready=min(pods.ready, asked))
