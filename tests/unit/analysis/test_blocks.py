"""Closing of blocks: when they end, what is in them, and which pods are excluded and reported."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.analysis.measurement.blocks import (
    ArmCounts,
    ArmName,
    BlockRule,
    ClosedBlock,
    PodSample,
    add_scrapes,
    start_block,
)
from aerie.analysis.measurement.counts import CounterSnapshot, EngineCounts, SampleProjection, nearest_bucket_edge, read_counters
from aerie.engine.metrics.histogram import Histogram
from aerie.engine.metrics.sample import Counters, Gauges, Sample, SpeculationCounters

RULE = BlockRule(block_seconds=60, scrape_interval_seconds=15, min_drafts=100, min_finished_requests=2)


def make_reading(scrape: float, rate: float = 50.0, *, started: float | None = 0.0, load: float | None = 4.0) -> CounterSnapshot:
    """Make a pod's counters after `scrape` scrapes of its own."""
    counts = EngineCounts(drafts=rate * scrape, accepted_tokens=60.0 * scrape, finished_requests=scrape)
    return CounterSnapshot(counts, load, started, engine_count=1)


class Fleet:
    """Pods that are scraped together, every 15 s."""

    def __init__(self, rule: BlockRule = RULE, **arms: ArmName) -> None:
        self.rule, self.arms = rule, arms
        self.scrape = 0
        self.open = start_block(0.0, {name: PodSample(arm, make_reading(0)) for name, arm in arms.items()}, rule)

    def round(self, **instead: CounterSnapshot | None) -> ClosedBlock | None:
        """Scrape every pod once more; `instead` has the readings that replace a pod's usual one."""
        self.scrape += 1
        samples = {name: PodSample(arm, instead.get(name, make_reading(self.scrape))) for name, arm in self.arms.items()}
        self.open, closed = add_scrapes(self.open, 15.0 * self.scrape, samples, self.rule)
        return closed

    def until_closed(self, rounds: int = 50) -> ClosedBlock:
        return next(closed for _ in range(rounds) if (closed := self.round()))


def test_a_block_is_what_was_counted_in_its_time() -> None:
    fleet = Fleet(a="canary", b="control", c="control")
    assert [fleet.round() for _ in range(3)] == [None] * 3
    block = fleet.round()
    assert block is not None
    assert (block.start_time, block.end_time, block.excluded_pods) == (0.0, 60.0, {})
    assert block.canary is not None
    assert block.control is not None
    assert (block.canary.pod_count, block.canary.counts, block.canary.mean_load) == (1, make_reading(4).counts, 4.0)
    assert (block.control.pod_count, block.control.counts) == (2, make_reading(4).counts + make_reading(4).counts)
    assert block.control.counts_by_pod == {"b": make_reading(4).counts, "c": make_reading(4).counts}
    assert fleet.until_closed().start_time == 60.0


def test_a_block_continues_until_both_arms_have_enough() -> None:
    fleet = Fleet(replace(RULE, min_finished_requests=7), a="canary", b="control")
    assert fleet.until_closed().end_time == 7 * 15
    fleet = Fleet(replace(RULE, min_drafts=501), a="canary", b="control")
    assert fleet.until_closed().end_time == 11 * 15


def test_an_arm_that_finishes_no_request_keeps_no_block_open() -> None:
    def make_stalled_reading(scrape: int, load: float) -> CounterSnapshot:
        return replace(make_reading(scrape), counts=EngineCounts(drafts=2000.0), load=load)

    fleet = Fleet(a="canary", b="control")
    for scrape in range(1, 8):
        assert fleet.round(a=make_stalled_reading(scrape, 9.0)) is None
    block = fleet.round(a=make_stalled_reading(8, 9.0))
    assert block is not None
    assert (block.end_time, block.canary and block.canary.counts.finished_requests) == (120.0, 0.0)
    idle = Fleet(a="canary", b="control")
    assert all(idle.round(a=make_stalled_reading(scrape, 0.0)) is None for scrape in range(1, 20)), "nothing is sent to it"


