"""Answers of Prometheus, made of captured pages: they give what the pages give, and nothing where the pages would be refused."""

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
Answer = dict[str, Any]


def found(*answers: Answer, pod: str = "a") -> PrometheusScrape | str:
    return parse_newest_scrapes(merge_responses(*answers), "pod")[pod]


def scrape(*answers: Answer) -> PrometheusScrape:
    one = found(*answers)
    assert isinstance(one, PrometheusScrape), one
    return one


def without(page: bytes, name: str) -> bytes:
    return b"".join(line for line in page.splitlines(keepends=True) if not line.startswith(name.encode()))


# ---------------------------------------------------------------------------------------------------------------- what it gives
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_an_answer_gives_what_the_page_gives(path: Path) -> None:
    page = path.read_bytes()
    one = scrape(build_range_response({"a": [(T0, page)]}))
    assert one.timestamp == T0
    assert one.to_sample() == parse_exposition(page)


def test_the_newest_scrape_counts_of_each_pod() -> None:
    answered = parse_newest_scrapes(
        merge_responses(build_range_response({"a": [(T0, FIRST), (T0 + 15, SECOND)], "b": [(T0 + 7, FIRST)]})), "pod"
    )
    a, b = answered["a"], answered["b"]
    assert isinstance(a, PrometheusScrape)
    assert isinstance(b, PrometheusScrape)
    assert (a.timestamp, b.timestamp) == (T0 + 15, T0 + 7)
    assert (a.to_sample(), b.to_sample()) == (parse_exposition(SECOND), parse_exposition(FIRST))
    assert isinstance(diff_samples(b.to_sample(), a.to_sample()), Counters)


def test_the_pods_label_is_the_one_that_is_named() -> None:
    document = build_range_response({"a": [(T0, FIRST)]}, kubernetes_pod_name="mine")
    assert list(parse_newest_scrapes(merge_responses(document), "kubernetes_pod_name")) == ["mine"]


def test_a_scrape_of_which_not_all_has_arrived_is_passed_over_until_it_has_lasted() -> None:
    part = without(SECOND, "vllm:time_to_first_token_seconds")
    assert scrape(build_range_response({"a": [(T0, FIRST), (T0 + 15, part)]})).timestamp == T0
    late = scrape(build_range_response({"a": [(T0, FIRST), (T0 + 15, part), (T0 + 30, part)]}))
    assert late.timestamp == T0 + 30
    with pytest.raises(
        ExpositionError, match=r"^according to Prometheus, the metrics response has no vllm:time_to_first_token_seconds_bucket"
    ):
        late.to_sample()


def test_series_of_two_scrapes_are_never_mixed() -> None:
    page = FIRST.replace(b"vllm:num_preemptions_total", b"vllm:num_preemptions_total_of_before")
    one = scrape(build_range_response({"a": [(T0, FIRST), (T0 + 15, page), (T0 + 30, page)]}))
    assert one.timestamp == T0 + 30
    with pytest.raises(ExpositionError, match="no vllm:num_preemptions_total"):
        one.to_sample()


def test_another_container_of_the_pod_is_none_of_the_engines_business() -> None:
    proxy = b"process_start_time_seconds 5.0\nistio_requests_total 7.0\n"
    engine, side = (
        build_range_response({"a": [(T0, FIRST)]}),
        build_range_response({"a": [(T0 + 3, proxy)]}, job="mesh", instance="a:15020"),
    )
    one = scrape(side, engine)
    assert one.timestamp == T0
    assert one.to_sample() == parse_exposition(FIRST)


def test_an_engine_that_began_anew_shows() -> None:
    page = re.sub(rb"(?m)^process_start_time_seconds .*$", b"process_start_time_seconds 1.9e+09", FIRST)
    again = scrape(build_range_response({"a": [(T0, SECOND), (T0 + 15, page)]})).to_sample()
    reset = diff_samples(parse_exposition(SECOND), again)
    assert isinstance(reset, CounterReset)
    assert reset.message.startswith("the engine was restarted: it began at 1900000000")


