"""The state machine of a canary, as a table: in which phase which input leads where.

    Starting ─► WarmingUp ─► Analyzing ─┬─────────────► Ramping ─► Promoting ─► PROMOTED
                                 │      └► AwaitingApproval ─┘
                                 ├─► Held (inconclusive, and the spec says to hold)
                                 ├─► EXPLORED (a trial that was to be measured and given up has been)
        from every phase ────────┴─► ROLLED BACK or FAILED

    PROMOTED, with old pods kept ─► Watching ─┬──────────────┬─► OVER
                                              └► Rechecking ─┴─► ROLLED BACK

One look gives at most one input: the first, in order of urgency, of those that hold. What a person says comes before what
the figures say, and what speaks against the canary before what speaks for it.

A promoted canary is stable; that old pods are kept, so that it can be taken back at once, is a second course of the same table.
There a fall of its tokens per step against those of its acceptance may be one of the traffic: it leads no further than to
Rechecking, where the old pods get requests again, and only what is worse than they are at the same time is taken back.

Guarantees: a pure function; no promotion without the verdict Promote or a person's word; an ended canary stays ended; each phase
that waits for its pods or for time has a limit, but Held and AwaitingApproval, which wait for a person, and an accepted canary
for which the cluster has no room, which waits for the cluster. How long a step lasts makes nothing late: only pods are
(lateness.py). The spec may change in every phase, the ramp too. Not here: which spec is wanted (superseded and reverted canaries
are ended by whoever reads it), pods (capacity.py), weights (traffic.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal

from aerie.api import duration
from aerie.api.rollout import Analysis, Canary
from aerie.rollout.capacity import ramp_share

Phase = Literal[
    "Starting", "WarmingUp", "Analyzing", "AwaitingApproval", "Held", "Ramping", "Promoting", "Watching", "Rechecking"
]
GROWING: tuple[Phase, ...] = ("Ramping", "Promoting")
"""Phases in which an accepted canary is compared with the stable pods, whatever its control."""
End = Literal["Promoted", "RolledBack", "Failed", "Explored", "Over"]
Input = Literal[
    "rejected",  # a person says: roll back
    "stopped",  # a fault that needs no statistics: a crash loop, no accepted token, figures that are no numbers
    "worse",  # the verdict is Rollback
    "fallen",  # tokens per step are certainly below those of the acceptance
    "late",  # the pods of this phase do not serve, and its time is over
    "approved",  # a person says: promote
    "better",  # the verdict is Promote, and no person is asked
    "better, ask",  # the verdict is Promote, and a person is asked
    "explored",  # what was only to be measured has been for long enough
    "undecided, hold",  # the verdict is Inconclusive
    "undecided, end",
    "ready",  # the pods of this phase serve
    "due",  # the time of this phase is over
    "topped",  # the last share of the ramp has been held
]

TABLE: dict[tuple[Phase, Input], Phase | End] = {
    ("Starting", "rejected"): "RolledBack",
    ("Starting", "stopped"): "RolledBack",
    ("Starting", "late"): "Failed",
    ("Starting", "ready"): "WarmingUp",
    ("WarmingUp", "rejected"): "RolledBack",
    ("WarmingUp", "stopped"): "RolledBack",
    ("WarmingUp", "approved"): "Ramping",
    ("WarmingUp", "due"): "Analyzing",
    ("Analyzing", "rejected"): "RolledBack",
    ("Analyzing", "stopped"): "RolledBack",
    ("Analyzing", "worse"): "RolledBack",
    ("Analyzing", "approved"): "Ramping",
    ("Analyzing", "better"): "Ramping",
    ("Analyzing", "better, ask"): "AwaitingApproval",
    ("Analyzing", "explored"): "Explored",
    ("Analyzing", "undecided, hold"): "Held",
    ("Analyzing", "undecided, end"): "RolledBack",
    ("AwaitingApproval", "rejected"): "RolledBack",
    ("AwaitingApproval", "stopped"): "RolledBack",
    ("AwaitingApproval", "worse"): "RolledBack",
    ("AwaitingApproval", "approved"): "Ramping",
    ("Held", "rejected"): "RolledBack",
    ("Held", "stopped"): "RolledBack",
    ("Held", "worse"): "RolledBack",
    ("Held", "approved"): "Ramping",
    ("Ramping", "rejected"): "RolledBack",
    ("Ramping", "stopped"): "RolledBack",
    ("Ramping", "worse"): "RolledBack",
    ("Ramping", "late"): "RolledBack",
    ("Ramping", "due"): "Ramping",
    ("Ramping", "topped"): "Promoting",
    ("Promoting", "rejected"): "RolledBack",
    ("Promoting", "stopped"): "RolledBack",
    ("Promoting", "worse"): "RolledBack",
    ("Promoting", "late"): "RolledBack",
    ("Promoting", "ready"): "Promoted",
    ("Watching", "rejected"): "RolledBack",
    ("Watching", "stopped"): "RolledBack",
    ("Watching", "fallen"): "Rechecking",
    ("Watching", "due"): "Over",
    ("Rechecking", "rejected"): "RolledBack",
    ("Rechecking", "stopped"): "RolledBack",
    ("Rechecking", "worse"): "RolledBack",
    ("Rechecking", "due"): "Over",
}
"""The whole of it. An input that a phase has no row for means nothing there."""

RECHECK = timedelta(hours=1)
"""How long old pods get requests again: enough for a fall of some percent to show in pairs (docs/canary-decisions.md)."""
SUSPECTED = timedelta(hours=1)
"""How long they stay at least once engines of the promoted revision have ended: in a fleet that crashes, others follow."""


@dataclass(frozen=True)
class Stage:
    """Where a canary is; all of it is kept in the status."""

    phase: Phase
    started_at: datetime
    ready_at: datetime | None = None
    """When all pods of canary and control served for the first time."""
    step: int | None = None
    """Of the ramp, from 0."""
    step_started_at: datetime | None = None
    """When this step of the ramp, the promotion, or a phase after it began."""


@dataclass(frozen=True)
class Looks:
    """What one look shows."""

    ready: bool
    """Whether the pods that this phase asks for serve."""
    late: bool = False
    """Whether pods that the phase asks for have not served for spec.rollout.progressDeadline, and more of them than a node's
    fault explains."""
    late_at: datetime | None = None
    """When the next pod becomes late; None when none is waited for."""
    stop: str = ""
    """A fault that ends the canary at once, as a sentence."""
    verdict: Literal["Continue", "Promote", "Rollback", "Inconclusive"] = "Continue"
    reason: str = ""
    """Why the verdict is what it is, as a sentence."""
    fallen: str = ""
    """That tokens per step are certainly below those of the acceptance, as a sentence."""
    suspicious: bool = False
    """Whether engines of it have ended, and it is not known whether that was an accident."""
    word: Literal["promote", "rollback"] | None = None
    """What a person has said about this very canary."""


@dataclass(frozen=True)
class Terms:
    """What the spec says of rollouts; the analysis as it was when this one began."""

    canary: Canary
    analysis: Analysis
    progress_deadline: timedelta
    explore: timedelta | None = None
    """How long a canary is analyzed that is to be measured and given up; None for all others."""


@dataclass(frozen=True)
class Step:
    """What one look leads to."""

    stage: Stage
    end: End | None = None
    """How the canary has ended; the stage is then the one that it ended in."""
    why: str = ""
    """Why it has ended or changed its phase; empty when neither."""
    again: timedelta | None = None
    """When time alone would lead on; None: never."""


def advance(stage: Stage, looks: Looks, terms: Terms, now: datetime) -> Step:
    """Where this look leads; at most one row of the table further."""
    for found in _inputs(stage, looks, terms, now):
        target = TABLE.get((stage.phase, found))
        if target is None:
            continue
        why = _why(found, stage, looks, terms)
        match target:
            case "Promoted" | "RolledBack" | "Failed" | "Explored" | "Over":
                return Step(stage, target, why)
            case _:
                return _entered(stage, target, terms, why, now)
    return Step(stage, again=_left(stage, looks, terms, now))


def _entered(stage: Stage, phase: Phase, terms: Terms, why: str, now: datetime) -> Step:
    """The stage after entering the phase."""
    match phase:
        case "WarmingUp":
            entered = replace(stage, phase=phase, ready_at=now)
        case "Ramping":
            step = 0 if stage.phase != "Ramping" or stage.step is None else stage.step + 1
            entered = replace(stage, phase=phase, step=step, step_started_at=now)
            if not terms.canary.ramp:
                entered = replace(entered, phase="Promoting", step=None)
        case "Promoting" | "Rechecking":
            entered = replace(stage, phase=phase, step=None, step_started_at=now)
        case _:
            entered = replace(stage, phase=phase)
    return Step(entered, why=why, again=timedelta(0))


def _inputs(stage: Stage, looks: Looks, terms: Terms, now: datetime) -> Iterator[Input]:
    """What holds, the most urgent first."""
    if looks.word == "rollback":
        yield "rejected"
    if looks.stop:
        yield "stopped"
    if looks.verdict == "Rollback":
        yield "worse"
    if looks.fallen:
        yield "fallen"
    if looks.late and not looks.ready:
        yield "late"
    if looks.word == "promote":
        yield "approved"
    if looks.verdict == "Promote":
        yield "better" if terms.canary.approval == "Automatic" else "better, ask"
    if _explored(stage, terms, now):
        yield "explored"
    if looks.verdict == "Inconclusive":
        yield "undecided, hold" if terms.analysis.on_inconclusive == "Hold" else "undecided, end"
    if looks.ready:
        yield "ready"
    if _due(stage, looks, terms, now):
        yield "topped" if stage.phase == "Ramping" and _is_top(stage, terms) else "due"


def _since(stage: Stage) -> datetime:
    """When the phase's own time began."""
    match stage.phase:
        case "Ramping" | "Promoting" | "Watching" | "Rechecking":
            return stage.step_started_at or stage.started_at
        case "Starting":
            return stage.started_at
        case _:
            return stage.ready_at or stage.started_at