@given(st.lists(st.floats(0, 1e6), min_size=4, max_size=8))
def test_accepted_tokens_never_move_the_end_of_a_block(accepted: list[float]) -> None:
    fleet = Fleet(a="canary", b="control")
    rising = iter(sorted(accepted))
    for scrape in range(1, 4):
        reading = make_reading(scrape)
        assert fleet.round(a=replace(reading, counts=replace(reading.counts, accepted_tokens=next(rising)))) is None
    reading = make_reading(4)
    assert fleet.round(a=replace(reading, counts=replace(reading.counts, accepted_tokens=next(rising)))) is not None


def test_one_lost_scrape_costs_nothing() -> None:
    fleet = Fleet(a="canary", b="control")
    fleet.round()
    fleet.round(a=None)
    fleet.round()
    block = fleet.round(a=None)
    assert block is not None
    assert block.excluded_pods == {}
    assert block.canary is not None
    assert block.canary.counts == make_reading(3).counts
    following = fleet.until_closed()
    assert following.canary is not None
    assert following.canary.counts == make_reading(8).counts - make_reading(3).counts


def test_a_pod_whose_scrapes_fail_is_excluded_and_reported() -> None:
    fleet = Fleet(a="canary", b="control", c="control")
    for _ in range(2):
        fleet.round()
    fleet.round(c=None)
    block = fleet.round(c=None)
    assert block is not None
    assert block.excluded_pods == {"Stale": 1}
    assert block.control is not None
    assert block.control.pod_count == 1


def test_a_block_is_dropped_if_the_only_pod_of_an_arm_stays_lost() -> None:
    fleet = Fleet(a="canary", b="control")
    closed = [fleet.round(a=None) for _ in range(8)]
    assert closed[:-1] == [None] * 7
    assert closed[-1] is not None
    assert (closed[-1].canary, closed[-1].excluded_pods) == (None, {"Stale": 1})


@pytest.mark.parametrize(
    "after",
    [
        make_reading(1, started=40.0),
        replace(make_reading(3), engine_count=2),
        make_reading(1, started=None),
    ],
    ids=["start time", "engines", "counter fell"],
)
def test_a_restart_drops_only_the_window_of_its_pod(after: CounterSnapshot) -> None:
    fleet = Fleet(a="canary", b="control", c="control")
    fleet.round()
    fleet.round()
    fleet.round(c=after)
    block = fleet.round(c=replace(after, counts=after.counts + make_reading(1).counts))
    assert block is not None
    assert block.excluded_pods == {"Restarted": 1}
    assert block.control is not None
    assert block.control.counts == make_reading(4).counts


def test_pods_that_come_and_go() -> None:
    fleet = Fleet(a="canary", b="control", c="control")
    fleet.round()
    fleet.round()
    del fleet.arms["c"]
    fleet.arms["d"] = "control"
    fleet.round()
    block = fleet.round()
    assert block is not None
    assert block.excluded_pods == {"Gone": 1, "Joined": 1}
    following = fleet.until_closed()
    assert following.excluded_pods == {}
    assert following.control is not None
    assert following.control.pod_count == 2


def test_a_block_without_an_arm_is_dropped_immediately() -> None:
    fleet = Fleet(a="canary", b="control")
    fleet.round()
    del fleet.arms["a"]
    assert fleet.until_closed() == ClosedBlock(0.0, 60.0, None, control_after(4), {"Gone": 1})


def control_after(scrapes: int) -> ArmCounts | None:
    fleet = Fleet(a="canary", b="control")
    for _ in range(scrapes - 1):
        fleet.round()
    block = fleet.round()
    assert block is not None
    return block.control


def test_stable_pods_beside_a_control_are_counted_and_keep_no_block_open() -> None:
    fleet = Fleet(a="canary", b="control", c="stable", d="stable")
    for _ in range(3):
        assert fleet.round(c=None) is None
    block = fleet.round(c=None)
    assert block is not None, "a stable pod that does not answer holds nobody up"
    assert block.stable is not None
    assert set(block.stable.counts_by_pod) == {"d"}
    assert block.excluded_pods == {}
    assert block.peers == block.control
    block = fleet.until_closed()
    assert block.stable is not None
    assert (block.stable.pod_count, block.peers) == (2, block.stable)
    alone = Fleet(a="canary", b="control").until_closed()
    assert (alone.stable, alone.peers) == (None, alone.control)
    assert ClosedBlock(0.0, 60.0, None, None).peers is None


