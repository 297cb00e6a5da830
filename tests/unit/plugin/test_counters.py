"""Attribution of vLLM's counters to the drafter that was loaded while they grew."""

from __future__ import annotations

import asyncio

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from aerie.engine.metrics.exposition import PARSED_SERIES
from aerie_vllm.counters import MAX_WINDOWS, SERIES, Counts, WindowLog, add, read_counts, subtract
from tests.unit.plugin.conftest import Run, Server
from tests.unit.plugin.fake_engine import make_drafter

OWN, BETTER = make_drafter("own")["digest"], make_drafter("better")["digest"]
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"


def test_series_are_summed_over_engines_and_keep_their_label() -> None:
    registry = CollectorRegistry()
    labels = ["model_name", "engine"]
    finished = Counter("vllm:request_success", "", [*labels, "finished_reason"], registry=registry)
    latency = Histogram("vllm:time_to_first_token_seconds", "", labels, buckets=(0.5, 1.0), registry=registry)
    steps = Histogram("vllm:inter_token_latency_seconds", "", labels, registry=registry)
    Gauge("vllm:num_requests_running", "", labels, registry=registry).labels("m", "0").set(3)
    Counter("vllm:other", "", labels, registry=registry).labels("m", "0").inc()
    for engine in ("0", "1"):
        finished.labels("m", engine, "stop").inc(2)
        finished.labels("m", engine, "length").inc()
        latency.labels("m", engine).observe(0.7)
        steps.labels("m", engine).observe(0.25)
    assert read_counts(registry) == {
        "vllm:request_success_total": {"stop": 4, "length": 2},
        "vllm:time_to_first_token_seconds_bucket": {"0.5": 0, "1.0": 2, "+Inf": 2},
        "vllm:time_to_first_token_seconds_count": {"": 2},
        "vllm:time_to_first_token_seconds_sum": {"": pytest.approx(1.4)},
        "vllm:inter_token_latency_seconds_count": {"": 2},
        "vllm:inter_token_latency_seconds_sum": {"": 0.5},
    }


def test_nothing_is_counted_without_vllms_counters() -> None:
    assert read_counts(CollectorRegistry()) == {}


def test_the_operator_reads_all_that_is_counted() -> None:
    gauges = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:cache_config_info"}
    assert PARSED_SERIES - gauges <= SERIES


def test_sums_and_differences() -> None:
    total: Counts = {}
    add(total, {"a": {"": 1, "x": 2}})
    add(total, {"a": {"x": 3}, "b": {"": 4}})
    assert total == {"a": {"": 1, "x": 5}, "b": {"": 4}}
    assert subtract(total, {"a": {"x": 2}}) == {"a": {"": 1, "x": 3}, "b": {"": 4}}


class Source:
    """A counter and a clock."""

    value = 0.0
    time = 1000.0

    def read(self) -> Counts:
        return {"n": {"": self.value}}

    def advance(self, count: float) -> None:
        self.value += count
        self.time += 1


def test_each_count_is_in_one_window() -> None:
    source = Source()
    source.value = 5  # before the first window
    log = WindowLog(source.read, lambda: source.time)
    for number, digest in enumerate("abab", 1):
        window = log.begin(digest, f"turn-{number}", settles=digest == "b")
        assert window.number == number
        source.advance(10 * number)
        log.settle(number)
        source.advance(1)
    log.settle(2)  # the timer of a window that has ended
    windows = log.list_windows(0)
    assert [(window["digest"], window["turn"]) for window in windows] == [
        (digest, f"turn-{n}") for n, digest in enumerate("abab", 1)
    ]
    assert [window["counts"] for window in windows] == [{"n": {"": n}} for n in (11, 1, 31, 1)]
    assert [window["settling_counts"] for window in windows] == [{"n": {"": n}} for n in (0, 20, 0, 40)]
    assert [window["ended"] for window in windows] == [1002, 1004, 1006, None]
    assert [window["settled"] for window in windows] == [1000, 1003, 1004, 1007]
    assert log.total_by_digest() == {"a": {"n": {"": 42}}, "b": {"n": {"": 62}}}
    assert [window["number"] for window in log.list_windows(2)] == [3, 4]


def test_a_window_that_ends_before_it_has_settled_counts_nothing() -> None:
    source = Source()
    log = WindowLog(source.read, lambda: source.time)
    log.begin("a", None, settles=True)
    source.advance(7)
    (window,) = log.list_windows(0)
    assert (window["settled"], window["settling_counts"], window["counts"]) == (None, {"n": {"": 7}}, {"n": {"": 0}})
    log.begin("b", None, settles=False)
    window = log.list_windows(0)[0]
    assert (window["settled"], window["settling_counts"], window["counts"]) == (1001, {"n": {"": 7}}, {"n": {"": 0}})


def test_old_windows_are_dropped_and_their_totals_are_not() -> None:
    source = Source()
    log = WindowLog(source.read, lambda: source.time)
    for _ in range(MAX_WINDOWS + 50):
        log.begin("a", None, settles=False)
        source.advance(1)
    windows = log.list_windows(0)
    assert (len(windows), windows[0]["number"]) == (MAX_WINDOWS + 1, 50)
    assert log.total_by_digest() == {"a": {"n": {"": MAX_WINDOWS + 50}}}


def test_counts_end_at_the_swap(run: Run, server: Server) -> None:
    async def work() -> None:
        async with server.started() as client:

            async def serve() -> None:
                while True:
                    server.engine.serve_steps(10)
                    await asyncio.sleep(0.01)

            requests = asyncio.ensure_future(serve())
            await asyncio.sleep(10)
            await client.put("better", 60, turn="1", settle_seconds=5)
            await asyncio.sleep(20)
            await client.put("own", turn="2", folder=None)
            await asyncio.sleep(5)
            requests.cancel()
            first, second, third = (await client.get("?after=0")).body["windows"]
            for window, accepted_per_draft in ((first, 1), (second, 2), (third, 1)):
                for counts in (window["counts"], window["settling_counts"]):
                    assert counts.get(ACCEPTED, {"": 0})[""] == accepted_per_draft * counts.get(DRAFTS, {"": 0})[""]
            assert second["settling_counts"][DRAFTS][""] == pytest.approx(5000, rel=0.02)
            assert second["counts"][DRAFTS][""] == pytest.approx(15_000, rel=0.02)
            assert (first["digest"], second["digest"], second["turn"], third["turn"]) == (OWN, BETTER, "1", "2")
            served = server.registry.get_sample_value(DRAFTS, {"model_name": "target", "engine": "0"})
            total = sum(window[part][DRAFTS][""] for window in (second, third) for part in ("counts", "settling_counts"))
            total += first["counts"][DRAFTS][""]
            assert total == served

            exposition = prometheus_client.generate_latest(server.registry).decode()
            assert f'aerie_drafter_info{{digest="{OWN}",kind="eagle3",own="true"}} 1.0' in exposition
            drafts = {
                digest: server.registry.get_sample_value("aerie_drafter_drafts_total", {"digest": digest})
                for digest in (OWN, BETTER)
            }
            accepted = server.registry.get_sample_value("aerie_drafter_accepted_tokens_total", {"digest": BETTER})
            assert sum(value or 0 for value in drafts.values()) == served
            assert accepted == 2 * (drafts[BETTER] or 0)
            assert server.registry.get_sample_value("aerie_drafter_swaps_total") == 2
            assert server.registry.get_sample_value("aerie_drafter_swap_seconds_count") == 2

    run(work())
