"""Like loads: neither chance nor a canary's speed drops blocks; a difference that lasts does, with however few requests."""

from __future__ import annotations

import numpy as np
import pytest

from aerie.analysis.criteria import TIME_PER_OUTPUT_TOKEN, TIME_TO_FIRST_TOKEN, AnalysisPlan
from aerie.analysis.measurement.blocks import ArmCounts, BlockRule, ClosedBlock, PodSample, add_scrapes, start_block
from aerie.analysis.measurement.counts import CounterSnapshot, EngineCounts
from aerie.analysis.measurement.load_match import MIN_REQUEST_COUNT_VARIANCE, LoadMatch
from aerie.analysis.messages import load_mismatch_message
from aerie.analysis.state import AnalysisState, add_block
from aerie_lab.engine.acceptance import Acceptance
from aerie_lab.engine.fleet import Routing, SimulatedFleet, SimulatedPod
from aerie_lab.engine.request import EngineSettings
from aerie_lab.engine.step import StepTimeFormula
from aerie_lab.engine.workload import LengthDistribution, PoissonArrivals, TrafficClass


def side(begun: float, pods: int = 1, load: float | None = 4.0) -> ArmCounts:
    counts = EngineCounts(
        first_tokens=begun, first_token_seconds=begun, decode_tokens=begun, decode_seconds=begun, finished_requests=begun
    )
    return ArmCounts(pods, counts, load)


def counted(per_block: float, more: float = 1.0, pods: tuple[int, int] = (1, 1), blocks: int = 400, seed: int = 1) -> float:
    """The share of blocks that count, of so many requests on a pod, and so many times as many on the canary's."""
    random, demand, found = np.random.default_rng(seed), LoadMatch(), 0
    for _ in range(blocks):
        came = random.poisson([more * per_block * pods[0], per_block * pods[1]]).tolist()
        demand = demand.add_block(side(came[0], pods[0], 4.0 * more), side(came[1], pods[1]))
        found += demand.is_matched
    return found / blocks


@pytest.mark.parametrize("per_block", [2, 15, 120, 3000])
@pytest.mark.parametrize("pods", [(1, 1), (1, 3), (2, 2), (1, 20), (4, 4)])
def test_chance_drops_next_to_no_block_and_a_difference_that_lasts_all(per_block: int, pods: tuple[int, int]) -> None:
    assert counted(per_block, 1.0, pods) >= 0.98
    # The first hundreds of requests are too few to tell.
    early = MIN_REQUEST_COUNT_VARIANCE * (1 / pods[0] + 1 / pods[1]) / per_block / 400
    assert counted(per_block, 1.4, pods) <= 0.12 + early
    assert counted(per_block, 1 / 1.4, pods) <= 0.12 + early
    assert counted(per_block, 2.0, pods) <= 0.01 + early


def test_what_is_looked_at_is_enough_and_no_more() -> None:
    demand = LoadMatch()
    for block in range(1, 10):
        demand = demand.add_block(side(100), side(100))
        assert demand.variance == pytest.approx(min(50.0 * block, MIN_REQUEST_COUNT_VARIANCE))
        assert demand.has_enough_requests == (block >= 5)
    assert demand.add_block(side(5000), side(5000)).variance == 2500
    apart = demand.add_block(side(5000, load=5.0), side(7000, load=7.0))
    assert not apart.is_matched
    assert apart.add_block(side(5000), side(5000)).is_matched


def test_a_difference_is_relative_to_a_pods_requests() -> None:
    assert LoadMatch().add_block(side(1300, 1), side(3000, 3)).relative_difference == pytest.approx(0.28, abs=0.02)
    assert LoadMatch().add_block(side(2000, 2), side(6000, 6)).relative_difference == 0
    assert LoadMatch().relative_difference == 0


def test_no_request_is_no_likeness() -> None:
    none = LoadMatch().add_block(side(0), side(0))
    assert not none.is_matched
    assert "number of requests is unknown" in load_mismatch_message(none)


def test_arms_alike_in_flight_are_alike() -> None:
    """As behind a balancer that sends by fewest requests: the faster arm gets more."""
    assert LoadMatch().add_block(side(3000, load=4.0), side(2000, load=4.2)).is_matched
    assert not LoadMatch().add_block(side(3000, load=6.0), side(2000, load=4.0)).is_matched
    assert not LoadMatch().add_block(side(3000, load=None), side(2000, load=4.0)).is_matched
    assert LoadMatch().add_block(side(2100, load=0.0), side(2000, load=0.0)).is_matched


