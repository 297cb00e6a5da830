"""Responses of Prometheus with captured expositions: they give the same samples, and errors where the expositions would."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from aerie.engine.metrics.exposition import ExpositionError, parse_exposition
from aerie.engine.metrics.promql import (
    MAX_RESPONSE_SERIES,
    PrometheusResponseError,
    PrometheusScrape,
    build_range_query,
    parse_newest_scrapes,
)
from aerie.engine.metrics.sample import CounterReset, Counters, diff_samples
from aerie_lab.testing.prometheus import build_range_response, merge_responses

DATA = Path(__file__).parent / "data"
PAGES = sorted(DATA.glob("*.prom"))
FIRST, SECOND = ((DATA / f"vllm-0.32.0-ngram-{number}.prom").read_bytes() for number in (1, 2))
T0 = 1_790_000_000.123
Response = dict[str, Any]


def newest_or_reason(*responses: Response, pod: str = "a") -> PrometheusScrape | str:
    return parse_newest_scrapes(merge_responses(*responses), "pod")[pod]


def scrape(*responses: Response) -> PrometheusScrape:
    newest_scrape = newest_or_reason(*responses)
    assert isinstance(newest_scrape, PrometheusScrape), newest_scrape
    return newest_scrape


def remove_series(body: bytes, name: str) -> bytes:
    return b"".join(line for line in body.splitlines(keepends=True) if not line.startswith(name.encode()))


# ----------------------------------------------------------------------------------------------------------------------- samples
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_response_gives_the_sample_of_the_exposition(path: Path) -> None:
    body = path.read_bytes()
    newest_scrape = scrape(build_range_response({"a": [(T0, body)]}))
    assert newest_scrape.timestamp == T0
    assert newest_scrape.to_sample() == parse_exposition(body)


def test_the_newest_scrape_of_each_pod() -> None:
    scrapes = parse_newest_scrapes(
        merge_responses(build_range_response({"a": [(T0, FIRST), (T0 + 15, SECOND)], "b": [(T0 + 7, FIRST)]})), "pod"
    )
    a, b = scrapes["a"], scrapes["b"]
    assert isinstance(a, PrometheusScrape)
    assert isinstance(b, PrometheusScrape)
    assert (a.timestamp, b.timestamp) == (T0 + 15, T0 + 7)
    assert (a.to_sample(), b.to_sample()) == (parse_exposition(SECOND), parse_exposition(FIRST))
    assert isinstance(diff_samples(b.to_sample(), a.to_sample()), Counters)


def test_pods_are_identified_by_the_given_label() -> None:
    document = build_range_response({"a": [(T0, FIRST)]}, kubernetes_pod_name="mine")
    assert list(parse_newest_scrapes(merge_responses(document), "kubernetes_pod_name")) == ["mine"]


def test_an_incomplete_scrape_is_skipped_unless_it_repeats() -> None:
    part = remove_series(SECOND, "vllm:time_to_first_token_seconds")
    assert scrape(build_range_response({"a": [(T0, FIRST), (T0 + 15, part)]})).timestamp == T0
    late = scrape(build_range_response({"a": [(T0, FIRST), (T0 + 15, part), (T0 + 30, part)]}))
    assert late.timestamp == T0 + 30
    with pytest.raises(
        ExpositionError, match=r"^according to Prometheus, the metrics response has no vllm:time_to_first_token_seconds_bucket"
    ):
        late.to_sample()


def test_series_of_two_scrapes_are_never_mixed() -> None:
    body = FIRST.replace(b"vllm:num_preemptions_total", b"vllm:num_preemptions_total_of_before")
    newest_scrape = scrape(build_range_response({"a": [(T0, FIRST), (T0 + 15, body), (T0 + 30, body)]}))
    assert newest_scrape.timestamp == T0 + 30
    with pytest.raises(ExpositionError, match="no vllm:num_preemptions_total"):
        newest_scrape.to_sample()


def test_series_of_another_container_are_ignored() -> None:
    proxy = b"process_start_time_seconds 5.0\nistio_requests_total 7.0\n"
    engine, side = (
        build_range_response({"a": [(T0, FIRST)]}),
        build_range_response({"a": [(T0 + 3, proxy)]}, job="mesh", instance="a:15020"),
    )
    newest_scrape = scrape(side, engine)
    assert newest_scrape.timestamp == T0
    assert newest_scrape.to_sample() == parse_exposition(FIRST)


def test_a_restarted_engine_is_a_counter_reset() -> None:
    body = re.sub(rb"(?m)^process_start_time_seconds .*$", b"process_start_time_seconds 1.9e+09", FIRST)
    restarted = scrape(build_range_response({"a": [(T0, SECOND), (T0 + 15, body)]})).to_sample()
    reset = diff_samples(parse_exposition(SECOND), restarted)
    assert isinstance(reset, CounterReset)
    assert reset.message.startswith("the engine was restarted: it began at 1900000000")


# ------------------------------------------------------------------------------------------------------------------------ errors
@pytest.mark.parametrize("value", ["NaN", "+Inf"])
def test_values_that_are_no_numbers_are_rejected(value: str) -> None:
    body = re.sub(rb"(?m)^(vllm:generation_tokens_total\{.*\}) .*$", rf"\1 {value}".encode(), FIRST)
    assert body != FIRST
    with pytest.raises(
        ExpositionError, match=r"according to Prometheus, the metrics response has a line that cannot be read \(no finite"
    ):
        scrape(build_range_response({"a": [(T0, body)]})).to_sample()


def test_a_counter_that_fell_is_a_reset() -> None:
    body = re.sub(rb"(?m)^(vllm:generation_tokens_total\{.*\}) .*$", rb"\1 1.0", SECOND)
    sample = scrape(build_range_response({"a": [(T0, body)]})).to_sample()
    assert sample == parse_exposition(body)
    assert isinstance(diff_samples(parse_exposition(FIRST), sample), CounterReset)


def test_series_with_other_names_are_rejected() -> None:
    body = FIRST.replace(b"vllm:", b"vllm_v2:")
    with pytest.raises(ExpositionError, match="no vllm:"):
        parse_exposition(body)
    with pytest.raises(ExpositionError, match="no vllm:"):
        scrape(build_range_response({"a": [(T0, body)]})).to_sample()


def test_a_pod_that_could_not_be_scraped_has_a_reason() -> None:
    down = json.loads(json.dumps(build_range_response({"a": [(T0, "")]})).replace('"1"', '"0"'))
    assert newest_or_reason(down) == "could not be scraped (up is 0)"
    two = build_range_response({"a": [(T0, "")]}, job="mesh")
    assert "which of its scrapes would be the engine's does not show" in str(newest_or_reason(down, two))
    nothing = build_range_response({"a": [(T0, b"process_start_time_seconds 5.0\n")]}, include_up=False)
    assert "has no metrics of vLLM there" in str(newest_or_reason(nothing))


def test_a_pod_that_is_scraped_twice_has_a_reason() -> None:
    first, second = build_range_response({"a": [(T0, FIRST)]}), build_range_response({"a": [(T0 + 3, FIRST)]}, job="annotations")
    assert newest_or_reason(first, second) == (
        "is scraped more than once (by job): name one of them in spec.metrics.source.prometheus.matchLabels"
    )


GOOD = build_range_response({"a": [(T0, FIRST)]})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"null",
        b'{"status": "error", "errorType": "bad_data"}',
        b'{"status": "success", "data": {"resultType": "vector", "result": []}}',
        b'{"status": "success", "data": {"resultType": "matrix", "result": 7}}',
        json.dumps(GOOD).replace('"pod"', '"pods"').encode(),
        json.dumps(GOOD).replace(str(T0), '"soon"').encode(),
        json.dumps(GOOD)[:1000].encode(),
        b"\xff\xfe",
        b"root-password: hunter2\nconnection: postgres://db",
        b'{"status": "error", "errorType": "hunter2", "error": "hunter2"}',
        b'{"status": "hunter2", "data": {"resultType": "matrix", "result": []}}',
        b'{"status": "success", "data": {"resultType": "matrix", "result": [{"metric": {"secret": "hunter2"}}]}}',
        b'{"status": "success", "data": {"resultType": "matrix", "result": [{"metric": {"pod": "a"}, "values": [["x", 1]]}]}}',
        b'{"status": "success", "data": {"resultType": "matrix", "result": [{"metric": {"pod": "a"}, "values": [[1]]}]}}',
        b"[" * 100_000,
        b'{"status": "success", "data": {"resultType": "matrix", "result": [' + b"{}," * MAX_RESPONSE_SERIES + b"{}]}}",
        json.dumps(GOOD).replace('"values": [', '"values": [' + f'[{T0}, "1"],' * 100, 1).encode(),
    ],
    ids=range(20),
)
def test_invalid_responses_are_rejected_without_their_text(body: bytes) -> None:
    with pytest.raises(PrometheusResponseError, match=r"^[a-z]") as caught:
        parse_newest_scrapes(body, "pod")
    assert re.sub(r" \(bad_data\)|\d+", "", str(caught.value)) in {
        "an invalid Prometheus response",
        "no result of type matrix",
        "a series without the label pod",
        "more than  series",
        "more than  samples of a series",
    }


def test_the_message_of_many_targets_has_only_label_names() -> None:
    series = [
        {
            "metric": {"__name__": "vllm:num_preemptions_total", "pod": "a", "hunter2": str(n), "job": str(n)},
            "values": [[T0, "1"]],
        }
        for n in range(10_000)
    ]
    message = newest_or_reason({"status": "success", "data": {"resultType": "matrix", "result": series}})
    assert str(message).startswith("is scraped more than once (by job): name one")


def test_responses_without_series_or_with_native_histograms() -> None:
    assert parse_newest_scrapes(b'{"status": "success", "data": {"resultType": "matrix", "result": []}}', "pod") == {}
    native = {"metric": {"__name__": "vllm:time_to_first_token_seconds", "pod": "a"}, "histograms": [[T0, {}]]}
    assert scrape(GOOD, {"data": {"result": [native]}}).to_sample() == parse_exposition(FIRST)


# --------------------------------------------------------------------------------------------------------------------- the query
def test_the_query_selects_only_the_parsed_series() -> None:
    text = build_range_query(["chat-r1-a", "chat.b"], "pod", {"namespace": "default", "cluster": 'a"\\b'}, 30)
    names, rest = text.removeprefix('{__name__=~"').split('",', 1)
    assert {"up", "process_start_time_seconds", "vllm:spec_decode_num_drafts_total"} <= set(names.split("|"))
    assert "vllm:request_prompt_tokens_bucket" not in names
    assert rest == r"""pod=~"chat\\-r1\\-a|chat\\.b",namespace="default",cluster="a\"\\b"}[30000ms]"""
