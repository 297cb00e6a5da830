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

from aerie.rollout.capacity.replica_counts import Arms, Pods

ALL = 100_000
"""All of the traffic. A percent of it is too much for one pod of a thousand; the Gateway API allows 1,000,000."""


def percent(weight: int) -> int:
    """As the status shows it: a weight of less than one percent is shown as one, because it is not nothing."""
    return max(1, round(100 * weight / ALL)) if weight else 0


def one_arm(stable: Pods, canary: Pods, control: Pods) -> dict[str, int]:
    """While nothing is shared: all for the first arm that serves."""
    if not stable.serving and control.serving:
        return {"stable": 0, "canary": 0, "control": ALL}
    if not stable.serving and canary.serving:
        return {"stable": 0, "canary": ALL, "control": 0}
    return {"stable": ALL, "canary": 0, "control": 0}


def in_proportion(arms: Arms, stable: Pods, canary: Pods, control: Pods) -> dict[str, int]:
    """While judging: each arm as its pods are of all, so that every pod has the same load.

    The canary's and the control's weights are equal: what is compared must not differ in load.
    """
    everyone = arms.stable + arms.canary + arms.control
    if not canary.serving or (arms.control and not control.serving) or everyone == 0:
        return one_arm(stable, canary, control)
    if not stable.serving:  # all of it stands on the two arms, half and half
        half = ALL if not arms.control else ALL // 2
        return {"stable": 0, "canary": half, "control": ALL - half}
    each = max(1, round(ALL * arms.canary / everyone))
    control_weight = each if arms.control else 0
    return {"stable": ALL - each - control_weight, "canary": each, "control": control_weight}


def ramped(share: int, stable: Pods, canary: Pods) -> dict[str, int]:
    """While ramping: `share` (of `ALL`) for the canary, as long as both arms serve."""
    if not canary.serving:
        share = 0
    elif not stable.serving:
        share = ALL
    return {"stable": ALL - share, "canary": share, "control": 0}


def shared(most: int, replicas: int, arms: Arms, stable: Pods, canary: Pods) -> dict[str, int]:
    """While the canary grows or goes: as much of the traffic as its serving pods are of the fleet, at most `most` (of `ALL`)."""
    able = ALL * min(canary.serving, replicas) // max(1, replicas)
    return ramped(min(most, able), _staying(stable, arms.stable), _staying(canary, arms.canary))


def standing_in(replicas: int, arms: Arms, stable: Pods, canary: Pods, control: Pods) -> dict[str, int]:
    """While the canary goes: it has what the serving pods of the stable revision cannot bear, if any of its pods stays."""
    both = Pods(serving=stable.serving + min(control.serving, arms.control))
    owed = ALL - ALL * min(both.serving, replicas) // max(1, replicas)
    asked = Arms(arms.stable + arms.control, arms.canary)
    weights = shared(owed, replicas, asked, both, canary)
    of_control = weights["stable"] * (both.serving - stable.serving) // max(1, both.serving)
    return {"stable": weights["stable"] - of_control, "canary": weights["canary"], "control": of_control}


def to_serving(weights: Mapping[str, int], serving: Mapping[str, int]) -> dict[str, int]:
    """Weights that were given before, for the arms that serve now: an arm without a serving pod loses its own, and where that
    leaves none, an arm that serves has all, the canary last. Where no arm serves, or all that have a weight do, they stay as they
    are."""
    if not any(serving.values()) or all(serving[arm] for arm, weight in weights.items() if weight):
        return dict(weights)
    able = {arm: weight if serving[arm] else 0 for arm, weight in weights.items()}
    if not any(able.values()):
        able[min((arm for arm in weights if serving[arm]), key=lambda arm: arm == "canary")] = ALL
    return able


def _staying(pods: Pods, asked: int) -> Pods:
    """Of an arm's pods, those that are asked for."""
    return replace(pods, serving=min(pods.serving, asked))
