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


def engine() -> list[Sample]:
    """Samples of an engine that gets 16 requests, with 303 request-steps, from each to the next."""
    sums = itertools.accumulate([BEFORE.counters] + [STEP] * 200, Counters.__add__)
    return [dataclasses.replace(BEFORE, counters=counters) for counters in sums]


def requests(readings: SlidingWindow, now: float) -> float | None:
    window = readings.counters(now, STALE)
    return None if window is None else window.first_tokens


def test_no_window_before_the_second_scrape() -> None:
    readings = SlidingWindow()
    assert readings.counters(0, STALE) is None
    readings.add("c1", BEFORE, 0, STALE)
    assert readings.counters(0, STALE) is None
    readings.add("c1", AFTER, 60, STALE)
    assert requests(readings, 60) == 16


def test_under_load_it_covers_the_last_minutes() -> None:
    readings, samples = SlidingWindow(), engine()
    for number, sample in enumerate(samples):  # 16 requests each 2 s: 500 of them are there before a half is long enough
        readings.add("c1", sample, 2.0 * number, STALE)
    found = requests(readings, 2.0 * len(samples))
    assert found is not None
    assert MIN_HALF_REQUESTS <= MIN_HALF_SECONDS * 8 <= found <= 2 * MIN_HALF_SECONDS * 8 + 16


def test_with_few_requests_it_reaches_further_back() -> None:
    readings, samples = SlidingWindow(), engine()
    for number, sample in enumerate(samples):  # 16 requests a minute
        readings.add("c1", sample, 60.0 * number, STALE)
    found = requests(readings, 60.0 * len(samples))
    assert found is not None
    assert MIN_HALF_REQUESTS - 16 <= found <= 2 * MIN_HALF_REQUESTS + 16


def test_with_very_few_it_reaches_back_an_hour_at_most_and_without_any_it_stays() -> None:
    readings, samples = SlidingWindow(), engine()
    at = 0.0
    for sample in samples[:100]:  # 16 requests in five minutes
        readings.add("c1", sample, at, STALE)
        at += STALE
    busy = requests(readings, at - STALE)
    assert busy is not None
    assert busy <= 16 * (2 * MAX_HALF_SECONDS / STALE + 1)
    for _ in range(100):
        readings.add("c1", samples[99], at, STALE)
        at += STALE
    idle = requests(readings, at - STALE)
    assert idle is not None
    assert 0 < idle <= busy


def test_another_run_starts_over_by_each_of_its_signs() -> None:
    for run, sample in (
        ("c2", AFTER),  # another container, though the page does not say so
        ("c1", dataclasses.replace(AFTER, process_start_time=1.0)),
        ("c1", dataclasses.replace(AFTER, counters=STEP)),  # counters that fell
        ("c1", dataclasses.replace(AFTER, engines=frozenset({"0", "1"}))),
    ):
        readings = SlidingWindow()
        readings.add("c1", BEFORE, 0, STALE)
        readings.add("c1", AFTER, 60, STALE)
        readings.add(run, sample, 120, STALE)
        assert readings.counters(120, STALE) is None


def test_a_gap_starts_over_and_a_stale_pod_has_no_window() -> None:
    readings = SlidingWindow()
    readings.add("c1", BEFORE, 0, STALE)
    readings.add("c1", AFTER, 60, STALE)
    assert readings.counters(60 + STALE, STALE) is not None
    assert readings.counters(61 + STALE, STALE) is None
    readings.add("c1", AFTER, 61 + STALE, STALE)
    assert readings.counters(61 + STALE, STALE) is None
