"""Where a resource's rollout goes from here: which revisions have pods, and what is said about it.

    revision of the spec ─┬─ a canary of another revision is under way ─► that one is withdrawn first
                          ├─ pods of the revision before are kept ─────► the watch (watch.py); of another one, they go first
                          ├─ is the stable one ────────────────────────► keep it
                          ├─ was rejected ─────────────────────────────► keep the stable one, say why, wait for a new word
                          ├─ has found no room ────────────────────────► keep the stable one, try again later
                          ├─ preflight: none yet, running, refused ────► no engine pod; say what is wrong
                          └─ preflight passed ─┬─ a third revision has pods ─► these go first
                                               ├─ nothing is stable ───► its pods start; when all serve, it is stable
                                               ├─ others come first ───► it waits for its turn (slots.py)
                                               └─ otherwise ───────────► the canary (canary.py)

Guarantees: a function of its arguments; one transition at a time; at most two revisions have pods. What serves is stable: a
first revision of which any pod serves is never deleted for a change of the spec, but adopted, and the change goes out by a
canary. A new spec is taken up in every phase, a rollback that cannot end included (rollback.py). Not guaranteed: that two changes
in a row are both rolled out; the last one is, and the other is told as superseded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from aerie.api import SpeculativeDeployment
from aerie.api.status import AnalysisStatus, Arm, CanaryArm, Outcome, Phase, PreviousArm, Status
from aerie.manifests import naming
from aerie.rollout.canary import blocked_rollback, post_promotion
from aerie.rollout.canary import transition as canary
from aerie.rollout.canary.transition import Way, outcome_of
from aerie.rollout.capacity.arms import Fleet, owed
from aerie.rollout.capacity.replica_counts import Arms
from aerie.rollout.capacity.traffic_weights import ALL, to_serving
from aerie.rollout.conditions import PREFLIGHT_PASSED, PROGRESSING, Finding
from aerie.rollout.facts import pod_failures
from aerie.rollout.facts.orphans import AGAIN_AFTER as LEFT_UNTIL
from aerie.rollout.facts.snapshot import Observed, labels, owned
from aerie.rollout.revision.desired import Wanted
from aerie.rollout.revision.preflight_result import SKIPPED, Verdict
from aerie.rollout.revision.recovery import leaving

RETRY = "aerie.dev/retry"
"""Annotation by which a person has a rejected revision tried again; each new value once."""
_LONGEST_WORD = 64
"""Characters of an annotation's value that the status remembers as they are."""


@dataclass(frozen=True)
class Course:
    """Where the rollout stands after this step."""

    stable: str | None
    phase: Phase
    progressing: Finding
    passed: Finding
    arms: Arms
    """Pods to ask for."""
    canary: CanaryArm | None = None
    """The revision whose pods are beside the stable ones, or start before there are any."""
    weights: Mapping[str, int] = field(default_factory=lambda: {"stable": ALL})
    analysis: AnalysisStatus | None = None
    outcome: Outcome | None = None
    preflight: bool = False
    """Whether the Job has to be there."""
    again: timedelta | None = None
    rejected: str | None = None
    """The revision that is not tried again."""
    previous: PreviousArm | None = None
    """The revision before the stable one, of which pods stay for a while."""
    accepted: float | None = None
    """The acceptance length with which the revision was accepted that has become stable just now."""
    queued: bool = False
    """Whether the rollout would begin, and claims a slot for that."""

    @property
    def all_serve(self) -> bool:
        """Whether requests are for all pods that there are."""
        return self.previous is None or self.previous.phase == "Rechecking" or self.weights.get("previous", 0) > 0

    @property
    def only(self) -> str | None:
        """The revision that all requests are for, where others have pods too."""
        return None if self.all_serve else self.stable

    @property
    def rolling(self) -> str | None:
        """The canary's revision."""
        return self.canary.revision if self.canary is not None else None


