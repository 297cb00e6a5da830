"""The decisions of a user about a rollout, as a patch of the resource; or why the state does not allow them.

Each patch tests the resource's UID and generation, so that it never applies to another resource or another spec. A promotion,
rollback or extension names the revision, so that it never applies to the next rollout. With it, the annotation
`aerie.dev/requested-by` tells the operator who decided and why.

Guarantee: pure. Not guaranteed: that `requested-by` is true, because everyone who may patch the resource may write it. The audit
log of the API server has the proof.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from aerie.cli.console import CommandError
from aerie.cli.fleet.attention import ABORTABLE_PHASES, DECIDABLE_PHASES, REJECTED_PHASES, RETAINED_PHASES
from aerie.cli.fleet.durations import parse_duration
from aerie.cli.fleet.resource_view import ResourceView

ActionName = Literal["promote", "rollback", "retry", "pause", "resume"]
"""Action without parameters."""
PROMOTE, ROLLBACK, RETRY, EXTEND = "aerie.dev/promote", "aerie.dev/rollback", "aerie.dev/retry", "aerie.dev/extend"
REQUESTED_BY = "aerie.dev/requested-by"
MAX_REASON_CHARACTERS = 256
MIN_EXTENSION, MAX_EXTENSION = timedelta(minutes=1), timedelta(hours=24)
_OBSOLETE_ANNOTATIONS = {
    "promote": (ROLLBACK, EXTEND),
    "rollback": (PROMOTE, EXTEND),
    "retry": (PROMOTE, ROLLBACK, EXTEND),
    "extend": (),
}
"""Earlier decisions that a decision replaces. A rollback of the revision would also end its retry."""


@dataclass(frozen=True)
class Action:
    """A decision that the state allows."""

    name: ActionName | Literal["extend"]
    consequence: str
    """What follows, as a sentence."""
    operations: Sequence[dict[str, Any]]
    """JSON patch (RFC 6902)."""


def build_action(view: ResourceView, name: ActionName, user: str, reason: str, now: datetime) -> Action:
    """Return the action; raise `CommandError` if the state does not allow it, with what it allows."""
    _check_reason(reason)
    if name in ("pause", "resume"):
        if reason:
            raise CommandError(f"--reason belongs to the history of rollouts, and {name} is not part of it: leave it out.")
        return _build_pause(view, name)
    if view.is_paused:
        raise _build_error(view, name, "Aerie changes nothing while it is paused; resume it first")
    annotation, value, consequence = {"promote": _promote, "rollback": _rollback, "retry": _retry}[name](view, now)
    return _build_decision(view, name, annotation, value, consequence, user, reason, now)


def build_extension(view: ResourceView, duration: timedelta, user: str, reason: str, now: datetime) -> Action:
    """Return the extension of an inconclusive analysis; raise `CommandError` if the state does not allow it."""
    _check_reason(reason)
    if view.is_paused:
        raise _build_error(view, "resume --for", "Aerie changes nothing while it is paused; resume it first, without --for")
    if view.candidate_phase != "Held":
        raise _build_error(view, "resume --for", "it extends an inconclusive analysis, in phase Held")
    if view.is_in_place:
        problem = (
            "the windows of a rollout in place have ended, and all pods serve with the stable drafter again. Promote it, roll it "
            "back, or repeat it with more time: roll it back, raise spec.rollout.analysis.maxDuration, and retry"
        )
        raise _build_error(view, "resume --for", problem)
    end = (now + duration).astimezone(UTC).replace(microsecond=0)
    consequence = (
        f"The analysis of revision {view.candidate_revision} continues until {end:%Y-%m-%d %H:%M:%S} UTC. The canary is accepted "
        "if the evidence suffices, and rolled back as in phase Held. Otherwise it is Held again."
    )
    value = f"{view.candidate_revision}/{end:%Y-%m-%dT%H:%M:%SZ}"
    return _build_decision(view, "extend", EXTEND, value, consequence, user, reason, now)


def parse_extension(text: str) -> timedelta:
    """Return the duration of an extension, written like 30m, 2h or 1h30m. Raises CommandError."""
    duration = parse_duration(text)
    if duration is None or not MIN_EXTENSION <= duration <= MAX_EXTENSION:
        raise CommandError(f"--for is {text!r}: use a duration from 1m to 24h, such as 30m, 2h or 1h30m.")
    return duration


def _check_reason(reason: str) -> None:
    if len(reason) > MAX_REASON_CHARACTERS:
        raise CommandError(f"--reason has {len(reason)} characters: use one line of at most {MAX_REASON_CHARACTERS}.")
    if not reason.isprintable():
        raise CommandError("--reason has control characters, such as a tab: use one line of text.")


def _build_decision(
    view: ResourceView,
    name: ActionName | Literal["extend"],
    annotation: str,
    value: str,
    consequence: str,
    user: str,
    reason: str,
    now: datetime,
) -> Action:
    """Return the action that writes the annotation, and who requested it."""
    requested_by = {"action": name, "user": user, "time": f"{now:%Y-%m-%dT%H:%M:%SZ}"} | ({"reason": reason} if reason else {})
    annotations = {annotation: value, REQUESTED_BY: json.dumps(requested_by, ensure_ascii=False)}
    obsolete = _OBSOLETE_ANNOTATIONS[name]
    return Action(name, consequence, (*_tests(view), *_remove_annotations(view, obsolete), *_set_annotations(view, annotations)))


def _promote(view: ResourceView, _: datetime) -> tuple[str, str, str]:
    if view.candidate_phase not in DECIDABLE_PHASES:
        raise _build_error(view, "promote", "there is no rollout to decide")
    return (
        PROMOTE,
        view.candidate_revision,
        (
            f"Revision {view.candidate_revision} ({view.candidate.get('change', '')}) continues with the ramp, and is still "
            "rolled back if it is significantly worse there."
        ),
    )


def _rollback(view: ResourceView, _: datetime) -> tuple[str, str, str]:
    if view.candidate_phase in ABORTABLE_PHASES:
        revision = view.candidate_revision
        return (
            ROLLBACK,
            revision,
            f"Revision {revision} ({view.candidate.get('change', '')}) is rolled back; the stable one serves.",
        )
    if view.phase in RETAINED_PHASES:
        revision = view.served_revision
        return ROLLBACK, revision, f"The promotion of revision {revision} is reverted: retained pods serve at once."
    raise _build_error(view, "rollback", "there is no rollout to revert; to serve with another drafter, change the spec")


def _retry(view: ResourceView, now: datetime) -> tuple[str, str, str]:
    if view.phase not in REJECTED_PHASES:
        raise _build_error(view, "retry", "no revision is rejected")
    return RETRY, f"{now:%Y-%m-%dT%H:%M:%SZ}", "The revision of the spec is rolled out again, from its preflight on."


def _build_pause(view: ResourceView, name: Literal["pause", "resume"]) -> Action:
    is_pause = name == "pause"
    if view.is_paused == is_pause:
        raise _build_error(view, name, "it is paused already" if is_pause else "it is not paused")
    if view.spec.get("rollout") is not None:
        operations = [{"op": "add", "path": "/spec/rollout/paused", "value": is_pause}]
    else:
        operations = [{"op": "add", "path": "/spec/rollout", "value": {"paused": is_pause}}]
    consequence = (
        "Aerie changes nothing until it is resumed. A canary keeps its pods and its traffic."
        if is_pause
        else "Aerie continues where it was paused."
    )
    return Action(name, consequence, (*_tests(view), *operations))


def _build_error(view: ResourceView, name: str, reason: str) -> CommandError:
    return CommandError(
        f"{name} is not possible in phase {view.phase}: {reason}. See: kubectl aerie status {view.name} -n {view.namespace}."
    )


def _tests(view: ResourceView) -> list[dict[str, Any]]:
    return [
        {"op": "test", "path": f"/metadata/{name}", "value": view.metadata[name]}
        for name in ("uid", "generation")
        if name in view.metadata
    ]


def _set_annotations(view: ResourceView, annotations: dict[str, str]) -> list[dict[str, Any]]:
    if not view.metadata.get("annotations"):
        # It replaces all annotations: nobody may have added one meanwhile.
        unchanged = {"op": "test", "path": "/metadata/resourceVersion", "value": view.metadata.get("resourceVersion")}
        return [unchanged, {"op": "add", "path": "/metadata/annotations", "value": annotations}]
    return [{"op": "add", "path": _annotation_path(name), "value": value} for name, value in annotations.items()]


def _remove_annotations(view: ResourceView, names: Sequence[str]) -> list[dict[str, Any]]:
    annotations = view.metadata.get("annotations") or {}
    return [{"op": "remove", "path": _annotation_path(name)} for name in names if name in annotations]


def _annotation_path(name: str) -> str:
    return f"/metadata/annotations/{name.replace('~', '~0').replace('/', '~1')}"
