"""Engines that fail during a shadow evaluation: what the evaluator counts of them, and the verdict, in virtual time.

Everything but the connections is real: the pipeline, the batches, their reads at the operator's intervals, and the verdict.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.criteria.criterion import FAILED_REQUESTS, TIME_PER_OUTPUT_TOKEN
from aerie.analysis.paired.failures import FAILURE_INTERVAL_SECONDS, FailureCounts
from aerie.analysis.paired.plan import MIN_ACCEPTANCE_SECONDS, PairedPlan
from aerie.analysis.paired.state import PairBatch, PairedState, add_batches
from aerie.analysis.paired.verdict import ANSWERS_DIFFER, MIN_OUTAGE_SECONDS, PairedVerdict, evaluate_pairs
from aerie.controller.probes.pairs import MAX_READ_INTERVAL_SECONDS, MIN_READ_INTERVAL_SECONDS, READ_INTERVAL_SHARE
from aerie.engine.completions import GreedyCompletion
from aerie.evaluator import pipeline, replay
from aerie.evaluator.admission import Admission
from aerie.evaluator.answers import Answer, AnswerProblem
from aerie.evaluator.batches import BatchLog
from aerie.evaluator.failures import ArmFailures, FailureTracker
from aerie.evaluator.metrics import EvaluatorMetrics
from aerie.evaluator.pipeline import Pipeline
from aerie.evaluator.replay import Engines
from aerie.evaluator.requests import COMPLETIONS_PATH, ReplayRequest
from aerie.evaluator.skip_reasons import SkipReason
from tests.golden import Messages
from tests.unit.controller.conftest import run_virtually

PLAN = PairedPlan(max_duration_seconds=900.0, min_acceptance_seconds=MIN_ACCEPTANCE_SECONDS)
TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class Reply:
    """What an engine does with a request. `seconds`: until the answer, or the problem."""

    seconds: float
    problem: AnswerProblem | None = None
    tokens: int = 65
    """Tokens of the answer; the first one takes no step."""
    generation_seconds: float | None = None
    """Seconds of generation by the engine's own clock; None: all of `seconds`."""


GOOD = Reply(2.0)
HANGS = Reply(math.inf)
FAILS = Reply(0.01, AnswerProblem.FAILED)
Engine = Callable[[float, random.Random], Reply]
"""Returns the reply to a request that arrives at this time."""


def always(reply: Reply) -> Engine:
    return lambda _time, _random: reply


EQUAL = always(GOOD)


def sometimes(reply: Reply, share: float) -> Engine:
    return lambda _time, random: reply if random.random() < share else GOOD


def during(reply: Reply, start: float, end: float, share: float = 1.0) -> Engine:
    return lambda time, random: reply if start <= time < end and random.random() < share else GOOD


class FakePrompts:
    """Prompts; `interval`: seconds between two requests, beside those that the engines take."""

    def __init__(self, random: random.Random) -> None:
        self._random = random

    def requests(self) -> Iterator[ReplayRequest]:
        while True:
            yield ReplayRequest(
                COMPLETIONS_PATH, b"{}", self._random.randrange(64), is_greedy=False, is_plain=False, is_exact=False
            )


class SeededSecrets:
    """What the evaluator uses of `secrets`, repeatable."""

    def __init__(self, seed: int) -> None:
        source = random.Random(seed)  # noqa: S311 - no secrets
        self.choice, self.randbelow = source.choice, source.randrange


