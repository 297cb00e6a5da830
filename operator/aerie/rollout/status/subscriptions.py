"""Subscriptions of a resource to notifications, from its annotations, in the form that Argo CD has made common:

    notifications.aerie.dev/subscribe.EVENT.RECEIVER: RECIPIENT;RECIPIENT...    or "" for the receiver's default

Guarantees: pure. An annotation that cannot be used is a problem with the annotation, its value and the fix, and has no other
effect: the other subscriptions count, and no rollout waits. A resource has at most `MAX_SUBSCRIPTIONS`. The text of a
problem names no receiver of other namespaces.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from aerie.api import SpeculativeDeployment
from aerie.rollout.conditions import SUBSCRIBED, ConditionUpdate
from aerie.rollout.facts.receivers import NotificationReceiver
from aerie.rollout.status.notifications import EVENT_TYPES, NotificationType

ANNOTATION_DOMAIN = "notifications.aerie.dev/"
ANNOTATION_PREFIX = f"{ANNOTATION_DOMAIN}subscribe."
MAX_SUBSCRIPTIONS = 50
"""Maximum number of subscriptions of one resource, so that one event of it causes at most as many messages."""
MAX_RECIPIENT_CHARACTERS = 128
_VALUE_REPR = reprlib.Repr()
_VALUE_REPR.maxstring = 80


@dataclass(frozen=True)
class Subscription:
    """Subscription of a receiver to one event."""

    event_type: NotificationType
    receiver: str
    recipient: str = ""
    """Channel or address at the receiver. Empty: its default."""


@dataclass(frozen=True)
class Subscriptions:
    """Subscriptions of a resource, and what is wrong with its other annotations."""

    valid: tuple[Subscription, ...]
    problems: tuple[str, ...]
    """Sentences, each with an annotation, its value and the fix."""


def read_subscriptions(resource: SpeculativeDeployment, receivers: Sequence[NotificationReceiver]) -> Subscriptions:
    """Return the subscriptions by the annotations of the resource. `receivers`: all of the operator."""
    usable = {receiver.name: receiver for receiver in receivers if receiver.serves(resource.metadata.namespace)}
    subscriptions: dict[Subscription, None] = {}
    problems = []
    for name, value in sorted(resource.metadata.annotations.items()):
        if not name.startswith(ANNOTATION_DOMAIN):
            continue
        if problem := _find_problem(name, value, usable):
            problems.append(f"Annotation {name} with value {_VALUE_REPR.repr(value)}: {problem}.")
        else:
            subscriptions |= dict.fromkeys(_iter_subscriptions(name, value))
    if len(subscriptions) > MAX_SUBSCRIPTIONS:
        problems.append(
            f"The annotations {ANNOTATION_PREFIX}* make {len(subscriptions)} subscriptions, and only {MAX_SUBSCRIPTIONS} of them "
            "count: remove some, or subscribe a channel instead of its members."
        )
    return Subscriptions(tuple(subscriptions)[:MAX_SUBSCRIPTIONS], tuple(problems))


def build_subscribed_condition(
    resource: SpeculativeDeployment, receivers: Sequence[NotificationReceiver]
) -> ConditionUpdate | None:
    """Return the condition about the annotations of the resource; None without any."""
    subscriptions = read_subscriptions(resource, receivers)
    if subscriptions.problems:
        return ConditionUpdate(SUBSCRIBED, "False", "InvalidSubscription", " ".join(subscriptions.problems))
    if not subscriptions.valid:
        return None
    targets = (
        f"{item.event_type} to {item.receiver}{f' ({item.recipient})' if item.recipient else ''}" for item in subscriptions.valid
    )
    return ConditionUpdate(SUBSCRIBED, "True", "Subscribed", f"Notifications: {', '.join(targets)}.")


def _find_problem(name: str, value: str, usable: Mapping[str, NotificationReceiver]) -> str:
    """Return what is wrong with an annotation and what to write instead; empty: nothing."""
    event_type, dot, receiver_name = name.removeprefix(ANNOTATION_PREFIX).partition(".")
    if not name.startswith(ANNOTATION_PREFIX) or not dot:
        return f"this is no annotation of Aerie: write {ANNOTATION_PREFIX}EVENT.RECEIVER, or remove it"
    if event_type not in EVENT_TYPES:
        return f"{event_type!r} is no event: write one of {', '.join(EVENT_TYPES)}"
    if not usable:
        return (
            "the operator has no receiver for this namespace: have one added (chart value notifications.receivers), or remove it"
        )
    if receiver_name not in usable:
        return f"the operator has no receiver {receiver_name!r} for this namespace: write one of {', '.join(sorted(usable))}"
    recipients = value.split(";")
    if not usable[receiver_name].accepts_recipients and value.strip():
        return f"receiver {receiver_name} takes no recipient: set the value to an empty string"
    if any(len(recipient) > MAX_RECIPIENT_CHARACTERS or not recipient.strip().isprintable() for recipient in recipients):
        return (
            f"a recipient has at most {MAX_RECIPIENT_CHARACTERS} characters and no line break: write a channel such as #serving, "
            "or several with ; between them"
        )
    return ""


def _iter_subscriptions(name: str, value: str) -> Iterator[Subscription]:
    event_type, _, receiver = name.removeprefix(ANNOTATION_PREFIX).partition(".")
    recipients = [recipient.strip() for recipient in value.split(";") if recipient.strip()] or [""]
    for recipient in recipients:
        yield Subscription(cast(NotificationType, event_type), receiver, recipient)
