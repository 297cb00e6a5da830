"""Which pods are on trial, and when more of them join.

The trial begins with `spec.rollout.inPlace.pods` pods, and grows after each `canary.stepDuration` without a verdict to the
shares of `canary.stepWeights`, up to MAX_TRIAL_PODS. A pod that has ended leaves, and another one takes its index.

Guarantees: pure. A pod takes part in whole pairs of windows only: it joins with the next pair, and leaves when a pair has been
counted. No two pods have the same index. Not guaranteed: that there is a pod for every index; without one, its partner's pairs
count alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from datetime import timedelta

from aerie.api.rollout import RolloutSpec
from aerie.api.status import TrialPod
from aerie.rollout.in_place.engine_pods import EnginePod

MAX_TRIAL_PODS = 40
"""Pods to which a trial grows: each of them serves half of its requests with a drafter that may be worse."""


def compute_growth_step(rollout_spec: RolloutSpec, elapsed: timedelta) -> int:
    """Return the number of times that a trial has grown after this time."""
    canary = rollout_spec.canary
    step_count = len(canary.step_weights)
    return min(step_count, elapsed // canary.step_duration) if canary.step_duration > timedelta(0) else step_count


def count_desired_pods(rollout_spec: RolloutSpec, replicas: int, growth_step: int) -> int:
    """Return the number of pods on trial after this many steps of growth; at least 1, and at most `replicas`."""
    start = rollout_spec.in_place.pods
    share = rollout_spec.canary.step_weights[:growth_step][-1:]
    grown = math.ceil(replicas * share[0] / 100) if share else start
    return max(1, min(max(start, grown), max(MAX_TRIAL_PODS, start), replicas))


def update_trial_pods(
    trial_pods: Sequence[TrialPod], available: Collection[EnginePod], desired_count: int, first_pair: int
) -> list[TrialPod]:
    """Return the pods on trial: those that are still available, and available ones at the lowest free indexes.

    `first_pair`: the pair of windows with which new ones begin.
    """
    available_keys = {(pod.name, pod.uid) for pod in available}
    retained = {pod.index: pod for pod in trial_pods if (pod.name, pod.uid) in available_keys}
    retained_keys = {(pod.name, pod.uid) for pod in retained.values()}
    joining = (pod for pod in available if (pod.name, pod.uid) not in retained_keys)
    for index in range(desired_count + len(retained)):
        if len(retained) >= desired_count:
            break
        if index not in retained and (pod := next(joining, None)) is not None:
            retained[index] = TrialPod(name=pod.name, uid=pod.uid, index=index, first_pair=first_pair)
    return [retained[index] for index in sorted(retained)]