def _is_top(stage: Stage, terms: Terms) -> bool:
    """Whether no step of the ramp follows this one."""
    return (stage.step or 0) + 1 >= len(terms.canary.ramp)


def _due(stage: Stage, looks: Looks, terms: Terms, now: datetime) -> bool:
    match stage.phase:
        case "WarmingUp":
            return now >= _since(stage) + terms.analysis.warmup
        case "Ramping" if not terms.canary.ramp:  # it was taken out of the spec: there is no share to hold
            return True
        case "Ramping":  # a share that the pods cannot bear yet is not being held
            return looks.ready and now >= _since(stage) + terms.canary.ramp_hold
        case "Watching":
            return now >= watched_until(_since(stage), terms.canary, suspicious=looks.suspicious)
        case "Rechecking":
            return now >= _since(stage) + RECHECK
        case _:
            return False


def watched_until(since: datetime, canary: Canary, *, suspicious: bool) -> datetime:
    """When pods that were kept after a promotion go."""
    return since + (max(canary.scale_down_delay, SUSPECTED) if suspicious else canary.scale_down_delay)


def _explored(stage: Stage, terms: Terms, now: datetime) -> bool:
    """Whether a canary that is only to be measured has been."""
    return terms.explore is not None and now >= _measured_until(stage, terms.explore, terms)