class Evaluation:
    """A shadow evaluation by two engines."""

    def __init__(
        self, canary: Engine, control: Engine = EQUAL, *, interval: float = 0.0, noise: float = 0.01, seed: int = 0
    ) -> None:
        self.engines = {"canary": canary, "control": control}
        self.interval = interval
        """Seconds between two mirrored requests; 0: prompts, as fast as the engines answer."""
        self.noise = noise
        """Difference of the steps of two equal answers, relative to them."""
        self.random = random.Random(seed)  # noqa: S311 - no secrets
        self.state = PairedState()
        self.verdict: PairedVerdict | None = None
        self.seconds = 0.0

    async def send(self, _session: Any, engines: Engines, url: str, _request: ReplayRequest) -> Any:
        reply = self.engines[url](asyncio.get_running_loop().time(), self.random)
        if reply.seconds >= engines.timeout_seconds:
            await asyncio.sleep(engines.timeout_seconds)
            return AnswerProblem.FAILED
        await asyncio.sleep(reply.seconds)
        if reply.problem is not None:
            return reply.problem
        steps = max(0, round((reply.tokens - 1) * 10 * self.random.uniform(1 - self.noise, 1 + self.noise)))
        seconds = reply.seconds if reply.generation_seconds is None else reply.generation_seconds
        tokens = tuple(map(str, range(reply.tokens)))
        completion = GreedyCompletion(tokens, tuple({token: -0.5} for token in tokens))
        return replay._TimedAnswer(Answer(reply.tokens, steps, (0, steps), "stop", seconds, completion), reply.seconds)

    async def run(self) -> None:
        log = BatchLog(EvaluatorMetrics(), asyncio.get_running_loop().time)
        engines = Engines(("canary",), ("control",), timeout_seconds=TIMEOUT_SECONDS)
        pipeline = Pipeline(None, engines, Admission(4, 4), log)  # type: ignore[arg-type]
        source = asyncio.create_task(self._copy_requests(pipeline) if self.interval else self._send_prompts(pipeline))
        process, number = "", 0
        loop = asyncio.get_running_loop()
        while True:
            interval = min(max(MIN_READ_INTERVAL_SECONDS, READ_INTERVAL_SHARE * loop.time()), MAX_READ_INTERVAL_SECONDS)
            await asyncio.sleep(interval)
            document = log.fetch(process, number)
            batches = [PairBatch.from_dict(batch) for batch in document["batches"]]
            process, number = document["process"], max([number, *(batch.number for batch in batches)])
            self.state, self.verdict = evaluate_pairs(add_batches(self.state, process, batches), PLAN, loop.time())
            if self.verdict.outcome != "Continue":
                break
        self.seconds = loop.time()
        source.cancel()
        await pipeline.close()

    async def _send_prompts(self, pipeline: Pipeline) -> None:
        await pipeline.send_prompts(FakePrompts(self.random))  # type: ignore[arg-type]

    async def _copy_requests(self, pipeline: Pipeline) -> None:
        for request in FakePrompts(self.random).requests():
            await asyncio.sleep(self.random.expovariate(1 / self.interval))
            pipeline.log.receive()
            if await pipeline.try_admit():
                pipeline.start(request)
            else:
                pipeline.log.drop()


def evaluate(monkeypatch: pytest.MonkeyPatch, canary: Engine, control: Engine = EQUAL, **options: Any) -> Evaluation:
    evaluation = Evaluation(canary, control, **options)
    monkeypatch.setattr(replay, "_send", evaluation.send)
    for module in (replay, pipeline):
        monkeypatch.setattr(module, "secrets", SeededSecrets(options.get("seed", 0)))
    run_virtually(evaluation.run())
    return evaluation


def outcome(evaluation: Evaluation) -> tuple[str, str]:
    assert evaluation.verdict is not None
    return evaluation.verdict.outcome, evaluation.verdict.rollback_reason


ROLLED_BACK = ("Rollback", FAILED_REQUESTS)


