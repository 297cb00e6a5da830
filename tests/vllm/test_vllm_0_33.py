"""vLLM 0.33's Python over 0.32's compiled files (docs/how-to/vllm-0.33-on-cpu.md): what Aerie and the simulator assume of 0.33.

Only `aerie-lab build vllm-0.33` installs it. One server serves the bundle's target with its EAGLE 3.1 drafter.
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
from tests.vllm.parser import read_simulator_flags, read_vllm_flags

pytestmark = pytest.mark.timeout(2400)  # a start on busy cores
REQUESTS = 8
TOKENS = 40


@dataclass(frozen=True)
class Server:
    """A server, and its responses to the first requests."""

    engine: RunningEngine
    responses: list[dict[str, Any]]
    window: Counters
    """Counters that the requests added."""


def send_request(engine: RunningEngine, messages: Any) -> httpx.Response:
    body = {"model": "agreement", "messages": list(messages), "max_tokens": TOKENS, "temperature": 0}
    return engine.client.post("/v1/chat/completions", json=body)


def scrape(engine: RunningEngine) -> Sample:
    """Scrape the server once its counters no longer change, as the operator reads it."""
    engine.read_stable_samples()
    return parse_exposition(engine.read_metrics().encode())


@pytest.fixture(scope="module")
def prompts() -> list[Any]:
    return [prompt.messages for prompt in read_prompts(BUNDLE_FOLDER / "prompts.jsonl")][:REQUESTS]


@pytest.fixture(scope="module")
def served(vllm_0_33: Path, prompts: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = (
        "--speculative-config",
        build_speculative_config(BUNDLE_FOLDER / "eagle31"),
        "--per-request-spec-decode-metrics=detailed",
    )
    # Dev mode: it has /pause. No logo: the start line is one line.
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_DISABLE_LOG_LOGO": "1"}
    with start_engine("real", vllm_0_33, tmp_path_factory.mktemp("vllm-0.33"), *flags, variables=variables) as running:
        before = scrape(running)
        responses = [send_request(running, messages).raise_for_status().json() for messages in prompts]
        window = diff_samples(before, scrape(running))
        assert isinstance(window, Counters)
        yield Server(running, responses, window)


def test_it_is_the_newest_verified_release(served: Server) -> None:
    """`NEWEST_VERIFIED_VERSION` is tested by a run. The log has the version, and that sampling is patched."""
    assert served.engine.client.get("/version").json() == {"version": str(NEWEST_VERIFIED_VERSION)}
    assert is_healthy(served.engine.client)
    log = served.engine.log_file.read_text()
    assert re.search(rf"vLLM server version {re.escape(str(NEWEST_VERIFIED_VERSION))}, serving model \S+", log)
    assert "sampling with speculation on CPU is mended (vLLM issue 55005" in log


def test_its_exposition_is_parsed(served: Server) -> None:
    window, counters = served.window, served.window.speculation
    assert sum(window.finished.get(reason, 0.0) for reason in ("length", "stop")) == REQUESTS == window.first_tokens
    assert window.generation_tokens == sum(response["usage"]["completion_tokens"] for response in served.responses)
    assert counters is not None
    assert counters.draft_tokens == NUM_SPECULATIVE_TOKENS * counters.drafts > 0
    assert len(counters.accepted_per_position) == NUM_SPECULATIVE_TOKENS
    assert list(counters.accepted_per_position) == sorted(counters.accepted_per_position, reverse=True)
    assert sum(counters.accepted_per_position) == counters.accepted
    length = rates.acceptance_length(window, Static(NUM_SPECULATIVE_TOKENS))
    assert isinstance(length, rates.Bounds)
    assert 1.5 < length.low <= length.high < NUM_SPECULATIVE_TOKENS + 1  # the drafter was trained for this target


def test_metrics_of_the_responses_agree_with_the_exposition(served: Server) -> None:
    counters = served.window.speculation
    assert counters is not None
    request_metrics = [response["metrics"]["speculative_decoding"] for response in served.responses]
    assert sum(metrics["num_spec_steps"] for metrics in request_metrics) == counters.drafts
    histogram = [
        sum(metrics["acceptance_histogram"][accepted] for metrics in request_metrics)
        for accepted in range(NUM_SPECULATIVE_TOKENS + 1)
    ]
    # Position i is accepted in every step that accepts more than i.
    assert [sum(histogram[i + 1 :]) for i in range(NUM_SPECULATIVE_TOKENS)] == list(counters.accepted_per_position)
    for metrics in request_metrics:
        assert sum(metrics["per_step_accepted"]) == metrics["num_accepted_draft_tokens"]


def test_rejections_of_a_paused_engine_are_no_failures(served: Server, prompts: list[Any]) -> None:
    """vLLM 0.33 returns 503 while it is paused (POST /pause, mode abort or wait): probes still succeed, and no counter of the
    canary analysis changes, so it never counts as a failure of the drafter. `keep` makes requests wait, as in 0.32."""
    running = served.engine
    for mode in ("abort", "wait"):
        before = scrape(running)
        assert running.client.post("/pause", params={"mode": mode}).json() == {"status": "paused"}
        response = send_request(running, prompts[0])
        assert response.status_code == 503
        assert "Generation is paused" in response.text
        assert is_healthy(running.client)
        assert running.client.post("/resume").is_success
        window = diff_samples(before, scrape(running))
        assert isinstance(window, Counters)
        assert not any(window.finished.values())
        assert isinstance(rates.error_share(window), rates.Unknown)
        assert window.speculation is not None
        assert window.speculation.drafts == window.request_steps == window.first_tokens == 0
    assert send_request(running, prompts[0]).status_code == 200


def test_the_simulator_has_the_flags_of_its_parser(vllm_0_33: Path) -> None:
    assert read_simulator_flags(str(NEWEST_VERIFIED_VERSION)) == read_vllm_flags(vllm_0_33)