def _measured_until(stage: Stage, explore: timedelta, terms: Terms) -> datetime:
    return _since(stage) + min(terms.analysis.warmup + explore, terms.analysis.deadline)


def _left(stage: Stage, looks: Looks, terms: Terms, now: datetime) -> timedelta | None:
    """Time until it alone would lead on."""
    match stage.phase:
        case "WarmingUp":
            until = _since(stage) + terms.analysis.warmup
        case "Ramping" if looks.ready:
            until = _since(stage) + terms.canary.ramp_hold
        case "Analyzing" if terms.explore is not None:
            until = _measured_until(stage, terms.explore, terms)
        case "Watching":
            until = watched_until(_since(stage), terms.canary, suspicious=looks.suspicious)
        case "Rechecking":
            until = _since(stage) + RECHECK
        case "Starting" | "Ramping" | "Promoting" if looks.late_at is not None:
            until = looks.late_at
        case _:
            return None
    return max(timedelta(0), until - now)


def _why(found: Input, stage: Stage, looks: Looks, terms: Terms) -> str:
    match found:
        case "rejected":
            return "A person asked for the rollback."
        case "approved":
            return "A person asked for the promotion."
        case "stopped":
            return looks.stop
        case "fallen":
            return looks.fallen
        case "explored":
            return f"It was to be measured and given up, and has been. {looks.reason}".rstrip()
        case "late":
            limit = duration.format(terms.progress_deadline)
            return f"Pods that it needs have not served for spec.rollout.progressDeadline ({limit})."
        case "worse" | "better" | "better, ask" | "undecided, hold" | "undecided, end":
            return looks.reason
        case "ready":
            return "All its pods serve."
        case "due" if stage.phase == "WarmingUp":
            return "The warm-up is over."
        case "due" if stage.phase in ("Watching", "Rechecking"):
            return "Nothing has spoken against it while pods of the revision before were kept."
        case "due" | "topped":
            if not terms.canary.ramp:
                return "spec.rollout.canary.ramp has become empty: there is no share to hold."
            share = ramp_share(terms.canary.ramp, stage.step)
            return f"{share} % of the traffic have been held for spec.rollout.canary.rampHold."