def test_what_blocks_said_is_forgotten_when_a_difference_shows_in_them() -> None:
    state, seen = AnalysisState(0.0), []
    for block in range(1, 40):
        state = add_block(state, ClosedBlock(60.0 * (block - 1), 60.0 * block, side(26, load=6.0), side(14)), AnalysisPlan())
        state = AnalysisState.from_dict(state.to_dict())
        seen.append(state.paired_moments[TIME_PER_OUTPUT_TOKEN].count if TIME_PER_OUTPUT_TOKEN in state.paired_moments else 0)
    assert seen[:3] == [1, 2, 3]
    assert seen[-30:] == [0] * 30
    assert TIME_TO_FIRST_TOKEN not in state.paired_moments
    # What was alike before stays known when a difference comes later.
    state = AnalysisState(0.0)
    for block in range(1, 40):
        here = side(60) if block < 20 else side(120, load=9.0)
        state = add_block(state, ClosedBlock(60.0 * (block - 1), 60.0 * block, here, side(60)), AnalysisPlan())
    assert 19 <= state.paired_moments[TIME_PER_OUTPUT_TOKEN].count <= 24


def test_a_queue_that_grows_is_demand_too() -> None:
    """An arm that cannot keep up has fewer first tokens; what it was asked for is in its queue."""
    rule = BlockRule(block_seconds=60, scrape_interval_seconds=15, min_drafts=100, min_finished_requests=2)

    def seen(scrape: int) -> dict[str, PodSample]:
        def counts(rate: float) -> EngineCounts:
            return EngineCounts(drafts=50.0 * scrape, finished_requests=rate * scrape, first_tokens=rate * scrape)

        slow, quick = CounterSnapshot(counts(10), 8.0, 0.0, 1, 5.0 + 2.0 * scrape), CounterSnapshot(counts(12), 4.0, 0.0, 1, 0.0)
        unknown = CounterSnapshot(counts(12), None, 0.0, 1, None)
        return {"a": PodSample("canary", slow), "b": PodSample("control", quick), "c": PodSample("control", unknown)}

    block, closed = start_block(0.0, seen(0), rule), None
    for scrape in range(1, 5):
        block, closed = add_scrapes(block, 15.0 * scrape, seen(scrape), rule)
    assert closed is not None
    assert closed.canary is not None
    assert closed.control is not None
    assert (closed.canary.counts.first_tokens, closed.canary.arrived_requests) == (40, 48)
    assert closed.control.arrived_requests == 96


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["random", "least"])
@pytest.mark.parametrize("speed", [0.5, 1.0, 2.0])
def test_speed_drops_no_blocks(routing: Routing, speed: float) -> None:
    """On simulated engines, whichever way requests are routed."""
    kind = TrafficClass("all", Acceptance((0.7,)), LengthDistribution(50, 0.5, 10, 500), LengthDistribution(60, 0.8, 10, 400))
    settings = EngineSettings(num_speculative_tokens=3)
    pods = [
        SimulatedPod(name, settings, StepTimeFormula(base_seconds=0.1, seconds_per_token=0.0), 1 / factor)
        for name, factor in (("a", speed), ("b", 1.0))
    ]
    fleet = SimulatedFleet(pods, [kind], PoissonArrivals(6.0), routing=routing, seed=4)
    windows: dict[str, list[ArmCounts]] = {"a": [], "b": []}
    last: dict[str, EngineCounts] = {}
    for scrape in fleet.run(900.0):
        assert scrape.counters is not None
        came = EngineCounts(first_tokens=float(scrape.counters.time_to_first_token.count))
        if scrape.pod in last:
            flight = float(scrape.counters.num_requests_running + scrape.counters.num_requests_waiting)
            windows[scrape.pod].append(ArmCounts(1, came - last[scrape.pod], flight))
        last[scrape.pod] = came
    demand, found = LoadMatch(), []
    for canary, control in zip(windows["a"], windows["b"], strict=False):
        demand = demand.add_block(canary, control)
        found.append(demand.is_matched)
    assert len(found) > 50
    assert sum(found) / len(found) > 0.95
