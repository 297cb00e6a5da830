"""All calls of the endpoint in any order, with failures at any point: what always holds.

The machine keeps no model of the endpoint's rules. It compares the ranks with what the endpoint reports, a rejected call with the
state before it, and the end of every history with the own drafter.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aerie_vllm.cache_salt import compute_salt
from aerie_vllm.worker_protocol import DESCRIBE, STAGE, SWAP
from tests.unit.plugin.conftest import Answer, Client, PluginLoop, Server
from tests.unit.plugin.fake_engine import make_drafter

LEASE_SECONDS = 20.0
ISOLATED = "isolated"
"""Turn of the changes that must be made in isolation only."""
NAMES = ("own", "better", "worse", "other")
OWN = make_drafter("own")
DIGESTS = {name: make_drafter(name)["digest"] for name in NAMES}
FAULTS = ("is_paused", "pause", "resume", "label", "swap:0", "swap:1", "back:0", "back:1", SWAP, STAGE, DESCRIBE)
fault_strategy = st.sampled_from((None, None, None, *FAULTS))
"""What fails in a call, once: a change in which both the swap and the return fail is broken, which the test of swaps has."""
name_strategy = st.sampled_from(NAMES)
lease_strategy = st.sampled_from((None, 5.0, LEASE_SECONDS))
delay_strategy = st.sampled_from((0.0, 0.3, 0.9, 1.0, 1.005, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.1))
"""Seconds into a change: staging takes 1 s, its swap 0.05 s."""


class EndpointMachine(RuleBasedStateMachine):
    """A server, its callers and its faults."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.server = Server(folder, self.stack.enter_context(pytest.MonkeyPatch.context()))
        self.runner = self.stack.enter_context(asyncio.Runner(loop_factory=PluginLoop))
        self.engine = self.server.engine
        self.started = self.server.started()
        self.client: Client = self.run(self.started.__aenter__())
        self.own = DIGESTS["own"]
        self.pending: list[asyncio.Future[Answer]] = []

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    async def read_state(self) -> dict[str, Any]:
        """Return what a rejected call must leave as it is."""
        body = (await self.client.get()).body
        return {
            "ranks": self.engine.loaded_digests(),
            "loaded": body["loaded"],
            "own": body["own"],
            "lease": body["lease"] and body["lease"]["digest"],
            "window": body["windows"][-1]["number"] if body["windows"] else 0,
        }

    def has_pending_calls(self) -> bool:
        self.pending = [call for call in self.pending if not call.done()]
        return bool(self.pending)

    async def check_call(self, call: Coroutine[Any, Any, Answer], promotes: str | None = None) -> Answer:
        """Make a call, and compare the state if it is rejected or fails while nothing else happens."""
        before, swaps = await self.read_state(), (await self.client.get()).body["swaps"]
        alone = not self.has_pending_calls()
        answer = await call
        if answer.status == 200 and promotes is not None:
            self.own = promotes
        elif answer.status != 200 and alone and answer.body["reason"] != "Broken":
            body = (await self.client.get()).body
            # A lease may have ended meanwhile, which is the switch's doing.
            if body["swaps"] == swaps:
                assert await self.read_state() == before
        return answer

    # ------------------------------------------------------------------------------------------------------------ calls
    @rule(name=name_strategy, lease=lease_strategy, fault=fault_strategy)
    def change(self, name: str, lease: float | None, fault: str | None) -> None:
        self.fail(fault)
        self.run(self.check_call(self.client.put(name, lease), DIGESTS[name] if lease is None else None))

    @rule(name=name_strategy, lease=st.sampled_from((5.0, LEASE_SECONDS)), fault=fault_strategy)
    def change_in_isolation(self, name: str, lease: float, fault: str | None) -> None:
        self.fail(fault)
        self.run(self.check_call(self.client.put(name, lease, turn=ISOLATED, isolated=True)))

    @rule(lease=st.sampled_from((1.0, 5.0, LEASE_SECONDS)))
    def isolate(self, lease: float) -> None:
        self.run(self.check_call(self.client.isolate(lease)))

    @rule(name=name_strategy, lease=lease_strategy, expected=name_strategy, folder=st.booleans())
    def change_what_is_loaded(self, name: str, lease: float | None, expected: str, folder: bool) -> None:
        fields: dict[str, object] = {"expected_digest": DIGESTS[expected]}
        if not folder:
            fields["folder"] = None
        self.run(self.check_call(self.client.put(name, lease, **fields), DIGESTS[name] if lease is None else None))

    @rule(name=name_strategy)
    def renew(self, name: str) -> None:
        self.run(self.check_call(self.client.renew(DIGESTS[name], LEASE_SECONDS)))

    @rule(fault=fault_strategy)
    def return_to_own(self, fault: str | None) -> None:
        self.fail(fault)
        answer = self.run(self.check_call(self.client.delete()))
        if answer.status == 200:
            assert self.engine.loaded_digests() == {self.own}
            assert answer.body["isolation"] is None

    @rule(first=name_strategy, second=name_strategy, seconds=delay_strategy, returns=st.booleans())
    def change_twice(self, first: str, second: str, seconds: float, returns: bool) -> None:
        async def work() -> None:
            change = asyncio.ensure_future(self.client.put(first, LEASE_SECONDS))
            await asyncio.sleep(seconds)
            other = await (self.client.delete() if returns else self.client.put(second, LEASE_SECONDS))
            if returns and other.status == 200:
                assert self.engine.loaded_digests() == {self.own}
            await change

        self.run(work())

    @rule(name=name_strategy, seconds=delay_strategy, lease=st.sampled_from((5.0, LEASE_SECONDS)))
    def disconnect(self, name: str, seconds: float, lease: float) -> None:
        async def work() -> None:
            change = asyncio.ensure_future(self.client.put(name, lease))
            await asyncio.sleep(seconds)
            change.cancel()
            await asyncio.wait((change,))

        self.run(work())

    @precondition(lambda self: not self.has_pending_calls())
    @rule(name=name_strategy)
    def change_on_a_hanging_disk(self, name: str) -> None:
        async def work() -> None:
            self.engine.hanging_disk = True
            self.pending.append(asyncio.ensure_future(self.client.put(name, LEASE_SECONDS)))
            await asyncio.sleep(1)

        self.run(work())

    @rule(name=name_strategy, fault=fault_strategy)
    def prepare(self, name: str, fault: str | None) -> None:
        async def work() -> None:
            before = await self.read_state()
            answer = await self.client.prepare(name)
            assert answer.status in (200, 202) or answer.body["reason"] == "Broken"
            assert await self.read_state() == before

        self.fail(fault)
        self.run(work())

    @rule()
    def repair_the_disk(self) -> None:
        self.engine.hanging_disk = False

    # ----------------------------------------------------------------------------------------------------------- faults
    def fail(self, fault: str | None) -> None:
        """Let the next call of this name fail, and nothing else."""
        self.engine.failures.clear()
        if fault is not None:
            self.engine.failures[fault] = 1

    @rule(name=name_strategy, lease=lease_strategy)
    def change_to_a_rejected_drafter(self, name: str, lease: float | None) -> None:
        self.engine.rejections[DIGESTS[name]] = {"reason": "WrongShape", "message": "fc.weight has another shape."}
        # It is not read, and so not rejected, where the ranks hold it.
        self.run(self.check_call(self.client.put(name, lease), DIGESTS[name] if lease is None else None))
        self.engine.rejections.clear()

    @rule(fault=fault_strategy, seconds=st.sampled_from((5.0, LEASE_SECONDS)))
    def let_the_lease_end(self, fault: str | None, seconds: float) -> None:
        self.fail(fault)
        self.run(asyncio.sleep(seconds + 3.0))

    @rule(seconds=st.sampled_from((0.01, 0.5, 4.99, 5.0, 5.5, LEASE_SECONDS, 100.0)))
    def wait(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    # -------------------------------------------------------------------------------------------------- what always holds
    @invariant()
    def the_reported_drafter_is_loaded(self) -> None:
        async def work() -> None:
            while (body := (await self.client.get()).body)["change"] is not None and body["change"]["phase"] == "Swapping":
                await asyncio.sleep(0.01)
            if body["problem"] is not None:
                assert body["problem"]["reason"] in ("Broken", "Isolated")
                assert (body["loaded"] is None) == (body["problem"]["reason"] == "Broken")
            if body["loaded"] is not None:
                assert self.engine.loaded_digests() == {body["loaded"]["digest"]}
                assert (body["loaded"] == body["own"]) == (body["lease"] is None)
                assert body["windows"][-1]["digest"] == body["loaded"]["digest"]
                if body["windows"][-1]["turn"] == ISOLATED and body["loaded"] != body["own"]:
                    assert body["problem"]["reason"] == "Isolated", "users reach a drafter that they must not reach"
                assert body["own"]["digest"] == self.own
                salt = compute_salt("user", body["loaded"]["digest"])
                assert await self.engine.send_request("user") == ("user" if body["loaded"] == OWN else salt)
            assert not self.engine.paused
            assert self.engine.violations == []

        self.run(work())

    def teardown(self) -> None:
        async def work() -> None:
            self.engine.failures.clear()
            # The longest lease, a change that began meanwhile with its own lease, and the longest back-off.
            await asyncio.sleep(2 * LEASE_SECONDS + 40)
            broken = (await self.client.get()).body["loaded"] is None
            assert broken or self.engine.loaded_digests() == {self.own}
            self.engine.hanging_disk = False
            await asyncio.sleep(10)
            for call in self.pending:
                call.cancel()
            await self.started.__aexit__(None, None, None)

        try:
            self.run(work())
        finally:
            self.stack.close()


EndpointMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestEndpoint = pytest.mark.slow(EndpointMachine.TestCase)
