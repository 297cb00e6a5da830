"""Load match: neither chance nor a canary's speed drops blocks; a lasting difference does, however few the requests."""

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


def make_arm(begun: float, pods: int = 1, load: float | None = 4.0) -> ArmCounts:
    counts = EngineCounts(
        first_tokens=begun, first_token_seconds=begun, decode_tokens=begun, decode_seconds=begun, finished_requests=begun
    )
    return ArmCounts(pods, counts, load)


def matched_share(per_block: float, more: float = 1.0, pods: tuple[int, int] = (1, 1), blocks: int = 400, seed: int = 1) -> float:
    """Return the share of matched blocks, at `per_block` requests per pod and `more` times as many on the canary's."""
    random, load_match, matched_count = np.random.default_rng(seed), LoadMatch(), 0
    for _ in range(blocks):
        arrived = random.poisson([more * per_block * pods[0], per_block * pods[1]]).tolist()
        load_match = load_match.add_block(make_arm(arrived[0], pods[0], 4.0 * more), make_arm(arrived[1], pods[1]))
        matched_count += load_match.is_matched
    return matched_count / blocks


@pytest.mark.parametrize("per_block", [2, 15, 120, 3000])
@pytest.mark.parametrize("pods", [(1, 1), (1, 3), (2, 2), (1, 20), (4, 4)])
def test_chance_drops_few_blocks_and_a_lasting_difference_drops_all(per_block: int, pods: tuple[int, int]) -> None:
    assert matched_share(per_block, 1.0, pods) >= 0.98
    # The first hundreds of requests are too few to tell.
    early = MIN_REQUEST_COUNT_VARIANCE * (1 / pods[0] + 1 / pods[1]) / per_block / 400
    assert matched_share(per_block, 1.4, pods) <= 0.12 + early
    assert matched_share(per_block, 1 / 1.4, pods) <= 0.12 + early
    assert matched_share(per_block, 2.0, pods) <= 0.01 + early


def test_the_window_of_requests_is_limited() -> None:
    load_match = LoadMatch()
    for block in range(1, 10):
        load_match = load_match.add_block(make_arm(100), make_arm(100))
        assert load_match.variance == pytest.approx(min(50.0 * block, MIN_REQUEST_COUNT_VARIANCE))
        assert load_match.has_enough_requests == (block >= 5)
    assert load_match.add_block(make_arm(5000), make_arm(5000)).variance == 2500
    apart = load_match.add_block(make_arm(5000, load=5.0), make_arm(7000, load=7.0))
    assert not apart.is_matched
    assert apart.add_block(make_arm(5000), make_arm(5000)).is_matched


def test_a_difference_is_relative_to_a_pods_requests() -> None:
    assert LoadMatch().add_block(make_arm(1300, 1), make_arm(3000, 3)).relative_difference == pytest.approx(0.28, abs=0.02)
    assert LoadMatch().add_block(make_arm(2000, 2), make_arm(6000, 6)).relative_difference == 0
    assert LoadMatch().relative_difference == 0


def test_no_requests_are_no_match() -> None:
    none = LoadMatch().add_block(make_arm(0), make_arm(0))
    assert not none.is_matched
    assert "number of requests is unknown" in load_mismatch_message(none)


def test_arms_with_equal_requests_in_flight_match() -> None:
    """A balancer that prefers pods with the fewest requests gives the faster arm more of them."""
    assert LoadMatch().add_block(make_arm(3000, load=4.0), make_arm(2000, load=4.2)).is_matched
    assert not LoadMatch().add_block(make_arm(3000, load=6.0), make_arm(2000, load=4.0)).is_matched
    assert not LoadMatch().add_block(make_arm(3000, load=None), make_arm(2000, load=4.0)).is_matched
    assert LoadMatch().add_block(make_arm(2100, load=0.0), make_arm(2000, load=0.0)).is_matched


def test_latencies_are_forgotten_when_a_load_difference_shows() -> None:
    state, sample_counts = AnalysisState(0.0), []
    for block in range(1, 40):
        state = add_block(
            state, ClosedBlock(60.0 * (block - 1), 60.0 * block, make_arm(26, load=6.0), make_arm(14)), AnalysisPlan()
        )
        state = AnalysisState.from_dict(state.to_dict())
        sample_counts.append(
            state.paired_moments[TIME_PER_OUTPUT_TOKEN].count if TIME_PER_OUTPUT_TOKEN in state.paired_moments else 0
        )
    assert sample_counts[:3] == [1, 2, 3]
    assert sample_counts[-30:] == [0] * 30
    assert TIME_TO_FIRST_TOKEN not in state.paired_moments
    # What was alike before stays known when a difference comes later.
    state = AnalysisState(0.0)
    for block in range(1, 40):
        canary_arm = make_arm(60) if block < 20 else make_arm(120, load=9.0)
        state = add_block(state, ClosedBlock(60.0 * (block - 1), 60.0 * block, canary_arm, make_arm(60)), AnalysisPlan())
    assert 19 <= state.paired_moments[TIME_PER_OUTPUT_TOKEN].count <= 24


def test_a_growing_queue_counts_as_arrived_requests() -> None:
    """An arm that cannot keep up has fewer first tokens; the other requests wait in its queue."""
    rule = BlockRule(block_seconds=60, scrape_interval_seconds=15, min_drafts=100, min_finished_requests=2)

    def samples_at(scrape: int) -> dict[str, PodSample]:
        def counts(rate: float) -> EngineCounts:
            return EngineCounts(drafts=50.0 * scrape, finished_requests=rate * scrape, first_tokens=rate * scrape)

        slow, quick = CounterSnapshot(counts(10), 8.0, 0.0, 1, 5.0 + 2.0 * scrape), CounterSnapshot(counts(12), 4.0, 0.0, 1, 0.0)
        unknown = CounterSnapshot(counts(12), None, 0.0, 1, None)
        return {"a": PodSample("canary", slow), "b": PodSample("control", quick), "c": PodSample("control", unknown)}

    block, closed = start_block(0.0, samples_at(0), rule), None
    for scrape in range(1, 5):
        block, closed = add_scrapes(block, 15.0 * scrape, samples_at(scrape), rule)
    assert closed is not None
    assert closed.canary is not None
    assert closed.control is not None
    assert (closed.canary.counts.first_tokens, closed.canary.arrived_requests) == (40, 48)
    assert closed.control.arrived_requests == 96


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["random", "least"])
@pytest.mark.parametrize("speed", [0.5, 1.0, 2.0])
def test_speed_drops_no_blocks(routing: Routing, speed: float) -> None:
    """Simulated engines of different speeds match, with either routing."""
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
        counts = EngineCounts(first_tokens=float(scrape.counters.time_to_first_token.count))
        if scrape.pod in last:
            flight = float(scrape.counters.num_requests_running + scrape.counters.num_requests_waiting)
            windows[scrape.pod].append(ArmCounts(1, counts - last[scrape.pod], flight))
        last[scrape.pod] = counts
    load_match, matches = LoadMatch(), []
    for canary, control in zip(windows["a"], windows["b"], strict=False):
        load_match = load_match.add_block(canary, control)
        matches.append(load_match.is_matched)
    assert len(matches) > 50
    assert sum(matches) / len(matches) > 0.95
