"""The status after a step: what people and the next step read.

Guarantee: pure; nothing in it follows the clock alone but that a gateway has been silent for too long, so that it is written only
when something has happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypeVar

from aerie.analysis import post_promotion
from aerie.api.status import Arm, CanaryArm, PreviousArm, Status
from aerie.manifests import naming
from aerie.rollout.capacity.traffic_weights import percent
from aerie.rollout.conditions import DEGRADED, READY, Finding, conditions
from aerie.rollout.facts.arm_metrics import SILENT, with_figures
from aerie.rollout.facts.route_status import refusal, unanswered
from aerie.rollout.facts.snapshot import Observed
from aerie.rollout.progression import Course, retry_word
from aerie.rollout.revision.desired import Wanted
from aerie.rollout.revision.recovery import arm_of
from aerie.rollout.status.hold import VERSION_SKEW, resting
from aerie.rollout.trials.effective_setting import Asked, Intent
from aerie.rollout.trials.status import told

KEPT_OUTCOMES = 10
UNAVAILABLE = "MetricsUnavailable"
DRIFT = 0.15
"""Share by which the acceptance length may lie below that of the acceptance, before it is worth a warning. Beside the stable pods
there is nothing to compare with, and requests of another hour may well make some percent."""
_A = TypeVar("_A", bound=Arm)


def report(
    observed: Observed, wanted: Wanted, course: Course, taken: list[Any], now: datetime, asked: Asked, intent: Intent
) -> Status:
    """The status. `taken`: objects of others that bear a name which Aerie needs."""
    resource = observed.resource
    before = resource.status or Status()
    stable = _stable(observed, wanted, course, before)
    canary = _canary(observed, course, before)
    control = canary.control if canary is not None else None
    previous = _previous(observed, course)
    arms = [arm for arm in (stable, canary, control, previous if course.all_serve else None) if arm is not None]
    tuning = told(observed, asked, intent, course, stable, now)
    findings = [
        _ready(observed, stable, canary, course),
        course.progressing,
        course.passed,
        _degraded(observed, course, taken, stable, now),
        *([tuning.finding] if tuning.finding is not None else []),
    ]
    return Status(
        observed_generation=resource.metadata.generation,
        phase=course.phase,
        conditions=conditions(findings, resource.status, resource.metadata.generation, now),
        replicas=sum(arm.replicas for arm in arms),
        ready_replicas=sum(arm.ready_replicas for arm in arms),
        selector=",".join(f"{key}={value}" for key, value in naming.serving(resource.metadata.name, course.only).items()),
        stable=stable,
        canary=canary,
        previous=previous,
        analysis=course.analysis,
        speculation=tuning.speculation,
        rejected=course.rejected,
        retry=retry_word(resource),
        history=([*([course.outcome] if course.outcome else []), *before.history])[:KEPT_OUTCOMES],
    )


def _stable(observed: Observed, wanted: Wanted, course: Course, before: Status) -> Arm | None:
    if course.stable is None:
        return None
    if course.stable == wanted.revision:
        arm = wanted.arm
    else:  # a spec of before: what is known of it is in the status
        known = _last(before, course.stable) or arm_of(observed, course.stable)
        arm = Arm(**{name: getattr(known, name) for name in Arm.model_fields})
    arm = _counted(observed, arm, course.arms.stable)
    arm = arm.model_copy(update={"weight": _weight(observed, course, "stable")})
    last = _last(before, arm.revision)
    accepted = course.accepted or (last.accepted_length if last is not None else None)
    arm = arm.model_copy(update={"accepted_length": accepted})
    found = observed.figures_of(arm.revision)
    return with_figures(arm, last, found, written=_counted_on(course, before))


def _counted_on(course: Course, before: Status) -> bool:
    """Whether the analysis has gone on, which is written in any case."""
    return course.canary is not None and course.analysis != before.analysis


def _last(before: Status, revision: str) -> Arm | None:
    """What the status said of the revision, in whatever arm it was."""
    arms = (before.stable, before.canary, before.previous)
    return next((arm for arm in arms if arm is not None and arm.revision == revision), None)


def _previous(observed: Observed, course: Course) -> PreviousArm | None:
    if course.previous is None:
        return None
    arm = _counted(observed, course.previous, course.previous.replicas)
    return arm.model_copy(update={"weight": _percent(course.weights, "previous")})


def _percent(weights: Mapping[str, int], arm: str) -> int:
    """The arm's share in whole percents, which sum to 100: the stable arm has what the others leave."""
    if arm != "stable":
        return percent(weights.get(arm, 0))
    return max(0, 100 - sum(percent(weight) for name, weight in weights.items() if name != "stable"))


def _canary(observed: Observed, course: Course, before: Status) -> CanaryArm | None:
    if course.canary is None:
        return None
    arm = _counted(observed, course.canary, course.arms.canary)
    known = before.canary if before.canary and before.canary.revision == arm.revision else None
    control = None
    if course.arms.control and course.stable is not None:
        base = known.control if known and known.control else Arm(revision=course.stable)
        control = _counted(observed, base, course.arms.control, control=True)
        control = control.model_copy(update={"weight": _weight(observed, course, "control")})
        last = known.control if known else None
        found = observed.figures_of(course.stable, control=True)
        control = with_figures(control, last, found, written=_counted_on(course, before))
    weight = _weight(observed, course, "canary") if course.stable is not None else None
    arm = arm.model_copy(update={"control": control, "weight": weight})
    return with_figures(arm, known, observed.figures_of(arm.revision), written=_counted_on(course, before))


