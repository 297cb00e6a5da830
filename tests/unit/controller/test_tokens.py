"""The tokens of pods: where the key is, which Secrets are created when, and what is read."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aerie.controller.kubernetes.client import SECRETS, ApiError, Cluster, ObjectDict, ResourceKind
from aerie.controller.tokens import EVALUATOR_TOKEN, RETRY_SECONDS, ResourceTokens, derive_token, needs_token
from aerie.controller.work_queue import NamespacedName
from aerie.engine.drafter_endpoint.response import EndpointProblem
from aerie.manifests import naming
from aerie.manifests.plugin_config_map import build_plugin_volume
from tests.golden import Messages
from tests.unit.controller.conftest import Run
from tests.unit.controller.drafters.served_plugin import KEY, TOKEN

CHAT = NamespacedName("default", "chat")
UID = "uid-chat"
KEY_SECRET = NamespacedName("aerie-system", "aerie-drafter-key")
CHAT_SECRET = NamespacedName("default", "chat-aerie-drafter-token")


class SecretServer(Cluster):
    """An API server with Secrets, which answers after a while. `errors` are its answers, by verb and Secret."""

    def __init__(self, key: bytes | None = None) -> None:
        self.secrets: dict[NamespacedName, ObjectDict] = {}
        self.calls: list[tuple[str, NamespacedName]] = []
        self.errors: dict[tuple[str, NamespacedName], ApiError] = {}
        if key is not None:
            self.secrets[KEY_SECRET] = {"data": {"key": base64.b64encode(key).decode()}}

    async def get(self, kind: ResourceKind, namespace: str, name: str) -> ObjectDict | None:
        assert kind == SECRETS
        await self._call("GET", NamespacedName(namespace, name))
        return self.secrets.get(NamespacedName(namespace, name))

    async def create(self, desired: ObjectDict) -> ObjectDict:
        assert desired["kind"] == "Secret"
        name = NamespacedName(desired["metadata"]["namespace"], desired["metadata"]["name"])
        await self._call("POST", name)
        if name in self.secrets:
            raise ApiError(409, "AlreadyExists", f'secrets "{name.name}" already exists')
        self.secrets[name] = desired
        return desired

    async def _call(self, verb: str, name: NamespacedName) -> None:
        self.calls.append((verb, name))
        await asyncio.sleep(0.1)
        if (error := self.errors.get((verb, name))) is not None:
            raise error


def with_tokens(
    run: Run, test: Callable[[SecretServer, ResourceTokens], Awaitable[None]], key: bytes | None = KEY
) -> SecretServer:
    """Run a test with a server that has the operator's key, or no key; return the server."""
    server = SecretServer(key)

    async def work() -> None:
        await test(server, ResourceTokens(server, KEY_SECRET))

    run(work())
    return server


def forbidden(name: str) -> ApiError:
    return ApiError(403, "Forbidden", f'secrets "{name}" is forbidden: User "aerie" cannot do that')


async def fail(tokens: ResourceTokens) -> EndpointProblem:
    """Return the problem, without a token."""
    problem = await tokens.ensure(CHAT, UID)
    assert isinstance(problem, EndpointProblem)
    assert (problem.reason, problem.status) == ("NoToken", None)
    return problem


def test_tokens_differ_by_key_and_resource() -> None:
    tokens = [derive_token(key, uid) for key in (KEY, bytes(32)) for uid in ("uid-chat", "uid-chat2", "")]
    assert len(set(tokens)) == 6
    assert all(len(token) == 64 and set(token) <= set("0123456789abcdef") for token in tokens)
    # A release with another derivation rejects the pods of this one.
    assert derive_token(bytes(range(32)), "uid-chat") == "da4e0aacc385da4c093c18edad1549f0635d9898b61ff2bb20330752fe3e2a41"


def test_evaluator_has_a_token_and_a_secret_of_its_own(run: Run) -> None:
    async def test(server: SecretServer, tokens: ResourceTokens) -> None:
        evaluator_tokens = ResourceTokens(server, KEY_SECRET, EVALUATOR_TOKEN)
        token = await evaluator_tokens.ensure(CHAT, UID)
        assert token == derive_token(KEY, UID, EVALUATOR_TOKEN) != await tokens.ensure(CHAT, UID)
        secret = server.secrets[NamespacedName("default", "chat-aerie-evaluator-token")]
        assert secret["stringData"] == {"token": token}
        assert "chat-aerie-evaluator-token" in evaluator_tokens.explain_rejection(CHAT, EndpointProblem("", "", 401)).message

    with_tokens(run, test)


