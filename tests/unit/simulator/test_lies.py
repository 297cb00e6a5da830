"""Metrics pages that are not true, and an engine that asks itself."""

from __future__ import annotations

import time

import pytest

from aerie.engine.metrics.exposition import ExpositionError, parse_exposition
from aerie_lab.engine import lies
from aerie_lab.engine.options import parse_options
from aerie_lab.errors import StateError

from .conftest import Start

NGRAM = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')


def test_an_unknown_lie_is_refused_by_name() -> None:
    with pytest.raises(StateError, match="there is no lie 'vague': one of gone, frozen, nan, negative, renamed, worse"):
        parse_options({"lie": "vague"})
    assert parse_options({"lie": "nan"}).lie == "nan"


def test_a_frozen_page_is_that_of_when_the_lie_began() -> None:
    teller = lies.MetricsCorruptor()
    assert teller.corrupt("one") == "one"
    teller.set_corruption("frozen")
    assert [teller.corrupt("two"), teller.corrupt("three")] == ["two", "two"]
    teller.set_corruption(None)
    assert teller.corrupt("four") == "four"


def test_a_drafter_that_gets_worse_loses_nothing_of_before() -> None:
    family = "vllm:spec_decode_num_accepted_tokens"
    page = (
        '{0}_total{{model_name="m"}} {1}\n{0}_per_pos_total{{position="0"}} {2}\n'
        'vllm:spec_decode_num_drafts_total{{model_name="accepted"}} {3}\n'
        'vllm:inter_token_latency_seconds_bucket{{le="+Inf"}} {3}\nvllm:inter_token_latency_seconds_count {3}\n'
        "vllm:inter_token_latency_seconds_sum {3}\n"
        "vllm:generation_tokens_total 40.0"
    )
    teller = lies.MetricsCorruptor("worse")
    assert teller.corrupt(page.format(family, "7.0", "5.0", "9.0")) == page.format(family, "7.0", "5.0", "9.0")
    assert teller.corrupt(page.format(family, "22.0", "12.0", "19.0")) == page.format(family, "17.0", "9.0", "23.0")
    teller.set_corruption(None)
    assert teller.corrupt(page.format(family, "23.0", "13.0", "20.0")) == page.format(family, "23.0", "13.0", "20.0")


def test_an_engine_lies_when_it_is_told_to_and_works_on(start: Start) -> None:
    running = start(*NGRAM, options={"asks": 200.0})
    began = time.monotonic()
    while running.metric("vllm:request_success_total") < 20:  # without a client
        assert time.monotonic() < began + 120
        time.sleep(0.05)

    def told(lie: str | None) -> bytes:
        running.client.post("/simulator/lie", json={"lie": lie}).raise_for_status()
        return running.client.get("/metrics").content

    truth = parse_exposition(told(None)).counters
    assert truth.speculation is not None
    assert truth.speculation.drafts > 0
    with pytest.raises(ExpositionError, match="no finite value"):
        parse_exposition(told("nan"))
    with pytest.raises(ExpositionError, match="below zero"):
        parse_exposition(told("negative"))
    with pytest.raises(ExpositionError, match="has no vllm:"):
        parse_exposition(told("renamed"))
    speculation = parse_exposition(told("worse")).counters.speculation
    assert speculation is not None
    assert speculation.accepted >= truth.speculation.accepted
    assert told("frozen") == running.client.get("/metrics").content
    told("gone")
    assert running.client.get("/metrics").status_code == 404
    assert running.client.get("/health").status_code == 200
    refused = running.client.post("/simulator/lie", json={"lie": "vague"})
    assert (refused.status_code, "there is no lie 'vague'" in refused.json()["error"]) == (400, True)
    assert parse_exposition(told(None)).counters.generation_tokens >= truth.generation_tokens
    assert running.end() == 0
