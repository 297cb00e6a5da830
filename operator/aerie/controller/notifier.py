"""Tells an HTTP endpoint what becomes of rollouts: one CloudEvent for each notice (aerie.rollout.status.notifications), by POST.

    pass ─► status is written ─► look ─► notices that were not told yet ─► queue ─► POST, again and again ─► told, or lost

Guarantees: a pass never waits; what is waiting has a limit in number, and each notice one in time; what is lost is counted, by
reason. Notices go out in the order in which they came, one at a time. A notice is told after its status was written, so nothing
is told that did not happen. An operator that begins to lead tells again what is younger than `RECENT`, because the one before it
may have been killed between the status and the notice: so each is told at least once, unless no operator leads for longer than
that, or the endpoint does not answer for `PATIENCE`; and some are told twice, with the same id.
Not guaranteed: phases that were left before an operator looked; that they are told after `RECENT`.
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
"""What is younger than that is told by an operator that sees a resource for the first time."""
MAX_PENDING_NOTIFICATIONS = 1000
"""Notices that wait at most; one more is lost."""
DELIVERY_TIMEOUT_SECONDS = 900.0
"""Seconds from when a notice came until it is given up."""
INITIAL_DELIVERY_RETRY_SECONDS, MAX_DELIVERY_RETRY_SECONDS = 1.0, 60.0
"""Seconds between two attempts; each twice the one before."""
DELIVERY_ATTEMPT_TIMEOUT_SECONDS = 10.0
"""Seconds for one attempt."""
_RETRYABLE_STATUS_CODES = frozenset({408, 425, 429})
"""Refusals that pass."""


class WebhookError(ValueError):
    """An address or a file of headers that cannot be used, as a sentence."""


@dataclass(frozen=True)
class Webhook:
    """Where notices go."""

    url: str
    headers_file: Path | None = None
    """A file with a header in each line, `Name: value`; read for each notice, so that a Secret may change."""
    source: str = "aerie"
    """Tells one cluster's notices from another's."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise WebhookError("the address of notices has to begin with http:// or https:// and name a host.")
        self.read_headers()

    def read_headers(self) -> dict[str, str]:
        """The headers. Raises HookError."""
        if self.headers_file is None:
            return {}
        try:
            lines = self.headers_file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise WebhookError(f"the file {self.headers_file} with headers for notices cannot be read: {error}.") from None
        found = {}
        for line in filter(str.strip, lines):
            name, colon, value = line.partition(":")
            if not colon or not name.strip().isascii() or not value.strip():
                raise WebhookError(
                    f"the file {self.headers_file} has a line that is no header: write `Name: value`."
                )  # and show no secret
            found[name.strip()] = value.strip()
        return found


@dataclass(frozen=True)
class _PendingNotification:
    notification: Notification
    deadline: float
    """On the loop's clock."""


@dataclass
class _SentState:
    """Of one resource."""

    fingerprint: object
    """What of the status its notices follow from."""
    notification_ids: frozenset[str]