# --------------------------------------------------------------------------------------------------------- the canary's faults
@pytest.mark.parametrize(
    "reply",
    [
        HANGS,
        FAILS,
        Reply(0.01, AnswerProblem.REJECTED),
        Reply(0.01, AnswerProblem.UNAVAILABLE),
        Reply(60.0, AnswerProblem.FAILED),
        Reply(200.0),
        Reply(100.0, generation_seconds=2.0),
    ],
    ids=["hangs", "500", "404", "503", "500 after a minute", "100 times as slow", "slow prefill"],
)
@pytest.mark.parametrize("interval", [0.0, 1.0, 5.0], ids=["prompts", "1 request/s", "0.2 requests/s"])
def test_a_canary_that_answers_nothing_is_rolled_back_in_minutes(
    reply: Reply, interval: float, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    evaluation = evaluate(monkeypatch, always(reply), interval=interval)
    assert outcome(evaluation) == ROLLED_BACK
    assert evaluation.seconds < 240
    if reply is HANGS and not interval:
        assert evaluation.verdict is not None
        messages.check("hangs", evaluation.verdict.message)


def test_a_canary_that_hangs_after_good_answers_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = evaluate(monkeypatch, during(HANGS, 20, 9e9), interval=1.0)
    assert outcome(evaluation) == ROLLED_BACK
    assert evaluation.state.steps.pairs


def test_long_answers_of_the_control_give_a_silent_canary_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = evaluate(monkeypatch, always(HANGS), always(Reply(25.0)))
    assert outcome(evaluation) == ROLLED_BACK
    assert evaluation.seconds < 480


def test_rare_requests_decide_at_the_deadline(monkeypatch: pytest.MonkeyPatch, messages: Messages) -> None:
    attempts = set()
    for seed in range(20):
        evaluation = evaluate(monkeypatch, always(HANGS), interval=500.0, seed=seed)
        assert outcome(evaluation) == (ROLLED_BACK if evaluation.state.failures.outage_attempts else ("Inconclusive", ""))
        if evaluation.state.failures.outage_attempts == 2 and 2 not in attempts:
            assert evaluation.verdict is not None
            messages.check("few requests", evaluation.verdict.message)
        attempts.add(evaluation.state.failures.outage_attempts)
    assert {0, 1, 2} <= attempts


@pytest.mark.parametrize("share", [0.2, 0.4, 0.7])
@pytest.mark.parametrize("reply", [FAILS, HANGS], ids=["fails", "hangs"])
def test_a_canary_that_fails_some_requests_is_not_accepted(reply: Reply, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = evaluate(monkeypatch, sometimes(reply, share), interval=1.0)
    assert outcome(evaluation) == ROLLED_BACK


@pytest.mark.parametrize("interval", [0.0, 1.0])
def test_a_canary_that_is_ten_times_as_slow_is_rolled_back_by_its_time(interval: float, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = evaluate(monkeypatch, always(Reply(20.0)), interval=interval)
    assert outcome(evaluation) == ("Rollback", TIME_PER_OUTPUT_TOKEN)


@pytest.mark.parametrize("tokens", [1, 33], ids=["empty", "half of the tokens"])
def test_a_canary_that_answers_too_little_is_rolled_back_by_its_answers(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = evaluate(monkeypatch, always(Reply(1.0, tokens=tokens)), noise=0.3)
    assert outcome(evaluation) == ("Rollback", ANSWERS_DIFFER)
    assert evaluation.state.steps.pairs < 200


# ------------------------------------------------------------------------------------------------ what is not the canary's fault
@pytest.mark.parametrize("reply", [HANGS, FAILS, Reply(0.01, AnswerProblem.UNAVAILABLE)], ids=["hangs", "500", "503"])
def test_the_controls_fault_neither_rolls_back_nor_accepts(
    reply: Reply, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    evaluation = evaluate(monkeypatch, always(GOOD), always(reply))
    assert outcome(evaluation) == ("Inconclusive", "")
    if reply is FAILS:
        assert evaluation.verdict is not None
        messages.check("control fails", evaluation.verdict.message)


@pytest.mark.parametrize("reply", [HANGS, FAILS, Reply(0.01, AnswerProblem.REJECTED)], ids=["hang", "unreachable", "404"])
def test_the_fault_of_both_is_inconclusive(reply: Reply, monkeypatch: pytest.MonkeyPatch, messages: Messages) -> None:
    evaluation = evaluate(monkeypatch, always(reply), always(reply))
    assert outcome(evaluation) == ("Inconclusive", "")
    if reply is HANGS:
        assert evaluation.verdict is not None
        messages.check("both hang", evaluation.verdict.message)


@pytest.mark.parametrize("length", [5.0, 60.0, 100.0])
@pytest.mark.parametrize("reply", [FAILS, Reply(0.01, AnswerProblem.UNAVAILABLE), HANGS], ids=["500", "503", "hangs"])
@pytest.mark.parametrize("interval", [0.0, 1.0])
def test_an_outage_of_an_equal_engine_rolls_nothing_back(
    length: float, reply: Reply, interval: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = min(length, MIN_OUTAGE_SECONDS - 35) if reply is HANGS else length  # each hanging request takes half a minute more
    for seed in range(2):
        evaluation = evaluate(monkeypatch, during(reply, 10, 10 + length), interval=interval, seed=seed)
        assert outcome(evaluation) == ("Promote", "")
        assert evaluation.state.failures.canary <= 3


def test_a_stall_in_which_some_requests_fail_rolls_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = evaluate(monkeypatch, during(FAILS, 5, 65, 0.5), interval=0.2)
    assert outcome(evaluation) == ("Promote", "")


def test_engines_that_both_fail_some_requests_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [
        outcome(evaluate(monkeypatch, sometimes(FAILS, 0.05), sometimes(FAILS, 0.05), interval=1.0, seed=seed))
        for seed in range(8)
    ]
    assert outcomes == [("Promote", "")] * 8


# --------------------------------------------------------------------------------------------------------------- what is counted
def test_an_outage_is_one_failure_and_its_attempts_do_not_overlap() -> None:
    arm = ArmFailures()
    arm.answer(0.0, 1.0)
    for sent in (2.0, 2.0, 3.0, 4.9):
        arm.fail(sent, sent + 3, is_unavailable=False)
    assert (arm.failures, arm.attempts, arm.outage_seconds) == (1, 1, 5.9)
    arm.fail(7.0, 8.0, is_unavailable=False)
    assert (arm.failures, arm.attempts, arm.outage_seconds) == (1, 2, 6.0)
    arm.answer(8.0, 20.0)
    assert (arm.attempts, arm.outage_seconds) == (0, 0.0)
    arm.fail(19.0, 21.0, is_unavailable=False)
    assert arm.failures == 1, "of the outage before"
    arm.answer(20.0, 22.0)
    arm.fail(22.0, 23.0, is_unavailable=False)
    assert arm.failures == 2
    arm.answer(22.0, 24.0)
    arm.fail(24.0, 24.0, is_unavailable=False)
    assert (arm.failures, arm.events) == (3, 2)


def test_requests_that_hang_among_answered_ones_are_failures_of_their_own() -> None:
    arm = ArmFailures()
    for second in range(20):
        arm.answer(second, second + 0.5)
    for sent in (3.0, 7.5, 15.0):
        arm.fail(sent, sent + 30, is_unavailable=False)
    assert (arm.failures, arm.events) == (3, 2)


def test_a_rejecting_engine_has_an_outage_and_no_failure() -> None:
    tracker = FailureTracker()
    tracker.count(SkipReason.CANARY_UNAVAILABLE, 1.0, 2.0)
    tracker.count(SkipReason.BOTH_FAILED, 2.0, 3.0)
    tracker.count(SkipReason.UNAVAILABLE, 3.0, 4.0)
    tracker.count(SkipReason.CANARY_UNAVAILABLE, 4.0, 5.0)
    assert tracker.close_batch() == FailureCounts(outage_attempts=2, outage_seconds=4.0)
    tracker.count(SkipReason.CONTROL_FAILED, 6.0, 7.0)
    assert tracker.close_batch() == FailureCounts(control=1, control_events=1)


@given(st.lists(st.tuples(st.sampled_from([None, *SkipReason]), st.floats(0, 30), st.floats(0, 60)), max_size=60))
def test_failures_of_requests_one_after_the_other(requests: list[tuple[SkipReason | None, float, float]]) -> None:
    tracker, ended = FailureTracker(), 0.0
    for reason, pause, seconds in requests:
        sent = ended + pause
        ended = sent + seconds
        tracker.count(reason, sent, ended)
        assert 0 <= tracker.canary.outage_seconds <= ended
        assert 0 in (tracker.canary.attempts, tracker.control.attempts)
    for arm, reason in ((tracker.canary, SkipReason.CANARY_FAILED), (tracker.control, SkipReason.CONTROL_FAILED)):
        assert arm.events <= arm.failures <= sum(each is reason for each, _, _ in requests)
        assert arm.events <= 1 + ended / FAILURE_INTERVAL_SECONDS
