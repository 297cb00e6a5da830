"""Changes through the endpoint: what is loaded, for how long, what a failure leaves, and who waits for whom."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Awaitable, Sequence

import pytest

from aerie_vllm.rejection import RejectionError
from aerie_vllm.requests import DrafterSource
from aerie_vllm.source_reader import SourceFiles
from aerie_vllm.staging import STAGING_SECONDS
from aerie_vllm.worker_protocol import STAGE, SWAP
from tests.unit.plugin.conftest import COMMIT, Answer, Client, Run, Server
from tests.unit.plugin.fake_engine import make_drafter, make_files

OWN, BETTER, WORSE = (make_drafter(name)["digest"] for name in ("own", "better", "worse"))


def test_the_state_after_the_start(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            body = (await client.get()).body
            assert body["loaded"] == body["own"] == make_drafter("own")
            assert (body["lease"], body["change"], body["unfit"], body["problem"]) == (None, None, None, None)
            assert (body["ready"], body["swaps"], body["failures"]) == (True, 0, 0)
            assert body["engine"] == {
                "architecture": "Eagle3LlamaForCausalLM",
                "method": "eagle3",
                "ranks": 2,
                "counting": False,
            }
            assert [window["digest"] for window in body["windows"]] == [OWN]
            assert server.engine.labels == [OWN]

    run(work())


def test_a_trial_ends_with_its_lease(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            answer = await client.put("better", 60)
            assert (answer.status, answer.loaded, answer.body["own"]["digest"]) == (200, BETTER, OWN)
            assert answer.body["lease"] == {"digest": BETTER, "remaining_seconds": pytest.approx(60, abs=0.1)}
            durations = answer.body["durations"]
            assert durations["staging"] == pytest.approx(1.0, abs=0.11)
            assert durations["pause"] == pytest.approx(0.05, abs=0.01)
            assert durations["swap"] == 0.03
            assert server.engine.labels == [OWN, BETTER]
            await asyncio.sleep(50)
            assert (await client.renew(BETTER, 60)).body["lease"]["remaining_seconds"] == pytest.approx(60)
            await asyncio.sleep(59)
            assert (await client.get()).loaded == BETTER
            await asyncio.sleep(1.2)
            body = (await client.get()).body
            assert (body["loaded"]["digest"], body["lease"], body["swaps"]) == (OWN, None, 2)
            assert server.engine.loaded_digests() == {OWN}
            answer = await client.renew(BETTER, 60)
            assert (answer.status, answer.body["reason"]) == (409, "NoLease")

    run(work())


def test_a_promoted_drafter_is_what_a_trial_returns_to(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            await client.put("better", 60)
            swaps = server.engine.calls.count(SWAP)
            answer = await client.put("better", None)
            assert (answer.body["own"]["digest"], answer.body["lease"]) == (BETTER, None)
            assert server.engine.calls.count(SWAP) == swaps, "it was loaded"
            await asyncio.sleep(3600)
            await client.put("worse", 30)
            await asyncio.sleep(31)
            assert (await client.get()).loaded == BETTER
            await client.put("worse", 30)
            assert (await client.delete()).loaded == BETTER

    run(work())


def test_turns_need_no_disk(run: Run, server: Server) -> None:
    """The two drafters of a trial stay in memory, so that turns are swaps alone."""

    async def work() -> None:
        async with server.started() as client:
            await client.put("better", 60, turn="0")
            for turn in range(1, 9):
                name = ("own", "better")[turn % 2]
                answer = await client.put(name, 60, folder=None, turn=str(turn))
                assert (answer.status, answer.body["lease"] is None) == (200, name == "own")
            windows = (await client.get("?after=0")).body["windows"]
            assert [window["turn"] for window in windows] == [None, *map(str, range(9))]
            assert server.engine.calls.count(STAGE) == 1
            answer = await client.put("other", 60, folder=None)
            assert (answer.status, answer.body["reason"]) == (422, "NotHeld")

    run(work())


def test_a_repeated_call_does_not_divide_its_window(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            first = (await client.put("better", 60, turn="7")).body["windows"][0]
            await asyncio.sleep(30)
            answer = await client.put("better", 60, turn="7")
            assert answer.body["windows"][0]["number"] == first["number"]
            assert answer.body["lease"]["remaining_seconds"] == pytest.approx(60)
            answer = await client.put("better", 60, turn="8")
            assert answer.body["windows"][0]["number"] == first["number"] + 1

    run(work())


def test_a_change_replaces_only_what_it_was_meant_to_replace(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            answer = await client.put("better", 60, expected_digest=WORSE)
            assert (answer.status, answer.body["reason"]) == (409, "LoadedChanged")
            assert (await client.put("better", 60, expected_digest=OWN)).loaded == BETTER

    run(work())


def test_a_rejected_drafter_changes_nothing(run: Run, server: Server) -> None:
    server.engine.rejections[WORSE] = {"reason": "WrongShape", "message": "fc.weight is (64, 192), and the engine has (64, 128)."}

    async def work() -> None:
        async with server.started() as client:
            await client.put("better", 60, turn="1")
            before = (await client.get()).body
            answer = await client.put("worse", 60)
            assert (answer.status, answer.body["reason"]) == (422, "WrongShape")
            assert "fc.weight" in answer.body["message"]
            after = (await client.get()).body
            for name in ("loaded", "own", "since", "swaps", "failures"):
                assert after[name] == before[name]
            assert after["windows"][0]["number"] == before["windows"][0]["number"]
            assert server.engine.calls.count(SWAP) == 1

    run(work())


def test_two_changes_at_once(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            first, second = await asyncio.gather(client.put("better", 60), client.put("worse", 60))
            assert (first.status, first.loaded) == (200, BETTER)
            assert (second.status, second.body["reason"]) == (409, "ChangeInProgress")
            assert "Staging" in second.body["message"]

    run(work())


async def answer_after(seconds: float, call: Awaitable[Answer]) -> Answer:
    await asyncio.sleep(seconds)
    return await call


@pytest.mark.parametrize("seconds", [0.001, 0.2, 0.9, 1.01, 1.02, 1.05, 1.08, 1.2])
def test_a_return_wins_against_a_change(run: Run, server: Server, seconds: float) -> None:
    """Staging takes a second here, the swap 0.05 s."""

    async def work() -> None:
        async with server.started() as client:
            put, delete = await asyncio.gather(client.put("better", 60), answer_after(seconds, client.delete()))
            assert delete.status == 200
            assert put.status == 200 or put.body["reason"] == "Superseded"
            body = (await client.get()).body
            assert (body["loaded"]["digest"], body["lease"], body["change"]) == (OWN, None, None)

    run(work())


@pytest.mark.parametrize("disk_hangs", [False, True])
def test_a_lease_ends_while_another_drafter_is_staged(run: Run, server: Server, disk_hangs: bool) -> None:
    async def work() -> None:
        async with server.started() as client:
            await client.put("better", 10)
            await asyncio.sleep(9.5)
            server.engine.hanging_disk = disk_hangs
            put = asyncio.ensure_future(client.put("worse", 60))
            await asyncio.sleep(0.8)
            assert server.engine.loaded_digests() == {OWN}
            answer = await put
            assert answer.body["reason"] == ("StagingTimeout" if disk_hangs else "LoadedChanged")
            assert (await client.get()).loaded == OWN

    run(work())


def test_a_return_does_not_wait_for_a_disk_that_hangs(run: Run, server: Server) -> None:
    server.engine.hanging_disk = True

    async def work() -> None:
        async with server.started() as client:
            loop = asyncio.get_running_loop()
            put = asyncio.ensure_future(client.put("better", 60))
            await asyncio.sleep(5)
            assert (await client.get()).body["change"]["phase"] == "Staging"
            started = loop.time()
            assert (await client.delete()).status == 200
            assert (await put).body["reason"] == "Superseded"
            assert loop.time() - started < 0.1
            answer = await client.put("better", 60)
            assert (answer.status, answer.body["reason"]) == (422, "StagingTimeout")
            assert loop.time() - started == pytest.approx(STAGING_SECONDS, abs=1)

    run(work())


def test_a_client_that_disconnects_stops_nothing(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            for name, digest, seconds in (("better", BETTER, 0.3), ("worse", WORSE, 1.02)):
                put = asyncio.ensure_future(client.put(name, 60))
                await asyncio.sleep(seconds)
                put.cancel()
                await asyncio.sleep(2)
                body = (await client.get()).body
                assert (body["loaded"]["digest"], body["lease"]["digest"], body["change"]) == (digest, digest, None)
            assert not server.engine.paused

    run(work())


def test_a_pause_that_does_not_complete_is_reported_and_undone(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            server.engine.pause_seconds = 480.0
            put = asyncio.ensure_future(client.put("better"))
            while not put.done():
                assert (await client.ready()).status == 200
                await asyncio.sleep(0.1)
            answer = put.result()
            assert (answer.status, answer.body["reason"]) == (500, "PauseTimeout")
            assert (await client.get()).loaded == OWN
            assert not server.engine.paused
            assert await server.engine.send_request() is None, "the salt is that of the own drafter"

    run(work())


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("is_paused", "PauseFailed"),
        ("pause", "PauseFailed"),
        (SWAP, "SwapFailed"),
        ("swap:0", "SwapFailed"),
        ("swap:1", "SwapFailed"),
    ],
)
def test_a_failed_change_leaves_the_drafter_and_the_lease(run: Run, server: Server, failure: str, reason: str) -> None:
    async def work() -> None:
        async with server.started() as client:
            await client.put("better", 60, turn="1")
            server.engine.failures[failure] = 1
            answer = await client.put("worse", 60, turn="2")
            assert (answer.status, answer.body["reason"]) == (500, reason)
            body = (await client.get()).body
            assert (body["loaded"]["digest"], body["lease"]["digest"], body["windows"][0]["turn"]) == (BETTER, BETTER, "1")
            assert (body["ready"], body["failures"], body["last_failure"]["reason"]) == (True, 1, reason)
            assert server.engine.loaded_digests() == {BETTER}
            assert not server.engine.paused
            assert (await client.put("worse", 60)).loaded == WORSE

    run(work())


def test_the_end_of_a_lease_is_retried(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            await client.put("better", 10)
            server.engine.failures["back:1"] = 3
            await asyncio.sleep(10.5)
            body = (await client.get()).body
            assert (body["loaded"]["digest"], body["lease"]["remaining_seconds"]) == (BETTER, 0)
            answer = await client.renew(BETTER)
            assert (answer.status, answer.body["reason"]) == (409, "LeaseEnded")
            await asyncio.sleep(8)
            assert (await client.get()).loaded == OWN

    run(work())


def test_an_engine_that_another_caller_has_paused(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            await client.put("better", 10)
            server.engine.paused = True
            answer = await client.put("worse", 60)
            assert (answer.status, answer.body["reason"]) == (409, "EnginePaused")
            await asyncio.sleep(20)
            assert (server.engine.paused, server.engine.loaded_digests()) == (True, {BETTER})
            server.engine.paused = False
            await asyncio.sleep(30)
            assert server.engine.loaded_digests() == {OWN}

    run(work())


def test_a_pause_that_takes_long_is_not_ready(run: Run, server: Server) -> None:
    server.engine.failures["resume"] = 6

    async def work() -> None:
        async with server.started() as client:
            put = asyncio.ensure_future(client.put("better", 60))
            await asyncio.sleep(1.2)
            assert (await client.get()).body["change"]["phase"] == "Swapping"
            assert (await client.ready()).status == 200
            answer = await client.put("worse", 60)
            assert (answer.status, answer.body["reason"]) == (409, "ChangeInProgress")
            await put
            assert not server.engine.paused
            server.engine.failures["resume"] = 10
            put = asyncio.ensure_future(client.put("worse", 60))
            await asyncio.sleep(13)
            assert (await client.ready()).body["reason"] == "LongSwap"
            assert (await put).loaded == WORSE
            assert (await client.ready()).status == 200

    run(work())


def test_ranks_that_cannot_return_are_not_ready_for_ever(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:
            server.engine.failures["swap:1"] = 1
            server.engine.broken_ranks = {1}
            answer = await client.put("better", 60)
            assert (answer.status, answer.body["reason"]) == (500, "Broken")
            body = (await client.get()).body
            assert (body["loaded"], body["lease"], body["ready"], body["problem"]["reason"]) == (None, None, False, "Broken")
            for answer in (await client.put("better", 60), await client.delete()):
                assert (answer.status, answer.body["reason"]) == (409, "Broken")
            assert (await client.ready()).status == 503
            assert not server.engine.paused

    run(work())


@pytest.mark.parametrize("call", ["is_paused", "pause", SWAP, "resume", STAGE, "label"])
def test_an_engine_that_ends_in_a_change(run: Run, server: Server, call: str) -> None:
    async def work() -> None:
        async with server.started() as client:
            server.engine.dies_in = call
            started = asyncio.get_running_loop().time()
            answer = await client.put("better", 60)
            assert (answer.status, answer.body["reason"]) == (500, "EngineDead")
            assert asyncio.get_running_loop().time() - started < 3
            assert (await client.ready()).body["reason"] == "EngineDead"
            answer = await client.put("better", 60)
            assert (answer.status, answer.body["reason"]) == (503, "EngineDead")
            await asyncio.sleep(100)

    run(work())


def test_workers_without_the_extension(run: Run, server: Server) -> None:
    server.engine.failures["aerie_drafter_describe"] = 10**6

    async def work() -> None:
        async with server.started() as client:
            assert (await client.ready()).status == 200
            answer = await client.put("better", 60)
            assert (answer.status, answer.body["reason"]) == (503, "WorkersDoNotAnswer")
            server.engine.failures.clear()
            await asyncio.sleep(11)
            assert (await client.put("better", 60)).loaded == BETTER

    run(work())


def make_unfit(server: Server, cause: str) -> None:
    parallel = server.engine.vllm_config.parallel_config
    match cause:
        case "SeveralApiServers":
            parallel._api_process_count = 4
        case "data_parallel_external_lb" | "data_parallel_hybrid_lb" | "enable_elastic_ep" | "enable_fault_tolerance":
            setattr(parallel, cause, True)
        case "NoDrafter":
            server.engine.ranks[1].unfit = {"reason": "NoDrafter", "message": "the engine has no drafter."}
        case "RanksDiffer":
            server.engine.ranks[1].own = make_drafter("other")
        case "NoCacheSalt":
            server.engine.engine_core = None


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        ("SeveralApiServers", "SeveralApiServers"),
        ("data_parallel_external_lb", "SeveralApiServers"),
        ("data_parallel_hybrid_lb", "SeveralApiServers"),
        ("enable_elastic_ep", "EnginesMayRestart"),
        ("enable_fault_tolerance", "EnginesMayRestart"),
        ("NoDrafter", "NoDrafter"),
        ("RanksDiffer", "RanksDiffer"),
        ("NoCacheSalt", "NoCacheSalt"),
    ],
)
def test_an_unfit_engine_serves_and_does_not_change(run: Run, server: Server, cause: str, reason: str) -> None:
    make_unfit(server, cause)

    async def work() -> None:
        async with server.started() as client:
            assert (await client.ready()).status == 200
            assert (await client.get()).body["unfit"]["reason"] == reason
            for answer in (await client.put("better", 60), await client.delete()):
                assert (answer.status, answer.body["reason"]) == (409, reason)

    run(work())


def expect_drafter(server: Server, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("AERIE_DRAFTER_EXPECTED", str(server.expected))
    server.expected.write_text(json.dumps({"folder": str(server.root / name), "files": make_files(name)}))


def test_a_process_comes_to_the_expected_drafter_before_it_is_ready(
    run: Run, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_drafter(server, monkeypatch, "better")
    server.engine.failures["swap:1"] = 1

    async def work() -> None:
        async with server.started() as client:
            answer = await client.ready()
            assert (answer.status, answer.body["reason"]) == (503, "Starting")
            answer = await client.put("worse", 60)
            assert (answer.status, answer.body["reason"]) == (409, "NotReady")
            await asyncio.sleep(10)
            assert (await client.ready()).status == 200
            body = (await client.get()).body
            assert (body["loaded"]["digest"], body["own"]["digest"], body["lease"]) == (BETTER, BETTER, None)

    run(work())


@pytest.mark.parametrize("text", [None, "", '{"files": {}}', "own"])
def test_a_process_that_expects_its_own_drafter_or_nothing(
    run: Run, server: Server, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    expect_drafter(server, monkeypatch, "own")
    if text is None:
        server.expected.unlink()
    elif text != "own":
        server.expected.write_text(text)

    async def work() -> None:
        async with server.started() as client:
            answer = await client.ready()
            if text == '{"files": {}}':
                assert (answer.status, answer.body["reason"]) == (503, "InvalidField")
                server.expected.write_text("")
                await asyncio.sleep(10)
                answer = await client.ready()
            assert answer.status == 200
            assert server.engine.calls.count(SWAP) == 0

    run(work())


def test_an_expected_drafter_that_does_not_fit_may_be_replaced(run: Run, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    expect_drafter(server, monkeypatch, "worse")
    server.engine.rejections[WORSE] = {"reason": "WrongShape", "message": "fc.weight has another shape."}

    async def work() -> None:
        async with server.started() as client:
            await asyncio.sleep(3)
            assert (await client.ready()).body["reason"] == "WrongShape"
            while (answer := await client.put("better", None)).status == 409:
                await asyncio.sleep(0.1)
            assert answer.loaded == BETTER
            await asyncio.sleep(60)
            assert ((await client.get()).loaded, (await client.ready()).status) == (BETTER, 200)

    run(work())


def expect_repository(server: Server, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("AERIE_DRAFTER_EXPECTED", str(server.expected))
    source = {"repository": f"owner/{name}", "revision": COMMIT}
    server.expected.write_text(json.dumps({**source, "files": make_files(name)}))


def test_a_start_is_repeated_after_an_unforeseen_exception(run: Run, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that reads a drafter cannot be started where the pod or node has no process or memory left."""
    expect_repository(server, monkeypatch, "better")
    read = server.sources.read
    errors = [BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")] * 3

    async def read_source(source: DrafterSource, needed: Sequence[str] | None) -> SourceFiles:
        if errors:
            raise errors.pop()
        return await read(source, needed)

    monkeypatch.setattr(server.sources, "read", read_source)

    async def work() -> None:
        async with server.started() as client:
            assert (await client.ready()).body == {"ready": False, "reason": "InternalError"}
            await asyncio.sleep(10)
            assert (await client.ready()).status == 200
            body = (await client.get()).body
            assert (body["own"]["digest"], body["problem"]) == (BETTER, None)

    run(work())


def test_a_pod_waits_for_its_own_drafter_and_says_why(run: Run, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    expect_drafter(server, monkeypatch, "better")
    rank = server.engine.ranks[1]
    rank.own_known, rank.own_problem = False, {"reason": "OwnDrafterUnreadable", "message": "OSError: Stale file handle"}

    async def work() -> None:
        async with server.started() as client:
            assert (await client.ready()).body["reason"] == "OwnDrafterUnreadable"
            assert (await client.get()).body["unfit"] is None
            assert (await client.put("worse")).body["reason"] == "OwnDrafterUnreadable"
            rank.own_known, rank.own_problem = True, None
            await asyncio.sleep(10)
            assert (await client.ready()).status == 200

    run(work())


def test_a_process_fetches_the_expected_drafter(run: Run, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    expect_repository(server, monkeypatch, "better")
    server.sources.problems["better"] = RejectionError(422, "HubFailed", "the Hub does not answer.")

    async def work() -> None:
        async with server.started() as client:
            await asyncio.sleep(3)
            assert (await client.ready()).body["reason"] == "HubFailed"
            server.sources.problems.clear()
            await asyncio.sleep(10)
            assert (await client.ready()).status == 200
            assert (await client.get()).body["own"]["digest"] == BETTER
            assert server.sources.max_active == 1

    run(work())


def test_an_expected_drafter_that_cannot_be_fetched_is_retried_with_growing_delay(
    run: Run, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_repository(server, monkeypatch, "better")
    server.sources.problems["better"] = RejectionError(422, "HubFailed", "the Hub does not answer.")

    async def work() -> None:
        async with server.started() as client:
            await asyncio.sleep(3600)
            assert (await client.ready()).body["reason"] == "HubFailed"
            assert 100 < len(server.sources.reads) < 130

    run(work())


def test_a_promotion_during_the_fetch_of_the_expected_drafter_stays(
    run: Run, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_repository(server, monkeypatch, "better")
    server.sources.seconds = 60

    async def work() -> None:
        async with server.started() as client:
            assert (await client.ready()).body["reason"] == "Starting"
            assert "expected at the start is being read" in (await client.get()).body["problem"]["message"]
            assert (await client.put("worse", None)).loaded == WORSE
            assert (await client.ready()).status == 200
            await asyncio.sleep(100)
            assert (await client.get()).loaded == WORSE

    run(work())


def test_an_expected_repository_with_other_files(run: Run, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    expect_repository(server, monkeypatch, "better")
    fields = json.loads(server.expected.read_text()) | {"files": make_files("worse")}
    server.expected.write_text(json.dumps(fields))

    async def work() -> None:
        async with server.started() as client:
            await asyncio.sleep(5)
            assert (await client.ready()).body == {"ready": False, "reason": "DigestMismatch"}, "no digest without a token"
            assert WORSE in (await client.get()).body["problem"]["message"]
            assert server.engine.loaded_digests() == {OWN}

    run(work())


@pytest.mark.parametrize("cause", ["SeveralApiServers", "NoDrafter", "RanksDiffer", "WorkersDoNotAnswer"])
@pytest.mark.parametrize("text", [None, "", "\n"])
def test_an_engine_that_cannot_change_is_ready_without_an_expected_drafter(
    run: Run, server: Server, monkeypatch: pytest.MonkeyPatch, cause: str, text: str | None
) -> None:
    monkeypatch.setenv("AERIE_DRAFTER_EXPECTED", str(server.expected))
    if text is not None:
        server.expected.write_text(text)
    if cause == "WorkersDoNotAnswer":
        server.engine.failures["aerie_drafter_describe"] = 10**6
    make_unfit(server, cause)

    async def work() -> None:
        async with server.started() as client:
            assert (await client.ready()).status == 200
            await asyncio.sleep(100)
            assert (await client.ready()).status == 200

    run(work())


def test_an_unfit_engine_is_not_ready_while_a_drafter_is_expected(
    run: Run, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_drafter(server, monkeypatch, "better")
    make_unfit(server, "NoDrafter")

    async def work() -> None:
        async with server.started() as client:
            assert (await client.ready()).body["reason"] == "NoDrafter"
            server.expected.unlink()
            await asyncio.sleep(60)
            assert (await client.ready()).status == 200

    run(work())


def test_the_last_rejection_is_reported(run: Run, server: Server) -> None:
    server.engine.rejections[WORSE] = {"reason": "Shape", "message": "fc.weight has another shape."}

    async def work() -> None:
        async with server.started() as client:
            assert (await client.get()).body["last_rejection"] is None
            put = asyncio.ensure_future(client.put("worse"))
            await asyncio.sleep(0.5)
            put.cancel()
            await asyncio.sleep(2)
            rejection = (await client.get()).body["last_rejection"]
            assert rejection.pop("time") > 0
            assert rejection == {"reason": "Shape", "message": "fc.weight has another shape.", "digest": WORSE}
            assert (await client.put("better")).body["last_rejection"]["digest"] == WORSE

    run(work())


def test_the_end_of_the_server_withdraws_a_change_that_is_staging(run: Run, server: Server) -> None:
    server.engine.hanging_disk = True

    async def work() -> None:
        loop = asyncio.get_running_loop()
        async with server.started() as client:
            put = asyncio.ensure_future(start_change(client))
            await asyncio.sleep(5)
            began = loop.time()
        assert loop.time() - began < 0.1
        assert (await put).body["reason"] == "Superseded"

    run(work())


def test_the_end_of_the_server_waits_for_a_swap(run: Run, server: Server) -> None:
    async def work() -> None:
        put: asyncio.Future[Answer]
        async with server.started() as client:
            put = asyncio.ensure_future(start_change(client))
            await asyncio.sleep(1.02)
        assert (await put).status == 200
        assert not server.engine.paused

    run(work())


async def start_change(client: Client) -> Answer:
    return await client.put("better", 60)