def _counted(observed: Observed, arm: _A, replicas: int, *, control: bool = False) -> _A:
    serving = observed.serving(arm.revision, control=control)
    return arm.model_copy(update={"replicas": replicas, "ready_replicas": serving})


def _weight(observed: Observed, course: Course, arm: str) -> int:
    """Percent of the traffic: by the route in mode Gateway, by serving pods in mode Service."""
    if observed.resource.spec.rollout.traffic.gateway is not None or course.canary is None or course.stable is None:
        weights: Mapping[str, int] = course.weights
        return _percent(weights, arm)
    serving = {
        "stable": observed.serving(course.stable),
        "canary": observed.serving(course.canary.revision),
        "control": observed.serving(course.stable, control=True),
    }
    return round(100 * serving[arm] / max(1, sum(serving.values())))


def _ready(observed: Observed, stable: Arm | None, canary: CanaryArm | None, course: Course) -> Finding:
    replicas = observed.resource.spec.replicas
    if stable is None:
        told = course.progressing.message  # with pods under way it counts them
        return Finding(READY, "False", course.progressing.reason, told if canary else f"no pod has been started: {told}")
    if replicas == 0:
        return Finding(READY, "True", "ScaledToZero", "spec.replicas is 0: no pod is asked for")
    arms = [arm for arm in (stable, canary, canary.control if canary else None) if arm is not None]
    serving, owed = sum(arm.ready_replicas for arm in arms), stable.replicas if canary is None else min(replicas, stable.replicas)
    counted = stable.ready_replicas if canary is None else serving
    told = f"{min(counted, replicas) if canary else counted} of {replicas} pods serve"
    if stable.ready_replicas >= owed and counted >= replicas:
        return Finding(READY, "True", "Serving", told)
    trouble = observed.trouble(stable.revision)
    return Finding(READY, "False", trouble.reason if trouble else "Starting", f"{told}: {trouble.message}" if trouble else told)


def _degraded(observed: Observed, course: Course, taken: list[Any], stable: Arm | None, now: datetime) -> Finding:
    if (why := resting(observed)) is not None:
        return why
    if taken:
        named = " and ".join(f"{item['kind']} {item['metadata']['name']} belongs to {_owner(item)}" for item in taken)
        it, name = ("it", "the name") if len(taken) == 1 else ("them", "the names")
        message = f"{named}, and Aerie needs {name}: delete or rename {it}, or rename the resource"
        return Finding(DEGRADED, "True", "NameTaken", message)
    trouble = observed.trouble(course.stable) if course.stable else None
    if (trouble is None or trouble.waits) and (unrouted := refusal(observed)):
        return Finding(DEGRADED, "True", "RouteNotAccepted", unrouted)
    if trouble is not None and not trouble.waits:
        return Finding(DEGRADED, "True", trouble.reason, trouble.message)
    if unheard := unanswered(observed, now)[0]:
        return Finding(DEGRADED, "True", "RouteNotAnswered", unheard)
    if source := _source_trouble(observed):
        return Finding(DEGRADED, "True", UNAVAILABLE, source)
    if observed.outdated:
        return Finding(DEGRADED, "True", VERSION_SKEW, observed.outdated)
    if (drifted := _drift(stable)) is not None:
        return drifted
    return Finding(DEGRADED, "False", "AsExpected", "nothing is amiss")


def _owner(item: Any) -> str:
    references = item["metadata"].get("ownerReferences") or []
    return next((f"{owner['kind']} {owner['name']}" for owner in references if owner.get("controller")), "somebody else")


def _source_trouble(observed: Observed) -> str:
    """What is wrong with the source of the metrics; as the status has it, while an operator that has just begun does not know."""
    if observed.source_trouble is not None or observed.resource.spec.metrics.source is None:
        return observed.source_trouble or ""
    status = observed.resource.status
    known = (one for one in (status.conditions if status else []) if (one.type, one.reason) == (DEGRADED, UNAVAILABLE))
    return next((one.message for one in known), "")


def _drift(stable: Arm | None) -> Finding | None:
    """That the stable pods' acceptance length is 1.00, or far below that with which they were accepted; None while neither is."""
    if stable is None or stable.acceptance_length is None:
        return None
    trimmed = stable.setting is not None and stable.setting.mode == "Adaptive"  # drafts that the engine trims count as rejected
    if stable.acceptance_length <= SILENT and stable.accepted_length != SILENT and not trimmed:
        return Finding(DEGRADED, "True", "DraftsRejected", _silent(stable))
    fall = 1 - stable.acceptance_length / stable.accepted_length if stable.accepted_length else 0.0
    if fall <= DRIFT:
        return None
    message = (
        f"acceptance length is {stable.acceptance_length:.2f}, {100 * fall:.0f} % below the {stable.accepted_length:.2f} with "
        f"which revision {stable.revision} was accepted: requests have changed, or its drafter fits them less than it did. "
        "Nothing is done about it by itself; a drafter trained on today's requests may be worth a canary"
    )
    return Finding(DEGRADED, "True", "DriftSuspected", message)


def _silent(stable: Arm) -> str:
    """What an acceptance length of 1.00 means."""
    if stable.accepted_length:
        was = f"acceptance length is 1.00, and was {stable.accepted_length:.2f} when revision {stable.revision} was accepted"
        return f"{was}. {post_promotion.LOST}"
    return (
        f"acceptance length is 1.00: next to none of the tokens that the drafter of revision {stable.revision} proposes is "
        "accepted. If that was so from the start, it does not fit the target, or does not load as it should. If not: "
        f"{post_promotion.LOST}"
    )
