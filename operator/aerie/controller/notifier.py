"""Sends notifications of rollouts to an HTTP endpoint: one CloudEvent each (aerie.rollout.status.notifications), by POST.

    reconcile ─► status is written ─► enqueue_new ─► unsent notifications ─► queue ─► POST with retries ─► sent, or lost

Guarantees: a reconcile never waits. The number of pending notifications has a limit, and so has the time of each. Lost ones are
counted by reason. Notifications are sent in order, one at a time. A notification is enqueued after its status was written, so it
never reports what did not happen.

A new leader sends again what is younger than `MAX_REPLAY_AGE`, because the previous leader may have been killed between the
status and the notification. So each is delivered at least once, unless no operator leads for longer than that, or the endpoint
does not answer for `DELIVERY_TIMEOUT_SECONDS`. Some are delivered twice, with the same id.

Not guaranteed: notifications of phases that ended before an operator saw them, and deliveries after `MAX_REPLAY_AGE`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from aerie.api import SpeculativeDeployment
from aerie.api.status import Status
from aerie.controller.work_queue import NamespacedName
from aerie.rollout.status.notifications import Notification, build_notifications

_log = logging.getLogger(__name__)

MAX_REPLAY_AGE = timedelta(minutes=15)
"""Age up to which notifications are sent by an operator that sees a resource for the first time."""
MAX_PENDING_NOTIFICATIONS = 1000
"""Maximum number of pending notifications; one more is lost."""
DELIVERY_TIMEOUT_SECONDS = 900.0
"""Seconds after which a notification is dropped."""
INITIAL_DELIVERY_RETRY_SECONDS = 1.0
"""Seconds between the first two attempts; the delay doubles with each further one."""
MAX_DELIVERY_RETRY_SECONDS = 60.0
"""Maximum seconds between two attempts."""
DELIVERY_ATTEMPT_TIMEOUT_SECONDS = 10.0
"""Timeout of one attempt in seconds."""
_RETRYABLE_STATUS_CODES = frozenset({408, 425, 429})
"""Client errors that may be temporary."""


class WebhookError(ValueError):
    """Error for an address or a file of headers that cannot be used; its text is a message."""


@dataclass(frozen=True)
class Webhook:
    """Endpoint that notifications are sent to."""

    url: str
    headers_file: Path | None = None
    """File with a header in each line, `Name: value`. It is read for each notification, so that a Secret may change."""
    source: str = "aerie"
    """CloudEvents source: distinguishes the notifications of one cluster from those of another."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise WebhookError("the webhook URL must begin with http:// or https:// and contain a host.")
        self.read_headers()

    def read_headers(self) -> dict[str, str]:
        """Return the headers. Raises WebhookError."""
        if self.headers_file is None:
            return {}
        try:
            lines = self.headers_file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise WebhookError(f"the file {self.headers_file} with headers of the webhook cannot be read: {error}.") from None
        headers = {}
        for line in filter(str.strip, lines):
            name, colon, value = line.partition(":")
            if not colon or not name.strip().isascii() or not value.strip():
                raise WebhookError(
                    f"the file {self.headers_file} has a line that is not a header: write `Name: value`."
                )  # the line itself may be a secret
            headers[name.strip()] = value.strip()
        return headers


@dataclass(frozen=True)
class _PendingNotification:
    notification: Notification
    deadline: float
    """Time on the event loop's clock after which it is dropped."""


@dataclass
class _SentState:
    """State of one resource's notifications that were enqueued."""

    fingerprint: object
    """Part of the status that its notifications follow from."""
    notification_ids: frozenset[str]


