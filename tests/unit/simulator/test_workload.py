"""Traffic: rates, bursts and daily cycles have their parameters, lengths are bounded, sessions grow."""

from __future__ import annotations

import numpy as np
import pytest

from aerie_lab.engine.acceptance import CLASS_ACCEPTANCE
from aerie_lab.engine.workload import (
    DEFAULT_TRAFFIC_CLASSES,
    BurstArrivals,
    DiurnalArrivals,
    LengthDistribution,
    PoissonArrivals,
    TrafficClass,
    generate_turns,
)


def test_poisson_has_its_rate_and_variance() -> None:
    times = PoissonArrivals(5.0).draw_times(np.random.default_rng(1), 100.0, 2100.0)
    assert np.all(np.diff(times) >= 0)
    assert (times[0] >= 100.0, times[-1] < 2100.0) == (True, True)
    counts = np.histogram(times, bins=200)[0]
    assert counts.mean() == pytest.approx(50, rel=0.03)
    assert counts.var() == pytest.approx(counts.mean(), rel=0.35)


def test_bursts_vary_more_than_poisson() -> None:
    bursts = BurstArrivals(1.0, 20.0, mean_calm_seconds=300.0, mean_burst_seconds=30.0)
    times = bursts.draw_times(np.random.default_rng(1), 0.0, 50_000.0)
    counts = np.histogram(times, bins=5000)[0]
    assert len(times) / 50_000 == pytest.approx((1.0 * 300 + 20.0 * 30) / 330, rel=0.15)
    assert counts.var() > 5 * counts.mean()


def test_a_daily_cycle_has_its_peak() -> None:
    times = DiurnalArrivals(1.0, amplitude=0.8, peak_seconds=15 * 3600).draw_times(np.random.default_rng(1), 0.0, 86_400.0)
    by_hour = np.histogram(times, bins=24, range=(0, 86_400))[0]
    assert by_hour[14:16].mean() / 3600 == pytest.approx(1.8, rel=0.1)
    assert by_hour[2:4].mean() / 3600 == pytest.approx(0.2, rel=0.3)


def test_lengths_are_bounded_and_invalid_ones_are_rejected() -> None:
    drawn = LengthDistribution(100, 1.0, 50, 200).draw(np.random.default_rng(1), 1000)
    assert (min(drawn), max(drawn)) == (50, 200)
    assert LengthDistribution(100).draw(np.random.default_rng(1), 3) == [100] * 3
    with pytest.raises(ValueError, match="give a median above 0"):
        LengthDistribution(0)


def test_the_same_seed_gives_the_same_traffic() -> None:
    def drawn(seed: int) -> list[tuple[float, str, int, int, int]]:
        turns = generate_turns(DEFAULT_TRAFFIC_CLASSES, PoissonArrivals(1.0), 0.0, 4000.0, seed)
        return [(t.time, t.traffic_class.name, t.session, t.prompt_tokens, t.answer_tokens) for t in turns]

    assert drawn(1) == drawn(1) != drawn(2)
    assert [t[0] for t in drawn(1)] == sorted(t[0] for t in drawn(1))


def test_shares_are_kept_and_sessions_grow_up_to_the_longest() -> None:
    kinds = (
        TrafficClass(
            "a",
            CLASS_ACCEPTANCE["chat"],
            LengthDistribution(100),
            LengthDistribution(50),
            share=3,
            system_prompt_tokens=40,
            mean_turns=4,
        ),
        TrafficClass("b", CLASS_ACCEPTANCE["chat"], LengthDistribution(10), LengthDistribution(5), share=1),
    )
    turns = list(generate_turns(kinds, PoissonArrivals(2.0), 0.0, 3000.0, seed=1, max_session_tokens=1000))
    a = [turn for turn in turns if turn.traffic_class.name == "a"]
    assert len(a) / len(turns) == pytest.approx(0.75, abs=0.03)
    assert len(a) / len({turn.session for turn in a}) == pytest.approx(4, rel=0.25)
    assert {turn.prompt_tokens for turn in a} == {140 + 150 * n for n in range(6)}
    assert all(sum(tokens for _, tokens in turn.segments) == turn.prompt_tokens for turn in turns)
    assert {turn.prompt_tokens for turn in turns if turn.traffic_class.name == "b"} == {10}