# -------------------------------------------------------------------------------------------------------------- what it refuses
@pytest.mark.parametrize("value", ["NaN", "+Inf"])
def test_what_is_no_number(value: str) -> None:
    page = re.sub(rb"(?m)^(vllm:generation_tokens_total\{.*\}) .*$", rf"\1 {value}".encode(), FIRST)
    assert page != FIRST
    with pytest.raises(
        ExpositionError, match=r"according to Prometheus, the metrics response has a line that cannot be read \(no finite"
    ):
        scrape(build_range_response({"a": [(T0, page)]})).to_sample()


def test_a_counter_below_what_it_was_is_a_reset_as_on_a_page() -> None:
    page = re.sub(rb"(?m)^(vllm:generation_tokens_total\{.*\}) .*$", rb"\1 1.0", SECOND)
    one = scrape(build_range_response({"a": [(T0, page)]})).to_sample()
    assert one == parse_exposition(page)
    assert isinstance(diff_samples(parse_exposition(FIRST), one), CounterReset)


def test_a_page_under_other_names_is_refused_as_a_page_is() -> None:
    page = FIRST.replace(b"vllm:", b"vllm_v2:")
    with pytest.raises(ExpositionError, match="no vllm:"):
        parse_exposition(page)
    with pytest.raises(ExpositionError, match="no vllm:"):
        scrape(build_range_response({"a": [(T0, page)]})).to_sample()


def test_a_pod_that_could_not_be_scraped_is_not_one_with_a_false_page() -> None:
    down = json.loads(json.dumps(build_range_response({"a": [(T0, "")]})).replace('"1"', '"0"'))
    assert found(down) == "could not be scraped (up is 0)"
    two = build_range_response({"a": [(T0, "")]}, job="mesh")
    assert "which of its scrapes would be the engine's does not show" in str(found(down, two))
    nothing = build_range_response({"a": [(T0, b"process_start_time_seconds 5.0\n")]}, include_up=False)
    assert "has no metrics of vLLM there" in str(found(nothing))


def test_a_pod_that_is_scraped_twice_is_not_counted_twice() -> None:
    mine, other = build_range_response({"a": [(T0, FIRST)]}), build_range_response({"a": [(T0 + 3, FIRST)]}, job="annotations")
    assert found(mine, other) == (
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
def test_an_answer_that_is_none_is_told_by_its_kind_and_not_by_its_words(body: bytes) -> None:
    with pytest.raises(PrometheusResponseError, match=r"^[a-z]") as caught:
        parse_newest_scrapes(body, "pod")
    assert re.sub(r" \(bad_data\)|\d+", "", str(caught.value)) in {
        "an invalid Prometheus response",
        "no result of type matrix",
        "a series without the label pod",
        "more than  series",
        "more than  samples of a series",
    }


def test_a_pod_with_thousands_of_targets_is_told_by_names_of_labels_alone() -> None:
    series = [
        {
            "metric": {"__name__": "vllm:num_preemptions_total", "pod": "a", "hunter2": str(n), "job": str(n)},
            "values": [[T0, "1"]],
        }
        for n in range(10_000)
    ]
    told = found({"status": "success", "data": {"resultType": "matrix", "result": series}})
    assert str(told).startswith("is scraped more than once (by job): name one")


def test_an_answer_without_series_and_one_with_native_histograms() -> None:
    assert parse_newest_scrapes(b'{"status": "success", "data": {"resultType": "matrix", "result": []}}', "pod") == {}
    native = {"metric": {"__name__": "vllm:time_to_first_token_seconds", "pod": "a"}, "histograms": [[T0, {}]]}
    assert scrape(GOOD, {"data": {"result": [native]}}).to_sample() == parse_exposition(FIRST)


# --------------------------------------------------------------------------------------------------------------------- the query
def test_the_query_names_what_is_read_and_no_more() -> None:
    text = build_range_query(["chat-r1-a", "chat.b"], "pod", {"namespace": "default", "cluster": 'a"\\b'}, 30)
    names, rest = text.removeprefix('{__name__=~"').split('",', 1)
    assert {"up", "process_start_time_seconds", "vllm:spec_decode_num_drafts_total"} <= set(names.split("|"))
    assert "vllm:request_prompt_tokens_bucket" not in names
    assert rest == r"""pod=~"chat\\-r1\\-a|chat\\.b",namespace="default",cluster="a\"\\b"}[30000ms]"""