@dataclass
class Notifier:
    """Sender of notifications. Without a webhook it does nothing.

    `record_outcome` is called with the outcome of each notification: sent, or why it was lost.
    """

    webhook: Webhook | None = None
    record_outcome: Callable[[str], None] = lambda _: None
    transport: httpx.AsyncBaseTransport | None = None
    _sent_states: dict[NamespacedName, _SentState] = field(default_factory=dict)
    _pending: deque[_PendingNotification] = field(default_factory=deque)
    _pending_added: asyncio.Event = field(default_factory=asyncio.Event)

    def enqueue_new(self, key: NamespacedName, resource: SpeculativeDeployment, status: Status, now: datetime) -> None:
        """Enqueue the new notifications of a status that was written."""
        if self.webhook is None:
            return
        fingerprint = _build_fingerprint(resource, status)
        sent_state = self._sent_states.get(key)
        if sent_state is not None and sent_state.fingerprint == fingerprint:
            return
        notifications = list(build_notifications(resource, status))
        self._sent_states[key] = _SentState(fingerprint, frozenset(notification.id for notification in notifications))
        for notification in notifications:
            if (
                notification.id not in sent_state.notification_ids
                if sent_state is not None
                else notification.occurred_at > now - MAX_REPLAY_AGE
            ):
                self._enqueue(notification)

    def forget(self, key: NamespacedName) -> None:
        """Drop the state of a resource that was deleted. Its pending notifications are still sent."""
        self._sent_states.pop(key, None)

    def _enqueue(self, notification: Notification) -> None:
        if len(self._pending) >= MAX_PENDING_NOTIFICATIONS:
            self._drop(notification, "queue_full", f"{MAX_PENDING_NOTIFICATIONS} notifications are pending")
            return
        self._pending.append(_PendingNotification(notification, asyncio.get_running_loop().time() + DELIVERY_TIMEOUT_SECONDS))
        self._pending_added.set()

    async def run(self) -> None:
        """Send notifications until cancelled."""
        if self.webhook is None:
            await asyncio.Event().wait()
            return
        async with self._create_client(self.webhook) as http_client:
            while True:
                await self._pending_added.wait()
                self._pending_added.clear()
                while self._pending:
                    pending = self._pending[0]
                    try:
                        await self._deliver(http_client, self.webhook, pending)
                    except Exception:  # noqa: BLE001 - one notification must not stop the others
                        _log.exception("notification %s failed with an internal error", pending.notification.id)
                        self.record_outcome("error")
                    self._pending.popleft()

    def _create_client(self, webhook: Webhook) -> httpx.AsyncClient:
        uses_tls = webhook.url.startswith("https:")
        return httpx.AsyncClient(
            transport=self.transport,
            timeout=DELIVERY_ATTEMPT_TIMEOUT_SECONDS,
            follow_redirects=False,
            # Loading the machine's CA bundle takes time and memory that plain HTTP does not need.
            verify=ssl.create_default_context() if uses_tls else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        )

    async def _deliver(self, http_client: httpx.AsyncClient, webhook: Webhook, pending: _PendingNotification) -> None:
        """Retry until the notification is sent, rejected, or dropped at its deadline."""
        loop, delay = asyncio.get_running_loop(), INITIAL_DELIVERY_RETRY_SECONDS
        body = json.dumps(pending.notification.to_cloud_event(webhook.source)).encode()
        while True:
            try:
                headers = webhook.read_headers() | {"Content-Type": "application/cloudevents+json"}
                async with asyncio.timeout(DELIVERY_ATTEMPT_TIMEOUT_SECONDS):
                    response = await http_client.post(webhook.url, content=body, headers=headers)
                code = response.status_code
                if 200 <= code < 300:
                    self.record_outcome("sent")
                    return
                cause = f"status {code}"
                if code < 500 and code not in _RETRYABLE_STATUS_CODES:
                    self._drop(pending.notification, "rejected", cause)
                    return
            except (httpx.HTTPError, TimeoutError, WebhookError) as error:
                cause = str(error) or type(error).__name__
            if loop.time() + delay >= pending.deadline:
                self._drop(pending.notification, "expired", cause)
                return
            _log.info("notification %s was not accepted (%s); retrying in %g s", pending.notification.id, cause, delay)
            await asyncio.sleep(delay)
            delay = min(MAX_DELIVERY_RETRY_SECONDS, 2 * delay)

    def _drop(self, notification: Notification, outcome: str, cause: str) -> None:
        _log.warning("notification %s is lost: %s", notification.id, cause)
        self.record_outcome(outcome)


def _build_fingerprint(resource: SpeculativeDeployment, status: Status) -> object:
    """Return the part of a status that its notifications follow from. Comparing it is cheaper than building them."""
    canary, in_place = status.canary, status.in_place_rollout
    last_rollout = status.rollout_history[0] if status.rollout_history else None
    has_failed = status.phase == "Failed"
    return (
        resource.metadata.uid,
        canary and (canary.revision, canary.start_time, canary.phase),
        in_place and (in_place.revision, in_place.start_time, in_place.phase),
        last_rollout and (last_rollout.revision, last_rollout.completion_time, last_rollout.result),
        has_failed and status.observed_generation,
    )
