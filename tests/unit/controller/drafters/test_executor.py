"""Plans carried out in pods with the plugin's own endpoint: what is sent, when, and what is observed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import httpx
import pytest

from aerie.controller.clock import Clock
from aerie.controller.drafters import executor as executor_module
from aerie.controller.drafters.executor import DrafterExecutor
from aerie.controller.scraping.http_client import LimitedHttpTransport
from aerie.controller.tokens import ResourceTokens
from aerie.controller.work_queue import Backoff, NamespacedName
from aerie.engine.drafter_endpoint.calls import DrafterCall, DrafterSource, PrepareDrafter, RenewLease, ReturnToOwn
from aerie.engine.drafter_endpoint.response import ChangeDurations
from aerie.engine.drafter_endpoint.state import WindowCursor
from aerie.rollout.facts.drafters import MAX_FAILED_READS, DrafterObservation
from aerie.rollout.facts.snapshot import Snapshot
from aerie.rollout.plan import PodDrafterPlan, ScheduledCall
from tests.snapshots import build_snapshot, replace_facts
from tests.unit.controller.drafters.served_plugin import KEY, Drafters, PluginPod
from tests.unit.controller.scraped import deployment, pod, resource
from tests.unit.controller.test_tokens import CHAT, CHAT_SECRET, KEY_SECRET, SecretServer, forbidden
from tests.unit.plugin.fake_engine import make_drafter

pytestmark = pytest.mark.usefixtures("long_timeouts")
OWN, BETTER = (make_drafter(name)["digest"] for name in ("own", "better"))


def pod_name(number: int) -> str:
    return f"chat-r1-hash-{number}"


def snapshot_of(ports: Sequence[int], interval: str = "1s", **changes: Any) -> Snapshot:
    """Return the snapshot of the resource with a pod at each port."""
    pods = [
        pod(
            number,
            address="127.0.0.1",
            spec__containers=[{"name": "engine", "ports": [{"name": "http", "containerPort": port}]}],
            **changes,
        )
        for number, port in enumerate(ports)
    ]
    return build_snapshot(resource(interval=interval), [deployment()], pods=tuple(pods))


class Harness:
    """An executor, its resource's pods, and the notifications."""

    def __init__(self, pods: Sequence[PluginPod], transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.pods = pods
        self.cluster = SecretServer(KEY)
        self.is_leader = True
        self.notifications: list[NamespacedName] = []
        self.recorded: Counter[tuple[str, str]] = Counter()
        self.executor = DrafterExecutor(
            ResourceTokens(self.cluster, KEY_SECRET),
            self.notifications.append,
            lambda: self.is_leader,
            Clock(),
            transport,
            lambda call, outcome: self.recorded.update([(call, outcome)]),
        )
        self.snapshot = snapshot_of([served.port for served in pods])

    def plan(
        self, *calls: DrafterCall | None, cursor: WindowCursor | None = None, next_call: ScheduledCall | None = None
    ) -> None:
        """Follow the pods, with a call for each, by a plan that is based on what is observed now."""
        self.plan_from(self.executor.observations(CHAT), *calls, cursor=cursor, next_call=next_call)

    def plan_from(
        self,
        observations: Mapping[str, DrafterObservation],
        *calls: DrafterCall | None,
        cursor: WindowCursor | None = None,
        next_call: ScheduledCall | None = None,
    ) -> None:
        """Follow the pods by a plan that is based on these observations."""
        plans = [PodDrafterPlan(pod_name(number), call, cursor, next_call) for number, call in enumerate(calls)]
        self.executor.follow(CHAT, replace_facts(self.snapshot, drafters=observations), plans)

    def observation(self, number: int = 0) -> DrafterObservation:
        return self.executor.observations(CHAT)[pod_name(number)]

    def loaded(self, number: int = 0) -> str | None:
        """Return the digest of the drafter that is observed as loaded."""
        state = self.observation(number).state
        return None if state is None or state.loaded is None else state.loaded.digest

    async def wait_for(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(300):  # a hang's end, not a measure: forty pods take 25 s on busy cores
            while not condition():
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def harness_with(pod_count: int = 1) -> AsyncIterator[Harness]:
    async with contextlib.AsyncExitStack() as stack:
        pods = [await stack.enter_async_context(PluginPod().served()) for _ in range(pod_count)]
        harness = Harness(pods)
        running = asyncio.create_task(harness.executor.run())
        try:
            yield harness
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def with_pods(test: Callable[[Harness], Awaitable[None]], pod_count: int = 1) -> None:
    async def run() -> None:
        async with harness_with(pod_count) as harness:
            await test(harness)

    asyncio.run(run())


def test_trial_by_plans(drafters: Drafters) -> None:
    async def test(harness: Harness) -> None:
        harness.plan(None)
        await harness.wait_for(lambda: harness.loaded() == OWN)
        harness.plan(drafters.load("better", turn="1"))
        await harness.wait_for(lambda: harness.loaded() == BETTER)
        result = harness.observation().result
        assert result is not None
        assert isinstance(result.outcome, ChangeDurations)
        assert (result.problem, result.attempts, harness.observation().call) == (None, 1, None)
        harness.plan(RenewLease(BETTER, 1000.0))
        await harness.wait_for(lambda: harness.observation().result not in (None, result))
        harness.plan(ReturnToOwn())
        await harness.wait_for(lambda: harness.loaded() == OWN)
        assert harness.notifications
        (served,) = harness.pods
        assert served.max_concurrent == 1
        assert Counter(method for method, _ in served.requests if method != "GET") == {"PUT": 1, "POST": 1, "DELETE": 1}
        assert harness.recorded == {("load", "done"): 1, ("renew", "done"): 1, ("return", "done"): 1}

    with_pods(test)


def test_preparation_is_read_until_its_end_and_reported(drafters: Drafters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "BUSY_READ_DELAY_SECONDS", 0.05)

    async def test(harness: Harness) -> None:
        harness.snapshot = replace(harness.snapshot, resource=resource(interval="60s"))
        harness.pods[0].sources.seconds = 0.2
        folder = drafters.load("better").drafter.folder
        harness.plan(PrepareDrafter(DrafterSource(folder=folder)))
        phases: list[str] = []

        def is_prepared() -> bool:
            state = harness.observation().state
            phases.append(state.prepared.phase if state is not None and state.prepared is not None else "")
            return phases[-1] == "Ready"

        await harness.wait_for(is_prepared)
        assert "Running" in phases
        assert Counter(method for method, _ in harness.pods[0].requests)["POST"] == 1
        assert len(harness.notifications) >= 2, "the begin and the end"

    with_pods(test)


def test_plan_that_is_repeated_is_sent_once(drafters: Drafters) -> None:
    async def test(harness: Harness) -> None:
        call = drafters.load("better", turn="1")
        while harness.observation().result is None if harness.executor.observations(CHAT) else True:
            harness.plan(call)
            await asyncio.sleep(0.005)
        assert Counter(method for method, _ in harness.pods[0].requests)["PUT"] == 1

    with_pods(test)


def test_call_that_succeeded_after_the_plans_snapshot_is_not_sent_again(drafters: Drafters) -> None:
    async def test(harness: Harness) -> None:
        call = drafters.load("better", turn="1", expected_digest=OWN)  # a repetition is rejected: better is loaded then
        harness.plan(None)
        await harness.wait_for(lambda: harness.loaded() == OWN)
        earlier = harness.executor.observations(CHAT)
        harness.plan(call)
        await harness.wait_for(lambda: harness.loaded() == BETTER and harness.observation().call is None)
        read_at = harness.observation().state_read_at
        harness.plan_from(earlier, call)
        await harness.wait_for(lambda: harness.observation().state_read_at != read_at)  # a call is sent before the read
        assert harness.recorded == {("load", "done"): 1}
        harness.plan(ReturnToOwn())
        await harness.wait_for(lambda: harness.loaded() == OWN)
        harness.plan(call)  # based on an observation with its success: the pod needs it again
        await harness.wait_for(lambda: harness.recorded[("load", "done")] == 2)

    with_pods(test)


def test_call_that_failed_after_the_plans_snapshot_is_sent_again(drafters: Drafters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "CALL_BACKOFF", Backoff(0.05, 0.05))

    async def test(harness: Harness) -> None:
        harness.pods[0].engine.failures["swap:0"] = 1
        call = drafters.load("better")
        harness.plan(None)
        await harness.wait_for(lambda: harness.loaded() == OWN)
        earlier = harness.executor.observations(CHAT)
        harness.plan(call)
        await harness.wait_for(lambda: harness.recorded[("load", "failed")] == 1 and harness.observation().call is None)
        harness.plan_from(earlier, call)
        await harness.wait_for(lambda: harness.loaded() == BETTER)

    with_pods(test)


def test_outcomes_are_recorded(drafters: Drafters) -> None:
    async def test(harness: Harness) -> None:
        harness.plan(RenewLease(BETTER, 1000.0))
        await harness.wait_for(lambda: harness.recorded == {("renew", "rejected"): 1})
        harness.pods[0].engine.failures["swap:0"] = 1
        harness.plan(drafters.load("better"))
        await harness.wait_for(lambda: harness.recorded[("load", "failed")] == 1)

    with_pods(test)


def test_next_call_is_sent_at_its_time_without_another_plan(drafters: Drafters) -> None:
    async def test(harness: Harness) -> None:
        due_at = Clock().now() + timedelta(seconds=0.3)
        harness.plan(drafters.load("better", turn="1"), next_call=ScheduledCall(drafters.load("own", turn="2"), due_at))
        await harness.wait_for(lambda: harness.loaded() == BETTER)
        await harness.wait_for(lambda: harness.loaded() == OWN)
        assert Clock().now() >= due_at
        assert Counter(method for method, _ in harness.pods[0].requests)["PUT"] == 2

    with_pods(test)


def test_next_call_that_is_due_goes_before_the_present_one(drafters: Drafters) -> None:
    async def test(harness: Harness) -> None:
        following = ScheduledCall(drafters.load("better", turn="2"), Clock().now())
        for _ in range(3):  # until it is observed, every plan repeats it
            harness.plan(drafters.load("own", turn="1"), next_call=following)
        await harness.wait_for(lambda: harness.loaded() == BETTER)
        assert Counter(method for method, _ in harness.pods[0].requests)["PUT"] == 1

    with_pods(test)


def test_next_call_is_not_sent_after_a_plan_without_it(drafters: Drafters) -> None:
    async def test(harness: Harness) -> None:
        due_at = Clock().now() + timedelta(seconds=0.3)
        harness.plan(None, next_call=ScheduledCall(drafters.load("better", turn="2"), due_at))
        harness.plan(None)
        await harness.wait_for(lambda: Clock().now() > due_at + timedelta(seconds=0.1))
        assert "PUT" not in {method for method, _ in harness.pods[0].requests}

    with_pods(test)


@pytest.mark.slow
def test_forty_pods_return_at_once(drafters: Drafters) -> None:
    async def test(harness: Harness) -> None:
        harness.plan(*[drafters.load("better")] * 40)
        await harness.wait_for(lambda: all(harness.loaded(number) == BETTER for number in range(40)))
        harness.plan(*[ReturnToOwn()] * 40)
        await harness.wait_for(lambda: all(harness.loaded(number) == OWN for number in range(40)))
        assert all(served.max_concurrent == 1 for served in harness.pods)
        assert harness.cluster.calls == [("GET", KEY_SECRET), ("POST", CHAT_SECRET)]

    with_pods(test, 40)


@pytest.mark.usefixtures("drafters")
def test_measured_pod_is_read_soon_however_long_the_interval_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "MEASUREMENT_READ_DELAY_SECONDS", 0.05)

    async def test(harness: Harness) -> None:
        harness.snapshot = snapshot_of([harness.pods[0].port], interval="5m")
        harness.plan(None)
        await harness.wait_for(lambda: harness.observation().state is not None)
        first_read_at = harness.observation().state_read_at
        assert (harness.observation().earlier_read, harness.observation().prepared_at) == (None, None)
        harness.executor.follow(CHAT, harness.snapshot, [PodDrafterPlan(pod_name(0), is_measured=True)])
        await harness.wait_for(lambda: len(harness.pods[0].requests) >= 3)
        earlier_read = harness.observation().earlier_read
        assert earlier_read is not None
        assert earlier_read.read_at == first_read_at

    with_pods(test)


def test_return_does_not_wait_for_a_load(drafters: Drafters) -> None:
    async def test(harness: Harness) -> None:
        (served,) = harness.pods
        served.engine.hanging_disk = True
        harness.plan(drafters.load("better"))
        await harness.wait_for(lambda: ("PUT", "/aerie/drafter") in served.requests)
        assert harness.observation().call is not None
        assert harness.observation().call_started_at is not None, "no state is read while it lasts"
        harness.plan(ReturnToOwn())
        await harness.wait_for(lambda: harness.observation().result is not None)
        result = harness.observation().result
        assert result is not None
        assert (result.call, result.problem) == (ReturnToOwn(), None)
        await harness.wait_for(lambda: harness.observation().state is not None)
        await harness.wait_for(lambda: harness.observation().call_started_at is None)
        assert served.max_concurrent == 1, "the load's connection was closed first"
        served.engine.hanging_disk = False
        harness.plan(drafters.load("better"))
        await harness.wait_for(lambda: harness.loaded() == BETTER)

    with_pods(test)


def test_load_that_no_plan_has_any_more_is_not_sent(drafters: Drafters) -> None:
    async def test(harness: Harness) -> None:
        harness.plan(drafters.load("better"))
        harness.plan(None)
        await harness.wait_for(lambda: harness.observation().state is not None)
        await asyncio.sleep(0.1)
        assert {method for method, _ in harness.pods[0].requests} == {"GET"}

    with_pods(test)


def test_rejection_is_observed_and_repeated_with_delays(drafters: Drafters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "CALL_BACKOFF", Backoff(0.2, 10.0))

    async def test(harness: Harness) -> None:
        call = drafters.load("better", expected_digest=BETTER)

        def has_attempts(count: int) -> bool:
            harness.plan(call)
            result = harness.observation().result
            return result is not None and result.attempts == count

        started = asyncio.get_running_loop().time()
        await harness.wait_for(lambda: has_attempts(3))
        assert asyncio.get_running_loop().time() - started > 0.6, "0.2 and 0.4 s"
        result = harness.observation().result
        assert result is not None
        assert result.problem is not None
        assert (result.problem.reason, result.problem.is_rejection) == ("LoadedChanged", True)
        assert harness.loaded() == OWN
        harness.plan(drafters.load("better"))
        await harness.wait_for(lambda: harness.loaded() == BETTER)
        result = harness.observation().result
        assert result is not None
        assert result.attempts == 1

    with_pods(test)


def test_operator_without_its_lease_reads_and_changes_nothing(drafters: Drafters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "CALL_BACKOFF", Backoff(0.05, 0.05))

    async def test(harness: Harness) -> None:
        harness.is_leader = False
        harness.plan(drafters.load("better"))
        await harness.wait_for(lambda: harness.loaded() == OWN)
        await asyncio.sleep(0.3)
        assert {method for method, _ in harness.pods[0].requests} == {"GET"}
        assert len(harness.pods[0].requests) < 12
        harness.is_leader = True
        await harness.wait_for(lambda: harness.loaded() == BETTER)

    with_pods(test)


def test_pods_that_are_not_the_resources_get_nothing(drafters: Drafters) -> None:
    async def test(harness: Harness) -> None:
        port = harness.pods[0].port
        others = [
            snapshot_of([port], metadata__ownerReferences=[]),
            snapshot_of([port], metadata__deletionTimestamp="2026-01-01T00:00:00Z"),
            snapshot_of([port], status__containerStatuses=[{"name": "engine", "started": False}]),
            replace(snapshot_of([port]), resource=resource("other")),
        ]
        for snapshot in others:
            harness.snapshot = snapshot
            harness.plan(drafters.load("better"))
            assert harness.executor.observations(CHAT) == {}
        await asyncio.sleep(0.1)
        assert harness.pods[0].requests == []

    with_pods(test)


def test_pod_without_a_token_gets_nothing(drafters: Drafters) -> None:
    async def test(harness: Harness) -> None:
        harness.cluster.errors["POST", CHAT_SECRET] = forbidden(CHAT_SECRET.name)
        harness.plan(drafters.load("better"))
        await harness.wait_for(lambda: harness.observation().problem is not None)
        problem = harness.observation().problem
        assert problem is not None
        assert (problem.reason, harness.observation().failed_reads) == ("NoToken", 1)
        await asyncio.sleep(0.2)
        assert harness.pods[0].requests == []
        assert harness.cluster.calls == [("GET", KEY_SECRET), ("POST", CHAT_SECRET)]

    with_pods(test)


def test_third_failed_read_causes_a_reconcile_and_later_ones_none(drafters: Drafters, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollout waits for such a pod no longer, and nothing else would tell it before its deadline."""
    del drafters
    monkeypatch.setattr(executor_module, "MAX_READ_DELAY_SECONDS", 0.0)

    async def test(harness: Harness) -> None:
        harness.cluster.errors["POST", CHAT_SECRET] = forbidden(CHAT_SECRET.name)
        harness.plan(None)
        await harness.wait_for(lambda: harness.observation().failed_reads >= MAX_FAILED_READS + 1)
        assert len(harness.notifications) == MAX_FAILED_READS

    with_pods(test)


def test_pod_with_another_token_names_the_secret(drafters: Drafters) -> None:
    async def test(harness: Harness) -> None:
        drafters.write_token("f" * 64)
        harness.plan(drafters.load("better"))
        await harness.wait_for(lambda: harness.observation().problem and harness.observation().result)
        problem, result = harness.observation().problem, harness.observation().result
        assert problem is not None
        assert result is not None
        assert (problem.reason, problem.status) == ("Unauthorized", 401)
        assert problem == result.problem
        assert CHAT_SECRET.name in problem.message

    with_pods(test)


def test_restarted_engine_has_no_observation(drafters: Drafters) -> None:
    del drafters

    async def test(harness: Harness) -> None:
        harness.plan(None)
        await harness.wait_for(lambda: harness.loaded() == OWN)
        statuses = [{"name": "engine", "started": True, "containerID": "c2", "restartCount": 1}]
        harness.snapshot = snapshot_of([harness.pods[0].port], status__containerStatuses=statuses)
        harness.plan(None)
        assert harness.observation() == DrafterObservation()
        await harness.wait_for(lambda: harness.loaded() == OWN)

    with_pods(test)


def test_only_news_cause_a_reconcile(drafters: Drafters) -> None:
    async def test(harness: Harness) -> None:
        harness.plan(drafters.load("better"))
        await harness.wait_for(lambda: harness.loaded() == BETTER)
        await harness.wait_for(lambda: harness.notifications)
        harness.notifications.clear()
        reads = len(harness.pods[0].requests)
        harness.pods[0].engine.serve_steps(1000)
        await harness.wait_for(lambda: len(harness.pods[0].requests) >= reads + 2)
        assert harness.notifications == []

    with_pods(test)


def test_forgotten_resource_is_not_read_any_more(drafters: Drafters) -> None:
    del drafters

    async def test(harness: Harness) -> None:
        harness.plan(None)
        await harness.wait_for(lambda: harness.loaded() == OWN)
        harness.executor.forget(CHAT)
        assert harness.executor.observations(CHAT) == {}
        reads = len(harness.pods[0].requests)
        await asyncio.sleep(1.5)
        assert len(harness.pods[0].requests) == reads

    with_pods(test)


def test_cursor_selects_the_windows(drafters: Drafters) -> None:
    async def test(harness: Harness) -> None:
        harness.plan(drafters.load("better", turn="1"))
        await harness.wait_for(lambda: harness.loaded() == BETTER)
        state = harness.observation().state
        assert state is not None
        assert [window.number for window in state.windows] == [1, 2]
        harness.plan(None, cursor=WindowCursor(state.process_id, 1))

        def has_second_window_only() -> bool:
            state = harness.observation().state
            return state is not None and [window.number for window in state.windows] == [2]

        await harness.wait_for(has_second_window_only)

    with_pods(test)


@pytest.mark.slow
def test_slow_loads_delay_no_returns(drafters: Drafters) -> None:
    async def test(harness: Harness) -> None:
        count = len(harness.pods)
        for served in harness.pods:
            served.engine.hanging_disk = True
        harness.plan(*[drafters.load("better")] * (count - 1), None)
        loads = executor_module.MAX_LOADS_PER_NAMESPACE // 2
        await harness.wait_for(lambda: sum(served.concurrent for served in harness.pods) >= loads)
        harness.plan(*[drafters.load("better")] * (count - 1), ReturnToOwn())
        await harness.wait_for(lambda: harness.observation(count - 1).result is not None)
        assert sum(("PUT", "/aerie/drafter") in served.requests for served in harness.pods) == loads
        for served in harness.pods:
            served.engine.hanging_disk = False

    with_pods(test, 40)


# ----------------------------------------------------------------------------------------------------------- hostile pods
def test_pods_that_raise_or_hang_stop_nothing(drafters: Drafters) -> None:
    class Transport(httpx.AsyncBaseTransport):
        """A defect of this operator for one pod, and silence of another."""

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.port == 1:
                raise RuntimeError("a defect")
            await asyncio.Event().wait()
            raise AssertionError

    async def run() -> None:
        harness = Harness((), Transport())
        running = asyncio.create_task(harness.executor.run())
        harness.snapshot = snapshot_of([1, 2])
        harness.plan(drafters.load("better"), drafters.load("better"))
        await harness.wait_for(lambda: harness.observation(0).failed_reads)
        await harness.wait_for(lambda: harness.observation(1).call is not None)
        assert not running.done()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(run())


def test_pod_that_lies_about_its_change_is_observed_as_it_is(drafters: Drafters) -> None:
    async def test(harness: Harness) -> None:
        class Liar(httpx.AsyncBaseTransport):
            """Answers changes with success, and passes reads on."""

            async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
                if request.method == "GET":
                    return await real.handle_async_request(request)
                body = b'{"durations": {"staging": 0, "pause": 0, "swap": 0}}'
                return httpx.Response(200, stream=httpx.ByteStream(body))

        real = LimitedHttpTransport()
        liar = Harness(harness.pods, Liar())
        running = asyncio.create_task(liar.executor.run())
        liar.plan(drafters.load("better"))
        await liar.wait_for(lambda: liar.observation().result is not None and liar.loaded() is not None)
        result = liar.observation().result
        assert result is not None
        assert (result.problem, liar.loaded()) == (None, OWN)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with_pods(test)