def course(observed: Observed, wanted: Wanted, verdict: Verdict, now: datetime) -> Course:
    """The course from what was observed."""
    resource = observed.resource
    status, replicas = resource.status or Status(), resource.spec.replicas
    known, stable = status.canary, status.stable
    serving = Course(
        stable=stable.revision if stable else None,
        phase="Ready",
        progressing=Finding(PROGRESSING, "False", "Complete", f"revision {wanted.revision} is rolled out"),
        passed=verdict.finding(wanted.revision),
        arms=Arms(replicas),
        analysis=status.analysis,
        rejected=_rejected(observed, wanted),
    )
    if verdict.state not in ("Passed", "Refused") and wanted.revision in (serving.stable, known.revision if known else None):
        # It has pods, so it has passed, or nobody has looked; what became of the Job since says nothing about it.
        before = Finding(PREFLIGHT_PASSED, "True", "Passed", "passed before it was rolled out")
        record = verdict.record or {}
        if record.get("mode") == "Off" and record.get("ok") is not True:
            before = Finding(PREFLIGHT_PASSED, "Unknown", SKIPPED, "it was rolled out with spec.rollout.preflight.mode: Off")
        serving = replace(serving, passed=before)
    if resource.spec.rollout.paused:
        finding = Finding(PROGRESSING, "False", "Paused", "spec.rollout.paused is true: nothing is changed until it is false")
        kept = {"canary": known, "previous": status.previous, **_as_it_is(observed, status, replicas)}
        return replace(serving, phase="Paused", progressing=finding, **kept)
    if known is None and stable is not None and (stray := _stray(observed, wanted, status, stable, now)) is not None:
        known = leaving(observed, stray, now)
    unwanted = known is not None and (known.revision != wanted.revision or bool(wanted.problem))
    if known is not None and stable is not None and known.phase == "RollingBack":
        turn = blocked_rollback.turned(observed, wanted, stable, known, now)
        if turn is not None:
            return replace(_on(serving, turn.way, None), stable=turn.stable.revision)
    if known is not None and stable is not None and (known.phase == "RollingBack" or unwanted):
        ended = None if known.phase == "RollingBack" else _superseded(known, wanted, status, now)
        way = canary.withdraw(observed, stable, known, status.analysis, ended, now)
        if way.canary is None and serving.rejected is not None:  # said at once, without a moment of Ready in between
            return replace(_waiting(serving, status), arms=way.arms, weights=way.weights, again=way.again)
        return _on(serving, way, serving.rejected if ended is None else None)
    if status.previous is not None and stable is not None:
        return _watched(observed, wanted, serving, stable, status.previous, now)
    if wanted.revision == serving.stable:
        return serving
    if known is not None and known.revision != wanted.revision:  # the first one
        if count := observed.serving(known.revision):
            return _kept(serving, wanted, known, status, count, now)
        serving = replace(serving, outcome=_superseded(known, wanted, status, now))
        known = None
    if wanted.problem:
        finding = Finding(PROGRESSING, "False", "InvalidSpec", wanted.problem)
        told = Finding(PREFLIGHT_PASSED, "False", "InvalidSpec", wanted.problem)
        return replace(serving, phase="Failed", progressing=finding, passed=told)
    if serving.rejected is not None:
        return _waiting(serving, status)
    if known is None and (pause := _no_room(observed, wanted, status, now)) is not None:
        return replace(_waiting(serving, status), again=pause)
    if known is None and not verdict.passes:  # of a canary under way, the record may be gone
        refused, again = verdict.state == "Refused", verdict.again
        told = serving.passed
        finding = Finding(PROGRESSING, "False" if refused else "True", told.reason, told.message)
        phase: Phase = "Failed" if refused else "Preflight"
        return replace(serving, phase=phase, progressing=finding, preflight=True, again=again)
    if known is None and (others := _others(observed, wanted, stable)):
        message = f"pods of revision {' and '.join(others)}, which nothing asks for any more, go first"
        finding = Finding(PROGRESSING, "True", "Preflight", message)
        return replace(serving, phase="Preflight", progressing=finding, preflight=True, again=LEFT_UNTIL)
    if stable is None:
        return _first(observed, wanted, replace(serving, preflight=True), known, now)
    if replicas == 0 and known is None:
        return _adopted(serving, wanted, known, status, "no pods are asked for", now)
    if known is None and not _may_begin(observed, wanted, stable):
        return _queued(serving, wanted, observed.turn.waits_for)
    way = canary.begin(observed, wanted, stable, now) if known is None else canary.go_on(observed, wanted, stable, known, now)
    ended = way.outcome
    if ended is not None and ended.result == "Promoted":
        assert known is not None
        begun = post_promotion.begin(observed, stable, known, way.analysis, now)
        promoted = replace(_on(serving, way, None), stable=wanted.revision, arms=Arms(replicas))
        return _with(promoted, begun, accepted=post_promotion.accepted_length(way.analysis))
    rejected = wanted.revision if ended is not None and ended.retry_at is None else None
    return replace(_on(serving, way, rejected), preflight=True)


