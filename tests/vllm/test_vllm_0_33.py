"""vLLM 0.33's Python over 0.32's compiled files (docs/vllm-on-cpu.md): what Aerie and the simulator take for granted of 0.33.

Installed only when it is asked for: `aerie-lab build vllm-0.33`. One server, the bundle's target with its EAGLE 3.1 drafter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from aerie.engine.metrics import rates
from aerie.engine.metrics.exposition import parse_exposition
from aerie.engine.metrics.sample import Counters, Sample, diff_samples
from aerie.engine.releases import NEWEST_VERIFIED_VERSION
from aerie.engine.speculation import Static
from aerie_drafter.evaluate.prompts import read_prompts
from aerie_lab.testing.agreement import (
    BUNDLE_FOLDER,
    NUM_SPECULATIVE_TOKENS,
    RunningEngine,
    build_speculative_config,
    is_healthy,
    start_engine,
)
from tests.vllm.parser import flags_of_the_simulator, flags_of_vllm

pytestmark = pytest.mark.timeout(2400)  # a start on busy cores
REQUESTS = 8
TOKENS = 40


@dataclass(frozen=True)
class Served:
    """A server, and what it said of its first requests."""

    engine: RunningEngine
    answers: list[dict[str, Any]]
    window: Counters
    """What they added to the page."""


def ask(engine: RunningEngine, messages: Any) -> httpx.Response:
    body = {"model": "agreement", "messages": list(messages), "max_tokens": TOKENS, "temperature": 0}
    return engine.client.post("/v1/chat/completions", json=body)


def scrape(engine: RunningEngine) -> Sample:
    """The page once it stands still, as the operator reads it."""
    engine.read_stable_samples()
    return parse_exposition(engine.read_metrics().encode())


@pytest.fixture(scope="module")
def prompts() -> list[Any]:
    return [prompt.messages for prompt in read_prompts(BUNDLE_FOLDER / "prompts.jsonl")][:REQUESTS]


@pytest.fixture(scope="module")
def served(vllm_0_33: Path, prompts: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    words = (
        "--speculative-config",
        build_speculative_config(BUNDLE_FOLDER / "eagle31"),
        "--per-request-spec-decode-metrics=detailed",
    )
    # Dev mode: it has /pause. No logo: the start line is one line.
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_DISABLE_LOG_LOGO": "1"}
    with start_engine("real", vllm_0_33, tmp_path_factory.mktemp("vllm-0.33"), *words, variables=variables) as running:
        before = scrape(running)
        answers = [ask(running, messages).raise_for_status().json() for messages in prompts]
        window = diff_samples(before, scrape(running))
        assert isinstance(window, Counters)
        yield Served(running, answers, window)


def test_it_is_the_newest_release_that_aerie_knows(served: Served) -> None:
    """So `NEWEST_VERIFIED_VERSION` rests on a run. The log says the version at the start, and that sampling is mended."""
    assert served.engine.client.get("/version").json() == {"version": str(NEWEST_VERIFIED_VERSION)}
    assert is_healthy(served.engine.client)
    log = served.engine.log_file.read_text()
    assert re.search(rf"vLLM server version {re.escape(str(NEWEST_VERIFIED_VERSION))}, serving model \S+", log)
    assert "sampling with speculation on CPU is mended (vLLM issue 55005" in log


def test_its_page_is_read(served: Served) -> None:
    window, counted = served.window, served.window.speculation
    assert sum(window.finished.get(reason, 0.0) for reason in ("length", "stop")) == REQUESTS == window.first_tokens
    assert window.generation_tokens == sum(answer["usage"]["completion_tokens"] for answer in served.answers)
    assert counted is not None
    assert counted.draft_tokens == NUM_SPECULATIVE_TOKENS * counted.drafts > 0
    assert len(counted.accepted_per_position) == NUM_SPECULATIVE_TOKENS
    assert list(counted.accepted_per_position) == sorted(counted.accepted_per_position, reverse=True)
    assert sum(counted.accepted_per_position) == counted.accepted
    length = rates.acceptance_length(window, Static(NUM_SPECULATIVE_TOKENS))
    assert isinstance(length, rates.Bounds)
    assert 1.5 < length.low <= length.high < NUM_SPECULATIVE_TOKENS + 1  # the drafter is of use: it was trained for this target


def test_the_answers_own_figures_are_those_of_the_page(served: Served) -> None:
    counted = served.window.speculation
    assert counted is not None
    figures = [answer["metrics"]["speculative_decoding"] for answer in served.answers]
    assert sum(one["num_spec_steps"] for one in figures) == counted.drafts
    histogram = [sum(one["acceptance_histogram"][accepted] for one in figures) for accepted in range(NUM_SPECULATIVE_TOKENS + 1)]
    # Position i is accepted in every step that accepts more than i.
    assert [sum(histogram[i + 1 :]) for i in range(NUM_SPECULATIVE_TOKENS)] == list(counted.accepted_per_position)
    for one in figures:
        assert sum(one["per_step_accepted"]) == one["num_accepted_draft_tokens"]


def test_what_a_paused_engine_refuses_is_no_failure_of_its_own(served: Served, prompts: list[Any]) -> None:
    """0.33 answers 503 while it is paused (POST /pause, mode abort or wait): probes go on, and no counter that Aerie judges a
    canary by moves, so it is never taken for a failure of the drafter. `keep` makes requests wait, as 0.32 does."""
    running = served.engine
    for mode in ("abort", "wait"):
        before = scrape(running)
        assert running.client.post("/pause", params={"mode": mode}).json() == {"status": "paused"}
        refused = ask(running, prompts[0])
        assert refused.status_code == 503
        assert "Generation is paused" in refused.text
        assert is_healthy(running.client)
        assert running.client.post("/resume").is_success
        window = diff_samples(before, scrape(running))
        assert isinstance(window, Counters)
        assert not any(window.finished.values())
        assert isinstance(rates.error_share(window), rates.Unknown)
        assert window.speculation is not None
        assert window.speculation.drafts == window.request_steps == window.first_tokens == 0
    assert ask(running, prompts[0]).status_code == 200


def test_the_simulators_flags_are_those_of_its_parser(vllm_0_33: Path) -> None:
    assert flags_of_the_simulator(str(NEWEST_VERIFIED_VERSION)) == flags_of_vllm(vllm_0_33)
