"""The part of a plan about drafters: followed once the status with its decision is stored, and observed by the next plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from aerie.controller import reconciler as reconciler_module
from aerie.controller.kubernetes.client import ApiError
from aerie.controller.work_queue import NamespacedName
from aerie.engine.drafter_endpoint.calls import DrafterCall, DrafterFiles, LoadDrafter, RenewLease, ReturnToOwn
from aerie.rollout.facts.drafters import DrafterObservation
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.plan import PodDrafterPlan
from aerie.rollout.reconcile import build_reconcile_plan
from tests.unit.controller.conftest import Run
from tests.unit.controller.operator_harness import CHAT, Operator, start_settled_operator

LOAD = LoadDrafter(DrafterFiles({"config.json": "0" * 64, "model.safetensors": "1" * 64}), 60.0)


class Recorder:
    """Plans with one call, which also changes the status, and a record of what is followed."""

    def __init__(self, operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
        self.call: DrafterCall | None = None
        self.phase: str | None = "Ready"
        """Phase that is decided; None for the one that is observed."""
        self.phases: list[str | None] = []
        """Phases that were observed."""
        self.observed: list[Any] = []
        self.followed: list[tuple[DrafterCall | None, str]] = []
        """Call, and the phase in the stored status when the plan was followed."""
        executor, server = operator.reconciler.drafter_executor, operator.server
        follow = executor.follow

        def record_follow(key: NamespacedName, snapshot: Snapshot, plans: Iterable[PodDrafterPlan]) -> None:
            (plan,) = plans
            self.followed.append((plan.call, server.objects["SpeculativeDeployment", "chat"]["status"]["phase"]))
            follow(key, snapshot, (plan,))

        def build_plan(snapshot: Snapshot, *arguments: Any) -> Any:
            self.observed.append(snapshot.engines.drafters)
            plan = build_reconcile_plan(snapshot, *arguments)
            assert snapshot.resource.status is not None
            self.phases.append(snapshot.resource.status.phase)
            status = plan.status.model_copy(update={"phase": self.phase or snapshot.resource.status.phase})
            return replace(plan, drafters=(PodDrafterPlan("chat-r1-0", self.call),), status=status)

        monkeypatch.setattr(executor, "follow", record_follow)
        monkeypatch.setattr(reconciler_module, "build_reconcile_plan", build_plan)


def test_calls_that_follow_from_the_stored_status_need_no_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        recorder, server = Recorder(operator, monkeypatch), operator.server
        server.calls.clear()
        calls: list[DrafterCall | None] = [None, LOAD, LOAD, RenewLease(LOAD.drafter.digest, 60.0), ReturnToOwn(), None]
        for call in calls:
            recorder.call = call
            await operator.reconciler.reconcile(CHAT)
            assert recorder.followed[-1][0] == call
        assert server.calls == []

    run(work())


def test_first_calls_of_a_leader_are_decided_live(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first list may be older than the last status of the leader before."""

    async def work() -> None:
        server = (await start_settled_operator()).server
        operator = Operator(server)
        await operator.list()
        document = server.objects["SpeculativeDeployment", "chat"]
        await server.replace_status(document, {**document["status"], "phase": "Analyzing"})
        recorder = Recorder(operator, monkeypatch)
        recorder.phase = None
        server.calls.clear()
        await operator.reconciler.reconcile(CHAT)
        assert (server.calls, recorder.phases) == ([], ["Ready"]), "without calls, the cache is enough"
        recorder.call = LOAD
        for _ in range(2):
            await operator.reconciler.reconcile(CHAT)
        assert recorder.phases == ["Ready", "Ready", "Analyzing", "Analyzing"]
        assert server.calls.count("GET SpeculativeDeployment chat") == 1

    run(work())


def test_late_event_brings_no_old_decision_back(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        recorder, server = Recorder(operator, monkeypatch), operator.server
        old = server.objects["SpeculativeDeployment", "chat"]
        recorder.call, recorder.phase = LOAD, "Promoting"
        await operator.reconciler.reconcile(CHAT)
        recorder.phase = None
        recorder.phases.clear()
        operator.cache.put(old)
        await operator.reconciler.reconcile(CHAT)
        assert recorder.phases == ["Promoting"]

    run(work())


def test_change_is_sent_after_the_status_with_its_decision(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        recorder, server = Recorder(operator, monkeypatch), operator.server
        recorder.call, recorder.phase = LOAD, "Promoting"

        async def fail(*_: Any) -> Any:
            raise ApiError(409, "Conflict", "it has changed")

        with monkeypatch.context() as context:
            context.setattr(server, "replace_status", fail)
            with pytest.raises(ApiError):
                await operator.reconciler.reconcile(CHAT)
        assert recorder.followed == []
        await operator.reconciler.reconcile(CHAT)
        assert recorder.followed == [(LOAD, "Promoting")]

    run(work())


def test_observations_reach_the_decision(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        recorder = Recorder(operator, monkeypatch)
        observations = {"chat-r1-0": DrafterObservation(failed_reads=3)}
        monkeypatch.setattr(operator.reconciler.drafter_executor, "observations", lambda _: observations)
        await operator.reconciler.reconcile(CHAT)
        assert recorder.observed == [observations]

    run(work())


def test_deleted_resource_is_forgotten(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        operator = await start_settled_operator()
        forgotten: list[NamespacedName] = []
        monkeypatch.setattr(operator.reconciler.drafter_executor, "forget", forgotten.append)
        operator.server.remove("SpeculativeDeployment", "chat")
        operator.deliver_events()
        await operator.reconciler.reconcile(CHAT)
        assert forgotten == [CHAT]

    run(work())
