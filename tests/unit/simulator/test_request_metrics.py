"""`metrics` of answers: the fields and identities of vLLM, and the evaluator on two simulated engines."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from aerie.analysis.paired.answers import AnswerCounts
from aerie.analysis.paired.sums import PairSums
from aerie.evaluator.answers import Answer, parse_answer
from aerie.evaluator.process import serve
from aerie.evaluator.replay import Engines
from aerie.evaluator.requests import ReplayRules
from aerie.evaluator.settings import EvaluatorSettings

from .conftest import Running, Start, write_drafter

NGRAM = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')
SUMMARY, DETAILED = (f"--per-request-spec-decode-metrics={level}" for level in ("summary", "detailed"))
PATHS = ("/v1/completions", "/v1/chat/completions")


def ask(running: Running, path: str = PATHS[0], **body: Any) -> Any:
    content: Any = {"prompt": "Hi"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "Hi"}]}
    return running.client.post(path, json=content | body)


@pytest.mark.parametrize("path", PATHS)
def test_counts_of_a_request_are_those_of_the_engine(start: Start, path: str) -> None:
    running = start(*NGRAM, DETAILED)
    totals = dict.fromkeys(("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens"), 0)
    for tokens in (2, 3, 40, 200):
        response = ask(running, path, max_tokens=tokens)
        metrics = response.json()["metrics"]
        assert metrics["generation_time_ms"] is None
        counts = metrics["speculative_decoding"]
        steps, histogram = counts["num_spec_steps"], counts["acceptance_histogram"]
        assert len(histogram) == counts["num_spec_tokens"] + 1 == 4
        assert sum(histogram) == steps == len(counts["per_step_accepted"])
        assert counts["num_accepted_draft_tokens"] == sum(counts["per_step_accepted"])
        assert counts["num_draft_tokens"] == 3 * steps == sum(counts["per_step_drafted"])
        assert counts["mean_acceptance_length"] == 1 + counts["num_accepted_draft_tokens"] / steps
        assert counts["draft_acceptance_rate"] == counts["num_accepted_draft_tokens"] / counts["num_draft_tokens"]
        generated = 1 + steps + counts["num_accepted_draft_tokens"]
        assert tokens <= generated <= tokens + 3, "a last step counts tokens past the end"
        totals = {name: total + counts[name] for name, total in totals.items()}
        answer = parse_answer(response.content)
        assert isinstance(answer, Answer)
        assert (answer.tokens, answer.steps, answer.histogram) == (tokens, steps, tuple(histogram))
    for name, family in (
        ("num_spec_steps", "drafts"),
        ("num_draft_tokens", "draft_tokens"),
        ("num_accepted_draft_tokens", "accepted_tokens"),
    ):
        assert running.metric(f"vllm:spec_decode_num_{family}_total") == totals[name]


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ((), None),
        (("--per-request-spec-decode-metrics=none",), None),
        ((SUMMARY,), {"speculative_decoding"}),
        (("--enable-per-request-metrics",), {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms"}),
    ],
)
def test_answers_have_what_the_flags_select(start: Start, flags: tuple[str, ...], fields: set[str] | None) -> None:
    running = start(*NGRAM, *flags)
    metrics = ask(running, max_tokens=30).json()["metrics"]
    stream = ask(running, max_tokens=30, stream=True, stream_options={"include_usage": True}).text.splitlines()
    streamed = json.loads([line for line in stream if line][-2].removeprefix("data: ")).get("metrics")
    if fields is None:
        assert metrics is streamed is None
        return
    present = {name for name, value in metrics.items() if value is not None} - {"tokens_per_second"}
    assert present == fields == streamed.keys() - {"tokens_per_second"}, "a stream has no fields that are null"
    if flags == (SUMMARY,):
        assert metrics["speculative_decoding"]["per_step_accepted"] is None
        assert "per_step_accepted" not in streamed["speculative_decoding"]
    else:
        assert metrics["mean_itl_ms"] * 29 == pytest.approx(metrics["generation_time_ms"])
        assert 30_000 / metrics["tokens_per_second"] == pytest.approx(
            metrics["time_to_first_token_ms"] + metrics["generation_time_ms"]
        )


def test_counts_without_speculation_end_the_start(start: Start) -> None:
    running = start(SUMMARY, wait=False)
    assert running.process.wait(60) == 1
    assert "--per-request-spec-decode-metrics requires speculative decoding" in running.last_words()


@pytest.mark.slow
def test_the_evaluator_compares_two_simulated_engines(start: Start, tmp_path: Path) -> None:
    def engine(name: str, seed: int, **simulator: Any) -> Running:
        model = str(write_drafter(tmp_path / name, simulator=simulator))
        config = json.dumps({"method": "eagle3", "model": model, "num_speculative_tokens": 3})
        return start("--speculative-config", config, SUMMARY, "--enable-per-request-metrics", options={"seed": seed})

    canary, control = engine("canary", 1, logit_shift=-0.8, altered_share=0.05), engine("control", 2)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"number {number}", "temperature": 0}) + "\n" for number in range(50)))
    steps, answers = asyncio.run(_evaluate(canary, control, prompts, 200))
    assert steps.canary_total > 1.1 * steps.control_total
    assert answers.greedy_pairs == steps.pairs
    assert answers.greedy_different_pairs > 0
    assert answers.canary_only > 0, "it has no rounding, so what differs is the drafter's fault"
    assert answers.control_only == 0


async def _evaluate(canary: Running, control: Running, prompts: Path, pairs: int) -> tuple[PairSums, AnswerCounts]:
    """Return the sums of steps and the counts of answers after as many pairs or some more; none was skipped."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    canary_url, control_url = (str(engine.client.base_url).rstrip("/") for engine in (canary, control))
    settings = EvaluatorSettings(
        Engines((canary_url,), (control_url,)), ReplayRules(64), "t" * 32, prompts=prompts, host="127.0.0.1", port=port
    )
    steps, answers, number = PairSums(), AnswerCounts(), 0
    headers = {"Authorization": "Bearer " + "t" * 32}
    async with asyncio.timeout(300), serve(settings) as process, aiohttp.ClientSession(headers=headers) as client:
        while steps.pairs < pairs:
            query = {"process": process, "after": str(number)}
            async with client.get(f"http://127.0.0.1:{port}/aerie/pairs", params=query) as response:
                batches: list[dict[str, Any]] = (await response.json())["batches"]
            for batch in batches:
                assert batch["skipped"] == {}
                number, steps = batch["number"], steps.merge(PairSums.from_dict(batch["steps"]))
                answers = answers.merge(AnswerCounts.from_dict(batch["answers"]))
            await asyncio.sleep(0.1)
    return steps, answers
