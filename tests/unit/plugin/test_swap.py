"""The sequence of a swap: in which order, on how many engines, and what it leaves when a part fails."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aerie_vllm.engine import Engine
from aerie_vllm.rejection import ChangeFailedError, EngineDeadError
from aerie_vllm.swap import PAUSE_SECONDS, BrokenError, SwapTimes, swap_drafter
from aerie_vllm.worker_protocol import DESCRIBE, STAGE, SWAP
from tests.unit.plugin.conftest import Run
from tests.unit.plugin.fake_engine import FakeEngineClient, FakeEngineCore, make_drafter, make_files

OWN, BETTER = make_drafter("own")["digest"], make_drafter("better")["digest"]


async def swap(client: FakeEngineClient) -> SwapTimes:
    """Swap to the better drafter, with a commit that is recorded among the client's calls."""
    for rank in client.ranks:
        rank.memory[BETTER] = make_drafter("better")

    def commit() -> None:
        assert client.paused
        assert client.loaded_digests() == {BETTER}
        client.calls.append("commit")

    engine = Engine(client)
    engine.separate_blocks(OWN)
    return await swap_drafter(engine, BETTER, OWN, commit)


def test_the_order_of_a_swap(run: Run) -> None:
    async def work() -> None:
        client = FakeEngineClient()
        times = await swap(client)
        assert client.calls == ["is_paused", "pause", SWAP, "commit", "label", "resume"]
        assert times.pause_seconds == pytest.approx(0.05)
        assert times.swap_seconds == 0.03
        assert (client.violations, client.paused) == ([], False)

    run(work())


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_rank_that_fails_takes_all_back(run: Run, rank: int) -> None:
    async def work() -> None:
        client = FakeEngineClient(ranks=4)
        client.failures[f"swap:{rank}"] = 1
        with pytest.raises(ChangeFailedError, match=f"rank {rank}: the weights could not be copied. Drafter {OWN} is loaded"):
            await swap(client)
        assert client.calls == ["is_paused", "pause", SWAP, SWAP, "resume"]
        assert client.loaded_digests() == {OWN}

    run(work())


@pytest.mark.parametrize("failures", [{"swap:1": 1, "back:0": 1}, {SWAP: 2}])
def test_ranks_that_cannot_return_are_broken(run: Run, failures: dict[str, int]) -> None:
    async def work() -> None:
        client = FakeEngineClient()
        client.failures.update(failures)
        with pytest.raises(BrokenError, match="Restart the pod"):
            await swap(client)
        assert client.calls[-1] == "resume"
        assert (client.paused, "commit" in client.calls) == (False, False)

    run(work())


def test_an_engine_without_ranks_is_broken(run: Run) -> None:
    async def work() -> None:
        with pytest.raises(BrokenError, match="no rank answered"):
            await swap(FakeEngineClient(ranks=0))

    run(work())


def test_a_label_that_fails_is_no_failure(run: Run) -> None:
    async def work() -> None:
        client = FakeEngineClient()
        client.failures["label"] = 1
        await swap(client)
        assert client.calls[-1] == "resume"

    run(work())


def test_a_resume_is_retried(run: Run) -> None:
    async def work() -> None:
        client = FakeEngineClient()
        client.failures["resume"] = 20
        times = await swap(client)
        assert not client.paused
        assert times.pause_seconds > 60

    run(work())


def test_a_pause_that_does_not_complete_is_given_up(run: Run) -> None:
    """vLLM completes none while another pod still has to fetch a finished request."""

    async def work() -> None:
        client = FakeEngineClient()
        client.pause_seconds = 480.0
        before = asyncio.all_tasks()
        with pytest.raises(ChangeFailedError, match=r"did not pause within 10 s.*KV connector.*repeat the call") as failure:
            await swap(client)
        assert failure.value.reason == "PauseTimeout"
        assert asyncio.get_running_loop().time() == pytest.approx(PAUSE_SECONDS, abs=0.01)
        assert (client.calls, client.paused) == (["is_paused", "pause", "resume"], False)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before, "the pending call of vLLM has ended"
        client.pause_seconds = 0.0
        await swap(client)
        assert client.loaded_digests() == {BETTER}

    run(work())


def test_a_cancelled_swap_resumes(run: Run) -> None:
    async def work() -> None:
        client = FakeEngineClient()
        task = asyncio.ensure_future(swap(client))
        await asyncio.sleep(0.03)
        assert client.paused
        task.cancel()
        await asyncio.wait((task,))
        assert not client.paused

    run(work())


def test_outputs_before_the_pause_are_counted_first(run: Run) -> None:
    async def work() -> None:
        client = FakeEngineClient()
        outputs: asyncio.Queue[int] = asyncio.Queue()
        client.engine_core.outputs_queue = outputs
        outputs.put_nowait(1)
        task = asyncio.ensure_future(swap(client))
        await asyncio.sleep(0.3)
        assert "commit" not in client.calls
        outputs.get_nowait()
        await task
        outputs.put_nowait(1)
        for rank in client.ranks:
            rank.loaded = make_drafter("own")
        times = await swap(client)
        assert 1.0 < times.pause_seconds < 1.2, "it does not wait for ever"

    run(work())


class FakeDataParallelCore(FakeEngineCore):
    """vLLM's client of several data-parallel engines, each with two ranks."""

    def __init__(self, engines: dict[bytes, FakeEngineClient]) -> None:
        super().__init__()
        self.engines, self.core_engines = engines, list(engines)

    async def _call_utility_async(self, name: str, *arguments: Any, engine: bytes) -> Any:
        assert name == "collective_rpc"
        method, timeout, args, kwargs = arguments
        assert kwargs is None
        return await self.engines[engine].collective_rpc(method, timeout, args)


class DataParallelClient(FakeEngineClient):
    """vLLM's engine client of two data-parallel engines: its own `collective_rpc` returns the first engine's results only."""

    def __init__(self) -> None:
        super().__init__()
        self.second = FakeEngineClient()
        self.engine_core = FakeDataParallelCore({b"0": self, b"1": self.second})

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await super().pause_generation(mode=mode, clear_cache=clear_cache)
        await self.second.pause_generation(mode=mode, clear_cache=clear_cache)


def test_all_ranks_of_all_engines_answer(run: Run) -> None:
    async def work() -> None:
        client = DataParallelClient()
        engine = Engine(client)
        assert [report["rank"] for report in await engine.describe()] == [0, 1, 0, 1]
        assert len(await engine.stage("/drafters/better", make_files("better"), [OWN])) == 4
        assert client.second.calls == [DESCRIBE, STAGE]

    run(work())


@pytest.mark.parametrize("failure", [SWAP, "swap:1"])
def test_a_failure_of_the_second_engine_takes_the_first_back(run: Run, failure: str) -> None:
    async def work() -> None:
        client = DataParallelClient()
        client.second.failures[failure] = 1
        with pytest.raises(ChangeFailedError, match=f"Drafter {OWN} is loaded again on all ranks"):
            await swap(client)
        assert client.loaded_digests() == client.second.loaded_digests() == {OWN}

    run(work())


def test_a_call_of_an_engine_that_ends(run: Run) -> None:
    async def work() -> None:
        client = FakeEngineClient()
        call = asyncio.ensure_future(Engine(client).describe())
        client.dies_in = DESCRIBE
        with pytest.raises(EngineDeadError):
            await call
        assert asyncio.get_running_loop().time() <= 1.0

    run(work())
