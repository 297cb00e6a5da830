"""The window over a pod's scrapes: how far it reaches, and when it starts over."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

from aerie.controller.scraping.sliding_window import MAX_HALF_SECONDS, MIN_HALF_REQUESTS, MIN_HALF_SECONDS, SlidingWindow
from aerie.engine.metrics.exposition import parse_exposition
from aerie.engine.metrics.sample import Counters, Sample

DATA = Path(__file__).parents[1] / "engine" / "data"
BEFORE, AFTER = (parse_exposition((DATA / f"vllm-0.32.0-ngram-{number}.prom").read_bytes()) for number in (1, 2))
STALE = 300.0


STEP = AFTER.counters - BEFORE.counters


def build_samples() -> list[Sample]:
    """Return samples of an engine that gets 16 requests, with 303 request-steps, from each sample to the next."""
    sums = itertools.accumulate([BEFORE.counters] + [STEP] * 200, Counters.__add__)
    return [dataclasses.replace(BEFORE, counters=counters) for counters in sums]


def requests(sliding_window: SlidingWindow, now: float) -> float | None:
    window = sliding_window.counters(now, STALE)
    return None if window is None else window.first_tokens


def test_no_window_before_the_second_scrape() -> None:
    sliding_window = SlidingWindow()
    assert sliding_window.counters(0, STALE) is None
    sliding_window.add("c1", BEFORE, 0, STALE)
    assert sliding_window.counters(0, STALE) is None
    sliding_window.add("c1", AFTER, 60, STALE)
    assert requests(sliding_window, 60) == 16


def test_window_under_load_covers_the_last_minutes() -> None:
    sliding_window, samples = SlidingWindow(), build_samples()
    for number, sample in enumerate(samples):  # 16 requests each 2 s: 500 of them are there before a half is long enough
        sliding_window.add("c1", sample, 2.0 * number, STALE)
    request_count = requests(sliding_window, 2.0 * len(samples))
    assert request_count is not None
    assert MIN_HALF_REQUESTS <= MIN_HALF_SECONDS * 8 <= request_count <= 2 * MIN_HALF_SECONDS * 8 + 16


def test_window_with_few_requests_reaches_further_back() -> None:
    sliding_window, samples = SlidingWindow(), build_samples()
    for number, sample in enumerate(samples):  # 16 requests a minute
        sliding_window.add("c1", sample, 60.0 * number, STALE)
    request_count = requests(sliding_window, 60.0 * len(samples))
    assert request_count is not None
    assert MIN_HALF_REQUESTS - 16 <= request_count <= 2 * MIN_HALF_REQUESTS + 16


def test_window_with_few_requests_is_bounded_and_stays_when_idle() -> None:
    sliding_window, samples = SlidingWindow(), build_samples()
    at = 0.0
    for sample in samples[:100]:  # 16 requests in five minutes
        sliding_window.add("c1", sample, at, STALE)
        at += STALE
    busy_request_count = requests(sliding_window, at - STALE)
    assert busy_request_count is not None
    assert busy_request_count <= 16 * (2 * MAX_HALF_SECONDS / STALE + 1)
    for _ in range(100):
        sliding_window.add("c1", samples[99], at, STALE)
        at += STALE
    idle_request_count = requests(sliding_window, at - STALE)
    assert idle_request_count is not None
    assert 0 < idle_request_count <= busy_request_count


def test_restarted_engine_starts_a_new_window() -> None:
    for run, sample in (
        ("c2", AFTER),  # another container, though the metrics do not show it
        ("c1", dataclasses.replace(AFTER, process_start_time=1.0)),
        ("c1", dataclasses.replace(AFTER, counters=STEP)),  # counters that fell
        ("c1", dataclasses.replace(AFTER, engines=frozenset({"0", "1"}))),
    ):
        sliding_window = SlidingWindow()
        sliding_window.add("c1", BEFORE, 0, STALE)
        sliding_window.add("c1", AFTER, 60, STALE)
        sliding_window.add(run, sample, 120, STALE)
        assert sliding_window.counters(120, STALE) is None


def test_gap_starts_a_new_window_and_a_stale_pod_has_none() -> None:
    sliding_window = SlidingWindow()
    sliding_window.add("c1", BEFORE, 0, STALE)
    sliding_window.add("c1", AFTER, 60, STALE)
    assert sliding_window.counters(60 + STALE, STALE) is not None
    assert sliding_window.counters(61 + STALE, STALE) is None
    sliding_window.add("c1", AFTER, 61 + STALE, STALE)
    assert sliding_window.counters(61 + STALE, STALE) is None
