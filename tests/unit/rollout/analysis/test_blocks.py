"""Closing blocks: when they end, what is in them, and what is left out and said."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aerie.engine.histogram import Histogram
from aerie.engine.samples import Counters, Gauges, Sample, Speculation
from aerie.rollout.analysis.blocks import Arm, Block, Open, Rule, Seen, Side, observe, start
from aerie.rollout.analysis.readings import Counts, Kept, Reading, nearest_edge, read

RULE = Rule(seconds=60, interval=15, drafts=100, finished=2)


def reading(scrape: float, rate: float = 50.0, *, started: float | None = 0.0, load: float | None = 4.0) -> Reading:
    """A pod's counters after so many scrapes of its own."""
    counts = Counts(drafts=rate * scrape, accepted=60.0 * scrape, finished=scrape)
    return Reading(counts, load, started, engines=1)


class Fleet:
    """Pods that are scraped together, every 15 s."""

    def __init__(self, rule: Rule = RULE, **arms: Arm) -> None:
        self.rule, self.arms = rule, arms
        self.scrape = 0
        self.open = start(0.0, {name: Seen(arm, reading(0)) for name, arm in arms.items()}, rule)

    def round(self, **instead: Reading | None) -> Block | None:
        """One more round of scraping; `instead` says what it brings of a pod, where that is not what was to be expected."""
        self.scrape += 1
        seen = {name: Seen(arm, instead.get(name, reading(self.scrape))) for name, arm in self.arms.items()}
        self.open, closed = observe(self.open, 15.0 * self.scrape, seen, self.rule)
        self.open = Open.from_dict(json.loads(json.dumps(self.open.to_dict())))  # as after a crash
        return closed

    def until_closed(self, rounds: int = 50) -> Block:
        return next(closed for _ in range(rounds) if (closed := self.round()))


def test_a_block_is_what_was_counted_in_its_time() -> None:
    fleet = Fleet(a="canary", b="control", c="control")
    assert [fleet.round() for _ in range(3)] == [None] * 3
    block = fleet.round()
    assert block is not None
    assert (block.began, block.ended, block.dropped) == (0.0, 60.0, {})
    assert block.canary is not None
    assert block.control is not None
    assert (block.canary.pods, block.canary.counts, block.canary.load) == (1, reading(4).counts, 4.0)
    assert (block.control.pods, block.control.counts) == (2, reading(4).counts + reading(4).counts)
    assert block.control.by_pod == {"b": reading(4).counts, "c": reading(4).counts}
    assert fleet.until_closed().began == 60.0


def test_it_goes_on_until_both_arms_have_enough() -> None:
    fleet = Fleet(replace(RULE, finished=7), a="canary", b="control")
    assert fleet.until_closed().ended == 7 * 15
    fleet = Fleet(replace(RULE, drafts=501), a="canary", b="control")
    assert fleet.until_closed().ended == 11 * 15


def test_an_arm_that_finishes_nothing_of_what_it_holds_keeps_no_block_open() -> None:
    def held(scrape: int, load: float) -> Reading:
        return replace(reading(scrape), counts=Counts(drafts=2000.0), load=load)

    fleet = Fleet(a="canary", b="control")
    for scrape in range(1, 8):
        assert fleet.round(a=held(scrape, 9.0)) is None
    block = fleet.round(a=held(8, 9.0))
    assert block is not None
    assert (block.ended, block.canary and block.canary.counts.finished) == (120.0, 0.0)
    idle = Fleet(a="canary", b="control")
    assert all(idle.round(a=held(scrape, 0.0)) is None for scrape in range(1, 20)), "nothing is sent to it"


@given(st.lists(st.floats(0, 1e6), min_size=4, max_size=8))
def test_what_was_accepted_never_moves_its_end(accepted: list[float]) -> None:
    fleet = Fleet(a="canary", b="control")
    rising = iter(sorted(accepted))
    for scrape in range(1, 4):
        lucky = reading(scrape)
        assert fleet.round(a=replace(lucky, counts=replace(lucky.counts, accepted=next(rising)))) is None
    lucky = reading(4)
    assert fleet.round(a=replace(lucky, counts=replace(lucky.counts, accepted=next(rising)))) is not None


def test_one_lost_scrape_costs_nothing() -> None:
    fleet = Fleet(a="canary", b="control")
    fleet.round()
    fleet.round(a=None)
    fleet.round()
    block = fleet.round(a=None)
    assert block is not None
    assert block.dropped == {}
    assert block.canary is not None
    assert block.canary.counts == reading(3).counts
    following = fleet.until_closed()
    assert following.canary is not None
    assert following.canary.counts == reading(8).counts - reading(3).counts


def test_a_pod_whose_scrapes_fail_is_left_out_and_said() -> None:
    fleet = Fleet(a="canary", b="control", c="control")
    for _ in range(2):
        fleet.round()
    fleet.round(c=None)
    block = fleet.round(c=None)
    assert block is not None
    assert block.dropped == {"Stale": 1}
    assert block.control is not None
    assert block.control.pods == 1