def _on(serving: Course, way: Way, rejected: str | None) -> Course:
    phase: Phase = way.canary.phase if way.canary is not None else "Ready"
    return replace(
        serving,
        phase=phase,
        progressing=way.progressing,
        arms=way.arms,
        canary=way.canary,
        weights=way.weights,
        analysis=way.analysis,
        outcome=way.outcome,
        again=way.again,
        rejected=rejected,
    )


def _watched(observed: Observed, wanted: Wanted, serving: Course, stable: Arm, previous: PreviousArm, now: datetime) -> Course:
    """Pods of the revision before are kept."""
    status = observed.resource.status or Status()
    if wanted.revision == stable.revision:
        return _with(serving, post_promotion.go_on(observed, stable, previous, now), rejected=wanted.revision)
    if wanted.revision == previous.revision and not wanted.problem:
        why = "The spec is that of the revision before again."
        found = post_promotion.taken_back(observed, stable, previous, why, status.analysis, now, "Superseded")
        return _with(serving, found)
    fleet = Fleet.of(observed, previous.revision, stable.revision, now)
    if post_promotion.standing_in(fleet):  # the promoted pods cannot do without them, so one of the two has to become whole first
        why = f"The spec has changed, and only {fleet.canary.pods.serving} of its pods serve."
        return _with(serving, post_promotion.taken_back(observed, stable, previous, why, status.analysis, now, "Superseded"))
    message = f"pods of revision {previous.revision}, which were kept since the promotion of {stable.revision}, go first"
    over = post_promotion.Watch(
        None, post_promotion.closed(status.analysis), serving.weights, Finding(PROGRESSING, "True", "Preflight", message)
    )
    return replace(_with(serving, over), phase="Preflight", again=timedelta(0))


def _with(serving: Course, found: post_promotion.Watch, rejected: str | None = None, accepted: float | None = None) -> Course:
    """`rejected`: what is not tried again if the promotion is taken back."""
    if found.back is not None:
        assert found.back_to is not None
        return replace(_on(serving, found.back, rejected), stable=found.back_to)
    return replace(
        serving,
        phase=found.previous.phase if found.previous else "Ready",
        progressing=found.progressing,
        weights=found.weights,
        analysis=found.analysis,
        previous=found.previous,
        accepted=accepted,
        again=found.again,
    )


def _others(observed: Observed, wanted: Wanted, stable: Arm | None) -> list[str]:
    """Revisions beside the stable and the wanted one that have a Deployment: an operator that was killed may have left them."""
    owner, known = observed.resource.metadata.uid, {wanted.revision, stable.revision if stable else None}
    found = [labels(one) for one in observed.of("Deployment") if owned(one, owner)]
    # A control that is left stands in as long as it is needed (children.py), and holds nothing up.
    there = {one.get(naming.REVISION) for one in found if one.get(naming.CONTROL) != "true"}
    return sorted(revision for revision in there - known if revision is not None)


def _stray(observed: Observed, wanted: Wanted, status: Status, stable: Arm, now: datetime) -> str | None:
    """A revision that the status does not name, because it was lost or could not be written, and whose pods serve for stable
    ones. One that the last rollout gave up is such a revision only where no stable pod serves."""
    if status.previous is not None:
        return None
    others = _others(observed, wanted, stable)
    takes_its_place = canary.is_broken(observed, stable) and _rejected(observed, wanted) is None
    if wanted.revision != stable.revision and not takes_its_place:
        others.append(wanted.revision)
    if observed.serving(stable.revision):
        others = [one for one in others if one != blocked_rollback.given_up(status)]
    found = next((one for one in others if observed.serving(one)), None)
    return found if found is not None and owed(observed, (stable.revision,), now) else None


