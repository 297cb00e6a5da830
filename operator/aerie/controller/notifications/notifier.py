"""Sends notifications of rollouts (aerie.rollout.status.notifications) to the receivers that subscribe to them, by HTTP POST.

    reconcile ─► status is written ─► enqueue_new ─► unsent notifications ─┬─► queue of receiver A ─► POST with retries ─► sent,
                                                                           └─► queue of receiver B ─► ...                  or lost

Guarantees: a reconcile never waits. Each receiver has a queue of its own, so one that hangs delays no other. The number of its
pending notifications has a limit, and so has the time of each. Lost ones are counted by receiver and reason. A receiver gets
notifications in order, one at a time. A notification is enqueued after its status was written, so it never reports what did not
happen.

A new leader sends again what is younger than `MAX_REPLAY_AGE`, because the previous leader may have been killed between the
status and the notification. So each is delivered at least once, unless no operator leads for longer than that, or the receiver
does not answer for `DELIVERY_TIMEOUT_SECONDS`. Some are delivered twice, with the same id.

Not guaranteed: notifications of phases that ended before an operator saw them, deliveries after `MAX_REPLAY_AGE`, and earlier
notifications to a receiver that subscribes later.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import httpx

from aerie.api import SpeculativeDeployment
from aerie.api.status import Status
from aerie.controller.notifications.config import NotificationsConfig
from aerie.controller.notifications.formats import TemplateError
from aerie.controller.notifications.receiver import HttpClients, Receiver, ReceiverError, send_notification
from aerie.controller.work_queue import NamespacedName
from aerie.rollout.facts.receivers import NotificationReceiver
from aerie.rollout.status.notifications import Notification, build_notifications, find_acceptance_regression
from aerie.rollout.status.subscriptions import read_subscriptions

_log = logging.getLogger(__name__)

MAX_REPLAY_AGE = timedelta(minutes=15)
"""Age up to which notifications are sent by an operator that sees a resource for the first time."""
MAX_PENDING_NOTIFICATIONS = 1000
"""Maximum number of pending notifications of one receiver; one more is lost."""
DELIVERY_TIMEOUT_SECONDS = 900.0
"""Seconds after which a notification is dropped."""
INITIAL_DELIVERY_RETRY_SECONDS = 1.0
"""Seconds between the first two attempts; the delay doubles with each further one."""
MAX_DELIVERY_RETRY_SECONDS = 60.0
"""Maximum seconds between two attempts."""
MAX_REMEMBERED_IDS = 32
"""Maximum number of ids that are remembered of a resource: more than a status has notifications."""
_RETRYABLE_STATUS_CODES = frozenset({408, 425, 429})
"""Client errors that may be temporary."""


@dataclass(frozen=True)
class _PendingNotification:
    notification: Notification
    recipient: str
    deadline: float
    """Time on the event loop's clock after which it is dropped."""


@dataclass
class _SentState:
    """State of one resource's notifications that were enqueued."""

    fingerprint: object
    """Part of the status that its notifications follow from."""
    notification_ids: tuple[str, ...]
    """The last ones. An event that the status shows again, because a condition comes and goes, is not sent again."""


