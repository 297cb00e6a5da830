"""What clients notice of a change, and until when a promotion is reverted without loading a model.

Guarantee: pure; the numbers are those of the functions that rollouts use.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from aerie.api.types.duration import format_duration
from aerie.cli.plan.change import PlannedChange
from aerie.rollout.canary.evaluation import describe_result
from aerie.rollout.capacity.replica_counts import Capacity, max_retained_replicas, replicas_during_analysis
from aerie.rollout.in_place.evaluation import MIN_READY_PODS, MIN_READY_PODS_BY_DEFAULT
from aerie.rollout.in_place.trial_pods import count_desired_pods


def describe_users(change: PlannedChange) -> Iterator[str]:
    """Yield what clients notice, as sentences."""
    match change.kind:
        case "Canary":
            yield from _describe_canary(change)
        case "InPlace":
            yield from _describe_in_place(change)
        case "FirstRevision":
            yield "Nobody is served before the first pods are ready."
        case "Reverted":
            yield "The retained pods of the previous revision serve at once."
        case "Withdrawn":
            yield "Requests that went to the rollout in progress go to the stable pods."
        case "Scaling":
            yield "The same revision serves, with another number of pods."
        case "Network":
            yield "The same pods serve. The way to them, or the limit of their disruptions, changes."
        case "Continues":
            yield "The rollout in progress continues; new parameters of its analysis take effect with the next one."
        case _:
            yield "Nothing: the same pods serve."


def _describe_canary(change: PlannedChange) -> Iterator[str]:
    spec, canary = change.desired.resource.spec, change.status.canary
    assert canary is not None
    evaluation = canary.evaluation
    arms = replicas_during_analysis(Capacity.from_spec(spec.replicas, spec.rollout.canary))
    share = 100 * arms.canary / (arms.stable + arms.canary + arms.control)
    if canary.phase == "Promoting":
        yield "No stable pod is ready, so the new pods serve as soon as they are ready, without an analysis."
        return
    if evaluation is not None and evaluation.result is None:
        yield "No request of users reaches the new revision during the shadow evaluation."
        yield f"If it accepts the drafter, the ramp follows; otherwise the analysis with {share:.0f} % of the traffic."
    else:
        if evaluation is not None:
            yield describe_result(evaluation)
        yield f"During warm-up and analysis, {share:.0f} % of the traffic goes to the canary."
    if steps := spec.rollout.canary.step_weights:
        text = ", ".join(map(str, steps))
        yield f"Ramp: {text} %, each for {format_duration(spec.rollout.canary.step_duration)} or more, then all."
    if spec.rollout.canary.capacity == "Reuse":
        yield f"While the new pods load, {spec.replicas - arms.stable} fewer pods serve."


def _describe_in_place(change: PlannedChange) -> Iterator[str]:
    spec = change.desired.resource.spec
    rollout = spec.rollout
    needed = MIN_READY_PODS_BY_DEFAULT if rollout.analysis.shadow.source is None else MIN_READY_PODS
    if rollout.shadow_source != "None" and spec.replicas >= needed:
        yield f"Shadow evaluation first: one of {spec.replicas} pods gets no requests of users meanwhile."
    count = count_desired_pods(rollout, spec.replicas, 0)
    verb = "answers" if count == 1 else "answer"
    yield f"By turns, {count} of {spec.replicas} pods {verb} half of the requests with the new drafter."
    last = count_desired_pods(rollout, spec.replicas, len(rollout.canary.step_weights))
    if last > count:
        yield f"Without a verdict, more pods join, up to {last}."


def describe_reversal(change: PlannedChange) -> str:
    """Return until when a promotion is reverted without a reload, as a sentence; empty where nothing is promoted."""
    spec = change.desired.resource.spec
    canary = spec.rollout.canary
    if change.kind == "InPlace":
        return (
            "Before the promotion, pods return to the stable drafter without a reload of the model. After it, the old drafter is "
            "another change in place."
        )
    if change.kind != "Canary":
        return ""
    retained = max_retained_replicas(Capacity.from_spec(spec.replicas, canary))
    if canary.scale_down_delay <= timedelta(0) or not retained:
        cause = "canary.scaleDownDelay is 0s" if retained else f"canary.capacity is {canary.capacity}"
        return f"Before the promotion, the stable pods serve on. After it, old pods load the model again ({cause})."
    delay = format_duration(canary.scale_down_delay)
    pods = "old pod is" if retained == 1 else "old pods are"
    return f"Before the promotion, the stable pods serve on. For {delay} after it, {retained} {pods} retained and serve at once."
