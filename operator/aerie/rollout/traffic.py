"""The weight of each arm in the HTTPRoute of mode Gateway, in percent.

Guarantees: the weights sum to 100; an arm without a serving pod gets none, because a gateway answers 503 for its share, and
neither does one that is to have no pods from now on; while nothing but the stable arm serves, it has all. Not guaranteed in mode
Service, where the pods are the shares.
"""

from __future__ import annotations

from dataclasses import replace

from aerie.rollout.capacity import Arms, Pods


def in_proportion(arms: Arms, stable: Pods, canary: Pods, control: Pods) -> dict[str, int]:
    """While judging: each arm as its pods are of all, so that every pod has the same load.

    The canary's and the control's weights are equal to the point: what is compared must not differ in load.
    """
    everyone = arms.stable + arms.canary + arms.control
    if not canary.serving or (arms.control and not control.serving) or everyone == 0:
        return {"stable": 100, "canary": 0, "control": 0}
    if not stable.serving:  # all of it stands on the two arms, half and half
        half = 100 if not arms.control else 50
        return {"stable": 0, "canary": half, "control": 100 - half}
    each = max(1, round(100 * arms.canary / everyone))
    control_weight = each if arms.control else 0
    return {"stable": 100 - each - control_weight, "canary": each, "control": control_weight}


def ramped(share: int, stable: Pods, canary: Pods) -> dict[str, int]:
    """While ramping: `share` percent for the canary, as long as both arms serve."""
    if not canary.serving:
        share = 0
    elif not stable.serving:
        share = 100
    return {"stable": 100 - share, "canary": share, "control": 0}


def shared(most: int, replicas: int, arms: Arms, stable: Pods, canary: Pods) -> dict[str, int]:
    """While the canary grows or goes: as much of the traffic as its serving pods are of the fleet, at most `most` percent."""
    able = 100 * min(canary.serving, replicas) // max(1, replicas)
    return ramped(min(most, able), _staying(stable, arms.stable), _staying(canary, arms.canary))


def _staying(pods: Pods, asked: int) -> Pods:
    """Of an arm's pods, those that are asked for."""
    return replace(pods, serving=min(pods.serving, asked))