def test_the_only_pod_of_an_arm_is_waited_for_and_then_the_block_dropped() -> None:
    fleet = Fleet(a="canary", b="control")
    closed = [fleet.round(a=None) for _ in range(8)]
    assert closed[:-1] == [None] * 7
    assert closed[-1] is not None
    assert (closed[-1].canary, closed[-1].dropped) == (None, {"Stale": 1})


@pytest.mark.parametrize(
    "after",
    [
        reading(1, started=40.0),
        replace(reading(3), engines=2),
        reading(1, started=None),
    ],
    ids=["start time", "engines", "counter fell"],
)
def test_a_restart_drops_the_pods_window_but_no_other(after: Reading) -> None:
    fleet = Fleet(a="canary", b="control", c="control")
    fleet.round()
    fleet.round()
    fleet.round(c=after)
    block = fleet.round(c=replace(after, counts=after.counts + reading(1).counts))
    assert block is not None
    assert block.dropped == {"Restarted": 1}
    assert block.control is not None
    assert block.control.counts == reading(4).counts


def test_pods_that_come_and_go() -> None:
    fleet = Fleet(a="canary", b="control", c="control")
    fleet.round()
    fleet.round()
    del fleet.arms["c"]
    fleet.arms["d"] = "control"
    fleet.round()
    block = fleet.round()
    assert block is not None
    assert block.dropped == {"Gone": 1, "Joined": 1}
    following = fleet.until_closed()
    assert following.dropped == {}
    assert following.control is not None
    assert following.control.pods == 2


def test_a_block_without_an_arm_is_dropped_at_once() -> None:
    fleet = Fleet(a="canary", b="control")
    fleet.round()
    del fleet.arms["a"]
    assert fleet.until_closed() == Block(0.0, 60.0, None, fleet_side(4), {"Gone": 1})


def fleet_side(scrapes: int) -> Side | None:
    fleet = Fleet(a="canary", b="control")
    for _ in range(scrapes - 1):
        fleet.round()
    block = fleet.round()
    assert block is not None
    return block.control


def test_stable_pods_alone_are_followed_without_a_canary() -> None:
    block = Fleet(b="control", c="control").until_closed()
    assert (block.canary, block.ended) == (None, 60.0)
    assert block.control is not None
    assert set(block.control.by_pod) == {"b", "c"}


@given(st.lists(st.sampled_from(["ok", "lost", "restart"]), min_size=1, max_size=60), st.integers(1, 3))
def test_nothing_is_counted_twice_and_nothing_negative(events: list[str], controls: int) -> None:
    arms: dict[str, Arm] = {"a": "canary"}
    for index in range(controls):
        arms[f"b{index}"] = "control"
    fleet = Fleet(RULE, **arms)
    total, run, generation = 0.0, 0, 0
    for event in events:
        run = 0 if event == "restart" else run + 1
        generation += event == "restart"
        block = fleet.round(a=None if event == "lost" else reading(run, started=float(generation)))
        if block and block.canary:
            assert block.canary.counts.fell is None
            total += block.canary.counts.finished
    assert total <= len(events)
    if set(events) == {"ok"}:
        assert total == len(events) // 4 * 4


# ----------------------------------------------------------------------------------------------------------------- readings
EDGES = (0.01, 0.025, 0.05, math.inf)


def sample(speculation: Speculation | None) -> Sample:
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
    return Sample(counters, Gauges(running=2.0, waiting=None, kv_cache_usage=None, kv_tokens=None), frozenset({"0", "1"}), 7.0)


def test_what_is_kept_of_a_sample() -> None:
    deep = Speculation(drafts=30.0, draft_tokens=150.0, accepted=45.0, accepted_per_position=(20.0, 12.0, 8.0, 4.0, 1.0))
    found = read(sample(deep), Kept(positions=3, output_edge=0.025, first_edge=0.05))
    assert found.counts == Counts(
        drafts=30.0,
        accepted=40.0,
        draft_tokens=150.0,
        request_steps=40.0,
        given_up=-1.0,
        decode_tokens=91.0,
        decode_seconds=2.0,
        output_tokens=100.0,
        finished=8.0,
        cut=2.0,
        errors=1.0,
        preemptions=3.0,
        first_tokens=9.0,
        first_seconds=0.3,
        slow_first=1.0,
        timed=8.0,
        slow_output=2.0,
    )
    assert (found.load, found.started, found.engines) == (2.0, 7.0, 2)
    assert Reading.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_without_speculation_and_objectives() -> None:
    found = read(sample(None), Kept(positions=3)).counts
    assert (found.drafts, found.accepted, found.slow_first, found.slow_output) == (0, 0, 0, 0)


def test_an_objective_needs_its_edge() -> None:
    with pytest.raises(ValueError, match=r"have no edge at 0\.04 s: give both arms the same buckets"):
        read(sample(None), Kept(positions=1, output_edge=0.04))
    assert nearest_edge(0.04, EDGES) == 0.05
    assert nearest_edge(9.0, EDGES) == 0.05
    with pytest.raises(ValueError, match="no edge among"):
        nearest_edge(0.04, (math.inf,))
