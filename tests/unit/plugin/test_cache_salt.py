"""Cache salts: which requests may share cached blocks, at every moment of a change."""

from __future__ import annotations

import asyncio
import copy
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie_vllm.cache_salt import CacheSalt, compute_salt
from tests.unit.plugin.conftest import Run, Server
from tests.unit.plugin.fake_engine import FakeEngineCore, FakeRequest, make_drafter
from tests.unit.plugin.test_endpoint_changes import expect_drafter

OWN, BETTER, WORSE = (make_drafter(name)["digest"] for name in ("own", "better", "worse"))
MAX_SALT_CHARACTERS = 128
"""vLLM's own limit (validate_cache_salt in vllm/entrypoints/generate/base/protocol.py)."""
salt_strategy = st.none() | st.text(min_size=1, max_size=MAX_SALT_CHARACTERS)


@given(st.lists(st.tuples(salt_strategy, st.sampled_from((OWN, BETTER, WORSE))), unique=True))
def test_salts_of_users_and_drafters_differ(requests: list[tuple[str | None, str]]) -> None:
    async def work() -> None:
        core = FakeEngineCore()
        salt = CacheSalt(core, OWN)
        for user_salt, digest in requests:
            salt.digest = digest
            await core.add_request_async(FakeRequest(user_salt))
        assert len(set(core.salts)) == len(requests)
        for (user_salt, digest), sent in zip(requests, core.salts, strict=True):
            assert sent == (user_salt if digest == OWN else compute_salt(user_salt, digest))
            assert sent is None or (0 < len(sent) <= MAX_SALT_CHARACTERS and not set(sent) & set("@/\\\0")) or digest == OWN

    asyncio.run(work())


def test_answers_to_one_prompt_share_their_salt() -> None:
    """vLLM sends copies of a request with n > 1, and at last the request itself."""

    async def work() -> None:
        core = FakeEngineCore()
        CacheSalt(core, OWN).digest = BETTER
        request = FakeRequest("user")
        for child in (copy.copy(request), copy.copy(request), request):
            await core.add_request_async(child)
        assert set(core.salts) == {compute_salt("user", BETTER)}

    asyncio.run(work())


def test_blocks_of_a_drafter_are_found_again(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            salts = []
            for name, lease_seconds in (
                ("better", 60),
                ("own", 60),
                ("better", None),
                ("own", 60),
                ("worse", 60),
                ("better", 60),
            ):
                await client.put(name, lease_seconds)
                salts.append(await server.engine.send_request())
            better, worse = compute_salt(None, BETTER), compute_salt(None, WORSE)
            assert salts == [better, None, better, None, worse, better], "a promotion changes no salt"
            await client.put("worse", 5)
            await asyncio.sleep(10)
            assert await server.engine.send_request() == better, "a lease has ended"

    run(work())


def test_a_process_that_starts_later_has_the_same_salts(run: Run, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    expect_drafter(server, monkeypatch, "better")

    async def work() -> None:
        async with server.started() as client:
            await asyncio.sleep(10)
            assert (await client.ready()).status == 200
            assert await server.engine.send_request() == compute_salt(None, BETTER)
            await client.put("own", 60)
            assert await server.engine.send_request() is None

    run(work())


@pytest.mark.parametrize("failure", [None, "pause", "swap:1"])
def test_a_request_during_a_swap_has_the_salt_of_the_drafter_that_serves_it(
    run: Run, server: Server, failure: str | None
) -> None:
    """The engine gets no request between the pause and the resume, but they arrive in this order."""

    async def work() -> None:
        async with server.started() as client:
            if failure is not None:
                server.engine.failures[failure] = 1
            change = asyncio.ensure_future(client.put("better", 60))
            log: list[tuple[str | None, bool]] = []
            while not change.done():
                log.append((await server.engine.send_request(), "pause" in server.engine.calls))
                await asyncio.sleep(0.001)
            better = compute_salt(None, BETTER)
            assert [salt for salt, is_after in log if not is_after] == [None] * sum(not is_after for _, is_after in log)
            changes = [salt for salt, _ in itertools.groupby(salt for salt, _ in log)]
            assert changes == [None, better]
            assert await server.engine.send_request() == (better if failure is None else None)
            assert (await client.get()).loaded == (BETTER if failure is None else OWN)

    run(work())
