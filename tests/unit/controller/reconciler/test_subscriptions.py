"""Subscriptions by annotations, from the operator's receivers to the status, the event and the message."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx

from aerie.controller.notifications.config import read_notifications_config
from aerie.controller.notifications.notifier import Notifier
from tests.unit.controller.conftest import Run
from tests.unit.controller.operator_harness import Operator, Server, get_condition

PREFIX = "notifications.aerie.dev/subscribe."


def annotate(server: Server, **annotations: str) -> None:
    item = server.objects["SpeculativeDeployment", "chat"]
    prefixed_annotations = {PREFIX + name.replace("__", "."): value for name, value in annotations.items()}
    server._store({**item, "metadata": {**item["metadata"], "annotations": prefixed_annotations}})


def test_annotation_subscribes_and_a_wrong_one_is_reported(run: Run, tmp_path: Path) -> None:
    received: list[dict[str, str]] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        received.append(json.loads(request.content))
        return httpx.Response(200)

    async def work() -> None:
        (tmp_path / "config.yaml").write_text("receivers: {serving: {type: slack, url: 'http://hook.example/x'}}")
        config = read_notifications_config(tmp_path / "config.yaml", "prod")
        server = Server()
        server.edit()
        operator = Operator(server)
        operator.reconciler.notifier = Notifier(config, transport=httpx.MockTransport(answer))
        sending = asyncio.create_task(operator.reconciler.notifier.run())
        annotate(server, promoted__serving="#chat", promotd__serving="")
        await operator.settle()
        await asyncio.sleep(1)
        assert server.objects["SpeculativeDeployment", "chat"]["status"]["phase"] == "Ready", "no rollout waits for it"
        assert [message["channel"] for message in received] == ["#chat"]
        status, reason, message = get_condition(server, "NotificationsSubscribed")
        assert (status, reason) == ("False", "InvalidSubscription")
        assert f"{PREFIX}promotd.serving" in message
        annotate(server, promoted__serving="#chat")
        await operator.settle()
        assert get_condition(server, "NotificationsSubscribed")[:2] == ("True", "Subscribed")
        annotate(server)
        await operator.settle()
        conditions = server.objects["SpeculativeDeployment", "chat"]["status"]["conditions"]
        assert "NotificationsSubscribed" not in [condition["type"] for condition in conditions]
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)

    run(work())