def _as_it_is(observed: Observed, status: Status, replicas: int) -> dict[str, Any]:
    """Pods and weights of the arms as they were asked for last; where that is put into force again, because the rollout rests
    without being paused, without weight for an arm of which nobody serves."""
    stable, canary, previous = status.stable, status.canary, status.previous
    if stable is not None and previous is not None:
        weights = _weights(observed, stable=(stable, False), previous=(previous, False))
        return {"arms": Arms(replicas), "weights": weights}
    if stable is None or canary is None:
        return {"arms": Arms(replicas) if canary is None else Arms(0, canary.replicas)}
    arms: dict[str, tuple[Arm, bool]] = {"stable": (stable, False), "canary": (canary, False)}
    control = canary.control.replicas if canary.control else 0
    if canary.control is not None:
        arms["control"] = (canary.control, True)
    elif observed.rests and (left := observed.deployment(stable.revision, control=True)) is not None:
        # It was to go, and no arm loses pods now: its pods can stand in for stable ones.
        arms["control"] = (stable.model_copy(update={"weight": 0}), True)
        control = left["spec"]["replicas"]
    return {"arms": Arms(stable.replicas, canary.replicas, control), "weights": _weights(observed, **arms)}


def _weights(observed: Observed, **arms: tuple[Arm, bool]) -> dict[str, int]:
    """The arms' weights as the status shows them; with each arm, whether its pods are control pods."""
    weights = {name: ALL * (arm.weight or 0) // 100 for name, (arm, _) in arms.items()}
    if not observed.rests:
        return weights
    serving = {name: observed.serving(arm.revision, control=control) for name, (arm, control) in arms.items()}
    return to_serving(weights, serving)


def _rejected(observed: Observed, wanted: Wanted) -> str | None:
    """The wanted revision, where it was rejected and nobody has asked to try it again."""
    status = observed.resource.status or Status()
    retry = retry_word(observed.resource)
    if status.rejected != wanted.revision or (retry is not None and retry != status.retry):
        return None
    return status.rejected


def retry_word(resource: SpeculativeDeployment) -> str | None:
    """The value of the annotation by which a person has a revision tried again, as the status remembers it: a digest of a long
    value, because what matters is only whether it is another one."""
    said = resource.metadata.annotations.get(RETRY)
    return said if said is None or len(said) <= _LONGEST_WORD else hashlib.sha256(said.encode()).hexdigest()


def _no_room(observed: Observed, wanted: Wanted, status: Status, now: datetime) -> timedelta | None:
    """Until the revision, for which the cluster had no room, is tried again; None when it may be."""
    last = status.history[0] if status.history else None
    if last is None or last.revision != wanted.revision or last.retry_at is None or now >= last.retry_at:
        return None
    retry = retry_word(observed.resource)
    return None if retry is not None and retry != status.retry else last.retry_at - now


def _waiting(serving: Course, status: Status) -> Course:
    """The wanted revision was rejected, or waits for room; the stable one goes on serving."""
    last = next((one for one in status.history if serving.rejected in (None, one.revision)), None)
    how = f"It is not tried again until the spec changes, or the resource is annotated with a new value of {RETRY}."
    if serving.rejected is None and last is not None and last.retry_at is not None:
        how = f"It is tried again at {last.retry_at:%H:%M:%S} UTC, or when the resource is annotated with a new value of {RETRY}."
    why = f"{last.reason} {how}" if last else how
    if last is not None and last.result == "Failed":
        finding = Finding(PROGRESSING, "False", "ProgressDeadlineExceeded", why)
        return replace(serving, phase="Failed", progressing=finding)
    return replace(serving, phase="RolledBack", progressing=Finding(PROGRESSING, "False", "RolledBack", why))


def _may_begin(observed: Observed, wanted: Wanted, stable: Arm) -> bool:
    """Whether its canary may begin, however many others are under way."""
    if "Rollout" in observed.turn.may_begin or wanted.trial is not None:  # a trial has had its turn
        return True
    asked_for = canary.word(observed.resource, wanted.revision) == "promote"
    return asked_for or not observed.serving(stable.revision)


def _queued(serving: Course, wanted: Wanted, waits_for: str) -> Course:
    """Preflight has passed, and the canary has to wait."""
    told = f"revision {wanted.revision} has passed preflight"
    if not waits_for:  # the claim is not written yet, and whether anybody comes first is not known
        finding = Finding(PROGRESSING, "True", "Preflight", told)
        return replace(serving, phase="Preflight", progressing=finding, preflight=True, queued=True)
    finding = Finding(PROGRESSING, "True", "Queued", f"{told} and waits for its turn: {waits_for}")
    return replace(serving, phase="Queued", progressing=finding, preflight=True, queued=True)


def _first(observed: Observed, wanted: Wanted, serving: Course, known: CanaryArm | None, now: datetime) -> Course:
    """Pods of the first revision start; when all serve, or some when the time for it is over, it is stable."""
    resource = observed.resource
    spec, status = resource.spec, resource.status or Status()
    group = observed.group(wanted.revision)
    count = sum(pod_failures.ready(one) for one in group)
    if known is not None and count >= spec.replicas:
        why = f"all {spec.replicas} pods serve" if spec.replicas else "no pods are asked for"
        return _adopted(serving, wanted, known, status, why, now)
    arm = known or CanaryArm(**dict(wanted.arm), change=wanted.change(status), started_at=now)
    trouble = observed.trouble(wanted.revision)
    told = f"{count} of {spec.replicas} pods of revision {wanted.revision} serve" + (f": {trouble.message}" if trouble else "")
    arms = Arms(0, spec.replicas)
    left = arm.started_at + spec.rollout.progress_deadline - now
    if left > timedelta(0):
        finding = Finding(PROGRESSING, "True", trouble.reason if trouble else "Starting", told)
        return replace(serving, phase="Starting", progressing=finding, canary=arm, arms=arms, again=left)
    if known is not None and count:
        why = f"{count} of {spec.replicas} pods serve, and spec.rollout.progressDeadline is over"
        return _adopted(serving, wanted, known, status, why, now)
    # Its pods stay: nothing else serves, and they show what is wrong.
    late = f"{told}, and spec.rollout.progressDeadline is over."
    finding = Finding(PROGRESSING, "False", "ProgressDeadlineExceeded", late)
    return replace(serving, phase="Failed", progressing=finding, canary=arm, arms=arms)


def _adopted(serving: Course, wanted: Wanted, known: CanaryArm | None, status: Status, why: str, now: datetime) -> Course:
    """The revision is stable without a comparison."""
    arm = known or CanaryArm(**dict(wanted.arm), change=wanted.change(status), started_at=now)
    outcome = outcome_of(arm, "Promoted", f"Revision {wanted.revision}: {why}.", status, None, now)
    return replace(serving, stable=wanted.revision, outcome=outcome)


def _kept(serving: Course, wanted: Wanted, known: CanaryArm, status: Status, count: int, now: datetime) -> Course:
    """The first revision, of which some pods serve while another one is asked for already: that goes out by a canary."""
    why = f"{count} of {serving.arms.stable} pods serve; revision {wanted.revision}, which is asked for by now, follows"
    outcome = outcome_of(known, "Promoted", f"Revision {known.revision}: {why}.", status, None, now)
    finding = Finding(PROGRESSING, "True", "Preflight", f"revision {known.revision}: {why}")
    return replace(serving, stable=known.revision, phase="Preflight", progressing=finding, outcome=outcome, again=timedelta(0))


def _superseded(known: CanaryArm, wanted: Wanted, status: Status, now: datetime) -> Outcome:
    """How the rollout under way ends when something else is wanted."""
    if wanted.problem:
        return outcome_of(known, "Failed", wanted.problem, status, status.analysis, now)
    back = status.stable is not None and status.stable.revision == wanted.revision
    why = "The spec is that of the stable revision again." if back else "The spec has changed."
    return outcome_of(known, "Superseded", why, status, status.analysis, now)
