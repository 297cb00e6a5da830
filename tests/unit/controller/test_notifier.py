"""Notifications over HTTP: to endpoints that accept them, that are temporarily unavailable, and that reject them."""

from __future__ import annotations

import asyncio
import functools
import operator
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from aerie.api import SpeculativeDeployment
from aerie.controller import notifier as notify
from aerie.controller.notifier import Notifier, Webhook, WebhookError
from aerie.controller.work_queue import NamespacedName
from tests.unit.rollout.world import World, world_in_phase

CHAT = NamespacedName("default", "chat")


class Endpoint:
    """Stores the notifications it receives; responds with the given statuses first, and then with 204."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.received: list[Any] = []
        self.headers: list[dict[str, str]] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        status = self.statuses.pop(0) if self.statuses else 204
        if status < 300:
            self.received.append(await request.json())
        return web.Response(status=status)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/hook", self.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        try:
            yield f"http://{host}:{port}/hook"
        finally:
            await runner.cleanup()


@asynccontextmanager
async def run_notifier(webhook: Webhook) -> AsyncIterator[tuple[Notifier, Counter[str]]]:
    counts: Counter[str] = Counter()
    notifier = Notifier(webhook, lambda outcome: counts.update([outcome]))
    running = asyncio.create_task(notifier.run())
    try:
        yield notifier, counts
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def enqueue(notifier: Notifier, world: World, after: timedelta = timedelta(0)) -> None:
    resource = SpeculativeDeployment.from_dict(world.document)
    assert resource.status is not None
    notifier.enqueue_new(CHAT, resource, resource.status, world.now + after)


async def wait_until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def short_retry_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry delays that are short enough for a test."""
    monkeypatch.setattr(notify, "INITIAL_DELIVERY_RETRY_SECONDS", 0.01)


def test_new_states_are_sent_once_and_in_order(tmp_path: Path) -> None:
    async def run() -> None:
        endpoint = Endpoint()
        headers = tmp_path / "headers"
        headers.write_text("Authorization: Bearer secret\n\nX-Team: serving\n")
        async with endpoint.open() as url, run_notifier(Webhook(url, headers, "prod")) as (notifier, counts):
            world, _ = world_in_phase("Starting")
            enqueue(notifier, world)
            enqueue(notifier, world)
            world.annotate(rollback=world.desired_revision)
            world.settle()
            enqueue(notifier, world)
            await wait_until(lambda: counts["sent"] == 3)
            assert [notification["type"].rpartition(".")[2] for notification in endpoint.received] == [
                "promoted",
                "started",
                "rolled-back",
            ]
            assert len({notification["id"] for notification in endpoint.received}) == 3
            assert {notification["source"] for notification in endpoint.received} == {"prod"}
            (sent, *_) = endpoint.headers
            assert sent["Content-Type"] == "application/cloudevents+json"
            assert (sent["Authorization"], sent["X-Team"]) == ("Bearer secret", "serving")

    asyncio.run(run())


def test_unavailable_endpoint_is_retried_in_order() -> None:
    async def run() -> None:
        endpoint = Endpoint(503, 429, 500)
        async with endpoint.open() as url, run_notifier(Webhook(url)) as (notifier, counts):
            world, _ = world_in_phase("Starting")
            enqueue(notifier, world)
            await wait_until(lambda: counts["sent"] == 2)
            assert [notification["data"]["phase"] for notification in endpoint.received] == ["promoted", "started"]
            assert len(endpoint.headers) == 5

    asyncio.run(run())


def test_rejected_notification_is_dropped_and_the_next_is_sent() -> None:
    async def run() -> None:
        endpoint = Endpoint(400)
        async with endpoint.open() as url, run_notifier(Webhook(url)) as (notifier, counts):
            world, _ = world_in_phase("Starting")
            enqueue(notifier, world)
            await wait_until(lambda: counts.total() == 2)
            assert counts == {"rejected": 1, "sent": 1}

    asyncio.run(run())


def test_undeliverable_notification_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "DELIVERY_TIMEOUT_SECONDS", 0.05)

    async def run() -> None:
        async with Endpoint().open() as url:
            pass  # the port is free again
        async with run_notifier(Webhook(url)) as (notifier, counts):
            world, _ = world_in_phase("Starting")
            enqueue(notifier, world)
            await wait_until(lambda: counts["expired"] == 2)

    asyncio.run(run())


def test_full_queue_drops_notifications(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "MAX_PENDING_NOTIFICATIONS", 1)

    async def run() -> None:
        counts: Counter[str] = Counter()
        notifier = Notifier(Webhook("http://nobody.example"), lambda outcome: counts.update([outcome]))  # and nobody sends
        world, _ = world_in_phase("Starting")
        enqueue(notifier, world)
        assert counts == {"queue_full": 1}

    asyncio.run(run())


def test_next_leader_resends_recent_notifications_with_the_same_ids() -> None:
    async def run() -> None:
        endpoint = Endpoint()
        async with endpoint.open() as url:
            world, _ = world_in_phase("Starting")
            for minutes, sent_count in ((0, 2), (10, 2), (20, 0)):
                async with run_notifier(Webhook(url)) as (notifier, counts):
                    enqueue(notifier, world, timedelta(minutes=minutes))
                    assert len(notifier._pending) == sent_count
                    await wait_until(functools.partial(operator.eq, counts, {"sent": sent_count} if sent_count else {}))
            ids = [notification["id"] for notification in endpoint.received]
            assert (len(ids), len(set(ids))) == (4, 2)

    asyncio.run(run())


def test_notifier_without_a_webhook_stores_nothing() -> None:
    notifier = Notifier()
    world, _ = world_in_phase("Starting")
    enqueue(notifier, world)
    assert notifier._sent_states == {}


def test_invalid_webhook_is_rejected_without_its_secrets(tmp_path: Path) -> None:
    with pytest.raises(WebhookError, match="must begin with http:// or https://"):
        Webhook("chat.example.com/secret")
    with pytest.raises(WebhookError, match="cannot be read"):
        Webhook("http://chat.example.com", tmp_path / "nothing")
    (tmp_path / "headers").write_text("secret")
    with pytest.raises(WebhookError, match="a line that is not a header") as rejection:
        Webhook("http://chat.example.com", tmp_path / "headers")
    assert "secret" not in str(rejection.value)
