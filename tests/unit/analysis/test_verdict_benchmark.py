"""The benchmark of verdicts: its blocks have the documented dispersion, and some of its cells have plausible results."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aerie.analysis.criteria import TIME_PER_OUTPUT_TOKEN, TOKENS_PER_STEP, AnalysisPlan
from aerie.rollout.canary.analysis_run import build_block_rule
from benchmarks import _verdict_cells as simulated
from benchmarks import _verdict_model as model
from benchmarks import verdict
from benchmarks._verdict_model import FIELDS, Canary, Life, Traffic

CELLS = list(simulated.cells())


def count_ratio(counts: model.Floats, part: str, whole: str) -> model.Floats:
    """Return the ratio of two counts, by grid interval and pod."""
    return np.asarray(counts[..., FIELDS.index(part)] / counts[..., FIELDS.index(whole)])


@pytest.mark.parametrize(
    ("part", "whole", "of"),
    [
        ("decode_tokens", "request_steps", "per_step"),
        ("decode_seconds", "decode_tokens", "time"),
        ("first_token_seconds", "first_tokens", "first"),
    ],
)
@pytest.mark.parametrize("rate", [1.0, 20.0])
def test_blocks_have_the_documented_dispersion(part: str, whole: str, of: str, rate: float) -> None:
    random, traffic = np.random.default_rng(1), Traffic(rate=rate)
    shared = model.drifts(traffic, 3000 * traffic.grid, random)
    values = count_ratio(model.simulate(traffic, 8, shared, random), part, whole)
    apart = np.std(values[:, 0::2] / values[:, 1::2]) / math.sqrt(2)
    by_requests = (1 - model.FLOOR**2) / rate
    assert apart == pytest.approx(model.DISPERSIONS[of] * math.sqrt(by_requests + model.FLOOR**2), rel=0.06)


def test_more_tokens_per_step_need_fewer_drafts() -> None:
    """A canary with more tokens per step makes equally many tokens from fewer drafts."""
    random, traffic = np.random.default_rng(2), Traffic(rate=20.0)
    shared = model.drifts(traffic, 500 * traffic.grid, random)
    better = model.simulate(traffic, 4, shared, random, Canary(per_step=1.1))
    control = model.simulate(traffic, 4, shared, random)
    sums = {
        name: better[..., at].sum() / control[..., at].sum()
        for at, name in enumerate(FIELDS)
        if name not in ("failed_requests", "slow_output_requests")
    }
    assert sums["decode_tokens"] == pytest.approx(1.0, abs=0.01)
    assert sums["drafts"] == pytest.approx(1 / 1.1, abs=0.01)


def test_abandoned_requests_reduce_first_tokens() -> None:
    random, traffic = np.random.default_rng(3), Traffic(rate=10.0)
    shared = model.drifts(traffic, 60 * traffic.grid, random)
    canary = model.simulate(traffic, 2, shared, random, Canary(given_up=0.5, onset=60 * 60.0))
    begun = canary[..., FIELDS.index("first_tokens")].mean(axis=1)
    assert begun[30:].sum() / begun[:30].sum() == pytest.approx(0.5, abs=0.1)
    first_token_times = count_ratio(canary, "first_token_seconds", "first_tokens")
    assert first_token_times[:30].max() < 1 < first_token_times[30:].min()


def test_blocks_are_closed_by_the_rule() -> None:
    """A block continues until both arms have enough requests, and no request is lost."""
    random, traffic = np.random.default_rng(4), Traffic(rate=1 / 6, block=18.0, grid=6.0)
    shared = model.drifts(traffic, 3600.0, random)
    canary, control = (model.simulate(traffic, 1, shared, random) for _ in range(2))
    rule = build_block_rule(AnalysisPlan(block_seconds=traffic.block), 15.0)
    blocks = model.close(traffic, canary, control, rule)
    assert len(blocks) > 60
    for before, after in itertools.pairwise(blocks):
        assert before.end_time == after.start_time
    for block in blocks:
        assert block.end_time - block.start_time >= 18.0
        assert block.canary is not None
        assert rule.has_enough(block.canary)
    last = round(blocks[-1].end_time / traffic.grid)
    sides = [block.canary.counts.finished_requests for block in blocks if block.canary]
    assert sum(sides) == canary[:last, :, FIELDS.index("finished_requests")].sum()


def test_a_pod_is_complete_while_it_serves() -> None:
    life = Life(180.0, [600.0, 1000.0])
    assert [life.is_complete(at, at + 120.0) for at in (120.0, 180.0, 480.0, 600.0, 720.0, 780.0, 900.0)] == [
        False, True, False, False, False, True, False,
    ]  # fmt: skip
    assert [life.restarts(at) for at in (599.0, 600.0, 2000.0)] == [0, 1, 2]


def test_a_day_of_stable_pods_estimates_the_dispersions() -> None:
    calibration = simulated.day(Traffic(pods_sd=0.02), 3, 0, 1)
    dispersions = calibration.calibrate_plan(AnalysisPlan()).dispersions
    assert math.sqrt(dispersions[TOKENS_PER_STEP].variance) == pytest.approx(0.043, rel=0.1)
    assert math.sqrt(dispersions[TIME_PER_OUTPUT_TOKEN].variance) == pytest.approx(0.03, rel=0.1)
    assert dispersions[TOKENS_PER_STEP].inflation == pytest.approx(1.7, abs=0.8)
    assert dispersions[TIME_PER_OUTPUT_TOKEN].pod_effect_degrees_of_freedom == 2.0


def cell(key: str, title: str = "") -> simulated.Cell:
    return next(candidate for candidate in CELLS if candidate.key == key and title in candidate.title)


@pytest.mark.parametrize(
    ("which", "outcome"),
    [
        (cell("crash_promoted", "4 pods, each crashes every 20 min"), "RolledBack"),
        (cell("abort_promoted", "from minute 15, 50 %"), "RolledBack"),
        (cell("slow_with_objective_promoted", "x 2.0"), "RolledBack"),
        (cell("objective_broken_promoted", "10 %"), "RolledBack"),
        (cell("lighter_faster_rollback", "5 requests/s"), "Promoted"),
        (cell("better_promoted", "1 requests/s"), "Promoted"),
    ],
    ids=lambda value: value.key if isinstance(value, simulated.Cell) else None,
)
def test_cells_have_the_expected_outcome(which: simulated.Cell, outcome: str) -> None:
    calibrations = [simulated.day(Traffic(), 3, 0, 1)] if which.traffic == Traffic() else []
    assert [run_outcome for run_outcome, _, _ in simulated.run(which, range(3), calibrations, 1)] == [outcome] * 3


def test_a_canary_that_crashes_late_is_rolled_back_after_promotion() -> None:
    calibrations = [simulated.day(Traffic(), 3, 0, 1)]
    runs = simulated.run(replace(cell("crash_promoted"), pods=1), range(12), calibrations, 1)
    assert any(outcome == "RolledBack" and minutes > 32 and "processes" in why for outcome, minutes, why in runs)


def test_the_page_is_written_from_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = simulated.figures([("Promoted", 30.0, ""), ("RolledBack", 40.0, ""), ("Undecided", 240.0, "")])
    assert figures == pytest.approx(
        {"Promoted_pct": 100 / 3, "RolledBack_pct": 100 / 3, "Undecided_pct": 100 / 3, "minutes": 35.0}
    )
    monkeypatch.setattr(verdict, "_figures_by_cell", dict.fromkeys(CELLS, figures))
    monkeypatch.setattr(verdict, "ORACLES", 50)
    verdict.document(tmp_path)
    text = (tmp_path / "verdict-checks.md").read_text()
    assert text.count("\n| ") == len(verdict.WRONG_OUTCOMES) + 3
    assert "{" not in text
    assert set(verdict.WRONG_OUTCOMES) | {verdict.BETTER, verdict.UNLIKE_BETTER} == {row.key for row in CELLS}
