"""Preparations through the endpoint: their phases, what replaces them, and who goes first where a change needs the ranks too."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aerie_vllm.rejection import RejectionError
from aerie_vllm.worker_protocol import STAGE
from tests.unit.plugin.conftest import COMMIT, Client, Run, Server
from tests.unit.plugin.fake_engine import make_drafter, make_files

OWN, BETTER, WORSE = (make_drafter(name)["digest"] for name in ("own", "better", "worse"))


async def read_prepared(client: Client) -> dict[str, Any]:
    prepared = (await client.get()).body["prepared"]
    assert isinstance(prepared, dict)
    return prepared


@pytest.mark.parametrize("fields", [{}, {"revision": COMMIT}])
def test_a_preparation_ends_with_the_files(run: Run, server: Server, fields: dict[str, object]) -> None:
    source = {"repository": "owner/better", **fields} if fields else {"folder": str(server.root / "better")}

    async def work() -> None:
        async with server.started() as client:
            assert (await client.get()).body["prepared"] is None
            assert (await client.prepare("better", **fields)).status == 202
            await asyncio.sleep(1)
            prepared = await read_prepared(client)
            assert (prepared["source"], prepared["phase"], prepared["seconds"]) == (source, "Running", 1.0)
            assert [prepared[name] for name in ("folder", "files", "digest", "kind", "commit", "problem")] == [None] * 6
            assert (await client.prepare("better", **fields)).status == 202, "it continues"
            await asyncio.sleep(5)
            prepared = await read_prepared(client)
            assert prepared.pop("seconds") == pytest.approx(3.0, abs=0.1)
            assert prepared == {
                "source": source,
                "phase": "Ready",
                "folder": str(server.root / "better"),
                "files": make_files("better"),
                "digest": BETTER,
                "kind": "eagle3",
                "commit": COMMIT if fields else None,
                "problem": None,
            }
            assert (await client.prepare("better", **fields)).status == 200
            assert server.sources.reads == ["better"]
            assert server.sources.needed == [[make_drafter("own")["digest"]] * 2]
            assert server.engine.loaded_digests() == {OWN}

    run(work())


def test_a_prepared_drafter_is_loaded_without_a_disk(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            await client.prepare("better")
            await asyncio.sleep(5)
            server.engine.hanging_disk = True
            answer = await client.put("better", folder=None)
            assert (answer.status, answer.loaded) == (200, BETTER)

    run(work())


@pytest.mark.parametrize("cause", ["source", "ranks"])
def test_a_preparation_that_failed_says_why_and_begins_again(run: Run, server: Server, cause: str) -> None:
    problem = {"reason": "HubAccessDenied", "message": "the token may not read it."}
    if cause == "source":
        server.sources.problems["better"] = RejectionError(422, problem["reason"], problem["message"])
    else:
        server.engine.rejections[BETTER] = {"reason": problem["reason"], "message": problem["message"]}

    async def work() -> None:
        async with server.started() as client:
            await client.prepare("better")
            await asyncio.sleep(5)
            prepared = await read_prepared(client)
            assert (prepared["phase"], prepared["problem"], prepared["files"]) == ("Failed", problem, None)
            server.sources.problems.clear()
            server.engine.rejections.clear()
            assert (await client.prepare("better")).status == 202
            await asyncio.sleep(5)
            assert (await read_prepared(client))["phase"] == "Ready"

    run(work())


def test_a_failure_that_nobody_expects_ends_the_preparation(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            server.engine.failures[STAGE] = 1
            await client.prepare("better")
            await asyncio.sleep(5)
            assert (await read_prepared(client))["problem"]["reason"] == "StagingFailed"

    run(work())


def test_another_source_replaces_a_preparation(run: Run, server: Server) -> None:
    server.sources.seconds = 3600

    async def work() -> None:
        async with server.started() as client:
            for name in ("worse", "other", "worse", "better"):
                await client.prepare(name)
                await asyncio.sleep(1)
                assert server.sources.active == 1, "the process of the replaced preparation has ended"
            assert (await read_prepared(client))["source"] == {"folder": str(server.root / "better")}
            await asyncio.sleep(3610)
            assert (await read_prepared(client))["digest"] == BETTER

    run(work())


def test_the_end_of_the_server_ends_a_preparation(run: Run, server: Server) -> None:
    server.sources.seconds = 3600

    async def work() -> None:
        loop = asyncio.get_running_loop()
        async with server.started() as client:
            await client.prepare("better")
            await asyncio.sleep(1)
            began = loop.time()
        assert loop.time() - began < 0.1

    run(work())


@pytest.mark.parametrize("seconds", [1.0, 2.0, 2.005, 2.3, 2.9, 3.0, 3.2])
@pytest.mark.parametrize("name", ["better", "worse", "own"])
def test_a_change_goes_first(run: Run, server: Server, name: str, seconds: float) -> None:
    """The source is read for 2 s and the ranks read for 1 s; a change in that time is as fast as without a preparation."""

    async def work() -> None:
        async with server.started() as client:
            await client.prepare("better")
            await asyncio.sleep(seconds)
            answer = await client.put(name, 60)
            assert (answer.status, answer.loaded) == (200, make_drafter(name)["digest"])
            assert answer.body["durations"]["staging"] < 1.15
            await asyncio.sleep(10)
            assert (await read_prepared(client))["digest"] == BETTER
            assert (await client.put("better", 60)).loaded == BETTER

    run(work())


@pytest.mark.parametrize("seconds", [0.0, 0.5, 1.02])
def test_a_preparation_waits_for_a_change(run: Run, server: Server, seconds: float) -> None:
    server.sources.seconds = seconds

    async def work() -> None:
        async with server.started() as client:
            put = asyncio.ensure_future(client.put("worse", 60))
            await asyncio.sleep(0.001)
            await client.prepare("better")
            assert (await put).loaded == WORSE
            await asyncio.sleep(5)
            assert (await read_prepared(client))["digest"] == BETTER
            assert (await client.get()).loaded == WORSE

    run(work())


def test_a_return_does_not_wait_for_a_preparation(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            loop = asyncio.get_running_loop()
            await client.put("worse", 60)
            server.engine.hanging_disk = True
            await client.prepare("better")
            await asyncio.sleep(5)
            began = loop.time()
            assert (await client.delete()).loaded == OWN
            assert loop.time() - began < 0.1
            assert (await read_prepared(client))["phase"] == "Running"

    run(work())


def test_files_that_have_changed_are_prepared_again(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            await client.prepare("better")
            await asyncio.sleep(5)
            await client.put("worse", None)  # the ranks retain what was prepared no longer than what they need
            await client.put("other", 60)
            server.engine.rejections[BETTER] = {"reason": "DigestMismatch", "message": "model.safetensors has another SHA-256."}
            assert (await client.put("better")).body["reason"] == "DigestMismatch"
            assert (await client.get()).body["prepared"] is None
            assert (await client.prepare("better")).status == 202

    run(work())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "InvalidSource"),
        ({"folder": "/x", "revision": "main"}, "InvalidSource"),
        ({"repository": "owner/better"}, "InvalidSource"),
        ({"folder": "drafters"}, "InvalidField"),
        ({"folder": "/a\nb"}, "InvalidField"),
        ({"folder": None}, "InvalidField"),
        ({"repository": "../..", "revision": "--x"}, "InvalidField"),
        ({"repository": "a/b/c", "revision": "main"}, "InvalidField"),
        ({"folder": "/x", "files": {}}, "UnknownField"),
        (b"[]", "InvalidBody"),
    ],
)
def test_invalid_sources(run: Run, server: Server, body: object, reason: str) -> None:
    async def work() -> None:
        async with server.started() as client:
            answer = await client.call("POST", "/aerie/drafter/prepare", body)
            assert (answer.status, answer.body["reason"]) == (400, reason)
            assert (await client.get()).body["prepared"] is None

    run(work())


def test_an_unfit_engine_prepares_nothing(run: Run, server: Server) -> None:
    server.engine.ranks[1].unfit = {"reason": "NoDrafter", "message": "the engine has no drafter."}

    async def work() -> None:
        async with server.started() as client:
            answer = await client.prepare("better")
            assert (answer.status, answer.body["reason"]) == (409, "NoDrafter")
            assert server.sources.reads == []

    run(work())
