"""The token of a resource's pods: from which Secret, how often, and what else a Secret may contain."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from aerie.controller.drafters.tokens import MIN_TOKEN_TTL_SECONDS, SECRETS, TOKEN_TTL_SECONDS, DrafterTokens
from aerie.controller.kubernetes.client import ApiError, Cluster, ObjectDict, ResourceKind
from aerie.controller.work_queue import NamespacedName
from aerie.engine.drafter_endpoint.response import EndpointProblem
from tests.golden import Messages
from tests.unit.controller.conftest import Run

TOKEN, OTHER_TOKEN = "0123456789abcdef" * 4, "f" * 64
CHAT = NamespacedName("default", "chat")


class Secrets(Cluster):
    """An API server with Secrets by name."""

    def __init__(self, secret: ObjectDict | None = None) -> None:
        self.secret = secret
        self.error: ApiError | None = None
        self.reads = 0

    async def get(self, kind: ResourceKind, namespace: str, name: str) -> ObjectDict | None:
        assert (kind, namespace) == (SECRETS, "default")
        assert name.startswith("chat-")
        self.reads += 1
        await asyncio.sleep(0.1)
        if self.error is not None:
            raise self.error
        return self.secret


def secret(token: str | bytes | None = TOKEN, uid: str = "uid-chat", *, controller: bool = True) -> ObjectDict:
    """Return the Secret of a resource."""
    encoded = None if token is None else base64.b64encode(token.encode() if isinstance(token, str) else token).decode()
    owners = [{"controller": controller, "uid": uid, "kind": "SpeculativeDeployment"}]
    return {"metadata": {"name": "chat", "ownerReferences": owners}, "data": {} if encoded is None else {"token": encoded}}


def test_token_is_read_once_for_all_pods(run: Run) -> None:
    async def work() -> None:
        cluster = Secrets(secret())
        tokens = DrafterTokens(cluster)
        assert await asyncio.gather(*(tokens.read(CHAT, "uid-chat") for _ in range(100))) == [TOKEN] * 100
        assert cluster.reads == 1
        await asyncio.sleep(TOKEN_TTL_SECONDS)
        assert await tokens.read(CHAT, "uid-chat") == TOKEN
        assert cluster.reads == 2

    run(work())


def test_rejected_token_is_read_again_once_in_a_while(run: Run) -> None:
    async def work() -> None:
        cluster = Secrets(secret())
        tokens = DrafterTokens(cluster)
        await tokens.read(CHAT, "uid-chat")
        cluster.secret = secret(OTHER_TOKEN)
        for _ in range(100):
            tokens.expire(CHAT)
            await tokens.read(CHAT, "uid-chat")
        assert cluster.reads == 1
        await asyncio.sleep(MIN_TOKEN_TTL_SECONDS)
        assert await tokens.read(CHAT, "uid-chat") == OTHER_TOKEN

    run(work())


def test_recreated_resource_has_another_token(run: Run) -> None:
    async def work() -> None:
        cluster = Secrets(secret())
        tokens = DrafterTokens(cluster)
        await tokens.read(CHAT, "uid-chat")
        cluster.secret = secret(OTHER_TOKEN, "uid-2")
        assert await tokens.read(CHAT, "uid-2") == OTHER_TOKEN
        tokens.forget(CHAT)
        assert isinstance(await tokens.read(CHAT, "uid-chat"), EndpointProblem)

    run(work())


def data(value: Any) -> ObjectDict:
    return {**secret(), "data": value}


@pytest.mark.parametrize(
    ("name", "item"),
    [
        ("missing", None),
        ("another owner", secret(uid="uid-other")),
        ("another owner", secret(controller=False)),
        ("another owner", {**secret(), "metadata": {"name": "chat"}}),
        ("no token", secret(None)),
        ("no token", secret("short")),
        ("no token", secret(TOKEN + "\n")),
        ("no token", secret(TOKEN.upper())),
        ("no token", secret("é" * 64)),
        ("no token", secret(b"\xff" * 64)),
        ("no token", secret("x\r\nHost: evil".ljust(64))),
        ("no token", data(None)),
        ("no token", data({"token": 7})),
        ("no token", data({"token": "***"})),
    ],
)
def test_other_secrets_are_not_sent(run: Run, name: str, item: ObjectDict | None, messages: Messages) -> None:
    async def work() -> None:
        cluster = Secrets(item)
        tokens = DrafterTokens(cluster)
        problem = await tokens.read(CHAT, "uid-chat")
        assert await tokens.read(CHAT, "uid-chat") == problem
        assert isinstance(problem, EndpointProblem)
        assert (problem.reason, problem.status, cluster.reads) == ("NoToken", None, 1)
        messages.check(name, problem.message)

    run(work())


def test_api_error_is_a_problem_that_passes(run: Run, messages: Messages) -> None:
    async def work() -> None:
        cluster = Secrets(secret())
        tokens, cluster.error = DrafterTokens(cluster), ApiError(403, "Forbidden", 'secrets "chat" is forbidden')
        problem = await tokens.read(CHAT, "uid-chat")
        assert isinstance(problem, EndpointProblem)
        messages.check("forbidden", problem.message)
        cluster.error = None
        await asyncio.sleep(MIN_TOKEN_TTL_SECONDS)
        assert await tokens.read(CHAT, "uid-chat") == TOKEN

    run(work())
