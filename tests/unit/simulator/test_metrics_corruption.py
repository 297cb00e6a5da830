"""Corrupt metrics, and an engine that sends requests to itself."""

from __future__ import annotations

import time

import pytest

from aerie.engine.metrics.exposition import ExpositionError, parse_exposition
from aerie_lab.engine.metrics_corruption import MetricsCorruptor
from aerie_lab.engine.options import parse_options
from aerie_lab.errors import StateError

from .conftest import Start

NGRAM = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')


def test_an_unknown_corruption_is_rejected_by_name() -> None:
    names = "missing, frozen, nan, negative, renamed, worse-drafter"
    with pytest.raises(StateError, match=f"there is no metrics corruption 'vague': one of {names}"):
        parse_options({"metrics_corruption": "vague"})
    assert parse_options({"metrics_corruption": "nan"}).metrics_corruption == "nan"


def test_frozen_metrics_keep_the_values_of_the_start_of_the_corruption() -> None:
    corruptor = MetricsCorruptor()
    assert corruptor.corrupt("one") == "one"
    corruptor.set_corruption("frozen")
    assert [corruptor.corrupt("two"), corruptor.corrupt("three")] == ["two", "two"]
    corruptor.set_corruption(None)
    assert corruptor.corrupt("four") == "four"


def test_a_worse_drafter_loses_nothing_of_earlier_counts() -> None:
    family = "vllm:spec_decode_num_accepted_tokens"
    exposition = (
        '{0}_total{{model_name="m"}} {1}\n{0}_per_pos_total{{position="0"}} {2}\n'
        'vllm:spec_decode_num_drafts_total{{model_name="accepted"}} {3}\n'
        'vllm:inter_token_latency_seconds_bucket{{le="+Inf"}} {3}\nvllm:inter_token_latency_seconds_count {3}\n'
        "vllm:inter_token_latency_seconds_sum {3}\n"
        "vllm:generation_tokens_total 40.0"
    )
    corruptor = MetricsCorruptor("worse-drafter")
    for exposed, expected in ((("7.0", "5.0", "9.0"),) * 2, (("22.0", "12.0", "19.0"), ("17.0", "9.0", "23.0"))):
        assert corruptor.corrupt(exposition.format(family, *exposed)) == exposition.format(family, *expected)
    corruptor.set_corruption(None)
    unchanged = exposition.format(family, "23.0", "13.0", "20.0")
    assert corruptor.corrupt(unchanged) == unchanged


@pytest.mark.slow
def test_an_engine_exposes_corrupt_metrics_on_request_and_keeps_working(start: Start) -> None:
    running = start(*NGRAM, options={"own_requests_per_second": 200.0})
    began = time.monotonic()
    while running.metric("vllm:request_success_total") < 20:  # without a client
        assert time.monotonic() < began + 120
        time.sleep(0.05)

    def expose(corruption: str | None) -> bytes:
        running.client.post("/simulator/metrics-corruption", json={"corruption": corruption}).raise_for_status()
        return running.client.get("/metrics").content

    counters = parse_exposition(expose(None)).counters
    assert counters.speculation is not None
    assert counters.speculation.drafts > 0
    with pytest.raises(ExpositionError, match="no finite value"):
        parse_exposition(expose("nan"))
    with pytest.raises(ExpositionError, match="below zero"):
        parse_exposition(expose("negative"))
    with pytest.raises(ExpositionError, match="has no vllm:"):
        parse_exposition(expose("renamed"))
    speculation = parse_exposition(expose("worse-drafter")).counters.speculation
    assert speculation is not None
    assert speculation.accepted >= counters.speculation.accepted
    assert expose("frozen") == running.client.get("/metrics").content
    expose("missing")
    assert running.client.get("/metrics").status_code == 404
    assert running.client.get("/health").status_code == 200
    rejected = running.client.post("/simulator/metrics-corruption", json={"corruption": "vague"})
    assert (rejected.status_code, "there is no metrics corruption 'vague'" in rejected.json()["error"]) == (400, True)
    assert parse_exposition(expose(None)).counters.generation_tokens >= counters.generation_tokens
    assert running.end() == 0
