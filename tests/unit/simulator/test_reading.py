"""The operator reads simulated pages. Reader and writer were written apart, each from vLLM's source: one tests the other."""

from __future__ import annotations

import itertools
import math

import pytest

from aerie.engine.metrics import rates
from aerie.engine.metrics.exposition import parse_exposition
from aerie.engine.metrics.sample import CounterReset, Counters, Sample, diff_samples
from aerie.engine.speculation import Schedule, ScheduleTier, Static
from aerie_lab.engine.acceptance import Acceptance, expected_length, expected_survival
from aerie_lab.engine.exposition import render_exposition
from aerie_lab.engine.fleet import PodRestart, ScrapeSettings, SimulatedFleet, SimulatedPod
from aerie_lab.engine.replica import Replica
from aerie_lab.engine.request import EngineSettings, Request
from aerie_lab.engine.step import STEP_TIME_FORMULAS
from aerie_lab.engine.workload import LengthDistribution, PoissonArrivals, TrafficClass

ACCEPTANCE = Acceptance((0.75, 0.7, 0.6))
KIND = TrafficClass("chat", ACCEPTANCE, LengthDistribution(300, 0.5), LengthDistribution(200, 0.3))


def scrapes(pod: SimulatedPod, seconds: float, rate: float = 2.0) -> list[Sample]:
    fleet = SimulatedFleet([pod], [KIND], PoissonArrivals(rate), scrape_settings=ScrapeSettings(60.0))
    return [
        parse_exposition(render_exposition(s.counters, "m", 0.0).encode()) for s in fleet.run(seconds) if s.counters is not None
    ]


def window(first: Sample, last: Sample) -> Counters:
    found = diff_samples(first, last)
    assert isinstance(found, Counters)
    return found


def test_acceptance_batch_and_times_of_a_static_setting() -> None:
    samples = scrapes(SimulatedPod("a", EngineSettings(num_speculative_tokens=3), STEP_TIME_FORMULAS["dense-8b"]), 1800.0)
    found = window(samples[0], samples[-1])
    length = rates.acceptance_length(found, Static(3))
    assert isinstance(length, rates.Bounds)
    assert length.is_exact, "nothing is cached, so no draft can be a dummy"
    assert length.low == pytest.approx(expected_length(ACCEPTANCE, 3), rel=0.01)
    survival = rates.survival_by_position(found, Static(3))
    assert not isinstance(survival, rates.Unknown)
    assert [s.low for s in survival] == pytest.approx(expected_survival(ACCEPTANCE, 3).tolist(), abs=0.01)
    batch = rates.mean_batch(found)
    assert isinstance(batch, rates.Bounds)
    assert 1 < batch.low < 6
    interval = rates.mean_step_interval(found)
    assert isinstance(interval, float)
    assert interval > STEP_TIME_FORMULAS["dense-8b"].fixed_seconds(1, 3) * 0.95


@pytest.mark.slow
def test_two_tiers_of_a_schedule_are_told_apart() -> None:
    settings = EngineSettings(num_speculative_tokens=3, k_schedule=((1, 2, 3), (3, 256, 1)))
    samples = scrapes(SimulatedPod("a", settings, STEP_TIME_FORMULAS["dense-8b"]), 3000.0, rate=4.0)
    found = window(samples[0], samples[-1])
    survival = rates.survival_by_position(found, Schedule((ScheduleTier(1, 2, 3), ScheduleTier(3, 256, 1)), 3))
    assert not isinstance(survival, rates.Unknown), survival
    assert [s.low for s in survival] == pytest.approx(expected_survival(ACCEPTANCE, 3).tolist(), abs=0.015)


def test_a_restart_is_a_reset() -> None:
    pod = SimulatedPod(
        "a", EngineSettings(num_speculative_tokens=3), STEP_TIME_FORMULAS["dense-8b"], restarts=(PodRestart(300.0, 30.0),)
    )
    samples = scrapes(pod, 600.0)
    kinds = [type(diff_samples(*pair)) for pair in itertools.pairwise(samples)]
    assert kinds.count(CounterReset) == 1


def test_dummy_drafts_of_cached_prompts_are_within_the_bounds() -> None:
    """The same eight requests as in tests/vllm/test_metrics.py, and the same counts."""
    settings = EngineSettings(num_speculative_tokens=3, block_size=128, max_model_len=1024, drops_last_block=False)
    replica = Replica(settings, STEP_TIME_FORMULAS["dense-8b"])
    before = parse_exposition(render_exposition(replica.counters, "m", 0.0).encode())
    for number in range(8):
        replica.submit(Request(str(number), 129, 1, ACCEPTANCE, segments=(("prompt", 129),)), float(number))
        replica.advance(math.inf)
    found = window(before, parse_exposition(render_exposition(replica.counters, "m", 0.0).encode()))
    assert found.speculation is not None
    assert (found.speculation.drafts, found.speculation.draft_tokens, found.speculation.accepted) == (7, 21, 0)
    assert (found.request_steps, found.prompt_tokens - found.computed_prompt_tokens) == (0, 7 * 128)
    assert rates.acceptance_length(found, Static(3)) == rates.Bounds(1, 4)


@pytest.mark.parametrize(
    ("q", "answer", "low", "high"),
    [((0.75, 0.7, 0.6), 41, 0.01, 0.04), ((0.9, 0.88, 0.86), 41, 0.03, 0.08), ((0.75, 0.7, 0.6), 400, 0.0, 0.004)],
    ids=["short answers", "and a better drafter", "long answers"],
)
def test_acceptance_length_counts_what_is_accepted_behind_a_stop_and_tokens_per_step_do_not(
    q: tuple[float, ...], answer: int, low: float, high: float
) -> None:
    """As vLLM books it (issue 56101): some percent with short answers, more with a better drafter, hardly any with long ones."""
    kind = TrafficClass("chat", Acceptance(q), LengthDistribution(300, 0.5), LengthDistribution(answer, 0.3))
    pod = SimulatedPod("a", EngineSettings(num_speculative_tokens=3), STEP_TIME_FORMULAS["dense-8b"])
    fleet = SimulatedFleet([pod], [kind], PoissonArrivals(4.0), scrape_settings=ScrapeSettings(60.0))
    samples = [
        parse_exposition(render_exposition(one.counters, "m", 0.0).encode())
        for one in fleet.run(900.0)
        if one.counters is not None
    ]
    found = window(samples[0], samples[-1])
    length, given = rates.acceptance_length(found, Static(3)), rates.tokens_per_step(found)
    assert isinstance(length, rates.Bounds)
    assert isinstance(given, float)
    assert length.is_exact
    assert low < length.low / given - 1 < high
    assert found.speculation is not None
    got = found.generation_tokens - found.first_tokens
    assert got <= found.request_steps + found.speculation.accepted, "what was cut off nobody got"
