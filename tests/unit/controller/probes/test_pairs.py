"""Reads of evaluators: when, what is acknowledged, and what a response may be. Virtual time, and once the real server."""

from __future__ import annotations

import asyncio
import itertools
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from aerie.analysis.paired.plan import PairedPlan
from aerie.analysis.paired.state import PairedState, add_batches
from aerie.analysis.paired.sums import PairSums
from aerie.api.status import CanaryArm, CanaryEvaluation, Status
from aerie.controller.clock import Clock
from aerie.controller.probes.pairs import MAX_PAIRS_RESPONSE_BYTES, MIN_REPORTED_FAILURES, PairReader, parse_pairs
from aerie.controller.tokens import EVALUATOR_TOKEN, ResourceTokens, derive_token
from aerie.controller.work_queue import NamespacedName
from aerie.evaluator.requests import COMPLETIONS_PATH
from aerie.rollout.canary.evaluation import pack_counts, read_counted_batches
from aerie.rollout.facts.pairs import PairObservation
from aerie.rollout.facts.snapshot import Snapshot
from tests.golden import Messages
from tests.snapshots import replace_facts
from tests.unit.controller.conftest import Run
from tests.unit.controller.drafters.served_plugin import KEY
from tests.unit.controller.probes.test_equivalence import CHAT, snapshot_of
from tests.unit.controller.test_tokens import KEY_SECRET, SecretServer
from tests.unit.evaluator import fake_engine
from tests.unit.evaluator.fake_engine import COMPLETION

START = datetime(2026, 11, 1, tzinfo=UTC)
TOKEN = derive_token(KEY, "u", EVALUATOR_TOKEN)


class VirtualClock(Clock):
    """The time of the event loop, from START on."""

    def now(self) -> datetime:
        return START + timedelta(seconds=asyncio.get_running_loop().time())


def batch(number: int, pairs: int = 1) -> dict[str, Any]:
    steps = PairSums()
    for _ in range(pairs):
        steps = steps.add_pair(3, 1.0, 1.0)
    document = {"number": number, "started": 0.0, "ended": 1.0, "steps": steps.to_dict()}
    document |= {"seconds": steps.to_dict(), "slots": steps.to_dict()}
    return document | {"answers": {}, "skipped": {}, "failures": {}, "received": pairs, "dropped": 0, "canary": {}, "control": {}}


class FakeEvaluator:
    """An evaluator with a batch for each acknowledged one."""

    def __init__(self) -> None:
        self.process, self.number = "p1", 1
        self.requests: list[tuple[float, dict[str, str]]] = []
        self.response: tuple[int, bytes] | None = None
        self.transport = httpx.MockTransport(self.respond)

    async def respond(self, request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.host, request.url.path) == ("GET", "10.96.0.9", "/aerie/pairs")
        assert request.headers["authorization"] == f"Bearer {TOKEN}"
        query = dict(request.url.params)
        self.requests.append((asyncio.get_running_loop().time(), query))
        if self.response is not None:
            return httpx.Response(self.response[0], stream=httpx.ByteStream(self.response[1]))
        if (query["process"], int(query["after"])) == (self.process, self.number):
            self.number += 1
        body = json.dumps({"process": self.process, "batches": [batch(self.number)]}).encode()
        return httpx.Response(200, stream=httpx.ByteStream(body))


def status_of(evaluation: CanaryEvaluation | None, phase: str = "Evaluating") -> Status:
    arm = CanaryArm.model_validate({"revision": "new", "change": "drafter", "phase": phase, "start_time": START})
    return Status(canary=arm.model_copy(update={"evaluation": evaluation}))


def evaluation_of(state: PairedState) -> CanaryEvaluation:
    return CanaryEvaluation(start_time=START, state=pack_counts(PairedPlan(), state))