@dataclass
class Notifier:
    """See the module. Without a hook it does nothing. `count` is told how each notice ended: sent, or why it was lost."""

    webhook: Webhook | None = None
    record_outcome: Callable[[str], None] = lambda _: None
    transport: httpx.AsyncBaseTransport | None = None
    _sent_states: dict[NamespacedName, _SentState] = field(default_factory=dict)
    _pending: deque[_PendingNotification] = field(default_factory=deque)
    _pending_added: asyncio.Event = field(default_factory=asyncio.Event)

    def enqueue_new(self, key: NamespacedName, resource: SpeculativeDeployment, status: Status, now: datetime) -> None:
        """Tell what is new in a status that is written."""
        if self.webhook is None:
            return
        shown = _build_fingerprint(resource, status)
        before = self._sent_states.get(key)
        if before is not None and before.fingerprint == shown:
            return
        found = list(build_notifications(resource, status))
        self._sent_states[key] = _SentState(shown, frozenset(notice.id for notice in found))
        for notice in found:
            if notice.id not in before.notification_ids if before is not None else notice.occurred_at > now - MAX_REPLAY_AGE:
                self._enqueue(notice)

    def forget(self, key: NamespacedName) -> None:
        """The resource is gone; what is told of it is told all the same."""
        self._sent_states.pop(key, None)

    def _enqueue(self, notification: Notification) -> None:
        if len(self._pending) >= MAX_PENDING_NOTIFICATIONS:
            self._drop(notification, "full", f"{MAX_PENDING_NOTIFICATIONS} others wait")
            return
        self._pending.append(_PendingNotification(notification, asyncio.get_running_loop().time() + DELIVERY_TIMEOUT_SECONDS))
        self._pending_added.set()

    async def run(self) -> None:
        """Send until cancelled."""
        if self.webhook is None:
            await asyncio.Event().wait()
            return
        async with self._create_client(self.webhook) as through:
            while True:
                await self._pending_added.wait()
                self._pending_added.clear()
                while self._pending:
                    waiting = self._pending[0]
                    try:
                        await self._deliver(through, self.webhook, waiting)
                    except Exception:  # noqa: BLE001 - one notice must not end the telling of the others
                        _log.exception("notice %s ended with an error of Aerie's own", waiting.notification.id)
                        self.record_outcome("error")
                    self._pending.popleft()

    def _create_client(self, webhook: Webhook) -> httpx.AsyncClient:
        secure = webhook.url.startswith("https:")
        return httpx.AsyncClient(
            transport=self.transport,
            timeout=DELIVERY_ATTEMPT_TIMEOUT_SECONDS,
            follow_redirects=False,
            # Reading the machine's authorities takes time and memory that plain HTTP does not need.
            verify=ssl.create_default_context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        )

    async def _deliver(self, http_client: httpx.AsyncClient, webhook: Webhook, pending: _PendingNotification) -> None:
        """Try until it is told, refused, or given up."""
        loop, pause = asyncio.get_running_loop(), INITIAL_DELIVERY_RETRY_SECONDS
        body = json.dumps(pending.notification.to_cloud_event(webhook.source)).encode()
        while True:
            try:
                headers = webhook.read_headers() | {"Content-Type": "application/cloudevents+json"}
                async with asyncio.timeout(DELIVERY_ATTEMPT_TIMEOUT_SECONDS):
                    answer = await http_client.post(webhook.url, content=body, headers=headers)
                code = answer.status_code
                if 200 <= code < 300:
                    self.record_outcome("sent")
                    return
                wrong = f"status {code}"
                if code < 500 and code not in _RETRYABLE_STATUS_CODES:
                    self._drop(pending.notification, "refused", wrong)
                    return
            except (httpx.HTTPError, TimeoutError, WebhookError) as error:
                wrong = str(error) or type(error).__name__
            if loop.time() + pause >= pending.deadline:
                self._drop(pending.notification, "expired", wrong)
                return
            _log.info("notice %s was not taken (%s); again in %g s", pending.notification.id, wrong, pause)
            await asyncio.sleep(pause)
            pause = min(MAX_DELIVERY_RETRY_SECONDS, 2 * pause)

    def _drop(self, notification: Notification, outcome: str, cause: str) -> None:
        _log.warning("notice %s is lost: %s", notification.id, cause)
        self.record_outcome(outcome)


def _build_fingerprint(resource: SpeculativeDeployment, status: Status) -> object:
    """That part of a status from which its notices follow: comparing it is cheaper than making them."""
    canary, last = status.canary, status.history[0] if status.history else None
    failed = status.phase == "Failed"
    return (
        resource.metadata.uid,
        canary and (canary.revision, canary.started_at, canary.phase),
        last and (last.revision, last.ended_at, last.result),
        failed and status.observed_generation,
    )
