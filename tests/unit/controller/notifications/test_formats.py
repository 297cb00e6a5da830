"""Bodies of notifications: what people read, escaping, and templates that are checked before they are used."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from aerie.api.status import Arm, Status
from aerie.controller.notifications.formats import (
    MAX_BODY_BYTES,
    BodyFormat,
    CloudEventFormat,
    SlackFormat,
    TeamsFormat,
    TemplateError,
    TemplateFormat,
)
from aerie.rollout.status.notification_text import MAX_DETAIL_CHARACTERS, build_notification_text
from aerie.rollout.status.notifications import EVENT_TYPES, Notification, NotificationType, describe_client_effect
from tests.golden import Messages


def notification(event_type: NotificationType = "promoted", **data: Any) -> Notification:
    common = {"namespace": "default", "name": "chat", "revision": "abc", "change": "drafter models/eagle31@0a1b2c3d"}
    common["clientEffect"] = describe_client_effect(event_type, Status(stable=Arm(revision="s")))
    return Notification("id-1", event_type, datetime(2026, 5, 1, tzinfo=UTC), common | data)


def build(body_format: BodyFormat, item: Notification, recipient: str = "") -> Any:
    return json.loads(body_format.build_body(item, recipient))


@pytest.mark.parametrize("event_type", EVENT_TYPES)
def test_text_of_each_event(messages: Messages, event_type: NotificationType) -> None:
    item = notification(event_type, message="Tokens per step +20.0 % vs control.", replacedDrafter="models/eagle3")
    messages.check(event_type, build_notification_text(item, "prod").plain_text)


@pytest.mark.parametrize("event_type", ["started", "failed"])
def test_text_of_a_first_revision(messages: Messages, event_type: NotificationType) -> None:
    messages.check(f"{event_type}, first revision", describe_client_effect(event_type, Status()))


def test_long_message_is_truncated() -> None:
    text = build_notification_text(notification(message="x" * 5000), "prod")
    assert len(text.detail) == MAX_DETAIL_CHARACTERS
    assert text.detail.endswith("…")


def test_slack_text_is_escaped_and_mentions_nobody() -> None:
    body = build(SlackFormat("prod"), notification(message="a < b & c > d <!channel> @here x@y (@all)"), "#serving")
    assert body["channel"] == "#serving"
    assert "a &lt; b &amp; c &gt; d &lt;!channel&gt; @\u200bhere x@y (@\u200ball)" in body["text"]
    assert "models/eagle31@0a1b2c3d" in body["text"], "a commit can be copied"
    assert body["text"].endswith("What you can do: `kubectl aerie status chat -n default`")


def test_slack_message_without_a_recipient_has_no_channel() -> None:
    assert build(SlackFormat("prod"), notification()).keys() == {"text"}


def test_cloud_event_has_the_recipient() -> None:
    item = notification()
    assert build(CloudEventFormat("prod"), item) == item.to_cloud_event("prod")
    assert build(CloudEventFormat("prod"), item, "a") == item.to_cloud_event("prod") | {"recipient": "a"}


def test_teams_card() -> None:
    (attachment,) = build(TeamsFormat("prod"), notification(message="[click](http://bad.example)"))["attachments"]
    assert attachment["contentType"] == "application/vnd.microsoft.card.adaptive"
    title, effect, detail, command = attachment["content"]["body"]
    assert title["text"] == "[prod] default/chat: promoted"
    assert effect["text"] == "Clients are served by the new revision."
    assert r"\[click\](http" in detail["text"]
    assert command["text"].endswith("kubectl aerie status chat -n default")


def test_template_has_all_variables() -> None:
    template = (
        '{"v": [{{ event | tojson }}, {{ id | tojson }}, {{ time | tojson }}, {{ source | tojson }}, {{ namespace | tojson }}, '
        "{{ name | tojson }}, {{ recipient | tojson }}, {{ title | tojson }}, {{ client_effect | tojson }}], "
        '"command": {{ command | tojson }}, "text": {{ text | tojson }}, "detail": {{ detail | tojson }}, '
        '"revision": {{ data.get("revision", "") | tojson }}}'
    )
    body_format = TemplateFormat("prod", template, "application/json")
    assert body_format.accepts_recipients
    body = build(body_format, notification(message='"quoted" {{ 7 * 7 }}'), "me")
    assert body["v"][:7] == ["promoted", "id-1", "2026-05-01T00:00:00Z", "prod", "default", "chat", "me"]
    assert '"quoted" {{ 7 * 7 }}' in body["detail"], "data is never read as a template"
    assert body["revision"] == "abc"


def test_template_without_recipient_accepts_none() -> None:
    assert not TemplateFormat("prod", '"{{ event }}"', "application/json").accepts_recipients


def test_template_of_plain_text() -> None:
    assert TemplateFormat("prod", "{{ title }}", "text/plain").build_body(notification(), "") == b"[prod] default/chat: promoted"


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("syntax", "{{ title"),
        ("unknown variable", "{{ titel }}"),
        ("field that an event may lack", '"{{ data.message }}"'),
        ("no JSON", '{"text": "{{ data.get("message", "") }}"}'),
        ("sandbox", "{{ ''.__class__.__mro__ }}"),
        ("sandbox, changed data", "{{ data.update({}) }}"),
        ("range", "{% for i in range(999999) %}x{% endfor %}"),
        ("arithmetic", "{{ 1 / 0 }}"),
    ],
)
def test_unusable_template_is_rejected(messages: Messages, name: str, template: str) -> None:
    with pytest.raises(TemplateError) as rejection:
        TemplateFormat("prod", template, "application/json")
    messages.check(f"template: {name}", f"receivers.x.body {rejection.value}.")


def test_large_body_is_rejected() -> None:
    with pytest.raises(TemplateError, match="make it at most"):
        TemplateFormat("prod", f"{{{{ 'x' * {MAX_BODY_BYTES + 1} }}}}", "text/plain")
