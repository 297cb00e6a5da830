"""Isolation: a pod that users do not reach, in which drafters are compared."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from aerie_vllm.engine import Engine
from tests.unit.plugin.conftest import Run, Server
from tests.unit.plugin.fake_engine import make_drafter

OWN, BETTER = make_drafter("own")["digest"], make_drafter("better")["digest"]


def test_an_isolated_pod_is_not_ready_and_serves_both_drafters(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            server.engine.unfinished_requests = 3
            answer = await client.isolate(60)
            assert (answer.status, answer.body["isolation"]) == (200, {"remaining_seconds": 60.0, "unfinished_requests": 3})
            for name, digest in (("better", BETTER), ("own", OWN), ("better", BETTER)):
                answer = await client.put(name, 30, turn=name, isolated=True)
                assert (answer.status, answer.loaded) == (200, digest)
                ready = await client.ready()
                assert (ready.status, ready.body) == (503, {"ready": False, "reason": "Isolated", "turn": name})
            answer = await client.delete()
            assert (answer.status, answer.loaded, answer.body["isolation"]) == (200, OWN, None)
            assert (await client.ready()).status == 200
            assert (await client.delete()).status == 200, "a repeated call"

    run(work())


def test_an_isolation_that_nobody_renews_ends_with_the_own_drafter(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            await client.isolate(10)
            await asyncio.sleep(5)
            await client.put("better", 10, isolated=True)
            await asyncio.sleep(9)
            assert (await client.get()).loaded == BETTER
            assert (await client.ready()).status == 503
            await asyncio.sleep(2)
            assert (await client.ready()).status == 200
            assert server.engine.loaded_digests() == {OWN}

    run(work())


def test_a_pod_that_cannot_return_is_not_ready_until_it_has(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            await client.isolate(10)
            await client.put("better", 10, isolated=True)
            server.engine.failures["pause"] = 4  # of two leases
            await asyncio.sleep(11)
            assert (await client.ready()).body["reason"] == "Isolated"
            assert (await client.put("better", 300, isolated=True)).body["reason"] == "NotIsolated"
            await asyncio.sleep(20)
            assert (await client.ready()).status == 200
            assert server.engine.loaded_digests() == {OWN}

    run(work())


@pytest.mark.parametrize("returns", [True, False])
def test_a_change_that_is_staged_when_the_isolation_ends_is_not_made(run: Run, server: Server, returns: bool) -> None:
    async def work() -> None:
        async with server.started() as client:
            await client.isolate(60 if returns else 1.1)
            await asyncio.sleep(0.2)
            change = asyncio.ensure_future(client.put("better", 300, isolated=True))
            await asyncio.sleep(0.5)  # staging takes 1 s
            if returns:
                assert (await client.delete()).status == 200
            answer = await change
            assert (answer.status, answer.body["reason"]) == (409, "Superseded" if returns else "NotIsolated")
            await asyncio.sleep(1)
            assert server.engine.loaded_digests() == {OWN}
            assert (await client.ready()).status == 200

    run(work())


def test_a_change_for_an_isolated_pod_is_rejected_in_others(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            answer = await client.put("better", 60, isolated=True)
            assert (answer.status, answer.body["reason"]) == (409, "NotIsolated")
            answer = await client.put("better", 60, isolated="yes")
            assert (answer.status, answer.body["reason"]) == (400, "InvalidField")
            assert (await client.isolate(0)).body["reason"] == "InvalidField"
            assert (await client.call("POST", "/aerie/isolation", {"lease_seconds": 60}, token=None)).status == 401
            assert (await client.get()).loaded == OWN

    run(work())


def test_a_drafter_promoted_in_isolation_is_what_the_pod_serves_with(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            await client.isolate(60)
            await client.put("better", None)
            assert (await client.delete()).loaded == BETTER
            assert (await client.ready()).status == 200

    run(work())


def test_requests_are_counted_where_only_the_output_processor_counts_them() -> None:
    parts = SimpleNamespace(get_num_unfinished_requests=lambda: 3)
    assert Engine(parts).count_unfinished_requests() == 3
    assert Engine(SimpleNamespace(output_processor=parts)).count_unfinished_requests() == 3
    assert Engine(SimpleNamespace()).count_unfinished_requests() is None
