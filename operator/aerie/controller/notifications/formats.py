"""Bodies of the requests that send notifications: CloudEvents, Slack-compatible, Microsoft Teams, and a user's template.

Guarantees: pure, except that a template is the user's. Text from resources is data in every format: it is escaped, mentions
nobody, and is never read as a template. A template runs in a sandbox of Jinja that reads and changes nothing beside its
variables; its names are checked when it is read, and its output has at most `MAX_BODY_BYTES`. Not guaranteed: the time and the
memory that a template takes. Its author is who configures the operator.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from aerie.controller.notifications.samples import build_sample_notifications
from aerie.rollout.status.notification_text import NotificationText, build_notification_text
from aerie.rollout.status.notifications import Notification, format_time

if TYPE_CHECKING:  # imported where it is used: most operators have no template
    from jinja2 import Environment, Template

MAX_BODY_BYTES = 65536
"""Maximum size of the output of a template in bytes."""
TEMPLATE_VARIABLES = (
    "event",
    "id",
    "time",
    "source",
    "namespace",
    "name",
    "recipient",
    "title",
    "client_effect",
    "detail",
    "command",
    "text",
    "data",
)
"""Names that a template may use."""
_MENTION = re.compile(r"(?<![\w/.:-])@(?=\w)")
"""The @ of a mention, such as @channel. A drafter's commit (owner/name@commit) is none."""


class TemplateError(ValueError):
    """A template that cannot be used; its text is the end of a sentence."""


class BodyFormat(Protocol):
    """Format of the requests to one receiver."""

    @property
    def content_type(self) -> str:
        """Value of the header Content-Type."""

    @property
    def accepts_recipients(self) -> bool:
        """Whether a subscription may name a recipient."""

    def build_body(self, notification: Notification, recipient: str) -> bytes:
        """Return the body. `recipient`: empty for the receiver's default. Raises TemplateError."""


@dataclass(frozen=True)
class CloudEventFormat:
    """CloudEvents 1.0, structured mode. A recipient is the extension attribute `recipient`."""

    source: str
    content_type = "application/cloudevents+json"
    accepts_recipients = True

    def build_body(self, notification: Notification, recipient: str) -> bytes:
        event = notification.to_cloud_event(self.source)
        return json.dumps(event | ({"recipient": recipient} if recipient else {})).encode()


@dataclass(frozen=True)
class SlackFormat:
    """Incoming webhooks of Slack, Mattermost and Rocket.Chat. A recipient is the channel. Slack's own webhooks ignore it."""

    source: str
    content_type = "application/json"
    accepts_recipients = True

    def build_body(self, notification: Notification, recipient: str) -> bytes:
        text = build_notification_text(notification, self.source)
        paragraphs = [f"*{_escape_mrkdwn(text.title)}*", _escape_mrkdwn(text.client_effect), _escape_mrkdwn(text.detail)]
        paragraphs.append(f"What you can do: `{_escape_mrkdwn(text.command)}`")
        message = {"text": "\n".join(filter(None, paragraphs))}
        return json.dumps(message | ({"channel": recipient} if recipient else {})).encode()


@dataclass(frozen=True)
class TeamsFormat:
    """Workflows of Microsoft Teams that post a card to a channel: an Adaptive Card."""

    source: str
    content_type = "application/json"
    accepts_recipients = False

    def build_body(self, notification: Notification, recipient: str) -> bytes:  # noqa: ARG002 - it has no recipients
        text = build_notification_text(notification, self.source)
        blocks: list[dict[str, Any]] = [{"type": "TextBlock", "text": text.title, "weight": "Bolder", "wrap": True}]
        paragraphs = filter(None, (text.client_effect, text.detail, f"What you can do: {text.command}"))
        blocks += [{"type": "TextBlock", "text": _escape_card_text(paragraph), "wrap": True} for paragraph in paragraphs]
        card = {
            "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
            "type": "AdaptiveCard",
            "version": "1.4",
            "body": blocks,
        }
        attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "content": card}
        return json.dumps({"type": "message", "attachments": [attachment]}).encode()


@dataclass(frozen=True)
class TemplateFormat:
    """A body by a Jinja template with the variables `TEMPLATE_VARIABLES`."""

    source: str
    template: str
    content_type: str

    def __post_init__(self) -> None:
        """Check the template with a sample of each event. Raises TemplateError."""
        if unknown := sorted(self._names - set(TEMPLATE_VARIABLES)):
            raise TemplateError(f"names {unknown[0]}, which is no variable: use {', '.join(TEMPLATE_VARIABLES)}")
        for notification in build_sample_notifications():
            body = self.build_body(notification, "")
            if self.content_type.partition(";")[0].strip().endswith("json"):
                try:
                    json.loads(body)
                except ValueError as error:
                    raise TemplateError(
                        f"gives no valid JSON for the event {notification.event_type} ({error}): write values as "
                        "{{ title | tojson }}, without quotation marks around them, or set another contentType"
                    ) from None

    @property
    def accepts_recipients(self) -> bool:
        """Whether the template uses the recipient."""
        return "recipient" in self._names

    def build_body(self, notification: Notification, recipient: str) -> bytes:
        from jinja2 import TemplateError as JinjaError
        from jinja2 import UndefinedError

        text = build_notification_text(notification, self.source)
        variables = _build_template_variables(notification, text, self.source, recipient)
        try:
            body = self._compiled.render(variables).encode()
        except UndefinedError as error:
            raise TemplateError(
                f"fails for the event {notification.event_type} ({error.message}): a field that an event may lack needs "
                '{{ data.get("FIELD", "") }}'
            ) from None
        except (JinjaError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            reason = str(error).rstrip(".")
            raise TemplateError(f"fails for the event {notification.event_type} ({reason}): leave that expression out") from None
        if len(body) > MAX_BODY_BYTES:
            raise TemplateError(
                f"gives {len(body)} bytes for the event {notification.event_type}: make it at most {MAX_BODY_BYTES}"
            )
        return body

    @cached_property
    def _environment(self) -> Environment:
        from jinja2 import StrictUndefined
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        return ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)

    @cached_property
    def _compiled(self) -> Template:
        return self._environment.from_string(self.template)

    @cached_property
    def _names(self) -> set[str]:
        from jinja2 import TemplateSyntaxError, meta

        try:
            return meta.find_undeclared_variables(self._environment.parse(self.template)) - self._environment.globals.keys()
        except TemplateSyntaxError as error:
            raise TemplateError(f"is no Jinja template: {(error.message or '').rstrip('.')}, in line {error.lineno}") from None


def _build_template_variables(notification: Notification, text: NotificationText, source: str, recipient: str) -> dict[str, Any]:
    values = (
        notification.event_type,
        notification.id,
        format_time(notification.occurred_at),
        source,
        notification.data["namespace"],
        notification.data["name"],
        recipient,
        text.title,
        text.client_effect,
        text.detail,
        text.command,
        text.plain_text,
        notification.data,
    )
    return dict(zip(TEMPLATE_VARIABLES, values, strict=True))


def _escape_mrkdwn(text: str) -> str:
    """Escape text for Slack, without mentions: Mattermost and Rocket.Chat notify a channel of any `@channel`."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MENTION.sub("@\u200b", escaped)


def _escape_card_text(text: str) -> str:
    """Escape the links of a card's Markdown."""
    return re.sub(r"([\[\]])", r"\\\1", text)
