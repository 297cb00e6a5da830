"""Subscriptions by annotations: what they subscribe to, and what the condition says about those that cannot be used."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.api import SpeculativeDeployment
from aerie.rollout.conditions import ConditionUpdate
from aerie.rollout.facts.receivers import NotificationReceiver
from aerie.rollout.status.subscriptions import (
    ANNOTATION_PREFIX,
    MAX_SUBSCRIPTIONS,
    Subscription,
    build_subscribed_condition,
    read_subscriptions,
)
from tests.golden import Messages
from tests.unit.rollout.world import World, serving_world

RECEIVERS = (
    NotificationReceiver("serving", accepts_recipients=True),
    NotificationReceiver("teams", accepts_recipients=False, namespaces=frozenset({"default"})),
    NotificationReceiver("hidden", accepts_recipients=True, namespaces=frozenset({"other"})),
)


def resource_with(annotations: dict[str, str]) -> SpeculativeDeployment:
    document: dict[str, Any] = World().document
    return SpeculativeDeployment.from_dict(document | {"metadata": document["metadata"] | {"annotations": annotations}})


def condition_of(annotations: dict[str, str], receivers: tuple[NotificationReceiver, ...] = RECEIVERS) -> ConditionUpdate | None:
    return build_subscribed_condition(resource_with(annotations), receivers)


def test_annotation_subscribes_each_recipient() -> None:
    annotations = {f"{ANNOTATION_PREFIX}rolled-back.serving": " #a;; #b ;#a", f"{ANNOTATION_PREFIX}failed.teams": ""}
    subscriptions = read_subscriptions(resource_with(annotations), RECEIVERS)
    assert subscriptions.valid == (
        Subscription("failed", "teams"),
        Subscription("rolled-back", "serving", "#a"),
        Subscription("rolled-back", "serving", "#b"),
    )
    assert not subscriptions.problems
    condition = condition_of(annotations)
    assert condition is not None
    assert (condition.status, condition.message) == (
        "True",
        "Notifications: failed to teams, rolled-back to serving (#a), rolled-back to serving (#b).",
    )


@pytest.mark.parametrize(
    ("name", "annotation", "value"),
    [
        ("unknown event", "subscribe.promotd.serving", "#a"),
        ("unknown receiver", "subscribe.promoted.sreving", ""),
        ("receiver of another namespace", "subscribe.promoted.hidden", ""),
        ("no receiver", "subscribe.promoted", ""),
        ("another verb", "subscribed.promoted.serving", ""),
        ("recipient that is not accepted", "subscribe.promoted.teams", "#a"),
        ("long recipient", "subscribe.promoted.serving", "#" + "a" * 200),
        ("line break", "subscribe.promoted.serving", "#a\nb"),
    ],
)
def test_unusable_annotation_is_reported_with_the_fix(messages: Messages, name: str, annotation: str, value: str) -> None:
    condition = condition_of({f"notifications.aerie.dev/{annotation}": value, f"{ANNOTATION_PREFIX}failed.serving": "#a"})
    assert condition is not None
    assert (condition.status, condition.reason) == ("False", "InvalidSubscription")
    assert "hidden for" not in condition.message
    assert "other" not in condition.message, "other namespaces and their receivers stay unknown"
    messages.check(name, condition.message)
    subscriptions = read_subscriptions(
        resource_with({f"notifications.aerie.dev/{annotation}": value, f"{ANNOTATION_PREFIX}failed.serving": "#a"}), RECEIVERS
    )
    assert subscriptions.valid == (Subscription("failed", "serving", "#a"),), "the other annotation counts"


def test_operator_without_receivers_reports_it(messages: Messages) -> None:
    condition = condition_of({f"{ANNOTATION_PREFIX}promoted.serving": ""}, ())
    assert condition is not None
    messages.check("operator without receivers", condition.message)


def test_number_of_subscriptions_is_limited(messages: Messages) -> None:
    many = ";".join(f"#{number}" for number in range(MAX_SUBSCRIPTIONS + 1))
    subscriptions = read_subscriptions(resource_with({f"{ANNOTATION_PREFIX}promoted.serving": many}), RECEIVERS)
    assert len(subscriptions.valid) == MAX_SUBSCRIPTIONS
    messages.check("too many", subscriptions.problems[0])


def test_resource_without_annotations_has_no_condition() -> None:
    assert condition_of({"aerie.dev/retry": "1", "notifications.argoproj.io/subscribe.on-synced.slack": "x"}) is None


@given(
    st.dictionaries(st.text(max_size=60).map(lambda text: "notifications.aerie.dev/" + text), st.text(max_size=200), max_size=5)
)
def test_any_annotation_counts_or_is_reported(annotations: dict[str, str]) -> None:
    subscriptions = read_subscriptions(resource_with(annotations), RECEIVERS)
    assert bool(subscriptions.problems or subscriptions.valid) == bool(annotations)
    assert len(subscriptions.problems) <= len(annotations)


def test_unusable_annotation_gives_an_event_and_blocks_nothing() -> None:
    world = serving_world()
    world.document["metadata"].setdefault("annotations", {})[f"{ANNOTATION_PREFIX}promoted.nobody"] = ""
    world.drafter("models/eagle31")
    plan = world.step()
    (event,) = (event for event in plan.events if event.reason == "InvalidSubscription")
    assert event.type == "Warning"
    assert f"{ANNOTATION_PREFIX}promoted.nobody" in event.message
    assert not any(event.reason == "InvalidSubscription" for event in world.step().events), "one event, not one per reconcile"
    world.settle_until("Starting")