def test_secret_is_created_once_for_all_pods(run: Run) -> None:
    async def test(server: SecretServer, tokens: ResourceTokens) -> None:
        assert await asyncio.gather(*(tokens.ensure(CHAT, UID) for _ in range(100))) == [TOKEN] * 100
        await asyncio.sleep(1e6)
        assert await tokens.ensure(CHAT, UID) == TOKEN
        assert server.calls == [("GET", KEY_SECRET), ("POST", CHAT_SECRET)]

    secret = with_tokens(run, test).secrets[CHAT_SECRET]
    assert secret["stringData"] == {"token": TOKEN}
    assert secret["metadata"]["labels"] == {"aerie.dev/name": "chat", "app.kubernetes.io/managed-by": "aerie"}
    (owner,) = secret["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == ("SpeculativeDeployment", "chat", UID, True)
    assert "immutable" not in secret


def test_existing_secret_is_left_alone_and_never_read(run: Run) -> None:
    async def test(server: SecretServer, tokens: ResourceTokens) -> None:
        server.secrets[CHAT_SECRET] = {"data": {"token": "b3RoZXI="}}
        assert await tokens.ensure(CHAT, UID) == TOKEN
        assert server.secrets[CHAT_SECRET] == {"data": {"token": "b3RoZXI="}}
        assert ("GET", CHAT_SECRET) not in server.calls

    with_tokens(run, test)


def test_key_is_created_for_the_first_resource(run: Run) -> None:
    async def test(server: SecretServer, tokens: ResourceTokens) -> None:
        first, second = await asyncio.gather(
            tokens.ensure(CHAT, UID), tokens.ensure(NamespacedName("default", "code"), "uid-code")
        )
        assert first != second
        assert server.calls[:2] == [("GET", KEY_SECRET), ("POST", KEY_SECRET)]
        assert [call for call in server.calls if call[1] == KEY_SECRET] == server.calls[:2]
        restarted = ResourceTokens(server, KEY_SECRET)
        assert await restarted.ensure(CHAT, UID) == first

    secret = with_tokens(run, test, None).secrets[KEY_SECRET]
    assert len(base64.b64decode(secret["data"]["key"])) == 32
    assert (secret["immutable"], secret["metadata"].get("ownerReferences")) == (True, None)


def test_operators_that_start_at_once_have_the_same_key(run: Run) -> None:
    async def test(server: SecretServer, tokens: ResourceTokens) -> None:
        operators = [tokens, *(ResourceTokens(server, KEY_SECRET) for _ in range(4))]
        results = await asyncio.gather(*(operator.ensure(CHAT, UID) for operator in operators))
        assert len(set(results)) == 1
        assert server.calls.count(("POST", KEY_SECRET)) == 5
        assert derive_token(base64.b64decode(server.secrets[KEY_SECRET]["data"]["key"]), UID) == results[0]

    with_tokens(run, test, None)


@pytest.mark.parametrize(
    ("name", "verb", "secret", "key"),
    [
        ("token forbidden", "POST", CHAT_SECRET, KEY),
        ("key unreadable", "GET", KEY_SECRET, KEY),
        ("key cannot be created", "POST", KEY_SECRET, None),
    ],
)
def test_missing_permission_is_a_problem_that_passes(
    run: Run, messages: Messages, name: str, verb: str, secret: NamespacedName, key: bytes | None
) -> None:
    async def test(server: SecretServer, tokens: ResourceTokens) -> None:
        server.errors[verb, secret] = forbidden(secret.name)
        problem = await fail(tokens)
        messages.check(name, problem.message)
        calls = len(server.calls)
        for _ in range(100):
            assert await tokens.ensure(CHAT, UID) == problem
        assert len(server.calls) == calls
        server.errors.clear()
        await asyncio.sleep(RETRY_SECONDS)
        assert isinstance(await tokens.ensure(CHAT, UID), str)

    with_tokens(run, test, key)


def test_invalid_key_blocks_all_resources_with_one_read(run: Run) -> None:
    async def test(server: SecretServer, tokens: ResourceTokens) -> None:
        for number in range(100):
            assert isinstance(await tokens.ensure(NamespacedName("default", f"chat{number}"), UID), EndpointProblem)
        assert server.calls == [("GET", KEY_SECRET)]

    with_tokens(run, test, KEY[:31])


@pytest.mark.parametrize("data", [None, {}, {"other": "AAAA"}, {"key": ""}, {"key": base64.b64encode(KEY[:31]).decode()}])
def test_invalid_key_is_a_problem(run: Run, messages: Messages, data: Any) -> None:
    async def test(server: SecretServer, tokens: ResourceTokens) -> None:
        server.secrets[KEY_SECRET] = {"data": data}
        problem = await fail(tokens)
        messages.check("short key" if data and "key" in data and data["key"] else "no key", problem.message)
        server.secrets[KEY_SECRET] = {"data": {"key": base64.b64encode(KEY).decode()}}
        await asyncio.sleep(RETRY_SECONDS)
        assert await tokens.ensure(CHAT, UID) == TOKEN

    with_tokens(run, test)


def test_rejected_token_creates_a_deleted_secret_again(run: Run, messages: Messages) -> None:
    async def test(server: SecretServer, tokens: ResourceTokens) -> None:
        await tokens.ensure(CHAT, UID)
        del server.secrets[CHAT_SECRET]
        posts = server.calls.count(("POST", CHAT_SECRET))
        for problem in (EndpointProblem("Unauthorized", "no valid token", 401), EndpointProblem("NoToken", "no file", 503)):
            explained = tokens.explain_rejection(CHAT, problem)
            for _ in range(100):
                assert tokens.explain_rejection(CHAT, problem) == explained
                assert await tokens.ensure(CHAT, UID) == TOKEN
            assert (explained.reason, explained.status) == (problem.reason, problem.status)
            messages.check("rejected", explained.message)
            assert server.calls.count(("POST", CHAT_SECRET)) == posts
            await asyncio.sleep(RETRY_SECONDS)
            assert await tokens.ensure(CHAT, UID) == TOKEN
            posts += 1
            assert server.calls.count(("POST", CHAT_SECRET)) == posts
        assert CHAT_SECRET in server.secrets

    with_tokens(run, test)


@pytest.mark.parametrize(
    "problem",
    [
        EndpointProblem("Timeout", "no answer"),
        EndpointProblem("NoToken", "the operator's own problem"),
        EndpointProblem("FolderOutsideRoots", "outside", 403),
    ],
)
def test_other_problems_are_left_alone(run: Run, problem: EndpointProblem) -> None:
    async def test(server: SecretServer, tokens: ResourceTokens) -> None:
        await tokens.ensure(CHAT, UID)
        assert tokens.explain_rejection(CHAT, problem) is problem
        await asyncio.sleep(RETRY_SECONDS)
        await tokens.ensure(CHAT, UID)
        assert server.calls.count(("POST", CHAT_SECRET)) == 1

    with_tokens(run, test)


def test_recreated_resource_has_another_token_and_its_own_secret(run: Run) -> None:
    async def test(server: SecretServer, tokens: ResourceTokens) -> None:
        first = await tokens.ensure(CHAT, UID)
        del server.secrets[CHAT_SECRET]
        assert await tokens.ensure(CHAT, "uid-2") == server.secrets[CHAT_SECRET]["stringData"]["token"] != first
        tokens.forget(CHAT)
        await tokens.ensure(CHAT, "uid-2")
        assert server.calls.count(("POST", CHAT_SECRET)) == 3

    with_tokens(run, test)


def test_only_pods_with_the_plugin_need_a_token() -> None:
    def item(kind: str, *volumes: Any) -> ObjectDict:
        return {"kind": kind, "spec": {"template": {"spec": {"volumes": list(volumes)}}}}

    plugin = build_plugin_volume("chat")
    other = {"name": naming.PLUGIN_VOLUME + "s", "configMap": {"name": "x"}}
    assert needs_token([{"kind": "Service"}, item("Deployment", other), item("Deployment", other, plugin)])
    assert not needs_token([{"kind": "Service", "spec": {}}, item("Deployment", other), item("Deployment"), item("Job", plugin)])
    assert not needs_token([])
