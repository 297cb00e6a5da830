"""The metrics of `aerie.engine` against real vLLM: names, buckets, and what the counters count.

One server runs as a plain process: the lab adds nothing here. Speculation by prompt lookup needs no drafter.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from aerie.engine.metrics import rates
from aerie.engine.metrics.exposition import parse_exposition
from aerie.engine.metrics.names import Metric, MetricType
from aerie.engine.metrics.sample import Counters, Sample, diff_samples
from aerie.engine.speculation import Static
from aerie_lab.testing import wait_until
from aerie_lab.testing.vllm_start import build_environment

pytestmark = pytest.mark.timeout(2400)  # most of it is for a first installation of vLLM

START = 300.0
"""Seconds for a start: 35 on an idle machine with two cores, several times that on a busy one."""
BLOCK = 128
"""Tokens of a block of KV cache: vLLM's default on a CPU."""
SPECULATION = '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":3,"prompt_lookup_min":1}'


@dataclass(frozen=True)
class Engine:
    """A running server and a client of it."""

    client: httpx.Client

    def read_metrics(self) -> bytes:
        return self.client.get("/metrics").raise_for_status().content

    def scrape(self) -> Sample:
        return parse_exposition(self.read_metrics())

    def complete(self, prompt: str, tokens: int) -> None:
        """Request exactly `tokens` of output; a byte is a token of the tiny model."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        self.client.post("/v1/completions", json=body).raise_for_status()


@pytest.fixture(scope="module")
def engine(vllm: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(vllm / "vllm"), "serve", str(tiny_llama), "--served-model-name", "tiny", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--max-model-len", "1024", "--max-num-seqs", "16", "--dtype", "float32", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", "67108864", "--speculative-config", SPECULATION]
    log = tmp_path_factory.mktemp("vllm") / "log"
    with (
        log.open("wb") as output,
        subprocess.Popen(command, env=build_environment(), stdout=output, stderr=output, process_group=0) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):

        def healthy() -> bool:
            assert server.poll() is None, log.read_text()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                return client.get("/health").is_success
            return False

        try:
            wait_until(healthy, "vLLM to be healthy", timeout_seconds=START, interval_seconds=0.5)
            yield Engine(client)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # it has no state, and its workers are in its group


def test_every_metric_is_in_the_exposition(engine: Engine) -> None:
    families = {family.name: family for family in text_string_to_metric_families(engine.read_metrics().decode())}
    for metric in Metric:
        row = metric.definition
        family = families[row.name.removesuffix("_total") if row.metric_type is MetricType.COUNTER else row.name]
        assert family.type == row.metric_type
        assert all(set(row.labels) <= set(sample.labels) for sample in family.samples)
        edges = [float(sample.labels["le"]) for sample in family.samples if sample.name == f"{row.name}_bucket"]
        assert tuple(edges[:-1]) == row.buckets


def test_the_counters_of_known_requests(engine: Engine) -> None:
    """The load is 16 requests without a common prefix, 24 tokens each, four at a time."""
    before = engine.scrape()
    with ThreadPoolExecutor(4) as requests:
        list(requests.map(lambda index: engine.complete(f"{index:02d}" + "abcabcabc" * 6, 24), range(16)))
    window = diff_samples(before, engine.scrape())
    assert isinstance(window, Counters)
    speculation = window.speculation
    assert speculation is not None
    assert (window.first_tokens, window.finished["length"], window.generation_tokens) == (16, 16, 16 * 24)
    assert window.computed_prompt_tokens == window.prompt_tokens == 16 * 56
    assert sum(speculation.accepted_per_position) == speculation.accepted
    # Each step of a request is one observation, with or without a draft, and for any number of tokens.
    assert 0 < speculation.drafts <= window.request_steps < 16 * 23
    # Accepted tokens after the end of a request are counted, but were never output.
    emitted = window.generation_tokens - window.first_tokens
    assert emitted <= window.request_steps + speculation.accepted
    assert rates.acceptance_length(window, Static(3)) == rates.Bounds(*[1 + speculation.accepted / speculation.drafts] * 2)
    batch = rates.mean_batch(window)
    assert isinstance(batch, rates.Bounds)
    assert 1 <= batch.low <= 4


def test_a_cached_prompt_with_one_token_left_counts_as_a_draft(engine: Engine) -> None:
    """These dummy drafts are why rates have bounds: no verification, and yet a draft for each request but the first."""
    before = engine.scrape()
    prompt = "".join(chr(33 + index % 90) for index in range(BLOCK + 1))
    for _ in range(8):
        engine.complete(prompt, 1)
    window = diff_samples(before, engine.scrape())
    assert isinstance(window, Counters)
    assert window.speculation is not None
    assert (window.speculation.drafts, window.speculation.draft_tokens, window.speculation.accepted) == (7, 21, 0)
    assert window.request_steps == 0
    assert window.prompt_tokens - window.computed_prompt_tokens == 7 * BLOCK
    assert rates.true_drafts(window, Static(3)) == rates.Bounds(0, 7)
    assert rates.acceptance_length(window, Static(3)) == rates.Bounds(1, 4)