def test_stable_pods_alone_are_followed_without_a_canary() -> None:
    block = Fleet(b="control", c="control").until_closed()
    assert (block.canary, block.end_time) == (None, 60.0)
    assert block.control is not None
    assert set(block.control.counts_by_pod) == {"b", "c"}


@given(st.lists(st.sampled_from(["ok", "lost", "restart"]), min_size=1, max_size=60), st.integers(1, 3))
def test_nothing_is_counted_twice_and_nothing_negative(events: list[str], controls: int) -> None:
    arms: dict[str, ArmName] = {"a": "canary"}
    for index in range(controls):
        arms[f"b{index}"] = "control"
    fleet = Fleet(RULE, **arms)
    total, run, generation = 0.0, 0, 0
    for event in events:
        run = 0 if event == "restart" else run + 1
        generation += event == "restart"
        block = fleet.round(a=None if event == "lost" else make_reading(run, started=float(generation)))
        if block and block.canary:
            assert block.canary.counts.decreased_counter is None
            total += block.canary.counts.finished_requests
    assert total <= len(events)
    if set(events) == {"ok"}:
        assert total == len(events) // 4 * 4


# ----------------------------------------------------------------------------------------------------------------- readings
EDGES = (0.01, 0.025, 0.05, math.inf)


def sample(speculation: SpeculationCounters | None) -> Sample:
    counters = Counters(
        generation_tokens=100.0,
        prompt_tokens=0.0,
        computed_prompt_tokens=0.0,
        prefix_cache_queries=0.0,
        prefix_cache_hits=0.0,
        preemptions=3.0,
        finished={"stop": 5.0, "length": 2.0, "error": 1.0},
        request_steps=40.0,
        step_seconds=2.0,
        iterations=0.0,
        queued_requests=0.0,
        queue_seconds=0.0,
        time_to_first_token=Histogram(EDGES, (1.0, 4.0, 8.0, 9.0), 0.3),
        time_per_output_token=Histogram(EDGES, (0.0, 6.0, 7.0, 8.0), 0.2),
        speculation=speculation,
    )
    return Sample(
        counters,
        Gauges(running_requests=2.0, waiting_requests=None, kv_cache_usage=None, kv_tokens=None),
        frozenset({"0", "1"}),
        7.0,
    )


def test_read_counters_projects_a_sample() -> None:
    speculation = SpeculationCounters(
        drafts=30.0, draft_tokens=150.0, accepted=45.0, accepted_per_position=(20.0, 12.0, 8.0, 4.0, 1.0)
    )
    reading = read_counters(
        sample(speculation), SampleProjection(draft_positions=3, time_per_output_token_edge=0.025, time_to_first_token_edge=0.05)
    )
    assert reading.counts == EngineCounts(
        drafts=30.0,
        accepted_tokens=40.0,
        draft_tokens=150.0,
        request_steps=40.0,
        abandoned_requests=-1.0,
        decode_tokens=91.0,
        decode_seconds=2.0,
        output_tokens=100.0,
        finished_requests=8.0,
        truncated_requests=2.0,
        failed_requests=1.0,
        preemptions=3.0,
        first_tokens=9.0,
        first_token_seconds=0.3,
        slow_first_token_requests=1.0,
        timed_requests=8.0,
        slow_output_requests=2.0,
    )
    assert (reading.load, reading.process_start_time, reading.engine_count) == (2.0, 7.0, 2)


def test_read_counters_without_speculation_and_objectives() -> None:
    counts = read_counters(sample(None), SampleProjection(draft_positions=3)).counts
    assert (counts.drafts, counts.accepted_tokens, counts.slow_first_token_requests, counts.slow_output_requests) == (0, 0, 0, 0)


def test_an_objective_needs_its_edge() -> None:
    with pytest.raises(ValueError, match=r"have no edge at 0\.04 s: give both arms the same buckets"):
        read_counters(sample(None), SampleProjection(draft_positions=1, time_per_output_token_edge=0.04))
    assert nearest_bucket_edge(0.04, EDGES) == 0.05
    assert nearest_bucket_edge(9.0, EDGES) == 0.05
    with pytest.raises(ValueError, match="no edge among"):
        nearest_bucket_edge(0.04, (math.inf,))