@dataclass
class Notifier:
    """Sender of notifications. Without receivers it does nothing.

    `record_outcome` is called with the receiver and the outcome of each notification: sent, or why it was lost.
    """

    config: NotificationsConfig = field(default_factory=NotificationsConfig)
    record_outcome: Callable[[str, str], None] = lambda _receiver, _outcome: None
    transport: httpx.AsyncBaseTransport | None = None
    _sent_states: dict[NamespacedName, _SentState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.receiver_facts: tuple[NotificationReceiver, ...] = tuple(receiver.facts for receiver in self.config.receivers)
        """What decisions need of the receivers."""
        self._queues = {receiver.name: _ReceiverQueue(receiver, self.record_outcome) for receiver in self.config.receivers}

    def enqueue_new(self, key: NamespacedName, resource: SpeculativeDeployment, status: Status, now: datetime) -> None:
        """Enqueue the new notifications of a status that was written."""
        if not self._queues:
            return
        fingerprint = _build_fingerprint(resource, status)
        sent_state = self._sent_states.get(key)
        if sent_state is not None and sent_state.fingerprint == fingerprint:
            return
        notifications = list(build_notifications(resource, status))
        current_ids = tuple(notification.id for notification in notifications)
        # Those of the present status are the last to be forgotten: else they would be sent again.
        past_ids = [item for item in (sent_state.notification_ids if sent_state is not None else ()) if item not in current_ids]
        remembered_ids = (*past_ids, *current_ids)[-max(MAX_REMEMBERED_IDS, len(current_ids)) :]
        self._sent_states[key] = _SentState(fingerprint, remembered_ids)
        for notification in notifications:
            if (
                notification.id not in sent_state.notification_ids
                if sent_state is not None
                else notification.occurred_at > now - MAX_REPLAY_AGE
            ):
                self._enqueue(resource, notification)

    def forget(self, key: NamespacedName) -> None:
        """Drop the state of a resource that was deleted. Its pending notifications are still sent."""
        self._sent_states.pop(key, None)

    def _enqueue(self, resource: SpeculativeDeployment, notification: Notification) -> None:
        """Enqueue a notification at each receiver that subscribes to it."""
        subscriptions = read_subscriptions(resource, self.receiver_facts).valid
        targets = self.config.find_recipients(notification.event_type, resource.metadata.namespace, subscriptions)
        for receiver, recipients in targets.items():
            for recipient in recipients:
                self._queues[receiver].enqueue(notification, recipient)

    def count_pending(self) -> int:
        """Return the number of notifications that are not sent yet, at all receivers."""
        return sum(len(queue.pending) for queue in self._queues.values())

    async def run(self) -> None:
        """Send notifications until cancelled."""
        if not self._queues:
            await asyncio.Event().wait()
            return
        clients = HttpClients(self.transport)
        try:
            async with asyncio.TaskGroup() as tasks:
                for name, queue in self._queues.items():
                    tasks.create_task(queue.run(clients), name=f"notifications to {name}")
        finally:
            await clients.close()


class _ReceiverQueue:
    """Queue of the notifications to one receiver."""

    def __init__(self, receiver: Receiver, record_outcome: Callable[[str, str], None]) -> None:
        self.pending: deque[_PendingNotification] = deque()
        self._receiver = receiver
        self._record_outcome = record_outcome
        self._added = asyncio.Event()

    def enqueue(self, notification: Notification, recipient: str) -> None:
        """Enqueue a notification; it is lost if too many are pending."""
        if len(self.pending) >= MAX_PENDING_NOTIFICATIONS:
            self._drop(notification, "queue_full", f"{MAX_PENDING_NOTIFICATIONS} notifications are pending")
            return
        deadline = asyncio.get_running_loop().time() + DELIVERY_TIMEOUT_SECONDS
        self.pending.append(_PendingNotification(notification, recipient, deadline))
        self._added.set()

    async def run(self, clients: HttpClients) -> None:
        """Send notifications until cancelled."""
        while True:
            await self._added.wait()
            self._added.clear()
            while self.pending:
                pending = self.pending[0]
                try:
                    await self._deliver(clients, pending)
                except TemplateError as error:
                    self._drop(pending.notification, "error", f"the template {error}")
                except Exception:  # noqa: BLE001 - one notification must not stop the others
                    _log.exception("notification %s failed with an internal error", pending.notification.id)
                    self._record_outcome(self._receiver.name, "error")
                self.pending.popleft()

    async def _deliver(self, clients: HttpClients, pending: _PendingNotification) -> None:
        """Retry until the notification is sent, rejected, or dropped at its deadline. Raises TemplateError."""
        loop, retry_seconds = asyncio.get_running_loop(), INITIAL_DELIVERY_RETRY_SECONDS
        notification = pending.notification
        while True:
            delay = retry_seconds
            try:
                response = await send_notification(clients, self._receiver, notification, pending.recipient)
                code = response.status_code
                if 200 <= code < 300:
                    self._record_outcome(self._receiver.name, "sent")
                    return
                cause = f"status {code}"
                if code < 500 and code not in _RETRYABLE_STATUS_CODES:
                    self._drop(notification, "rejected", cause)
                    return
                delay = max(delay, min(response.retry_after_seconds or 0.0, MAX_DELIVERY_RETRY_SECONDS))
            except ReceiverError as error:
                cause = str(error)
            if loop.time() + delay >= pending.deadline:
                self._drop(notification, "expired", cause)
                return
            _log.info(
                "notification %s was not accepted by receiver %s (%s); retrying in %g s",
                notification.id,
                self._receiver.name,
                cause,
                delay,
            )
            await asyncio.sleep(delay)
            retry_seconds = min(MAX_DELIVERY_RETRY_SECONDS, 2 * retry_seconds)

    def _drop(self, notification: Notification, outcome: str, cause: str) -> None:
        _log.warning("notification %s to receiver %s is lost: %s", notification.id, self._receiver.name, cause)
        self._record_outcome(self._receiver.name, outcome)


def _build_fingerprint(resource: SpeculativeDeployment, status: Status) -> object:
    """Return the part of a status that its notifications follow from. Comparing it is cheaper than building them."""
    canary, in_place = status.canary, status.in_place_rollout
    last_rollout = status.rollout_history[0] if status.rollout_history else None
    has_failed = status.phase == "Failed"
    regression = find_acceptance_regression(status)
    return (
        resource.metadata.uid,
        canary and (canary.revision, canary.start_time, canary.phase),
        in_place and (in_place.revision, in_place.start_time, in_place.phase),
        last_rollout and (last_rollout.revision, last_rollout.completion_time, last_rollout.result),
        has_failed and status.observed_generation,
        regression and regression.last_transition_time,
    )