def snapshot_with(stored: Status, address: str | None = "10.96.0.9", owner: str = "u") -> Snapshot:
    snapshot = snapshot_of()
    metadata = {"name": "chat-evaluator", "ownerReferences": [{"controller": True, "uid": owner}]}
    service = {"kind": "Service", "metadata": metadata, "spec": {"clusterIP": address} if address else {}}
    resource = snapshot.resource.model_copy(update={"status": stored})
    metadata_of_resource = resource.metadata.model_copy(update={"uid": "u"})
    resource = resource.model_copy(update={"metadata": metadata_of_resource})
    return replace_facts(snapshot, resource=resource, children=(*snapshot.cluster.children, service))


class Operator:
    """A reader, and the reconciles that its calls cause: they count batches, and store the state."""

    def __init__(self, evaluator: FakeEvaluator, *, stores: bool = True, clock: Clock | None = None) -> None:
        self.enqueued: list[NamespacedName] = []
        self.state = PairedState()
        self.stores = stores
        tokens = ResourceTokens(SecretServer(KEY), KEY_SECRET, EVALUATOR_TOKEN)
        self.reader = PairReader(tokens, self._enqueue, clock or VirtualClock(), evaluator.transport)

    def _enqueue(self, key: NamespacedName) -> None:
        self.enqueued.append(key)
        observation = self.reader.observation(key)
        assert observation is not None
        if self.stores:
            self.state = add_batches(self.state, observation.process, observation.batches)
            self.track()

    def track(self, address: str | None = "10.96.0.9") -> None:
        status = status_of(evaluation_of(self.state))
        self.reader.track(CHAT, snapshot_with(status, address), status)


async def run_reader(operator: Operator, seconds: float) -> PairObservation | None:
    running = asyncio.create_task(operator.reader.run())
    try:
        await asyncio.sleep(seconds)
        return operator.reader.observation(CHAT)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def test_what_is_stored_is_acknowledged_and_counts_once(run: Run) -> None:
    async def test() -> None:
        evaluator = FakeEvaluator()
        operator = Operator(evaluator)
        operator.track()
        await run_reader(operator, 60.0)
        times = [time for time, _ in evaluator.requests]
        assert len(times) >= 10
        assert all(4.9 < after - before < 6.5 for before, after in itertools.pairwise(times))
        assert evaluator.requests[0][1] == {"process": "", "after": "0"}
        assert [query["after"] for _, query in evaluator.requests[1:4]] == ["1", "2", "3"]
        assert operator.state.steps.pairs == evaluator.number == operator.state.counted_batches["p1"]

    run(test())


def test_what_was_not_stored_is_read_again(run: Run) -> None:
    async def test() -> None:
        evaluator = FakeEvaluator()
        operator = Operator(evaluator, stores=False)
        operator.track()
        observation = await run_reader(operator, 60.0)
        assert {query["after"] for _, query in evaluator.requests} == {"0"}
        assert observation is not None
        assert [each.number for each in observation.batches] == [1]
        restarted = Operator(evaluator)
        restarted.state = add_batches(PairedState(), "p1", observation.batches)
        restarted.track()
        await run_reader(restarted, 1.0)
        assert evaluator.requests[-1][1] == {"process": "p1", "after": "1"}, "a new operator acknowledges what was stored"

    run(test())


def test_another_process_of_the_evaluator_begins_at_its_first_batch(run: Run) -> None:
    async def test() -> None:
        evaluator = FakeEvaluator()
        operator = Operator(evaluator)
        operator.track()
        await run_reader(operator, 22.0)
        counted = operator.state.counted_batches["p1"]
        evaluator.process, evaluator.number = "p2", 1
        await run_reader(operator, 22.0)
        assert operator.state.counted_batches == {"p1": counted, "p2": evaluator.number}
        assert operator.state.steps.pairs == counted + evaluator.number

    run(test())


