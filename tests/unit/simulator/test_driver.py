"""Pauses and another drafter in the midst of requests, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from aerie_lab.engine.core.replica import Replica
from aerie_lab.engine.performance_model.acceptance import Acceptance
from aerie_lab.engine.performance_model.request import EngineSettings, Request
from aerie_lab.engine.performance_model.step import StepTimeFormula
from aerie_lab.engine.serving.driver import ReplicaDriver, RequestHandle
from tests.unit.controller.conftest import run_virtually

STEP_SECONDS = 0.02
ALL, NONE = Acceptance((1.0,)), Acceptance((0.0,))


def start_driver() -> ReplicaDriver:
    step_time = StepTimeFormula(base_seconds=STEP_SECONDS, seconds_per_token=0.0)
    driver = ReplicaDriver(Replica(EngineSettings(num_speculative_tokens=3), step_time))
    driver.replica.clock = driver.replica.start_time = driver.now()
    return driver


def submit(driver: ReplicaDriver, name: str, tokens: int) -> RequestHandle:
    return driver.submit(Request(name, 20, tokens, ALL), "chat", stream=False)


async def wait_for_end(handle: RequestHandle) -> None:
    async for _ in handle.progress():
        pass


def test_no_request_advances_in_a_pause_and_all_end_after_it() -> None:
    async def check() -> None:
        driver = start_driver()
        running = submit(driver, "running", 41)
        await asyncio.sleep(2.5 * STEP_SECONDS)
        start_time = driver.now()
        await driver.pause()
        assert driver.now() - start_time == pytest.approx(STEP_SECONDS / 2, abs=1e-5)
        generated = running.request.generated_tokens
        assert generated == 1 + 2 * 4
        waiting = submit(driver, "waiting", 1)
        await asyncio.sleep(5.0)
        driver.advance_to_now()
        assert (running.request.generated_tokens, waiting.request.generated_tokens) == (generated, 0)
        driver.resume()
        resume_time = driver.now()
        await wait_for_end(waiting)
        await wait_for_end(running)
        assert waiting.request.first_token_time - resume_time == pytest.approx(2 * STEP_SECONDS, abs=1e-5)
        assert running.request.last_token_time - resume_time == pytest.approx(8 * STEP_SECONDS, abs=1e-5)
        # The pause is in one interval between two tokens.
        assert driver.replica.counters.inter_token_latency.total == pytest.approx(5.0 + 10 * STEP_SECONDS, abs=1e-4)

    run_virtually(check())


def test_a_request_that_comes_to_a_paused_idle_engine_begins_when_it_is_resumed() -> None:
    async def check() -> None:
        driver = start_driver()
        await driver.pause()
        handle = submit(driver, "a", 5)
        await asyncio.sleep(3.0)
        assert handle.request.generated_tokens == 0
        driver.resume()
        resume_time = driver.now()
        await wait_for_end(handle)
        assert handle.request.first_token_time - resume_time == pytest.approx(STEP_SECONDS, abs=1e-5)

    run_virtually(check())


def test_another_drafter_drafts_for_requests_in_progress() -> None:
    async def check() -> None:
        driver = start_driver()
        handle = submit(driver, "a", 200)
        await asyncio.sleep(10.5 * STEP_SECONDS)
        await driver.pause()
        counters = driver.replica.counters
        accepted, drafts = counters.spec_decode_num_accepted_tokens, counters.spec_decode_num_drafts
        assert accepted == 3 * drafts > 0
        driver.change_acceptance({"chat": NONE})
        driver.resume()
        await wait_for_end(handle)
        # The step that was prepared before the change still verifies what the previous drafter had drafted.
        assert counters.spec_decode_num_accepted_tokens == accepted + 3
        assert counters.spec_decode_num_drafts > drafts + 100

    run_virtually(check())
