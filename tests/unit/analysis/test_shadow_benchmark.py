"""The rule on arrays, with which shadow evaluations are simulated, against the operator's own functions; and its traffic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import benchmarks.shadow
from aerie.analysis.paired.answers import AnswerCounts
from aerie.analysis.paired.plan import PairedPlan
from aerie.analysis.paired.state import PairBatch, PairedState, add_batches
from aerie.analysis.paired.sums import PairSums, time_slot_bucket
from aerie.analysis.paired.verdict import evaluate_pairs
from aerie.forecast.pairs_rule import check_times
from benchmarks._cell_file import CellFile, Figures
from benchmarks._shadow_model import (
    MAX_TOKENS,
    PROMPT_SPREADS,
    PairParts,
    PairStream,
    ShadowTraffic,
    arm_variance,
    log_steps_table,
)
from benchmarks._shadow_rule import Outcomes, decide
from benchmarks._shadow_simulation import CELLS, EFFECTS, MODULES, Cell, figures, summary, table_row

pytestmark = pytest.mark.slow

RUNS = 2
PLAN = PairedPlan(max_duration_seconds=400.0)


def batch_of(parts: PairParts, run: int, effect: float, number: int, period: tuple[float, float]) -> PairBatch:
    """Return the pairs of a run as an evaluator's batch, for a canary with this effect. `period`: in which they arrive evenly."""
    steps, seconds, slots = PairSums(), PairSums(), PairSums()
    times = np.linspace(*period, parts.bucket.shape[1], endpoint=False).tolist()
    for pair, bucket in enumerate(parts.bucket[run]):
        steps = steps.add_pair(
            int(bucket), float(parts.canary_steps[run, pair]) / (1 + effect), float(parts.control_steps[run, pair])
        )
        amounts = float(parts.canary_seconds[run, pair]) / (1 + effect), float(parts.control_seconds[run, pair])
        seconds, slots = seconds.add_pair(int(bucket), *amounts), slots.add_pair(time_slot_bucket(times[pair]), *amounts)
    return PairBatch(number, steps, seconds, slots, AnswerCounts(), {}, len(parts.bucket[run]), 0)


@pytest.mark.parametrize(
    "traffic",
    [
        ShadowTraffic(0.3, tenants=50),
        ShadowTraffic(0.3, shares_processors=True),
        ShadowTraffic(0.3, temperatures=(0, 1, 2)),
        ShadowTraffic(prompts=50, temperatures=(0, 1, 2)),
    ],
)
def test_array_rule_is_the_operators(traffic: ShadowTraffic) -> None:
    effects = (-0.3, 0.02)
    expected = decide(traffic, effects, PLAN, RUNS, np.random.default_rng(3))
    stream = PairStream(traffic, RUNS, np.random.default_rng(3))
    states = {(effect, run): PairedState() for effect in effects for run in range(RUNS)}
    ends: dict[tuple[float, int], tuple[str, float, float]] = {}
    pairs, previous_time = 0, 0.0
    for number, time in enumerate(check_times(PLAN.max_duration_seconds), 1):
        parts = stream.draw(round(time * traffic.pairs_per_second) - pairs, time)
        pairs += parts.bucket.shape[1]
        for key, state in states.items():
            if key not in ends:
                added = add_batches(state, "a", [batch_of(parts, key[1], key[0], number, (previous_time, time))])
                states[key], verdict = evaluate_pairs(added, replace(PLAN, max_duration_seconds=1e9), time)
                if verdict.outcome != "Continue":
                    ends[key] = (verdict.outcome, time / 60, pairs)
        previous_time = time if parts.bucket.shape[1] else previous_time
    for effect, outcomes in zip(effects, expected, strict=True):
        for run in range(RUNS):
            outcome, minutes, pairs_needed = ends.get((effect, run), ("Continue", np.nan, np.nan))
            assert bool(outcomes.rolled_back[run]) == (outcome == "Rollback")
            assert bool(outcomes.promoted[run]) == (outcome == "Promote")
            assert [outcomes.minutes[run], outcomes.pairs[run]] == pytest.approx([minutes, pairs_needed], nan_ok=True)
    assert len(ends) >= RUNS


