"""Leader election, in virtual time, with a Lease that is stored as by the API server."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta, tzinfo
from typing import Any

import pytest

from aerie.controller import leader_election
from aerie.controller.kubernetes.client import ApiError, ObjectDict, ResourceKind
from aerie.controller.leader_election import LeaderElector, LeaseTiming

Run = Callable[[Coroutine[Any, Any, None]], None]
TIMING = LeaseTiming(lease_duration_seconds=12, retry_period_seconds=2, safety_margin_seconds=3, request_timeout_seconds=4)


class Server:
    """One Lease with optimistic locking.

    `down`: no call gets a response. `slow`: seconds per call. `blocked_until`: until that time of the loop calls wait, and one
    that is cancelled takes 1.5 s more to end, as on an overloaded machine.
    """

    def __init__(self) -> None:
        self.lease: ObjectDict | None = None
        self.version = 0
        self.down = False
        self.slow = 0.0
        self.blocked_until = 0.0

    async def _respond(self) -> None:
        if self.down:
            await asyncio.sleep(3600)
        try:
            await asyncio.sleep(max(self.slow, self.blocked_until - asyncio.get_running_loop().time()))
        except asyncio.CancelledError:
            if self.blocked_until:
                await asyncio.sleep(1.5)
            raise

    async def get(self, kind: ResourceKind, namespace: str, name: str) -> ObjectDict | None:
        assert (kind.kind, namespace, name) == ("Lease", "aerie", "operator")
        await self._respond()
        return copy.deepcopy(self.lease)

    async def create(self, desired: ObjectDict) -> ObjectDict:
        await self._respond()
        if self.lease is not None:
            raise ApiError(409, "AlreadyExists", "it is there")
        return self._store(desired)

    async def replace(self, desired: ObjectDict) -> ObjectDict:
        await self._respond()
        assert self.lease is not None
        if desired["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "it has changed")
        return self._store(desired)

    def _store(self, desired: ObjectDict) -> ObjectDict:
        self.version += 1
        self.lease = copy.deepcopy(desired)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.lease)


class Candidate:
    """An operator that leads whenever it may, and records whether it acts."""

    def __init__(self, server: Server, name: str) -> None:
        self.server = server
        self.elector = LeaderElector(server, "aerie", "operator", name, TIMING)
        self.acting = False
        self.terms = 0
        """How often it became the leader."""
        self.task = asyncio.create_task(self.lead())

    async def lead(self) -> None:
        while True:
            async with self.elector.hold_leadership() as leadership_lost:
                self.acting = True
                self.terms += 1
                try:
                    await leadership_lost.wait()
                finally:
                    self.acting = False

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def test_one_candidate_leads_permanently(run: Run) -> None:
    async def work() -> None:
        server = Server()
        candidates = [Candidate(server, name) for name in ("a", "b", "c")]
        for _ in range(100):
            await asyncio.sleep(7)
            assert [c.acting for c in candidates] == [True, False, False]
        assert server.lease is not None
        assert server.lease["spec"]["leaseTransitions"] == 0
        for candidate in candidates:
            await candidate.stop()

    run(work())


def test_leader_that_stops_releases_the_lease(run: Run) -> None:
    async def work() -> None:
        server = Server()
        first, second = Candidate(server, "a"), Candidate(server, "b")
        await asyncio.sleep(10)
        await first.stop()
        started_at = asyncio.get_running_loop().time()
        while not second.acting:
            await asyncio.sleep(0.1)
        assert asyncio.get_running_loop().time() - started_at <= TIMING.retry_period_seconds + 1
        await second.stop()

    run(work())


def test_dead_leader_is_replaced_within_the_lease_and_a_retry(run: Run) -> None:
    async def work() -> None:
        server = Server()
        first = Candidate(server, "a")
        await asyncio.sleep(5)
        second = Candidate(server, "b")
        await asyncio.sleep(10)
        first.elector._lease_client = DEAD  # as after kill -9: the Lease is not released
        first.task.cancel()
        started_at = asyncio.get_running_loop().time()
        while not second.acting:
            await asyncio.sleep(0.1)
        assert (
            TIMING.lease_duration_seconds - TIMING.retry_period_seconds
            <= asyncio.get_running_loop().time() - started_at
            <= TIMING.lease_duration_seconds + 2 * TIMING.retry_period_seconds
        )
        assert server.lease is not None
        assert server.lease["spec"]["leaseTransitions"] == 1
        await second.stop()

    run(work())


class _DeadServer(Server):
    async def _respond(self) -> None:
        raise ApiError(None, "ClientError", "no answer")


DEAD = _DeadServer()


@pytest.mark.parametrize("slow", [0.0, 1.5, 2.5])
def test_two_never_act_together_when_one_is_cut_off(run: Run, slow: float) -> None:
    async def work() -> None:
        server = Server()
        server.slow = slow
        first, second = Candidate(server, "a"), Candidate(server, "b")
        await asyncio.sleep(20)
        assert first.acting != second.acting
        leader, other = (first, second) if first.acting else (second, first)
        cut = Server()
        cut.down = True
        leader.elector._lease_client = cut
        cut_at = asyncio.get_running_loop().time()
        stopped_at = 0.0
        while not other.acting:
            await asyncio.sleep(0.1)
            if not leader.acting and not stopped_at:
                stopped_at = asyncio.get_running_loop().time()
        assert 0 < stopped_at <= cut_at + TIMING.lease_duration_seconds - TIMING.safety_margin_seconds + 0.2
        assert asyncio.get_running_loop().time() - stopped_at >= TIMING.safety_margin_seconds - 0.2
        for candidate in (first, second):
            await candidate.stop()

    run(work())


def test_a_lease_taken_by_force_ends_the_leadership(run: Run) -> None:
    async def work() -> None:
        server = Server()
        first = Candidate(server, "a")
        await asyncio.sleep(5)
        assert server.lease is not None
        forced = copy.deepcopy(server.lease)
        forced["spec"]["holderIdentity"] = "somebody"
        server._store(forced)
        await asyncio.sleep(TIMING.retry_period_seconds + 0.1)
        assert not first.acting
        await first.stop()
        assert server.lease["spec"]["holderIdentity"] == "somebody", "the Lease of another holder is not released"

    run(work())


@pytest.mark.parametrize("slow", [2.0, 3.0])
def test_slow_api_server_costs_no_leader_the_lease(run: Run, slow: float) -> None:
    async def work() -> None:
        server = Server()
        server.slow = slow
        first, second = Candidate(server, "a"), Candidate(server, "b")
        await asyncio.sleep(30)
        leader, other = (first, second) if first.acting else (second, first)
        for _ in range(300):
            await asyncio.sleep(1)
            assert leader.acting
            assert not other.acting
        for candidate in (first, second):
            await candidate.stop()

    run(work())


@pytest.mark.parametrize("seconds_after_renewal", [0.1, 0.6, 1.1, 1.6])
def test_server_outage_of_six_seconds_costs_no_leader_the_lease(run: Run, seconds_after_renewal: float) -> None:
    async def work() -> None:
        server = Server()
        leader = Candidate(server, "a")
        await asyncio.sleep(10)
        version = server.version
        while server.version == version:  # a renewal
            await asyncio.sleep(0.01)
        await asyncio.sleep(seconds_after_renewal)
        server.blocked_until = asyncio.get_running_loop().time() + 6
        await asyncio.sleep(30)
        assert (leader.acting, leader.terms) == (True, 1)
        await leader.stop()

    run(work())


def test_a_jump_of_the_wall_clock_changes_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    days = itertools.cycle([0, 400, -400])

    class Jumping(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return datetime(2026, 1, 1, tzinfo=tz) + timedelta(days=next(days))

    monkeypatch.setattr(leader_election, "datetime", Jumping)

    async def work() -> None:
        server = Server()
        first, second = Candidate(server, "a"), Candidate(server, "b")
        for _ in range(100):
            await asyncio.sleep(1)
            assert (first.acting, second.acting) == (True, False)
        assert server.lease is not None
        assert server.lease["spec"]["renewTime"][:4] in ("2024", "2027", "2026")
        for candidate in (first, second):
            await candidate.stop()

    run(work())


def test_leader_detects_an_expired_lease_by_its_own_clock(run: Run) -> None:
    async def work() -> None:
        server = Server()
        elector = LeaderElector(server, "aerie", "operator", "one", TIMING)
        assert not elector.is_leader()
        async with elector.hold_leadership() as leadership_lost:
            assert elector.is_leader()
            await asyncio.sleep(100)
            assert elector.is_leader(), "it is renewed"
            server.down = True
            loop = asyncio.get_running_loop()
            started_at = loop.time()
            while elector.is_leader():
                await asyncio.sleep(0.1)
            assert loop.time() - started_at <= TIMING.lease_duration_seconds - TIMING.safety_margin_seconds + 0.2
            await asyncio.sleep(TIMING.request_timeout_seconds)
            assert leadership_lost.is_set()

    run(work())
