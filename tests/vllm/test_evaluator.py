"""The evaluator between two real engines: the bundle's prompts, EAGLE 3.1 as canary and EAGLE 3 as control."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from aerie.analysis.paired.answers import AnswerCounts
from aerie.analysis.paired.sums import PairSums
from aerie.evaluator.answers import AnswerProblem, parse_answer
from aerie.evaluator.process import serve
from aerie.evaluator.replay import Engines
from aerie.evaluator.requests import CHAT_PATH, COMPLETIONS_PATH, ReplayRules
from aerie.evaluator.settings import EvaluatorSettings
from aerie_drafter.evaluate.prompts import read_prompts
from aerie_lab.testing.agreement import BUNDLE_FOLDER, RunningEngine, build_speculative_config, start_engine

pytestmark = pytest.mark.timeout(2400)  # a start on busy cores
TOKEN = "t" * 32
MAX_TOKENS = 64


@pytest.fixture(scope="module")
def engines(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningEngine, RunningEngine]]:
    """Canary and control."""

    def flags(drafter: str) -> tuple[str, ...]:
        speculation = build_speculative_config(BUNDLE_FOLDER / drafter)
        return "--speculative-config", speculation, "--per-request-spec-decode-metrics=detailed", "--enable-per-request-metrics"

    folder = tmp_path_factory.mktemp("engines")
    with (
        start_engine("real", vllm, folder, *flags("eagle31")) as canary,
        start_engine("real", vllm, folder, *flags("eagle3")) as control,
    ):
        yield canary, control


def evaluate(engines: tuple[RunningEngine, RunningEngine], prompts: Path, pairs: int) -> tuple[PairSums, PairSums, AnswerCounts]:
    """Return the sums of steps and seconds and the counts of answers, after as many pairs or some more; none was skipped."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    canary, control = (str(engine.client.base_url).rstrip("/") for engine in engines)
    rules = ReplayRules(MAX_TOKENS, has_neutral_defaults=True)
    settings = EvaluatorSettings(
        Engines((canary,), (control,), timeout_seconds=1200.0),  # cores may be busy
        rules,
        TOKEN,
        prompts=prompts,
        in_flight=12,
        host="127.0.0.1",
        port=port,
    )

    async def work() -> tuple[PairSums, PairSums, AnswerCounts]:
        steps, seconds, answers = PairSums(), PairSums(), AnswerCounts()
        number = 0
        async with serve(settings) as process, aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as client:
            while steps.pairs < pairs:
                query = {"process": process, "after": str(number)}
                async with client.get(f"http://127.0.0.1:{port}/aerie/pairs", params=query) as response:
                    batches: list[dict[str, Any]] = (await response.json())["batches"]
                for batch in batches:
                    assert (batch["skipped"], batch["dropped"]) == ({}, 0)
                    number = batch["number"]
                    steps = steps.merge(PairSums.from_dict(batch["steps"]))
                    seconds = seconds.merge(PairSums.from_dict(batch["seconds"]))
                    answers = answers.merge(AnswerCounts.from_dict(batch["answers"]))
                await asyncio.sleep(0.5)
        return steps, seconds, answers

    return asyncio.run(work())


def write_prompts(folder: Path, temperature: float) -> Path:
    path = folder / "prompts.jsonl"
    prompts = read_prompts(BUNDLE_FOLDER / "prompts.jsonl")
    path.write_text("\n".join(json.dumps({"messages": prompt.messages, "temperature": temperature}) for prompt in prompts))
    return path


def test_the_better_drafter_takes_fewer_steps_for_the_same_answers(
    engines: tuple[RunningEngine, RunningEngine], tmp_path: Path
) -> None:
    steps, seconds, answers = evaluate(engines, write_prompts(tmp_path, 0), 100)
    assert 0.03 < steps.control_total / steps.canary_total - 1 < 0.15  # 9 % over all prompts, with a standard error of 1.3 %
    assert seconds.pairs == steps.pairs == answers.greedy_pairs >= 100
    assert min(seconds.control_total, seconds.canary_total) > 0  # which is more depends on what else the cores do
    assert answers.greedy_different_pairs <= 2
    assert answers.repeated_requests > 0
    assert (answers.canary_only, answers.control_only) == (0, 0)


def test_sampled_answers_follow_the_targets_probabilities(engines: tuple[RunningEngine, RunningEngine], tmp_path: Path) -> None:
    steps, _, answers = evaluate(engines, write_prompts(tmp_path, 1.0), 30)
    assert answers.sampled_pairs == steps.pairs
    assert answers.probabilities.count == answers.sampled_pairs
    assert answers.difference_message == ""
    for sums in (answers.unlikely, answers.control_unlikely):
        assert sums.count > 400
        assert 0.5 < sums.canary_sum / sums.expected_sum < 1.5  # the mean of a hundred unlikely tokens or more


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH])
def test_answers_that_end_at_a_stop_string_have_no_counts(engines: tuple[RunningEngine, RunningEngine], path: str) -> None:
    """vLLM returns the counts only if its scheduler ends the answer. If a release does, more pairs can be counted."""
    question = "What is the class `calendar.Calendar`?"
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "stop": [" "]}
    body |= {"messages": [{"role": "user", "content": question}]} if path == CHAT_PATH else {"prompt": question}
    response = engines[0].client.post(path, json=body)
    assert response.status_code == 200
    assert parse_answer(response.content) is AnswerProblem.STOP_STRING
