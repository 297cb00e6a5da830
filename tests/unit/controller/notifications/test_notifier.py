"""Queues of notifications: receivers that accept, that are temporarily unavailable, that reject, hang or lie."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from aerie.api import SpeculativeDeployment
from aerie.controller.metrics import OperatorMetrics
from aerie.controller.notifications import notifier as notifier_module
from aerie.controller.notifications.config import NotificationsConfig, read_notifications_config, with_url_receiver
from aerie.controller.notifications.notifier import MAX_REMEMBERED_IDS, Notifier
from aerie.controller.notifications.receiver import Endpoint
from aerie.controller.work_queue import NamespacedName
from tests.unit.controller.conftest import Run
from tests.unit.rollout.world import World, world_in_phase

CHAT = NamespacedName("default", "chat")
HOOK = "http://hook.example/secret"
URL_CONFIG = with_url_receiver(NotificationsConfig(), Endpoint(HOOK), "prod")
Answer = Callable[[httpx.Request], Awaitable[httpx.Response]]


@dataclass
class Receivers:
    """Stores the requests by host; responds with the given responses first, and then with 204."""

    responses: dict[str, list[httpx.Response | Exception]] = field(default_factory=dict)
    hanging: set[str] = field(default_factory=set)
    requests: dict[str, list[httpx.Request]] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)

    async def answer(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        self.requests.setdefault(host, []).append(request)
        self.times.setdefault(host, []).append(asyncio.get_running_loop().time())
        if host in self.hanging:
            await asyncio.Event().wait()
        response = self.responses[host].pop(0) if self.responses.get(host) else httpx.Response(204)
        if isinstance(response, Exception):
            raise response
        return response

    def bodies(self, host: str = "hook.example") -> list[Any]:
        return [json.loads(request.content) for request in self.requests.get(host, [])]


@asynccontextmanager
async def run_notifier(config: NotificationsConfig, receivers: Receivers) -> AsyncIterator[tuple[Notifier, Counter[str]]]:
    counts: Counter[str] = Counter()
    notifier = Notifier(
        config, lambda receiver, outcome: counts.update([f"{receiver} {outcome}"]), httpx.MockTransport(receivers.answer)
    )
    running = asyncio.create_task(notifier.run())
    try:
        yield notifier, counts
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def write_config(folder: Path, text: str) -> NotificationsConfig:
    (folder / "config.yaml").write_text(text)
    return read_notifications_config(folder / "config.yaml", "prod")


def enqueue(notifier: Notifier, world: World, after: timedelta = timedelta(0), **annotations: str) -> None:
    resource = SpeculativeDeployment.from_dict(world.document)
    metadata = resource.metadata.model_copy(update={"annotations": subscribe(annotations)})
    assert resource.status is not None
    notifier.enqueue_new(CHAT, resource.model_copy(update={"metadata": metadata}), resource.status, world.now + after)


def subscribe(annotations: dict[str, str]) -> dict[str, str]:
    """Return annotations of the form `event__receiver`, with _ for -."""
    prefix = "notifications.aerie.dev/subscribe."
    return {prefix + name.replace("__", ".").replace("_", "-"): value for name, value in annotations.items()}


def test_new_states_are_sent_once_and_in_order(run: Run, tmp_path: Path) -> None:
    async def work() -> None:
        headers = tmp_path / "headers"
        headers.write_text("Authorization: Bearer secret\n\nX-Team: serving\n")
        config = with_url_receiver(NotificationsConfig(), Endpoint(HOOK, headers_file=headers), "prod")
        receivers = Receivers()
        async with run_notifier(config, receivers) as (notifier, counts):
            world, _ = world_in_phase("Starting")
            enqueue(notifier, world)
            enqueue(notifier, world)
            world.annotate(rollback=world.desired_revision)
            world.settle()
            enqueue(notifier, world)
            await asyncio.sleep(60)
            assert counts == {"notify-url sent": 3}
        events = receivers.bodies()
        assert [event["type"].rpartition(".")[2] for event in events] == ["promoted", "started", "rolled-back"]
        assert len({event["id"] for event in events}) == 3
        assert {event["source"] for event in events} == {"prod"}
        (sent, *_) = receivers.requests["hook.example"]
        assert str(sent.url) == HOOK
        assert sent.headers["Content-Type"] == "application/cloudevents+json"
        assert (sent.headers["Authorization"], sent.headers["X-Team"]) == ("Bearer secret", "serving")

    run(work())


def test_unavailable_receiver_is_retried_in_order_with_growing_delays(run: Run) -> None:
    async def work() -> None:
        responses: list[httpx.Response | Exception] = [httpx.Response(503), httpx.ConnectError("refused"), httpx.Response(500)]
        receivers = Receivers({"hook.example": responses})
        async with run_notifier(URL_CONFIG, receivers) as (notifier, counts):
            world, _ = world_in_phase("Starting")
            enqueue(notifier, world)
            await asyncio.sleep(60)
            assert counts == {"notify-url sent": 2}
        assert [event["data"]["phase"] for event in receivers.bodies()] == ["promoted"] * 4 + ["started"]
        assert receivers.times["hook.example"] == [0, 1, 3, 7, 7]

    run(work())


@pytest.mark.parametrize(("retry_after", "delay"), [("30", 30), ("86400", 60), ("soon", 1), ("-5", 1), ("0", 1)])
def test_requested_delay_is_respected_within_its_limit(run: Run, retry_after: str, delay: float) -> None:
    async def work() -> None:
        receivers = Receivers({"hook.example": [httpx.Response(429, headers={"Retry-After": retry_after})]})
        async with run_notifier(URL_CONFIG, receivers) as (notifier, _):
            world, _ = world_in_phase("Starting")
            enqueue(notifier, world)
            await asyncio.sleep(100)
        assert receivers.times["hook.example"] == [0, delay, delay]

    run(work())


@pytest.mark.parametrize("status", [400, 301, 307])
def test_rejected_notification_is_dropped_and_the_next_is_sent(run: Run, status: int) -> None:
    async def work() -> None:
        receivers = Receivers({"hook.example": [httpx.Response(status, headers={"Location": "http://internal.example/"})]})
        async with run_notifier(URL_CONFIG, receivers) as (notifier, counts):
            world, _ = world_in_phase("Starting")
            enqueue(notifier, world)
            await asyncio.sleep(60)
            assert counts == {"notify-url rejected": 1, "notify-url sent": 1}
        assert receivers.requests.keys() == {"hook.example"}, "no redirect is followed"

    run(work())


def test_undeliverable_notification_expires(run: Run) -> None:
    async def work() -> None:
        receivers = Receivers(hanging={"hook.example"})
        async with run_notifier(URL_CONFIG, receivers) as (notifier, counts):
            world, _ = world_in_phase("Starting")
            enqueue(notifier, world)
            await asyncio.sleep(890)
            assert not counts
            await asyncio.sleep(40)
            assert counts == {"notify-url expired": 2}

    run(work())


def test_hanging_receiver_delays_no_other(run: Run, tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        "receivers:\n"
        "  slow: {type: slack, url: http://slow.example/hook}\n"
        "  fast: {type: slack, url: http://fast.example/hook}\n"
        "subscriptions: [{receiver: slow}, {receiver: fast}]\n",
    )

    async def work() -> None:
        receivers = Receivers(hanging={"slow.example"})
        async with run_notifier(config, receivers) as (notifier, counts):
            world, _ = world_in_phase("Starting")
            enqueue(notifier, world)
            await asyncio.sleep(1)
            assert counts == {"fast sent": 2}
            assert notifier.count_pending() == 2

    run(work())


def test_full_queue_drops_notifications_of_that_receiver_only(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notifier_module, "MAX_PENDING_NOTIFICATIONS", 1)
    config = write_config(
        tmp_path,
        "receivers:\n"
        "  a: {type: slack, url: http://a.example/secret}\n"
        "  b: {type: slack, url: http://b.example/secret}\n"
        "subscriptions: [{receiver: a}, {receiver: b, events: [started]}]\n",
    )

    async def work() -> None:
        counts: Counter[tuple[str, str]] = Counter()
        notifier = Notifier(config, lambda *labels: counts.update([labels]))  # and nobody sends
        world, _ = world_in_phase("Starting")
        enqueue(notifier, world)
        assert counts == {("a", "queue_full"): 1}
        assert notifier.count_pending() == 2

    run(work())
    assert "to receiver a is lost: 1 notifications are pending" in caplog.text
    assert "secret" not in caplog.text


def test_next_leader_resends_recent_notifications_with_the_same_ids(run: Run) -> None:
    async def work() -> None:
        receivers = Receivers()
        world, _ = world_in_phase("Starting")
        for minutes, sent_count in ((0, 2), (10, 2), (20, 0)):
            async with run_notifier(URL_CONFIG, receivers) as (notifier, counts):
                enqueue(notifier, world, timedelta(minutes=minutes))
                assert notifier.count_pending() == sent_count
                await asyncio.sleep(1)
                assert counts == ({"notify-url sent": sent_count} if sent_count else {})
        ids = [event["id"] for event in receivers.bodies()]
        assert (len(ids), len(set(ids))) == (4, 2)

    run(work())


def test_notifier_without_receivers_stores_nothing() -> None:
    notifier = Notifier()
    world, _ = world_in_phase("Starting")
    enqueue(notifier, world)
    assert notifier._sent_states == {}


CHANNELS = """
receivers:
  serving: {type: slack, url: http://serving.example/hook}
  platform: {type: slack, url: http://platform.example/hook}
  other-team: {type: slack, url: http://other.example/hook, namespaces: [other]}
subscriptions:
  - {receiver: platform, events: [promoted, failed]}
  - {receiver: other-team}
"""


def test_subscriptions_of_operator_and_resource_are_united(run: Run, tmp_path: Path) -> None:
    config = write_config(tmp_path, CHANNELS)

    async def work() -> None:
        receivers = Receivers()
        async with run_notifier(config, receivers) as (notifier, counts):
            world, _ = world_in_phase("Starting")
            enqueue(
                notifier,
                world,
                started__serving="#chat; #oncall;#chat",
                promoted__platform="",
                promoted__other_team="",
                nonsense__serving="",
            )
            await asyncio.sleep(1)
            assert counts == {"serving sent": 2, "platform sent": 1}, "nothing for another namespace, and nothing twice"
        assert [body["channel"] for body in receivers.bodies("serving.example")] == ["#chat", "#oncall"]
        assert "channel" not in receivers.bodies("platform.example")[0]

    run(work())


def test_later_subscription_gets_no_earlier_notification(run: Run, tmp_path: Path) -> None:
    config = write_config(tmp_path, CHANNELS)

    async def work() -> None:
        receivers = Receivers()
        async with run_notifier(config, receivers) as (notifier, counts):
            world, _ = world_in_phase("Starting")
            enqueue(notifier, world)
            enqueue(notifier, world, started__serving="")
            world.annotate(rollback=world.desired_revision)
            world.settle()
            enqueue(notifier, world, rolled_back__serving="")
            await asyncio.sleep(1)
            assert counts == {"platform sent": 1, "serving sent": 1}

    run(work())


def test_condition_that_comes_and_goes_is_reported_once(run: Run) -> None:
    async def work() -> None:
        receivers = Receivers()
        async with run_notifier(URL_CONFIG, receivers) as (notifier, _):
            world, _ = world_in_phase("Starting")
            degraded = next(item for item in world.document["status"]["conditions"] if item["type"] == "Degraded")
            for reason in ("AcceptanceRegression", "PodFailed", "AcceptanceRegression"):
                degraded |= {"status": "True", "reason": reason, "message": f"{reason} is the cause."}
                enqueue(notifier, world)
            degraded["lastTransitionTime"] = "2026-01-02T00:00:00Z"
            enqueue(notifier, world)
            await asyncio.sleep(1)
        types = [event["type"].rpartition(".")[2] for event in receivers.bodies()]
        assert types == ["promoted", "started", "acceptance-regression", "acceptance-regression"]

    run(work())


def test_outcomes_in_the_history_are_not_sent_again(run: Run) -> None:
    async def work() -> None:
        receivers = Receivers()
        async with run_notifier(URL_CONFIG, receivers) as (notifier, _):
            world, _ = world_in_phase("Starting")
            degraded = next(item for item in world.document["status"]["conditions"] if item["type"] == "Degraded")
            for day in range(3 * MAX_REMEMBERED_IDS):
                degraded |= {"status": "True", "reason": "AcceptanceRegression", "message": "It fell."}
                degraded["lastTransitionTime"] = f"2026-01-{day % 28 + 1:02}T00:{day // 28:02}:00Z"
                enqueue(notifier, world)
            await asyncio.sleep(600)
        types = Counter(event["type"].rpartition(".")[2] for event in receivers.bodies())
        assert types == {"promoted": 1, "started": 1, "acceptance-regression": 3 * MAX_REMEMBERED_IDS}

    run(work())


def test_changed_secret_is_read_without_a_restart(run: Run, tmp_path: Path) -> None:
    config = write_config(
        tmp_path, "receivers: {team: {type: slack, urlFile: url, headersFile: headers}}\nsubscriptions: [{receiver: team}]\n"
    )

    async def work() -> None:
        receivers = Receivers()
        async with run_notifier(config, receivers) as (notifier, counts):
            world, _ = world_in_phase("Starting")
            enqueue(notifier, world)
            await asyncio.sleep(5)
            assert receivers.requests == {}, "the files do not exist yet"
            (tmp_path / "url").write_text("https://new.example/hook\n")
            (tmp_path / "headers").write_text("content-type: text/plain\nX-Key: 1\n")
            await asyncio.sleep(10)
            assert counts == {"team sent": 2}
        assert receivers.requests["new.example"][0].headers["X-Key"] == "1"
        assert receivers.requests["new.example"][0].headers.get_list("Content-Type") == ["application/json"]

    run(work())


def test_failing_template_loses_only_its_notification(run: Run, tmp_path: Path) -> None:
    body = '{% if "eagle31" in data.get("drafter", "") %}{{ data.absent }}{% endif %}"{{ event }}"'
    pager = f"{{type: webhook, url: 'http://pager.example/', body: '{body}'}}"
    config = write_config(tmp_path, f"receivers: {{pager: {pager}}}\nsubscriptions: [{{receiver: pager}}]\n")

    async def work() -> None:
        receivers = Receivers()
        async with run_notifier(config, receivers) as (notifier, counts):
            world, _ = world_in_phase("Starting")
            enqueue(notifier, world)
            await asyncio.sleep(1)
            assert counts == {"pager sent": 1, "pager error": 1}
        assert receivers.bodies("pager.example") == ["promoted"]

    run(work())


def test_metric_counts_by_receiver_and_outcome() -> None:
    metrics = OperatorMetrics()
    metrics.record_notification("serving", "sent")
    labels = {"receiver": "serving", "outcome": "sent"}
    assert metrics.registry.get_sample_value("aerie_notifications_total", labels) == 1


def test_notification_over_a_real_connection(tmp_path: Path) -> None:
    """The response's body never ends, and its status counts all the same."""
    received: list[Any] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        received.append(await request.json())
        response = web.StreamResponse(status=200)
        await response.prepare(request)
        await response.write(b"ok")
        await asyncio.Event().wait()
        return response

    async def work() -> None:
        app = web.Application()
        app.router.add_post("/services/secret", answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        (tmp_path / "url").write_text(f"http://{host}:{port}/services/secret")
        subscription = "{receiver: team, events: [promoted], recipient: '#x'}"
        config = write_config(tmp_path, f"receivers: {{team: {{type: slack, urlFile: url}}}}\nsubscriptions: [{subscription}]\n")
        outcomes: list[tuple[str, str]] = []
        notifier = Notifier(config, lambda *labels: outcomes.append(labels))
        running = asyncio.create_task(notifier.run())
        try:
            world, _ = world_in_phase("Starting")
            enqueue(notifier, world)
            async with asyncio.timeout(60):
                while not outcomes:
                    await asyncio.sleep(0.01)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await runner.cleanup()
        assert outcomes == [("team", "sent")]
        assert received[0]["channel"] == "#x"
        assert received[0]["text"].startswith("*[prod] default/chat: promoted*\nClients are served by the new revision.\n")

    asyncio.run(work())