def test_long_evaluations_are_read_less_often(run: Run) -> None:
    async def test() -> None:
        evaluator = FakeEvaluator()
        operator = Operator(evaluator)
        operator.track()
        await run_reader(operator, 3600.0)
        assert 100 < len(evaluator.requests) < 240
        last, latest = (time for time, _ in evaluator.requests[-2:])
        assert latest - last == pytest.approx(30.0, abs=1.0)

    run(test())


@pytest.mark.parametrize(
    ("name", "response"),
    [
        ("status", httpx.Response(500, content=b"prompt of a user")),
        ("token", httpx.Response(401, content=b"prompt of a user")),
        ("no JSON", httpx.Response(200, content=b"prompt of a user")),
        ("other JSON", httpx.Response(200, json=["prompt of a user"])),
        ("process", httpx.Response(200, json={"process": "prompt of a user", "batches": []})),
        ("batch", httpx.Response(200, json={"process": "p", "batches": [{"number": "prompt of a user"}]})),
        ("size", httpx.Response(200, content=b"x" * (MAX_PAIRS_RESPONSE_BYTES + 1))),
    ],
)
def test_anything_else_is_a_problem_after_some_reads(run: Run, name: str, response: httpx.Response, messages: Messages) -> None:
    async def test() -> None:
        evaluator = FakeEvaluator()
        evaluator.response = response.status_code, response.content
        operator = Operator(evaluator)
        operator.track()
        observation = await run_reader(operator, 600.0)
        assert observation is not None
        assert "user" not in observation.problem
        messages.check(name, observation.problem)
        assert len(operator.enqueued) == 1
        assert MIN_REPORTED_FAILURES < len(evaluator.requests) < 40
        evaluator.response = None
        observation = await run_reader(operator, 60.0)
        assert observation is not None
        assert not observation.problem

    run(test())


def test_nothing_is_read_without_an_evaluation_or_an_own_service(run: Run) -> None:
    async def test() -> None:
        evaluator = FakeEvaluator()
        operator = Operator(evaluator, stores=False)
        pending = evaluation_of(PairedState())
        ended = pending.model_copy(update={"result": "Accepted"})
        for status in (
            status_of(None),
            status_of(CanaryEvaluation(), "Starting"),
            status_of(ended, "WarmingUp"),
            status_of(pending, "RollingBack"),
        ):
            operator.reader.track(CHAT, snapshot_with(status), status)
            assert await run_reader(operator, 60.0) is None
        status = status_of(pending)
        for snapshot in (snapshot_with(status, None), snapshot_with(status, owner="other"), snapshot_with(status, "None")):
            operator.reader.track(CHAT, snapshot, status)
            await run_reader(operator, 60.0)
        assert evaluator.requests == []
        operator.reader.forget(CHAT)
        assert operator.reader.observation(CHAT) is None

    run(test())


def test_response_of_the_real_evaluator_is_read_acknowledged_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_engine, "TOKEN", TOKEN)

    async def work() -> None:
        async with fake_engine.run_with_engines() as evaluator:
            for _ in range(3):
                assert await evaluator.evaluate(COMPLETION, COMPLETIONS_PATH) == "pair"
            async with httpx.AsyncClient() as client:

                async def fetch(process: str, after: int) -> PairObservation:
                    url = f"{evaluator.url}/aerie/pairs?process={process}&after={after}"
                    response = await client.get(url, headers={"Authorization": f"Bearer {TOKEN}"})
                    return parse_pairs(response.content)

                first = await fetch("", 0)
                state = add_batches(PairedState(), first.process, first.batches)
                assert await evaluator.evaluate(COMPLETION, COMPLETIONS_PATH) == "pair"
                repeated = await fetch("", 0)
                assert repeated == first, "what is not acknowledged stays"
                state = add_batches(state, repeated.process, repeated.batches)
                assert state.steps.pairs == 3
                counted = read_counted_batches(evaluation_of(state))
                second = await fetch(first.process, counted[first.process])
                state = add_batches(state, second.process, second.batches)
                assert (state.steps.pairs, state.received) == (4, 4)

    fake_engine.run(work)
