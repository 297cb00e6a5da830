"""The window over a pod's scrapes: how far it reaches, and when it starts over."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.controller.scraping.sliding_window import MAX_HALF_SECONDS, MIN_HALF_REQUESTS, MIN_HALF_SECONDS, SlidingWindow
from aerie.engine.metrics.exposition import parse_exposition
from aerie.engine.metrics.sample import Counters, Sample
from tests.unit.rollout.in_place.fleet import Counts

DATA = Path(__file__).parents[2] / "engine" / "data"
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


# ---------------------------------------------------------------------------------------------------------------- reference
WARMUP = 300.0


@given(st.floats(0.0, 2000.0), st.lists(st.tuples(st.floats(1.0, 250.0), st.integers(0, 300)), max_size=60))
def test_warm_counts_are_all_of_the_time_after_the_warm_up(warmup: float, steps: list[tuple[float, int]]) -> None:
    sliding_window, at, counts, earlier = SlidingWindow(), 1000.0, Counts(), 0.0
    for seconds, request_count in steps:
        sliding_window.add("c1", engine_sample(counts), at, STALE)
        sums = sliding_window.sums(at, STALE, warmup)
        assert sums is None or sums.warm.requests in (0.0, sums.first_tokens)
        assert sums is None or sums.warm.requests <= counts.requests - earlier, "requests of the warm-up"
        at += seconds
        counts = Counts(counts.tokens + 100 * request_count, counts.steps + 40 * request_count, counts.requests + request_count)
        if at - 1000.0 < warmup:
            earlier = counts.requests


def engine_sample(counts: Counts) -> Sample:
    return dataclasses.replace(BEFORE, counters=counts.since(Counts()))


def time_until_reference(
    replicas: int, requests_per_second: float, interval: float, hours: float = 12
) -> tuple[float, float] | None:
    """Return after how many seconds the pods have a reference, and the reference; None if they have none.

    An answer has 100 tokens, and requests differ by 15 % of 2.5 tokens per step. In the warm-up, pods accept everything.
    """
    rng = random.Random(replicas)  # noqa: S311 - has to be the same each time
    windows, counts = [SlidingWindow() for _ in range(replicas)], [Counts() for _ in range(replicas)]
    next_requests = [rng.expovariate(requests_per_second / replicas) if requests_per_second else 1e9 for _ in range(replicas)]
    at = 0.0
    while at < hours * 3600:
        sums = []
        for number, sliding_window in enumerate(windows):
            while next_requests[number] < at:
                length = 4.0 if next_requests[number] < WARMUP else max(1.0, 2.5 * (1 + 0.15 * rng.gauss()))
                before = counts[number]
                counts[number] = Counts(before.tokens + 100, before.steps + 100 / length, before.requests + 1)
                next_requests[number] += rng.expovariate(requests_per_second / replicas)
            sliding_window.add("c1", engine_sample(counts[number]), at, 5 * interval)
            if (pod_sums := sliding_window.sums(at, 5 * interval, WARMUP)) is not None:
                sums.append(pod_sums)
        total = functools.reduce(lambda left, right: left.add(right) or left, sums) if sums else None
        if total is not None and (reference := total.arm_metrics.reference_acceptance_length) is not None:
            return at, reference
        at += interval
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "requests_per_second", "minutes"),
    [
        (1, 20.0, (7, 10)),
        (40, 20.0, (30, 45)),
        (1000, 20.0, (60, 75)),
        (1, 0.2, (60, 65)),
        (40, 0.2, (60, 75)),
        (1000, 0.2, (60, 180)),
    ],
)
def test_any_traffic_gives_a_reference(replicas: int, requests_per_second: float, minutes: tuple[int, int]) -> None:
    result = time_until_reference(replicas, requests_per_second, 300.0 if replicas == 1000 else 30.0)
    assert result is not None
    seconds, reference = result
    assert minutes[0] <= seconds / 60 <= minutes[1]
    assert reference == pytest.approx(2.5, rel=0.06)


@pytest.mark.parametrize("requests_per_second", [0.0, 0.01])
def test_hardly_any_traffic_gives_no_reference(requests_per_second: float) -> None:
    assert time_until_reference(1, requests_per_second, 60.0) is None
