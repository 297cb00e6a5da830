"""The operator reads simulated metrics. Parser and renderer were both written from vLLM's source, so each tests the other."""

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


def diff(first: Sample, last: Sample) -> Counters:
    increase = diff_samples(first, last)
    assert isinstance(increase, Counters)
    return increase


def test_acceptance_batch_and_times_of_a_static_setting() -> None:
    samples = scrapes(SimulatedPod("a", EngineSettings(num_speculative_tokens=3), STEP_TIME_FORMULAS["dense-8b"]), 1800.0)
    increase = diff(samples[0], samples[-1])
    length = rates.acceptance_length(increase, Static(3))
    assert isinstance(length, rates.Bounds)
    assert length.is_exact, "nothing is cached, so no draft can be a dummy"
    assert length.low == pytest.approx(expected_length(ACCEPTANCE, 3), rel=0.01)
    survival = rates.survival_by_position(increase, Static(3))
    assert not isinstance(survival, rates.Unknown)
    assert [s.low for s in survival] == pytest.approx(expected_survival(ACCEPTANCE, 3).tolist(), abs=0.01)
    batch = rates.mean_batch(increase)
    assert isinstance(batch, rates.Bounds)
    assert 1 < batch.low < 6
    interval = rates.mean_step_interval(increase)
    assert isinstance(interval, float)
    assert interval > STEP_TIME_FORMULAS["dense-8b"].fixed_seconds(1, 3) * 0.95


@pytest.mark.slow
def test_survival_is_read_from_two_tiers_of_a_schedule() -> None:
    settings = EngineSettings(num_speculative_tokens=3, k_schedule=((1, 2, 3), (3, 256, 1)))
    samples = scrapes(SimulatedPod("a", settings, STEP_TIME_FORMULAS["dense-8b"]), 3000.0, rate=4.0)
    increase = diff(samples[0], samples[-1])
    survival = rates.survival_by_position(increase, Schedule((ScheduleTier(1, 2, 3), ScheduleTier(3, 256, 1)), 3))
    assert not isinstance(survival, rates.Unknown), survival
    assert [s.low for s in survival] == pytest.approx(expected_survival(ACCEPTANCE, 3).tolist(), abs=0.015)


def test_a_restart_is_a_counter_reset() -> None:
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
    increase = diff(before, parse_exposition(render_exposition(replica.counters, "m", 0.0).encode()))
    assert increase.speculation is not None
    assert (increase.speculation.drafts, increase.speculation.draft_tokens, increase.speculation.accepted) == (7, 21, 0)
    assert (increase.request_steps, increase.prompt_tokens - increase.computed_prompt_tokens) == (0, 7 * 128)
    assert rates.acceptance_length(increase, Static(3)) == rates.Bounds(1, 4)


@pytest.mark.parametrize(
    ("q", "answer", "low", "high"),
    [((0.75, 0.7, 0.6), 41, 0.01, 0.04), ((0.9, 0.88, 0.86), 41, 0.03, 0.08), ((0.75, 0.7, 0.6), 400, 0.0, 0.004)],
    ids=["short answers", "and a better drafter", "long answers"],
)
def test_acceptance_length_counts_tokens_after_a_stop(q: tuple[float, ...], answer: int, low: float, high: float) -> None:
    """vLLM counts accepted tokens after a stop (issue 56101): the more, the shorter the answers and the better the drafter.

    `tokens_per_step` does not count them.
    """
    kind = TrafficClass("chat", Acceptance(q), LengthDistribution(300, 0.5), LengthDistribution(answer, 0.3))
    pod = SimulatedPod("a", EngineSettings(num_speculative_tokens=3), STEP_TIME_FORMULAS["dense-8b"])
    fleet = SimulatedFleet([pod], [kind], PoissonArrivals(4.0), scrape_settings=ScrapeSettings(60.0))
    samples = [
        parse_exposition(render_exposition(scrape.counters, "m", 0.0).encode())
        for scrape in fleet.run(900.0)
        if scrape.counters is not None
    ]
    increase = diff(samples[0], samples[-1])
    length, tokens_per_step = rates.acceptance_length(increase, Static(3)), rates.tokens_per_step(increase)
    assert isinstance(length, rates.Bounds)
    assert isinstance(tokens_per_step, float)
    assert length.is_exact
    assert low < length.low / tokens_per_step - 1 < high
    assert increase.speculation is not None
    received_tokens = increase.generation_tokens - increase.first_tokens
    assert received_tokens <= increase.request_steps + increase.speculation.accepted, "what was cut off nobody got"