@pytest.mark.parametrize("traffic", [cell.traffic for cell in CELLS if cell.counts and cell.rate != 20])
def test_an_equal_canary_is_equal_on_average(traffic: ShadowTraffic) -> None:
    parts = PairStream(traffic, 60, np.random.default_rng(1)).draw(600, 0.0)
    ratios = parts.canary_steps.sum(axis=1) / parts.control_steps.sum(axis=1)
    assert ratios.mean() == pytest.approx(1, abs=4 * ratios.std() / np.sqrt(len(ratios)))
    assert 0.002 < ratios.std() < 0.012


@pytest.mark.parametrize(("temperature", "correlation"), [(0, 0.90), (1, 0.40), (2, 0.25)])
def test_the_answers_to_a_prompt_are_correlated_as_measured(temperature: int, correlation: float) -> None:
    """A third of requests is of the first class; answers have 41 tokens."""
    first, second = log_steps_table()
    share = 1 / 3
    between = share * first.var() + (1 - share) * second.var() + share * (1 - share) * (first.mean() - second.mean()) ** 2
    between *= PROMPT_SPREADS[temperature] ** 2
    arm = arm_variance(np.array([temperature]), np.array([41.0]))[0]
    assert between / (between + arm) == pytest.approx(correlation, abs=0.04)


def test_copies_of_a_prompt_share_their_bucket_and_give_the_same_pair_at_temperature_0() -> None:
    parts = PairStream(ShadowTraffic(), 1, np.random.default_rng(1)).draw(2000, 0.0)
    pairs = parts.canary_steps + 1j * parts.control_steps
    values, counts = np.unique(pairs, return_counts=True)
    copies = [np.unique(parts.bucket[pairs == value]) for value in values[(counts > 2) & (values.real > 1)]]
    assert len(copies) >= 15
    assert all(len(buckets) == 1 for buckets in copies)
    assert parts.canary_steps.max() < MAX_TOKENS


def test_results_have_every_key_and_the_worst_cell_counts() -> None:
    wrong = figures(Outcomes(np.array([True, False]), np.array([False, True]), np.array([3.0, 5.0]), np.array([30.0, 50.0])))
    right = figures(Outcomes(np.zeros(2, bool), np.ones(2, bool), np.array([7.0, 9.0]), np.array([70.0, 90.0])))
    results = {cell: dict.fromkeys(EFFECTS, right) for cell in CELLS}
    results[CELLS[-1]] = dict.fromkeys(EFFECTS, wrong)  # too few prompts: it does not count
    worst = Cell(0.0, mixed=True, prompts=3000)
    results[worst] = {**dict.fromkeys(EFFECTS, right), 0.0: wrong, -0.02: wrong}
    keys = summary(results)
    assert set(keys) <= set((benchmarks.shadow.__doc__ or "").split())
    assert keys["runs"] == 2
    assert keys["aa_rollback_worst_pct"] == 50.0
    assert keys["m2_promote_worst_pct"] == 100.0
    assert keys["m3_rollback_worst_pct"] == 0.0
    assert keys["equal_undecided_worst_pct"] == 0.0
    assert keys["p3_median_prompts_min"] == 8.0
    row = table_row(worst, results[worst])
    assert row.startswith("| file of 3000 prompts, mixed temperatures | any |")
    assert row.endswith("| 50.0 / 50.0, 5.0 min, 50 pairs | 0.0 / 100.0, 8.0 min, 80 pairs |")


def test_a_run_continues_after_the_cells_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = figures(Outcomes(np.zeros(2, bool), np.ones(2, bool), np.array([7.0, 9.0]), np.array([70.0, 90.0])))
    by_effect = dict.fromkeys(EFFECTS, right)
    file = CellFile(tmp_path / "cells.json", Cell, MODULES, 2, benchmarks.shadow.SEED)
    for cell in CELLS[:-1]:
        file.add(cell, by_effect)

    def run_cells(_: object, cells: tuple[Cell, ...], runs: int, seed: int) -> Iterator[tuple[Cell, Figures]]:
        assert (cells, runs, seed) == (CELLS[-1:], 2, benchmarks.shadow.SEED)
        yield cells[0], by_effect

    monkeypatch.setattr(benchmarks.shadow, "run_cells", run_cells)
    monkeypatch.setenv("RUNS", "2")
    monkeypatch.setenv("PARTS", "sim")
    monkeypatch.setenv("CELLS", str(tmp_path / "cells.json"))
    assert benchmarks.shadow.measure()["runs"] == 2
