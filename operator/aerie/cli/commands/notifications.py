"""`aerie notifications`: try the receivers of notifications, without an operator.

Guarantee: nothing printed contains an address beyond its host, the value of a header, or either of them in a response.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from aerie.boundary import EXIT_REJECTED
from aerie.cli.console import CommandError, err, out
from aerie.rollout.status.notifications import EVENT_TYPES, Notification, NotificationType
from aerie.terminal import sanitize_text
from aerie.typer_app import App

if TYPE_CHECKING:  # imports httpx and all formats, which help texts need not
    from aerie.controller.notifications.receiver import HttpClients, Receiver

MAX_PRINTED_CHARACTERS = 2000
"""Maximum length of a printed body and of a printed response."""
MIN_SECRET_CHARACTERS = 4
"""Length from which a part of an address or a header is left out of a printed response."""

app = App(help="Try the receivers of notifications.")


@app.callback()
def _group_commands() -> None: ...


@app.command(name="test")
def send_test(
    config: Annotated[str, typer.Option(help="File with the receivers, as for `aerie operator --notifications-config`.")],
    receiver: Annotated[list[str] | None, typer.Option(help="Name of a receiver to test; repeatable. Default: all.")] = None,
    event: Annotated[str, typer.Option(help="Event of the test notification.")] = "promoted",
    recipient: Annotated[str, typer.Option(help="Recipient, as the value of an annotation. Default: the receiver's own.")] = "",
    source: Annotated[str, typer.Option(help="Source of the notification, as for `aerie operator --notify-source`.")] = "aerie",
) -> None:
    """Send a test notification to each receiver, and print what was sent and the response.

    The notification says that it is a test. Exit status 1: a receiver has not accepted it.
    """
    from aerie.controller.notifications.config import NotificationsConfigError, read_notifications_config
    from aerie.controller.notifications.receiver import HttpClients
    from aerie.controller.notifications.samples import build_sample_notification

    if event not in EVENT_TYPES:
        raise CommandError(f"--event is {event}: set one of {', '.join(EVENT_TYPES)}.")
    event_type: NotificationType = next(item for item in EVENT_TYPES if item == event)
    try:
        receivers = {item.name: item for item in read_notifications_config(Path(config), source).receivers}
    except NotificationsConfigError as error:
        raise CommandError(f"--config: {error}") from None
    for name in receiver or []:
        if name not in receivers:
            raise CommandError(f"--receiver is {name}, which {config} lacks: set one of {', '.join(receivers) or 'none'}.")
    notification = build_sample_notification(event_type, datetime.now(UTC))
    selected = [receivers[name] for name in dict.fromkeys(receiver or receivers)]
    for item in selected:
        if recipient and not item.body_format.accepts_recipients:
            raise CommandError(f"--recipient is {recipient}, but receiver {item.name} takes no recipient: leave it out.")

    async def send_to_all() -> list[bool]:
        clients = HttpClients()
        try:
            return [await _send(clients, item, notification, recipient) for item in selected]
        finally:
            await clients.close()

    if not all(asyncio.run(send_to_all())):
        raise typer.Exit(EXIT_REJECTED)


async def _send(clients: HttpClients, receiver: Receiver, notification: Notification, recipient: str) -> bool:
    """Send the notification once, print what happens, and return whether it was accepted."""
    from aerie.controller.notifications.formats import TemplateError
    from aerie.controller.notifications.receiver import ReceiverError, send_notification

    try:
        body = receiver.body_format.build_body(notification, recipient).decode()
        url, headers = receiver.endpoint.read_url(), receiver.endpoint.read_headers()
        out.print(f"[bold]{receiver.name}[/]: POST to {sanitize_text(urlsplit(url).hostname or '')}")
        for name in ("Content-Type", *headers):
            out.print(f"  {sanitize_text(name)}: {receiver.body_format.content_type if name == 'Content-Type' else '***'}")
        out.print(f"  {_format_text(body)}")
        response = await send_notification(clients, receiver, notification, recipient)
    except (ReceiverError, TemplateError) as error:
        err.print(f"[bold red]{receiver.name}: not sent:[/] {sanitize_text(str(error))}")
        return False
    text = response.text
    for secret in sorted(_list_secrets(url, headers), key=len, reverse=True):
        text = text.replace(secret, "***")
    is_accepted = 200 <= response.status_code < 300
    out.print(f"  response: {response.status_code} {'accepted' if is_accepted else 'not accepted'}")
    if text.strip():
        out.print(f"  {_format_text(text)}")
    return is_accepted


def _list_secrets(url: str, headers: dict[str, str]) -> set[str]:
    """Return what a response must not repeat: the address and its parts, and the values of headers and their parts."""
    parts = urlsplit(url)
    texts = {url, parts.path, parts.query, parts.username or "", parts.password or "", *parts.path.split("/"), *headers.values()}
    texts |= {part for value in headers.values() for part in value.split()}
    return {text for text in texts if len(text) >= MIN_SECRET_CHARACTERS}


def _format_text(text: str) -> str:
    text = text if len(text) <= MAX_PRINTED_CHARACTERS else text[: MAX_PRINTED_CHARACTERS - 1] + "…"
    return sanitize_text(text.strip()).replace("\n", "\n  ")
