"""Calls of one pod: what the plugin's own endpoint answers to them, and what comes of pods that answer anything else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from aerie.controller.drafters import client as client_module
from aerie.controller.drafters.client import DrafterClient
from aerie.controller.scraping.http_fetch import create_http_client
from aerie.engine.drafter_endpoint.calls import (
    DrafterCall,
    DrafterFiles,
    DrafterSource,
    LoadDrafter,
    PrepareDrafter,
    RenewLease,
    ReturnToOwn,
    compute_digest,
)
from aerie.engine.drafter_endpoint.response import ChangeDurations, EndpointProblem
from aerie.engine.drafter_endpoint.state import DrafterState, WindowCursor
from benchmarks._hostile_pods import HOSTILE_RESPONSES, serve
from tests.golden import Messages
from tests.unit.controller.drafters.served_plugin import TOKEN, Drafters, PluginPod
from tests.unit.controller.served import serve_http
from tests.unit.plugin.fake_engine import make_drafter, make_files

pytestmark = pytest.mark.usefixtures("long_timeouts")
OWN, BETTER = (make_drafter(name)["digest"] for name in ("own", "better"))


class PodClient:
    """A client of one pod."""

    def __init__(self, client: DrafterClient, pod: PluginPod) -> None:
        self.client, self.pod = client, pod

    async def state(self, cursor: WindowCursor | None = None) -> DrafterState:
        state = await self.client.read_state(self.pod.address, TOKEN, cursor)
        assert isinstance(state, DrafterState), state
        return state

    async def send(self, call: DrafterCall) -> ChangeDurations:
        durations = await self.client.send_call(self.pod.address, TOKEN, call)
        assert isinstance(durations, ChangeDurations), durations
        return durations

    async def fail(self, call: DrafterCall) -> EndpointProblem:
        problem = await self.client.send_call(self.pod.address, TOKEN, call)
        assert isinstance(problem, EndpointProblem), problem
        return problem


def with_pod(test: Callable[[PodClient], Awaitable[None]], **settings: bool) -> None:
    """Run a test with a pod."""

    async def run() -> None:
        async with PluginPod(**settings).served() as pod, create_http_client() as http_client:
            await test(PodClient(DrafterClient(http_client), pod))

    asyncio.run(run())


def test_digest_is_the_plugins() -> None:
    assert compute_digest(make_files("own")) == OWN


def test_trial_from_load_to_return(drafters: Drafters) -> None:
    async def test(pod: PodClient) -> None:
        state = await pod.state()
        assert state.own is not None
        assert (state.own, state.own.digest, state.lease, state.problem) == (state.loaded, OWN, None, None)
        assert state.own.files == make_files("own")
        assert (state.method, state.ranks, state.is_counting, state.swaps) == ("eagle3", 2, True, 0)
        durations = await pod.send(drafters.load("better", 60.0, expected_digest=OWN, turn="trial/1"))
        assert durations.staging > 0
        assert durations.pause > 0
        state = await pod.state()
        assert state.loaded is not None
        assert state.lease is not None
        assert (state.loaded.digest, state.lease.digest, state.swaps) == (BETTER, BETTER, 1)
        assert 50 < state.lease.remaining_seconds <= 60
        assert await pod.send(RenewLease(BETTER, 600.0)) == ChangeDurations(0.0, 0.0, 0.0)
        assert (await pod.state()).lease != state.lease
        await pod.send(ReturnToOwn())
        state = await pod.state()
        assert state.loaded == state.own
        assert [(window.digest, window.turn, window.ended is None) for window in state.windows] == [
            (OWN, None, False),
            (BETTER, "trial/1", False),
            (OWN, None, True),
        ]

    with_pod(test)


def test_drafter_in_memory_is_loaded_without_its_folder(drafters: Drafters) -> None:
    async def test(pod: PodClient) -> None:
        await pod.send(drafters.load("better"))
        await pod.send(LoadDrafter(DrafterFiles(make_files("own")), 60.0, turn="2"))
        assert pod.pod.engine.loaded_digests() == {OWN}

    with_pod(test)


@pytest.mark.parametrize("is_folder", [True, False])
def test_preparation_has_what_a_load_needs(drafters: Drafters, is_folder: bool) -> None:
    folder = drafters.load("better").drafter.folder
    source = DrafterSource(folder=folder) if is_folder else DrafterSource(repository="owner/better", revision="0123456789" * 4)

    async def test(pod: PodClient) -> None:
        assert await pod.send(PrepareDrafter(source)) == ChangeDurations(0.0, 0.0, 0.0)
        while (prepared := (await pod.state()).prepared) is None or prepared.phase == "Running":
            await asyncio.sleep(0.01)
        assert (prepared.source, prepared.phase, prepared.kind) == (source, "Ready", "eagle3")
        assert prepared.drafter is not None
        assert prepared.drafter == DrafterFiles(make_files("better"), folder)
        assert prepared.commit == source.revision
        assert await pod.send(PrepareDrafter(source)) == ChangeDurations(0.0, 0.0, 0.0)
        await pod.send(LoadDrafter(prepared.drafter, 60.0))
        assert pod.pod.engine.loaded_digests() == {BETTER}

    with_pod(test)


def test_promotion_makes_the_drafter_the_pods_own(drafters: Drafters) -> None:
    async def test(pod: PodClient) -> None:
        await pod.send(drafters.load("better", None))
        state = await pod.state()
        assert state.own is not None
        assert (state.own.digest, state.lease) == (BETTER, None)

    with_pod(test)


def test_windows_have_the_counters_of_vllm(drafters: Drafters) -> None:
    async def test(pod: PodClient) -> None:
        engine, counters = pod.pod.engine, pod.pod.counters
        await pod.send(drafters.load("better", turn="1"))
        engine.serve_steps(100)
        counters.factor = 3.0
        await pod.send(ReturnToOwn())
        first, window, current = (await pod.state()).windows
        assert first.counters is not None
        assert window.counters is not None
        assert current.counters is not None
        assert (first.counters.generation_tokens, current.counters.generation_tokens) == (0, 0)
        assert window.counters.generation_tokens == 300, "100 drafts of 2 accepted tokens and 1"
        assert window.counters.speculation is not None
        assert (window.counters.speculation.drafts, window.counters.speculation.accepted) == (100, 200)
        assert window.counters.first_tokens > 0
        assert window.counters.time_to_first_token.count == window.counters.first_tokens
        assert sum(window.counters.finished.values()) > 0
        assert window.counters.request_steps > 0

    with_pod(test)


@pytest.mark.usefixtures("drafters")
def test_windows_without_counters_have_the_reason(messages: Messages) -> None:
    async def test(pod: PodClient) -> None:
        (window,) = (await pod.state()).windows
        assert window.counters is None
        messages.check("counters are missing", window.counters_problem)

    with_pod(test, with_vllm_counters=False)


def test_only_windows_after_the_cursor_are_read(drafters: Drafters) -> None:
    async def test(pod: PodClient) -> None:
        for turn in range(4):
            await pod.send(drafters.load(("better", "own")[turn % 2], turn=str(turn)))
        process = (await pod.state()).process_id
        cursor = WindowCursor(process, 3)
        assert [window.number for window in (await pod.state(cursor)).windows] == [4, 5]
        restarted = WindowCursor("0" * 32, 3)
        assert [window.number for window in (await pod.state(restarted)).windows] == [1, 2, 3, 4, 5]

    with_pod(test)


def test_rejections_have_the_pods_reason(drafters: Drafters) -> None:
    async def test(pod: PodClient) -> None:
        cases: list[tuple[str, int, DrafterCall]] = [
            ("LoadedChanged", 409, drafters.load("better", expected_digest=BETTER)),
            ("FolderOutsideRoots", 403, LoadDrafter(DrafterFiles(make_files("better"), "/etc"), 60.0)),
            ("NoLease", 409, RenewLease(BETTER, 60.0)),
            ("InvalidBody", 400, drafters.load("better", float("inf"))),
            ("InvalidField", 400, drafters.load("better", turn="a b")),
        ]
        for reason, status, call in cases:
            problem = await pod.fail(call)
            assert (problem.reason, problem.status, problem.is_rejection) == (reason, status, True)
        pod.pod.engine.rejections[BETTER] = {"reason": "WrongShape", "message": "fc.weight has\n\x1b[2J 3 rows."}
        problem = await pod.fail(drafters.load("better"))
        assert (problem.reason, problem.message) == ("WrongShape", "fc.weight has ?[2J 3 rows.")
        assert pod.pod.engine.loaded_digests() == {OWN}

    with_pod(test)


def test_failed_swap_is_a_problem_and_no_rejection(drafters: Drafters) -> None:
    async def test(pod: PodClient) -> None:
        pod.pod.engine.failures["swap:1"] = 1
        problem = await pod.fail(drafters.load("better"))
        assert (problem.reason, problem.status, problem.is_rejection) == ("SwapFailed", 500, False)
        state = await pod.state()
        assert state.last_failure is not None
        assert (state.failures, state.last_failure.problem.reason) == (1, "SwapFailed")
        assert state.loaded == state.own

    with_pod(test)


def test_broken_pod_has_no_loaded_drafter(drafters: Drafters) -> None:
    async def test(pod: PodClient) -> None:
        pod.pod.engine.failures.update({"swap:1": 1, "back:0": 1})
        assert (await pod.fail(drafters.load("better"))).reason == "Broken"
        state = await pod.state()
        assert state.loaded is None
        assert state.problem is not None
        assert state.problem.reason == "Broken"

    with_pod(test)


def test_wrong_token(drafters: Drafters) -> None:
    async def test(pod: PodClient) -> None:
        drafters.write_token("f" * 64)
        state = await pod.client.read_state(pod.pod.address, TOKEN, None)
        assert isinstance(state, EndpointProblem)
        assert (state.reason, state.status) == ("Unauthorized", 401)
        assert TOKEN not in state.message

    with_pod(test)


# ----------------------------------------------------------------------------------------------------------- hostile pods
async def read_from(address: str) -> DrafterState | EndpointProblem:
    async with create_http_client() as http_client:
        return await DrafterClient(http_client).read_state(address, TOKEN, None)


def check_problem(messages: Messages, name: str, result: object, address: str) -> None:
    assert isinstance(result, EndpointProblem)
    assert TOKEN not in result.message
    messages.check(name, f"{result.status} {result.reason}: {result.message.replace(address, 'http://pod:8000')}")


@pytest.mark.parametrize("form", [form for form in HOSTILE_RESPONSES if form not in ("late", "silent", "drip")])
def test_hostile_server_is_a_problem(form: str) -> None:
    async def run() -> None:
        server = await serve("127.0.0.1", 0, form)
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            result = await read_from(address)
        assert isinstance(result, EndpointProblem)
        expected = "TooLarge" if form.startswith("endless") else "InvalidResponse"
        assert (result.reason, result.status) == (expected, None)
        assert len(result.message) < 200

    asyncio.run(run())


@pytest.mark.parametrize("form", ["silent", "drip"])
def test_slow_server_times_out(form: str, monkeypatch: pytest.MonkeyPatch, messages: Messages) -> None:
    monkeypatch.setattr(client_module, "READ_TIMEOUT_SECONDS", 0.3)

    async def run() -> None:
        server = await serve("127.0.0.1", 0, form)
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            check_problem(messages, "slow", await read_from(address), address)

    asyncio.run(run())


def test_unreachable_pod(messages: Messages) -> None:
    address = "http://127.0.0.1:1"
    check_problem(messages, "unreachable", asyncio.run(read_from(address)), address)


@pytest.mark.parametrize(
    ("name", "status", "body"),
    [
        ("engine without plugin", 404, b'{"detail":"Not Found"}'),
        ("error without reason", 503, b"busy"),
        ("redirect", 302, b""),
        ("reason with spaces", 409, b'{"reason": "Roll back", "message": "now"}'),
        ("reason in lower case", 409, b'{"reason": "rollback", "message": "now"}'),
        ("message is no text", 409, b'{"reason": "Rollback", "message": ["now"]}'),
        ("long message", 409, json.dumps({"reason": "LongText", "message": "word " * 10_000}).encode()),
        ("empty", 200, b""),
        ("list", 200, b"[]"),
        ("nested", 200, b"[" * 500_000),
        ("nested objects", 200, b'{"a":' * 300_000),
        ("many digits", 200, b'{"swaps": ' + b"9" * 1_000_000 + b"}"),
        ("not a number", 200, b'{"swaps": NaN}'),
        ("bytes", 200, b"\xff\xfe{}"),
        ("empty object", 200, b"{}"),
    ],
)
def test_other_answers_are_a_problem(name: str, status: int, body: bytes, messages: Messages) -> None:
    async def handle(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        return web.Response(status=status, body=body, headers={"Location": "http://127.0.0.1:1/"})

    async def run() -> None:
        async with serve_http("GET", "/aerie/drafter", handle) as address:
            check_problem(messages, name, await read_from(address), address)

    asyncio.run(run())


@pytest.mark.parametrize(
    "document", [{}, {"durations": 3}, {"durations": {"staging": -1, "pause": 0, "swap": 0}}, {"durations": {"pause": 0}}]
)
def test_change_that_answers_nonsense_is_a_problem(document: dict[str, Any]) -> None:
    async def handle(_: web.Request) -> web.Response:
        return web.json_response(document)

    async def send() -> Any:
        async with serve_http("DELETE", "/aerie/drafter", handle) as address, create_http_client() as http_client:
            return await DrafterClient(http_client).send_call(address, TOKEN, ReturnToOwn())

    result = asyncio.run(send())
    assert isinstance(result, EndpointProblem)
    assert (result.reason, result.is_rejection) == ("InvalidResponse", False)
