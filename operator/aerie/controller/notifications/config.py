"""The file of `--notifications-config`: receivers, and the subscriptions that all resources have.

    receivers:
      serving:
        type: slack
        urlFile: slack-url            # relative to this file, as a Secret mounts it beside it
    subscriptions:
      - receiver: serving
        events: [promoted, rolled-back, inconclusive, failed]

Guarantees: the file is checked completely when it is read, templates included, and an error names the field. No error contains
an address. Files with addresses and headers are not part of it: they are read for each request, and may be missing at the start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator
from pydantic.alias_generators import to_camel

from aerie.api.types.base import DNS_LABEL_PATTERN
from aerie.controller.notifications.formats import (
    BodyFormat,
    CloudEventFormat,
    SlackFormat,
    TeamsFormat,
    TemplateError,
    TemplateFormat,
)
from aerie.controller.notifications.receiver import Endpoint, Receiver, ReceiverError, check_url
from aerie.rollout.status.notifications import NotificationType
from aerie.rollout.status.subscriptions import MAX_RECIPIENT_CHARACTERS, Subscription
from aerie.yaml_documents import YamlDocumentError, read_yaml_documents

URL_RECEIVER_NAME = "notify-url"
"""Name of the receiver that `--notify-url` makes."""
MAX_RECEIVERS = 50
MAX_RECEIVER_NAME_CHARACTERS = 30
"""Maximum length of a name. It is part of the names of annotations, which have at most 63 characters after the slash."""
MAX_TEMPLATE_CHARACTERS = 65536
_DISPLAYABLE_FIELDS = ("type", "contentType", "receiver", "recipient")
"""Fields whose values may be part of an error."""


class NotificationsConfigError(ValueError):
    """A configuration that cannot be used; the text has a line per field: the field, the problem and the fix."""


@dataclass(frozen=True)
class DefaultSubscription:
    """Subscription of a receiver to events of all resources in its namespaces."""

    receiver: str
    event_types: frozenset[NotificationType] | None = None
    """None: all events."""
    recipient: str = ""

    def covers(self, event_type: NotificationType) -> bool:
        """Return whether the event is subscribed to."""
        return self.event_types is None or event_type in self.event_types


@dataclass(frozen=True)
class NotificationsConfig:
    """Receivers, and the subscriptions that all resources have."""

    receivers: tuple[Receiver, ...] = ()
    subscriptions: tuple[DefaultSubscription, ...] = ()

    def find_recipients(
        self, event_type: NotificationType, namespace: str | None, subscriptions: tuple[Subscription, ...]
    ) -> dict[str, list[str]]:
        """Return the recipients of an event by receiver, each once. `subscriptions`: those of the resource."""
        served = [receiver.name for receiver in self.receivers if receiver.facts.serves(namespace)]
        targets = [(item.receiver, item.recipient) for item in self.subscriptions if item.covers(event_type)]
        targets += [(item.receiver, item.recipient) for item in subscriptions if item.event_type == event_type]
        recipients: dict[str, list[str]] = {}
        for receiver, recipient in dict.fromkeys(targets):
            if receiver in served:
                recipients.setdefault(receiver, []).append(recipient)
        return recipients


class _FileModel(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class _ReceiverFields(_FileModel):
    """One entry of `receivers`."""

    type: Literal["cloudevents", "slack", "teams", "webhook"]
    url: Annotated[str, Field(max_length=2048)] | None = None
    url_file: Annotated[str, Field(min_length=1)] | None = None
    headers_file: Annotated[str, Field(min_length=1)] | None = None
    namespaces: list[Annotated[str, StringConstraints(pattern=DNS_LABEL_PATTERN, max_length=63)]] | None = None
    body: Annotated[str, Field(min_length=1, max_length=MAX_TEMPLATE_CHARACTERS)] | None = None
    content_type: Annotated[str, Field(pattern=r"^[a-z]+/[a-z0-9.+-]+(; ?[a-z]+=[A-Za-z0-9-]+)?$")] | None = None

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        return url if url is None else check_url(url, "it")

    @field_validator("url_file", "headers_file")
    @classmethod
    def _check_path(cls, path: str | None) -> str | None:
        if path is not None and "://" in path:
            raise ValueError("it must be the path of a file: write an address as url")
        return path

    @model_validator(mode="after")
    def _check_fields_of_type(self) -> Self:
        if (self.url is None) == (self.url_file is None):
            raise ValueError("set either url or urlFile, a file with the URL")
        if (self.type == "webhook") != (self.body is not None):
            raise ValueError("set body, a template, for type webhook, and for no other type")
        if self.type != "webhook" and self.content_type is not None:
            raise ValueError("contentType belongs to type webhook: remove it")
        return self

    def build_receiver(self, name: str, folder: Path, source: str) -> Receiver:
        """Return the receiver. Raises TemplateError."""
        endpoint = Endpoint(
            self.url,
            folder / self.url_file if self.url_file is not None else None,
            folder / self.headers_file if self.headers_file is not None else None,
        )
        namespaces = frozenset(self.namespaces) if self.namespaces is not None else None
        return Receiver(name, endpoint, self._build_format(source), namespaces)

    def _build_format(self, source: str) -> BodyFormat:
        if self.body is not None:
            return TemplateFormat(source, self.body, self.content_type or "application/json")
        formats: dict[str, Callable[[str], BodyFormat]] = {
            "cloudevents": CloudEventFormat,
            "slack": SlackFormat,
            "teams": TeamsFormat,
        }
        return formats[self.type](source)


class _SubscriptionFields(_FileModel):
    """One entry of `subscriptions`."""

    receiver: str
    events: Annotated[list[NotificationType], Field(min_length=1)] | None = None
    recipient: Annotated[str, Field(max_length=MAX_RECIPIENT_CHARACTERS)] = ""


class _File(_FileModel):
    """The whole file."""

    receivers: Annotated[
        dict[
            Annotated[str, StringConstraints(pattern=DNS_LABEL_PATTERN, max_length=MAX_RECEIVER_NAME_CHARACTERS)], _ReceiverFields
        ],
        Field(max_length=MAX_RECEIVERS),
    ]
    subscriptions: list[_SubscriptionFields] = []


def read_notifications_config(path: Path, source: str) -> NotificationsConfig:
    """Return the configuration of a file. `source`: name of the cluster in notifications. Raises NotificationsConfigError."""
    try:
        documents = read_yaml_documents(str(path))
    except YamlDocumentError as error:
        raise NotificationsConfigError(str(error)) from None
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise NotificationsConfigError(f"{path} must contain one YAML document with the fields receivers and subscriptions.")
    try:
        fields = _File.model_validate(documents[0], by_alias=True, by_name=False)
    except ValidationError as error:
        raise NotificationsConfigError("\n".join(_format_errors(error))) from None
    receivers = []
    for name, receiver in fields.receivers.items():
        try:
            receivers.append(receiver.build_receiver(name, path.parent, source))
        except TemplateError as error:
            raise NotificationsConfigError(f"receivers.{name}.body {error}.") from None
    subscriptions = tuple(
        DefaultSubscription(item.receiver, frozenset(item.events) if item.events is not None else None, item.recipient)
        for item in fields.subscriptions
    )
    accepts_recipients = {receiver.name: receiver.facts.accepts_recipients for receiver in receivers}
    for number, subscription in enumerate(subscriptions):
        if subscription.receiver not in accepts_recipients:
            names = ", ".join(accepts_recipients) or "none"
            raise NotificationsConfigError(
                f"subscriptions[{number}].receiver is {subscription.receiver!r}, which receivers lacks: write one of {names}."
            )
        if subscription.recipient and not accepts_recipients[subscription.receiver]:
            raise NotificationsConfigError(
                f"subscriptions[{number}].recipient is {subscription.recipient!r}, but receiver {subscription.receiver} takes no "
                "recipient: remove it."
            )
    return NotificationsConfig(tuple(receivers), subscriptions)


def with_url_receiver(config: NotificationsConfig, endpoint: Endpoint, source: str) -> NotificationsConfig:
    """Return the configuration with a receiver of CloudEvents that subscribes to everything: that of `--notify-url`.

    Raises NotificationsConfigError.
    """
    if any(receiver.name == URL_RECEIVER_NAME for receiver in config.receivers):
        raise NotificationsConfigError(
            f"receivers.{URL_RECEIVER_NAME} has the name of the receiver that --notify-url makes: rename it."
        )
    receiver = Receiver(URL_RECEIVER_NAME, endpoint, CloudEventFormat(source))
    return NotificationsConfig((receiver, *config.receivers), (DefaultSubscription(URL_RECEIVER_NAME), *config.subscriptions))


def find_file_problems(config: NotificationsConfig) -> list[str]:
    """Return a message for each receiver whose files cannot be read now."""
    problems = []
    for receiver in config.receivers:
        try:
            receiver.endpoint.read_url()
            receiver.endpoint.read_headers()
        except ReceiverError as error:
            problems.append(f"receiver {receiver.name}: {error}")
    return problems


def _format_errors(error: ValidationError) -> list[str]:
    messages = []
    for detail in error.errors(include_url=False):
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"] if part != "[key]")
        field = path.removeprefix(".") or "the file"
        if detail["type"] == "missing":
            messages.append(f"{field} is missing.")
        elif detail["type"] == "extra_forbidden":
            messages.append(f"{field} is no field of this file: correct its name, or remove it.")
        else:
            reason = detail["msg"].removeprefix("Value error, ").rstrip(".")
            if detail["type"] == "string_pattern_mismatch":
                is_media_type = detail["loc"][-1] == "contentType"
                expected = "a media type, such as text/plain" if is_media_type else "a-z, 0-9 and - only, and no - at either end"
                reason = f"write {expected}"
            value = detail["input"]
            # An address is a secret, and so may be what stands where a field with one belongs.
            is_displayable = isinstance(value, str | int | float) and detail["loc"][-1] in _DISPLAYABLE_FIELDS
            messages.append(f"{field}{f' is {value!r:.80}' if is_displayable else ''}: {reason[:1].lower()}{reason[1:]}.")
    return messages
